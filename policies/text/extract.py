"""The extract: what is kept, word for word, of messages that leave the window.

Weighted maximum coverage: a segment is worth what its terms are, and a term that is shown already is worth little
more. Terms weigh by their rarity in this conversation and by their shape, nothing by what they mean in a language.
"""

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policies.text.segments import NUMBER, Reading, Readings, Segment, Source, is_identifier, sentences, terms_of
from policies.tokens import TokenCounter

WHO = {"user": 1.0, "assistant": 0.35, "tool": 0.45}
CALL = 0.5
ID_ALONE = 4.0
IDENTIFIER = 8.0
NUMBER_SAID = 4.0
NUMBER_IN_RESULT = 0.1
NAME = 1.5
USED = 2.0
SHORT = 1.0
SHORT_TOKENS = 60
QUESTION = 0.5
REPEAT = 0.15
OVERHEAD, POWER = 6, 0.8
LABEL = 3
LINK = 0.25
COMMON = 0.02
SPARE = 1.5
PREFIX = 4
BRIEF = 16
_ASKS = re.compile(r"[?\uff1f\u061f\u037e]\W*\Z")


@dataclass(slots=True)
class Item:
    """A segment that may be chosen: of which source, its place there, its terms with their weights, its worth."""

    source: int
    place: int
    segment: Segment
    weights: tuple[tuple[str, float], ...]
    factor: float
    cost: float
    later: tuple[int, ...] = ()


class Weights:
    """How much a term tells, worked out once for each."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._in = Counter[str]()
        self._used = set[str]()
        names, plain = set[str](), set[str]()
        for reading in readings:
            self._in.update(reading.terms)
            self._used |= reading.asked
            names |= reading.names
            plain |= reading.plain
        self._names = names - plain
        self._most = len(readings) + 2
        self._said: dict[str, float] = {}
        self._result: dict[str, float] = {}

    def of(self, term: str, *, result: bool) -> float:
        known = self._result if result else self._said
        found = known.get(term)
        if found is None:
            found = known[term] = self._weigh(term, result=result)
        return found

    def rarity(self, term: str) -> float:
        return math.log(self._most / max(1, self._in[term]))

    def _weigh(self, term: str, *, result: bool) -> float:
        weight = self.rarity(term) * (USED if term in self._used else 1.0)
        if len(term) > 4 and is_identifier(term):
            return weight * IDENTIFIER
        if NUMBER.match(term):
            return weight * (NUMBER_IN_RESULT if result else NUMBER_SAID)
        return weight * NAME if term in self._names else weight


@dataclass(frozen=True, slots=True)
class Extract:
    """The extract's text without a fence, and its tokens."""

    text: str
    tokens: int


def extract(
    sources: Sequence[Source],
    *,
    max_tokens: int,
    counter: TokenCounter,
    goal: str = "",
    visible: Sequence[str] = (),
    readings: Readings | None = None,
) -> Extract:
    """What is kept of ``sources`` within ``max_tokens``, beside what ``goal`` and ``visible`` say already."""
    reader = Readings() if readings is None else readings
    read = [reader.of(source) for source in sources]
    items = _items(sources, read)
    _link(items, sources)
    shown = [t for text in (goal, *visible) for t in terms_of(text)]
    ranked = choose(items, int(SPARE * max_tokens), shown=shown)
    low, high, best = 0, len(ranked), Extract("", 0)
    while low < high:
        middle = (low + high + 1) // 2
        text = render(sources, items, [n for group in ranked[:middle] for n in group])
        tokens = counter.count(text)
        if tokens <= max_tokens:
            low, best = middle, Extract(text, tokens)
        else:
            high = middle - 1
    return best


def _items(sources: Sequence[Source], read: Sequence[Reading]) -> list[Item]:
    weights = Weights(read)
    newest_call = {(s.tool, s.arguments): i for i, s in enumerate(sources) if s.tool}
    items: list[Item] = []
    alone: dict[str, int] = {}
    for i, (source, reading) in enumerate(zip(sources, read, strict=True)):
        if source.tool and newest_call[source.tool, source.arguments] != i:
            continue
        result = source.is_result
        who = WHO.get("tool" if result else source.role, 0.3)
        rate = source.tokens / max(1, len(source.text) + sum(len(c.arguments) for c in source.calls))
        rate = min(2.0, max(0.15, rate or 0.25))
        if source.role == "user" and not result:
            who *= 1 + SHORT * math.exp(-source.tokens / SHORT_TOKENS)
        for place, segment in enumerate(reading.segments):
            if not segment.terms:
                continue
            called = segment.record < 0
            factor = CALL if called else who
            if source.role == "user" and _ASKS.search(segment.text):
                factor *= QUESTION
            structured = bool(segment.key)
            weighed = tuple((t, weights.of(t, result=result or called)) for t in segment.terms)
            cost = rate * len(segment.text) + (1 if structured else LABEL)
            if structured:
                cost += rate * len(segment.key) / 2
                if len(segment.terms) == 1 and is_identifier(segment.text) and len(segment.text) > 4:
                    factor *= ID_ALONE
            items.append(Item(i, place, segment, weighed, factor, cost))
        for low, word in reading.identifiers.items():
            known = alone.get(low)
            if known is not None:
                items[known].source = i
                continue
            alone[low] = len(items)
            segment = Segment(word, (low,), " ")
            items.append(Item(i, 100_000, segment, ((low, weights.of(low, result=True)),), ID_ALONE, rate * len(word) + 2))
    return items


def _link(items: Sequence[Item], sources: Sequence[Source]) -> None:
    """Tie each statement to the newest later one of the user about the same: neither is shown without the other.

    Two are about the same if they share enough of the rarer one's weight in beginnings of words; what a user says
    briefly right after a message belongs to it, whatever its words are.
    """
    said = [n for n, item in enumerate(items) if not item.segment.key and not sources[item.source].is_result]
    stems = {n: frozenset(t if len(t) <= PREFIX else t[:PREFIX] for t in items[n].segment.terms) for n in said}
    times = Counter(stem for n in said for stem in stems[n])
    total = len(said) + 1
    rare = max(2, int(total * COMMON))
    targets: dict[str, list[int]] = defaultdict(list)
    briefly: dict[int, int] = {}
    asked = [i for i, source in enumerate(sources) if source.role == "user" and not source.is_result]
    following = dict(zip(asked, asked[1:], strict=False))
    usual = sorted(sources[i].tokens for i in asked)[len(asked) // 2] if asked else 0
    brief = min(BRIEF, usual // 2)
    for n in said:
        item = items[n]
        if sources[item.source].role != "user" or _ASKS.search(item.segment.text):
            continue
        for stem in stems[n]:
            if times[stem] <= rare:
                targets[stem].append(n)
        if item.place == 0 and sources[item.source].tokens <= brief:
            briefly[item.source] = n
    weight = {stem: math.log(total / count) for stem, count in times.items()}
    for n in said:
        item = items[n]
        later = list[int]()
        shared: dict[int, float] = defaultdict(float)
        for stem in stems[n]:
            if times[stem] <= rare:
                for m in reversed(targets[stem]):
                    if items[m].source <= item.source:
                        break
                    shared[m] += weight[stem]
        if shared:
            least = LINK * sum(weight[stem] for stem in stems[n])
            close = [m for m, common in shared.items() if common >= least]
            if close:
                later.append(max(close))
        after = following.get(item.source) if sources[item.source].role == "user" else None
        if after in briefly:
            later.append(briefly[after])
        item.later = tuple(later)


def choose(items: Sequence[Item], budget: int, *, shown: Sequence[str]) -> list[tuple[int, ...]]:
    """The items to be shown, best first, in groups that stand together: lazy greedy, since gains only fall."""
    times: dict[str, int] = dict.fromkeys(shown, 9)
    damped = [REPEAT**n for n in range(20)]
    taken = bytearray(len(items))

    def worth(item: Item) -> float:
        total = 0.0
        for term, weight in item.weights:
            n = times.get(term, 0)
            total += weight if n == 0 else weight * damped[min(n, 19)]
        return item.factor * total

    def together(number: int) -> list[int]:
        group, stack = [number], [number]
        while stack:
            for other in items[stack.pop()].later:
                if not taken[other] and other not in group:
                    group.append(other)
                    stack.append(other)
        return group

    heap = [(-worth(item) / (item.cost + OVERHEAD) ** POWER, number) for number, item in enumerate(items)]
    heapq.heapify(heap)
    chosen: list[tuple[int, ...]] = []
    spent = 0.0
    while heap and spent < budget:
        _, number = heapq.heappop(heap)
        if taken[number]:
            continue
        group = together(number)
        cost = sum(items[n].cost for n in group)
        if spent + cost > budget:
            continue
        now = -sum(worth(items[n]) for n in group) / (cost + OVERHEAD) ** POWER
        if heap and now > heap[0][0] + 1e-9:
            heapq.heappush(heap, (now, number))
            continue
        chosen.append(tuple(group))
        spent += cost
        for n in group:
            taken[n] = 1
            for term, _ in items[n].weights:
                times[term] = times.get(term, 0) + 1
    return chosen


def render(sources: Sequence[Source], items: Sequence[Item], chosen: Sequence[int]) -> str:
    """The chosen items in the order of the conversation, a line for each message."""
    lines: list[str] = []
    at, key = (-1, False), ""
    for number in sorted(chosen, key=lambda n: (items[n].source, items[n].place)):
        item = items[number]
        source, segment = sources[item.source], item.segment
        if segment.key:
            said = segment.text if segment.key in {key, " "} else f"{segment.key}: {segment.text}"
            if at == (item.source, True):
                lines[-1] += f", {said}"
            else:
                said = segment.text if segment.key == " " else f"{segment.key}: {segment.text}"
                lines.append(f"{_speaker(source)}: {said}")
            key = segment.key
            at = (item.source, True)
            continue
        if at == (item.source, False):
            lines[-1] += f" {segment.text}"
        else:
            lines.append(f"{_speaker(source)}: {segment.text}")
        at = (item.source, False)
    return "\n".join(lines)


def _speaker(source: Source) -> str:
    return "t" if source.is_result else source.role[:1]
