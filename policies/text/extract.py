"""The extract: what is kept, word for word, of messages that leave the window.

Every segment is an item, and every identifier alone. This module decides how much more or less than
its terms each counts (who says it, how briefly, in answer to what), and with which later user
statement it must appear.
"""

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, groupby, pairwise
from operator import attrgetter, itemgetter

from policies.ledger import Identifier
from policies.lines import indented, quoted
from policies.messages import ToolCall
from policies.text.choice import (
    IDENTIFIER,
    LAST,
    Extract,
    Item,
    Neighbours,
    Weights,
    choose,
    fitted,
    joined,
    stem_of,
)
from policies.text.segments import (
    Readings,
    Segment,
    Source,
    TextReading,
    is_alone,
    is_identifier,
    is_question,
    replaced_in,
    terms_of,
)
from policies.text.steps import Step, steps_of
from policies.tokens import TokenCounter

SPEAKERS = {"user": 1.0, "assistant": 0.2, "tool": 0.6}
OTHER_SPEAKER = 0.3
REASON = 1.0
ALONE = 4.0
"""How much more an identifier is worth alone than within its context: it costs little."""
FIELD = 1.5
"""Factor of a value whose key a call has used."""
ANSWER = 4.0
MEANT = 0.2
"""How much more the result of an earlier request is worth when the user asks about it now, and the
least share of the question, in squares of weights, that identifies that request.
"""
BRIEFLY = 60
TELLING = 3.0
"""Tokens (e-fold) of a message that is said on purpose: a short one by the user, or next to a call,
is worth up to twice. The assistant explains at length; what it says briefly is worth so much more.
The less of the user's words fits, the less: by the square of the share.
"""
MATERIAL = 250
TIMES_USUAL = 6
"""Tokens of a user message that is pasted rather than written, if it is this many times as long as
the user's short one. All but its first and last segment weigh as a result does, and the more there
are the less: none of it may be wanted.
"""
SHORTER = 0.25
"""Share of the user's messages that are shorter than the short one: every second may have something
pasted.
"""
SEGMENTS_OF_MATERIAL = 12
STEPS = 0.6
"""The weight of a step's line."""
LEDGER = 0.35
"""Share of the budget that may be taken by the lines of steps that are always shown."""
TOKENS_PER_CHARACTER = 0.4
"""The most that a character of a step's line costs, in tokens, whatever its result contains."""
STEP = -1
"""Position of a step's line: before everything in its result."""
BREATH = 30
"""Tokens of a message of the user's below which it is quoted as a whole."""
TAKEN_UP = 1.5
REPLY = 24
"""How much more the assistant's message before a very short reply is worth, and the tokens of such
a reply: it means nothing without it.
"""
PICKED = 1.0
MAX_PICKED = 4
"""What an option is worth that a reply picks, and how many one picks at most: more numbers mean
something else.
"""
LISTED = 12
"""Values of one key in results: this many count in full, more share that weight. Shapes that calls
use are exempt.
"""
FEW_LINES = 12
"""Lines of a result that count in full; in a longer one, mostly never needed, each counts less by a
root.
"""
QUESTION = 0.5
CHANGED = 0.3
"""The weight of what was read from a file that has changed since."""
NUMBER = 1.0
"""How much more numbers stated by the assistant are worth than equally rare words."""
MAX_FEW = 6.0
"""The most by which the user's words gain weight where they are few: the root of how often they fit
the room.
"""
FEW = 3.0
"""The gain from which on they stay before the result of a repeated request.
"""
LABEL = 3
LINK = 0.22
MOST = 40.0
"""Share of a statement's weight that a later one has to take up to be about the same; of one that
names an identifier of it again, of no more than this weight: a long statement says several things,
and may be corrected in one.
"""
COMMON = 0.02
SELDOM = 4
"""Share of what is said, or number of statements, in which a word may occur that is used to find
later statements.
"""
CORRECTION = 16
"""Tokens of a message that is a mere correction of the one before, where others are twice as long.
"""
MAX_ABOUT = 64
"""Number of newest statements among which a word's later one is searched."""
SPARE = 1.5
"""The order is computed for this many times the budget; how much of it fits is then counted
exactly.
"""
MAX_IDENTIFIERS = 200


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
    """What is kept of ``sources`` within ``max_tokens``, in addition to what the ``visible`` texts
    already say.

    ``goal`` is a statement of the user that precedes all of them: what was said about it later
    comes first. ``asked`` is the current user message: what it names is preferred.
    """
    reader = Readings() if readings is None else readings
    sources = (Source(-1, "user", goal), *sources)
    read = [reader.of(source) for source in sources]
    said_now = frozenset(terms_of(asked))
    weights = Weights.over(read, asked=said_now)
    steps = steps_of(sources)
    items = candidates(sources, read, weights, steps, room=max_tokens, breath=BREATH)
    _credit_numbers(items, sources, weights)
    _damp_lists(items, sources, weights)
    _damp_replaced(items, steps)
    _credit_answers(items, sources, weights, said_now)
    picked = _credit_picks(items, sources) | _with_their_calls(items)
    for item in items:
        if item.names and weights.is_asked_for(item.segment.key):
            item.factor *= FIELD
    own = weights.is_called_for
    end = len(sources)
    ranked = choose(
        items,
        int(SPARE * max_tokens),
        weights=weights,
        links=Links(items, sources, picked),
        shown=[term for text in visible for term in terms_of(text)],
        seen=[n for n, item in enumerate(items) if item.source == 0],
        of=[
            end + n if it.names and own(it.segment.terms[0]) else it.source
            for n, it in enumerate(items)
        ],
        always=_always(items, steps, LEDGER * max_tokens),
        told=[n for n, item in enumerate(items) if said_now.issuperset(item.segment.terms)]
        if said_now
        else (),
    )

    costs = [item.cost for item in items]
    beside = cache(lambda number: Neighbours(sources[number].text))
    write = partial(render, sources, items, beside=beside)
    best = fitted(ranked, write, costs=costs, max_tokens=max_tokens, counter=counter)
    return replace(best, identifiers=_identifiers(sources, read, items, weights, best.chosen))


def candidates(
    sources: Sequence[Source],
    read: Sequence[TextReading],
    weights: Weights,
    steps: Sequence[Step] = (),
    *,
    room: int = 0,
    breath: int = 0,
) -> list[Item]:
    """Every segment of the sources, a line for each step, and separately each identifier of a shape
    that calls use; of what was said or called twice only the newest.

    Where the user's words are few compared with the ``room`` in tokens, they come before all else.
    A user message of fewer than ``breath`` tokens is one item.
    """
    least = max(MATERIAL, TIMES_USUAL * _usual(sources, SHORTER))
    spoken = sum(source.tokens for source in sources if source.is_users and source.tokens <= least)
    fits = room / max(1, spoken)
    few = min(MAX_FEW, math.sqrt(max(1.0, fits)))
    telling = TELLING * min(1.0, fits) ** 2
    outcomes = {step.source: step.outcome for step in steps}
    said: dict[tuple[str, str], Item] = {}
    items: list[Item] = []
    replaced = _replaced(sources)
    for i, (source, reading) in enumerate(zip(sources, read, strict=True)):
        if i in replaced:
            continue
        of_source = [*_of_segments(i, source, reading, source.rate, few, telling)]
        if source.is_users and source.tokens > least:
            for item in of_source[1:-1]:
                item.factor = SPEAKERS["tool"] / max(1.0, len(of_source) / SEGMENTS_OF_MATERIAL)
        elif source.is_users and source.position >= 0 and source.tokens < breath:
            of_source = _in_one(source, of_source)
        elif _is_replied_to(sources, i):
            for item in of_source:
                item.factor *= TAKEN_UP
        for item in of_source:
            if source.tool and item.segment.text == outcomes.get(i):
                continue  # its step says it
            # the goal stays where it is, even if it is repeated
            if item.segment.key or source.position < 0:
                items.append(item)
            else:
                said[source.role, item.segment.text] = item
    items.extend(_of_step(step, sources[step.source]) for step in steps)
    alone = _alone(sources, read, weights, replaced)
    return [*sorted([*items, *said.values()], key=attrgetter("source", "place")), *alone]


def _replaced(sources: Sequence[Source]) -> set[int]:
    calls = {
        i: ToolCall("", source.tool, source.arguments)
        for i, source in enumerate(sources)
        if source.tool
    }
    return replaced_in(calls, lambda i: sources[i].text)


def _alone(
    sources: Sequence[Source],
    read: Sequence[TextReading],
    weights: Weights,
    replaced: Collection[int],
) -> list[Item]:
    """Each identifier of a shape that calls ask by, at the newest message that has it."""
    alone: dict[str, Item] = {}
    for i, (source, reading) in enumerate(zip(sources, read, strict=True)):
        if i in replaced or (source.calls and source.tokens <= 2 * BRIEFLY):
            continue  # a reason is read as a sentence
        for low, word in reading.identifiers.items():
            if low in alone:
                alone[low].source = i
                alone[low].segment = Segment(word, (low,), " ")
            elif weights.is_called_for(low):
                alone[low] = Item(
                    i,
                    LAST,
                    Segment(word, (low,), " "),
                    ALONE,
                    source.rate * len(word) + 2,
                    names=True,
                )
    return [*alone.values()]


def _always(items: Sequence[Item], steps: Sequence[Step], room: float) -> list[int]:
    """The newest reported outcome, what changed something, and the other outcomes, the newest
    first, as many as fit.
    """
    places = {item.source: n for n, item in enumerate(items) if item.place == STEP}
    newest = [*reversed(steps)]
    ended = [step for step in newest if step.ended]
    found = list[int]()
    for step in dict.fromkeys((*ended[:1], *(step for step in newest if step.files), *ended)):
        n = places[step.source]
        if items[n].cost <= room:
            room -= items[n].cost
            found.append(n)
    return found


def _of_step(step: Step, source: Source) -> Item:
    cost = min(TOKENS_PER_CHARACTER, source.rate) * len(step.text) + LABEL
    return Item(step.source, STEP, Segment(step.text, terms_of(step.text)), STEPS, cost)


def _usual(sources: Sequence[Source], shorter: float = 0.5) -> int:
    """The tokens below which this share of the user's messages is; 0 without messages."""
    said = sorted(source.tokens for source in sources if source.is_users and source.position >= 0)
    return said[int(len(said) * shorter)] if said else 0


def _in_one(source: Source, items: list[Item]) -> list[Item]:
    """A short message of one line as one item: its sentences mean little without each other."""
    text = source.text.strip()
    if len(items) < 2 or len(text.splitlines()) > 1 or any(item.segment.key for item in items):
        return items
    terms = tuple(dict.fromkeys(chain.from_iterable(item.segment.terms for item in items)))
    cost = sum(item.cost for item in items) - LABEL * (len(items) - 1)
    return [
        replace(
            items[0],
            place=0,
            segment=Segment(text, terms),
            factor=max(i.factor for i in items),
            cost=cost,
        )
    ]


def _is_replied_to(sources: Sequence[Source], i: int) -> bool:
    source = sources[i]
    reply = sources[i + 1] if i + 1 < len(sources) else None
    is_said = source.role == "assistant" and not source.calls
    return is_said and reply is not None and reply.is_users and reply.tokens <= REPLY


_OPTION = re.compile(r"[\W_]*(\d{1,2}|[A-H])[.):\uff0e\u3001]")
_PICK = re.compile(r"(?<![A-Za-z0-9.,:/-])(?:\d{1,2}|[A-H])(?![A-Za-z0-9:/%]|[.,-]\d)")


def _credit_picks(items: Sequence[Item], sources: Sequence[Source]) -> dict[int, tuple[int, ...]]:
    """An option that the user picks by its number or letter counts as the user's own words, and is
    kept with the reply.
    """
    replied = {i for i in range(len(sources)) if _is_replied_to(sources, i)}
    found: dict[int, tuple[int, ...]] = {}
    first: dict[int, int] = {}
    options: dict[int, dict[str, int]] = defaultdict(dict)
    beside = replied | {i + 1 for i in replied}
    for n, item in enumerate(items if replied else ()):
        if item.source in beside and item.place != LAST:
            first.setdefault(item.source, n)
            if item.source in replied and (option := _OPTION.match(item.segment.text)):
                options[item.source].setdefault(option[1], n)
    for source, named in options.items():
        picks = set(_PICK.findall(sources[source + 1].text)) & named.keys()
        if len(named) > 1 and len(picks) <= MAX_PICKED and source + 1 in first:
            for n in map(named.__getitem__, picks):
                items[n].factor = PICKED
                found[n] = (first[source + 1],)
    return found


def _damp_lists(items: Sequence[Item], sources: Sequence[Source], weights: Weights) -> None:
    """Where results have many of a kind, each is worth less, except for shapes that calls use."""
    kinds = [_kind(item, sources, weights) for item in items]
    many = Counter(kinds)
    for item, kind in zip(items, kinds, strict=True):
        if kind:
            item.factor *= min(1.0, LISTED / many[kind])


def _kind(item: Item, sources: Sequence[Source], weights: Weights) -> str:
    """The group of a value in a result: its key; empty for anything else."""
    segment = item.segment
    if not sources[item.source].is_result or not segment.key.strip():
        return ""
    if len(segment.terms) == 1 and weights.is_called_for(segment.terms[0]):
        return ""
    return segment.key


def _damp_replaced(items: Sequence[Item], steps: Sequence[Step]) -> None:
    """What was read from a file before it was changed may be out of date."""
    changed: set[str] = set()
    replaced = set[int]()
    for step in reversed(steps):
        if not step.files and any(path in step.text for path in changed):
            replaced.add(step.source)
        changed.update(step.files)
    for item in items:
        if item.source in replaced and item.place != STEP:
            item.factor *= CHANGED


def _with_their_calls(items: Sequence[Item]) -> dict[int, tuple[int, ...]]:
    """A line of a result means nothing without the call."""
    calls = {item.source: n for n, item in enumerate(items) if item.place == STEP}
    return {
        n: (calls[item.source],)
        for n, item in enumerate(items)
        if item.source in calls and not item.segment.key and item.place != STEP
    }


def _credit_numbers(items: Sequence[Item], sources: Sequence[Source], weights: Weights) -> None:
    """A number that the assistant states is what it found out; one of a result is one of many."""
    for item in items:
        if sources[item.source].role != "assistant" or item.names:
            continue
        stated = sum(
            [weights[term] for term in item.segment.terms if len(term) > 1 and term[0].isdigit()]
        )
        if stated:
            item.factor *= 1 + NUMBER * stated / sum(map(weights.__getitem__, item.segment.terms))


def _credit_answers(
    items: list[Item], sources: Sequence[Source], weights: Weights, asked: frozenset[str]
) -> None:
    """A user who asks about an earlier request wants its result, which may contain none of the
    user's words.
    """
    users = {i for i, source in enumerate(sources) if source.is_users} if asked else set[int]()
    said = [item for item in items if item.source in users]
    terms = frozenset(chain.from_iterable([item.segment.terms for item in said]))
    meant = {term: weights[term] ** 2 for term in terms if weights.is_asked(term)}
    shares = [
        (sum([meant[t] for t in item.segment.terms if t in meant]), item.source) for item in said
    ]
    most, request = max(shares, default=(0.0, 0))
    if most <= MEANT * sum([weights[term] ** 2 for term in asked]):
        return
    until = next((i for i in range(request + 1, len(sources)) if i in users), len(sources))
    for item in items:
        if request < item.source < until or (
            item.source in users and item.factor >= FEW and not item.names
        ):
            item.factor *= ANSWER


def _of_segments(
    i: int, source: Source, reading: TextReading, rate: float, few: float, telling: float
) -> Iterator[Item]:
    worth = SPEAKERS.get("tool" if source.is_result else source.role, OTHER_SPEAKER)
    if source.calls:
        worth = REASON
    if source.is_users:
        worth *= few
    if source.is_users or source.calls:
        worth *= 1 + math.exp(-source.tokens / BRIEFLY)
    elif source.role == "assistant":
        worth *= 1 + telling * math.exp(-source.tokens / BRIEFLY)
    of_line = worth
    if source.is_result:
        of_line *= math.sqrt(min(1.0, FEW_LINES / max(1, len(reading.segments))))
    for place, segment in enumerate(reading.segments):
        text, terms, key, _ = segment
        if not terms:
            continue
        names = is_alone(segment)
        factor = worth * ALONE if names else of_line
        if source.is_users and is_question(text):
            factor *= QUESTION
        cost = rate * len(text) + LABEL
        if key:
            cost += rate * len(key) / 2 - LABEL + 1
        yield Item(i, place, segment, factor, cost, names)


class Links:
    """Maps a statement to the user's later one about the same: the older is not shown without it.

    About the same is one that takes up enough of its weight in identifiers and beginnings of words,
    of several that which takes up most, the newest of equal ones; or what is said right after it in
    far fewer words, unless that is a question.
    """

    def __init__(
        self,
        items: Sequence[Item],
        sources: Sequence[Source],
        picked: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self._items = items
        self._picked = picked or {}
        self._known: dict[int, tuple[int, ...]] = {}
        self._by_term: dict[int, dict[str, list[int]]] = {}
        self._said: dict[str, list[int]] = defaultdict(list)
        self._of_source: dict[int, list[int]] = defaultdict(list)
        of_results = {i for i, source in enumerate(sources) if source.is_result}
        spoken = [
            n
            for n, item in enumerate(items)
            if not item.segment.key and item.source not in of_results
        ]
        times: dict[str, int] = defaultdict(int)
        often = Counter(chain.from_iterable([items[n].segment.terms for n in spoken]))
        self._stem = {term: stem_of(term) for term in often}
        for term, n in often.items():
            times[self._stem[term]] += n
        rarity = {n: max(0.0, math.log((len(spoken) + 1) / n)) for n in {*times.values()}}
        self._weights = {
            s: (IDENTIFIER if is_identifier(s) else 1.0) * rarity[n] for s, n in times.items()
        }
        most = max(SELDOM, int(COMMON * len(spoken)))
        rare = {stem for stem, n in times.items() if n <= most}
        self._spoken = frozenset(spoken)
        for n in spoken:
            source = items[n].source
            self._of_source[source].append(n)
            if sources[source].role == "user" and not is_question(items[n].segment.text):
                for stem in rare.intersection(map(self._stem.__getitem__, items[n].segment.terms)):
                    self._said[stem].append(n)
        self._corrections = _corrections(items, sources, self._of_source)

    def _stems(self, number: int) -> dict[str, None]:
        return dict.fromkeys(map(self._stem.__getitem__, self._items[number].segment.terms))

    def of(self, number: int) -> tuple[int, ...]:
        if number not in self._known:
            later = self._later(number) if number in self._spoken else self._of_alone(number)
            self._known[number] = (*self._picked.get(number, ()), *later)
        return self._known[number]

    def _of_alone(self, number: int) -> tuple[int, ...]:
        item = self._items[number]
        if item.place != LAST:
            return ()
        saying = self._saying(item.source).get(item.segment.terms[0], ())
        return next((later for n in reversed(saying) if (later := self.of(n))), ())

    def _saying(self, source: int) -> Mapping[str, Sequence[int]]:
        """Maps a term to the statements of a message that have it."""
        if source not in self._by_term:
            found = self._by_term[source] = defaultdict[str, list[int]](list)
            for n in self._of_source.get(source, ()):
                for term in self._items[n].segment.terms:
                    found[term].append(n)
        return self._by_term[source]

    def _later(self, number: int) -> tuple[int, ...]:
        stems = self._stems(number)
        weights = self._weights
        source = self._items[number].source
        last = self._of_source[source][-1]
        worth = sum(map(weights.__getitem__, stems))
        enough = LINK * min(MOST, worth)
        found = [
            (weights[stem], said)
            for stem in stems
            if (said := self._said.get(stem)) and said[-1] > last
        ]
        found.sort(key=itemgetter(0), reverse=True)  # the rarest first, which the fewest have
        left = sum(weight for weight, _ in found)
        taken_up: dict[int, float] = {}
        for weight, said in found:
            others = said[max(bisect_right(said, last), len(said) - MAX_ABOUT) :]
            # this one and all that follow add too little: only what others have taken up counts
            if left < enough:
                taken_up = {
                    other: share
                    for other, share in taken_up.items()
                    if share + left >= enough - 1e-9
                }
                others = [*taken_up.keys() & others]
                if not taken_up:
                    break
            for other in others:
                taken_up[other] = taken_up.get(other, 0.0) + weight
            left -= weight
        again = (
            {n for stem in stems if is_identifier(stem) for n in self._said.get(stem, ())}
            if taken_up
            else ()
        )
        about = [
            (s, n) for n, s in taken_up.items() if s >= LINK * worth or (s >= enough and n in again)
        ]
        return (*([max(about)[1]] if about else ()), *self._corrections.get(source, ()))


def _corrections(
    items: Sequence[Item], sources: Sequence[Source], of_source: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    users = [i for i, source in enumerate(sources) if source.is_users]
    first = {
        source: spoken[0] for source, spoken in of_source.items() if items[spoken[0]].place == 0
    }
    brief = min(CORRECTION, _usual(sources) // 2)
    return {
        one: (first[other],)
        for one, other in pairwise(users)
        if other in first
        and sources[other].tokens <= brief
        and not is_question(items[first[other]].segment.text)
    }


def _identifiers(
    sources: Sequence[Source],
    read: Sequence[TextReading],
    items: Sequence[Item],
    weights: Weights,
    chosen: Sequence[int],
) -> tuple[Identifier, ...]:
    """The most informative identifiers, whether or not the extract shows them."""
    shown = {term for n in chosen for term in items[n].segment.terms}
    found: dict[str, tuple[float, str, str]] = {}
    for source, reading in zip(sources[1:], read[1:], strict=True):
        for low, word in reading.identifiers.items():
            found[low] = (weights[low], word, source.tool)
    for item in items:
        if item.source and item.names and item.segment.key.strip():
            low = item.segment.terms[0]
            found[low] = (item.factor * weights[low], item.segment.text, item.segment.key.strip())
    best = sorted(found.items(), key=lambda each: -each[1][0])[:MAX_IDENTIFIERS]
    return tuple(Identifier(word, kind, low in shown) for low, (_, word, kind) in best)


def render(
    sources: Sequence[Source],
    items: Sequence[Item],
    chosen: Sequence[int],
    *,
    beside: Callable[[int], Neighbours],
) -> str:
    """The chosen items in the order of the conversation, a line for each message with its number,
    one for each step.

    Neighbouring results that only show values of one key share a line. ``beside`` maps a source's
    number to what is adjacent in it.
    """
    lines: list[str] = []
    before = ("", "")
    shown = {term for n in chosen if items[n].place != LAST for term in items[n].segment.terms}
    kept = (
        items[n] for n in chosen if items[n].place != LAST or items[n].segment.terms[0] not in shown
    )
    ordered = sorted(kept, key=lambda item: (item.source, item.place))
    for (number, is_step), of_message in groupby(
        ordered, key=lambda item: (item.source, item.place == STEP)
    ):
        source = sources[number]
        told = [*of_message]
        speaker = "call" if is_step else source.role
        keys = {item.segment.key.strip() for item in told}
        key = keys.pop() if len(keys) == 1 and source.is_result else ""
        if key and before == (speaker, key):
            lines[-1] += (
                f"; {source.position}: {indented(', '.join(item.segment.text for item in told))}"
            )
        else:
            said = joined(told, source=source, neighbours=beside(number))
            lines.append(quoted(speaker, source.position, said))
        before = speaker, key
    return "\n".join(lines)
