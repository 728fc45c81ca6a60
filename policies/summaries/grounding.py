"""Whether what a summary names was there: identifiers that it invented, and identifiers that it lost.

Only the summary is scanned for identifiers; in the material, which may be a hundred times longer, each of them is
looked up. What is written another way (``1,200`` for ``1200``, ``May 17`` for ``2024-05-17``, ``UTF-8`` for ``utf8``,
the beginning of a commit's hash) is not invented.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from policies.extraction.findings import ERROR, is_code
from policies.extraction.identifiers import STRONG, Kind, Mention, scan
from policies.summaries.transcript import without_empty_headings

MOST_LOOKED = 60
MOST_PATHS = 10
MOST_ERRORS = 3
ERRORS_WITHIN = 60_000
"""Characters at the end of the material in which errors are taken for open ones."""
MOST_OF_ERROR = 3
SHORTEST_NUMBER = 3
LONGEST_IDENTIFIER = 200
HOURS = 24
_SEPARATED = re.compile(r"(?<=\d)[,\u2019'\u00a0\u202f](?=\d{3}(?!\d))")
_NOT_WORD = re.compile(r"[\W_]+")
_NUMBER = re.compile(r"\d[\d,]{0,18}(?:\.\d{1,8})?")
_HEX = re.compile(r"[0-9a-f]{7,40}\Z")
_EDGES = "\"'`.,;:!?()[]{}<>*\u2039\u203a"
_ORDINARY = frozenset(
    {"and/or", "he/she", "his/her", "client/server", "read/write", "input/output", "i/o", "n/a", "yes/no"}
)
_PARTS = re.compile(r"[^/\\]+")
_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])[ \t]+(?=[^a-z])|(?<=[\u3002\uff01\uff1f])")
_PATH = re.compile(r"[^\s\"'`<>(){}\[\],;:=|*\\\u2039\u203a]{3,160}")
_DATE = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})|(\d{1,2})/(\d{1,2})/(\d{2,4})|([A-Za-z]{3,9})\.? (\d{1,2})(?:[a-z]{2})?(?:,? (\d{4}))?"
    r"|(\d{1,2})(?:[a-z]{2})? (?:of )?([A-Za-z]{3,9})(?: (\d{4}))?"
)
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?(?::\d{2})? ?([ap])?")
_STATUS = re.compile(r"\b(?:status|code|errno|port|exit|http)\W{1,3}(\d{3,5})\b", re.IGNORECASE)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_CHANGED = re.compile(
    r"\b(?:no longer|instead|replac\w{0,4}|chang\w{0,4}|moved?|renamed?|removed?|deleted?|dropped|cancell?ed|updated?"
    r"|now|fixed"
    r"|solved|resolved|reverted|wrong|not)\b",
    re.IGNORECASE,
)


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


class _Material:
    """The material of a look-up; the more costly forms of it are made when they are first needed."""

    __slots__ = ("_loose", "text")

    def __init__(self, text: str) -> None:
        self.text = normal_text(text)
        self._loose = ""

    @property
    def loose(self) -> str:
        if not self._loose:
            self._loose = _NOT_WORD.sub("", self.text) or " "
        return self._loose

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

    def holds_loosely(self, value: str) -> bool:
        """Whether the letters and digits of ``value`` occur in a row, and not as a part of a longer number."""
        if len(value) <= SHORTEST_NUMBER or value.isdigit():
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
    if at == 0 or not value[0].isalnum() or not text[at - 1].isalnum():
        return True
    return at > 1 and text[at - 2] == "\\" and text[at - 1] in "ntr"


def _ends(text: str, end: int, value: str) -> bool:
    return end >= len(text) or not value[-1].isalnum() or not text[end].isalnum()


def invented(text: str, material: str) -> tuple[str, ...]:
    """The identifiers and longer numbers of ``text`` that occur in ``material`` in no spelling, in order."""
    known = _Material(material)
    seen: dict[str, bool] = {}
    return tuple(dict.fromkeys(m.value for m in _checked(text) if not _occurs(m, known, seen)))


def grounded(text: str, material: str) -> tuple[str, tuple[str, ...]]:
    """``text`` without the sentences that hold invented identifiers, and these identifiers."""
    wrong = invented(text, material)
    if not wrong:
        return text, ()
    bad = set(wrong)
    kept: list[str] = []
    for line in text.split("\n"):
        parts = _SENTENCE.split(line)
        good = [p for p in parts if bad.isdisjoint(m.value for m in _checked(p))]
        if len(good) == len(parts):
            kept.append(line)
        elif good and any(c.isalnum() for c in "".join(good)):
            kept.append(" ".join(good).rstrip())
        elif ":" in line[:40] and line[:1].isalpha():
            kept.append(line[: line.index(":") + 1])
    return without_empty_headings("\n".join(kept)), wrong


def _checked(text: str) -> Iterator[Mention]:
    """The mentions that must not be invented: identifiers, times, and numbers of three digits or more."""
    for mention in scan(text):
        value, kind = mention.value, mention.kind
        if kind in STRONG:
            if (
                kind is Kind.SYMBOL
                and value.isalpha()
                and value[0].isupper()
                and not value.endswith(("Error", "Exception"))
            ):
                continue
            if kind is Kind.PATH and _is_words(value):
                continue
            yield mention
        elif kind is Kind.NAME and any(c.isdigit() for c in value):
            yield from _checked(value.lower())
        elif kind is Kind.QUOTE:
            yield from _checked(value)
        elif kind is Kind.TIME or (
            kind in {Kind.NUMBER, Kind.QUANTITY} and sum(c.isdigit() for c in value) >= SHORTEST_NUMBER
        ):
            yield mention


def _is_words(path: str) -> bool:
    """Whether what looks like a path is words with a stroke between them."""
    return path.lower() in _ORDINARY or (path.count("/") == 1 and path.replace("/", "").isalpha() and path[0] != "/")


def _occurs(mention: Mention, known: _Material, seen: dict[str, bool]) -> bool:
    value = normal_text(mention.value[:LONGEST_IDENTIFIER]).strip(_EDGES)
    found = seen.get(value)
    if found is None:
        found = seen[value] = not value or known.holds(value) or _otherwise(value, mention.kind, known)
    return found


def _otherwise(value: str, kind: Kind, known: _Material) -> bool:
    """Whether the material has ``value`` in another spelling."""
    if kind is Kind.DATE:
        return any(known.holds(v) for v in _dates(value))
    if kind is Kind.TIME:
        return (value[:2].isdigit() and int(value[:2]) >= HOURS) or any(known.holds(v) for v in _times(value))
    if kind in {Kind.AMOUNT, Kind.QUANTITY, Kind.NUMBER}:
        return all(_has_number(n.group(), value, known) for n in _NUMBER.finditer(value))
    if kind in {Kind.URL, Kind.HOST}:
        bare = value.partition("://")[2].removeprefix("www.").rstrip("/") or value.rstrip("/")
        return known.holds(bare)
    if kind is Kind.PATH:
        parts = _PARTS.findall(value.lstrip("~."))
        return bool(parts) and all(known.holds(p) for p in parts)
    if _HEX.match(value) and known.holds(value, prefix=True):
        return True
    if kind is Kind.SYMBOL and value.endswith("()"):
        return known.holds(value[:-2])
    return known.holds_loosely(_NOT_WORD.sub("", value))


def _has_number(number: str, value: str, known: _Material) -> bool:
    plain = number.replace(",", "")
    spellings = [plain, plain.rstrip("0").rstrip(".") if "." in plain else f"{plain}.00", f"{plain}.0"]
    for word, zeros in (("k", 3), ("m", 6), ("million", 6), ("billion", 9), ("thousand", 3)):
        if re.search(rf"\d ?{word}\b", value):
            whole, _, rest = plain.partition(".")
            spellings.append(whole + rest.ljust(zeros, "0") if len(rest) <= zeros else plain)
    return any(known.holds(s) for s in spellings)


def _dates(value: str) -> Iterator[str]:
    """Other spellings of a date, with the year where it is given and without."""
    found = _DATE.match(value)
    if found is None:
        return
    y1, m1, d1, a, b, _, word1, day1, _, day2, word2, _ = found.groups()
    if y1:
        days = [(int(m1), int(d1))]
    elif a:
        days = [(int(a), int(b)), (int(b), int(a))]
    else:
        word, day = (word1 or word2).lower()[:3], int(day1 or day2)
        days = [(_MONTHS.index(word) + 1, day)] if word in _MONTHS else []
    for month, day in days:
        if not 1 <= month <= len(_MONTHS):
            continue
        name = _MONTHS[month - 1]
        full = (
            "january",
            "february",
            "march",
            "april",
            "may",
            "june",
            "july",
            "august",
            "september",
            "october",
            "november",
            "december",
        )[month - 1]
        yield from (
            f"{month:02}-{day:02}",
            f"{month}/{day}",
            f"{month:02}/{day:02}",
            f"{day}/{month}",
            f"{day:02}/{month:02}",
        )
        yield from (
            f"{day}.{month}",
            f"{day:02}.{month:02}",
            f"{day}. {full}",
            f"{name} {day}",
            f"{full} {day}",
            f"{day} {name}",
            f"{day} {full}",
        )
        yield from (f"{full} {day}{s}" for s in ("st", "nd", "rd", "th"))


def _times(value: str) -> Iterator[str]:
    """Other spellings of a time of day: with twelve hours and with twenty-four."""
    found = _CLOCK.match(value)
    if found is None:
        return
    hour, minute, half = int(found.group(1)), found.group(2) or "00", found.group(3)
    for h in {hour, hour % 12 + (12 if half == "p" else 0), (hour - 1) % 12 + 1}:
        yield from (f"{h}:{minute}", f"{h:02}:{minute}")
        if minute == "00":
            yield from (f"{h}am", f"{h}pm", f"{h} am", f"{h} pm")


def missing(text: str, material: str) -> Coverage:
    """What a summary should name of its material: the paths most used, and what the last errors name."""
    known = _Material(text)
    wanted = [*_of_errors(material), *_paths(material)]
    unique = tuple(dict.fromkeys(w for w in wanted if w))
    return Coverage(unique, tuple(w for w in unique if not known.holds(normal_text(w).strip(_EDGES))))


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
        if ERROR.search(line) and not is_code(line):
            told.setdefault(line.strip())
    for line in told:
        found = [m.value for m in scan(line) if m.kind in STRONG] + _STATUS.findall(line)
        yield from (v for v in found[:MOST_OF_ERROR] if len(v) >= SHORTEST_NUMBER)


def lost_lines(previous: str, text: str, *, fresh: str) -> tuple[str, ...]:
    """Lines of the previous notes whose identifiers the new ones have lost, unless what came since changed them."""
    now, since = _Material(text), _Material(fresh)
    lost: list[str] = []
    for line in previous.split("\n"):
        values = [normal_text(m.value).strip(_EDGES) for m in _checked(line)]
        gone = [v for v in values if v and not now.holds(v)]
        if gone and not any(_is_changed(v, since) for v in gone):
            lost.append(line.strip(" -*"))
    return tuple(lost)


def _is_changed(value: str, since: _Material) -> bool:
    """Whether the last thing said of ``value`` is that it changed."""
    at = since.text.rfind(value)
    if at < 0:
        return False
    start, end = since.text.rfind("\n", 0, at) + 1, since.text.find("\n", at)
    return _CHANGED.search(since.text[max(start, at - 300) : min(end if end >= 0 else at + 300, at + 300)]) is not None
