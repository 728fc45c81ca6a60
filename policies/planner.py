"""plan(): the entry of every request. It reads top to bottom.

group → budget → replay ledger → pressure → (pass | layers) → rungs → recall → invariants → Decision

prepare() is the other: a summary that is written after an answer, so that the request which needs
it does not wait for a model. It covers what the next batch will cover. Nothing in the conversation
changes until then: what was prepared is used where the history that it covers is still there, and
forgotten where it is not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from policies.draft import NO_LAYER, Bounds, Draft, bounds_for, broken_rules, replay, untouched
from policies.effects import Announce, Flow, Offload, unheard
from policies.ledger import (
    UNKNOWN,
    WINDOWS,
    Action,
    ConversationState,
    Decision,
    EditKind,
    Event,
    LayerReport,
    Prepared,
    Trend,
    needed_rung,
)
from policies.limits import (
    CLOSE,
    BucketExceeded,
    BudgetUnreachable,
    Limits,
    TokenBudget,
    asks_from,
    charged,
    compaction_layer,
    find_memory,
    ingest_cap_for,
    is_over,
    layers_of,
    limits_for,
    refuses,
)
from policies.loads import Load
from policies.memory.checkpoint import Checkpoint
from policies.messages import InvalidConversation, Transcript, parse_turn_boundaries, protect
from policies.pressure import (
    Growth,
    candidates,
    conclude,
    is_quiet,
    is_urgent,
    is_wanted,
    measure,
    pass_on,
    raw_buckets,
)
from policies.settings import ClientEdits, ContextSettings
from policies.strategies.clip import clip, clippable
from policies.strategies.compact import Compact, known_summary, may_summarize, stand_in, summarize
from policies.strategies.drop_oldest import DropOldest
from policies.strategies.ingest_cap import cap_results
from policies.strategies.layers import (
    ASKING,
    PlanWork,
    is_due,
    next_batch,
    run_anew,
    run_asked,
    run_client_edits,
    run_layers,
    run_rungs,
)
from policies.strategies.lighten import lighten
from policies.strategies.prune_tools import PruneTools
from policies.strategies.reasoning import leave_out_unbound
from policies.strategies.recall import Elsewhere, Pages, is_crowded, may_recall, recall, with_room
from policies.text.segments import Readings
from policies.tokens import TokenCounter

CLEARING_RESULTS = frozenset({"evict", "prune"})


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
    unbinds: bool = False,
    loads: tuple[Load, ...] = (),
    announce: Announce = unheard,
) -> Flow[Decision]:
    """What to do with one request.

    ``at`` is its time, seconds of any clock. ``ceiling`` (uncalibrated) is set after an upstream
    refused what the budget allowed. ``readings`` and ``pages`` are of earlier requests,
    ``elsewhere`` is what the archive has, ``edits`` what the client requests; ``unbinds``: no
    thinking is valid any more; ``loads`` are above what the upstream takes. Raises
    BudgetUnreachable if what is protected does not fit, BucketExceeded where a full bucket is
    refused, InvalidConversation for a broken array.
    """
    limits = limits or limits_for(settings, budget)
    if edits is not None and edits.native:
        settings = _beside_provider(settings, edits, budget.estimate(limits.trigger))
        edits = None
    known = ConversationState(length=known.length) if not settings.manages else known
    known = (
        known.at(len(transcript.chain))
        if known.triggered or known.checkpoint is not None
        else known
    )
    if settings.memory:
        transcript = replace(transcript, memory=find_memory(transcript, settings.memory))
    grown = measure(transcript, limits=limits, trend=trend, at=at)
    asked = (known.resumed is not None and not known.cuts) or is_wanted(settings, known)
    is_told = (
        known.triggered
        or asked
        or unbinds
        or loads
        or ceiling is not None
        or _may_edit(transcript, grown, edits, budget)
    )
    if not is_told and is_quiet(transcript, grown, limits=limits):
        return pass_on(transcript, grown, limits=limits)
    bounds = bounds_for(
        transcript,
        settings,
        budget,
        known,
        counter,
        ceiling=ceiling,
        summarizer_input=summarizer_input,
        readings=readings,
    )
    work = PlanWork(replay(bounds.transcript, known, bounds.protection), announce=announce)
    announce("replay")
    bounds = replace(bounds, standing=work.draft.pieces, announce=announce)
    if asked:
        yield Offload()
        yield from run_asked(work, bounds)
    bounds = yield from _manage(work, bounds, grown, limits=limits, edits=edits)
    if loads and settings.manages:
        yield from lighten(work, bounds, loads)
    yield from _recall(work, bounds, pages=pages or Pages(), elsewhere=elsewhere)
    if transcript.binds:
        yield from _unbind(work, bounds, all_of_it=unbinds)
    return _decide(_checked(work.draft, bounds), grown, limits=limits, trail=work.trail)


def _manage(
    work: PlanWork, bounds: Bounds, grown: Growth, *, limits: Limits, edits: ClientEdits | None
) -> Flow[Bounds]:
    settings = bounds.settings
    _refuse_hopeless(work.draft, bounds)
    if (bounds.known.triggered or settings.ingest.from_start) and _has_large_new_result(bounds):
        yield Offload()
        work.draft = cap_results(work.draft, bounds, new_only=True)
    if edits is not None and not _is_repeat(work.draft, bounds, grown):
        yield Offload()
        yield from run_client_edits(work, bounds, edits)
    bounds = _hurried(bounds, grown, work.draft, limits=limits)
    if (
        settings.manages
        and is_due(work.draft, bounds)
        and not _is_repeat(work.draft, bounds, grown)
    ):
        yield Offload()
        yield from run_layers(work, bounds)
        yield from run_rungs(work, bounds)
    elif settings.manages and is_crowded(work.draft, bounds):
        yield Offload()
        yield from run_anew(work, with_room(bounds))
    return bounds


def _recall(
    work: PlanWork, bounds: Bounds, *, pages: Pages, elsewhere: Sequence[Elsewhere]
) -> Flow[None]:
    if may_recall(work.draft, bounds):
        if not work.trail:
            yield Offload()
        work.take_if_changed("recall", recall(work.draft, bounds, pages=pages, elsewhere=elsewhere))
        work.announce("recall")


def _unbind(work: PlanWork, bounds: Bounds, *, all_of_it: bool) -> Flow[None]:
    """Thinking is not valid after what is new: after a definition that comes first, none is."""
    brings_tool = (
        bounds.settings.recall.tool and not bounds.known.has_removed and work.draft.has_removed
    )
    valid = leave_out_unbound(work.draft, bounds, all_of_it=all_of_it or brings_tool)
    if valid is not work.draft and not work.trail:
        yield Offload()
    work.draft = valid


def trim(
    transcript: Transcript, *, settings: ContextSettings, budget: TokenBudget, counter: TokenCounter
) -> Decision:
    bounds = bounds_for(transcript, settings, budget, ConversationState(), counter)
    draft = untouched(bounds.transcript)
    if not bounds.soft_fits(draft.tokens):
        draft = DropOldest().apply(draft, replace(bounds, aim=bounds.budget.soft_limit))
    if draft.tokens > bounds.hard_limit:
        draft = clip(draft, bounds, target=bounds.safe_limit)
    limits = limits_for(settings, budget)
    grown = measure(transcript, limits=limits, trend=UNKNOWN, at=None)
    return _decide(_checked(draft, bounds), grown, limits=limits)


def standing(transcript: Transcript, known: ConversationState) -> Draft:
    return replay(transcript, known, protect(transcript, known.pins))


def is_needless(
    transcript: Transcript, known: ConversationState, *, limits: Limits, trend: Trend
) -> bool:
    """Whether everything now fits with room to spare without the decisions beyond the known
    messages, and did not before.
    """
    settings = limits.settings
    gone = [e.kind for e in known.edits.values() if e.length > known.length]
    is_capped = settings.ingest.from_start and EditKind.INGEST_CAP in gone
    if trend.is_of_another or known.newest <= known.length or is_capped:
        return False
    draft = standing(transcript, known.before(known.length))
    caps = dict((*limits.scoped, *limits.refused))
    stands = {**charged(draft.buckets(), settings.buckets), "total": draft.tokens}
    sent = {**charged(raw_buckets(transcript), settings.buckets), "total": transcript.tokens}
    was = {**{burn.bucket: burn.tokens for burn in trend.burn}, "total": trend.raw or 0}
    spare = {name: CLOSE * most for name, most in {**caps, "total": limits.trigger}.items()}
    if any(stands.get(name, 0) > most for name, most in spare.items()):
        return False
    is_newer = trend.length > transcript.head + known.length  # else nobody knows what was sent
    return not is_newer or any(
        stands.get(n, 0) + was.get(n, 0) - sent.get(n, 0) > spare[n] for n in spare
    )


def compacted(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState,
    counter: TokenCounter,
    summarizer_input: int | None,
    readings: Readings,
    shown: Sequence[int],
) -> Flow[str]:
    yield Offload()
    known = known.at(len(transcript.chain))
    bounds = bounds_for(
        transcript,
        settings,
        budget,
        known,
        counter,
        summarizer_input=summarizer_input,
        readings=readings,
    )
    return (yield from stand_in(bounds, shown))


def _beside_provider(
    settings: ContextSettings, edits: ClientEdits, trigger: int
) -> ContextSettings:
    if edits.compact_at is not None and edits.compact_at <= trigger:
        settings = replace(settings, compaction="off")
    if edits.results_over is not None or (
        edits.results_at is not None and edits.results_at <= trigger
    ):
        layers = tuple(layer for layer in settings.layers if layer.strategy not in CLEARING_RESULTS)
        settings = replace(settings, layers=layers)
    return settings


def _may_edit(
    transcript: Transcript, grown: Growth, edits: ClientEdits | None, budget: TokenBudget
) -> bool:
    if edits is None:
        return False
    limits = [budget.room_for(at) for at in (edits.results_at, edits.compact_at) if at is not None]
    if edits.thinking is not None or grown.tokens > min(limits, default=grown.tokens):
        return True
    return (
        edits.results_over is not None
        and sum(m.is_result for m in transcript.messages) > edits.results_over
    )


def _hurried(bounds: Bounds, grown: Growth, draft: Draft, *, limits: Limits) -> Bounds:
    """Growth that will soon be too much brings free layers forward. With a cold cache an edit costs
    nothing extra, so a batch that is due soon runs now; except for the first one, until which Weir
    is invisible.
    """
    settings = bounds.settings
    tokens = draft.tokens
    fits = bounds.ceiling is None and bounds.soft_fits(tokens)
    if fits and settings.preempt and is_urgent(grown, limits=limits, tokens=tokens):
        return replace(bounds, early=0.0, free_only=True)
    if grown.cold and settings.cold_at is not None and bounds.known.triggered:
        return replace(bounds, early=settings.cold_at)
    return bounds


def _is_repeat(draft: Draft, bounds: Bounds, grown: Growth) -> bool:
    """The decision on the same request sent earlier is reused as long as the result may be
    forwarded.
    """
    known = bounds.known
    before = grown.before
    is_last = (before.raw, before.length) == (grown.tokens, len(bounds.transcript.messages))
    seen = known.length == len(bounds.transcript.chain) and (known.triggered or is_last)
    return seen and bounds.ceiling is None and draft.tokens <= bounds.hard_limit


def _has_large_new_result(bounds: Bounds) -> bool:
    transcript = bounds.transcript
    settings = bounds.settings
    least = 0 if settings.ingest.is_particular else ingest_cap_for(settings, bounds.budget)
    return any(
        m.is_result and m.tokens > least
        for m in transcript.messages[transcript.head + bounds.known.length :]
    )


def _refuse_hopeless(draft: Draft, bounds: Bounds) -> None:
    """Refuses before anything is read where the part that no layer and no rung can touch is too
    large alone.
    """
    if draft.tokens <= bounds.refused_above or bounds.ceiling is not None:
        return
    guarded = bounds.protection.all
    untouchable = bounds.protection.verbatim - clippable(draft, bounds)
    fixed = sum(p.tokens for p in draft.pieces if p.index in untouchable)
    if not any(layer.strategy == PruneTools.name for layer in bounds.settings.layers):
        fixed += draft.tools
    if fixed + draft.transcript.priming > bounds.refused_above:
        raise _unreachable(
            replace(draft, pieces=tuple(p for p in draft.pieces if p.index in guarded)), bounds
        )


def _unreachable(draft: Draft, bounds: Bounds) -> BudgetUnreachable:
    guarded = bounds.protection.all
    budget = bounds.budget
    protected = (
        sum(p.tokens for p in draft.pieces if p.index in guarded)
        + draft.tools
        + draft.transcript.priming
    )
    return BudgetUnreachable(
        window=budget.window,
        reserve=budget.reserve,
        buckets=budget.estimate_each(draft.buckets()),
        protected=budget.estimate(protected),
    )


def _checked(draft: Draft, bounds: Bounds) -> Draft:
    if draft.tokens > bounds.refused_above:
        raise _unreachable(draft, bounds)
    _refuse_full_buckets(draft, bounds)
    broken = broken_rules(draft)
    if broken:
        raise InvalidConversation("; ".join(broken))
    return draft


def _refuse_full_buckets(draft: Draft, bounds: Bounds) -> None:
    settings = bounds.settings
    budget = bounds.budget
    if settings.enforce != "bucket":
        return
    for name, used in charged(budget.estimate_each(draft.buckets()), settings.buckets).items():
        if refuses(settings, name) and is_over(name, used, budget):
            raise BucketExceeded(
                name, used=used, cap=budget.caps[name], **vars(_unreachable(draft, bounds))
            )


def _decide(
    draft: Draft, grown: Growth, *, limits: Limits, trail: tuple[LayerReport, ...] = ()
) -> Decision:
    budget = limits.budget
    after = draft.tokens
    new = bool(draft.edits) or draft.cut is not None or bool(draft.tool_edits)
    changed = draft.changed
    buckets = budget.estimate_each(draft.buckets()) if changed else grown.buckets
    seen = conclude(
        grown,
        limits=limits,
        tokens=after,
        buckets=buckets,
        acted=new,
        emergency=needed_rung(trail),
    )
    covered = () if draft.cut is None else draft.cut.hidden(draft.transcript.lasting)
    length = len(draft.transcript.chain)
    window, begun = _window(draft)
    stands = (piece.index for piece in draft.pieces if piece.text is None)
    unless_new = Action.REPLAY if changed else Action.PASS
    return Decision(
        action=Action.EDIT if new else unless_new,
        pieces=draft.pieces if changed else None,
        before=grown.raw,
        due=budget.estimate(trail[0].before if trail else after),
        after=budget.estimate(after),
        limit=budget.usable,
        raw_after=after,
        pressure=seen.pressure,
        reading=seen.reading,
        trend=seen.trend,
        events=(*seen.events, *(() if new else candidates(seen, draft.transcript, stands)), *begun),
        window_id=window,
        buckets=buckets,
        applied=draft.applied if changed else {},
        edits=tuple(
            replace(edit, length=length) for edit in (*draft.edits.values(), *draft.tool_edits)
        ),
        cut=draft.cut and replace(draft.cut, length=length),
        removed=tuple(sorted({*draft.edits, *covered})),
        covered=covered,
        checkpoint=draft.checkpoint,
        pruned=tuple(d.name for d in draft.pruned),
        trail=trail,
    )


def _window(draft: Draft) -> tuple[int | None, tuple[Event, ...]]:
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


MIN_NEW = 0.5
"""A prepared summary is replaced once it lacks this share of what a batch would newly summarise.
"""
SOON = 3
"""How many requests before a batch it is prepared: its content is not known much earlier.
"""


def prepare(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState,
    counter: TokenCounter,
    summarizer_input: int | None = None,
    readings: Readings | None = None,
) -> Flow[Prepared | None]:
    """What the next batch will need of a model, without a text if the model gave none; None if
    nothing is needed.

    What single messages need is requested as well: the answers are kept by what they are about.
    """
    layer = compaction_layer(settings)
    if layer is None:
        return None
    bounds = bounds_for(
        transcript,
        settings,
        budget,
        known,
        counter,
        summarizer_input=summarizer_input,
        readings=readings,
    )
    draft = replay(bounds.transcript, known, bounds.protection)
    bounds = replace(bounds, layer=layer, standing=draft.pieces)
    if layer.params.get("prepared") is not True:
        batch = next_batch(draft, bounds)
        if batch is None:
            return None
        early, compacts = batch
        if not compacts:  # its questions are sent now: the answers are kept by what they are about
            yield from run_layers(PlanWork(draft), replace(bounds, layer=NO_LAYER, early=early))
            return None
    start = Compact.of(layer.params).tail_start(draft, bounds)
    head = transcript.head
    most = transcript.place(start)
    gone = [i for i in range(head, start) if i not in bounds.protection.verbatim]
    before = known_summary(bounds, most=most)
    settled = known_summary(replace(bounds, known=replace(known, prepared=None)), most=most).covers
    new, whole = (
        sum(transcript.messages[i].tokens for i in gone if transcript.place(i) >= covers)
        for covers in (before.covers, settled)
    )
    if (
        not new
        or not may_summarize(bounds)
        or (before.origin == "prepared" and new < MIN_NEW * whole)
    ):
        return None
    end = transcript.chain[start - head - 1]
    told = yield from summarize(bounds, gone, before=before, key=end.hex())
    if told.origin != "model":
        return Prepared(most, end, "")
    calls = told.calls + before.calls  # what was prepared before and never used is in it too
    return Prepared(most, end, told.text, told.purpose, calls)


def is_soft(
    tokens: int,
    length: int,
    *,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState,
    buckets: Mapping[str, int] | None = None,
    trend: Trend = UNKNOWN,
) -> bool:
    rules = settings.summaries
    if settings.summarizer is None or settings.compaction != "proxy" or not settings.manages:
        return False
    if rules.prepare_messages is not None:
        covered = max((cut.covers for cut in known.cuts), default=0)
        if length - covered > rules.prepare_messages:
            return True
    if rules.prepare_at is None:
        return False
    used = charged(buckets or {}, settings.buckets)
    for layer in layers_of(settings):
        if layer.strategy not in ASKING:
            continue
        limit = asks_from(layer, settings, budget)
        inside = tokens if layer.scope == "total" else int(used.get(layer.scope, 0) / budget.ratio)
        soon = layer.at == 0 or inside + SOON * _growth(trend, layer.scope) > limit
        if inside > rules.prepare_at * limit and soon:
            return True
    return False


def _growth(trend: Trend, scope: str) -> float:
    burns = {burn.bucket: burn.deltas for burn in trend.burn}
    deltas = trend.deltas if scope == "total" else burns.get(scope, ())
    return max(sum(deltas) / len(deltas), deltas[-1]) if deltas else math.inf
