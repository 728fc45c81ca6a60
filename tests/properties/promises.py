"""The plain promises, each a function of what was seen while a script was played; a broken one raises :class:`Broken`."""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tests.properties.clients import Line, texts_of
from tests.properties.scripts import NAMES
from tests.properties.world import OTHER_KEY, REF, Exchange, World, forwarded_array, forwarded_texts

ASSUMED_WINDOW = 16_384
"""The least that Weir takes for the window of a model that nobody knows."""
HEADROOM = 0.05
ERROR = 0.05
TRIGGER = 0.80
"""The lowest trigger that the policy ``balanced`` has in any window, as a share of what is usable."""
MOST_RESERVED = 4_000
ROLLED_BACK = 0.75
"""The share of the trigger below which what was decided before is taken back, where the history was rewound."""
LEAST_RESERVED = 1_024
"""Tokens below which the room for the answer shrinks for nothing."""
SURE = 0.85
FIRST_CPU, CPU_PER_BYTE = 1.0, 2e-6
"""Seconds: what a request may take in any case (a batch, a vocabulary read), and for each byte that was sent."""
BLOCK = re.compile(r"<(weir-\d{6})>\n(Written by Weir .*?)\n</\1>", re.DOTALL)
QUOTED = re.compile(r"(user|assistant|tool|system|data) (\d+|earlier): (.*)", re.DOTALL)
BREAK = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
SPOKEN_BY = {
    "user": {"user", "note"},
    "assistant": {"assistant"},
    "tool": {"result"},
    "system": {"note", "system"},
    "data": {"result"},
}


class Broken(AssertionError):
    """A promise that does not hold, with what shows it."""

    def __init__(self, promise: str, what: str, *shown: object) -> None:
        self.promise = promise
        self.what = what
        self.shown = shown
        super().__init__("\n  ".join([f"{promise} is broken: {what}", *map(str, shown)]))


def room_of(world: World, exchange: Exchange) -> float:
    """Tokens of a prompt up to which ``balanced`` has nothing to do, in what Weir can know of the window.

    The reserve is what the client asks for or 4,000 tokens, at most a quarter of the window.
    """
    model = world.model_of(exchange)
    window = min(model.window, model.known or ASSUMED_WINDOW)
    reserve = min(exchange.answer or MOST_RESERVED, window // 4)
    return TRIGGER * (window - reserve - HEADROOM * window) / (1 + ERROR)


async def p1_what_fits_goes_up_as_it_came(world: World, exchanges: Sequence[Exchange]) -> None:
    """What fits goes up byte for byte, whatever was sent before, to whichever model, if the upstream takes it so."""
    for each in exchanges:
        room = room_of(world, each)
        if _was_long(world, each, room):
            room *= ROLLED_BACK
        if each.forwarded is not None and each.taken and each.tokens <= room and each.forwarded.body != each.sent:
            what = f"{each.tokens} tokens fit ({room:.0f}), and other bytes went up"
            raise Broken("P1", what, each, _difference(each))


def _was_long(world: World, exchange: Exchange, room: float) -> bool:
    """Whether a longer history with the same task was sent to the same model before."""
    return any(
        each is not exchange and each.model == exchange.model and each.lines[0] == exchange.lines[0]
        for each in world.exchanges[: world.exchanges.index(exchange)]
        if each.tokens > room
    )


def _difference(exchange: Exchange) -> str:
    assert exchange.forwarded is not None
    sent, received = exchange.sent, exchange.forwarded.body
    at = next(
        (n for n, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b), min(len(sent), len(received))
    )
    return f"from byte {at} on: sent {sent[at : at + 80]!r}, received {received[at : at + 80]!r}"


async def p2_nothing_is_refused_that_the_upstream_takes(world: World, exchanges: Sequence[Exchange]) -> None:
    """Nothing is refused that the upstream takes by its own count, where Weir was not told a smaller window."""
    for each in exchanges:
        model = world.model_of(each)
        is_told_less = model.known is not None and model.known < model.window
        if each.taken and each.status != 200 and not is_told_less:
            raise Broken("P2", f"refused, and the upstream takes it in its window of {model.window}", each)


async def p3_task_and_newest_words_are_whole(world: World, exchanges: Sequence[Exchange]) -> None:
    """The task and the newest user text are whole; an unread result is whole, or says how to get what is missing.

    It is whole where it fits beside what can never be removed.
    """
    for each in exchanges:
        if each.forwarded is None:
            continue
        said = "\n".join(forwarded_texts(each))
        spoken = [line for line in each.lines if line.role == "user"]
        for what, line in (("the task", spoken[0]), ("the newest user text", spoken[-1])):
            if line.text not in said:
                raise Broken("P3", f"{what} did not go up whole: {line.text[:60]!r}", each)
        for line in _unread(each.lines):
            if line.text in said:
                continue
            room = _room_of_unread(world, each)
            if each.least <= room:
                raise Broken("P3", f"an unread result is cut, and {each.least} tokens fit ({room:.0f})", each)
            await _is_readable(world, each, line)


def _room_of_unread(world: World, exchange: Exchange) -> float:
    """Tokens that have room in any case beside the least answer, a summary and what a step before it leaves."""
    model = world.model_of(exchange)
    window = min(model.window, model.known or ASSUMED_WINDOW)
    return SURE * (window - min(exchange.answer or LEAST_RESERVED, LEAST_RESERVED, window // 16))


def _unread(lines: Sequence[Line]) -> Iterator[Line]:
    """The results at the end that no model has had yet."""
    for line in reversed(lines):
        if line.role == "note":
            continue
        if line.role != "result":
            return
        yield line


async def _is_readable(world: World, exchange: Exchange, line: Line) -> None:
    marked = f'"call_{line.number}"'
    shown = [json.dumps(m) for m in forwarded_array(exchange) if marked in json.dumps(m) and "result" in _kind(m)]
    for ref in REF.findall(" ".join(shown)):
        if await world.blob(ref) == line.text:
            return
    raise Broken("P3", f"an unread result is not whole and does not say how to read it: {shown[:1]!r:.300}", exchange)


def _kind(message: Any) -> str:
    is_result = message.get("role") == "tool" or message.get("type") == "function_call_output"
    return "result" if is_result or "tool_result" in json.dumps(message.get("content", "")) else ""


async def p4_a_name_is_an_identity(world: World, exchanges: Sequence[Exchange]) -> None:
    """Every name in an answer is found and holds exactly its own requests; a deletion touches nothing else."""
    if world.harmed:
        raise Broken("P4", world.harmed[0])
    for each in exchanges:
        if each.name is not None and each.echoed != each.name:
            raise Broken("P4", f"a request with the name {each.name!r} is answered as {each.echoed!r}", each)
        if each.name is None and each.echoed in NAMES[1:]:
            raise Broken("P4", f"a request without a name has joined the conversation {each.echoed!r}", each)
    for name, own in world.echoed().items():
        rows = await world.timeline(name)
        if rows is None:
            raise Broken("P4", f"the conversation {name!r} is in an answer and is not found", own[-1])
        if len(rows) != len(own):
            raise Broken("P4", f"the conversation {name!r} has {len(rows)} rows after {len(own)} requests", own[-1])


async def p5_what_is_quoted_was_said(world: World, exchanges: Sequence[Exchange]) -> None:
    """Every quoted sentence is in the source, under the speaker who said it."""
    for each in exchanges[-1:]:
        if each.forwarded is None:
            continue
        spoken = [(line.role, BREAK.sub("\n", line.text)) for line in (*each.lines, Line("system", each.system))]
        for speaker, said in quoted_in(forwarded_texts(each)):
            own = "\n".join(text for role, text in spoken if role in SPOKEN_BY[speaker])
            missing = next((part for part in re.split(r" ?… ?", said) if part.strip() not in own), None)
            if missing is not None:
                raise Broken("P5", f"no {speaker} has said {missing[:200]!r}", each)


def quoted_in(texts: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Speaker and words of every line that quotes somebody in what Weir wrote."""
    for text in texts:
        for block in BLOCK.finditer(text):
            for entry in re.split(r"\n(?!  )", block[2]):
                found = QUOTED.match(entry)
                if found is not None:
                    yield found[1], found[3].replace("\n  ", "\n")


async def p6_only_a_batch_changes_the_prefix(world: World, exchanges: Sequence[Exchange]) -> None:
    """A request begins with the one before it in its view, unless both together need a batch."""
    for each in exchanges:
        before = each.compared
        if before is None or each.forwarded is None or before.forwarded is None:
            continue
        needed = before.forwarded.prompt_tokens + each.tokens - before.tokens
        if needed > room_of(world, each) or each.answer != before.answer:
            continue
        old, new = (_without_note(forwarded_array(one)) for one in (before, each))
        same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        if same < len(old):
            what = (
                f"{needed} tokens need no batch ({room_of(world, each):.0f}), and the prefix changed at message {same}"
            )
            changed = f"of {len(old)}: {json.dumps(old[same]):.160} is now {json.dumps(new[same : same + 1]):.160}"
            raise Broken("P6", what, before, each, changed)


def _without_note(array: Sequence[Any]) -> list[Any]:
    """The array without what the client keeps at its distance from the end: it moves by itself."""
    return [each for each in array if not any(text.startswith("Note ") for text in texts_of(each))]


async def p7_what_was_removed_can_be_read(world: World, exchanges: Sequence[Exchange]) -> None:
    """What does not go up whole is in the archive, for the key that sent it only.

    A conversation that is not found is what P4 is about.
    """
    for name, group in groupby(exchanges, key=lambda each: each.echoed):
        each = list(group)[-1]
        if name is None or each.forwarded is None or each.deleted:
            continue
        said = "\n".join(forwarded_texts(each))
        missing = {line.text for line in each.lines if line.text and line.text not in said}
        if not missing or await world.timeline(name) is None:
            continue
        kept = await world.archived(name, said)
        archived = "\n".join(kept.values())
        lost = [text for text in missing if text not in archived]
        if lost:
            raise Broken("P7", f"removed, and in no blob: {min(lost)[:60]!r}, of {len(missing)} removed", each)
        ref = next(iter(kept))
        foreign = await world.get(f"blobs/{ref}", key=OTHER_KEY)
        if foreign.status_code != 404:
            raise Broken("P7", f"another key reads {ref}: {foreign.status_code}", each)


async def p8_time_is_linear(world: World, exchanges: Sequence[Exchange]) -> None:
    """The time of a request is linear in what was sent."""
    for each in exchanges:
        most = FIRST_CPU + CPU_PER_BYTE * len(each.sent)
        if each.cpu > most:
            raise Broken("P8", f"{each.cpu:.1f} s of CPU for {len(each.sent)} bytes, more than {most:.1f}", each)


async def p9_one_row_says_the_same(world: World, exchanges: Sequence[Exchange]) -> None:
    """Each request is in exactly one row, and its answer's header, the row and the upstream's usage say the same.

    A conversation that is not found, or holds another number of rows, is what P4 is about.
    """
    seen: set[str] = set()
    for name, own in world.echoed().items():
        rows = await world.timeline(name) or []
        if len(rows) != len(own):
            continue
        twice = seen & {row["id"] for row in rows}
        if twice:
            raise Broken("P9", f"a request is in more than one conversation: {sorted(twice)}", own[-1])
        seen |= {row["id"] for row in rows}
        for each, row in zip(own, rows, strict=True):
            if any(each is one for one in exchanges) and each.counts is not None:
                _says_the_same(each, row)


def _says_the_same(exchange: Exchange, row: Mapping[str, Any]) -> None:
    counts = exchange.counts or ()
    own = (exchange.status, *counts, exchange.headers["x-weir-actions"])
    told = (row["status"], row["tokens_before"], row["tokens_after"], row["limit"], row["actions"])
    if own != told:
        raise Broken("P9", f"the answer says {own}, the row {told}", exchange)
    used = None if exchange.forwarded is None else exchange.forwarded.prompt_tokens
    if row["usage_prompt"] != used:
        raise Broken("P9", f"the upstream reported {used} tokens, the row {row['usage_prompt']}", exchange)


Promise = Callable[[World, Sequence[Exchange]], Awaitable[None]]
PROMISES: dict[str, Promise] = {
    "P1": p1_what_fits_goes_up_as_it_came,
    "P2": p2_nothing_is_refused_that_the_upstream_takes,
    "P3": p3_task_and_newest_words_are_whole,
    "P4": p4_a_name_is_an_identity,
    "P5": p5_what_is_quoted_was_said,
    "P6": p6_only_a_batch_changes_the_prefix,
    "P7": p7_what_was_removed_can_be_read,
    "P8": p8_time_is_linear,
    "P9": p9_one_row_says_the_same,
}
"""Each promise by its number: what it says of the exchanges of one step, after it."""
