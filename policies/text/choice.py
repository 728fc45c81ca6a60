"""How terms are weighted, and which items are chosen by the weights.

Weighted maximum coverage: an item is worth what its terms are, and a term that is shown already is
worth less each time. Terms weigh by their rarity in this conversation and by their shape, not by
what they mean in a language. The best item for its tokens is chosen first (lazy greedy: a gain only
falls, which is within 1 - 1/e of the best choice; Nemhauser, Wolsey and Fisher 1978).
"""

import heapq
import math
import string
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

from policies.ledger import Identifier
from policies.text.segments import (
    DIGIT,
    SHORTEST_IDENTIFIER,
    Segment,
    Source,
    TextReading,
    is_identifier,
    shape,
)
from policies.tokens import TokenCounter

IDENTIFIER = 3.0
NAME = 1.5
USED = 1.5
"""A later call asked for it; ``LIKE_USED``: for something of the same shape, which joined words do
not have.
"""
LIKE_USED = 1.5
ASKED = 4.0
"""The weight of what the user names now."""
REUSED = 0.2
MAX_REUSED = 4
TAKEN = 0.1
"""Share of the identifiers of one shape that calls use, from which on the others may be used as
well.
"""
RARE = 0.65
"""Share of the greatest rarity from which on a word is rare; two texts about the same must share
one.
"""
STEM = 4
"""Letters by which words are compared across their inflections."""
REPEATED = 0.4
OVERHEAD = 4
POWER = 0.9
WHOLE = 60
APART = 100
"""Tokens of one message that count in full, and after how many more the rest counts half: a little
of many messages is more informative than a few at length.
"""
MAX_TOGETHER = 8
"""Most statements in a group: a talk that drifts, each about a part of the one before, is not one
statement.
"""
MAX_GUESSES = 6
ASIDE = 0.99
"""How often the amount that fits is estimated from earlier attempts before the interval is halved;
and the factor of an estimate after one that was too large.
"""
MANY = 250
"""Items of one message above which they are queued: examining each at every choice takes quadratic
time.
"""
SEARCHED = 4_000
MAX_ALIKE = 1_000
"""Characters of a text up to which it is searched for each pair of neighbours; a longer one is read
once. At most this many of its blanks between the same two words are examined.
"""
_MARKS = (
    string.punctuation + "\u00ab\u00bb\u2018\u2019\u201c\u201d\u201e\u2026\u3001\u3002\u300c\u300d"
)
LAST = 1_000_000
"""Position of a separate identifier: after everything else in its message."""
SHOWN = 9


@dataclass(slots=True)
class Item:
    source: int
    place: int
    segment: Segment
    factor: float
    cost: float
    names: bool = False
    """Whether all of it is one identifier."""


@dataclass(frozen=True, slots=True)
class Extract:
    """A text without a fence, its tokens, the items in it, best first, and the most informative
    identifiers.
    """

    text: str = ""
    tokens: int = 0
    chosen: tuple[int, ...] = ()
    identifiers: tuple[Identifier, ...] = ()


class Weights(dict[str, float]):
    """The weight of each term, computed on first use."""

    def __init__(
        self,
        documents: Sequence[frozenset[str]],
        *,
        used: frozenset[str] = frozenset(),
        names: frozenset[str] = frozenset(),
        asked: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self._in = Counter(chain.from_iterable(documents))
        self._used = used
        self._names = names
        self._asked = frozenset(map(stem_of, asked))
        asked_for = Counter(
            [shape(term) for term in used if is_identifier(term) and DIGIT.search(term)]
        )
        seen = Counter(
            [shape(term) for term in self._in if is_identifier(term) and DIGIT.search(term)]
        )
        self._shapes = {kind for kind, n in asked_for.items() if n >= TAKEN * seen[kind]}
        self._most = len(documents) + 2
        self._few = self._most ** (1 - RARE)
        self._rarity = [math.log(self._most / max(1, n)) for n in range(len(documents) + 1)]

    @classmethod
    def over(cls, readings: Sequence[TextReading], *, asked: Iterable[str] = ()) -> "Weights":
        """By what messages hold, what their calls ask for, and which words are names: never in
        small letters.
        """
        empty = frozenset[str]()
        spelled = set(chain.from_iterable([r.spelled for r in readings]))
        names = frozenset([low for word in spelled if (low := word.lower()) not in spelled])
        used = empty.union(*(r.asked for r in readings))
        return cls([r.terms for r in readings], used=used, names=names, asked=asked)

    def __missing__(self, term: str) -> float:
        used = term in self._used
        times = self._in.get(term, 0)
        # said again, it is needed: rarity is no measure
        if len(term) >= SHORTEST_IDENTIFIER and is_identifier(term):
            asked = 1.0
            if used:
                asked = USED
            elif self._shapes and self.is_called_for(term):
                asked = LIKE_USED
            # may be any key of records
            if term.isascii() and "/" not in term and not DIGIT.search(term):
                weight = self._rarity[times] * IDENTIFIER * asked
            else:
                weight = (
                    self._rarity[0] * IDENTIFIER * (1 + REUSED * min(times - 1, MAX_REUSED)) * asked
                )
        else:
            weight = (
                self._rarity[times]
                * (USED if used else 1.0)
                * (NAME if term in self._names else 1.0)
            )
        made = self[term] = weight * ASKED if self._asked and self.is_asked(term) else weight
        return made

    def is_asked_for(self, key: str) -> bool:
        return key.lower() in self._used

    def is_called_for(self, term: str) -> bool:
        """Whether calls ask by its shape."""
        return bool(self._shapes) and shape(term) in self._shapes

    def is_asked(self, term: str) -> bool:
        return stem_of(term) in self._asked

    def is_rare(self, term: str) -> bool:
        """Whether it is a word that few messages have, rather than an identifier."""
        return self._in[term] <= self._few and not is_identifier(term)


def stem_of(term: str) -> str:
    return term if is_identifier(term) else term[:STEM]


class Linked(Protocol):
    def of(self, number: int) -> tuple[int, ...]:
        """The items without which an item is not shown."""


def choose(
    items: Sequence[Item],
    budget: int,
    *,
    weights: Weights,
    links: Linked | None = None,
    shown: Iterable[str] = (),
    seen: Sequence[int] = (),
    told: Sequence[int] = (),
    always: Sequence[int] = (),
    of: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """The items to be shown, best first, in groups that belong together, in about ``budget``
    tokens.

    ``shown`` are terms, ``seen`` items that the model sees anyway: what belongs to these comes
    first, unless it repeats one. ``told`` are items that say only what it sees. Those that are
    ``always`` shown come first, too. ``of`` is the message whose room each takes.
    """
    terms = [item.segment.terms for item in items]
    damped = [REPEATED**n for n in range(SHOWN + 1)]
    every = set(chain.from_iterable(terms))
    whole = dict(zip(every, map(weights.__getitem__, every), strict=True))
    times = dict.fromkeys(chain(shown, *(terms[n] for n in seen)), SHOWN)
    left = whole | {term: whole[term] * damped[SHOWN] for term in times.keys() & whole.keys()}
    taken = bytearray(map({*seen, *told}.__contains__, range(len(items))))
    weight = left.__getitem__
    of = of or range(len(items))
    share = [1.0] * (max(of, default=0) + 1)
    used = [0.0] * (max(of, default=0) + 1)
    costs = [item.cost for item in items]
    factors = [item.factor for item in items]
    known = {items[n].segment.text for n in seen}
    first = {
        n
        for one in seen
        for n in _together(one, links, taken)[1:]
        if items[n].segment.text not in known
    }
    first.update(always)
    per = [(cost + OVERHEAD) ** POWER for cost in costs]
    worth = [factor * sum(map(weight, each)) for factor, each in zip(factors, terms, strict=True)]
    left_over = [n for n in range(len(items)) if not taken[n]]
    queue = _Queue(
        [(-math.inf if n in first else -worth[n] / per[n], n) for n in left_over], of, share
    )
    chosen = list[tuple[int, ...]]()
    spent = 0.0
    smallest = min(costs, default=0.0)
    while spent + smallest <= budget and (best := queue.take()) is not None:
        before, number = best
        if taken[number] or spent + costs[number] > budget:
            continue
        least = queue.least() + 1e-9 if before > -math.inf else math.inf
        group = [number]
        cost = costs[number]
        now = -factors[number] * share[of[number]] * sum(map(weight, terms[number])) / per[number]
        if now > least:
            queue.wait(now, number, alone=True)
            continue
        if len(group := _together(number, links, taken)) > 1:  # only what may win is looked at
            cost = sum([costs[n] for n in group])
            now = -sum([factors[n] * share[of[n]] * sum(map(weight, terms[n])) for n in group])
            now /= (cost + OVERHEAD) ** POWER
            if now > least:
                queue.wait(now, number, alone=False)
                continue
        if spent + cost > budget:
            continue
        chosen.append(tuple(group))
        spent += cost
        for n in group:
            taken[n] = 1
            used[of[n]] += costs[n]
            share[of[n]] = APART / (APART + max(0.0, used[of[n]] - WHOLE))
            for term in terms[n]:
                if (often := times.get(term, 0) + 1) <= SHOWN:
                    times[term] = often
                    left[term] = whole[term] * damped[often]
    return chosen


class _Queue:
    """Items by their value when last evaluated, negated, the best first.

    Those of a message with many are queued after the best of them: their worth falls together with
    its ``share``, so that only that one has to be evaluated again.
    """

    def __init__(
        self, worth: Sequence[tuple[float, int]], of: Sequence[int], share: Sequence[float]
    ) -> None:
        self._of = of
        self._share = share
        often = Counter([of[number] for _, number in worth])
        self._lines: dict[int, list[tuple[float, int]]] = {
            one: [] for one, n in often.items() if n > MANY
        }
        self._in_line = set[int]()
        self._heads = [*worth]
        if self._lines:
            self._heads = [each for each in worth if of[each[1]] not in self._lines]
            for each in worth:
                if (line := self._lines.get(of[each[1]])) is not None:
                    line.append(each)
                    self._in_line.add(each[1])
        for line in self._lines.values():
            heapq.heapify(line)
            self._heads.append(line[0])
        heapq.heapify(self._heads)

    def take(self) -> tuple[float, int] | None:
        while self._heads:
            best = heapq.heappop(self._heads)
            number = best[1]
            if number not in self._in_line:
                return best
            of = self._of[number]
            line = self._lines[of]
            if line[0][1] != number:  # another is first now
                continue
            heapq.heappop(line)
            self._in_line.remove(number)
            if line:
                heapq.heappush(self._heads, (line[0][0] * self._share[of], line[0][1]))
            return best
        return None

    def least(self) -> float:
        return self._heads[0][0] if self._heads else math.inf

    def wait(self, worth: float, number: int, *, alone: bool) -> None:
        """Put back what was taken; what has this value only together with others is kept out of its
        queue.
        """
        line = self._lines.get(self._of[number]) if alone else None
        if line is not None:
            heapq.heappush(line, (worth / self._share[self._of[number]], number))
            self._in_line.add(number)
        if line is None or line[0][1] == number:
            heapq.heappush(self._heads, (worth, number))


def _together(number: int, links: Linked | None, taken: bytearray) -> list[int]:
    group = [number]
    for n in group:
        if len(group) >= MAX_TOGETHER:
            break
        if links is not None and (later := links.of(n)):
            group.extend(other for other in later if not taken[other] and other not in group)
    return group


def fitted(
    ranked: Sequence[tuple[int, ...]],
    write: Callable[[Sequence[int]], str],
    *,
    costs: Sequence[float],
    max_tokens: int,
    counter: TokenCounter,
) -> Extract:
    until = [0.0, *accumulate(sum(costs[n] for n in group) for group in ranked)]
    low = 0
    high = len(ranked)
    best = Extract()
    above = 0
    rate = 1.0
    tried = 0
    while low < high:
        if tried >= MAX_GUESSES:
            middle = (low + high + 1) // 2
        elif low and above:  # between what fitted and what did not
            share = (max_tokens - best.tokens) / (above - best.tokens)
            middle = bisect_right(until, until[low] + share * (until[high + 1] - until[low])) - 1
        else:
            middle = bisect_right(until, (ASIDE if above else 1.0) * max_tokens / rate) - 1
        middle = min(max(middle, low + 1), high)
        chosen = [n for group in ranked[:middle] for n in group]
        text = write(chosen)
        tokens = counter.count(text)
        tried = tried + 1
        rate = max(tokens, 1) / max(until[middle], 1.0)
        if tokens <= max_tokens:
            low = middle
            best = Extract(text, tokens, tuple(chosen))
        else:
            high = middle - 1
            above = tokens
    return best


def _by_key(items: Sequence[Item]) -> list[Item]:
    of_record = Counter([item.segment.record for item in items if item.segment.key.strip()])
    if not of_record:
        return [*items]
    lists: dict[str, list[Item]] = defaultdict(list)
    ordered: list[list[Item]] = []
    for item in items:
        if not item.segment.key.strip() or of_record[item.segment.record] > 1:
            ordered.append([item])
            continue
        under = lists[item.segment.key]
        if not under:
            ordered.append(under)
        under.append(item)
    return [item for group in ordered for item in group]


class Neighbours:
    """Which texts are adjacent in a source, separated by one blank."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[tuple[str, str], bool] = {}
        self._blanks: dict[tuple[str, str], deque[int]] = {}
        if len(text) > SEARCHED:
            self._find_blanks()

    def _find_blanks(self) -> None:
        before = ""
        at = -1
        for chunk in self._text.split(" "):
            words = chunk.split() or [""]
            if at >= 0:
                self._blanks.setdefault((before, words[0].strip(_MARKS)), deque()).append(at)
            before = words[-1].strip(_MARKS)
            at += 1 + len(chunk)

    def stand(self, before: str, after: str) -> bool:
        if len(self._text) <= SEARCHED:
            return f"{before} {after}" in self._text
        if (before, after) not in self._known:
            self._known[before, after] = self._search(before, after)
        return self._known[before, after]

    def _search(self, before: str, after: str) -> bool:
        words = before.rpartition(" ")[2].strip(_MARKS), after.partition(" ")[0].strip(_MARKS)
        places = self._blanks.get(words, deque())
        for _ in range(min(len(places), MAX_ALIKE)):
            at = places[0]
            places.rotate(-1)  # the next pair mostly follows this one
            if self._text.startswith(after, at + 1) and self._text.endswith(before, 0, at):
                return True
        return False


def joined(
    items: Sequence[Item],
    *,
    source: Source | None = None,
    neighbours: Neighbours | None = None,
    gap: str = " … ",
) -> str:
    text = ""
    before: Item | None = None
    for item in _by_key(items):
        key = item.segment.key
        said = item.segment.text
        if key.strip() and (before is None or before.segment.key != key):
            said = f"{key}: {said}"
        if before is not None:
            listed = key and (key.strip() or source is None or source.is_result)
            beside = (
                not listed
                and neighbours is not None
                and neighbours.stand(before.segment.text, said)
            )
            unless_listed = " " if beside else gap
            text += ", " if listed else unless_listed
        text += said
        before = item
    return text
