"""The model's part of a summary: what was told before, whether to ask, and where.

It is asked once a batch, or before one: what was prepared after an answer holds wherever the history that it covers
is still there. Where the conversation's own model writes and the provider still has its prefix, the question goes
behind that prefix, which costs a tenth of sending the same words again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.bounds import Bounds
from policies.effects import Flow
from policies.ledger import Cut, PlannedMessage
from policies.sources import lines_of, sources_of
from policies.summary import Proposal, condense

MIN_ROOM = 2_000
CACHED_PRICE = 0.1
QUESTION = 400
"""About what the instruction takes, tokens."""


@dataclass(frozen=True, slots=True)
class Told:
    """A summary in words that covers the first ``covers`` messages after the head.

    ``origin`` says how it came about: ``previous``, ``prepared``, ``model``, or empty for none; ``failure`` why a model
    that was asked gave nothing.
    """

    text: str = ""
    covers: int = 0
    origin: str = ""
    proposal: Proposal | None = None
    calls: int = 0
    failure: str = ""
    purpose: str = ""


def told_before(bounds: Bounds, *, most: int) -> Told:
    """The newest summary in words that still holds and covers at most ``most`` messages; empty if there is none."""
    known, chain = bounds.known, bounds.transcript.chain
    best = Told()
    for cut in known.cuts:
        if cut.narrative and _holds(cut.covers, cut.prefix, chain, most) and cut.noted >= best.covers:
            best = Told(cut.narrative, cut.noted, "previous")
    ready = known.prepared
    if ready is not None and _holds(ready.covers, ready.prefix, chain, most) and ready.covers > best.covers:
        best = Told(
            ready.text, ready.covers, "prepared", Proposal.from_json(ready.proposal), ready.calls, "", ready.purpose
        )
    return best


def _holds(covers: int, prefix: bytes, chain: Sequence[bytes], most: int) -> bool:
    return 0 < covers <= min(most, len(chain)) and chain[covers - 1] == prefix


def may_ask(bounds: Bounds) -> bool:
    """Whether the policy has a model that writes summaries, and a window in which one is worth its tokens."""
    settings = bounds.settings
    return settings.summarizer is not None and bounds.shape.note > 0 and bounds.room >= MIN_ROOM


def tell(bounds: Bounds, gone: Sequence[int], *, before: Told, key: str) -> Flow[Told]:
    """A summary in words of ``gone`` that goes on from ``before``; ``before`` itself where the model gives none."""
    transcript, settings = bounds.transcript, bounds.settings
    fresh = [i for i in gone if i - transcript.head >= before.covers] if before.text else list(gone)
    sources = sources_of(transcript, fresh, bounds.calls())
    lines = lines_of(sources)
    if not lines:
        return before
    named, task = bounds.layer.params.get("prompt"), bounds.protection.task
    written = yield from condense(
        lines,
        prompt=named if isinstance(named, str) else settings.summaries.prompt,
        previous=before.text,
        max_tokens=note_size(bounds),
        max_input=bounds.summarizer_input or bounds.budget.hard_limit,
        counter=bounds.counter,
        by_schema=settings.summaries.by_schema,
        standing=_standing(bounds, gone, fresh=sum(s.tokens for s in sources)),
        most_chunks=settings.summaries.most_chunks,
        key=key,
        beside=lines_of(sources_of(transcript, [task], {})) if task is not None else (),
    )
    if not written.text:
        return Told(before.text, before.covers, before.origin, before.proposal, written.calls, written.failure)
    covers = max(gone) - transcript.head + 1
    return Told(written.text, covers, "model", written.proposal, written.calls, "", written.purpose)


def note_size(bounds: Bounds) -> int:
    """The most tokens of what a model writes."""
    settings = bounds.settings
    return min(max(int(bounds.shape.note * bounds.room), settings.note_min), settings.note_max)


def origin_of(told: Told, *, earlier: Cut | None) -> str:
    """How the text of a summary was made, for the cut."""
    if not told.text:
        return "extract"
    if told.origin == "model":
        return "model+extract"
    if told.origin == "prepared":
        return "prepared+extract"
    return earlier.origin if earlier is not None and earlier.narrative == told.text else "previous+extract"


def _standing(bounds: Bounds, gone: Sequence[int], *, fresh: int) -> tuple[PlannedMessage, ...]:
    """The array that the question is put behind; empty where asking elsewhere costs less, or there is no room."""
    settings, budget = bounds.settings, bounds.budget
    if settings.summarizer != "same" or not settings.summaries.in_place or not bounds.warm:
        return ()
    end = max(gone)
    pieces = tuple(p for p in bounds.standing if p.index is None or p.index <= end)
    tokens = sum(p.tokens for p in pieces) + bounds.transcript.tools
    if tokens + QUESTION + note_size(bounds) > budget.room_for(budget.window) or CACHED_PRICE * tokens >= fresh:
        return ()
    return pieces
