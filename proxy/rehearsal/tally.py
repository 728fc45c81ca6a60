"""What one lane came to: one row per request, and sums over requests and conversations."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from proxy.rehearsal.facts import Retention

WHOLE = "total"
"""What was too large where no single bucket was."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why requests were refused: ``scope`` (a bucket, or the whole) held ``used`` tokens, ``cap`` is the most."""

    scope: str
    used: int
    cap: int
    count: int = 1

    @property
    def text(self) -> str:
        """``bucket system holds 9,200 tokens, its cap is 8,000``."""
        if self.scope == WHOLE:
            return f"what may not be removed holds {self.used:,} tokens, there is room for {self.cap:,}"
        return f"bucket {self.scope} holds {self.used:,} tokens, its cap is {self.cap:,}"


@dataclass(frozen=True, slots=True)
class Refusals:
    """The reasons for which requests were refused, each once with the fullest case."""

    by_scope: Mapping[str, Refusal] = field(default_factory=dict)

    def __add__(self, other: "Refusals") -> "Refusals":
        result = dict(self.by_scope)
        for scope, new in other.by_scope.items():
            old = result.get(scope, new)
            fullest = max(old, new, key=lambda each: each.used - each.cap)
            count = new.count + (old.count if scope in result else 0)
            result[scope] = Refusal(scope, fullest.used, fullest.cap, count)
        return Refusals(result)

    def __iter__(self) -> Iterator[Refusal]:
        return iter(sorted(self.by_scope.values(), key=lambda each: (-each.count, each.scope)))


def refusals(why: Refusal | None) -> Refusals:
    """The sum of one reason, or of none."""
    return Refusals() if why is None else Refusals({why.scope: why})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request in one lane; tokens are uncalibrated, prices in the unit of the price list.

    ``before`` and ``after`` are the client's and the forwarded tokens, ``reused`` those of the longest common
    prefix with the forwarded request before it. ``broke`` says that the request did not begin with that one, ``acted``
    that edits were decided. ``cost`` is this prompt's, ``total`` and ``unmanaged`` cumulative. ``fits`` is whether
    prompt and answer fit the window, ``why`` what refused it; ``seconds`` is the planning.
    """

    number: int
    messages: int
    before: int
    after: int
    limit: int
    action: str
    zone: str
    acted: bool
    broke: bool
    applied: dict[str, int]
    layers: tuple[str, ...]
    buckets: dict[str, int]
    reused: int
    cost: float
    total: float
    unmanaged: float
    fits: bool
    seconds: float
    why: Refusal | None = None
    retention: Retention = field(default_factory=Retention)

    @property
    def reuse(self) -> float:
        """Share of the forwarded tokens that the request before began with."""
        return self.reused / self.after if self.after else 0.0

    @property
    def ratio(self) -> float:
        """Cumulative cost over that of the unmanaged requests, 1 before anything was paid."""
        return self.total / self.unmanaged if self.unmanaged else 1.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over requests.

    ``fit`` counts requests that were forwarded and fit the window, ``refused`` those that were not forwarded,
    ``failed`` those that could not be planned. ``batches`` are requests that did not begin with the one before.
    What was refused is in no sum of tokens or prices but ``before``, and ``left_out`` is its part of that.
    ``cost`` and ``unmanaged`` are prices of all prompts; ``peak`` is the largest ratio of the two, cumulative within a
    conversation and not before its first batch, ``early`` the largest before it.
    """

    conversations: int = 0
    requests: int = 0
    fit: int = 0
    refused: int = 0
    failed: int = 0
    batches: int = 0
    before: int = 0
    left_out: int = 0
    tokens: int = 0
    reused: int = 0
    largest: int = 0
    asked: int = 0
    cost: float = 0.0
    unmanaged: float = 0.0
    sliding: float = 0.0
    peak: float = 0.0
    early: float = 0.0
    seconds: float = 0.0
    slowest: float = 0.0
    why: Refusals = field(default_factory=Refusals)
    retention: Retention = field(default_factory=Retention)

    def add(self, other: "Tally") -> None:
        """Count another conversation, or another part of this one."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            largest = item.name in ("largest", "peak", "early", "slowest")
            setattr(self, item.name, max(mine, theirs) if largest else mine + theirs)

    @property
    def reuse(self) -> float:
        """Tokens of common prefixes over tokens forwarded."""
        return self.reused / self.tokens if self.tokens else 0.0

    @property
    def saved(self) -> int:
        """Tokens that were not sent of the requests that were."""
        return self.before - self.left_out - self.tokens

    @property
    def unanswered(self) -> int:
        """Requests that were refused or did not fit: nobody would have got an answer."""
        return self.requests - self.fit

    @property
    def ratio(self) -> float:
        """Cost over that of the same requests unmanaged; a comparison only where none is ``unanswered``."""
        return self.cost / self.unmanaged if self.unmanaged else 1.0

    @property
    def against_sliding(self) -> float:
        """Cost over that of a sliding window."""
        return self.cost / self.sliding if self.sliding else 1.0

    def values(self) -> dict[str, object]:
        """The figures for programs."""
        kept = self.retention
        return {
            "conversations": self.conversations,
            "requests": self.requests,
            "fit": self.fit,
            "refused": self.refused,
            "refused_by": [
                {"scope": each.scope, "used": each.used, "cap": each.cap, "requests": each.count} for each in self.why
            ],
            "failed": self.failed,
            "batches": self.batches,
            "tokens_unmanaged": self.before,
            "tokens": self.tokens,
            "tokens_saved": self.saved,
            "largest": self.largest,
            "prefix_reuse": round(self.reuse, 4),
            "cost": self.cost,
            "cost_saved": self.unmanaged - self.cost,
            "cost_against_unmanaged": None if self.unanswered else round(self.ratio, 4),
            "cost_against_sliding_window": None if self.unanswered else round(self.against_sliding, 4),
            "peak_cost_against_unmanaged": None if self.unanswered else round(self.peak, 4),
            "model_calls_asked": self.asked,
            "plan_ms_mean": round(1000 * self.seconds / self.requests, 3) if self.requests else 0.0,
            "plan_ms_max": round(1000 * self.slowest, 3),
            "facts": {
                "needed": kept.needed,
                "in_window": kept.kept,
                "recoverable": kept.recoverable,
                "stale": kept.stale,
            },
        }


def step_values(step: Step) -> dict[str, object]:
    """One step for programs."""
    return {
        "request": step.number,
        "messages": step.messages,
        "before": step.before,
        "after": step.after,
        "limit": step.limit,
        "action": step.action,
        "zone": step.zone,
        "acted": step.acted,
        "fits": step.fits,
        "refused_by": None
        if step.why is None
        else {"scope": step.why.scope, "used": step.why.used, "cap": step.why.cap},
        "applied": step.applied,
        "layers": list(step.layers),
        "buckets": step.buckets,
        "prefix_reuse": round(step.reuse, 4),
        "cost": step.cost,
        "cost_total": step.total,
        "cost_against_unmanaged": round(step.ratio, 4),
    }
