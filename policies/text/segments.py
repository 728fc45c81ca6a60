"""One pass over a message: what it says in segments, each with its terms.

Sentences end where Unicode says so (UAX 29, by the library), so every script is read alike. Structured text is read
as pairs of key and value, output of programs line by line. A term is a word or an identifier in lower case; in scripts
that are written without blanks, a pair of neighbouring characters.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import add
from typing import NamedTuple

from unicode_segmentation_rs import unicode_sentences

from policies.messages import ToolCall, Transcript

_SOLID = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, Kana and Han: written without blanks."""
_GROUPED = r"\+?\d{1,4}(?:[ \u00a0]\d{2,5}){2,5}(?!\w)"
"""A number written in groups, as of a telephone or an account, is one word."""
WORD = re.compile(rf"{_GROUPED}|[^\W_{_SOLID}]+(?:[-./:@'\u2019_]+[^\W_{_SOLID}]+)*|[{_SOLID}]+")
_IS_SOLID = re.compile(rf"[{_SOLID}]")
_TELLING = re.compile(r"\w")
MAX_READ = 240_000
"""Bytes of one message that are read, half from each end."""
MAX_PAIRS = 4_000
MAX_SEGMENTS = 8_000
"""Sentences or lines of one message, half from each end."""
MIN_LONG_NUMBER = 6
"""A number of so many digits names something rather than counting it."""
SHORT = 12
"""A sentence of fewer characters is an abbreviation or a fragment, and stays with the one before it."""
LONG = 600
"""A sentence or line of more characters is read in pieces, cut at a blank or within a script without blanks."""
_PIECE = re.compile(rf"\S.{{0,{LONG - 1}}}(?!\S)|.{{0,{LONG - 1}}}[{_SOLID}]|\S+")
_SURROGATE = re.compile("[\ud800-\udfff]")
TAIL = 16
"""Characters before a break that tell whether a sentence ends there."""
_ORDINAL = re.compile(r"(?<!\S)\d{1,2}\.\s*\Z")
"""What may be a day ("17. Juli") or the number of a list rather than the end of a sentence."""


class Segment(NamedTuple):
    """A piece of a message, word for word, and its terms; a pair has its ``key`` apart, and the record it stands in."""

    text: str
    terms: tuple[str, ...]
    key: str = ""
    record: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """One message that leaves the window; a tool result carries the call that it answers."""

    position: int
    role: str
    text: str
    tool: str = ""
    arguments: str = ""
    tokens: int = 0
    ref: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def is_result(self) -> bool:
        """True for what a tool returned."""
        return bool(self.tool) or self.role in {"tool", "function"}

    @property
    def is_users(self) -> bool:
        """True for what a user said."""
        return self.role == "user" and not self.is_result


def terms_of(text: str) -> tuple[str, ...]:
    """The terms of a text in order, each once."""
    if text.isascii():
        return tuple(dict.fromkeys(WORD.findall(text.lower())))
    found: dict[str, None] = {}
    for word in WORD.findall(text):
        if not word.isascii() and _IS_SOLID.match(word):
            found.update(dict.fromkeys(_pairs(word)))
        else:
            found[word.lower()] = None
    return tuple(found)


_ASKS = re.compile(r"[?\uff1f\u061f\u037e]\W*\Z")


def is_question(sentence: str) -> bool:
    """Whether a sentence ends in a question mark of any script."""
    return _ASKS.search(sentence) is not None


def _pairs(run: str) -> Iterable[str]:
    return (run,) if len(run) == 1 else map(add, run, run[1:])


def sentences(text: str) -> list[str]:
    """The sentences of a text as they stand there, without the blanks around them."""
    found: list[str] = []
    for line in text.splitlines():
        if not _TELLING.search(line):
            continue
        start = end = at = 0
        plain = line if line.isascii() else _SURROGATE.sub("\ufffd", line)  # half a pair is no text to the library
        for sentence in unicode_sentences(plain):
            at = plain.find(sentence, at)
            said = sentence.strip()
            if end and _ends(line[max(start, end - TAIL) : end], said):
                found.append(line[start:end].strip())
                start = at
            elif not end:
                start = at
            at += len(sentence)
            end = at
        found.append(line[start:end].strip())
    return found


def _ends(before: str, after: str) -> bool:
    """Whether a sentence ends between two pieces of a line."""
    return min(_width(after), _width(before)) >= SHORT and not _ORDINAL.search(before)


def pieces(texts: Iterable[str]) -> list[str]:
    """The texts, those that are too long in pieces, and of very many both ends."""
    found: list[str] = []
    for text in texts:
        if len(text) <= LONG:
            found.append(text)
        else:
            found.extend(piece.strip() for piece in _PIECE.findall(text) if _TELLING.search(piece))
    return found if len(found) <= MAX_SEGMENTS else [*found[: MAX_SEGMENTS // 2], *found[-MAX_SEGMENTS // 2 :]]


def _width(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


class TextReading:
    """What one message says by itself.

    Attributes:
        segments: its sentences, pairs or lines.
        identifiers: literals of results and answers, lower case to as it stands there.
        terms: every term of the message.
        asked: terms that its calls ask for.
        names: words that begin with a capital within a sentence, in lower case.
        plain: words that stand in lower case.
    """

    __slots__ = ("asked", "identifiers", "names", "plain", "segments", "terms")

    def __init__(self, source: Source) -> None:
        self.names: set[str] = set()
        self.plain: set[str] = set()
        self.identifiers: dict[str, str] = {}
        arguments = [c.arguments for c in source.calls] or [source.arguments]
        self.asked = frozenset(t for each in arguments for t in terms_of(each))
        text = clipped(source.text)
        if source.is_result:
            document = parse(text)
            self.segments = list(structured(document) if document is not None else self._lines(text))
        else:
            self.segments = [self._said(s) for s in pieces(sentences(text))]
        for call in source.calls:
            document = parse(call.arguments)
            asked = list(structured(document, record=-1)) if document is not None else []
            self.segments.extend(asked)
            for segment in asked:
                self._identify(segment.key, WORD.findall(segment.key))
        self.terms = frozenset().union(*(s.terms for s in self.segments), {s.key.lower() for s in self.segments})

    def _said(self, sentence: str) -> Segment:
        words = WORD.findall(sentence)
        self._identify(sentence, words)
        low = [word.lower() for word in words]
        self.plain.update(set(words).intersection(low))
        self.names.update(set(low[1:]).difference(words))
        has_pairs = not sentence.isascii() and _IS_SOLID.search(sentence)
        return Segment(sentence, terms_of(sentence) if has_pairs else tuple(dict.fromkeys(low)))

    def _lines(self, text: str) -> Iterator[Segment]:
        for line in pieces(line.strip() for line in text.splitlines() if _TELLING.search(line)):
            self._identify(line, WORD.findall(line))
            yield Segment(line, terms_of(line))

    def _identify(self, text: str, words: Iterable[str]) -> None:
        if not _MARKED.search(text):
            return
        for word in words:
            if len(word) > 4 and not word.isdigit() and is_identifier(word):
                self.identifiers[word.lower()] = word


_DATE = re.compile(r"\d+[-/.]\d+[-/.]\d+\Z")
_LETTER = re.compile(r"[^\W\d_]")
_DIGIT = re.compile(r"\d")
_JOINT = re.compile(r"[_@/\s]")
_MARKED = re.compile(r"[\d_@/]")
"""What every identifier has one of."""


def is_identifier(word: str) -> bool:
    """Whether a word has an identifier's shape: letters with digits, a path, an address, a date."""
    if _DIGIT.search(word):
        if len(word) >= MIN_LONG_NUMBER and word.isdigit():
            return True
        return _LETTER.search(word) is not None or _DATE.match(word) is not None or _JOINT.search(word) is not None
    return _JOINT.search(word) is not None


def clipped(text: str) -> str:
    """The text, of a very long one its two ends."""
    if len(text) <= MAX_READ // 4 or (size := len(text.encode(errors="replace"))) <= MAX_READ:
        return text
    end = len(text) * MAX_READ // size // 2
    return f"{text[:end]}\n{text[-end:]}"


def parse(text: str) -> object | None:
    """The JSON object or array that a text is, None for anything else."""
    stripped = text.strip()
    if stripped[:1] not in "{[" or len(stripped) < 2:
        return None
    try:
        value: object = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def structured(document: object, record: int = 0) -> Iterator[Segment]:
    """The pairs of a JSON document in its order; items of a list stand under the list's key."""
    stack: list[tuple[str, object, int]] = [("", document, record)]
    pairs = records = 0
    while stack and pairs < MAX_PAIRS:
        key, value, record = stack.pop()
        if isinstance(value, dict):
            records += 1
            inner = record if record < 0 else records
            stack.extend((str(k), v, inner) for k, v in reversed(value.items()))
        elif isinstance(value, list):
            stack.extend((key, v, record) for v in reversed(value))
        elif value is not None and value != "":
            text = value if isinstance(value, str) else json.dumps(value)
            pairs += 1
            lines = [text] if len(text) <= LONG and text.splitlines() == [text] else sentences(text)
            named = (key if key.isprintable() else " ".join(key.split())) or " "  # in one line: each is somebody's
            for line in pieces(lines):
                yield Segment(line, terms_of(line), named, record)


class Readings:
    """A bounded cache of readings by content, least recently used first out; never more than ``most`` segments."""

    def __init__(self, *, most: int = 60_000) -> None:
        self._most = most
        self._held = 0
        self._kept: OrderedDict[bytes, TextReading] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, source: Source) -> TextReading:
        """The reading of a message."""
        calls = "\0".join(f"{c.name}\1{c.arguments}" for c in source.calls)
        said = f"{source.role}\0{source.tool}\0{source.arguments}\0{calls}\0{source.text}"
        key = blake2b(said.encode(errors="replace"), digest_size=16).digest()
        found = self.find(key)
        if found is None:
            found = TextReading(source)
            self.keep(key, found)
        return found

    def find(self, key: bytes) -> TextReading | None:
        """What is kept under a key, which is thereby the newest."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: bytes, made: TextReading) -> None:
        """Keep what was read, unless it is kept already, and let go of the oldest."""
        if key in self._kept:
            return
        self._kept[key] = made
        self._held += 2 + len(made.segments)
        while self._held > self._most and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._held -= 2 + len(dropped.segments)


def sources_of(transcript: Transcript, indices: Sequence[int], calls: Mapping[int, ToolCall]) -> list[Source]:
    """These messages in order; ``calls`` are the calls that tool results answer, by the result's index."""
    messages = transcript.messages
    found: list[Source] = []
    for index in indices:
        body, call, message = transcript.read(index), calls.get(index), messages[index]
        found.append(
            Source(
                position=index,
                role="tool" if message.is_result else message.role,
                text=body.text,
                tool=call.name if call else "",
                arguments=call.arguments if call else "",
                tokens=message.tokens,
                ref=message.ref,
                calls=body.calls,
            )
        )
    return found
