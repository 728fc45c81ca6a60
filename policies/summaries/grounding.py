"""Whether what a summary names was there: identifiers, numbers and names that it invented, and those that it lost.

In the material, which may be a hundred times longer, each of them is looked up. What is written another way (``1,200``
for ``1200``, ``17.5.2024`` for ``2024-05-17``, ``UTF-8`` for ``utf8``, the beginning of a commit's hash) is not
invented.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from policies.summaries.transcript import without_empty_headings
from policies.text.output import reports_error
from policies.text.segments import WORD, is_identifier, sentences

MOST_LOOKED = 60
MOST_PATHS = 10
MOST_ERRORS = 3
ERRORS_WITHIN = 60_000
"""Characters at the end of the material in which errors are taken for open ones."""
MOST_OF_ERROR = 3
SHORTEST_NUMBER = 2
"""Digits; a smaller number is counted, not copied."""
SHORTEST_LOOSE = 3
LONGEST_IDENTIFIER = 200
INFLECTED = 3
"""Letters at the end of a name that may be another case's."""
SHORTEST_NAME = 4
NAMES_ALL = 0.2
"""Share of words with a capital from which on a language writes other words than names with one."""
READ_FOR_CAPITALS = 20_000
_SEPARATED = re.compile(r"(?<=\d)[,\u2019'\u00a0\u202f](?=\d{3}(?!\d))")
_NOT_WORD = re.compile(r"[\W_]+")
_HEX = re.compile(r"[0-9a-f]{7,40}\Z")
_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
_DATE = re.compile(r"(\d{1,4})[-./](\d{1,2})[-./](\d{1,4})\Z")
_DOTTED = re.compile(r"\w{2,}\.\w{2,}")
_ALTERNATIVES = re.compile(r"[^\W\d_]+/[^\W\d_]+\Z")
_QUOTED = re.compile(
    r"[`\"\u201c\u00ab\u300c]([^`\"\u201c\u201d\u00ab\u00bb\u300c\u300d\n]{4,80})[`\"\u201d\u00bb\u300d]"
)
_PARTS = re.compile(r"[^/\\]+")
_PATH = re.compile(r"[^\s\"'`<>(){}\[\],;:=|*\\\u2039\u203a]{3,160}")
_STATUS = re.compile(r"\b(?:status|code|errno|port|exit|http)\W{1,3}(\d{3,5})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What of the material a summary should name, and what of that it does not."""

    wanted: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the wanted that is named, 1.0 where nothing is wanted."""
        return 1.0 - len(self.missing) / len(self.wanted) if self.wanted else 1.0


def normal_text(text: str) -> str:
    """``text`` as identifiers are compared: small letters, numbers without separators of thousands."""
    return _SEPARATED.sub("", text.lower())


class Material:
    """The material of a look-up; the more costly forms of it are made when they are first needed."""

    __slots__ = ("_loose", "text")

    def __init__(self, text: str) -> None:
        self.text = normal_text(text)
        self._loose = ""

    @property
    def loose(self) -> str:
        """Its letters and digits alone."""
        if not self._loose:
            self._loose = _NOT_WORD.sub("", self.text) or " "
        return self._loose

    def has(self, term: str) -> bool:
        """Whether what a sentence names occurs, in whatever spelling."""
        value = normal_text(term[:LONGEST_IDENTIFIER])
        return not value or self.holds(value) or self._otherwise(value)

    def holds(self, value: str, *, prefix: bool = False) -> bool:
        """Whether ``value`` occurs as a whole word or phrase, or as the beginning of a word."""
        at = self.text.find(value)
        for _ in range(MOST_LOOKED):
            if at < 0:
                return False
            if _starts(self.text, at, value) and (prefix or _ends(self.text, at + len(value), value)):
                return True
            at = self.text.find(value, at + 1)
        return False

    def _otherwise(self, value: str) -> bool:
        """Whether the material has ``value`` in another spelling."""
        if date := _DATE.match(value):
            return any(self.holds(spelling) for spelling in _dates(*date.groups()))
        if _NUMBER.fullmatch(value):
            whole = value.rstrip("0").rstrip(".") if "." in value else f"{value}.00"
            return self.holds(whole) or self.holds(f"{value}.0")
        if "://" in value:
            return self.holds(value.partition("://")[2].removeprefix("www.").rstrip("/"))
        if value.isalpha():
            return self.holds(value[: max(SHORTEST_NAME, len(value) - INFLECTED)], prefix=True)
        if "/" in value and all(self.holds(part) for part in _PARTS.findall(value.lstrip("~."))):
            return True
        return (_HEX.match(value) is not None and self.holds(value, prefix=True)) or self._holds_loosely(value)

    def _holds_loosely(self, value: str) -> bool:
        """Whether the letters and digits of ``value`` occur in a row, and not as a part of a longer number."""
        value = _NOT_WORD.sub("", value)
        if len(value) <= SHORTEST_LOOSE or value.isdigit():
            return False
        text = self.loose
        at = text.find(value)
        for _ in range(MOST_LOOKED):
            if at < 0:
                return False
            end = at + len(value)
            before, after = text[at - 1 : at], text[end : end + 1]
            if not (value[0].isdigit() and before.isdigit()) and not (value[-1].isdigit() and after.isdigit()):
                return True
            at = text.find(value, at + 1)
        return False


def _starts(text: str, at: int, value: str) -> bool:
    """Whether a word begins here; an escaped line end of JSON is no part of a word."""
    if at == 0 or not value[0].isalnum() or not _joins(text[at - 1], value[0]):
        return True
    return at > 1 and text[at - 2] == "\\" and text[at - 1] in "ntr"


def _ends(text: str, end: int, value: str) -> bool:
    return end >= len(text) or not value[-1].isalnum() or not _joins(text[end], value[-1])


def _joins(other: str, own: str) -> bool:
    """Whether two characters side by side are of one word: scripts without blanks follow Latin ones directly."""
    return other.isalnum() and other.isascii() == own.isascii()


def hard_terms(text: str, *, names: bool = True) -> tuple[str, ...]:
    """What a sentence cannot paraphrase: identifiers, numbers, what stands in quotation marks, and names.

    A name is a word with a capital that does not begin a sentence; ``names`` is false where a language writes other
    words so as well.
    """
    found: dict[str, None] = {}
    for line in text.split("\n"):
        for sentence in sentences(line):
            found.update(dict.fromkeys(_QUOTED.findall(sentence)))
            for n, word in enumerate(WORD.finditer(sentence)):
                said = word.group()
                if _is_hard(said) or (
                    names and n and said[0].isupper() and said.isalpha() and not _follows_mark(sentence, word.start())
                ):
                    found[said] = None
            for number in _NUMBER.findall(_SEPARATED.sub("", sentence)):
                if sum(c.isdigit() for c in number) >= SHORTEST_NUMBER and number not in found:
                    found[number] = None
    return tuple(t for t in found if not any(t != o and t.isdigit() and t in _NUMBER.findall(o) for o in found))


def _is_hard(word: str) -> bool:
    if _ALTERNATIVES.match(word):
        return False
    return not _NUMBER.fullmatch(word) and (is_identifier(word) or _DOTTED.search(word) is not None)


def _follows_mark(sentence: str, at: int) -> bool:
    """Whether a word begins something: behind a colon, a bracket, a dash or a quotation mark."""
    before = sentence[:at].rstrip()
    return not before or not (before[-1].isalnum() or before[-1] in ",;'\u2019%")


def capitals_tell(*texts: str) -> bool:
    """Whether a capital within a sentence tells a name from other words."""
    large = small = 0
    for text in texts:
        for sentence in sentences(text[-READ_FOR_CAPITALS:]):
            for word in WORD.findall(sentence)[1:]:
                if word.isalpha() and word != word.swapcase():
                    large += word[0].isupper() and word[1:].islower()
                    small += word.islower()
    return large < NAMES_ALL * (large + small) or large + small < 10


def invented(text: str, material: str, *, names: bool = True) -> tuple[str, ...]:
    """The identifiers, longer numbers and names of ``text`` that occur in ``material`` in no spelling, in order."""
    known = Material(material)
    return tuple(term for term in hard_terms(text, names=names) if not known.has(term))


def grounded(text: str, material: str) -> tuple[str, tuple[str, ...]]:
    """``text`` without the sentences that hold something invented, and what that is."""
    known, names = Material(material), capitals_tell(text, material)
    wrong = {term for term in hard_terms(text, names=names) if not known.has(term)}
    if not wrong:
        return text, ()
    kept: list[str] = []
    for line in text.split("\n"):
        parts = sentences(line)
        good = [p for p in parts if wrong.isdisjoint(hard_terms(p, names=names))]
        if len(good) == len(parts):
            kept.append(line)
        elif good and any(c.isalnum() for c in "".join(good)):
            kept.append(line[: len(line) - len(line.lstrip())] + " ".join(good).rstrip())
        elif ":" in line[:40] and line[:1].isalpha():
            kept.append(line[: line.index(":") + 1])
    ordered = tuple(term for term in hard_terms(text, names=names) if term in wrong)
    return without_empty_headings("\n".join(kept)), ordered


def _dates(one: str, two: str, three: str) -> Iterator[str]:
    """Other spellings of a date in numbers: every order, with and without zeros in front."""
    for parts in permutations((one, two, three)):
        for mark in "-./":
            yield mark.join(parts)
            yield mark.join(part.zfill(2) for part in parts)
            yield mark.join(part.lstrip("0") for part in parts)


def missing(text: str, material: str) -> Coverage:
    """What a summary should name of its material: the paths most used, and what the last errors name."""
    known = Material(text)
    wanted = [*_of_errors(material), *_paths(material)]
    unique = tuple(dict.fromkeys(w for w in wanted if w))
    return Coverage(unique, tuple(w for w in unique if not known.holds(normal_text(w))))


def _paths(material: str) -> list[str]:
    """The names of the files that the material mentions most, twice at the least, in that order."""
    counts: Counter[str] = Counter()
    for word in _PATH.findall(material):
        if "/" in word and "//" not in word:
            name = word.rstrip("./").rpartition("/")[2]
            stem, dot, ending = name.rpartition(".")
            if stem and dot and 0 < len(ending) <= 5 and ending.isalnum() and not ending.isdigit():
                counts[name] += 1
    return [name for name, times in counts.most_common(MOST_PATHS) if times > 1]


def _of_errors(material: str) -> Iterator[str]:
    """Identifiers of the last lines that report an error."""
    told: dict[str, None] = {}
    for line in reversed(material[-ERRORS_WITHIN:].splitlines()):
        if len(told) == MOST_ERRORS:
            break
        line = line[:400]
        if reports_error(line):
            told.setdefault(line.strip())
    for line in told:
        found = [w for w in WORD.findall(line) if _is_hard(w)] + _STATUS.findall(line)
        yield from (v for v in found[:MOST_OF_ERROR] if len(v) > SHORTEST_NUMBER)


def lost_lines(previous: str, text: str, *, fresh: str) -> tuple[str, ...]:
    """Lines of the previous notes that name what the new ones do not, unless it came up again since."""
    now, since = Material(text), Material(fresh)
    lost: list[str] = []
    for line in previous.split("\n"):
        gone = [t for t in hard_terms(line, names=False) if not now.has(t)]
        if gone and not any(since.has(t) for t in gone):
            lost.append(line.strip(" -*"))
    return tuple(lost)
