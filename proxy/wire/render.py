"""What was planned as bytes: an array, and the body with it."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from policies.ledger import PlannedMessage
from policies.messages import HEAD_ROLES
from proxy.wire.chat import marker_for_summary
from proxy.wire.codec import CHAT, ClientRequest, Codec, array_of, definitions, tool_name
from proxy.wire.raw import Raw, read_value, replace_fields, split_array, write_value


def render(
    pieces: Sequence[PlannedMessage],
    messages: Sequence[Raw],
    marked: frozenset[int],
    *,
    roles: Sequence[str],
    role: str = "user",
    codec: Codec = CHAT,
) -> list[Raw]:
    """The raw segments of a planned array: the client's own bytes wherever a message was not
    replaced.

    ``roles`` are those of the messages: where no two of them are a user's in a row, none in the
    array are.

    ``marked`` are the indices of messages with Weir's own mark, which is taken out. Cache markers
    stay on what replaces their block. A summary is a message of ``role`` user or system; with
    ``system_append`` it is added to the first system message, and is a user's where there is none.
    """
    rendered = [
        b""
        if piece.index is None
        else _render(piece, messages[piece.index], marked=piece.index in marked, codec=codec)
        for piece in pieces
    ]
    speakers = ["user" if piece.index is None else roles[piece.index] for piece in pieces]
    own = [n for n, piece in enumerate(pieces) if piece.index is None]
    for n in own:
        markers = marker_for_summary(pieces, messages) if pieces[n].is_summary else {}
        speaker = role if pieces[n].is_summary else "user"
        rendered[n] = codec.own(pieces[n].text or "", markers, role=speaker)
        speakers[n] = "system" if speaker == "system" else "user"
    if own and role == "system_append":
        rendered, speakers = _appended(pieces, rendered, speakers, codec)
    if any(one == other == "user" for one, other in pairwise(roles)):
        return rendered
    return _alternating(rendered, speakers, codec)


def _alternating(rendered: Sequence[Raw], speakers: Sequence[str], codec: Codec) -> list[Raw]:
    found = list[Raw]()
    before = ""
    for raw, speaker in zip(rendered, speakers, strict=True):
        both = codec.joined(found[-1], raw) if before == speaker == "user" else None
        if both is None:
            found.append(raw)
        else:
            found[-1] = both
        before = speaker
    return found


def _appended(
    pieces: Sequence[PlannedMessage], rendered: list[Raw], speakers: list[str], codec: Codec
) -> tuple[list[Raw], list[str]]:
    place = next((n for n, piece in enumerate(pieces) if piece.is_summary), None)
    if codec.view(rendered[0]).get("role") not in HEAD_ROLES or place is None:
        return rendered, speakers
    first = codec.extended(rendered[0], pieces[place].text or "")
    others = [n for n in range(1, len(rendered)) if n != place]
    return [first, *(rendered[n] for n in others)], [speakers[0], *(speakers[n] for n in others)]


def _render(piece: PlannedMessage, raw: Raw, *, marked: bool, codec: Codec) -> Raw:
    if piece.text is not None:
        raw = codec.edited(raw, piece.kind, piece.text)
    elif marked:
        raw = codec.unmarked(raw)
    return raw


def rewritten(
    request: ClientRequest,
    *,
    messages: Sequence[Raw] | None,
    pruned: Collection[str],
    head: int = 0,
    marker: Mapping[str, Any] = {},
) -> bytes:
    """The body without the definitions of tools of these names; other ``messages``, unless None
    keeps their bytes.

    A ``marker`` follows tools and the ``head`` messages of the system.
    """
    new = _without_tools(request, pruned) if pruned else {}
    codec = request.codec
    if marker:
        whole = list(messages if messages is not None else request.messages or ())
        if head and (marked := codec.marked(whole[head - 1], marker)) is not None:
            messages = [*whole[: head - 1], marked, *whole[head:]]
        elif defined := split_array(new.get("tools", request.fields.get("tools", b"[]"))):
            last = read_value(defined[-1])
            if isinstance(last, dict):
                new["tools"] = array_of([*defined[:-1], write_value({**last, **marker})])
    if messages is not None:
        new |= codec.compose(request, messages)
    return replace_fields(request.body, request.fields, new) if new else request.body


def without_marks(request: ClientRequest) -> bytes:
    raws = request.messages or ()
    codec = request.codec
    marked = codec.own_marks(raws)
    bare = (
        [codec.unmarked(raw) if i in marked else raw for i, raw in enumerate(raws)]
        if marked
        else None
    )
    return rewritten(request, messages=bare, pruned=())


def _without_tools(request: ClientRequest, pruned: Collection[str]) -> dict[str, bytes]:
    """The fields with definitions, less the pruned ones; an upstream refuses an empty list, so one
    always stays.
    """
    new: dict[str, bytes] = {}
    for field in request.codec.tool_fields:
        items = definitions(request, field)
        kept = [raw for raw in items if tool_name(read_value(raw)) not in pruned]
        if len(kept) < len(items):
            new[field] = array_of(kept or items[:1])
    return new
