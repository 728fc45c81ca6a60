"""Cache markers: where a client asks its provider to keep the prompt up to a block.

Anthropic's ``cache_control`` and OpenAI's ``prompt_cache_breakpoint`` stand on parts of a message's content. Anthropic
takes at most four in a request, and one that lives an hour never behind one that lives five minutes (its page on
prompt caching). What Weir does with them:

* a message that stays keeps its bytes, and one whose content is replaced keeps its last marker on the replacement;
* a marker on a message that a summary stands for goes to the summary, if the order of lifetimes allows it there;
* with a message that is dropped without a summary, or a tool definition that is left out, its marker goes too: the
  block before it is the client's, and what the client sent is not changed for it.

So a request never has more markers than its client sent, unless the policy asks for one behind tools and system prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies import PlannedMessage
from proxy.wire.raw import Raw, read_value, write_value

MARKERS = ("cache_control", "prompt_cache_breakpoint")
_WORDS = tuple(f'"{name}"'.encode() for name in MARKERS)
HOUR, MINUTES = 3_600, 300


def markers_of(block: Mapping[str, Any]) -> dict[str, Any]:
    """The markers on one part, or on a message itself; empty for none."""
    return {name: block[name] for name in MARKERS if block.get(name) is not None}


def marker_within(value: Mapping[str, Any]) -> dict[str, Any]:
    """The markers on the last marked part of a message's content; empty for none."""
    content = value.get("content")
    parts = reversed(content) if isinstance(content, list) else ()
    return next((found for part in parts if isinstance(part, dict) and (found := markers_of(part))), {})


def content_with(text: str, markers: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """``text`` as a message's content: one part that carries the markers, a string where there are none.

    Empty text stays a string: Anthropic refuses an empty block, with a marker above all.
    """
    return [{"type": "text", "text": text, **markers}] if text and markers else text


def marker_for_summary(pieces: Sequence[PlannedMessage], messages: Sequence[Raw]) -> dict[str, Any]:
    """The markers that a summary takes over: those of the last marked message that is not in the array any more.

    Empty if there is no summary or no such message, or if a marker that lives an hour would come to stand behind one
    that lives five minutes.
    """
    place = next((n for n, piece in enumerate(pieces) if piece.is_summary), None)
    if place is None:
        return {}
    kept = {piece.index for piece in pieces}
    gone = [messages[index] for index in range(len(messages) - 1, -1, -1) if index not in kept]
    if not _has_words(b"".join(gone)):  # one search in all of it takes a fraction of the time of one in each
        return {}
    found = next((all_of[-1] for raw in gone if (all_of := _all_markers(raw))), None)
    if found is None:
        return {}
    mine = _lifetime(found)
    before, after = (
        [_lifetime(each) for piece in side if piece.index is not None for each in _all_markers(messages[piece.index])]
        for side in (pieces[:place], pieces[place:])
    )
    return found if min(before, default=HOUR) >= mine >= max(after, default=MINUTES) else {}


def _all_markers(raw: Raw) -> list[dict[str, Any]]:
    """The markers of each marked part of a message, in order, and those on the message itself."""
    if not _has_words(bytes(raw)):
        return []
    value = read_value(raw)
    return [found for block in _blocks(value) if (found := markers_of(block))]


def _has_words(data: bytes) -> bool:
    """Whether a marker's name stands in these bytes at all; CPython searches from the end in half the time."""
    return any(data.rfind(word) >= 0 for word in _WORDS)


def _blocks(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        content = value.get("content")
        yield from (part for part in (content if isinstance(content, list) else ()) if isinstance(part, dict))
        yield value


def _lifetime(markers: Mapping[str, Any]) -> int:
    """Seconds that a provider keeps what ends at this marker; OpenAI's have one lifetime for the whole request."""
    control = markers.get("cache_control")
    return HOUR if isinstance(control, dict) and control.get("ttl") == "1h" else MINUTES


def breakpoint_for(lifetime: str, body: bytes) -> dict[str, Any]:
    """The marker that a policy's ``cache_breakpoint`` asks for; empty where the client has one of its own."""
    if lifetime == "off" or _has_words(body):
        return {}
    return {"cache_control": {"type": "ephemeral"} | ({"ttl": "1h"} if lifetime == "1h" else {})}


def marked_message(raw: Raw, marker: Mapping[str, Any]) -> bytes | None:
    """A message with a marker on the last text of its content; None where it has none."""
    value = read_value(raw)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not content:
        return None
    if isinstance(content, str):
        return write_value(value | {"content": content_with(content, marker)})
    last = content[-1] if isinstance(content, list) else None
    if not isinstance(last, dict) or not last.get("text"):
        return None
    return write_value(value | {"content": [*content[:-1], {**last, **marker}]})
