"""Thinking of earlier turns is left out: providers ignore it there, and it is paid for on every request.

It stays in every message after the last thing that the user said, because servers refuse or degrade a tool loop
whose thinking is missing (DeepSeek, Kimi, MiniMax, Anthropic's signed blocks), and in the newest steps of any turn.
"""

from dataclasses import replace

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.ledger import Edit, EditKind
from policies.scoring.blocks import step_numbers

TTL = 2


def reasoning(draft: Draft, bounds: Bounds) -> Draft:
    """The draft without the thinking of assistant messages that are ``ttl`` steps old (a param) and of an earlier turn.

    Their text and calls stay; what would say nothing without its thinking keeps it.
    """
    transcript, guarded = draft.transcript, bounds.protection.all
    stated = bounds.layer.params.get("ttl", TTL)
    ttl = int(stated) if isinstance(stated, int | float) else TTL
    end, steps = _end_of_earlier_turns(bounds), step_numbers(transcript.messages)
    edits: dict[int, Edit] = {}
    for piece in draft.pieces:
        index = piece.index
        if index is None or index >= end or piece.text is not None or index in guarded:
            continue
        if transcript.messages[index].role != "assistant" or steps[-1] - steps[index] < ttl:
            continue
        body = transcript.read(index)
        if not body.reasoning or not (body.text.strip() or body.calls) or not bounds.in_scope(draft, piece):
            continue
        left = max(MESSAGE_OVERHEAD, piece.tokens - bounds.counter.count(body.reasoning))
        edit = replace_content(transcript, index, "", kind=EditKind.REASONING, counter=bounds.counter)
        if left < piece.tokens:
            edits[index] = replace(edit, tokens=left)
    return draft.with_edits(edits)


def _end_of_earlier_turns(bounds: Bounds) -> int:
    """Index of the last user message that says something: results that stand in the user role are no new turn."""
    messages, read = bounds.transcript.messages, bounds.transcript.read
    users = (i for i in range(len(messages) - 1, -1, -1) if messages[i].role == "user")
    return next((i for i in users if read(i).text.strip()), 0)
