"""Which eviction policy recorded traffic suggests, and how much of the window each bucket of it
takes.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from policies.messages import ToolCall, Transcript

FEW_RESULTS = 0.10
MANY_RESULTS = 0.50
MANY_REPEATS = 0.20
STEPS_WITHOUT_A_USER = 4
PERCENTILE = 0.90
STEP_PERCENT = 5
UNNAMED = "unknown"
REPEATED = "repeated outputs"


@dataclass(slots=True)
class Traffic:
    """Conversations as they were recorded.

    ``turns`` are messages of users, ``marked`` messages that are not to be lost. ``requests`` has
    the tokens of each request by bucket, ``tools`` the tokens of results by tool, ``repeated``
    those of results that were there before or that a call gave which was made before.
    """

    conversations: int = 0
    turns: int = 0
    marked: int = 0
    tokens: int = 0
    repeated: int = 0
    requests: list[Counter[str]] = field(default_factory=list)
    tools: Counter[str] = field(default_factory=Counter)

    def add(self, whole: Transcript, *, requests: tuple[int, ...]) -> None:
        """One conversation; ``requests`` are how many of its messages each request had."""
        self.conversations += 1
        self.turns += sum(message.role == "user" for message in whole.messages)
        self.marked += sum(message.keep is True for message in whole.messages)
        self._add_results(whole)
        used = Counter({"tools": whole.tools})
        self.tokens += whole.tools
        ends = set(requests)
        for length, message in enumerate(whole.messages, start=1):
            used[message.bucket] += message.tokens
            self.tokens += message.tokens
            if length in ends:
                self.requests.append(used.copy())

    def _add_results(self, whole: Transcript) -> None:
        calls: dict[str, ToolCall] = {}
        seen: set[object] = set()
        for index, message in enumerate(whole.messages):
            calls |= {call.id: call for call in whole.read(index).calls}
            if not message.is_result:
                continue
            call = calls.get(message.answers or "")
            name = UNNAMED if call is None else call.name
            self.tools[name] += message.tokens
            key = message.digest if call is None else (call.name, call.arguments)
            if message.digest in seen or key in seen:
                self.repeated += message.tokens
            seen |= {message.digest, key}

    @property
    def results_share(self) -> float:
        return self.tools.total() / self.tokens if self.tokens else 0.0

    @property
    def repeated_share(self) -> float:
        return self.repeated / self.tools.total() if self.tools.total() else 0.0

    def caps(self, usable: int) -> dict[str, float]:
        """For each bucket the share of ``usable`` tokens that nine of ten requests keep to, in
        steps of 5 %.

        A bucket that takes the whole window or more is left out: it needs no cap but the window.
        """
        found = {}
        for bucket in sorted({name for request in self.requests for name in request}):
            sizes = sorted(each[bucket] for each in self.requests)
            tokens = sizes[math.ceil(PERCENTILE * len(sizes)) - 1]
            percent = STEP_PERCENT * math.ceil(100 * tokens / usable / STEP_PERCENT)
            if 0 < percent < 100:
                found[bucket] = percent / 100
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """``evict`` are the parameters of the layer of that name; ``then`` is what to consider
    later.
    """

    kind: str
    reason: str
    evict: Mapping[str, str]
    then: str


CHOICES: Mapping[str, tuple[Mapping[str, str], str]] = MappingProxyType(
    {
        "chat": ({"scorer": "fifo"}, "nothing else is needed"),
        "exploration": ({"scorer": "type_based"}, "lru, if dead ends accumulate"),
        "heterogeneous": ({"scorer": "priority"}, "hybrid, after its weights are tuned"),
        REPEATED: ({"scorer": "type_based"}, "priority"),
        "mission-critical": (
            {"scorer": "hybrid", "weights": "equal"},
            "other weights, by what is recalled",
        ),
    }
)
"""By kind of traffic what to start with, and what to consider then
(docs/development/requirements.md, row A0.40).
"""


def recommend(traffic: Traffic) -> Recommendation:
    results = traffic.results_share
    repeats = traffic.repeated_share
    steps = len(traffic.requests) / max(1, traffic.turns)
    share = f"{results:.0%} of the tokens are tool results"
    if traffic.marked >= max(1, traffic.conversations):
        kind = "mission-critical"
        reason = (
            f"{traffic.marked} messages in {traffic.conversations} conversations are marked as not"
            " to be lost"
        )
    elif results >= FEW_RESULTS and repeats >= MANY_REPEATS:
        kind = REPEATED
        reason = f"{repeats:.0%} of the tool results' tokens repeat an earlier result or call"
    elif results < FEW_RESULTS:
        kind = "chat"
        reason = f"only {share}"
    elif results >= MANY_RESULTS or steps >= STEPS_WITHOUT_A_USER:
        kind = "exploration"
        reason = f"{share}, {steps:.1f} requests to a user message"
    else:
        kind = "heterogeneous"
        reason = f"{share} among {traffic.turns} user messages"
    evict, then = CHOICES[kind]
    return Recommendation(kind=kind, reason=reason, evict=evict, then=then)
