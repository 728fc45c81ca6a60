"""Recorded conversations, read from a file of any size, request by request, each message read and
counted once.

A line is one conversation: an object with ``messages`` and perhaps ``tools`` and ``meta`` (``id``,
``task``, ``facts``), or a bare array of messages. A file that is one JSON document over several
lines may be such an object, or an array of messages or of conversations; it is read whole. Message
``i`` from the assistant answered a request with ``messages[:i]``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from policies.ledger import PlannedMessage
from policies.messages import Body, Transcript, chain_of, head_length
from policies.tokens import TokenCounter
from proxy.wire.chat import body_of, message_of
from proxy.wire.codec import CHAT
from proxy.wire.counting import count_message, count_tools
from proxy.wire.raw import Raw, read_value, write_value
from proxy.wire.render import render

MAX_LINE_LEN = 1 << 28
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BadRecording(Exception):
    """The text names file and line."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a later request needs: all ``needles`` must be in it.

    ``needed_at`` are indices of the assistant messages whose requests need it; without any it is
    the end of the conversation. ``superseded`` are values that it replaced.
    """

    needles: tuple[str, ...]
    needed_at: tuple[int, ...] = ()
    superseded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    id: str
    raws: tuple[bytes, ...]
    values: tuple[Mapping[str, object], ...]
    tools: object = None
    facts: tuple[Fact, ...] = ()
    source: str = ""
    task: str = ""

    @property
    def requests(self) -> tuple[int, ...]:
        """How many messages each request had: up to each of the assistant's, and all if somebody
        else ended.
        """
        ends = [i for i, value in enumerate(self.values) if value["role"] == "assistant" and i]
        if self.values and self.values[-1]["role"] != "assistant":
            ends.append(len(self.values))
        return tuple(ends)


@dataclass(frozen=True, slots=True)
class Place:
    """A recording, and how many bytes of the file were read with it."""

    recording: Recording
    read: int


class _Fact(msgspec.Struct):
    value: str | int | float | None = None
    needles: tuple[str | int | float, ...] = ()
    needed_at: tuple[int, ...] = ()
    superseded: tuple[str | int | float, ...] = ()


class _Meta(msgspec.Struct):
    id: str | int | None = None
    source: str | None = None
    task: str | None = None
    facts: tuple[_Fact, ...] = ()


class _Conversation(msgspec.Struct):
    messages: tuple[msgspec.Raw, ...]
    tools: Any = None
    meta: _Meta | None = None


def read_recordings(path: Path) -> Iterator[Place]:
    """In order, none of them kept. Raises BadRecording."""
    read = 0
    found = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_LEN), b""), start=1):
                read += len(line)
                if not line.strip():
                    continue
                try:
                    recordings = _recordings(line, number)
                except BAD_JSON as fault:
                    if found or "truncated" not in str(fault):
                        raise BadRecording(f"{path}, line {number}: {fault}") from None
                    rest = file.read()
                    read += len(rest)
                    recordings = _whole(line + rest, path)
                for recording in recordings:
                    found = True
                    yield Place(recording, read)
    except OSError as error:
        raise BadRecording(f"{path}: {error.strerror or error}") from error
    if not found:
        raise BadRecording(f"{path}: no conversations in it")


def _whole(text: bytes, path: Path) -> list[Recording]:
    """Those of a file that is one JSON document over several lines."""
    try:
        return _recordings(text, 1)
    except BAD_JSON as fault:
        raise BadRecording(f"{path}: {fault}") from None


def _recordings(text: bytes, line: int) -> list[Recording]:
    if text.lstrip()[:1] != b"[":
        conversations = [msgspec.json.decode(text, type=_Conversation)]
    else:
        items = msgspec.json.decode(text, type=tuple[msgspec.Raw, ...])
        first = msgspec.json.decode(items[0]) if items else None
        if isinstance(first, dict) and "messages" in first:
            conversations = [msgspec.json.decode(item, type=_Conversation) for item in items]
        else:
            conversations = [_Conversation(items)]
    return [_recording(each, number) for number, each in enumerate(conversations, start=line)]


def _recording(conversation: _Conversation, number: int) -> Recording:
    meta = conversation.meta or _Meta()
    raws = tuple(map(bytes, conversation.messages))
    return Recording(
        id=str(meta.id or number),
        raws=raws,
        values=_values(raws),
        tools=conversation.tools,
        facts=tuple(_fact(each) for each in meta.facts if each.needles or each.value is not None),
        source=meta.source or "",
        task=meta.task or "",
    )


def _fact(given: _Fact) -> Fact:
    needles = given.needles or (given.value,)
    return Fact(tuple(map(str, needles)), given.needed_at, tuple(map(str, given.superseded)))


def _values(raws: Sequence[bytes]) -> tuple[Mapping[str, object], ...]:
    values = tuple(map(read_value, raws))
    for index, value in enumerate(values):
        if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
            raise msgspec.DecodeError(f"message {index} should be an object with a role")
    return values  # type: ignore[return-value] # each is a mapping


def recording_of(
    messages: Sequence[Mapping[str, object]],
    *,
    name: str,
    tools: object = None,
    facts: Sequence[Fact] = (),
) -> Recording:
    raws = tuple(write_value(message) for message in messages)
    return Recording(id=name, raws=raws, values=_values(raws), tools=tools, facts=tuple(facts))


PROBE: Mapping[str, object] = {"role": "user", "content": "Go on."}


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """``counts`` is False for the question after the end, which is asked only for facts that are
    needed then.
    """

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
        self.raws: tuple[Raw, ...] = (
            (*recording.raws, write_value(PROBE)) if asks else recording.raws
        )
        self.messages = tuple(
            [message_of(v, count_message(v, counter, model=model)) for v in values]
        )
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
        return tuple(
            PlannedMessage(index, message.tokens)
            for index, message in enumerate(self.messages[:length])
        )

    def rendered(self, pieces: Sequence[PlannedMessage]) -> list[Raw]:
        return render(
            pieces, self.raws, self._marked, roles=[message.role for message in self.messages]
        )

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
    """Facts that requests needed and that were in the client's own array, literally in any case of
    letters.

    ``recoverable`` are in the window or the archive, ``stale`` is a superseded value without the
    one that replaced it.
    """

    needed: int = 0
    kept: int = 0
    recoverable: int = 0
    stale: int = 0

    def __add__(self, other: "Retention") -> "Retention":
        return Retention(
            **{
                each.name: getattr(self, each.name) + getattr(other, each.name)
                for each in fields(self)
            }
        )


def judge(
    script: Script,
    facts: Sequence[Fact],
    *,
    length: int,
    sent: Sequence[PlannedMessage],
    archived: Iterable[int],
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


def _requests(
    recording: Recording, late: tuple[Fact, ...], *, ends_with_a_question: bool
) -> tuple[ScriptRequest, ...]:
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
