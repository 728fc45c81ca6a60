"""``reasoning``: thinking of earlier turns goes: providers ignore it there, and it is paid for on
every request.
"""

from dataclasses import dataclass, replace

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft, Strategy, touchable, whole
from policies.ledger import Edit, EditKind
from policies.messages import step_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning(Strategy):
    """Thinking of earlier turns is left out of assistant messages that are ``ttl`` steps old; text
    and calls stay.

    It stays in every message after the user's last message, because servers refuse or degrade a
    tool loop whose thinking is missing (DeepSeek, Kimi, MiniMax, Anthropic's signed blocks), and
    where nothing else is said.
    """

    name = "reasoning"
    ttl: int = whole(2)

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        transcript = draft.transcript
        steps = step_numbers(transcript.messages)
        read = transcript.read
        users = [i for i, message in enumerate(transcript.messages) if message.role == "user"]
        # results in the user role are no new turn
        end = next((i for i in reversed(users) if read(i).whole.strip()), 0)
        edits: dict[int, Edit] = {}
        for index, piece, message in touchable(draft, bounds):
            is_old = index < end and steps[-1] - steps[index] >= self.ttl
            if not is_old or piece.text is not None or message.role != "assistant":
                continue
            body = read(index)
            if not body.reasoning or not (body.text.strip() or body.calls):
                continue
            left = max(MESSAGE_OVERHEAD, piece.tokens - bounds.counter.count(body.reasoning))
            if left < piece.tokens:
                edits[index] = replace(bounds.edited(index, "", EditKind.REASONING), tokens=left)
        return draft.with_edits(edits)


def leave_out_unbound(draft: Draft, bounds: Bounds, *, all_of_it: bool = False) -> Draft:
    """The draft without the thinking that follows its first new element, or without any.

    The newest Claude models sign a thought for what preceded it, and refuse it after anything else
    (platform.claude.com, "Preserved thinking"). What they think from now on is valid as long as the
    edits hold.
    """
    same = 0
    if not all_of_it and not draft.tool_edits:
        pairs = zip(draft.pieces, bounds.standing, strict=False)
        same = next((n for n, (new, old) in enumerate(pairs) if new != old), len(bounds.standing))
    edits: dict[int, Edit] = {}
    for piece in draft.pieces[same:]:
        if piece.index is None or piece.text is not None:
            continue
        message = draft.transcript.messages[piece.index]
        if message.thought:
            left = max(MESSAGE_OVERHEAD, piece.tokens - message.thought)
            edits[piece.index] = replace(
                bounds.edited(piece.index, "", EditKind.UNBOUND), tokens=left
            )
    return draft.with_edits(edits)
