"""``rollover``: a new window begins with the state of the task, as does a conversation that
continues another.
"""

from dataclasses import replace

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft, Strategy, cut_at, ref_at
from policies.memory.checkpoint import Checkpoint
from policies.memory.state import previous_state, state_of
from policies.strategies.compact import known_summary, tokens_around, way_back_in
from policies.summary.material import render_resumed, render_summary

NEW_WINDOW = 4_000
"""Most tokens of what a new window, or a conversation that goes on from another, begins with."""


MIN_WINDOW = 120


MIN_RESUMED = 60


class Rollover(Strategy):
    """A new window: the state of the task in place of all history except the open step."""

    name = "rollover"
    costs = True

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        transcript = draft.transcript
        protection = bounds.protection
        head = transcript.head
        start = min(protection.active, default=len(transcript.messages))
        stays = [i for i in range(head, start) if i in protection.verbatim]
        gone = start - head - len(stays)
        room = _room_in_new_window(draft, bounds, start)
        if gone <= 0 or room < MIN_WINDOW:
            return draft
        state = _state(draft, bounds)
        version = max(bounds.known.next_version, draft.cut.version if draft.cut is not None else 0)
        state = replace(state, version=version, window_id=state.window_id + 1)
        shown = state if protection.task is None else state.beside_goal()
        ref = ref_at(draft, start)
        around = tokens_around(bounds, gone=gone)
        said = shown.bootstrap(max_tokens=max(0, room - around), counter=bounds.counter, ref=ref)
        told = known_summary(bounds, most=transcript.place(start))
        cut = cut_at(
            draft,
            bounds,
            start,
            stays=stays,
            text=render_summary(said, removed=gone, back=way_back_in(bounds)),
            origin="rollover",
            version=version,
            narrative=told.text,
            noted=told.covers,
        )
        rolled = draft.with_cut(cut, checkpoint=state.to_json())
        return rolled if rolled.tokens < draft.tokens else draft


def _state(draft: Draft, bounds: Bounds) -> Checkpoint:
    if draft.checkpoint is not None:
        return Checkpoint.from_json(draft.checkpoint)
    return state_of(
        bounds.transcript,
        known=bounds.known,
        counter=bounds.counter,
        readings=bounds.readings,
    )


def _room_in_new_window(draft: Draft, bounds: Bounds, start: int) -> int:
    kept = bounds.protection.verbatim
    open_step = sum(
        tokens for i, tokens in draft.tokens_by_index().items() if i >= start and i not in kept
    )
    limit = min(bounds.target, bounds.safe_limit)
    return min(NEW_WINDOW, limit - bounds.fixed - open_step)


def resume(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with the resumed state in front of its first message, in at most half of
    the room.
    """
    transcript = bounds.transcript
    state = previous_state(bounds.known)
    if not transcript.chain or state is None or not state.validate().valid:
        return draft
    room = min(NEW_WINDOW, bounds.safe_limit - draft.tokens, bounds.room // 2)
    first = transcript.head + 1
    version = bounds.known.next_version
    state = replace(state, version=version, window_id=state.window_id + 1)
    around = bounds.counter.count(render_resumed("")) + MESSAGE_OVERHEAD
    said = (
        state.bootstrap(max_tokens=max(0, room - around), counter=bounds.counter)
        if room > MIN_RESUMED
        else ""
    )
    if not said:
        return draft
    text = render_resumed(said)
    cut = cut_at(draft, bounds, first, stays=[], text=text, origin="resume", narrative=said)
    return draft.with_cut(replace(cut, after=tuple(range(cut.covers))), checkpoint=state.to_json())
