"""Whose tokens are whose: every token of a request is in exactly one bucket, and counts against one cap."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from policies.budget import BUCKETS, Budget
from policies.messages import HEAD_ROLES, RESULT_ROLES, Message, Transcript
from policies.settings import Bucket, ContextSettings, Memory

BLOAT = 0.30
BLOAT_OVER_CAP = 1.25
MATCHED = 1_000
"""Characters of a message that a pattern of memory is matched against."""


@dataclass(frozen=True, slots=True)
class Summed(Transcript):
    """A transcript whose uncalibrated tokens by role are known, so that a long one costs no more than a short one."""

    by_role: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Uncalibrated tokens of the whole request as the client sent it."""
        return sum(self.by_role.values()) + self.tools + self.priming


def tokens_by_role(messages: Iterable[Message], before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Uncalibrated tokens of messages by their role, added to those ``before`` them."""
    result = dict(before or {})
    for message in messages:
        result[message.role] = result.get(message.role, 0) + message.tokens
    return result


def raw_buckets(transcript: Transcript) -> dict[str, int]:
    """Uncalibrated tokens by bucket of a request as the client sent it; they sum to its tokens."""
    by_role = transcript.by_role if isinstance(transcript, Summed) else tokens_by_role(transcript.messages)
    result = dict.fromkeys(BUCKETS, 0)
    result["tools"] = transcript.tools
    result["history"] = transcript.priming
    for role, tokens in by_role.items():
        result[_bucket_of(role)] += tokens
    for index in transcript.memory:
        message = transcript.messages[index]
        result[_bucket_of(message.role)] -= message.tokens
        result["memory"] += message.tokens
    return result


def _bucket_of(role: str) -> str:
    if role in HEAD_ROLES:
        return "system"
    return "tool_outputs" if role in RESULT_ROLES else "history"


def find_memory(transcript: Transcript, memory: Memory) -> frozenset[int]:
    """Indices of the messages that carry memory: by the beginning of the text or the message's name.

    What a tool returns is never memory, whatever it says.
    """
    found = set[int]()
    for index, message in enumerate(transcript.messages):
        if message.is_result:
            continue
        body = transcript.read(index)
        text = body.text.lstrip()
        by_text = text.startswith(memory.tags) or any(re.match(p, text[:MATCHED]) for p in memory.patterns)
        if by_text or body.name in memory.names:
            found.add(index)
    return frozenset(found)


def calibrated(buckets: Mapping[str, int], budget: Budget) -> dict[str, int]:
    """What :meth:`Budget.estimate_each` gives, without a step for buckets that are empty."""
    result: dict[str, int] = {}
    before = reported = 0
    for name, tokens in buckets.items():
        if not tokens:
            result[name] = 0
            continue
        before += tokens
        upto = budget.estimate(before)
        result[name] = upto - reported
        reported = upto
    return result


def charged(buckets: Mapping[str, int], rules: Mapping[str, Bucket]) -> Mapping[str, int]:
    """Tokens by the bucket whose cap they count against; the sum stays the same."""
    if not rules:
        return buckets
    result = dict.fromkeys(buckets, 0)
    for name, tokens in buckets.items():
        rule = rules.get(name)
        target = rule.charge_to if rule is not None and rule.charge_to in result else name
        result[target or name] += tokens
    return result


def is_over(name: str, tokens: int, budget: Budget) -> bool:
    """Whether a bucket of so many calibrated tokens is above its cap; an exact fit is not."""
    cap = budget.caps.get(name)
    return cap is not None and tokens > cap


def is_soft(name: str, tokens: int, rules: Mapping[str, Bucket], budget: Budget) -> bool:
    """Whether a bucket of so many calibrated tokens has reached the share of its cap that warns."""
    cap = budget.caps.get(name)
    return cap is not None and tokens >= math.ceil(round(rules[name].soft * cap, 6))


def bloat_limit(budget: Budget, least: float = BLOAT) -> float:
    """The share of a request that tool results may take before an operator hears of it: ``least``, or 1.25 times the
    share that the policy gives them where that is more."""
    cap = budget.caps.get("tool_outputs", 0)
    return max(least, BLOAT_OVER_CAP * cap / budget.window)


def refuses(settings: ContextSettings, name: str) -> bool:
    """Whether a request is to be refused while this bucket is above its cap."""
    rule = settings.buckets.get(name)
    return rule is not None and rule.on_overflow == "reject" and settings.enforce == "bucket"
