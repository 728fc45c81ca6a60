"""plan(): the one entry. It reads top to bottom.

group → budget → replay ledger → pressure → (pass | layers) → rungs → recall → invariants → Decision

A layer runs only while the draft is above its target. What it did is kept if it achieved what the layer asks for
(``min_savings``, ``must_reach``), else dropped, so that the next layer starts from where it started. If the layers do
not get the request under what may be forwarded, the rungs do: the same compaction once more with a quarter of the
room, a new window, the oldest units dropped with a note, the middle of the newest message clipped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from policies.bounds import Bounds, bounds_for
from policies.checkpoint import Checkpoint
from policies.draft import ConversationState, Draft, broken_rules, replay, untouched
from policies.effects import Flow, Offload
from policies.errors import BucketExceeded, BudgetUnreachable, InvalidConversation
from policies.ledger import WINDOWS, Condensed, Cut, Edit, PlannedMessage
from policies.limits import (
    Limits,
    TokenBudget,
    charged,
    find_memory,
    ingest_cap_for,
    is_over,
    layers_of,
    limit_for,
    limits_for,
    refuses,
    target_for,
)
from policies.messages import Transcript
from policies.pressure import (
    UNKNOWN,
    Event,
    Growth,
    PressureReading,
    PressureReport,
    Trend,
    WindowPressure,
    conclude,
    is_urgent,
    measure,
)
from policies.recalling import Elsewhere, Pages, may_recall, recall
from policies.settings import ClientEdits, ContextSettings, Layer, amount
from policies.strategies import (
    STRATEGIES,
    Compact,
    DropOldest,
    Reasoning,
    Rollover,
    cap_results,
    clear_results,
    clip,
    evict_marked,
    resume,
    shorten_standing,
)
from policies.text.segments import Readings
from policies.tokens import TokenCounter
from policies.turns import parse_turn_boundaries, protect, units

MAX_NAMED = 5
HARDER_SHARE = 0.25
MIN_EARLY = 0.05
MIN_STUCK = 0.20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """What one layer did: uncalibrated tokens before and after, pieces changed, whether it was kept.

    ``scope`` is the bucket that it was about, ``total`` for the whole request; ``reason`` says why a layer did
    nothing, or less than asked, although it was due; a ``rung`` is what helped where the layers did not. ``condensed``
    is what became of each message that was to be put in shorter words, also where the layer's work was not kept.
    ``scanned`` are the tokens of all tool results that a layer looked at, ``prunable`` those that it could take; None
    for one that looks at something else.
    """

    layer: str
    before: int
    after: int
    units: int
    kept: bool
    ref: str | None = None
    scope: str = "total"
    reason: str = ""
    rung: bool = False
    condensed: tuple[Condensed, ...] = ()
    scanned: int | None = None
    prunable: int | None = None


@dataclass(slots=True)
class PlanWork:
    """A draft as layer after layer leaves it, and what each did."""

    draft: Draft
    trail: tuple[LayerReport, ...] = ()

    def take(self, layer: Layer | str, done: Draft, *, kept: bool, reason: str = "", rung: bool = False) -> LayerReport:
        """Note what a layer did, and go on from there if it is ``kept``."""
        before, layer = self.draft, Layer(strategy=layer) if isinstance(layer, str) else layer
        gone = len(before.pieces) - len(done.pieces)
        report = LayerReport(
            layer=layer.strategy,
            before=before.tokens,
            after=done.tokens,
            units=max(gone, len(done.edits) - len(before.edits), len(done.pruned) - len(before.pruned)),
            kept=kept,
            ref=done.cut.ref if done.cut is not None and done.cut is not before.cut else None,
            scope=layer.scope,
            reason=reason,
            rung=rung,
            condensed=done.condensed[len(before.condensed) :],
        )
        self.trail += (report,)
        self.draft = done if kept else before
        return report

    def take_if_changed(self, layer: Layer | str, done: Draft) -> None:
        """The same for what is kept wherever it did something."""
        if done is not self.draft:
            self.take(layer, done, kept=True)


class Action(StrEnum):
    """What is to be done with a request: forward as it came, with known edits, or with new ones."""

    PASS = "pass"  # noqa: S105 - a word, not a password
    REPLAY = "replay"
    EDIT = "edit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the planner answered, and how it got there.

    ``pieces`` is the array to forward, None where the client's bytes are to go up unchanged. ``before``,
    ``after`` and ``limit`` are calibrated tokens of the raw request, of the forwarded one, and W - R - H.
    ``edits`` and ``cut`` are new and have to be stored before the request is forwarded; ``removed`` are the
    indices of messages whose originals the archive needs. ``applied`` counts the edits in the array by kind,
    ``pruned`` are the names of tools whose definitions are left out, ``window_id`` is the number of the window that
    the request begins. ``trend`` is what the next request of the
    conversation is to be planned with, ``events`` what an operator may want to hear of.
    """

    action: Action
    pieces: tuple[PlannedMessage, ...] | None
    before: int
    after: int
    limit: int
    raw_after: int
    pressure: WindowPressure
    buckets: dict[str, int]
    applied: dict[str, int]
    edits: tuple[Edit, ...] = ()
    cut: Cut | None = None
    removed: tuple[int, ...] = ()
    covered: tuple[int, ...] = ()
    checkpoint: str | None = None
    trail: tuple[LayerReport, ...] = ()
    pruned: tuple[str, ...] = ()
    window_id: int | None = None
    reading: PressureReading | None = None
    trend: Trend = UNKNOWN
    events: tuple[Event, ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether there is something to store."""
        return bool(self.edits) or self.cut is not None


def plan(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState,
    counter: TokenCounter,
    trend: Trend = UNKNOWN,
    at: float | None = None,
    ceiling: int | None = None,
    summarizer_input: int | None = None,
    readings: Readings | None = None,
    limits: Limits | None = None,
    pages: Pages | None = None,
    elsewhere: Sequence[Elsewhere] = (),
    edits: ClientEdits | None = None,
) -> Flow[Decision]:
    """What to do with one request.

    ``trend`` is what the conversation's earlier requests said about its growth, ``at`` the time of this one in
    seconds of any clock. ``ceiling`` (uncalibrated tokens) is set after an upstream refused what the budget allowed,
    ``summarizer_input`` is the most that the summariser reads at once, ``readings`` what earlier compactions
    have read, ``limits`` those of these settings in this budget if they are known already,
    ``pages`` what was searched before, ``elsewhere`` what the archive has beside the client's array, ``edits`` what the
    client asks to have taken out.
    Raises BudgetUnreachable
    if the protected content alone does not fit, BucketExceeded if the policy refuses a full bucket,
    InvalidConversation if a layer made an array that an upstream would reject.
    """
    limits = limits or limits_for(settings, budget)
    known = known.at(len(transcript.chain)) if known.triggered or known.checkpoint is not None else known
    if settings.memory.is_declared:
        transcript = replace(transcript, memory=find_memory(transcript, settings.memory))
    grown = measure(transcript, limits=limits, trend=trend, at=at)
    asked = (known.resumed is not None and not known.cuts) or _is_wanted(settings, known)
    quiet = not known.triggered and not asked and ceiling is None and not _may_edit(transcript, grown, edits, budget)
    if quiet and _is_quiet(transcript, grown, limits=limits):
        return _passed(transcript, grown, limits=limits)
    bounds = bounds_for(
        transcript,
        settings=settings,
        budget=budget,
        known=known,
        counter=counter,
        ceiling=ceiling,
        summarizer_input=summarizer_input,
        readings=readings,
    )
    work = PlanWork(replay(bounds.transcript, known, bounds.protection))
    # the provider may still have the conversation's prefix in its cache
    warm = trend.at is not None and at is not None and at - trend.at <= settings.cache_ttl
    bounds = replace(bounds, standing=work.draft.pieces, warm=warm)
    if asked:
        yield Offload()
        yield from _run_asked(work, bounds)
    if (known.triggered or settings.ingest.from_start) and _has_large_new_result(bounds):
        yield Offload()
        work.draft = cap_results(work.draft, bounds, new_only=True)
    if edits is not None and not _is_repeat(work.draft, bounds):
        yield Offload()
        yield from run_client_edits(work, bounds, edits)
    bounds = _hurried(bounds, grown, work.draft, limits=limits)
    if settings.when_full == "manage" and is_due(work.draft, bounds) and not _is_repeat(work.draft, bounds):
        yield Offload()
        before = work.draft.tokens
        work.take_if_changed("clip", shorten_standing(work.draft, bounds))
        bounds = replace(bounds, fixed=bounds.fixed - (before - work.draft.tokens))
        yield from run_layers(work, bounds)
        yield from run_rungs(work, bounds)
    if may_recall(work.draft, bounds):
        if not work.trail:
            yield Offload()
        work.take_if_changed("recall", recall(work.draft, bounds, pages=pages or Pages(), elsewhere=elsewhere))
    return _decide(_checked(work.draft, bounds), grown, limits=limits, trail=work.trail)


def trim(transcript: Transcript, *, settings: ContextSettings, budget: TokenBudget, counter: TokenCounter) -> Decision:
    """The request with its oldest units dropped until it fits: what is done when planning itself failed."""
    bounds = bounds_for(transcript, settings=settings, budget=budget, known=ConversationState(), counter=counter)
    draft = untouched(bounds.transcript)
    if not bounds.soft_fits(draft.tokens):
        draft = DropOldest().apply(draft, replace(bounds, aim=bounds.budget.soft_limit))
    if draft.tokens > bounds.hard_limit:
        draft = clip(draft, bounds, target=bounds.hard_limit)
    limits = limits_for(settings, budget)
    grown = measure(transcript, limits=limits, trend=UNKNOWN, at=None)
    return _decide(_checked(draft, bounds), grown, limits=limits)


def _passed(transcript: Transcript, grown: Growth, *, limits: Limits) -> Decision:
    """The decision to forward a request as it came."""
    seen = conclude(grown, limits=limits, tokens=grown.tokens, buckets=grown.buckets)
    return Decision(
        action=Action.PASS,
        pieces=None,
        before=grown.raw,
        after=grown.raw,
        limit=limits.usable,
        raw_after=grown.tokens,
        pressure=seen.pressure,
        buckets=grown.buckets,
        applied={},
        reading=seen.reading,
        trend=seen.trend,
        events=(*seen.events, *_candidates(seen, transcript, None)),
    )


def _candidates(seen: PressureReport, transcript: Transcript, draft: Draft | None) -> Iterator[Event]:
    """What eviction would begin with, told once when the zone changes: nothing is changed yet (requirements A0.10).

    ``draft`` is what is forwarded, None where that is what came.
    """
    if not any(event.kind == "zone_change" for event in seen.events):
        return
    messages = transcript.messages
    guarded = protect(messages, units(messages, transcript.head)).all
    stands = range(len(messages)) if draft is None else [p.index for p in draft.pieces if p.text is None]
    found = [(i, messages[i]) for i in stands if i is not None and messages[i].is_result and i not in guarded]
    largest = sorted(found, key=lambda each: -each[1].tokens)[:MAX_NAMED]
    yield Event(
        "eviction_candidates",
        {
            "count": len(found),
            "tokens": sum(m.tokens for _, m in found),
            "largest": ", ".join(f"{i}: {m.ref} {m.tokens}" for i, m in largest),
        },
    )


def _run_asked(work: PlanWork, bounds: Bounds) -> Flow[None]:
    """Put what another conversation left in front of this one, or summarise it because an operator asked."""
    if bounds.known.resumed is not None and not bounds.known.cuts:
        resumed = resume(work.draft, bounds)
        work.take("resume", resumed, kept=resumed is not work.draft)
    else:
        yield from run_wanted(work, bounds)


def _is_wanted(settings: ContextSettings, known: ConversationState) -> bool:
    """Whether the history is to be summarised whatever its size."""
    if known.wanted is not None:
        return True
    return known.prepared is not None and any(layer.params.get("prepared") is True for layer in settings.layers)


def _may_edit(transcript: Transcript, grown: Growth, edits: ClientEdits | None, budget: TokenBudget) -> bool:
    """Whether what the client asks to have taken out of a request may be due in it."""
    if edits is None:
        return False
    limits = [budget.room_for(at) for at in (edits.results_at, edits.compact_at) if at is not None]
    if edits.thinking is not None or grown.tokens > min(limits, default=grown.tokens):
        return True
    return edits.results_over is not None and sum(m.is_result for m in transcript.messages) > edits.results_over


def _is_quiet(transcript: Transcript, grown: Growth, *, limits: Limits) -> bool:
    """Whether a request that was never managed needs no management now either."""
    settings, tokens = limits.settings, grown.tokens
    if tokens > limits.trigger or is_urgent(grown, limits=limits, tokens=tokens):
        return False
    if settings.ingest.from_start:
        cap = ingest_cap_for(settings, limits.budget)
        if any(m.is_result and m.tokens > cap for m in transcript.messages) or settings.ingest.is_particular:
            return False
    return limits.has_room(grown.charged)


def _hurried(bounds: Bounds, grown: Growth, draft: Draft, *, limits: Limits) -> Bounds:
    """The bounds of a request on which layers are due before their trigger.

    Growth that will soon be too much brings the free ones forward. A cold cache makes an edit cost nothing but
    itself, so a batch that would come soon comes now; not the first one, until which Weir is invisible.
    """
    settings, tokens = bounds.settings, draft.tokens
    fits = bounds.ceiling is None and bounds.soft_fits(tokens)
    if fits and is_urgent(grown, limits=limits, tokens=tokens):
        return replace(bounds, early=0.0, free_only=True)
    if grown.cold and settings.cold_at is not None and bounds.known.triggered:
        return replace(bounds, early=settings.cold_at)
    return bounds


def _is_repeat(draft: Draft, bounds: Bounds) -> bool:
    """Whether all of it was sent before: what was decided then holds as long as it may be forwarded."""
    known = bounds.known
    seen = known.triggered and known.length == len(bounds.transcript.chain)
    return seen and bounds.ceiling is None and draft.tokens <= bounds.hard_limit


def _has_large_new_result(bounds: Bounds) -> bool:
    transcript, cap = bounds.transcript, bounds.ingest_cap
    first_new = transcript.head + bounds.known.length
    if bounds.settings.ingest.is_particular:
        return any(m.is_result for m in transcript.messages[first_new:])
    return any(m.is_result and m.tokens > cap for m in transcript.messages[first_new:])


def _checked(draft: Draft, bounds: Bounds) -> Draft:
    if draft.tokens > bounds.hard_limit:
        raise BudgetUnreachable(
            window=bounds.budget.window,
            reserve=bounds.budget.reserve,
            buckets=bounds.budget.estimate_each(draft.buckets()),
            protected=bounds.budget.estimate(_protected_tokens(draft, bounds)),
        )
    _refuse_full_buckets(draft, bounds)
    broken = broken_rules(draft)
    if broken:
        raise InvalidConversation("; ".join(broken))
    return draft


def _refuse_full_buckets(draft: Draft, bounds: Bounds) -> None:
    """Raise BucketExceeded for the first bucket above its cap whose policy is to refuse that."""
    settings, budget = bounds.settings, bounds.budget
    if settings.enforce != "bucket":
        return
    buckets = budget.estimate_each(draft.buckets())
    for name, used in charged(buckets, settings.buckets).items():
        if refuses(settings, name) and is_over(name, used, budget):
            raise BucketExceeded(
                name,
                used=used,
                cap=budget.caps[name],
                window=budget.window,
                reserve=budget.reserve,
                buckets=buckets,
                protected=budget.estimate(_protected_tokens(draft, bounds)),
            )


def _protected_tokens(draft: Draft, bounds: Bounds) -> int:
    guarded = bounds.protection.all
    return sum(p.tokens for p in draft.pieces if p.index in guarded) + draft.tools + draft.transcript.priming


def _decide(draft: Draft, grown: Growth, *, limits: Limits, trail: tuple[LayerReport, ...] = ()) -> Decision:
    budget, after = limits.budget, draft.tokens
    new = bool(draft.edits) or draft.cut is not None or bool(draft.tool_edits)
    changed = draft.changed
    buckets = budget.estimate_each(draft.buckets()) if changed else grown.buckets
    seen = conclude(
        grown,
        limits=limits,
        tokens=after,
        buckets=buckets,
        acted=new,
        emergency=any(r.rung and r.kept and r.layer != "compact" for r in trail),
    )
    covered, length = _covered(draft), len(draft.transcript.chain)
    window, begun = _window(draft)
    return Decision(
        action=Action.EDIT if new else Action.REPLAY if changed else Action.PASS,
        pieces=draft.pieces if changed else None,
        before=grown.raw,
        after=budget.estimate(after),
        limit=limits.usable,
        raw_after=after,
        pressure=seen.pressure,
        reading=seen.reading,
        trend=seen.trend,
        events=(*seen.events, *(() if new else _candidates(seen, draft.transcript, draft)), *begun),
        window_id=window,
        buckets=buckets,
        applied=draft.applied if changed else {},
        edits=tuple(replace(edit, length=length) for edit in (*draft.edits.values(), *draft.tool_edits)),
        cut=draft.cut and replace(draft.cut, length=length),
        removed=tuple(sorted({*draft.edits, *covered})),
        covered=covered,
        checkpoint=draft.checkpoint,
        pruned=tuple(d.name for d in draft.pruned),
        trail=trail,
    )


def _window(draft: Draft) -> tuple[int | None, tuple[Event, ...]]:
    """The number of the window that a new cut begins, with the event that says so (requirement A0.149)."""
    cut = draft.cut
    if cut is None or cut.origin not in WINDOWS or draft.checkpoint is None:
        return None, ()
    window = Checkpoint.from_json(draft.checkpoint).window_id
    facts: dict[str, int | float | str] = {
        "old_window": window - 1,
        "new_window": window,
        "turn": len(parse_turn_boundaries(draft.transcript.messages)),
        "summary_tokens": cut.tokens,
    }
    return window, (Event(cut.origin, facts),)


def _covered(draft: Draft) -> tuple[int, ...]:
    """Indices of the messages that a new cut takes out of the window."""
    cut = draft.cut
    if cut is None:
        return ()
    head = draft.transcript.head
    stays = {head + p for p in (*cut.before, *cut.after)}
    return tuple(i for i in range(head, head + cut.covers) if i not in stays)


def is_due(draft: Draft, bounds: Bounds) -> bool:
    """Whether any layer that does more than cap new results has work to do."""
    if draft.tokens > bounds.trigger * bounds.early:
        return True
    scoped = [layer for layer in layers_of(bounds.settings) if layer.scope != "total"]
    if not scoped:
        return False
    inside = charged(draft.buckets(), bounds.settings.buckets)
    return any(inside.get(layer.scope, 0) > _limit(layer, bounds) for layer in scoped)


def run_layers(work: PlanWork, bounds: Bounds) -> Flow[None]:
    """Do the work of every layer that is needed."""
    fired = work.draft.tokens > bounds.trigger * bounds.early
    if fired:
        work.take_if_changed("evict", evict_marked(work.draft, bounds))
    for layer in layers_of(bounds.settings):
        kind = STRATEGIES.get(layer.strategy)
        if kind is not None and kind.costs and (bounds.free_only or bounds.settings.compaction == "off"):
            continue
        aim = _aim(layer, work.draft, bounds, fired=fired)
        if aim is None:
            continue
        draft, at_work = work.draft, replace(bounds, layer=layer, aim=aim)
        if kind is None:
            work.take(layer, draft, kept=False, reason="unavailable")
            continue
        strategy = kind.of(layer.params)
        done = yield from strategy.run(draft, at_work)
        done, reason = (replace(done, reason="") if done.reason else done), done.reason
        if done is draft and layer.at == 0 and not reason:
            continue  # it looks at every request, and had nothing to do
        kept = _pays(layer, draft, done, at_work)
        work.take(layer, done, kept=kept, reason=reason)
        could = strategy.scan(draft, at_work)
        if could is not None:
            work.trail = (*work.trail[:-1], replace(work.trail[-1], scanned=_result_tokens(draft), prunable=could))
        if kept and layer.must_reach is not None and bounds.soft_fits(done.tokens):
            break


def _result_tokens(draft: Draft) -> int:
    messages = draft.transcript.messages
    return sum(tokens for index, tokens in draft.tokens_by_index().items() if messages[index].is_result)


def _limit(layer: Layer, bounds: Bounds) -> float:
    return limit_for(layer, bounds.settings, bounds.budget) * bounds.early


def _aim(layer: Layer, draft: Draft, bounds: Bounds, *, fired: bool) -> int | None:
    """The total tokens that a layer should end at; None if it is not due."""
    budget, tokens = bounds.budget, draft.tokens
    if layer.params.get("prepared") is True:
        return None
    allowed = min(budget.soft_limit, bounds.hard_limit)
    end = target_for(layer, bounds.settings, budget, low_water=bounds.low_water)
    if layer.at == 0:
        return end
    if layer.scope == "total":
        due = fired if layer.at is None else tokens > _limit(layer, bounds)
        if layer.at is None or tokens <= allowed:
            return end if due and tokens > end else None
        return min(end, allowed)
    inside = charged(draft.buckets(), bounds.settings.buckets).get(layer.scope, 0)
    if inside <= _limit(layer, bounds) and tokens <= allowed:
        return None
    return tokens - max(inside - end, tokens - allowed, 0)


def run_wanted(work: PlanWork, bounds: Bounds) -> Flow[None]:
    """Have the history summarised whatever its size.

    An operator asked for it, or what was prepared after an answer is to be used as soon as it is there.
    """
    layer = next((each for each in bounds.settings.layers if each.strategy == "compact"), Layer(strategy="compact"))
    trigger = min(bounds.trigger, work.draft.tokens)
    done = yield from Compact.of(layer.params).run(work.draft, replace(bounds, layer=layer, trigger=trigger))
    work.take(layer, done, kept=done.tokens < work.draft.tokens)


def run_client_edits(work: PlanWork, bounds: Bounds, edits: ClientEdits) -> Flow[None]:
    """Take out what the request's own client asked to have taken out of it."""
    if edits.thinking is not None:
        done = Reasoning(ttl=edits.thinking).apply(work.draft, bounds)
        if done.tokens < work.draft.tokens:
            work.take("reasoning", done, kept=True)
    work.take_if_changed("evict", clear_results(work.draft, bounds, edits))
    if edits.compact_at is not None and work.draft.tokens > bounds.budget.room_for(edits.compact_at):
        yield from run_wanted(work, bounds)


def run_rungs(work: PlanWork, bounds: Bounds) -> Flow[None]:
    """Take as many rungs as it takes to get under the hard limit."""
    target, compacts = bounds.hard_limit, bounds.settings.compaction == "proxy"
    at_target = replace(bounds, aim=target)
    if work.draft.tokens > target and compacts:
        done = yield from Compact().compacted(work.draft, bounds, share=HARDER_SHARE)
        work.take("compact", done, kept=done.tokens < work.draft.tokens, rung=True)
    if work.draft.tokens > target and compacts:
        done = Rollover().apply(work.draft, at_target)
        if done.tokens <= target:
            work.take("rollover", done, kept=True, rung=True)
    last: tuple[tuple[str, Callable[[Draft], Draft]], ...] = (
        ("drop_oldest", lambda draft: DropOldest().apply(draft, at_target)),
        ("clip", lambda draft: clip(draft, bounds, target=min(target, bounds.budget.soft_limit))),
    )
    for name, rung in last:
        if work.draft.tokens > target:
            done = rung(work.draft)
            work.take(name, done, kept=done.tokens < work.draft.tokens, rung=True)


def _pays(layer: Layer, before: Draft, after: Draft, bounds: Bounds) -> bool:
    saved = before.tokens - after.tokens
    reached = after.tokens <= bounds.target
    if saved <= 0 or saved < _least_savings(layer, bounds, fits=bounds.soft_fits(before.tokens), reached=reached):
        return False
    if layer.must_reach is None:
        return True
    return after.tokens <= bounds.low_water + layer.must_reach * (bounds.trigger - bounds.low_water)


def _least_savings(layer: Layer, bounds: Bounds, *, fits: bool, reached: bool) -> float:
    """The uncalibrated tokens that a layer has to save, or an edit would not be worth the cache that it costs.

    What the policy does not say is nothing where the request has to get smaller. A bucket that cannot be brought down
    to where the layer should end waits until a fifth of its cap can be saved, or every request would be a batch.
    """
    least = layer.min_savings
    if least is None:
        least = MIN_EARLY if fits and (layer.at or bounds.early < 1) else 0
        if least and layer.scope != "total" and not reached:
            least = MIN_STUCK
    whole = bounds.budget.window if layer.scope == "total" else bounds.budget.caps.get(layer.scope, 0)
    return amount(least, whole) / bounds.budget.ratio
