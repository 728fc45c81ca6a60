"""Hidden rounds: calls that Weir has answered itself, as they are kept, and put back into the answer that they led to.

Reasoning is bound to what the model has read before it, so these calls go up again with every later request. The client
knows nothing of them: it sends its answer back as one message, or one run, which is cut where it was.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proxy.wire.codec import array_of
from proxy.wire.raw import Raw, elements_of, read_value, replace_fields, split_array, split_object, write_value


@dataclass(frozen=True, slots=True)
class HiddenRound:
    """What of one round the client has not seen: ``calls`` as the model made them, ``outputs`` as they went back.

    The client has seen ``after`` elements of the answer before it, ``said`` of them no reasoning.
    """

    after: int
    said: int
    calls: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]


def write_rounds(rounds: Sequence[HiddenRound], shown: int, skipped: int = 0) -> str:
    """The rounds of an answer of which the client has seen ``shown`` elements, as JSON text.

    The first ``skipped`` of them are of an answer that was given up: what follows was not made behind them.
    """
    kept = {"of": shown, "skipped": skipped, "rounds": [asdict(each) for each in rounds]}
    return write_value(kept).decode("utf-8", "surrogatepass")


def in_messages(raw: Raw, text: str, thoughts: Collection[str]) -> Raw:
    messages = elements_of(raw)
    fields = split_object(messages[0]) if len(messages) == 1 else {}
    content = fields.get("content", b"null")
    said = read_value(content)
    blocks = (
        split_array(content) or ()
        if isinstance(said, list)
        else [write_value({"type": "text", "text": said})]
        if said
        else ()
    )
    start, cuts = _cuts(blocks, text, thoughts) if fields else (0, [])
    if not cuts and not 0 < start < len(blocks):
        return raw
    found = list[bytes]()
    for place, each in cuts:
        asked = [*blocks[start:place], *map(write_value, each.calls)]
        found.append(b'{"role":"assistant","content":' + array_of(asked) + b"}")
        found.append(write_value({"role": "user", "content": each.outputs}))
        start = place
    if start < len(blocks):
        found.append(replace_fields(bytes(messages[0]), fields, {"content": array_of(blocks[start:])}))
    return b",".join(found)


def in_items(raw: Raw, text: str, thoughts: Collection[str]) -> Raw:
    items = list(elements_of(raw))
    start, cuts = _cuts(items, text, thoughts)
    for place, each in reversed(cuts):
        items[place:place] = map(write_value, (*each.calls, *each.outputs))
    return b",".join(items[start:] or items)


def _cuts(elements: Sequence[Raw], text: str, thoughts: Collection[str]) -> tuple[int, list[tuple[int, HiddenRound]]]:
    """What is to be skipped of the answer as its client sends it back, and the rounds with the place of each in it.

    A client may leave reasoning out: then the other elements tell. Nothing where nobody can tell.
    """
    kept = read_value(text.encode("utf-8", "surrogatepass"))
    if not isinstance(kept, dict):
        return 0, []
    rounds = [HiddenRound(**each) for each in kept["rounds"]]
    if len(elements) == kept["of"]:
        return kept["skipped"], [(each.after, each) for each in rounds]
    values = [read_value(element) for element in elements]
    if any(isinstance(value, dict) and value.get("type") in thoughts for value in values):
        return 0, []
    return 0, [(min(each.said, len(elements)), each) for each in rounds]
