"""Whether what a note names is in what it was made from.

Identifiers, numbers and names are looked up in all of the material, which may be a hundred times
longer. What is written another way (``1,200`` for ``1200``, ``17.5.2024`` for ``2024-05-17``,
``UTF-8`` for ``utf8``, the beginning of a commit's hash) is not invented.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import permutations

from policies.text.segments import WORD, is_identifier, sentences

MAX_LOOKED = 60
MIN_NUMBER_LEN = 2
"""Digits; a smaller number is counted, not copied."""
MIN_LOOSE_LEN = 3
MAX_IDENTIFIER_LEN = 200
INFLECTED = 3
MIN_NAME_LEN = 4
NAMES_ALL = 0.2
"""Share of words with a capital from which on a language writes other words than names with one."""
READ_FOR_CAPITALS = 20_000
_SEPARATED = re.compile(r"(?<=\d)[,\u2019'\u00a0\u202f](?=\d{3}(?!\d))")
_NOT_WORD = re.compile(r"[\W_]+")
_HEX = re.compile(r"[0-9a-f]{7,40}\Z")
_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
_DATE = re.compile(r"(\d{1,4})[-./](\d{1,2})[-./](\d{1,4})\Z")
_DOTTED = re.compile(r"\w{2}\.\w{2}")
_ALTERNATIVES = re.compile(r"[^\W\d_]+/[^\W\d_]+\Z")
_CITED = re.compile(
    r"[`\"\u201c\u00ab\u300c]([^`\"\u201c\u201d\u00ab\u00bb\u300c\u300d\n]{4,80})[`\"\u201d\u00bb\u300d]"
)
_PARTS = re.compile(r"[^/\\]+")
_TITLE = re.compile(r"(?:#{1,6} |\*\*)?[A-Z][\w ]{1,40}(?:\([^()\n]{0,80}\))?(?:\*\*)?:")
_BARE_HEADING = re.compile(_TITLE.pattern + r"[*\s]{0,6}\Z")


def normal_text(text: str) -> str:
    return _SEPARATED.sub("", text.lower())


class _Material:
    def __init__(self, text: str) -> None:
        self.text = normal_text(text)

    @cached_property
    def loose(self) -> str:
        return _NOT_WORD.sub("", self.text)

    def has(self, term: str) -> bool:
        value = normal_text(term[:MAX_IDENTIFIER_LEN])
        return not value or self.holds(value) or self._otherwise(value)

    def holds(self, value: str, *, prefix: bool = False) -> bool:
        text = self.text
        return any(
            _starts(text, at, value) and (prefix or _ends(text, at + len(value), value))
            for at in places(text, value, most=MAX_LOOKED)
        )

    def _otherwise(self, value: str) -> bool:
        if date := _DATE.match(value):
            return any(self.holds(spelling) for spelling in _dates(*date.groups()))
        if _NUMBER.fullmatch(value):
            whole = value.rstrip("0").rstrip(".") if "." in value else f"{value}.00"
            return self.holds(whole) or self.holds(f"{value}.0")
        if "://" in value:
            return self.holds(value.partition("://")[2].removeprefix("www.").rstrip("/"))
        if value.isalpha():
            return self.holds(value[: max(MIN_NAME_LEN, len(value) - INFLECTED)], prefix=True)
        if "/" in value and all(self.holds(part) for part in _PARTS.findall(value.lstrip("~."))):
            return True
        return (
            _HEX.match(value) is not None and self.holds(value, prefix=True)
        ) or self._holds_loosely(value)

    def _holds_loosely(self, value: str) -> bool:
        value = _NOT_WORD.sub("", value)
        if len(value) <= MIN_LOOSE_LEN or value.isdigit():
            return False
        text = self.loose
        return any(
            not (value[0].isdigit() and text[at - 1 : at].isdigit())
            and not (value[-1].isdigit() and text[at + len(value) : at + len(value) + 1].isdigit())
            for at in places(text, value, most=MAX_LOOKED)
        )


def places(text: str, value: str, *, most: int) -> Iterator[int]:
    at = text.find(value)
    while at >= 0 and most > 0:
        yield at
        most -= 1
        at = text.find(value, at + 1)


def _starts(text: str, at: int, value: str) -> bool:
    """Whether a word begins here; an escaped line end of JSON is no part of a word."""
    if at == 0 or not value[0].isalnum() or not _joins(text[at - 1], value[0]):
        return True
    return at > 1 and text[at - 2] == "\\" and text[at - 1] in "ntr"


def _ends(text: str, end: int, value: str) -> bool:
    return end >= len(text) or not value[-1].isalnum() or not _joins(text[end], value[-1])


def _joins(other: str, own: str) -> bool:
    """Whether two adjacent characters belong to one word: scripts without blanks follow Latin ones
    directly.
    """
    return other.isalnum() and other.isascii() == own.isascii()


def hard_terms(text: str, *, names: bool = True) -> tuple[str, ...]:
    """What a sentence cannot paraphrase: identifiers, numbers, quoted text, and names.

    A name is a word with a capital that does not begin a sentence; ``names`` is false where a
    language writes other words so as well.
    """
    found: dict[str, None] = {}
    for line in text.split("\n"):
        for sentence in sentences(line):
            found.update(dict.fromkeys(_CITED.findall(sentence)))
            for n, word in enumerate(WORD.finditer(sentence)):
                said = word.group()
                if _is_hard(said) or (
                    names
                    and n
                    and said[0].isupper()
                    and said.isalpha()
                    and not _follows_mark(sentence, word.start())
                ):
                    found[said] = None
            for number in _NUMBER.findall(_SEPARATED.sub("", sentence)):
                if sum(c.isdigit() for c in number) >= MIN_NUMBER_LEN and number not in found:
                    found[number] = None
    return tuple(
        t
        for t in found
        if not any(t != o and t.isdigit() and t in _NUMBER.findall(o) for o in found)
    )


def _is_hard(word: str) -> bool:
    if _ALTERNATIVES.match(word):
        return False
    return not _NUMBER.fullmatch(word) and (is_identifier(word) or _DOTTED.search(word) is not None)


def _follows_mark(sentence: str, at: int) -> bool:
    before = sentence[:at].rstrip()
    return not before or not (before[-1].isalnum() or before[-1] in ",;'\u2019%")


def capitals_tell(*texts: str) -> bool:
    large = small = 0
    for text in texts:
        for sentence in sentences(text[-READ_FOR_CAPITALS:]):
            for word in WORD.findall(sentence)[1:]:
                if word.isalpha() and word != word.swapcase():
                    large += word[0].isupper() and word[1:].islower()
                    small += word.islower()
    return large < NAMES_ALL * (large + small) or large + small < 10


def invented(text: str, material: str, *, names: bool = True) -> tuple[str, ...]:
    """The identifiers, longer numbers and names of ``text`` that occur in ``material`` in no
    spelling, in order.
    """
    known = _Material(material)
    return tuple(term for term in hard_terms(text, names=names) if not known.has(term))


def grounded(text: str, material: str) -> tuple[str, tuple[str, ...]]:
    names = capitals_tell(text, material)
    wrong = invented(text, material, names=names)
    if not wrong:
        return text, ()
    kept: list[str] = []
    for line in text.split("\n"):
        parts = sentences(line)
        good = [p for p in parts if set(wrong).isdisjoint(hard_terms(p, names=names))]
        if len(good) == len(parts):
            kept.append(line)
        elif good and any(c.isalnum() for c in "".join(good)):
            kept.append(line[: len(line) - len(line.lstrip())] + " ".join(good).rstrip())
        elif ":" in line[:40] and line[:1].isalpha():
            kept.append(line[: line.index(":") + 1])
    return without_empty_headings("\n".join(kept)), wrong


def without_empty_headings(text: str) -> str:
    kept: list[str] = []
    below = ""
    for line in reversed(text.split("\n")):
        if _BARE_HEADING.match(line) and (not below or _TITLE.match(below)):
            continue
        kept.append(line)
        below = line if line.strip() else below
    return "\n".join(reversed(kept))


def _dates(one: str, two: str, three: str) -> Iterator[str]:
    """Other spellings of a date in numbers: every order, with and without zeros in front."""
    for parts in permutations((one, two, three)):
        for mark in "-./":
            yield mark.join(parts)
            yield mark.join(part.zfill(2) for part in parts)
            yield mark.join(part.lstrip("0") for part in parts)
