"""What a piece of a message is worth to an extract: who said it, how, and how rare what it names is.

Terms weigh by their rarity in this conversation and by their shape, not by what they mean in a language.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter

from policies.text.segments import Segment, Source, TextReading, is_identifier, is_question

SPEAKERS = {"user": 1.0, "assistant": 0.2, "tool": 0.6}
OTHER_SPEAKER = 0.3
REASON = 1.0
ALONE = 4.0
"""How much more an identifier is worth alone than within what it stands in: it costs little."""
IDENTIFIER = 3.0
NAME = 1.5
USED = 1.5
"""A later call asked for it; ``LIKE_USED``: for something of the same shape."""
LIKE_USED = 1.5
FIELD = 1.25
"""A call asked for something by the key that a value stands under."""
ASKED = 4.0
"""What the user names now is wanted."""
ANSWER, MEANT = 4.0, 0.2
"""How much more is worth what came of a request that the user asks about now, and the least share of his question, in
squares of weights, that tells which request he means."""
REUSED = 0.2
MAX_REUSED = 4
BRIEFLY = 60
"""Tokens (e-fold) of a message that is said on purpose: a short one of the user's, or beside a call, is worth up to
twice."""
MATERIAL, TIMES_USUAL = 250, 6
"""Tokens of a message that the user hands over rather than says, if it is so many times as long as his usual one. All
but its first and last segment weigh as a result does, and the more there are the less: none of it may be wanted."""
SEGMENTS_OF_MATERIAL = 12
BREATH = 30
"""Tokens of a message of the user's below which it is quoted as a whole."""
TAKEN_UP, REPLY = 1.5, 24
"""How much more is worth what the assistant said before a reply of so few tokens, which says nothing without it."""
LISTED = 4
"""Identifiers of one shape, said in one message and nowhere else: so many are worth what each is alone, of a longer
list they share it. Not of a shape that calls ask by."""
QUESTION = 0.5
ECHO = 0.7
"""How much less a sentence of the user's is worth that only takes up what the message before it said."""
RARE = 0.65
"""Share of the greatest rarity from which on a word is rare: one that both need for what they are about."""
FEW, MAX_FEW = 0.33, 6.0
"""Share of the room under which the user's words are few, and by how much more they are worth at most."""
LABEL = 3
STEM = 4
"""Letters by which words are compared across their inflections."""
LAST = 1_000_000
_PART = re.compile(r"[^\W_]+")


@dataclass(slots=True)
class Item:
    source: int
    place: int
    segment: Segment
    factor: float
    cost: float
    names: bool = False
    """Whether all of it is one identifier."""


class Weights:
    def __init__(
        self,
        documents: Sequence[frozenset[str]],
        *,
        used: frozenset[str] = frozenset(),
        names: frozenset[str] = frozenset(),
        asked: Iterable[str] = (),
    ) -> None:
        self._in = Counter(chain.from_iterable(documents))
        self._used = used
        self._names = names
        self._asked = frozenset(map(_stem, asked))
        self._shapes = {shape(term) for term in used if is_identifier(term)}
        self._most = len(documents) + 2
        self._few = self._most ** (1 - RARE)
        self._known: dict[str, float] = {}

    @classmethod
    def over(cls, readings: Sequence[TextReading], *, asked: Iterable[str] = ()) -> "Weights":
        """By what messages hold, what their calls ask for, and which words are names: never in small letters."""
        empty = frozenset[str]()
        names = empty.union(*(r.names for r in readings)).difference(*(r.small for r in readings))
        used = empty.union(*(r.asked for r in readings))
        return cls([r.terms for r in readings], used=used, names=names, asked=asked)

    def of(self, term: str) -> float:
        known = self._known.get(term)
        if known is None:
            wanted = self._asked and self.is_asked(term)
            known = self._known[term] = self._weigh(term) * (ASKED if wanted else 1.0)
        return known

    def is_asked_for(self, key: str) -> bool:
        return key.lower() in self._used

    def is_listed(self, term: str) -> bool:
        """Whether one message alone has an identifier, and no call asks by any of its shape."""
        return self._in[term] <= 1 and shape(term) not in self._shapes

    def is_asked(self, term: str) -> bool:
        return _stem(term) in self._asked

    def is_rare(self, term: str) -> bool:
        """Whether it is a word, not an identifier, that few messages have."""
        return self._in[term] <= self._few and not is_identifier(term)

    def _weigh(self, term: str) -> float:
        used = term in self._used
        if len(term) >= SHORTEST_IDENTIFIER and is_identifier(term):  # said again, it is needed: rarity is no measure
            asked = USED if used else LIKE_USED if shape(term) in self._shapes else 1.0
            if term.isascii() and "/" not in term and not any(c.isdigit() for c in term):  # may be any key of records
                return math.log(self._most / max(1, self._in[term])) * IDENTIFIER * asked
            again = 1 + REUSED * min(self._in[term] - 1, MAX_REUSED)
            return math.log(self._most) * IDENTIFIER * again * asked
        weight = math.log(self._most / max(1, self._in[term])) * (USED if used else 1.0)
        return weight * NAME if term in self._names else weight


SHORTEST_IDENTIFIER = 5


def _stem(term: str) -> str:
    return term if is_identifier(term) else term[:STEM]


def shape(word: str) -> str:
    return _PART.sub(_kind_of, word)


def _kind_of(part: re.Match[str]) -> str:
    text = part.group()
    return "9" if text.isdigit() else "a" if text.isalpha() else f"#{len(text)}"


def weighed(
    sources: Sequence[Source], read: Sequence[TextReading], *, room: int, asked: frozenset[str]
) -> tuple[list[Item], Weights]:
    """What may be shown of the sources in ``room`` tokens while the user says what is ``asked``; what terms weigh."""
    items, weights = candidates(sources, read, room=room, breath=BREATH), Weights.over(read, asked=asked)
    _damp_echoes(items, sources, read, weights)
    _damp_lists(items, weights)
    _credit_answers(items, sources, weights, asked)
    for item in items:
        if item.names and weights.is_asked_for(item.segment.key):
            item.factor *= FIELD
    return items, weights


def candidates(sources: Sequence[Source], read: Sequence[TextReading], *, room: int = 0, breath: int = 0) -> list[Item]:
    """Every segment of the sources, and every identifier alone; of what was said or called twice only the newest.

    Where the user's words are few beside the ``room`` in tokens, they come before all else. A message of his of fewer
    than ``breath`` tokens is one item.
    """
    least = max(MATERIAL, TIMES_USUAL * _usual(sources))
    spoken = sum(source.tokens for source in sources if source.is_users and source.tokens <= least)
    few = min(MAX_FEW, max(1.0, FEW * room / max(1, spoken)))
    newest = {(s.tool, s.arguments): i for i, s in enumerate(sources) if s.tool}
    said: dict[tuple[str, str], Item] = {}
    items: list[Item] = []
    alone: dict[str, Item] = {}
    for i, (source, reading) in enumerate(zip(sources, read, strict=True)):
        if source.tool and newest[source.tool, source.arguments] != i:
            continue
        rate = _tokens_per_character(source)
        of_source = [*_of_segments(i, source, reading, rate, few)]
        if source.is_users and source.tokens > least:
            _damp_material(of_source)
        elif source.is_users and source.position >= 0 and source.tokens < breath:
            of_source = _in_one(source, of_source)
        elif _is_replied_to(sources, i):
            for item in of_source:
                item.factor *= TAKEN_UP
        for item in of_source:
            if item.segment.key or source.position < 0:  # the goal stands where it is, whatever is said of it again
                items.append(item)
            else:
                said[source.role, item.segment.text] = item
        if source.calls and source.tokens <= 2 * BRIEFLY:
            continue  # a reason is read as a sentence
        for low, word in reading.identifiers.items():
            if low in alone:
                alone[low].source, alone[low].segment = i, Segment(word, (low,), " ")
                continue
            alone[low] = Item(i, LAST, Segment(word, (low,), " "), ALONE, rate * len(word) + 2, names=True)
    return [*sorted([*items, *said.values()], key=attrgetter("source", "place")), *alone.values()]


def _usual(sources: Sequence[Source]) -> int:
    """Tokens of the user's middle message; 0 of none."""
    said = sorted(source.tokens for source in sources if source.is_users and source.position >= 0)
    return said[len(said) // 2] if said else 0


def _damp_material(items: Sequence[Item]) -> None:
    worth = SPEAKERS["tool"] / max(1.0, len(items) / SEGMENTS_OF_MATERIAL)
    for item in items[1:-1]:
        item.factor = worth


def _in_one(source: Source, items: list[Item]) -> list[Item]:
    """What is said in one breath, and in a line: its sentences tell little without each other."""
    text = source.text.strip()
    if len(items) < 2 or len(text.splitlines()) > 1 or any(item.segment.key for item in items):
        return items
    terms = tuple(dict.fromkeys(chain.from_iterable(item.segment.terms for item in items)))
    cost = sum(item.cost for item in items) - LABEL * (len(items) - 1)
    return [replace(items[0], place=0, segment=Segment(text, terms), factor=max(i.factor for i in items), cost=cost)]


def _is_replied_to(sources: Sequence[Source], i: int) -> bool:
    source, reply = sources[i], sources[i + 1] if i + 1 < len(sources) else None
    is_said = source.role == "assistant" and not source.calls
    return is_said and reply is not None and reply.is_users and reply.tokens <= REPLY


def _damp_lists(items: Sequence[Item], weights: Weights) -> None:
    listed = [i for i in items if i.names and weights.is_listed(i.segment.terms[0])]
    shapes = [(item.source, shape(item.segment.terms[0])) for item in listed]
    many = Counter(shapes)
    for item, each in zip(listed, shapes, strict=True):
        item.factor *= min(1.0, LISTED / many[each])


def _damp_echoes(items: list[Item], sources: Sequence[Source], read: Sequence[TextReading], weights: Weights) -> None:
    """What the user says first is news; what is made of rare words of the answer before is a reaction to it."""
    for i, of_source in groupby(items, key=attrgetter("source")):
        if i < 2 or not sources[i].is_users or sources[i - 1].is_users:
            continue
        echoed = {term for term in read[i].terms & read[i - 1].terms if weights.is_rare(term)}
        for item in of_source if echoed else ():
            terms = item.segment.terms
            again = sum([weights.of(term) for term in terms if term in echoed])
            item.factor *= 1 - ECHO * again / (sum(map(weights.of, terms)) or 1.0)


def _credit_answers(items: list[Item], sources: Sequence[Source], weights: Weights, asked: frozenset[str]) -> None:
    """Who asks again about what he asked for wants what came of it, which need not say any of his words."""
    said = [item for item in items if sources[item.source].is_users] if asked else ()
    shares = [
        (sum([weights.of(t) ** 2 for t in item.segment.terms if weights.is_asked(t)]), item.source) for item in said
    ]
    most, request = max(shares, default=(0.0, 0))
    if most <= MEANT * sum([weights.of(term) ** 2 for term in asked]):
        return
    until = next((i for i in range(request + 1, len(sources)) if sources[i].is_users), len(sources))
    for item in items:
        if request < item.source < until:
            item.factor *= ANSWER


def _of_segments(i: int, source: Source, reading: TextReading, rate: float, few: float) -> Iterator[Item]:
    result, said = source.is_result, source.is_users
    of_pair = SPEAKERS.get("tool", OTHER_SPEAKER)
    worth = REASON if source.calls else of_pair if result else SPEAKERS.get(source.role, OTHER_SPEAKER)
    if said or source.calls:
        worth *= 1 + math.exp(-source.tokens / BRIEFLY)
    if said:
        worth *= few
    for place, segment in enumerate(reading.segments):
        if not segment.terms:
            continue
        factor = of_pair if segment.record < 0 else worth
        if said and is_question(segment.text):
            factor *= QUESTION
        cost, names = rate * len(segment.text) + LABEL, False
        if segment.key:
            cost += rate * len(segment.key) / 2 - LABEL + 1
            names = is_alone(segment)
            factor *= ALONE if names else 1.0
        yield Item(i, place, segment, factor, cost, names)


def is_alone(segment: Segment) -> bool:
    """Whether a pair's value is one identifier; words joined by underscores are one of a few that a field may have."""
    text = segment.text
    if segment.key == "" or len(segment.terms) != 1 or len(text) < SHORTEST_IDENTIFIER or not is_identifier(text):
        return False
    return not text.replace("_", "").isalpha()


def _tokens_per_character(source: Source) -> float:
    length = len(source.text) + (sum(len(c.arguments) for c in source.calls) if source.calls else 0)
    return min(2.0, max(0.15, source.tokens / length)) if length and source.tokens else 0.25
