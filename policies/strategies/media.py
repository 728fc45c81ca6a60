"""``media``: old images, recordings and files leave a line that says what they were; their text
stays.
"""

from dataclasses import dataclass, replace

from policies.draft import (
    MESSAGE_OVERHEAD,
    Bounds,
    Draft,
    Strategy,
    down_to_target,
    touchable,
    whole,
)
from policies.ledger import Edit, EditKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireMedia(Strategy):
    """Old images, recordings and files leave a line that says what they were and where the original
    is.

    The ``keep`` newest messages that carry any stay: what is no longer sent cannot be viewed again.
    """

    name = "media"
    keep: int = whole(1)

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        media = {i for i, message in enumerate(draft.transcript.messages) if message.media}
        carrying = [p for p in draft.pieces if p.text is None and p.index in media]
        newest = {p.index for p in carrying[max(0, len(carrying) - self.keep) :]}
        old = [
            p
            for i, p, message in touchable(draft, bounds)
            if p.text is None and message.media and i not in newest
        ]
        made = ((piece, without_media(bounds, piece.index or 0)) for piece in old)
        return down_to_target(
            draft,
            bounds,
            ((p, edit) for p, edit in made if edit is not None and edit.tokens < p.tokens),
        )


def without_media(bounds: Bounds, index: int) -> Edit | None:
    """The edit that leaves a line for each image or file of message ``index``; None where they
    cannot be distinguished.
    """
    body = bounds.transcript.read(index)
    ref = bounds.transcript.messages[index].ref
    count = bounds.counter.count
    if not body.attached or len(body.attached) != body.media or body.calls:
        return None
    lines = [f"[weir: {what} left out; archived as {ref}]" for what in body.attached]
    name = 1 + count(body.name) if body.name else 0
    tokens = MESSAGE_OVERHEAD + name + count(body.whole) + sum(map(count, lines))
    return replace(bounds.edited(index, "\n".join(lines), EditKind.MEDIA), tokens=tokens)
