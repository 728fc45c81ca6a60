"""The extract: what is kept, word for word, of messages that leave the window.

Weighted maximum coverage: a segment is worth what its terms are, and a term that is shown already is worth less each
time. Chosen is the best for its tokens first (lazy greedy: a gain only falls, which is within 1 - 1/e of the best
choice; Nemhauser, Wolsey and Fisher 1978). A statement comes with the later one of the user that is most about the
same.
"""

import heapq
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, groupby, pairwise
from operator import itemgetter

from policies.ledger import Identifier
from policies.text.segments import Readings, Source, is_question, terms_of
from policies.text.worth import LAST, STEM, Item, Weights, weighed
from policies.tokens import TokenCounter

REPEATED = 0.4
OVERHEAD, POWER = 4, 0.9
LINK = 0.22
"""Share of a statement's weight that a later one has to take up to be about the same."""
COMMON, SELDOM = 0.02, 4
"""Share of what is said, or statements, in which a word may stand that later statements are looked for by."""
CORRECTION = 16
"""Tokens of a message that is a mere correction of the one before, where others are twice as long."""
MAX_ABOUT = 64
"""Statements, the newest, among which a word's later one is looked for."""
MAX_TOGETHER = 8
"""Statements that stand together: a talk that drifts, each about a part of the one before, is not one statement."""
SPARE = 1.5
"""Of so many times the budget the order is worked out; how much of it fits is then counted exactly."""
MAX_GUESSES, ASIDE = 6, 0.99
"""Times that how much fits is guessed by what was tried, then the rest is halved; of a guess after one that was too
much."""
SHOWN = 9
MAX_IDENTIFIERS = 200


@dataclass(frozen=True, slots=True)
class Extract:
    """A text without a fence, its tokens, the items in it, best first, and the identifiers that tell most."""

    text: str = ""
    tokens: int = 0
    chosen: tuple[int, ...] = ()
    identifiers: tuple[Identifier, ...] = ()


def extract(
    sources: Sequence[Source],
    *,
    max_tokens: int,
    counter: TokenCounter,
    goal: str = "",
    asked: str = "",
    visible: Sequence[str] = (),
    readings: Readings | None = None,
) -> Extract:
    """What is kept of ``sources`` within ``max_tokens``, beside what the ``visible`` texts say already.

    ``goal`` is a statement of the user that stands before all of them: what was said about it later comes first.
    ``asked`` is what the user says now: what it names is wanted.
    """
    reader = Readings() if readings is None else readings
    sources = (Source(-1, "user", goal), *sources)
    read = [reader.of(source) for source in sources]
    said_now = frozenset(terms_of(asked))
    items, weights = weighed(sources, read, room=max_tokens, asked=said_now)
    ranked = choose(
        items,
        int(SPARE * max_tokens),
        weights=weights,
        links=Links(items, sources),
        shown=[term for text in visible for term in terms_of(text)],
        seen=[n for n, item in enumerate(items) if item.source == 0],
        told=[n for n, item in enumerate(items) if said_now.issuperset(item.segment.terms)] if said_now else (),
    )

    def write(chosen: Sequence[int]) -> str:
        return render(sources, items, chosen)

    costs = [item.cost for item in items]
    best = fitted(ranked, write, costs=costs, max_tokens=max_tokens, counter=counter)
    return replace(best, identifiers=_identifiers(sources, items, weights, frozenset(best.chosen)))


def fitted(
    ranked: Sequence[tuple[int, ...]],
    write: Callable[[Sequence[int]], str],
    *,
    costs: Sequence[float],
    max_tokens: int,
    counter: TokenCounter,
) -> Extract:
    until = [0.0, *accumulate(sum(costs[n] for n in group) for group in ranked)]
    low, high, best, above, rate = 0, len(ranked), Extract(), 0, 1.0
    for tried in count():
        if low >= high:
            break
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
        rate = max(tokens, 1) / max(until[middle], 1.0)
        if tokens <= max_tokens:
            low, best = middle, Extract(text, tokens, tuple(chosen))
        else:
            high, above = middle - 1, tokens
    return best


class Links:
    """By a statement the later one of the user about the same: the older is not shown without it.

    About the same is one that takes up enough of its weight in beginnings of words, of several that which takes up
    most, the newest of equal ones; or what is said right after it in far fewer words, unless that asks.
    """

    def __init__(self, items: Sequence[Item], sources: Sequence[Source]) -> None:
        self._items = items
        self._known: dict[int, tuple[int, ...]] = {}
        self._said: dict[str, list[int]] = defaultdict(list)
        self._of_source: dict[int, list[int]] = defaultdict(list)
        spoken = [n for n, item in enumerate(items) if not item.segment.key and not sources[item.source].is_result]
        times: dict[str, int] = defaultdict(int)
        for term, often in Counter(chain.from_iterable([items[n].segment.terms for n in spoken])).items():
            times[term[:STEM]] += often
        self._weights = {stem: max(0.0, math.log((len(spoken) + 1) / often)) for stem, often in times.items()}
        rare = max(SELDOM, int(COMMON * len(spoken)))
        for n in spoken:
            source = items[n].source
            self._of_source[source].append(n)
            if sources[source].role == "user" and not is_question(items[n].segment.text):
                for stem in self._stems(n):
                    if times[stem] <= rare:
                        self._said[stem].append(n)
        self._corrections = _corrections(items, sources, self._of_source)

    def _stems(self, number: int) -> dict[str, None]:
        return dict.fromkeys([term[:STEM] for term in self._items[number].segment.terms])

    def of(self, number: int) -> tuple[int, ...]:
        if number not in self._known:
            item = self._items[number]
            spoken = number in self._of_source.get(item.source, ())
            self._known[number] = self._later(number) if spoken else self._of_alone(number)
        return self._known[number]

    def _of_alone(self, number: int) -> tuple[int, ...]:
        item = self._items[number]
        for n in reversed(self._of_source.get(item.source, ()) if item.place == LAST else ()):
            if item.segment.terms[0] in self._items[n].segment.terms and (later := self.of(n)):
                return later
        return ()

    def _later(self, number: int) -> tuple[int, ...]:
        stems, weights, source = self._stems(number), self._weights, self._items[number].source
        last = self._of_source[source][-1]
        enough = LINK * sum(map(weights.__getitem__, stems))
        found = [(weights[stem], said) for stem in stems if (said := self._said.get(stem)) and said[-1] > last]
        found.sort(key=itemgetter(0), reverse=True)  # the rarest first, which the fewest have
        left = sum(weight for weight, _ in found)
        taken_up: dict[int, float] = {}
        for weight, said in found:
            others = said[max(bisect_right(said, last), len(said) - MAX_ABOUT) :]
            if left < enough:  # with this one and all that follow too little: only what others have taken up counts
                taken_up = {other: share for other, share in taken_up.items() if share + left >= enough - 1e-9}
                others = [*taken_up.keys() & others]
                if not taken_up:
                    break
            for other in others:
                taken_up[other] = taken_up.get(other, 0.0) + weight
            left -= weight
        about = [(share, other) for other, share in taken_up.items() if share >= enough]
        return (*([max(about)[1]] if about else ()), *self._corrections.get(source, ()))


def _corrections(
    items: Sequence[Item], sources: Sequence[Source], of_source: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    users = [i for i, source in enumerate(sources) if source.is_users]
    if not users:
        return {}
    usual = sorted(sources[i].tokens for i in users)[len(users) // 2]
    first = {source: spoken[0] for source, spoken in of_source.items() if items[spoken[0]].place == 0}
    brief = min(CORRECTION, usual // 2)
    return {
        one: (first[other],)
        for one, other in pairwise(users)
        if other in first and sources[other].tokens <= brief and not is_question(items[first[other]].segment.text)
    }


def _identifiers(
    sources: Sequence[Source], items: Sequence[Item], weights: Weights, chosen: frozenset[int]
) -> tuple[Identifier, ...]:
    named = [n for n, item in enumerate(items) if item.source and item.names]
    best = heapq.nsmallest(
        MAX_IDENTIFIERS, named, key=lambda n: (-items[n].factor * weights.of(items[n].segment.terms[0]), n)
    )
    found: dict[str, Identifier] = {}
    for n in best:
        text, key = items[n].segment.text, items[n].segment.key.strip()
        shown = n in chosen or (text in found and found[text].shown)
        found[text] = Identifier(text, key or sources[items[n].source].tool, shown)
    return tuple(found.values())


def choose(
    items: Sequence[Item],
    budget: int,
    *,
    weights: Weights,
    links: Links | None = None,
    shown: Iterable[str] = (),
    seen: Sequence[int] = (),
    told: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """The items to be shown, best first, in groups that stand together, in about ``budget`` tokens.

    ``shown`` are terms, ``seen`` items that the model sees anyway: what belongs to these comes first, unless it
    repeats one. ``told`` are items that say nothing which it does not see.
    """
    terms = [item.segment.terms for item in items]
    whole = {term: weights.of(term) for term in set(chain.from_iterable(terms))}
    times = dict.fromkeys(chain(shown, *(terms[n] for n in seen)), SHOWN)
    damped = [REPEATED**n for n in range(SHOWN + 1)]
    left = whole | {term: whole[term] * damped[SHOWN] for term in times.keys() & whole.keys()}
    taken = bytearray(len(items))
    for n in (*seen, *told):
        taken[n] = 1
    weight = left.__getitem__
    costs, factors = [item.cost for item in items], [item.factor for item in items]
    known = {items[n].segment.text for n in seen}
    first = {n for one in seen for n in _together(one, links, taken)[1:] if items[n].segment.text not in known}
    per = [(cost + OVERHEAD) ** POWER for cost in costs]
    worth = [factor * sum(map(weight, each)) for factor, each in zip(factors, terms, strict=True)]
    heap = [(-math.inf if n in first else -worth[n] / per[n], n) for n in range(len(items)) if not taken[n]]
    heapq.heapify(heap)
    chosen, spent = list[tuple[int, ...]](), 0.0
    smallest = min(costs, default=0.0)
    while heap and spent + smallest <= budget:
        before, number = heap[0]
        if taken[number] or spent + costs[number] > budget:
            heapq.heappop(heap)
            continue
        least = -math.inf if before > -math.inf and len(heap) > 1 else math.inf
        if least < 0:
            least = min(heap[1:3])[0] + 1e-9
        group, cost = [number], costs[number]
        now = -factors[number] * sum(map(weight, terms[number])) / per[number]
        if now <= least and len(group := _together(number, links, taken)) > 1:  # only what may win is looked at
            cost = sum([costs[n] for n in group])
            now = -sum([factors[n] * sum(map(weight, terms[n])) for n in group]) / (cost + OVERHEAD) ** POWER
        if now > least:
            heapq.heapreplace(heap, (now, number))
            continue
        heapq.heappop(heap)
        if spent + cost > budget:
            continue
        chosen.append(tuple(group))
        spent += cost
        for n in group:
            taken[n] = 1
            for term in terms[n]:
                often = times[term] = times.get(term, 0) + 1
                left[term] = whole[term] * damped[min(often, SHOWN)]
    return chosen


def _together(number: int, links: Links | None, taken: bytearray) -> list[int]:
    group = [number]
    for n in group:
        if len(group) >= MAX_TOGETHER:
            break
        if links is not None and (later := links.of(n)):
            group.extend(other for other in later if not taken[other] and other not in group)
    return group


def _by_key(items: Sequence[Item]) -> list[Item]:
    of_record = Counter(item.segment.record for item in items if item.segment.key.strip())
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


def render(sources: Sequence[Source], items: Sequence[Item], chosen: Sequence[int]) -> str:
    """The chosen items in the order of the conversation, a line for each message with its number.

    Neighbouring calls or results that only show values of one key share a line.
    """
    lines: list[str] = []
    before = ("", "")
    shown = {term for n in chosen if items[n].place != LAST for term in items[n].segment.terms}
    kept = (items[n] for n in chosen if items[n].place != LAST or items[n].segment.terms[0] not in shown)
    ordered = sorted(kept, key=lambda item: (item.source, item.segment.record < 0, item.place))
    for (number, called), of_message in groupby(ordered, key=lambda item: (item.source, item.segment.record < 0)):
        source, told = sources[number], [*of_message]
        speaker = "call" if called else source.role
        keys = {item.segment.key.strip() for item in told}
        key = keys.pop() if len(keys) == 1 and (called or source.is_result) else ""
        if key and before == (speaker, key):
            lines[-1] += f"; {source.position}: {', '.join(item.segment.text for item in told)}"
        else:
            lines.append(f"{speaker} {source.position}: {joined(told, source=source)}")
        before = speaker, key
    return "\n".join(lines)


def joined(items: Sequence[Item], *, source: Source | None = None, gap: str = " … ") -> str:
    text = ""
    before: Item | None = None
    for item in _by_key(items):
        key, said = item.segment.key, item.segment.text
        if key.strip() and (before is None or before.segment.key != key):
            said = f"{key}: {said}"
        if before is not None:
            beside = source is not None and f"{before.segment.text} {said}" in source.text
            listed = key and (key.strip() or source is None or source.is_result)
            text += ", " if listed else " " if beside else gap
        text += said
        before = item
    return text
