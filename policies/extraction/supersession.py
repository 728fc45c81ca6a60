"""Which statement of the user replaces which: another value for the same thing, or words that take something back.

A statement is read as *claims*: values with a type (date, amount, place, person, …), the nouns that such a value
usually belongs to (:data:`ATTRIBUTES`: a port, a deadline, an approver), and the words that say whose. A later
statement replaces an earlier one where

1. it takes the earlier back in so many words ("forget what I said about …", "from A to B", "not A but B"),
2. it announces a change and has another value of the same type for the same subject, or
3. both give one single-valued attribute of the same subject different values.

Two prohibitions that differ in their object both stand. What else the earlier statement says is kept: only its
value gives way to the current one.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from policies.extraction.claims import Frame, Value, content, frame, stem
from policies.extraction.rules import RULE_THRESHOLD, WORD, Sentence

MOST_TEXTS = 4_096
"""Of so many statements the words are remembered."""

_CONTRASTS: tuple[frozenset[str], ...] = tuple(
    frozenset(words.split())
    for words in (
        "production staging development test testing qa sandbox local live",
        "primary secondary backup replica fallback main spare",
        "unit integration smoke acceptance functional",
        "spring summer autumn winter",
        "morning afternoon evening night weekly daily monthly yearly",
        "source target input output read write client server frontend backend",
        "home work office mobile billing delivery",
        "outbound return inbound departure arrival first last",
        "mother father sister brother wife husband son daughter",
    )
)


@dataclass(frozen=True, slots=True)
class Successor:
    """The index of the statement that replaces another, whether it surely does, and what remains of the old one."""

    index: int
    sure: bool
    remains: str = ""


def superseded(statements: Sequence[Sentence], frames: Sequence[Frame | None] | None = None) -> dict[int, Successor]:
    """Indices of statements that a later one replaces, each with its newest successor.

    ``frames`` are the statements' claims, for a caller that keeps them.
    """
    claims = [frame(s) for s in statements] if frames is None else frames
    index = _Index(statements, claims)
    for new, claim in enumerate(claims):
        if claim is None:
            continue
        for old, verdict in index.replaced_by(new, claim):
            index.retire(old, new, verdict)
        index.add(new, claim)
    return index.successors()


@dataclass(frozen=True, slots=True)
class _Verdict:
    sure: bool
    stale: tuple[Value, ...] = ()


class _Index:
    """Statements that still stand, by word, attribute and type of value, and those that no longer do."""

    def __init__(self, statements: Sequence[Sentence], claims: Sequence[Frame | None]) -> None:
        self._statements = statements
        self._claims = claims
        self._lower = [s.text.lower() for s in statements]
        self._by: defaultdict[str, list[int]] = defaultdict(list)
        self._gone: dict[int, tuple[int, bool]] = {}
        self._masks: defaultdict[int, list[tuple[Value, int]]] = defaultdict(list)

    def add(self, at: int, claim: Frame) -> None:
        """Makes a statement known to those that follow."""
        types = {f"#{v.type}" for v in claim.values}
        for key in {*claim.words, *(f"@{a}" for a in claim.attributes), *types}:
            self._by[key].append(at)

    def replaced_by(self, new: int, claim: Frame) -> list[tuple[int, _Verdict]]:
        """The statements that ``new`` replaces, with what is stale in each."""
        keys = {*claim.words, *(f"@{a}" for a in claim.attributes)}
        if claim.is_elliptic:
            keys |= {f"#{v.type}" for v in claim.values}
        near = sorted(
            {i for key in keys for i in self._by[key][-NEAREST:]} - {i for i, g in self._gone.items() if g[1]}
        )
        certain = self._named(new, claim)
        settled = {old for old, _ in certain}
        ranked: list[tuple[tuple[int, int], int, _Verdict]] = []
        for old in near:
            other = self._claims[old]
            if other is None or old in settled:
                continue
            found = self._outdated(old, other, new, claim)
            if found is not None:
                shared = len(other.words & claim.words)
                ranked.append(((shared, old if claim.is_elliptic else 0), old, found))
        if not ranked:
            return certain
        best = max(rank for rank, _, _ in ranked)
        chosen = [(old, verdict) for rank, old, verdict in ranked if rank == best]
        scopes = {c.scope for old, _ in chosen if (c := self._claims[old]) is not None}
        if best[0] == 0 and len(scopes) > 1:
            chosen = [(old, _Verdict(sure=False)) for old, _ in chosen]
        return certain + chosen

    def _named(self, new: int, claim: Frame) -> list[tuple[int, _Verdict]]:
        """Earlier statements that ``new`` takes back in so many words, with what is stale in each."""
        found: list[tuple[int, _Verdict]] = []
        for phrase in filter(None, (claim.forgets, *claim.olds)):
            holders = [
                i
                for i in range(new)
                if all(w in self._lower[i] for w in phrase) and not (i in self._gone and self._gone[i][1])
            ]
            for old in holders[-NEAREST:]:
                if phrase is claim.forgets:
                    found.append((old, _Verdict(sure=True)))
                elif (stale := self._stale_phrase(old, phrase)) is not None:
                    other = self._claims[old]
                    keep = {v.text for v in claim.values}
                    verdict = (
                        self._partial(old, other, (stale,), keep=keep) if other else _Verdict(sure=True, stale=(stale,))
                    )
                    found.append((old, verdict))
        return found

    def _stale_phrase(self, old: int, phrase: frozenset[str]) -> Value | None:
        """The value of a statement that a phrase names, or the words themselves; None for a mere mention."""
        other = self._claims[old]
        for value in other.values if other else ():
            words = content(value.text, names=True)
            if words & phrase and (words <= phrase or phrase <= words):
                return value
        text = self._statements[old].text
        spots = [m for m in _TOKEN.finditer(text) if stem(m.group()) in phrase or m.group().lower() in phrase]
        if len(phrase) < 2 or not spots or spots[-1].end() - spots[0].start() > sum(map(len, phrase)) + 8 * len(phrase):
            return None
        return Value("phrase", text[spots[0].start() : spots[-1].end()].lower(), spots[0].start(), spots[-1].end())

    def _outdated(self, old: int, other: Frame, new: int, claim: Frame) -> _Verdict | None:
        """What is stale in ``other`` because ``claim`` gives the same thing another value."""
        types = claim.types & other.types
        if not types or claim.more:
            return None
        shared = other.words & claim.words
        attributes = other.attributes & claim.attributes
        if not shared and not attributes and not claim.is_elliptic:
            return None
        labels = {s for s in (self._statements[old].label, self._statements[new].label) if s}
        alike = len(labels) < 2
        both_forbid = other.negative and claim.negative
        rules = min(self._statements[old].rule, self._statements[new].rule) >= RULE_THRESHOLD
        stale: list[Value] = []
        probable = False
        for type_ in sorted(types):
            mine = {v.text for v in claim.values if v.type == type_}
            olds = [v for v in other.values if v.type == type_ and v.text not in mine]
            if not olds or not mine - {v.text for v in other.values if v.type == type_}:
                continue
            disjoint = len(olds) == sum(v.type == type_ for v in other.values)
            weak = type_ in {"name", "number", "symbol", "code", "path"} or type_.startswith("quantity")
            change = claim.changes or (claim.news and (not weak or bool(attributes)))
            fits = bool(attributes & _ATTRIBUTES_OF.get(type_, attributes))
            if change and (shared or fits or claim.is_elliptic):
                if not shared and not claim.is_elliptic and other.scope and claim.scope:
                    continue
                stale += _nearest(olds, shared, text=self._statements[old].text)
            elif disjoint and fits and both_forbid:
                probable |= alike and bool(other.scope & claim.scope)
            elif disjoint and fits and alike and _same_scope(other, claim, loose=not rules):
                stale += _nearest(olds, shared, text=self._statements[old].text)
        if not (stale or probable) or _distinct(other, claim):
            return None
        if not stale:
            return _Verdict(sure=False)
        return self._partial(old, other, tuple(stale), keep={v.text for v in claim.values}, elliptic=claim.is_elliptic)

    def _partial(
        self, old: int, other: Frame, stale: tuple[Value, ...], *, keep: set[str], elliptic: bool = False
    ) -> _Verdict:
        """All of a statement is stale, or where it says more than that, only the values."""
        rest = [v for v in other.values if v not in stale and v.text not in keep and v.type != "tone"]
        if not rest and not elliptic:
            return _Verdict(sure=True)
        if self._statements[old].rule >= RULE_THRESHOLD and not elliptic:
            return _Verdict(sure=not rest)
        return _Verdict(sure=True, stale=stale)

    def retire(self, old: int, new: int, verdict: _Verdict) -> None:
        """Notes that ``new`` replaces ``old`` wholly, or some of its values."""
        if not verdict.stale:
            self._gone[old] = (new, verdict.sure or (old in self._gone and self._gone[old][1]))
            return
        kept = [(v, i) for v, i in self._masks[old] if v not in verdict.stale]
        self._masks[old] = kept + [(v, new) for v in verdict.stale]

    def successors(self) -> dict[int, Successor]:
        """The result: what is gone, and what remains of statements of which values are stale."""
        found = {old: Successor(new, sure) for old, (new, sure) in self._gone.items()}
        for old, masks in self._masks.items():
            if masks and old not in found:
                found[old] = Successor(max(i for _, i in masks), sure=True, remains=self._masked(old, masks))
        return found

    def _masked(self, old: int, masks: Sequence[tuple[Value, int]]) -> str:
        text = self._statements[old].text
        for value, new in sorted(masks, key=lambda m: -m[0].start):
            while new in self._gone:
                new = self._gone[new][0]
            claim = self._claims[new]
            current = [v for v in claim.values if v.type == value.type and v.text != value.text] if claim else []
            said = self._statements[new].text
            now = f"[now {said[current[0].start : current[0].end]}]" if current else "[changed, see below]"
            text = f"{text[: value.start]}{now}{text[value.end :]}"
        return text


_ATTRIBUTES_OF: dict[str, frozenset[str]] = {
    "date": frozenset({"date"}),
    "time": frozenset({"time", "date"}),
    "amount": frozenset({"money"}),
    "number": frozenset({"port", "count", "age", "size", "version", "phase", "money"}),
    "age": frozenset({"age"}),
    "name": frozenset({"name", "owner", "approver", "language", "style", "place", "region", "timezone", "version"}),
    "code": frozenset({"secret", "commit", "region", "version", "name", "branch", "phone"}),
    "path": frozenset({"branch", "timezone", "address"}),
    "host": frozenset({"address"}),
    "zone": frozenset({"timezone"}),
    "units": frozenset({"units"}),
    "tone": frozenset({"style"}),
    "day": frozenset({"date", "time", "frequency"}),
}
"""Attributes of which a statement has one value of a type."""
_TOKEN = re.compile(r"[\w.$€£'\u2019-]*\w")
_CLAUSE_END = re.compile(r"[;,](?=\s)")
NEAREST = 8
"""How many earlier statements with the same word are looked at."""


def _nearest(olds: Sequence[Value], shared: frozenset[str], *, text: str) -> list[Value]:
    """Those of several values that belong to a shared subject: in its clause, closest behind it; tones go together."""
    if not shared or olds[0].type == "tone":
        return list(olds)
    places = [start for start, stems in _stems_in(text) if not stems.isdisjoint(shared)]
    if not places:
        return list(olds)
    edges = [0, *(m.end() for m in _CLAUSE_END.finditer(text)), len(text) + 1]
    clauses = list(pairwise(edges))
    told = [sum(start <= p < end for p in places) for start, end in clauses]
    best = [clause for clause, n in zip(clauses, told, strict=True) if n == max(told)]
    near = [v for v in olds if any(start <= v.start < end for start, end in best)]
    if len(near) < 2:
        chosen = (len(best) < len(clauses) and len(olds) > 1) or _is_listing(told)
        return near if chosen else list(olds)
    return [min(near, key=lambda v: _distance(v.start, places))]


@lru_cache(maxsize=MOST_TEXTS)
def _stems_in(text: str) -> tuple[tuple[int, frozenset[str]], ...]:
    """Where each word of a text begins, with the stems of its parts."""
    return tuple((m.start(), frozenset(map(stem, m.group().split("-")))) for m in WORD.finditer(text))


def _distance(start: int, places: Sequence[int]) -> int:
    """How far behind the nearest of ascending ``places`` a value begins; in front of one counts twice."""
    at = bisect_right(places, start)
    behind = [start - places[at - 1]] if at else []
    ahead = [2 * (places[at] - start)] if at < len(places) else []
    return min(behind + ahead)


def _is_listing(told: Sequence[int]) -> bool:
    """Whether several clauses of a statement speak of what is shared: of several things of one kind."""
    return sum(n > 0 for n in told) > 1


def _same_scope(one: Frame, other: Frame, *, loose: bool) -> bool:
    """Whether what two statements speak of can be the same thing."""
    if not one.scope or not other.scope:
        return loose or bool(one.words & other.words) or (len(one.words) <= 1 or len(other.words) <= 1)
    return one.scope <= other.scope or other.scope <= one.scope or len(one.scope & other.scope) >= 2


def _distinct(one: Frame, other: Frame) -> bool:
    """True where words set the subjects apart: production and staging, the spring gala and the autumn gala."""
    first, second = _all_words(one.words, one.befores), _all_words(other.words, other.befores)
    for group in _STEMMED_CONTRASTS:
        if not group.isdisjoint(first) and not group.isdisjoint(second) and not group & first & second:
            return True
    heads, theirs = _heads(one.befores), _heads(other.befores)
    for head in heads.keys() & theirs.keys() & one.words & other.words:
        mine, yours = heads[head], theirs[head]
        if not mine & yours and not mine & other.words and not yours & one.words:
            return True
    return False


@lru_cache(maxsize=MOST_TEXTS)
def _heads(befores: tuple[tuple[str, str], ...]) -> Mapping[str, frozenset[str]]:
    """The words that stand in front of each word."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for before, head in befores:
        found[head].add(before)
    return {head: frozenset(words) for head, words in found.items()}


@lru_cache(maxsize=MOST_TEXTS)
def _all_words(words: frozenset[str], befores: tuple[tuple[str, str], ...]) -> frozenset[str]:
    return words.union(*befores)


_STEMMED_CONTRASTS = tuple(frozenset(stem(w) for w in group) for group in _CONTRASTS)
