"""Whose tokens are whose: every token of a request is in exactly one bucket, and counts against one cap."""

import math
from collections.abc import Mapping

from policies.budget import BUCKETS, Budget
from policies.messages import HEAD_ROLES, RESULT_ROLES, Transcript
from policies.settings import Bucket, ContextSettings, Memory

BLOAT = 0.30
BLOAT_OVER_CAP = 1.25


def raw_buckets(transcript: Transcript) -> dict[str, int]:
    """Uncalibrated tokens by bucket of a request as the client sent it; they sum to its tokens."""
    by_role: dict[str, int] = {}
    for message in transcript.messages:
        by_role[message.role] = by_role.get(message.role, 0) + message.tokens
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
    """Indices of the messages that carry memory: by a tag at the beginning of the text or by the message's name.

    What a tool returns is never memory, whatever it says.
    """
    found = set[int]()
    for index, message in enumerate(transcript.messages):
        if message.is_result:
            continue
        body = transcript.read(index)
        if body.name in memory.names or (memory.tags and body.text.lstrip().startswith(memory.tags)):
            found.add(index)
    return frozenset(found)


def charged(buckets: Mapping[str, int], rules: Mapping[str, Bucket]) -> dict[str, int]:
    """Tokens by the bucket whose cap they count against; the sum stays the same."""
    if not rules:
        return dict(buckets)
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


def bloat_limit(budget: Budget) -> float:
    """The share of a request that tool results may take before an operator hears of it: 30 %, or 1.25 times the
    share that the policy gives them where that is more."""
    cap = budget.caps.get("tool_outputs", 0)
    return max(BLOAT, BLOAT_OVER_CAP * cap / budget.window)


def refuses(settings: ContextSettings, name: str) -> bool:
    """Whether a request is to be refused while this bucket is above its cap."""
    rule = settings.buckets.get(name)
    return rule is not None and rule.on_overflow == "reject" and settings.enforce == "bucket"
