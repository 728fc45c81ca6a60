"""Which of the removed texts a query is about, and the passages in them that say so. Pure.

A text that has all words of the query stands before one that has some; then counts how rare these are among the
texts that were found, identifiers twice; then how near to the newest message the text stood.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_TERMS = 32
IDENTIFIER_WEIGHT = 2.0
WORTH_SHOWING = 0.4  # of the best text's score
LONGEST_SEGMENT = 320  # characters
LONGEST_TOKEN = 12  # characters, on the average of any text worth reading
MOST_READ = 2_000_000  # characters of one text
GAP = "[…]"

_WORD = re.compile(r"\S+")
_EDGES = "\"'`\u201c\u201d\u2018\u2019.,;:!?()[]{}<>*|"
_SCRIPTS_WITHOUT_BLANKS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0e7f]{2,}")
_SEGMENT = re.compile(rf"[^\n]{{1,{LONGEST_SEGMENT}}}(?:\n+|(?<=\s)|\Z)|[^\n]{{1,{LONGEST_SEGMENT}}}\n*|\n+")


@dataclass(frozen=True, slots=True)
class Term:
    """A word or identifier of a query, and where it stands in a text: at the beginning of a word, in any case."""

    text: str
    weight: float
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Match:
    """What one text has of a query: the places of the terms that are in it, and how that ranks."""

    index: int
    found: frozenset[int]
    score: float


@dataclass(frozen=True, slots=True)
class Passages:
    """The parts of a text that are shown; ``start`` is the byte of its UTF-8 form at which the first one begins."""

    text: str
    tokens: int
    start: int
    whole: bool


def terms_of(query: str) -> tuple[Term, ...]:
    """The terms of a query: its words, in scripts without blanks the pairs of neighbouring characters."""
    words = list(dict.fromkeys(w for m in _WORD.finditer(query) if (w := m.group().strip(_EDGES).casefold())))
    telling = [w for w in words if len(w) > 1 or not w.isascii()] or words
    found: list[Term] = []
    for word in telling:
        runs = _SCRIPTS_WITHOUT_BLANKS.findall(word)
        pairs = [run[i : i + 2] for run in runs for i in range(len(run) - 1)] if runs else [word]
        weight = IDENTIFIER_WEIGHT if _is_identifier(word) else 1.0
        found += (Term(part, weight, _pattern(part)) for part in dict.fromkeys(pairs))
    return tuple(found[:MOST_TERMS])


def _is_identifier(word: str) -> bool:
    return any(c.isdigit() for c in word) or any(c in word for c in "_/.@#")


def _pattern(word: str) -> re.Pattern[str]:
    edge = r"(?<![^\W_])" if word[0].isalnum() and not _SCRIPTS_WITHOUT_BLANKS.match(word) else ""
    return re.compile(edge + re.escape(word), re.IGNORECASE)


def rank(terms: Sequence[Term], texts: Sequence[str]) -> list[Match]:
    """The texts (oldest first) that have a term in them, best first, without those that have only common ones."""
    found = [frozenset(n for n, t in enumerate(terms) if t.pattern.search(text[:MOST_READ])) for text in texts]
    known = sum(bool(each) for each in found)
    rarity = [math.log(1 + known / (0.5 + sum(n in each for each in found))) for n in range(len(terms))]
    matches = [
        Match(index, each, round(sum(terms[n].weight * rarity[n] for n in each), 4))
        for index, each in enumerate(found)
        if each
    ]
    enough = WORTH_SHOWING * max((match.score for match in matches), default=0.0)
    matches = [match for match in matches if match.score >= enough]
    return sorted(matches, key=lambda m: (len(m.found) == len(terms), m.score, m.index), reverse=True)


def passages(text: str, terms: Sequence[Term], *, most: int, count: Callable[[str], int]) -> Passages:
    """What a text says around the terms, in at most ``most`` tokens; all of it where that is no more."""
    whole = count(text) if len(text) <= most * LONGEST_TOKEN else most + 1
    if whole <= most:
        return Passages(text, whole, 0, whole=True)
    segments = [m.group() for m in _SEGMENT.finditer(text[:MOST_READ])]
    scores = [sum(t.weight for t in terms if t.pattern.search(each)) for each in segments]
    chosen: set[int] = set()
    left = most - 2 * count(GAP)
    for place in sorted(range(len(segments)), key=lambda n: (-scores[n], n)):
        if scores[place] <= 0 and chosen:
            break
        for near in (place, place + 1, place - 1):
            if 0 <= near < len(segments) and near not in chosen:
                cost = count(segments[near]) + (1 if {near - 1, near + 1} & chosen else 2 + count(GAP))
                if cost <= left:
                    chosen.add(near)
                    left -= cost
    if not chosen:
        cut = _beginning(segments[0] if segments else text, left, count)
        return Passages(cut, count(cut), 0, whole=False)
    shown, start = _joined(segments, sorted(chosen))
    return Passages(shown, count(shown), start, whole=False)


def _joined(segments: Sequence[str], chosen: Sequence[int]) -> tuple[str, int]:
    parts: list[str] = []
    for place in chosen:
        if place - 1 not in chosen:
            parts.append(f"{GAP} " if not parts or parts[-1].endswith("\n") else f"\n{GAP} ")
        parts.append(segments[place])
    if chosen[0] == 0:
        del parts[0]
    tail = "" if chosen[-1] == len(segments) - 1 else f"\n{GAP}"
    before = sum(len(each.encode("utf-8", "surrogatepass")) for each in segments[: chosen[0]])
    return "".join(parts).rstrip() + tail, before


def _beginning(text: str, most: int, count: Callable[[str], int]) -> str:
    kept = len(text)
    while kept > 0 and count(text[:kept]) > most:
        kept = int(kept * 0.8)
    return text[:kept]
