"""Hidden rounds: calls that Weir has answered itself, as they are kept, and put back into the answer that they led to.

Reasoning is bound to what the model has read before it, so these calls go up again with every later request. The client
knows nothing of them: it sends its answer back as one message, or one run, which is cut where it was.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proxy.wire.raw import Raw, read_value, replace_fields, split_array, split_object, write_value


@dataclass(frozen=True, slots=True)
class HiddenRound:
    """What of one round the client has not seen: ``calls`` as the model made them, ``outputs`` as they went back.

    The client has seen ``after`` elements of the answer before it, ``said`` of them no reasoning.
    """

    after: int
    said: int
    calls: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]


def write_rounds(rounds: Sequence[HiddenRound], shown: int) -> str:
    """The rounds of an answer of which the client has seen ``shown`` elements, as JSON text."""
    return write_value({"of": shown, "rounds": [asdict(each) for each in rounds]}).decode("utf-8", "surrogatepass")


def in_messages(raw: Raw, text: str, thoughts: Collection[str]) -> Raw:
    """An assistant's message of Anthropic's with its rounds in it."""
    messages = split_array(b"[" + raw + b"]") or ()
    fields = split_object(messages[0]) if len(messages) == 1 else {}
    content = fields.get("content", b"null")
    said = read_value(content)
    blocks = split_array(content) or () if isinstance(said, list) else [_text(said)] if said else ()
    cuts = _cuts(blocks, text, thoughts) if fields else []
    if not cuts:
        return raw
    found, start = list[bytes](), 0
    for place, each in cuts:
        asked = [*blocks[start:place], *map(write_value, each.calls)]
        found.append(b'{"role":"assistant","content":' + _array(asked) + b"}")
        found.append(write_value({"role": "user", "content": each.outputs}))
        start = place
    if start < len(blocks):
        found.append(replace_fields(bytes(messages[0]), fields, {"content": _array(blocks[start:])}))
    return b",".join(found)


def in_items(raw: Raw, text: str, thoughts: Collection[str]) -> Raw:
    """A run of items with its rounds in it."""
    items = list(split_array(b"[" + raw + b"]") or ())
    for place, each in reversed(_cuts(items, text, thoughts)):
        items[place:place] = map(write_value, (*each.calls, *each.outputs))
    return b",".join(items)


def _cuts(elements: Sequence[Raw], text: str, thoughts: Collection[str]) -> list[tuple[int, HiddenRound]]:
    """The rounds with the place of each in the answer as its client sends it back; none where nobody can tell.

    A client may leave reasoning out: then the other elements tell.
    """
    kept = read_value(text.encode("utf-8", "surrogatepass"))
    if not isinstance(kept, dict):
        return []
    rounds = [HiddenRound(**each) for each in kept["rounds"]]
    if len(elements) == kept["of"]:
        return [(each.after, each) for each in rounds]
    values = [read_value(element) for element in elements]
    if any(isinstance(value, dict) and value.get("type") in thoughts for value in values):
        return []
    return [(min(each.said, len(elements)), each) for each in rounds]


def _text(said: object) -> bytes:
    return write_value({"type": "text", "text": said})


def _array(elements: Sequence[Raw]) -> bytes:
    return b"[" + b",".join(elements) + b"]"
