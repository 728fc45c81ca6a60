"""What an upstream would reject, as one table of rules.

A rule is checked on the planned array only where the client's own array keeps it: what the client sent is
its business, what Weir made of it is ours.
"""

from collections.abc import Callable, Sequence

from policies.draft import Draft
from policies.messages import Message, Transcript
from policies.pieces import Piece

Rule = Callable[[Sequence[Message | None]], bool]


def _results_follow_their_calls(array: Sequence[Message | None]) -> bool:
    waiting: list[str] = []
    for message in array:
        if message is not None and message.is_result:
            if message.answers is None and waiting:
                waiting.pop(0)
            elif message.answers in waiting:
                waiting.remove(message.answers or "")
            else:
                return False
            continue
        if waiting:
            return False
        waiting = list(message.call_ids) if message is not None else []
    return True


def _something_is_said(array: Sequence[Message | None]) -> bool:
    return len(array) > 0


def _starts_with_a_user(array: Sequence[Message | None]) -> bool:
    first = next((m for m in array if m is None or not m.is_head), None)
    return first is None or first.role == "user"  # None is the summary, which the user role carries


RULES: tuple[tuple[str, Rule], ...] = (
    ("every tool result follows the call it answers", _results_follow_their_calls),
    ("the array is not empty", _something_is_said),
    ("the first message after the head is from the user", _starts_with_a_user),
)


def broken_rules(draft: Draft) -> tuple[str, ...]:
    """The rules that the client's array keeps and the planned one does not."""
    before: list[Message | None] = list(draft.transcript.messages)
    after = [_message(p, draft.transcript) for p in draft.pieces]
    return tuple(name for name, holds in RULES if holds(before) and not holds(after))


def _message(piece: Piece, transcript: Transcript) -> Message | None:
    return None if piece.index is None else transcript.messages[piece.index]
