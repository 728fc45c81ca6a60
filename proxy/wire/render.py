"""What was planned as bytes: an array, and the body with it."""

from collections.abc import Collection, Mapping, Sequence
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
    role: str = "user",
    codec: Codec = CHAT,
) -> list[Raw]:
    """The raw segments of a planned array: the client's own bytes wherever a message was not replaced.

    ``marked`` are the indices of messages with Weir's own mark, which is taken out. Cache markers stay on what
    replaces their block. A summary is a message of ``role`` user or system; with ``system_append`` it is added to the
    first system message, and is a user's where there is none.
    """
    rendered = [
        b"" if piece.index is None else _render(piece, messages[piece.index], marked=piece.index in marked, codec=codec)
        for piece in pieces
    ]
    own = [n for n, piece in enumerate(pieces) if piece.index is None]
    for n in own:
        markers = marker_for_summary(pieces, messages) if pieces[n].is_summary else {}
        rendered[n] = codec.own(pieces[n].text or "", markers, role=role if pieces[n].is_summary else "user")
    if own and role == "system_append":
        return _appended(pieces, rendered, codec)
    return rendered


def _appended(pieces: Sequence[PlannedMessage], rendered: list[Raw], codec: Codec) -> list[Raw]:
    place = next((n for n, piece in enumerate(pieces) if piece.is_summary), None)
    if codec.view(rendered[0]).get("role") not in HEAD_ROLES or place is None:
        return rendered
    first = codec.extended(rendered[0], pieces[place].text or "")
    return [first, *(raw for n, raw in enumerate(rendered[1:], 1) if n != place)]


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
    """The body without the definitions of tools of these names; other ``messages``, unless None keeps their bytes.

    A ``marker`` stands behind tools and the ``head`` messages of the system.
    """
    new, codec = _without_tools(request, pruned) if pruned else {}, request.codec
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
    raws, codec = request.messages or (), request.codec
    marked = codec.own_marks(raws)
    bare = [codec.unmarked(raw) if i in marked else raw for i, raw in enumerate(raws)] if marked else None
    return rewritten(request, messages=bare, pruned=())


def _without_tools(request: ClientRequest, pruned: Collection[str]) -> dict[str, bytes]:
    """The fields with definitions, less the pruned ones; an upstream refuses an empty list, so one always stays."""
    new: dict[str, bytes] = {}
    for field in request.codec.tool_fields:
        items = definitions(request, field)
        kept = [raw for raw in items if tool_name(read_value(raw)) not in pruned]
        if len(kept) < len(items):
            new[field] = array_of(kept or items[:1])
    return new
