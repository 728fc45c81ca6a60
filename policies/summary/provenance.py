"""Binding what a note says to who said it: a note is a claim, and what stands in it has to be somebody's word.

Every sentence of a note is looked up in the sentences, records and lines that it was made from, by the terms that they
share, weighed by how rare these are. Where one of them says most of it, it stands in the sentence's place, word for
word and with who said it: an id that was swapped, a negation that was lost and an approval that only a tool gave have
nowhere to stand. A sentence of the notes' own stays where no source says the same, if what it names stands together in
one step of the conversation; never for what the user wants or decided, and never for what a tool reported.

Identifiers, numbers and names are looked up in all of the material, which may be a hundred times longer. What
is written another way (``1,200`` for ``1200``, ``17.5.2024`` for ``2024-05-17``, ``UTF-8`` for ``utf8``, the beginning
of a commit's hash) is not invented.
"""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from policies.summary.material import AUTHORITIES, MaterialLine, harmless, label
from policies.summary.prompts import field_named
from policies.text.segments import WORD, is_identifier, reports_error, sentences, terms_of

PREFIX = 4
"""Letters of a word that tell it from others; what follows is mostly inflection."""
SAYS = 0.25
"""Share of a sentence's weight from which on a source is about the same: to quote it can do no harm."""
ABSENT = 0.3
"""Weight of a word that nobody said, as a share of that of a word that was said once; of a pair of characters half."""
TELLING = 4.0
"""How much more an identifier tells than a word, and a number half as much."""
BESIDE = 0.2
"""What the steps around a passage say of the rest counts so much: people speak of a thing in several sentences."""
CLOSENESS = 0.15
"""What it counts that a passage says little beside."""
MORE = 0.2
"""Share of the weight that a second source of the same step has to add to be quoted as well."""
MAX_QUOTE_LEN = 280
"""Characters of a quotation."""
MAX_REPLY_LEN = 100
"""Characters of what a user answers to the assistant's last words and belongs to them."""
MIN_MATCH_LEN = 3
PLANS = frozenset({"remaining", "next_step"})
"""What is still to be done is the notes' own to say."""
DECIDING = frozenset({"goal", "decisions", "constraints"})
NOTES = "notes so far"
_MARKS = (('"', '"'), ("\u201c", "\u201d"), ("\u00ab", "\u00bb"))
_QUOTED = re.compile(
    r"according to (?:the |a )?([\w .,/-]{2,64}): (?:\"([^\"\n]{1,700})\"|\u201c([^\u201d\n]{1,700})\u201d"
    r"|\u00ab([^\u00bb\n]{1,700})\u00bb)(?=[\s.;,)]|\Z)"
)
_BULLETS = re.compile(r"\s{0,40}(?:(?:[-*\u2022\u2013+]|#{1,6}|\d{1,3}[.)])\s{1,4}){0,3}")
_CELLS = re.compile(r"([A-Za-z_ ]{3,20})\|[^|\n]{1,20}\|\s*")
_HEADING = re.compile(r"(?:\*\*)?([A-Za-z][\w ,-]{1,60}?)\s?(\([^()\n]{0,80}\))?(?:\*\*)?:(?:\*\*)?(?:\s+|\Z)")
_RECORDS = re.compile(r"(?<=[}\]])\s{0,4},\s{0,4}(?=[{\[])")
MAX_LOOKED = 60
MAX_PATHS = 10
MAX_ERRORS = 3
ERRORS_WITHIN = 60_000
"""Characters at the end of the material in which errors are taken for open ones."""
MAX_OF_ERROR = 3
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
_PATH = re.compile(r"[^\s\"'`<>(){}\[\],;:=|*\\\u2039\u203a]{3,160}")
_STATUS = re.compile(r"\b(?:status|code|errno|port|exit|http)\W{1,3}(\d{3,5})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Passage:
    line: int
    step: int
    text: str
    terms: frozenset[str]


def bind(text: str, lines: Sequence[MaterialLine], *, previous: str = "", in_place: bool = False) -> str:
    """``text`` with every sentence bound to its source among ``lines`` and the notes taken before, or left out.

    ``in_place`` says that it stands where its only source stood, which tells whose word it is.
    """
    sources = _Sources([*_noted(previous), *lines])
    kept: list[str] = []
    shown: set[str] = set()
    about = ""
    for line in text.split("\n"):
        lead, named, body = _lead(line)
        about = named or about
        said = [p for p in _sentences(body) if any(c.isalnum() for c in p)]
        stays: list[str] = []
        for sentence in said:
            bound = sources.bind(sentence, about=about, in_place=in_place) or ()
            fresh = [part for part in bound if part not in shown]
            shown |= {part for part in fresh if part != sentence}
            stays += fresh
        if stays or not said:
            kept.append(lead + " ".join(stays) if said else line)
        elif named and not _BULLETS.fullmatch(lead):
            kept.append(lead.rstrip())
    return without_empty_headings("\n".join(kept))


def _lead(line: str) -> tuple[str, str, str]:
    end = _BULLETS.match(line).end()  # type: ignore[union-attr]
    cells = _CELLS.match(line, end)
    if cells is not None:
        return line[: cells.end()], cells.group(1).strip().lower(), line[cells.end() :]
    heading = _HEADING.match(line, end)
    named = field_named(heading.group(1)) if heading is not None else ""
    if heading is not None and named:
        return line[: heading.end()], named, line[heading.end() :]
    return line[:end], "", line[end:]


def _sentences(body: str) -> list[str]:
    found: list[str] = []
    at = 0
    for quote in _QUOTED.finditer(body):
        found += sentences(body[at : quote.start()])
        found.append(quote.group())
        at = quote.end()
    return [*found, *sentences(body[at:])]


def _noted(previous: str) -> Iterator[MaterialLine]:
    for line in previous.split("\n"):
        for sentence in _sentences(_lead(line)[2]):
            quote = _QUOTED.fullmatch(sentence)
            yield MaterialLine(quote.group(1), _inside(quote)) if quote else MaterialLine(NOTES, sentence)


def _inside(quote: "re.Match[str]") -> str:
    return next(g for g in quote.groups()[1:] if g is not None)


def stems(text: str) -> frozenset[str]:
    found: set[str] = set()
    for term in terms_of(unicodedata.normalize("NFKC", text)):
        if any(c.isdigit() for c in term) or len(term) < MIN_MATCH_LEN or is_identifier(term):
            found.add(term)
            if is_identifier(term):
                found.update(part for part in re.split(r"[^\w]+", term) if len(part) > MIN_MATCH_LEN)
        elif term != term.upper() or term.isascii():
            found.add(term[:PREFIX])
        else:  # no capitals: prefixes and suffixes are written with the word
            size = 2 if term[0] >= "\uac00" else 3
            found.update(term[i : i + size] for i in range(max(1, len(term) - size + 1)))
    return frozenset(found)


@dataclass(slots=True)
class _Sources:
    lines: Sequence[MaterialLine]
    passages: list[_Passage] = field(default_factory=list)
    holding: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    quotes: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        step = 0
        for number, line in enumerate(self.lines):
            before = self.lines[number - 1] if number else None
            if before is not None and not line.is_call and not line.is_result and before.origin != NOTES:
                step += 1
            for text in _passages(line):
                terms = stems(text)
                if terms:
                    for term in terms:
                        self.holding[term].append(len(self.passages))
                    self.passages.append(_Passage(number, step, text, terms))

    def bind(self, sentence: str, *, about: str, in_place: bool) -> tuple[str, ...] | None:
        quote = _QUOTED.fullmatch(sentence)
        if quote is not None:
            return self._again(quote)
        terms = stems(sentence)
        weights = {term: self._weight(term) for term in terms}
        total = math.fsum(weights.values())  # sets have no order, and sums of floats depend on it
        if not total:
            return None
        deciding = about in DECIDING or not AUTHORITIES.isdisjoint(terms_of(sentence))
        if in_place and not deciding:
            return (sentence,)
        shares = self._shares(weights, total)
        best = max(shares, key=lambda n: (shares[n] + self._trust(n) + self._closeness(n, terms), n), default=None)
        if about in PLANS and not deciding and not self._is_tools(shares) and self._is_plan(sentence):
            return (sentence,)
        if best is None:
            return None
        passage = self.passages[best]
        line = self.lines[passage.line]
        if line.origin == NOTES and not deciding and shares[best] >= SAYS:
            return (passage.text,)
        return self._quoted(best, weights, total) if shares[best] >= SAYS else None

    def _weight(self, term: str) -> float:
        count = len(self.holding.get(term, ()))
        weight = math.log((len(self.passages) + 2) / max(1, count)) ** 2
        if not count:
            return weight * ABSENT * (1.0 if term != term.upper() or any(c.isdigit() for c in term) else 0.5)
        if any(c.isdigit() for c in term):
            return weight * (TELLING if is_identifier(term) else TELLING / 2)
        return weight * (TELLING if is_identifier(term) else 1.0)

    def _shares(self, weights: dict[str, float], total: float) -> dict[int, float]:
        held: dict[int, set[str]] = defaultdict(set)
        around: dict[int, set[str]] = defaultdict(set)
        for term in weights:
            for number in self.holding.get(term, ()):
                held[number].add(term)
                around[self.passages[number].step].add(term)
        shares: dict[int, float] = {}
        for number, own in held.items():
            step = self.passages[number].step
            near = set[str]().union(*(around.get(s, ()) for s in (step - 1, step, step + 1))) - own
            shares[number] = (math.fsum(weights[t] for t in own) + BESIDE * math.fsum(weights[t] for t in near)) / total
        return shares

    def _trust(self, number: int) -> float:
        """Who is believed to have said it where two said about the same."""
        line = self.lines[self.passages[number].line]
        return 0.05 if line.origin in AUTHORITIES else 0.0 if line.is_result or line.is_call else 0.02

    def _closeness(self, number: int, terms: frozenset[str]) -> float:
        own = self.passages[number].terms
        return CLOSENESS * len(own & terms) / len(own)

    def _quoted(self, best: int, weights: dict[str, float], total: float) -> tuple[str, ...]:
        first = self.passages[best]
        rest = {term: weight for term, weight in weights.items() if term not in first.terms}
        beside = [n for n, p in enumerate(self.passages) if p.step == first.step and n != best]
        adds = {n: math.fsum(w for t, w in rest.items() if t in self.passages[n].terms) / total for n in beside}
        second = max(adds, key=lambda n: (adds[n], -n), default=None)
        chosen = sorted({best, second} if second is not None and adds[second] >= MORE else {best})
        parts = [self._quote(n, weights) for n in chosen]
        reply = self._reply(first)
        return (*parts, *([_in_marks("user", reply)] if reply else []))

    def _reply(self, passage: _Passage) -> str:
        line = self.lines[passage.line]
        after = self.lines[passage.line + 1] if passage.line + 1 < len(self.lines) else None
        if line.origin != "assistant" or after is None or after.origin != "user":
            return ""
        is_last = line.text.rstrip().endswith(passage.text.rstrip())
        return after.text.strip() if is_last and len(after.text.strip()) <= MAX_REPLY_LEN else ""

    def _quote(self, number: int, weights: dict[str, float]) -> str:
        if number not in self.quotes:
            passage = self.passages[number]
            self.quotes[number] = _in_marks(self.lines[passage.line].origin, _window(passage.text, weights))
        return self.quotes[number]

    def _again(self, quote: "re.Match[str]") -> tuple[str, ...] | None:
        """A quotation of earlier notes or of the model's: as it is where that origin said so."""
        origin, said = quote.group(1), _plain(_inside(quote).strip("\u2026 "))
        for line in self.lines:
            if said in _plain(line.text) and label(line.origin) == origin:
                return (quote.group(),)
        return self.bind(_inside(quote), about="decisions", in_place=False)

    def _is_tools(self, shares: dict[int, float]) -> bool:
        tools, others = 0.0, 0.0
        for number, share in shares.items():
            if self.lines[self.passages[number].line].is_result:
                tools = max(tools, share)
            else:
                others = max(others, share)
        return tools >= SAYS and tools > others + MORE

    def _is_plan(self, sentence: str) -> bool:
        together: set[int] | None = None
        for term in map(normal_text, hard_terms(sentence)):
            holding = [p for p in self.passages if term in normal_text(p.text)]
            steps = {p.step for p in holding}
            together = steps if together is None else together & steps
            if not together or all(self.lines[p.line].is_result for p in holding):
                return False
        return True


def _passages(line: MaterialLine) -> Iterable[str]:
    """The sentences of what somebody said, the records and lines of what a tool returned."""
    if not (line.is_result or line.is_call):
        return sentences(line.text)
    parts = (part for whole in line.text.split("\n") for part in _RECORDS.split(whole))
    return [s for part in parts for s in ([part.strip()] if len(part) <= MAX_QUOTE_LEN else sentences(part)) if s]


def _plain(text: str) -> str:
    return " ".join(text.split())


def _window(text: str, weights: dict[str, float]) -> str:
    words = _plain(text).split(" ")
    if sum(map(len, words)) + len(words) <= MAX_QUOTE_LEN:
        return " ".join(words)
    if len(words) == 1:
        return words[0][:MAX_QUOTE_LEN] + "\u2026"
    terms = [stems(word) & weights.keys() for word in words]
    held: Counter[str] = Counter()
    best, chosen, start, size = -1.0, (0, 1), 0, 0
    for end, word in enumerate(words):
        size += len(word) + 1
        held.update(terms[end])
        while size > MAX_QUOTE_LEN and start < end:
            size -= len(words[start]) + 1
            held.subtract(terms[start])
            start += 1
        worth = math.fsum(weights[term] for term, times in held.items() if times)
        if worth > best:
            best, chosen = worth, (start, end + 1)
    start, end = chosen
    while end < len(words) and len(" ".join(words[start : end + 1])) <= MAX_QUOTE_LEN:
        end += 1
    said = " ".join(words[start:end])[:MAX_QUOTE_LEN]
    return ("\u2026 " if start else "") + said + (" \u2026" if end < len(words) else "")


def _in_marks(origin: str, text: str) -> str:
    """The words of somebody in marks that they do not hold, behind who said them; they cannot end it."""
    said = harmless(_plain(text))
    marks = next((m for m in _MARKS if m[0] not in said and m[1] not in said), _MARKS[0])
    said = said.replace(marks[0], "'").replace(marks[1], "'")
    named = label(origin)
    return f"according to {'a' if named.startswith('tool') else 'the'} {named}: {marks[0]}{said}{marks[1]}"


class Mentions(NamedTuple):
    """What of the material a summary should name, and what of that it does not."""

    wanted: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def share(self) -> float:
        return 1.0 - len(self.missing) / len(self.wanted) if self.wanted else 1.0


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
        return (_HEX.match(value) is not None and self.holds(value, prefix=True)) or self._holds_loosely(value)

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
            found.update(dict.fromkeys(_CITED.findall(sentence)))
            for n, word in enumerate(WORD.finditer(sentence)):
                said = word.group()
                if _is_hard(said) or (
                    names and n and said[0].isupper() and said.isalpha() and not _follows_mark(sentence, word.start())
                ):
                    found[said] = None
            for number in _NUMBER.findall(_SEPARATED.sub("", sentence)):
                if sum(c.isdigit() for c in number) >= MIN_NUMBER_LEN and number not in found:
                    found[number] = None
    return tuple(t for t in found if not any(t != o and t.isdigit() and t in _NUMBER.findall(o) for o in found))


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
    """The identifiers, longer numbers and names of ``text`` that occur in ``material`` in no spelling, in order."""
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


def missing(text: str, material: str) -> Mentions:
    """What a summary should name of its material: the paths most used, and what the last errors name."""
    known = _Material(text)
    wanted = [*_of_errors(material), *_paths(material)]
    unique = tuple(dict.fromkeys(w for w in wanted if w))
    return Mentions(unique, tuple(w for w in unique if not known.holds(normal_text(w))))


def _paths(material: str) -> list[str]:
    counts: Counter[str] = Counter()
    for word in _PATH.findall(material):
        if "/" in word and "//" not in word:
            name = word.rstrip("./").rpartition("/")[2]
            stem, dot, ending = name.rpartition(".")
            if stem and dot and 0 < len(ending) <= 5 and ending.isalnum() and not ending.isdigit():
                counts[name] += 1
    return [name for name, times in counts.most_common(MAX_PATHS) if times > 1]


def _of_errors(material: str) -> Iterator[str]:
    told: dict[str, None] = {}
    for line in reversed(material[-ERRORS_WITHIN:].splitlines()):
        if len(told) == MAX_ERRORS:
            break
        line = line[:400]
        if reports_error(line):
            told.setdefault(line.strip())
    for line in told:
        found = [w for w in WORD.findall(line) if _is_hard(w)] + _STATUS.findall(line)
        yield from (v for v in found[:MAX_OF_ERROR] if len(v) > MIN_NUMBER_LEN)


def lost_lines(previous: str, text: str, *, fresh: str) -> tuple[str, ...]:
    """Lines of the previous notes that name what the new ones do not, unless it came up again since."""
    now, since = _Material(text), _Material(fresh)
    lost: list[str] = []
    for line in previous.split("\n"):
        gone = [t for t in hard_terms(line, names=False) if not now.has(t)]
        if gone and not any(since.has(t) for t in gone):
            lost.append(line.strip(" -*"))
    return tuple(lost)
