"""A new window: the state of the task in place of all history but the step that is open.

Where even a summary beside a tail does not fit, the conversation goes on from its checkpoint: goal, constraints and
what is left to do first, learnings and old decisions as room allows.
"""

from dataclasses import replace

from policies.bounds import Bounds
from policies.checkpoint import Checkpoint
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD
from policies.ledger import Cut
from policies.narration import told_before
from policies.saving import state_of
from policies.summary import render_summary

SMALLEST = 120
SLACK = 8


def rollover(draft: Draft, bounds: Bounds) -> Draft:
    """The draft that begins with what its task's state says; unchanged where nothing would go."""
    transcript, protection = draft.transcript, bounds.protection
    head, start = transcript.head, min(protection.active, default=len(transcript.messages))
    stays = [i for i in range(head, start) if i in protection.verbatim]
    gone = start - head - len(stays)
    room = _room(draft, bounds, start)
    if gone <= 0 or room < SMALLEST:
        return draft
    state = _state(draft, bounds)
    version = max(bounds.known.next_version, draft.cut.version if draft.cut is not None else 0)
    state = replace(state, version=version, window_id=state.window_id + 1)
    shown = state if protection.task is None else state.beside_goal()
    prefix = transcript.chain[start - head - 1]
    ref = prefix.hex()[:12]
    around = bounds.counter.count(render_summary("", version=version, ref=ref, removed=gone)) + MESSAGE_OVERHEAD + SLACK
    said = shown.bootstrap(max_tokens=max(0, room - around), counter=bounds.counter, ref=ref)
    text = render_summary(said, version=version, ref=ref, removed=gone)
    before, after = bounds.sides(stays)
    told = told_before(bounds, most=start - head)
    cut = Cut(
        covers=start - head,
        prefix=prefix,
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text),
        version=version,
        ref=ref,
        before=before,
        after=after,
        origin="rollover",
        narrative=told.text,
        noted=told.covers,
    )
    rolled = draft.with_cut(cut, checkpoint=state.to_json())
    return rolled if rolled.tokens < draft.tokens else draft


def _state(draft: Draft, bounds: Bounds) -> Checkpoint:
    """The state that a compaction of this request has just read, else the one that the messages tell."""
    if draft.checkpoint is not None:
        return Checkpoint.from_json(draft.checkpoint)
    return state_of(
        bounds.transcript,
        settings=bounds.settings,
        known=bounds.known,
        counter=bounds.counter,
        readings=bounds.readings,
    )


def _room(draft: Draft, bounds: Bounds, start: int) -> int:
    """Tokens that the text may take: what the policy allows, within what the open step and the rest leave."""
    kept = bounds.protection.verbatim
    tokens = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    open_step = sum(size for i, size in tokens.items() if i >= start and i not in kept)
    limit = min(bounds.target, bounds.hard_limit)
    return min(bounds.settings.checkpoints.window_tokens, limit - bounds.fixed - open_step)
