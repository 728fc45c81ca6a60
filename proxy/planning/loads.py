"""What a request weighs other than its tokens, where its upstream is known to take only so much of
it.

Only kinds with a known limit are weighed. The size of an image is cached, since reading it takes
long.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from policies.ledger import PlannedMessage
from policies.loads import Load
from policies.messages import Transcript
from policies.tokens import image_extent
from proxy.wire.chat import media_in
from proxy.wire.codec import ClientRequest
from proxy.wire.raw import split_array

MANY_IMAGES = 20
"""Images of a request above which Anthropic takes only smaller ones."""
OWN_BYTES = 100
MAX_KEPT = 10_000
SIZES = frozenset({"image_side", "image_bytes", "many_images_side"})
"""Kinds that are about the largest image."""


class Extent(NamedTuple):
    """Of a message's images the longest side in pixels and the longest base64; of all its media the
    bytes.
    """

    side: int
    length: int
    size: int


class Scales:
    """Weighs requests, and keeps what the images of messages measure."""

    def __init__(self) -> None:
        self._extents: dict[bytes, Extent] = {}

    def loads(
        self, request: ClientRequest, transcript: Transcript, most: Mapping[str, int]
    ) -> tuple[Load, ...]:
        """The loads of a request that are above what its upstream takes (``most``, by kind) as it
        came.
        """
        if request.messages is None:
            return ()
        pieces = _as_it_came(transcript)
        found = (
            self._load(kind, limit, request, transcript)
            for kind, limit in most.items()
            if kind != "bytes" or len(request.body) > limit
        )
        return tuple(load for load in found if load.is_too_much(pieces))

    def amount(
        self,
        kind: str,
        request: ClientRequest,
        transcript: Transcript,
        pieces: Sequence[PlannedMessage] | None,
    ) -> int:
        """The amount of a kind that goes up, 0 where it is unknown; for image sizes the largest."""
        sent = _as_it_came(transcript) if pieces is None else pieces
        if kind not in SIZES:
            return self._load(kind, 0, request, transcript).total(sent)
        shown = (p.index for p in sent if p.index is not None and p.text is None)
        carrying = (i for i in shown if transcript.messages[i].media)
        return max((self._size(kind, request, transcript, i) for i in carrying), default=0)

    def _load(self, kind: str, limit: int, request: ClientRequest, transcript: Transcript) -> Load:
        messages = transcript.messages
        none = (0,) * len(messages)
        images = tuple(message.media for message in messages)
        if kind == "images":
            return Load(kind, limit, images, none)
        if kind == "entries":
            each = _entries(request, len(messages))
            return Load(kind, limit, each, each, own=1)
        if kind == "bytes":
            sizes = tuple(map(len, request.messages or ()))
            media = (
                self._extent(request, transcript, i).size if count else 0
                for i, count in enumerate(images)
            )
            bare = tuple(size - less for size, less in zip(sizes, media, strict=True))
            return Load(
                kind,
                limit,
                sizes,
                bare,
                fixed=max(0, len(request.body) - sum(sizes)),
                own=OWN_BYTES,
                letter=1,
            )
        large = tuple(
            count if count and self._size(kind, request, transcript, i) > limit else 0
            for i, count in enumerate(images)
        )
        of_many = Load("images", MANY_IMAGES, images, none) if kind == "many_images_side" else None
        return Load(kind, 0, large, none, instead=of_many)

    def _size(self, kind: str, request: ClientRequest, transcript: Transcript, index: int) -> int:
        extent = self._extent(request, transcript, index)
        return extent.length if kind == "image_bytes" else extent.side

    def _extent(self, request: ClientRequest, transcript: Transcript, index: int) -> Extent:
        digest = transcript.messages[index].digest
        extent = self._extents.get(digest)
        if extent is None:
            media = media_in(request.view(index))
            found = [image_extent(part) for part in media]
            sides = (side for side, _ in found)
            lengths = (length for _, length in found)
            extent = Extent(max(sides, default=0), max(lengths, default=0), _letters(media))
            if len(self._extents) >= MAX_KEPT:
                self._extents.clear()
            self._extents[digest] = extent
        return extent


def _as_it_came(transcript: Transcript) -> Sequence[PlannedMessage]:
    return [PlannedMessage(i, message.tokens) for i, message in enumerate(transcript.messages)]


def _entries(request: ClientRequest, length: int) -> tuple[int, ...]:
    """How many elements of the request's array each message is."""
    if request.codec.is_element_a_message or request.messages is None:
        return (1,) * length
    head = len(request.messages.head)
    return tuple(
        0 if n < head else len(split_array(b"[" + bytes(raw) + b"]") or b"-")
        for n, raw in enumerate(request.messages)
    )


def _letters(media: Sequence[Mapping[str, Any]]) -> int:
    """The bytes that images and files take within a message."""
    waiting: list[object] = list(media)
    total = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return total
