"""Very large results that nothing refers to are read apart, for what they were asked for, and come back as a report.

That is what an agent does when it gives a task to another one: a window of its own, the task and the material in it,
and two thousand tokens back. A result is delegated only if no later message uses what it says and if it takes a
tenth of the window or more; what is smaller or in use costs less to keep.
"""

from collections.abc import Iterator

from policies.bounds import Bounds
from policies.condensing import NO_SUMMARIZER, Job, condense_each, is_original, may_ask, reading_of
from policies.draft import Draft
from policies.effects import Flow
from policies.ledger import EditKind
from policies.scoring.references import last_references
from policies.settings import amount

LEAST = 0.10
MAX_TOKENS = 2_000


def delegate(draft: Draft, bounds: Bounds) -> Flow[Draft]:
    """The draft with the largest independent results read apart, until it is at the layer's target.

    Params: ``least`` (the smallest result, a share of W or tokens from 1 on) and ``max_tokens`` of the report that
    stands in its place, framing included. Nothing happens without a model that writes.
    """
    if not may_ask(bounds):
        return draft.because(NO_SUMMARIZER)
    return (yield from condense_each(draft, bounds, [*_jobs(draft, bounds)], plain=_nothing))


def _nothing(_: Job) -> str:
    """What code says of what has to be read: no text."""
    return ""


def _jobs(draft: Draft, bounds: Bounds) -> Iterator[Job]:
    """What may be delegated, the largest first, of equals the oldest."""
    messages, guarded = draft.transcript.messages, bounds.protection.all
    stated = bounds.layer.params.get("least", LEAST)
    share = float(stated) if isinstance(stated, int | float) else LEAST
    least = amount(share, bounds.budget.window) / bounds.budget.ratio
    large = {
        piece.index: piece.tokens
        for piece in draft.pieces
        if piece.index is not None
        and piece.tokens >= least
        and piece.index not in guarded
        and messages[piece.index].is_result
        and not messages[piece.index].media
        and is_original(piece)
        and bounds.in_scope(draft, piece)
    }
    if not large:
        return
    calls = bounds.calls()
    used = last_references(draft.transcript, calls)
    most = bounds.layer.whole("max_tokens", MAX_TOKENS)
    for index in sorted(large, key=lambda i: (-large[i], i)):
        if used[index].count == 0:
            yield reading_of(bounds, index, calls.get(index), kind=EditKind.DELEGATE, most=most)
