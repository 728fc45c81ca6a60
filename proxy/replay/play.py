"""One conversation played in scenarios: what each forwards is compared with what it forwarded before, and priced.

Compactions are the moments at which a policy took something out, and what each of them left.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from policies.effects import step
from policies.ledger import Cut, PlannedMessage
from policies.messages import ToolCall
from policies.quality.advise import TokenPrices, request_cost
from policies.quality.coverage import Contexts, Coverage, contexts_of, coverage_of, questions_for
from policies.quality.fidelity import Fidelity, Terms, evaluate
from policies.settings import ContextSettings, NoteTaking
from proxy.effects.perform import Ask, drive
from proxy.replay.scenarios import (
    SLIDING,
    UNMANAGED,
    Conditions,
    Forwarded,
    Refusal,
    Scenario,
    SlidingWindow,
    Unmanaged,
    scenario_of,
)
from proxy.replay.script import Recording, Retention, Script, ScriptRequest, judge
from proxy.store import Store
from proxy.wire.raw import Raw

LARGEST = frozenset({"largest", "peak", "early", "slowest"})
"""Figures of a tally of which the largest counts; all others are sums."""
SHOWN = ("messages", "before", "after", "limit", "action", "zone", "acted", "fits")
"""Fields of a step that are told as they are."""


@dataclass(slots=True, kw_only=True)
class Step:
    """One request in one scenario; tokens are uncalibrated, prices in the unit of the price list.

    ``reused`` are the tokens of the longest common prefix with the forwarded request before it, ``broke``: it did not
    begin with that one. ``cost`` is this prompt's, ``total`` and ``unmanaged`` are cumulative. ``why`` is what refused
    it, ``seconds`` the planning, ``asked`` how often a model was asked.
    """

    messages: int
    before: int
    after: int
    limit: int
    action: str
    zone: str
    acted: bool
    broke: bool
    applied: Mapping[str, int]
    layers: tuple[str, ...]
    buckets: Mapping[str, int]
    reused: int
    cost: float
    fits: bool
    seconds: float
    asked: int
    why: Refusal | None
    retention: Retention
    number: int = 0
    total: float = 0.0
    unmanaged: float = 0.0

    @property
    def reuse(self) -> float:
        return self.reused / self.after if self.after else 0.0

    @property
    def ratio(self) -> float:
        return self.total / self.unmanaged if self.unmanaged else 1.0

    def values(self) -> dict[str, object]:
        why = self.why
        return {
            "request": self.number,
            **{name: getattr(self, name) for name in SHOWN},
            "refused_by": None if why is None else {"scope": why.scope, "used": why.used, "cap": why.cap},
            "applied": dict(self.applied),
            "layers": list(self.layers),
            "buckets": dict(self.buckets),
            "prefix_reuse": round(self.reuse, 4),
            "cost": self.cost,
            "cost_total": self.total,
            "cost_against_unmanaged": round(self.ratio, 4),
        }


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over requests.

    ``fit`` counts requests that were forwarded and fit the window, ``batches`` those that did not begin with the one
    before. What was refused is in no sum of tokens or prices but ``before``, and ``left_out`` is its part of that.
    ``peak`` is the largest ratio of ``cost`` to ``unmanaged``, cumulative within a conversation and not before its
    first batch, ``early`` the largest before it.
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
    why: list[Refusal] = field(default_factory=list)
    retention: Retention = field(default_factory=Retention)

    def add(self, other: "Tally") -> None:
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(mine, theirs) if item.name in LARGEST else mine + theirs)

    @property
    def reuse(self) -> float:
        return self.reused / self.tokens if self.tokens else 0.0

    @property
    def saved(self) -> int:
        return self.before - self.left_out - self.tokens

    @property
    def unanswered(self) -> int:
        return self.requests - self.fit

    @property
    def ratio(self) -> float:
        """A comparison only where none is ``unanswered``."""
        return self.cost / self.unmanaged if self.unmanaged else 1.0

    @property
    def against_sliding(self) -> float:
        return self.cost / self.sliding if self.sliding else 1.0

    def refusals(self) -> list[Refusal]:
        """Each scope that refused requests once, at its fullest, with how often; the most frequent first."""
        by_scope: dict[str, list[Refusal]] = {}
        for each in self.why:
            by_scope.setdefault(each.scope, []).append(each)
        found = [
            replace(max(same, key=lambda each: each.used - each.cap), count=len(same)) for same in by_scope.values()
        ]
        return sorted(found, key=lambda each: (-each.count, each.scope))

    def values(self) -> dict[str, object]:
        kept, is_compared = self.retention, not self.unanswered
        return {
            "conversations": self.conversations,
            "requests": self.requests,
            "fit": self.fit,
            "refused": self.refused,
            "refused_by": [
                {"scope": each.scope, "used": each.used, "cap": each.cap, "requests": each.count}
                for each in self.refusals()
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
            "cost_against_unmanaged": round(self.ratio, 4) if is_compared else None,
            "cost_against_sliding_window": round(self.against_sliding, 4) if is_compared else None,
            "peak_cost_against_unmanaged": round(self.peak, 4) if is_compared else None,
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


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    name: str
    tally: Tally
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    id: str
    line: int
    window: int
    scenarios: tuple[ScenarioResult, ...]


async def replay(
    script: Script,
    policies: Sequence[ContextSettings],
    conditions: Conditions,
    prices: TokenPrices,
    store: Store,
    *,
    keep_steps: bool = False,
) -> Replayed:
    """Under each policy; ``store`` is where policies keep the conversation meanwhile.

    The window of unmanaged requests and of the sliding window is the first policy's. Unmanaged requests cost what they
    would cost a model with a window that is large enough.
    """
    budget = conditions.budget(policies[0] if policies else ContextSettings())
    named: list[tuple[str, Scenario]] = [(UNMANAGED, Unmanaged(budget)), (SLIDING, SlidingWindow(budget))]
    named += [
        (settings.name, scenario_of(settings, conditions, store, number)) for number, settings in enumerate(policies)
    ]
    room = budget.window - budget.reserve
    meters = [_Meter(script, scenario, prices, room=room, keep_steps=keep_steps) for _, scenario in named]
    for request in script.requests:
        steps = [await meter.play(request) for meter in meters]
        for meter, one in zip(meters, steps, strict=True):
            meter.count(one, request, unmanaged=steps[0].cost, sliding=steps[1].cost)
    for _, scenario in named:
        await scenario.close()
    results = tuple(ScenarioResult(n, m.tally, tuple(m.steps)) for (n, _), m in zip(named, meters, strict=True))
    return Replayed(id=script.recording.id, line=script.recording.line, window=budget.window, scenarios=results)


class _Meter:
    def __init__(self, script: Script, scenario: Scenario, prices: TokenPrices, *, room: int, keep_steps: bool) -> None:
        self.tally = Tally(conversations=1)
        self.steps: list[Step] = []
        self._script = script
        self._scenario = scenario
        self._prices = prices
        self._room = room
        self._keep = keep_steps
        self._sent: list[Raw] = []
        self._archived: set[int] = set()

    async def play(self, request: ScriptRequest) -> Step:
        script, length = self._script, request.length
        started = time.perf_counter()
        sent = await self._scenario.forward(script, length)
        seconds = time.perf_counter() - started
        self._archived.update(sent.removed)
        reused, broke = self._compare(sent)
        pieces, archived, went = sent.pieces or (), self._archived, sent.pieces is not None
        return Step(
            messages=length,
            before=script.transcript(length).tokens,
            after=sent.tokens if went else 0,
            limit=sent.limit,
            action=sent.action,
            zone=sent.zone,
            acted=sent.new,
            broke=broke,
            applied=sent.applied,
            layers=sent.layers,
            buckets=script.buckets(pieces, priming=script.transcript(0).priming) if went and self._keep else {},
            reused=reused,
            cost=request_cost(self._prices, tokens=sent.tokens, cached=reused) if went else 0.0,
            fits=went and sent.tokens <= self._room,
            seconds=seconds,
            asked=sent.asked,
            why=sent.why,
            retention=judge(script, request.facts, length=length, sent=pieces, archived=archived),
        )

    def _compare(self, sent: Forwarded) -> tuple[int, bool]:
        if sent.pieces is None:
            return 0, False
        array = self._script.rendered(sent.pieces)
        same = 0
        for old, new in zip(self._sent, array, strict=False):
            if old is not new and bytes(old) != bytes(new):
                break
            same += 1
        broke = same < len(self._sent)
        tools = self._script.tools if self._sent else 0
        self._sent = array
        return tools + sum(piece.tokens for piece in sent.pieces[:same]), broke

    def count(self, step: Step, request: ScriptRequest, *, unmanaged: float, sliding: float) -> None:
        tally = self.tally
        if not request.counts:
            tally.retention += step.retention
            return
        is_refused = step.action == "refused"
        one = Tally(
            requests=1,
            fit=int(step.fits),
            refused=int(is_refused),
            failed=int(step.action == "failed"),
            batches=int(step.broke),
            before=step.before,
            left_out=step.before if is_refused else 0,
            tokens=step.after,
            reused=step.reused,
            largest=step.after,
            asked=step.asked,
            cost=step.cost,
            unmanaged=0.0 if is_refused else unmanaged,
            sliding=0.0 if is_refused else sliding,
            seconds=step.seconds,
            slowest=step.seconds,
            why=[] if step.why is None else [step.why],
            retention=step.retention,
        )
        tally.add(one)
        if tally.batches:
            tally.peak = max(tally.peak, tally.ratio)
        else:
            tally.early = max(tally.early, tally.ratio)
        if self._keep:
            step.number, step.total, step.unmanaged = tally.requests, tally.cost, tally.unmanaged
            self.steps.append(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    request: int
    contexts: Contexts
    facts: tuple[tuple[str, ...], ...] = ()
    later: tuple[ToolCall, ...] = ()
    archived: str = ""
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluated:
    compaction: Compaction
    coverage: Coverage
    fidelity: Fidelity = field(default_factory=Fidelity)


async def compactions_of(script: Script, scenario: Scenario) -> AsyncIterator[Compaction]:
    archived: set[int] = set()
    for request in script.requests:
        forwarded = await scenario.forward(script, request.length)
        archived |= set(forwarded.removed)
        if not forwarded.new or forwarded.pieces is None:
            continue
        length = request.length
        needed = [f for f in script.recording.facts if not f.needed_at or any(at >= length for at in f.needed_at)]
        yield Compaction(
            request=length,
            contexts=contexts_of(script.transcript(length), forwarded.pieces),
            facts=tuple(fact.needles for fact in needed),
            later=tuple(c for index in range(length, len(script.recording.values)) for c in script.read(index).calls),
            archived="\n".join(script.text(index) for index in sorted(archived)),
            layers=forwarded.layers,
        )
    await scenario.close()


def archived_pair(recording: Recording, cut: Cut, *, script: Script) -> Compaction:
    length = len(recording.values)
    return Compaction(
        request=0,
        contexts=contexts_of(script.transcript(length), (PlannedMessage(None, cut.tokens, cut.text),)),
        archived="\n".join(script.text(index) for index in range(length)),
        layers=(cut.layer,),
    )


async def judge_compaction(
    compaction: Compaction, *, count: int, tools: NoteTaking, ask: Ask | None = None, terms: Terms | None = None
) -> Evaluated:
    contexts, later = compaction.contexts, compaction.later
    coverage = coverage_of(contexts, facts=compaction.facts, later=later, archived=compaction.archived, tools=tools)
    if ask is None or terms is None:
        return Evaluated(compaction, coverage)
    recorded = tuple(values[0] for values in compaction.facts if len(values) == 1)
    questions = questions_for(contexts.sources, count=count, later=later, recorded=recorded, tools=tools)
    flow = evaluate(contexts.original, contexts.compacted, questions=questions, terms=terms)
    return Evaluated(compaction, coverage, await drive(flow, step(flow), ask))
