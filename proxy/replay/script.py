"""Recorded conversations, read from a file of any size, request by request, each message read and counted once.

A line is one conversation: an object with ``messages`` and perhaps ``tools`` and ``meta`` (``id``, ``task``,
``facts``), or a bare array of messages. A file that is one JSON document over several lines may be such an object, or
an array of messages or of conversations; it is read whole. Message ``i`` from the assistant answered a request with
``messages[:i]``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO

from policies.ledger import PlannedMessage
from policies.messages import Body, Transcript, chain_of, head_length
from policies.tokens import TokenCounter
from proxy.errors import ProxyError
from proxy.wire.chat import body_of, message_of
from proxy.wire.codec import CHAT
from proxy.wire.counting import count_message, count_tools
from proxy.wire.raw import Raw, read_value, split_array, split_object, write_value
from proxy.wire.render import render

MAX_DOCUMENT_LEN = 1 << 30
MAX_LINE_LEN = 1 << 28


class BadRecording(Exception):
    """The text names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that a later request needs: all ``needles`` are to stand in it.

    ``needed_at`` are indices of the assistant messages whose requests need it; without any it is the end of the
    conversation. ``superseded`` are values that it replaced.
    """

    needles: tuple[str, ...]
    needed_at: tuple[int, ...] = ()
    superseded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    id: str
    line: int
    raws: tuple[bytes, ...]
    values: tuple[Mapping[str, object], ...]
    tools: object = None
    facts: tuple[Fact, ...] = ()
    source: str = ""
    task: str = ""

    @property
    def requests(self) -> tuple[int, ...]:
        """How many messages each request had: up to each of the assistant's, and all if somebody else ended."""
        ends = [i for i, value in enumerate(self.values) if value["role"] == "assistant" and i]
        if self.values and self.values[-1]["role"] != "assistant":
            ends.append(len(self.values))
        return tuple(ends)


@dataclass(frozen=True, slots=True)
class Place:
    recording: Recording
    read: int


def read_recordings(path: Path) -> Iterator[Place]:
    """In order, none of them kept. Raises BadRecording."""
    try:
        with path.open("rb") as file:
            yield from _read(file, path)
    except OSError as error:
        raise BadRecording(f"{path}: {error.strerror or error}") from error


def _read(file: BinaryIO, path: Path) -> Iterator[Place]:
    read = found = number = 0
    while line := file.readline(MAX_LINE_LEN + 1):
        number += 1
        if len(line) > MAX_LINE_LEN:
            raise BadRecording(f"{path}, line {number}: longer than {MAX_LINE_LEN >> 20} MB")
        read += len(line)
        if not line.strip():
            continue
        if not found and _is_unfinished(line):
            yield from _read_document(line, file, path, number)
            return
        for recording in _recordings(line, path, number, number):
            found += 1
            yield Place(recording, read)
    if not found:
        raise BadRecording(f"{path}: no conversations in it")


def _is_unfinished(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8", "replace"))
    except json.JSONDecodeError as error:
        return line.lstrip()[:1] in (b"[", b"{") and error.pos >= len(line.decode("utf-8", "replace").rstrip())
    except RecursionError:
        return False
    return False


def _read_document(begin: bytes, file: BinaryIO, path: Path, number: int) -> Iterator[Place]:
    rest = file.read(MAX_DOCUMENT_LEN + 1)
    if len(rest) > MAX_DOCUMENT_LEN:
        raise BadRecording(f"{path}: one JSON document of more than {MAX_DOCUMENT_LEN >> 20} MB; write a line for each")
    whole = begin + rest
    try:
        json.loads(whole)
    except json.JSONDecodeError as error:
        raise BadRecording(f"{path}, line {number - 1 + error.lineno}: {error.msg}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise BadRecording(f"{path}, line {number}: {error}") from None
    for recording in _recordings(whole, path, number, 1):
        yield Place(recording, len(whole))


def _recordings(text: bytes, path: Path, line: int, first: int) -> Iterator[Recording]:
    try:
        yield from _split(text, line, first)
    except BadRecording as fault:
        raise BadRecording(f"{path}, line {line}: {fault}") from None
    except ProxyError:
        raise BadRecording(f"{path}, line {line}: neither an object nor an array in JSON") from None


def _split(text: bytes, line: int, first: int) -> Iterator[Recording]:
    if text.lstrip()[:1] != b"[":
        yield _recording(split_object(text), line=line, number=first)
        return
    items = split_array(text)
    if items is None:
        raise BadRecording("not JSON")
    if items and "messages" in split_object(bytes(items[0])):
        for number, item in enumerate(items, start=first):
            yield _recording(split_object(bytes(item)), line=line, number=number)
    else:
        yield _recording({"messages": text}, line=line, number=first)


def recording_of(
    messages: Sequence[Mapping[str, object]], *, name: str, tools: object = None, facts: Sequence[Fact] = ()
) -> Recording:
    raws = tuple(write_value(message) for message in messages)
    values = tuple(_message(raw, index) for index, raw in enumerate(raws))
    return Recording(id=name, line=0, raws=raws, values=values, tools=tools, facts=tuple(facts))


def _recording(fields: Mapping[str, Raw], *, line: int, number: int) -> Recording:
    if "messages" not in fields:
        raise BadRecording("no messages in this object")
    items = split_array(bytes(fields["messages"]))
    if items is None:
        raise BadRecording("messages should be an array")
    raws = tuple(bytes(item) for item in items)
    values = tuple(_message(raw, index) for index, raw in enumerate(raws))
    meta = read_value(fields["meta"]) if "meta" in fields else None
    meta = meta if isinstance(meta, Mapping) else {}
    listed = meta.get("facts")
    name = meta.get("id")
    return Recording(
        id=name if isinstance(name, str) and name else f"{number}",
        line=line,
        raws=raws,
        values=values,
        tools=read_value(fields["tools"]) if "tools" in fields else None,
        facts=tuple(fact for each in (listed if isinstance(listed, list) else ()) for fact in _facts(each)),
        source=str(meta.get("source") or ""),
        task=str(meta.get("task") or ""),
    )


def _message(raw: bytes, index: int) -> Mapping[str, object]:
    value = read_value(raw)
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise BadRecording(f"message {index} should be an object with a role")
    return value


def _facts(value: object) -> Iterator[Fact]:
    if not isinstance(value, Mapping):
        return
    needles = _strings(value.get("needles")) or _strings([value.get("value")])
    if needles:
        at = value.get("needed_at")
        yield Fact(
            needles=needles,
            needed_at=tuple(i for i in at if isinstance(i, int)) if isinstance(at, list) else (),
            superseded=_strings(value.get("superseded")),
        )


def _strings(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else ()
    return tuple(str(item) for item in items if isinstance(item, str | int | float) and str(item))


PROBE: Mapping[str, object] = {"role": "user", "content": "Go on."}


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """``counts`` is False for the question after the end, which is asked only for facts that are needed then."""

    length: int
    facts: tuple[Fact, ...] = ()
    counts: bool = True


class Script:
    def __init__(self, recording: Recording, *, counter: TokenCounter, model: str) -> None:
        self.recording = recording
        self._model = model
        late = tuple(fact for fact in recording.facts if not fact.needed_at)
        asks = bool(late) and bool(recording.values) and recording.values[-1]["role"] == "assistant"
        values = (*recording.values, PROBE) if asks else recording.values
        self.raws: tuple[Raw, ...] = (*recording.raws, write_value(PROBE)) if asks else recording.raws
        self.messages = tuple([message_of(v, count_message(v, counter, model=model)) for v in values])
        self._marked = CHAT.own_marks(self.raws)
        self.tools = count_tools(recording.tools, None, None, counter, model=model)
        self.requests = _requests(recording, late, ends_with_a_question=asks)
        self._bodies = tuple(body_of(value) for value in values)
        self._texts: dict[int, str] = {}
        self._head = head_length(self.messages)
        self._chain = chain_of("replay", self.messages, self._head)

    def read(self, index: int) -> Body:
        return self._bodies[index]

    def body(self, length: int) -> bytes:
        tools = self.recording.tools
        defined = b"" if tools is None else b',"tools":' + write_value(tools)
        messages = b",".join(map(bytes, self.raws[:length]))
        return b'{"model":%b,"messages":[%b]%b}' % (write_value(self._model), messages, defined)

    def transcript(self, length: int) -> Transcript:
        return Transcript(
            messages=self.messages[:length],
            read=self.read,
            chain=self._chain[: max(0, length - self._head)],
            head=min(self._head, length),
            tools=self.tools,
        )

    def raw_pieces(self, length: int) -> tuple[PlannedMessage, ...]:
        return tuple(PlannedMessage(index, message.tokens) for index, message in enumerate(self.messages[:length]))

    def rendered(self, pieces: Sequence[PlannedMessage]) -> list[Raw]:
        return render(pieces, self.raws, self._marked)

    def text(self, index: int) -> str:
        found = self._texts.get(index)
        if found is None:
            found = self._texts[index] = self._bodies[index].said.lower()
        return found

    def piece_text(self, piece: PlannedMessage) -> str:
        if piece.text is None:
            return self.text(piece.index) if piece.index is not None else ""
        calls = self._bodies[piece.index].calls if piece.index is not None else ()
        return Body(piece.text, calls).said.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Facts that requests needed and that stood in the client's own array, literally in any case of letters.

    ``recoverable`` are in the window or the archive, ``stale`` is a superseded value without the one that replaced it.
    """

    needed: int = 0
    kept: int = 0
    recoverable: int = 0
    stale: int = 0

    def __add__(self, other: "Retention") -> "Retention":
        return Retention(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


def judge(
    script: Script, facts: Sequence[Fact], *, length: int, sent: Sequence[PlannedMessage], archived: Iterable[int]
) -> Retention:
    if not facts:
        return Retention()
    window = "\n".join(script.piece_text(piece) for piece in sent)
    original = archive = None
    total = Retention()
    for fact in facts:
        if _stands(fact, window):
            total += Retention(needed=1, kept=1, recoverable=1)
            continue
        if original is None or archive is None:
            original = "\n".join(script.text(index) for index in range(length))
            archive = "\n".join((window, *(script.text(index) for index in sorted(archived))))
        if _stands(fact, original):
            stale = any(value.lower() in window for value in fact.superseded)
            total += Retention(needed=1, recoverable=int(_stands(fact, archive)), stale=int(stale))
    return total


def _stands(fact: Fact, text: str) -> bool:
    return all(needle.lower() in text for needle in fact.needles)


def _requests(recording: Recording, late: tuple[Fact, ...], *, ends_with_a_question: bool) -> tuple[ScriptRequest, ...]:
    needed: dict[int, list[Fact]] = {}
    for fact in recording.facts:
        for at in fact.needed_at:
            needed.setdefault(at, []).append(fact)
    found = [ScriptRequest(length, tuple(needed.get(length, ()))) for length in recording.requests]
    if ends_with_a_question:
        found.append(ScriptRequest(len(recording.values) + 1, late, counts=False))
    elif late and found:
        found[-1] = ScriptRequest(found[-1].length, (*found[-1].facts, *late))
    return tuple(found)
