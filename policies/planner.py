"""plan(): the one entry. It reads top to bottom.

group → budget → replay ledger → pressure → (pass | cascade) → rungs → invariants → Decision
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from policies.bounds import Bounds, bounds_for, trigger_for
from policies.budget import Budget
from policies.cascade import LayerReport, run_layers, run_rungs
from policies.draft import Draft, Piece, untouched
from policies.effects import Flow, Offload
from policies.errors import BudgetUnreachable, InvalidConversation
from policies.invariants import broken_rules
from policies.ledger import Cut, Edit
from policies.messages import Transcript
from policies.pressure import Pressure, read_pressure
from policies.replay import Known, replay
from policies.settings import ContextSettings
from policies.strategies.clip import clip, shorten_standing
from policies.strategies.drop_oldest import drop_oldest
from policies.strategies.ingest_cap import ingest_cap
from policies.tokens import TokenCounter


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
    indices of messages whose originals the archive needs. ``applied`` counts the edits in the array by kind.
    """

    action: Action
    pieces: tuple[Piece, ...] | None
    before: int
    after: int
    limit: int
    raw_after: int
    pressure: Pressure
    buckets: dict[str, int]
    applied: dict[str, int]
    edits: tuple[Edit, ...] = ()
    cut: Cut | None = None
    removed: tuple[int, ...] = ()
    covered: tuple[int, ...] = ()
    checkpoint: str | None = None
    trail: tuple[LayerReport, ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether there is something to store."""
        return bool(self.edits) or self.cut is not None


def plan(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: Budget,
    known: Known,
    counter: TokenCounter,
    ceiling: int | None = None,
    summarizer_input: int | None = None,
) -> Flow[Decision]:
    """What to do with one request.

    ``ceiling`` (uncalibrated tokens) is set after an upstream refused what the budget allowed,
    ``summarizer_input`` is the most that the summariser reads at once. Raises
    BudgetUnreachable if the protected content alone does not fit, InvalidConversation if a layer made an
    array that an upstream would reject.
    """
    if not known.triggered and ceiling is None:
        tokens = transcript.tokens
        if tokens <= trigger_for(settings, budget):
            return _passed(tokens, settings=settings, budget=budget)
    bounds = bounds_for(
        transcript,
        settings=settings,
        budget=budget,
        known=known,
        counter=counter,
        ceiling=ceiling,
        summarizer_input=summarizer_input,
    )
    draft = replay(bounds.transcript, known, bounds.protection)
    if known.triggered and _has_large_new_result(bounds):
        yield Offload()
        draft = ingest_cap(draft, bounds, new_only=True)
    trail: tuple[LayerReport, ...] = ()
    if draft.tokens > bounds.trigger and not _is_repeat(draft, bounds):
        yield Offload()
        shortened = shorten_standing(draft, bounds)
        bounds = replace(bounds, fixed=bounds.fixed - (draft.tokens - shortened.tokens))
        draft, trail = yield from run_layers(shortened, bounds)
        if draft.tokens > bounds.hard_limit:
            draft, rungs = yield from run_rungs(draft, bounds)
            trail += rungs
    return _decide(_checked(draft, bounds), bounds, settings=settings, budget=budget, trail=trail)


def trim(transcript: Transcript, *, settings: ContextSettings, budget: Budget, counter: TokenCounter) -> Decision:
    """The request with its oldest units dropped until it fits: what is done when planning itself failed."""
    bounds = bounds_for(transcript, settings=settings, budget=budget, known=Known(), counter=counter)
    draft = untouched(bounds.transcript)
    if not bounds.soft_fits(draft.tokens):
        draft = drop_oldest(draft, bounds, target=bounds.budget.soft_limit)
    if draft.tokens > bounds.hard_limit:
        draft = clip(draft, bounds, target=bounds.hard_limit)
    return _decide(_checked(draft, bounds), bounds, settings=settings, budget=budget)


def _passed(tokens: int, *, settings: ContextSettings, budget: Budget) -> Decision:
    """The decision to forward a request of so many uncalibrated tokens as it came."""
    used = budget.estimate(tokens)
    return Decision(
        action=Action.PASS,
        pieces=None,
        before=used,
        after=used,
        limit=budget.usable,
        raw_after=tokens,
        pressure=read_pressure(used, budget.base(settings), settings.zones, fits=True),
        buckets={},
        applied={},
    )


def _is_repeat(draft: Draft, bounds: Bounds) -> bool:
    """Whether all of it was sent before: what was decided then holds as long as it may be forwarded."""
    known = bounds.known
    seen = known.triggered and known.length == len(bounds.transcript.chain)
    return seen and bounds.ceiling is None and draft.tokens <= bounds.hard_limit


def _has_large_new_result(bounds: Bounds) -> bool:
    transcript, cap = bounds.transcript, bounds.ingest_cap
    first_new = transcript.head + bounds.known.length
    return any(m.is_result and m.tokens > cap for m in transcript.messages[first_new:])


def _checked(draft: Draft, bounds: Bounds) -> Draft:
    transcript, guarded = draft.transcript, bounds.protection.all
    if draft.tokens > bounds.hard_limit:
        protected = sum(p.tokens for p in draft.pieces if p.index in guarded)
        raise BudgetUnreachable(
            window=bounds.budget.window,
            reserve=bounds.budget.reserve,
            buckets=bounds.budget.estimate_each(draft.buckets()),
            protected=bounds.budget.estimate(protected + transcript.tools + transcript.priming),
        )
    broken = broken_rules(draft)
    if broken:
        raise InvalidConversation("; ".join(broken))
    return draft


def _decide(
    draft: Draft,
    bounds: Bounds | None,
    *,
    settings: ContextSettings,
    budget: Budget,
    trail: tuple[LayerReport, ...] = (),
) -> Decision:
    transcript, after = draft.transcript, draft.tokens
    new = bool(draft.edits) or draft.cut is not None
    changed = draft.changed
    fits = budget.fits(after)
    pressure = read_pressure(
        budget.estimate(after),
        budget.base(settings),
        settings.zones,
        fits=fits,
        acted=new,
        emergency=any(r.layer in ("drop_oldest", "clip") and r.kept for r in trail),
    )
    covered = _covered(draft, bounds)
    return Decision(
        action=Action.EDIT if new else Action.REPLAY if changed else Action.PASS,
        pieces=draft.pieces if changed else None,
        before=budget.estimate(transcript.tokens),
        after=budget.estimate(after),
        limit=budget.usable,
        raw_after=after,
        pressure=pressure,
        buckets=budget.estimate_each(draft.buckets()) if changed else {},
        applied=draft.applied if changed else {},
        edits=tuple(draft.edits.values()),
        cut=draft.cut,
        removed=tuple(sorted({*draft.edits, *covered})),
        covered=covered,
        checkpoint=draft.checkpoint,
        trail=trail,
    )


def _covered(draft: Draft, bounds: Bounds | None) -> tuple[int, ...]:
    """Indices of the messages that a new cut takes out of the window."""
    cut = draft.cut
    if cut is None or bounds is None:
        return ()
    head = draft.transcript.head
    stays = {head + p for p in (*cut.before, *cut.after)}
    return tuple(i for i in range(head, head + cut.covers) if i not in stays)
