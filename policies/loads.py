"""What an upstream limits in one request other than tokens, as weights of its messages.

``images``            how many there are            ``image_side``, ``image_bytes``    how large one of them is
``many_images_side``  how large one of many is      ``entries``, ``bytes``             of the array, of the body
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from policies.ledger import EditKind, PlannedMessage

KINDS = ("images", "image_side", "image_bytes", "many_images_side", "entries", "bytes")
NO_LIMITS: Mapping[str, int] = MappingProxyType({})


class Load(NamedTuple):
    """One kind of load of a request that is above what its upstream takes.

    ``each`` is what every message weighs as it came, ``bare`` without its images and files;
    ``fixed`` what the request weighs without messages, ``own`` what a message of Weir's does, and
    ``letter`` each byte of a text of Weir's. ``instead`` is the limit to reach where this one
    cannot be reached.
    """

    kind: str
    most: int
    each: tuple[int, ...]
    bare: tuple[int, ...]
    fixed: int = 0
    own: int = 0
    letter: int = 0
    instead: "Load | None" = None

    def weight(self, piece: PlannedMessage) -> int:
        if piece.text is None:
            return self.own if piece.index is None else self.each[piece.index]
        if piece.index is None:
            return self.own + self.letter * len(piece.text.encode())
        if piece.kind is EditKind.MEDIA:
            return self.bare[piece.index]
        return min(self.bare[piece.index], self.own + self.letter * len(piece.text.encode()))

    def total(self, pieces: Iterable[PlannedMessage]) -> int:
        return self.fixed + sum(map(self.weight, pieces))

    def is_too_much(self, pieces: Iterable[PlannedMessage]) -> bool:
        planned = list(pieces)
        if self.total(planned) <= self.most:
            return False
        return self.instead is None or self.instead.is_too_much(planned)
