"""Recorded conversations, read one by one from a file of any size.

A line is one conversation: an object with ``messages`` and perhaps ``tools`` and ``meta`` (``id``, ``facts``), or a
bare array of messages. A file that is one JSON document over several lines may be such an object, or an array of
messages or of conversations; it is read whole. Message ``i`` from the assistant answered a request with
``messages[:i]``.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from proxy.errors import ProxyError
from proxy.wire.raw import Raw, read_value, split_array, split_object, write_value

MAX_DOCUMENT_LEN = 1 << 30
MAX_LINE_LEN = 1 << 28


class BadRecording(Exception):
    """A file that does not hold recorded conversations; the text names file and line."""


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
    """One recorded conversation; ``raws`` are its messages as JSON, ``values`` the same as Python objects."""

    id: str
    line: int
    raws: tuple[bytes, ...]
    values: tuple[Mapping[str, object], ...]
    tools: object = None
    facts: tuple[Fact, ...] = ()
    source: str = ""

    @property
    def requests(self) -> tuple[int, ...]:
        """How many messages each request of it had: up to each of the assistant's, and all if somebody else ended."""
        ends = [i for i, value in enumerate(self.values) if value["role"] == "assistant" and i]
        if self.values and self.values[-1]["role"] != "assistant":
            ends.append(len(self.values))
        return tuple(ends)


@dataclass(frozen=True, slots=True)
class Place:
    """A recording, and how many bytes of the file have been read up to its end."""

    recording: Recording
    read: int


def read_recordings(path: Path) -> Iterator[Place]:
    """The conversations of a file in order, none of which is kept. Raises BadRecording."""
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
    """Whether a line is the beginning of a JSON document that goes on in the next one."""
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
    """The recordings of one line or document; ``first`` numbers those without an id."""
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
        yield _conversation(items, {}, line=line, number=first)


def recording_of(
    messages: Sequence[Mapping[str, object]], *, name: str, tools: object = None, facts: Sequence[Fact] = ()
) -> Recording:
    """A recording made from Python objects. Raises BadRecording for a message without a role."""
    raws = tuple(write_value(message) for message in messages)
    values = tuple(_message(raw, index) for index, raw in enumerate(raws))
    return Recording(id=name, line=0, raws=raws, values=values, tools=tools, facts=tuple(facts))


def _recording(fields: Mapping[str, Raw], *, line: int, number: int) -> Recording:
    if "messages" not in fields:
        raise BadRecording("no messages in this object")
    items = split_array(bytes(fields["messages"]))
    if items is None:
        raise BadRecording("messages should be an array")
    return _conversation(items, fields, line=line, number=number)


def _conversation(items: Sequence[Raw], fields: Mapping[str, Raw], *, line: int, number: int) -> Recording:
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
    )


def _message(raw: bytes, index: int) -> Mapping[str, object]:
    value = read_value(raw)
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise BadRecording(f"message {index} should be an object with a role")
    return value


def _facts(value: object) -> Iterator[Fact]:
    """The fact that an entry of ``meta.facts`` describes, nothing where it describes none."""
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
