"""Binding what a note says to who said it: a note is a claim, and what stands in it has to be somebody's word.

Every sentence of a note is looked up in the sentences, records and lines that it was made from, by the terms that they
share, weighed by how rare these are. Where one of them says most of it, it stands in the sentence's place, word for
word and with who said it: an id that was swapped, a negation that was lost and an approval that only a tool gave have
nowhere to stand. A sentence of the notes' own stays where no source says the same, if what it names stands together in
one step of the conversation; never for what the user wants or decided, and never for what a tool reported.
"""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from policies.summary.check import hard_terms, normal_text, without_empty_headings
from policies.summary.material import AUTHORITIES, MaterialLine, harmless, label
from policies.summary.proposal import field_named
from policies.text.segments import is_identifier, sentences, terms_of

__all__ = ["bind"]

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
"""What the user wants and decided."""
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


@dataclass(frozen=True, slots=True)
class _Passage:
    """A sentence, record or line of the source, word for word, and where it stands."""

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
    """Bullet and known heading of a line, the heading's field, and the rest."""
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
    """The sentences of a line's body; what stands quoted with its origin is one."""
    found: list[str] = []
    at = 0
    for quote in _QUOTED.finditer(body):
        found += sentences(body[at : quote.start()])
        found.append(quote.group())
        at = quote.end()
    return [*found, *sentences(body[at:])]


def _noted(previous: str) -> Iterator[MaterialLine]:
    """What earlier notes say: the quotations in them are their origins', the rest is the notes' own."""
    for line in previous.split("\n"):
        for sentence in _sentences(_lead(line)[2]):
            quote = _QUOTED.fullmatch(sentence)
            yield MaterialLine(quote.group(1), _inside(quote)) if quote else MaterialLine(NOTES, sentence)


def _inside(quote: "re.Match[str]") -> str:
    return next(g for g in quote.groups()[1:] if g is not None)


def stems(text: str) -> frozenset[str]:
    """What two wordings of the same have in common: identifiers, beginnings of words, runs of characters."""
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
    """Who said what, by the terms that it was said in."""

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
        """The sentence as it may stand: as it is, as what its sources say, or not at all (None)."""
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
        """How much a term tells: by far the more, the fewer passages hold it."""
        count = len(self.holding.get(term, ()))
        weight = math.log((len(self.passages) + 2) / max(1, count)) ** 2
        if not count:
            return weight * ABSENT * (1.0 if term != term.upper() or any(c.isdigit() for c in term) else 0.5)
        if any(c.isdigit() for c in term):
            return weight * (TELLING if is_identifier(term) else TELLING / 2)
        return weight * (TELLING if is_identifier(term) else 1.0)

    def _shares(self, weights: dict[str, float], total: float) -> dict[int, float]:
        """The share of the weight that each passage holds which holds any of it, and a part of what stands around."""
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
        """How much of a passage the sentence says: one that says little else is rather what is meant."""
        own = self.passages[number].terms
        return CLOSENESS * len(own & terms) / len(own)

    def _quoted(self, best: int, weights: dict[str, float], total: float) -> tuple[str, ...]:
        """What the source says, and what stands beside it in the same step and says the rest."""
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
        """What the user answered briefly, if these were the assistant's last words."""
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
        """Whether a tool says about the same, and nobody else nearly as much of it."""
        tools, others = 0.0, 0.0
        for number, share in shares.items():
            if self.lines[self.passages[number].line].is_result:
                tools = max(tools, share)
            else:
                others = max(others, share)
        return tools >= SAYS and tools > others + MORE

    def _is_plan(self, sentence: str) -> bool:
        """Whether what a sentence names stands together in one step, and none of it is known from tools alone."""
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
    """A passage on one line; of a long one the part in which the terms stand, cut where words end."""
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
