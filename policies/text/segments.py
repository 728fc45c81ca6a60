"""One pass over a message: what it says in segments, each with its terms.

Sentences end where Unicode says so (UAX 29, by the library), so every script is read alike.
Structured text is read as pairs of key and value, output of programs line by line. A term is a word
or an identifier in lower case; in scripts that are written without blanks, a pair of neighbouring
characters.

In addition: :func:`literals` name something letter by letter, whatever the language around them;
:func:`words` normalise a text for searches (lower case, NFKC, without punctuation and combining
marks; of scripts without blanks, and of Hangul, whose words take their particles with them, every
two neighbouring characters are a word); and :func:`error_lines` find what programs report, which is
in English whatever language their users write.
"""

import json
import math
import re
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, pairwise
from operator import add, itemgetter
from sys import intern
from typing import NamedTuple, TypeVar

from unicode_segmentation_rs import unicode_sentences

from policies.lines import DATA, by_speaker
from policies.messages import Body, ToolCall, Transcript, same_call

T = TypeVar("T")

_SOLID = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, Kana and Han: written without blanks."""
_GROUPED = r"\+?\d{1,4}(?:[ \u00a0]\d{2,5}){2,5}(?!\w)"
"""A number written in groups, as of a telephone or an account, is one word."""
_OF_LINE = r"\d++(?=:[^\W\d][\w.]*+(?![-:/@]))"
"""The number in front of a line of a listing is no part of its first word."""
WORD = re.compile(
    rf"{_GROUPED}|{_OF_LINE}|[^\W_{_SOLID}]++(?:[-./:@'\u2019_]++[^\W_{_SOLID}]++)*+|[{_SOLID}]++"
)
_ASCII_GROUPS = r"(?: \d{2,5}){2,5}(?!\w)"
_ASCII_WORD = re.compile(
    rf"\d\d{{0,3}}{_ASCII_GROUPS}|\+\d{{1,4}}{_ASCII_GROUPS}|{_OF_LINE}|[A-Za-z0-9]++(?:[-./:@'_]++[A-Za-z0-9]++)*+",
    re.ASCII,
)
"""The same for ASCII, in a third less time."""
_OF_NUMBERS = re.compile(r"\d(?: \d\d|:[A-Za-z_])")
_JOINTS = "-./:@'_"
"""What may make one word of numbers, or two of what is joined; other words have marks or blanks
around them.
"""
_APART_IN_ASCII = bytes(
    n if chr(n).isalnum() or chr(n) in f"{_JOINTS}\n" else 32 for n in range(128)
).ljust(256)
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
"""A sentence of fewer characters is an abbreviation or a fragment, and stays with the one before
it.
"""
LONG = 600
"""A sentence or line of more characters is read in pieces, cut at a blank or within a script
without blanks.
"""
_PIECE = re.compile(rf"\S.{{0,{LONG - 1}}}(?!\S)|(?!\s\s).{{0,{LONG - 1}}}[{_SOLID}]|\S++")
_SURROGATE = re.compile("[\ud800-\udfff]")
_STOPS = ".!?"
"""One of these a line of ASCII has, before its last word, where a sentence ends within it."""
_MARKS_IN_ASCII = "".join(c for c in map(chr, range(128)) if not (c.isalnum() or c == "_"))
MAX_RUN = 64
"""Characters of neighbouring marks and blanks that the library is given: it takes time by the
square of them.
"""
_RUN_OF_MARKS = re.compile(rf"[\W_\uff9e\uff9f]{{{MAX_RUN + 1},}}+")
TAIL = 16
_ORDINAL = re.compile(r"(?<!\S)\d{1,2}\.\s*\Z")
"""What may be a day ("17. Juli") or the number of a list rather than the end of a sentence."""


class Segment(NamedTuple):
    """A piece of a message, word for word, and its terms; a pair has its ``key`` separately, and
    the record that contains it.
    """

    text: str
    terms: tuple[str, ...]
    key: str = ""
    record: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """What one message that leaves the window says, or the ``data`` in it, in that role.

    A tool result carries the call that it answers.
    """

    position: int
    role: str
    text: str
    tool: str = ""
    arguments: str = ""
    tokens: int = 0
    ref: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def rate(self) -> float:
        """Tokens per character."""
        length = len(self.text) + (sum(len(c.arguments) for c in self.calls) if self.calls else 0)
        return min(2.0, max(0.15, self.tokens / length)) if length and self.tokens else 0.25

    @property
    def is_result(self) -> bool:
        """Whether it has no speaker: tool output, and data in a message."""
        return bool(self.tool) or self.role in {"tool", "function", DATA}

    @property
    def is_users(self) -> bool:
        return self.role == "user" and not self.is_result


def terms_of(text: str) -> tuple[str, ...]:
    if text.isascii():
        return tuple(dict.fromkeys(map(intern, _ASCII_WORD.findall(text.lower()))))
    return _terms(WORD.findall(text))


def _terms(words: Iterable[str]) -> tuple[str, ...]:
    """Each once, and one object for the same term in every text: it is looked up often, and kept
    long.
    """
    parts = [_pairs(w) if not w.isascii() and _IS_SOLID.match(w) else (w.lower(),) for w in words]
    return tuple(dict.fromkeys(map(intern, chain.from_iterable(parts))))


_ASKS = frozenset("?\uff1f\u061f\u037e")


def is_question(sentence: str) -> bool:
    """Whether nothing but marks and blanks follows a question mark."""
    for character in reversed(sentence):
        if character in _ASKS:
            return True
        if character.isalnum() or character == "_":
            return False
    return False


def _pairs(run: str) -> Iterable[str]:
    return (run,) if len(run) == 1 else map(add, run, run[1:])


def sentences(text: str) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        if not _TELLING.search(line):
            continue
        is_ascii = line.isascii()
        if is_ascii and not _has_stop(line):
            found.append(line.strip())
            continue
        start = end = 0
        for at, until in _spans(line if is_ascii else _SURROGATE.sub("\ufffd", line)):
            if not end:
                start = at
            elif _ends(
                line[max(start, end - TAIL) : end], line[at:until].strip(), is_ascii=is_ascii
            ):
                found.append(line[start:end].strip())
                start = at
            end = until
        found.append(line[start:end].strip())
    return found


def _has_stop(line: str) -> bool:
    said = line.rstrip(_MARKS_IN_ASCII)
    return any(stop in said for stop in _STOPS)


def _spans(line: str) -> Iterator[tuple[int, int]]:
    """Where the library's sentences begin and end in a line, which has no surrogates: half a pair
    is no text to it.
    """
    short = line
    cuts = list[tuple[int, int]]()
    if len(line) > MAX_RUN and (runs := [*_RUN_OF_MARKS.finditer(line)]):
        parts = list[str]()
        before = 0
        removed = 0
        for run in runs:
            middle = run.start() + MAX_RUN // 2
            rest = run.end() - MAX_RUN // 2
            parts.append(line[before:middle])
            cuts.append((middle - removed, rest - middle))
            removed += rest - middle
            before = rest
        short = "".join((*parts, line[before:]))
    at = skipped = 0
    left = iter((*cuts, (len(line) + 1, 0)))
    cut, size = next(left)
    for sentence in unicode_sentences(short):
        at = short.find(sentence, at)
        begin = at
        at += len(sentence)
        places = list[int]()
        for place in (begin, at):
            while place > cut:
                skipped += size
                cut, size = next(left)
            places.append(place + skipped)
        yield places[0], places[1]


def _ends(before: str, after: str, *, is_ascii: bool) -> bool:
    width = len if is_ascii else _width
    return width(after) >= SHORT and width(before) >= SHORT and not _ORDINAL.search(before)


def pieces(texts: Iterable[str]) -> list[str]:
    found: list[str] = []
    for text in texts:
        if len(text) <= LONG:
            found.append(text)
        else:
            found.extend(piece.strip() for piece in _PIECE.findall(text) if _TELLING.search(piece))
    return (
        found
        if len(found) <= MAX_SEGMENTS
        else [*found[: MAX_SEGMENTS // 2], *found[-MAX_SEGMENTS // 2 :]]
    )


def _width(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


class _Known(dict[str, T]):
    """A cache of what is computed from words, which soon recur; cleared when there are too many."""

    def __init__(self, work_out: Callable[[str], T]) -> None:
        self._work_out = work_out

    def __missing__(self, word: str) -> T:
        if len(self) >= MAX_KNOWN:
            self.clear()
        made = self[word] = self._work_out(word)
        return made


MAX_KNOWN = 20_000


class TextReading:
    """What one message says by itself.

    ``identifiers`` are literals by their lower case; ``asked`` are terms in its calls' arguments;
    ``spelled`` are the words of what is said as they are spelled, but for those with a capital
    where a sentence begins.
    """

    __slots__ = ("asked", "identifiers", "segments", "spelled", "terms")

    def __init__(self, source: Source) -> None:
        self.spelled = list[str]()
        self.identifiers: dict[str, str] = {}
        text = clipped(source.text)
        if source.is_result and (document := parse(text)) is not None:
            self.segments = list(structured(document))
        elif source.is_result:
            self._read([line.strip() for line in text.splitlines() if _TELLING.search(line)], text)
        else:
            words = self._read(sentences(text), text)
            self.spelled = [*chain.from_iterable(map(_WITHIN, words))]
            self.spelled += [each[0] for each in words if each and each[0] == each[0].lower()]
        arguments = [c.arguments for c in source.calls] or [source.arguments]
        self.asked = frozenset([t for each in arguments for t in terms_of(each)])
        keys = [segment.key.lower() for segment in self.segments if segment.key]
        said = chain.from_iterable([segment.terms for segment in self.segments])
        self.terms = frozenset(chain(keys, said, self.asked if source.calls else ()))

    def answering(self, arguments: str) -> "TextReading":
        """The same for a result that answers a call with these arguments."""
        made = copy(self)
        made.asked = frozenset(terms_of(arguments))
        return made

    def _read(self, lines: Iterable[str], text: str) -> list[list[str]]:
        lines = pieces(lines)
        is_ascii = text.isascii()
        may_name = _MAY_NAME.search(text)
        if is_ascii and not (may_name and _OF_NUMBERS.search(text)):
            apart = "\n".join(lines).encode().translate(_APART_IN_ASCII).decode().split("\n")
            words = [[*filter(None, map(_BARE.__getitem__, line.split()))] for line in apart]
        else:
            words = [
                [*map(intern, (_ASCII_WORD if line.isascii() else WORD).findall(line))]
                for line in lines
            ]
        if may_name:
            self._identify(chain.from_iterable(words))
        solid = not is_ascii and _IS_SOLID.search(text)
        low = [] if solid else [map(_LOWER.__getitem__, each) for each in words]
        self.segments = [
            *map(
                Segment, lines, map(_terms, words) if solid else map(tuple, map(dict.fromkeys, low))
            )
        ]
        return words

    def _identify(self, words: Iterable[str]) -> None:
        for word in filter(_TELLS_ALONE.__getitem__, words):
            self.identifiers[word.lower()] = word


_DATE = re.compile(r"\d+[-/.]\d+[-/.]\d+\Z")
_OWNED = re.compile(
    r"""
    (?:(?=.*(?:\b|\.)\d(?:\.|\Z))\d{1,3}(?:\.\d{1,3}){2}               # 1.24.3
    | (?:\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4})(?:[T\s][\d:.+Z-]+)?  # 2025-03-04T03:06, 4.3.2025
    | \d[\d.,:]*[kKMGT]i?[Bb]? | (?:\d[\d.]*[dhms])+                   # 497Mi, 4m40.2s
    | \d[\d.,:]*(?:[x/]\d[\d.,:]*|/[^\W\d_]+[\u00b2\u00b3]?)          # 24/365, 3.5x3, 70/m2
    | \d[\d.,:]*['\u2019-]?[^\W\d_A-Z]+(?:-[^\W\d_A-Z]+)*              # 106ms, 6-yard, 19th-century
    | [^\W\d_a-zA-Z]-\d{1,2}(?:[.:]\d{1,2})?                           # \u05d1-7:00
    | [^\W\d_]+/[^\W\d_]+                                             # Monday/Tuesday
    )\Z""",
    re.VERBOSE,
)
"""Versions, dates, measures and words that are joined by a stroke mean nothing without what they
describe.
"""
_COUNTED = re.compile(r"\d[\d.]*[^\W\d_a-zA-Z]+\Z")
"""A number with the word or ending after it, of a script that puts no blank between them."""
_LETTER = re.compile(r"[^\W\d_]")
DIGIT = re.compile(r"\d")
_JOINT = re.compile(r"[_@/\s]")
_MAY_NAME = re.compile(r"[\d_@/]")


@lru_cache(MAX_KNOWN)
def is_identifier(word: str) -> bool:
    if word.isalpha():
        return False
    if DIGIT.search(word):
        if len(word) >= MIN_LONG_NUMBER and word.isdigit():
            return True
        if not word.isascii() and _COUNTED.match(word):
            return False
        return (
            _LETTER.search(word) is not None
            or _DATE.match(word) is not None
            or _JOINT.search(word) is not None
        )
    return _JOINT.search(word) is not None


SHORTEST_IDENTIFIER = 5


def _tells_alone(word: str) -> bool:
    return (
        len(word) >= SHORTEST_IDENTIFIER
        and not word.isdigit()
        and is_identifier(word)
        and not _OWNED.match(word)
    )


_LOWER = _Known(lambda word: intern(word.lower()))
_BARE = _Known(lambda word: intern(word.strip(_JOINTS)))
_OF_VALUE = _Known(terms_of)
SHORT_VALUE = 24
_WITHIN = itemgetter(slice(1, None))
_TELLS_ALONE = _Known(_tells_alone)
_PART = re.compile(r"[^\W_]+")


@lru_cache(MAX_KNOWN)
def shape(word: str) -> str:
    return _PART.sub(_kind_of, word)


def _kind_of(part: re.Match[str]) -> str:
    text = part.group()
    if text.isdigit():
        return "9"
    return "a" if text.isalpha() else f"#{len(text)}"


def is_alone(segment: Segment) -> bool:
    """Whether a pair's value is one identifier; words joined by underscores are one of a few that a
    field may have.
    """
    text, terms, key, _ = segment
    if key == "" or len(terms) != 1 or len(text) < SHORTEST_IDENTIFIER or not is_identifier(text):
        return False
    return not text.replace("_", "").isalpha()


def clipped(text: str) -> str:
    if len(text) <= MAX_READ // 4 or (size := len(text.encode(errors="replace"))) <= MAX_READ:
        return text
    end = len(text) * MAX_READ // size // 2
    return f"{text[:end]}\n{text[-end:]}"


def parse(text: str) -> object | None:
    stripped = text.strip()
    if stripped[:1] not in "{[" or len(stripped) < 2:
        return None
    try:
        value: object = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def structured(document: object) -> Iterator[Segment]:
    """The pairs of a JSON document in its order; items of a list are under the list's key."""
    stack: list[tuple[str, object, int]] = [("", document, 0)]
    pairs = records = 0
    while stack and pairs < MAX_PAIRS:
        key, value, record = stack.pop()
        if isinstance(value, dict):
            records += 1
            stack.extend((str(k), v, records) for k, v in reversed(value.items()))
        elif isinstance(value, list):
            stack.extend((key, v, record) for v in reversed(value))
        elif value is not None and value != "":
            pairs += 1
            # in one line: each has an owner
            named = (key if key.isprintable() else " ".join(key.split())) or " "
            text = value if isinstance(value, str) else _written(value)
            if len(text) <= SHORT_VALUE and text.isprintable():
                yield Segment(text, _OF_VALUE[text], named, record)
                continue
            is_line = len(text) <= LONG and (text.isprintable() or text.splitlines() == [text])
            for line in (text,) if is_line else pieces(sentences(text)):
                yield Segment(line, terms_of(line), named, record)


def _written(value: object) -> str:
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)
    return json.dumps(value)


class Readings:
    """A bounded cache of readings by content, least recently used first out; never more than
    ``most`` segments.
    """

    def __init__(self, *, most: int = 60_000) -> None:
        self._most = most
        self._held = 0
        self._kept: OrderedDict[bytes, TextReading] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, source: Source) -> TextReading:
        if source.arguments and not source.calls:
            return self.of(Source(source.position, "tool", source.text)).answering(source.arguments)
        calls = (
            "\0".join([f"{c.name}\1{c.arguments}" for c in source.calls]) if source.calls else ""
        )
        said = f"{source.is_result}\0{calls}\0{source.text}"
        key = blake2b(said.encode(errors="replace"), digest_size=16).digest()
        found = self.find(key)
        if found is None:
            found = TextReading(source)
            self.keep(key, found)
        return found

    def find(self, key: bytes) -> TextReading | None:
        """The value of a key, which becomes the most recently used."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: bytes, made: TextReading) -> None:
        if key in self._kept:
            return
        size = 2 + len(made.segments)
        # no call between these two, or those below: a thread may be interrupted at a call
        self._kept[key] = made
        self._held += size
        while self._held > self._most and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            size = 2 + len(self._kept[oldest].segments)
            del self._kept[oldest]
            self._held -= size


def sources_of(
    transcript: Transcript, indices: Sequence[int], calls: Mapping[int, ToolCall]
) -> list[Source]:
    """These messages in order, each before the data in it; ``calls`` are those that results answer,
    by their index.
    """
    messages = transcript.messages
    found: list[Source] = []
    for index in indices:
        body = transcript.read(index)
        call = calls.get(index)
        message = messages[index]
        own, data = voices(body, message.role)
        share = len(own) / (len(own) + len(data)) if data else 1.0
        said = Source(
            position=index,
            role="tool" if message.is_result else message.role,
            text=own,
            tool=call.name if call else "",
            arguments=call.arguments if call else "",
            tokens=math.ceil(share * message.tokens),
            ref=message.ref,
            calls=body.calls,
        )
        found.append(said)
        if data:
            found.append(
                Source(index, DATA, data, tokens=message.tokens - said.tokens, ref=message.ref)
            )
    return found


def voices(body: Body, role: str) -> tuple[str, str]:
    """The speaker's own words in a message of this role, and the data in it."""
    if role != "user":
        return body.text, body.data
    own, others = by_speaker(body.text)
    return own, "\n".join(part for part in (others, body.data) if part)


NO_ARGUMENTS = frozenset({"", "{}", "null"})
SAID_AGAIN = 0.5


def replaced_in(answered: Mapping[int, ToolCall], read: Callable[[int], str]) -> set[int]:
    """Which of the results of calls a newer one replaced: that of the same call.

    A call without arguments may request the next page or the same: there only a result that repeats
    half of it replaces it.
    """
    latest: dict[tuple[str, str], int] = {}
    replaced = set[int]()
    for index in sorted(answered, reverse=True):
        key = same_call(answered[index])
        newer = latest.setdefault(key, index)
        if newer != index and (key[1] not in NO_ARGUMENTS or _says_again(read(newer), read(index))):
            replaced.add(index)
        else:
            latest[key] = index
    return replaced


def _says_again(newer: str, older: str) -> bool:
    said, again = map(_values, (older, newer))
    return len(said & again) >= SAID_AGAIN * len(said)


def _values(text: str) -> frozenset[str]:
    document = parse(text)
    return frozenset(
        terms_of(text)
        if document is None
        else chain.from_iterable(s.terms for s in structured(document))
    )


_CODE = re.compile(r"`([^`\n]{2,80})`")
_QUOTED = re.compile(r"[\"\u00ab\u201c\u201e\u300c][^\n]{2,80}[\"\u00bb\u201d\u201c\u300d]|\w\(\)")
_ROOTED = re.compile(r"(?<![\w/:.<])~?/\w[\w.@/-]*\w")
_DOTTED = re.compile(r"\w{2}\.\w")
LONG_NUMBER = 3
"""Digits from which a number names something in what a model says."""
SHORTEST = 4


def literals(text: str) -> tuple[str, ...]:
    found = dict.fromkeys(code.strip() for code in (*_CODE.findall(text), *_ROOTED.findall(text)))
    found.update(dict.fromkeys(word for word in WORD.findall(text) if is_literal(word)))
    return tuple(found)


def is_literal(word: str) -> bool:
    if sum(c.isdigit() for c in word) >= LONG_NUMBER:
        return True
    if len(word) < SHORTEST:
        return False
    if word.replace("/", "").isalpha() and "/" in word:
        return word.count("/") > 1 or not word.islower()
    return is_identifier(word) or _DOTTED.search(word) is not None or has_inner_capital(word)


def names_something(text: str) -> bool:
    """Whether a text has a literal, a digit, a quotation, or a name; True in scripts that have no
    capitals.
    """
    words = WORD.findall(text)
    if not any(c.islower() or c.isupper() for c in text):
        return bool(words)
    named = any(word[0].isupper() or any(c.isdigit() for c in word) for word in words[1:])
    return named or bool(literals(text)) or _QUOTED.search(text) is not None


def has_inner_capital(word: str) -> bool:
    return any(one.islower() and other.isupper() for one, other in pairwise(word))


def normal(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".!\u3002\uff01\u0964\u06d4")


_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff"
)
SOLID = re.compile(f"[{_UNSPACED}]")
_RUN = re.compile(f"[{_UNSPACED}]+")
_MARKS = re.compile(
    f"[{''.join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == 'M')}]+"
)
_APART = re.compile(r"[\W_]+")
_ASCII_APART = "".join(chr(n) if chr(n).isalnum() else " " for n in range(128))


def spaced(text: str) -> str:
    """The text in one form, a blank around each word; scripts without blanks as they run."""
    if not text.isascii():
        # it orders neighbouring marks by the square of their number
        bounded = _RUN_OF_MARKS.sub(_shortened, text)
        text = _MARKS.sub("", unicodedata.normalize("NFKC", bounded))
    return f" {_APART.sub(' ', text.lower())} "


def _shortened(run: re.Match[str]) -> str:
    return run.group()[:MAX_RUN]


def words(text: str) -> list[str]:
    """The words in their order, in scripts without blanks the pairs of neighbouring characters."""
    if text.isascii():
        return text.lower().translate(_ASCII_APART).split()
    return _RUN.sub(_paired, spaced(text)).split()


def _paired(run: re.Match[str]) -> str:
    said = run.group()
    return f" {' '.join(said[i : i + 2] for i in range(max(1, len(said) - 1)))} "


MAX_QUOTED_LEN = 240
BEFORE = 60
MAX_LINE_LEN = 20_000
ERROR = re.compile(
    r"\b(?:\w{0,40}(?:Error|Exception)\b|error\b|failed\b|failure\b|fatal\b|denied\b|not found\b|invalid\b|traceback\b|"
    r"cannot\b|unable to\b|refused\b|timed? ?out\b|panic\b|exit (?:code|status) [1-9])",
    re.IGNORECASE,
)
_NONE = re.compile(
    r"\b(?:no|0|without)\s+(?:errors?|failures?|failed)\b|\b0 failed\b", re.IGNORECASE
)
_SOURCE_LINE = re.compile(
    r"(?:\A(?!\W*\").*[;{(\[]|=>.*)\s*\Z|\A[\s})\];,]++\Z|\A\W*(?:try|else|finally|except|catch)\s*[:{(]"
    r"|\A\W*(?:return|throw|raise|catch|except|if|elif|while|switch|def|class|function|async|await|const|let|var"
    r"|export|public|private|static|func|fn|assert|yield)\b(?=[^:]*[({;=]|[^:]*:\s*\Z)"
    r"|\A\W*(?:throw|raise|return)\s+[\w.]+;?\s*\Z|\A\W*except\s[\w\s.]+:\s*\Z"
    r"|\A\W*(?:from\s+\S+\s+import\b|import\s.*(?:from\s|;\s*\Z|\sas\s))"
    r"|\A\s*+(?:[-+]\s*+)?(?:#|//|/\*|<!--|@@)|\A\s*[\w.]+(?:\[[^\]]*\])? [-+*/|&]?= .*[(;]"
)
_REPORTED = re.compile(
    r"\b\w{0,40}(?:Error|Exception|Errno)\b[^(]{0,20}: |\b(?:error|fatal)(?:\[\w+\]| \w{2,8})?: "
    r"|\b\d+ (?:failed|errors?)\b|^\s*(?:FAIL|FAILED|ERROR|E )\b"
)
_LINE_NUMBER = re.compile(r"^[ \t]{0,8}\d{1,6}(?:[:|]|\t|\u2192)[ \t]?", re.MULTILINE)


def is_code(line: str) -> bool:
    """Whether a line reads as source text rather than as what a program reports of itself."""
    return bool(_SOURCE_LINE.search(line)) and not _REPORTED.search(line)


_REPORTING = (
    "error",
    "exception",
    "fail",
    "fatal",
    "denied",
    "not found",
    "invalid",
    "traceback",
    "cannot",
    "unable to",
    "refused",
    "timed",
    "timeout",
    "panic",
    "exit ",
)


def may_report(text: str, words: Iterable[str] = _REPORTING) -> bool:
    """Whether a text has one of the words in any case of letters; True of what is not ASCII."""
    if not text.isascii():
        return True
    return any(map(text.lower().__contains__, words))


def reports_error(line: str) -> bool:
    return (
        may_report(line)
        and bool(ERROR.search(line))
        and not _NONE.search(line)
        and not is_code(line[:MAX_LINE_LEN])
    )


def error_lines(text: str) -> tuple[str, ...]:
    if not may_report(text) or not ERROR.search(text):
        return ()
    return tuple(dict.fromkeys(_around(line) for line in text.splitlines() if reports_error(line)))


def without_line_numbers(text: str) -> str:
    """A listing without the numbers of its lines, which hide that it is source; anything else as it
    is.
    """
    bare, count = _LINE_NUMBER.subn("", text)
    return bare if count * 2 > text.count("\n") + 1 else text


def _around(line: str) -> str:
    line = " ".join(line.split()) if len(line) <= MAX_QUOTED_LEN else line
    if len(line) <= MAX_QUOTED_LEN:
        return line
    match = ERROR.search(line)
    start = max(0, match.start() - BEFORE) if match else 0
    return " ".join(line[start : start + MAX_QUOTED_LEN].split())
