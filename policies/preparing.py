"""A summary that is written after an answer, so that the request which needs it does not wait for a model.

It covers what the next batch will cover. Nothing in the conversation changes until then: what was prepared is used
where the history that it covers is still there, and forgotten where it is not.
"""

from collections.abc import Sequence
from dataclasses import replace

from policies.bounds import Bounds, bounds_for
from policies.budget import Budget
from policies.cascade import run_layers
from policies.draft import Draft
from policies.effects import Done, Failed, Flow, Offload, Reply
from policies.extraction.readings import Readings
from policies.ledger import Prepared
from policies.messages import Transcript
from policies.narration import may_ask, tell, told_before
from policies.replay import Known, replay
from policies.settings import ContextSettings, Layer
from policies.tails import tail_start
from policies.tokens import TokenCounter
from policies.triggers import layers_of, limit_for

LEAST_NEW = 0.5
"""What was prepared is prepared anew once it lacks this share of what a batch would summarise anew."""
ENOUGH = 0.5
"""No summary is prepared where what costs nothing gets a request so far down to low water."""


def prepare(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: Budget,
    known: Known,
    counter: TokenCounter,
    summarizer_input: int | None = None,
    readings: Readings | None = None,
) -> Flow[Prepared | None]:
    """What the next batch will need of a model; None if enough of it is there, or the model gave nothing."""
    layer = compaction_layer(settings)
    if layer is None:
        return None
    bounds = bounds_for(
        transcript,
        settings=settings,
        budget=budget,
        known=known,
        counter=counter,
        summarizer_input=summarizer_input,
        readings=readings,
    )
    draft = replay(bounds.transcript, known, bounds.protection)
    bounds = replace(bounds, layer=layer, warm=True, standing=draft.pieces)
    if layer.params.get("prepared") is not True and _is_free(draft, bounds):
        return None
    start = tail_start(draft, bounds, int(bounds.shape.tail * bounds.room))
    head = transcript.head
    gone = [i for i in range(head, start) if i not in bounds.protection.verbatim]
    before = told_before(bounds, most=start - head)
    settled = max((cut.covers for cut in known.cuts if cut.narrative), default=0)
    new, whole = (_tokens_from(transcript, gone, covers) for covers in (before.covers, settled))
    if not new or not may_ask(bounds) or (before.origin == "prepared" and new < LEAST_NEW * whole):
        return None
    told = yield from tell(bounds, gone, before=before, key=transcript.chain[start - head - 1].hex())
    if told.origin != "model":
        return None
    proposal = told.proposal.to_json() if told.proposal is not None else ""
    calls = told.calls + before.calls  # what was prepared before and never used is in it too
    return Prepared(start - head, transcript.chain[start - head - 1], told.text, proposal, told.purpose, calls)


def _tokens_from(transcript: Transcript, indices: Sequence[int], covers: int) -> int:
    """Tokens of those messages that the first ``covers`` after the head do not hold."""
    return sum(transcript.messages[i].tokens for i in indices if i - transcript.head >= covers)


def _is_free(draft: Draft, bounds: Bounds) -> bool:
    """Whether the layers that ask no model would be enough if the batch came now."""
    flow = run_layers(draft, replace(bounds, free_only=True, early=0.0))
    reply: Reply | None = None
    while True:
        try:
            asked = next(flow) if reply is None else flow.send(reply)
        except StopIteration as end:
            done, _ = end.value
            return bool(done.tokens <= bounds.low_water + ENOUGH * (draft.tokens - bounds.low_water))
        reply = Done() if isinstance(asked, Offload) else Failed("not_now")


def is_soft(tokens: int, length: int, *, settings: ContextSettings, budget: Budget, known: Known) -> bool:
    """Whether the next summary should be prepared now.

    ``tokens`` are the uncalibrated ones that the request had when it went up, ``length`` its messages after the head.
    """
    rules = settings.summaries
    if settings.summarizer is None or settings.compaction != "proxy" or settings.when_full != "manage":
        return False
    if rules.prepare_messages is not None:
        covered = max((cut.covers for cut in known.cuts), default=0)
        if length - covered > rules.prepare_messages:
            return True
    return rules.prepare_at is not None and is_near(tokens, share=rules.prepare_at, settings=settings, budget=budget)


def is_near(tokens: int, *, share: float, settings: ContextSettings, budget: Budget) -> bool:
    """Whether a request of so many uncalibrated tokens has this share of what makes the policy summarise."""
    layer = compaction_layer(settings)
    if layer is None:
        return False
    limit = limit_for(layer, settings, budget) if layer.at != 0 else budget.room_for(budget.base(settings))
    return tokens > share * limit


def compaction_layer(settings: ContextSettings) -> Layer | None:
    """The policy's first layer that summarises the history, None if it has none."""
    return next((layer for layer in layers_of(settings) if layer.strategy == "compact"), None)
