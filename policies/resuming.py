"""What another conversation left, put in front of the first message."""

from dataclasses import replace

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD
from policies.ledger import Cut
from policies.saving import previous_state
from policies.summary import render_resumed

SMALLEST = 60


def resume(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with what the resumed state says in front of its first message; unchanged where that has no room.

    The text takes at most what the policy allows and a half of the room. A state that is not valid is not used.
    """
    transcript, state = bounds.transcript, previous_state(bounds.known)
    if not transcript.chain or state is None or not state.validate().valid:
        return draft
    room = min(bounds.settings.checkpoints.window_tokens, bounds.hard_limit - draft.tokens, bounds.room // 2)
    version, ref = bounds.known.next_version, transcript.chain[0].hex()[:12]
    state = replace(state, version=version, window_id=state.window_id + 1)
    around = bounds.counter.count(render_resumed("", version=version, ref=ref)) + MESSAGE_OVERHEAD
    said = state.bootstrap(max_tokens=max(0, room - around), counter=bounds.counter) if room > SMALLEST else ""
    if not said:
        return draft
    text = render_resumed(said, version=version, ref=ref)
    cut = Cut(
        covers=1,
        prefix=transcript.chain[0],
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text),
        version=version,
        ref=ref,
        after=(0,),
        origin="resume",
        narrative=said,
    )
    return draft.with_cut(cut, checkpoint=state.to_json())
