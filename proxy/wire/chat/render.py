"""A planned array of chat messages as bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

from policies import EditKind, PlannedMessage
from proxy.wire.chat.markers import content_with, marker_for_summary, marker_within
from proxy.wire.chat.messages import MARK, read_message, unmarked, without_media, without_reasoning
from proxy.wire.raw import Raw, write_value


def render(
    pieces: Sequence[PlannedMessage], messages: Sequence[Raw], marked: frozenset[int], *, role: str = "user"
) -> list[Raw]:
    """The raw slices of a planned array: the client's own bytes wherever a message was not replaced.

    ``marked`` are the indices of messages with Weir's own mark, which is taken out. Cache markers stay on what
    replaces their block. A summary is a message of ``role`` user or system; with ``system_append`` it is added to the
    first system message, and is a user's where there is none.
    """
    rendered = [
        b"" if piece.index is None else _render(piece, messages[piece.index], marked=piece.index in marked)
        for piece in pieces
    ]
    own = [n for n, piece in enumerate(pieces) if piece.index is None]
    for n in own:
        markers = marker_for_summary(pieces, messages) if pieces[n].is_summary else {}
        rendered[n] = _render_own(pieces[n], markers, role=role if pieces[n].is_summary else "user")
    if own and role == "system_append":
        return _appended(pieces, rendered)
    return rendered


def _render_own(piece: PlannedMessage, markers: Mapping[str, Any], *, role: str) -> Raw:
    role = "system" if role == "system" else "user"
    return write_value({"role": role, "content": content_with(piece.text or "", markers)})


def _appended(pieces: Sequence[PlannedMessage], rendered: list[Raw]) -> list[Raw]:
    """The array with its summary as the last part of the first system message; as it is where there is none."""
    value = dict(read_message(rendered[0]))
    place = next((n for n, piece in enumerate(pieces) if piece.is_summary), None)
    if value.get("role") not in ("system", "developer") or place is None:
        return rendered
    content, text = value.get("content"), pieces[place].text or ""
    if isinstance(content, list):
        value["content"] = [*content, {"type": "text", "text": text}]
    else:
        value["content"] = f"{content or ''}\n\n{text}"
    return [write_value(value), *(raw for n, raw in enumerate(rendered[1:], 1) if n != place)]


def _render(piece: PlannedMessage, raw: Raw, *, marked: bool) -> Raw:
    if piece.text is None:
        return unmarked(raw) if marked else raw
    value = dict(read_message(raw))
    value.pop(MARK, None)
    if piece.kind is EditKind.REASONING:
        value = without_reasoning(value)
    elif piece.kind is EditKind.MEDIA:
        value = without_media(value, piece.text.split("\n"))
    else:
        value["content"] = content_with(piece.text, marker_within(value))
    return write_value(value)
