"""What left the window and the newest user message needs: found by its words, quoted word for word.

Every message is cut into passages of a few sentences. A word of the question weighs by its rarity
in this conversation, so no language has to be known; words match in other forms too, by their
beginning or without it. A passage is worth the words that it shares with the question and, less,
those of its neighbours, so that an answer is found by the question before it; where the question is
about an earlier request, what the assistant said to that is worth a share of the request's words.
Nothing is brought back where no single place outside the model's view has enough of the question's
weight, or no more than in what it sees.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from sys import intern
from typing import NamedTuple

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft
from policies.ledger import EditKind
from policies.lines import DATA, quoted
from policies.messages import Body
from policies.summary.material import QUOTED, fence, harmless
from policies.text.segments import SOLID, clipped, is_identifier, is_question, sentences, voices
from policies.text.segments import words as words_of

HEADING = "[weir: brought back from what was removed]"
MIN_TOKENS = 120
ROOM_PARTS = 5
"""Divisor of the room beyond what is fixed: one part is for what is brought back."""
MAX_QUESTION_LEN = 8_000
MAX_TERMS = 40
MAX_MESSAGES = 40
"""Messages whose passages are examined; the others match the question less."""
WIDE = 0.4
LEAST_WIDE = 100
"""Bytes up to which sentences of a message stay together: a share of the tokens there is room for.
"""
LONG = 400
BEGINNING = 0.6
INSIDE = 0.5
"""The weight of another form of a word: with the same beginning, with the same inside."""
IDENTIFIER = 2.0
COMMON = 0.3
"""Rarity of a word under which other forms of it are not looked for."""
BEFORE = 0.4
AFTER = 0.15
LENGTH = 0.4
ASKED = 0.6
OTHERS = 0.9
STRENGTH = 0.3
STRENGTH_OF_STATEMENT = 0.8
"""Least squared rarity that a passage has to share with a question, or with another message; one
word that occurs nowhere else has 1.
"""
SHARE_OF_QUESTION = 0.10
SHARE_OF_STATEMENT = 0.28
"""Minimum share of the newest message's weight that a passage has to hold: for a message that ends
as a question, and for others.
"""
ANSWERED = 0.5
MEANT = 0.2
"""The share of a user's request that counts for its answer, if the newest message is about that
request: the user's passage that shares most, and at least this much of the newest message's squared
rarity.
"""
ENOUGH = 0.2
"""Share of the best passage's worth from which on others are brought back too; more if the model
sees the best one.
"""
ENOUGH_BESIDE = 0.5
TOLD = 0.95
"""Minimum strength of a passage, as a share of the strength that the request already has.
"""
REVISES = 0.5
BRIEF = 16
"""Tokens of what a user says right afterwards that is taken as about the same, whatever its words
are.
"""
MAX_REPLY = 2
"""Maximum number of passages in an answer to a proposal."""
LABEL = 5
MAX_RANKED = 1_000
"""Number of best passages for which later statements are searched."""
MAX_HELD = 24 << 20
SIZE = 8
"""Bytes for each character, words included, and for passages, which only some messages have."""


class Elsewhere(NamedTuple):
    ref: str
    role: str
    text: str
    alike: bool = False


class Passage(NamedTuple):
    """The characters from ``start`` to ``end`` of a message, its sentences, the marks of its words,
    and whether it begins and ends with whole sentences.
    """

    start: int
    end: int
    sentences: tuple[tuple[int, int], ...]
    marks: tuple[str, ...]
    opens: bool
    closes: bool


@dataclass(slots=True)
class MessagePage:
    text: str
    words: tuple[str, ...]
    _sentences: tuple[Passage, ...] | None = None

    def passages(self, wide: int) -> Iterator[Passage]:
        if self._sentences is None:
            self._sentences = tuple(_read(self.text))
        return _together(self.text, self._sentences, wide)


class Pages:
    """Pages by the digests of their messages, so that each message is read once; dropped when they
    are too many.

    Of a message there is the page of what its speaker says, and where it has data the page of that.
    """

    def __init__(self, *, most: int = MAX_HELD) -> None:
        self._most = most
        self._held = 0
        self._kept: dict[bytes, tuple[MessagePage, ...]] = {}

    def of(self, digest: bytes, role: str, read: Callable[[], Body]) -> tuple[MessagePage, ...]:
        found = self._kept.get(digest)
        if found is None:
            body = read()
            own, data = voices(body, role)
            said = body.said if own == body.text else replace(body, text=own).said
            found = (page(said), page(data)) if data else (page(said),)
            if self._held > self._most:
                self._held = 0
                self._kept = {}
            self._held += SIZE * sum(len(each.text) for each in found)
            self._kept[digest] = found
        return found


def page(text: str) -> MessagePage:
    text = clipped(text)
    return MessagePage(text, tuple(map(intern, set(words_of(text)))))


def _marks(words: Iterable[str]) -> frozenset[str]:
    """What words are found by: themselves, how they begin, and how they go on after two letters."""
    found = set[str]()
    for word in set(words):
        found.add(word)
        if len(word) > 2 or not SOLID.match(word):
            found.add(f"^{word[:4]}")
        if len(word) > 4:
            found.add(f"~{word[2:6]}")
        if len(word) > 6:
            found.add(f"^{word[:6]}")
    return frozenset(found)


def _read(text: str) -> Iterator[Passage]:
    """Each sentence by itself, a long one in several parts."""
    at = 0
    for sentence in sentences(text):
        begins = start = text.find(sentence, at)
        if start < 0:
            continue
        at = start + len(sentence)
        while at - start > LONG:
            cut = max(text.rfind(blank, start + LONG // 4, start + LONG) for blank in " ,")
            cut = cut + 1 if cut > 0 else start + LONG
            yield _passage(text, start, cut, opens=start == begins, closes=False)
            start = cut
        yield _passage(text, start, at, opens=start == begins, closes=True)


def _passage(text: str, start: int, end: int, *, opens: bool, closes: bool) -> Passage:
    # Not the set: as sets of strings of their own the passages of 200 conversations took 160 MB.
    marks = tuple(map(intern, _marks(words_of(text[start:end]))))
    return Passage(start, end, ((start, end),), marks, opens, closes)


def _together(text: str, sentences: Iterable[Passage], wide: int) -> Iterator[Passage]:
    """Neighbouring sentences, as many as ``wide`` bytes hold."""
    begun: Passage | None = None
    for sentence in sentences:
        if begun is None or len(text[begun.start : sentence.end].encode(errors="replace")) > wide:
            if begun is not None:
                yield begun
            begun = sentence
            continue
        begun = Passage(
            begun.start,
            sentence.end,
            begun.sentences + sentence.sentences,
            begun.marks + sentence.marks,
            begun.opens,
            sentence.closes,
        )
    if begun is not None:
        yield begun


class _Form(NamedTuple):
    mark: str
    worth: float


class _Term(NamedTuple):
    forms: tuple[_Form, ...]
    weight: float


def _forms(term: str) -> Iterator[_Form]:
    yield _Form(term, IDENTIFIER if len(term) > 4 and is_identifier(term) else 1.0)
    if len(term) < 4 or SOLID.match(term) or any(map(str.isdigit, term)):
        return
    if len(term) > 6:
        yield _Form(f"^{term[:6]}", BEGINNING)
    yield _Form(f"^{term[: 3 if len(term) == 4 else 4]}", BEGINNING if len(term) < 7 else INSIDE)
    if len(term) > 4:
        yield _Form(f"~{term[2:6]}", INSIDE)
        yield _Form(f"^{term[2:6]}", INSIDE)
        yield _Form(f"~{term[:4]}", INSIDE)


def _weighed(
    words: Sequence[str], read: Sequence["_ReadMessage"]
) -> tuple[list[_Term], list[float]]:
    forms_of = {word: list(_forms(word)) for word in words}
    holding = _holding({form.mark for forms in forms_of.values() for form in forms}, read)
    most = math.log(len(read) + 1)
    strengths = [0.0] * len(read)
    terms = list[_Term]()
    for word in words:
        forms = list[_Form]()
        best = dict[int, float]()
        exact = 0.0
        for mark, factor in forms_of[word]:
            found = holding.get(mark)
            if not found:
                continue
            rarity = math.log((len(read) + 1) / len(found)) / most
            forms.append(_Form(mark, factor * rarity))
            for n in found:
                best[n] = max(best.get(n, 0.0), factor * rarity)
            if mark == word:
                exact = factor * rarity
                if rarity < COMMON:
                    break  # its other forms say no more
        for n, worth in best.items():
            strengths[n] += worth * worth
        weight = exact or max((f.worth / BEGINNING for f in forms), default=1.0)
        terms.append(_Term(tuple(sorted(forms, key=lambda f: -f.worth)), weight))
    return terms, strengths


def _holding(marks: set[str], read: Sequence["_ReadMessage"]) -> dict[str, list[int]]:
    begin = {mark[:4] for mark in marks if mark[0] == "^"}
    words = set[str]().union(*(r.page.words for r in read))
    like = {w for w in words if w in marks or f"^{w[:3]}" in begin or f"~{w[2:6]}" in marks}
    marks_of = {word: found for word in like if (found := marks & _marks((word,)))}
    wanted = frozenset(marks_of)
    holding: dict[str, list[int]] = {}
    for n, each in enumerate(read):
        for mark in {
            mark for word in wanted.intersection(each.page.words) for mark in marks_of[word]
        }:
            holding.setdefault(mark, []).append(n)
    return holding


def _shared(terms: Sequence[_Term], marks: Collection[str]) -> tuple[frozenset[int], float, float]:
    weight = squared = 0.0
    has = list[int]()
    for n, term in enumerate(terms):
        for mark, worth in term.forms:
            if mark in marks:
                has.append(n)
                weight += worth
                squared += worth * worth
                break
    return frozenset(has), weight, squared


@dataclass(frozen=True, slots=True)
class _ReadMessage:
    index: int
    role: str
    page: MessagePage
    hidden: bool
    ref: str = ""
    brief: bool = False


@dataclass(slots=True)
class _Place:
    read: _ReadMessage
    number: int
    passage: Passage
    hidden: bool
    terms: frozenset[int]
    weight: float
    strength: float
    worth: float = 0.0
    told: float = 0.0
    """Strength of the part of it that the request already holds."""

    @property
    def key(self) -> tuple[int, bool, int]:
        return self.read.index, self.read.role == DATA, self.number

    @property
    def text(self) -> str:
        return self.read.page.text[self.passage.start : self.passage.end]

    @property
    def states(self) -> bool:
        return self.read.role == "user" and not is_question(self.text)


def recall(
    draft: Draft, bounds: Bounds, *, pages: Pages, elsewhere: Sequence[Elsewhere] = ()
) -> Draft:
    current = bounds.protection.current
    text = (
        _recollected(draft, bounds, current, pages=pages, elsewhere=elsewhere)
        if current is not None
        else None
    )
    if current is None or text is None:
        return draft
    edit = bounds.edited(current, text, EditKind.RECALL)
    known = bounds.known.edits.get(edit.key)
    # after another history, where it stays
    if known is not None and known.kind is EditKind.RECALL:
        edit = replace(edit, digest=edit.chain, occurrence=0)
    return draft.with_edits({current: edit})


def may_recall(draft: Draft, bounds: Bounds) -> bool:
    transcript = bounds.transcript
    current = bounds.protection.current
    if not bounds.settings.recall.is_automatic or bounds.ceiling is not None or current is None:
        return False
    is_new = (
        current - transcript.head >= bounds.known.length and not transcript.messages[current].media
    )
    return is_new and draft.changed and all(m.is_head for m in transcript.messages[current + 1 :])


def is_crowded(draft: Draft, bounds: Bounds) -> bool:
    """Whether what the newest message needs would have no room in addition to what the request
    holds.
    """
    return may_recall(draft, bounds) and _room(draft, bounds) < MIN_TOKENS


def with_room(bounds: Bounds) -> Bounds:
    """Bounds for a summary that leaves room for what is needed; unchanged where none could."""
    wanted = _most(bounds)
    shape = bounds.shape
    if wanted < MIN_TOKENS:
        return bounds
    share = 1 - wanted / bounds.room
    return replace(
        bounds,
        shape=replace(
            shape, low_water=min(shape.low_water, share), extract=min(shape.extract, share)
        ),
    )


def _room(draft: Draft, bounds: Bounds) -> int:
    return min(
        _most(bounds),
        min(bounds.budget.soft_limit, bounds.hard_limit) - draft.tokens - MESSAGE_OVERHEAD,
    )


def _most(bounds: Bounds) -> int:
    return min(bounds.settings.recall.auto_tokens, bounds.room // ROOM_PARTS)


def _recollected(
    draft: Draft, bounds: Bounds, current: int, *, pages: Pages, elsewhere: Sequence[Elsewhere] = ()
) -> str | None:
    transcript = bounds.transcript
    most = _room(draft, bounds)
    question = voices(transcript.read(current), "user")[0][-MAX_QUESTION_LEN:]
    words = list(dict.fromkeys(words_of(question)))[-MAX_TERMS:]
    if most < MIN_TOKENS or not words:
        return None
    given = {e.ref for e in elsewhere if e.alike}
    known = {m.ref for m in transcript.messages[transcript.head : current]}
    gone = [e for e in elsewhere if e.ref not in known]
    read = [*_elsewhere(gone), *_messages(draft, current, pages)]
    if not any(r.hidden for r in read):
        return None
    liked = {r.index for r in read if r.ref in given}
    terms, strengths = _weighed(words, read)
    shown = "\n".join(p.text for p in draft.pieces if p.text is not None)
    wide = max(LEAST_WIDE, int(WIDE * most))
    places = _places(_candidates(read, strengths, liked), terms, shown, wide)
    chosen = _chosen(places, terms, set(words), asks=is_question(question), liked=liked)
    return _written(
        chosen, ref=transcript.messages[current].ref, most=most, count=bounds.counter.count
    )


def _elsewhere(given: Sequence[Elsewhere]) -> Iterator[_ReadMessage]:
    places = {ref: n for n, ref in enumerate(dict.fromkeys(e.ref for e in given))}
    return (
        _ReadMessage(places[e.ref] - len(places), e.role, page(e.text), hidden=True, ref=e.ref)
        for e in given
    )


def _messages(draft: Draft, current: int, pages: Pages) -> Iterator[_ReadMessage]:
    transcript = draft.transcript
    messages = transcript.messages
    head = transcript.head
    intact = {p.index for p in draft.pieces if p.text is None and p.index is not None}
    seen = {messages[i].digest for i in intact}
    usual = sorted(m.tokens for m in messages[head:current] if m.role == "user")
    brief = min(BRIEF, usual[len(usual) // 2] // 2) if usual else 0
    for i in range(head, current):
        message = messages[i]
        hidden = message.digest not in seen
        said, *data = pages.of(message.digest, message.role, partial(transcript.read, i))
        yield _ReadMessage(i, message.role, said, hidden, message.ref, message.tokens <= brief)
        yield from (_ReadMessage(i, DATA, each, hidden, message.ref) for each in data)


def _candidates(
    read: Sequence[_ReadMessage], strengths: Sequence[float], liked: Collection[int]
) -> list[_ReadMessage]:
    """The messages that match the question most, and those that follow them: an answer may repeat
    no word of it.
    """
    best = sorted(range(len(read)), key=lambda n: -strengths[n])[:MAX_MESSAGES]
    found = {m for n in best if strengths[n] > 0 for m in (n, n + 1)}
    found |= {n for n, r in enumerate(read) if r.index in liked}
    return [read[n] for n in sorted(found) if n < len(read)]


def _places(
    candidates: Sequence[_ReadMessage], terms: Sequence[_Term], shown: str, wide: int
) -> list[_Place]:
    places = list[_Place]()
    shown_words = frozenset(words_of(shown))
    for read in candidates:
        for number, passage in enumerate(read.page.passages(wide)):
            has, weight, strength = _shared(terms, frozenset(passage.marks))
            there = (
                _stands_in(shown, shown_words, read.page.text, passage)
                if read.hidden
                else passage.sentences
            )
            place = _Place(
                read, number, passage, len(there) < len(passage.sentences), has, weight, strength
            )
            place.told = (
                strength if not place.hidden else _strength_of(there, read.page.text, terms)
            )
            places.append(place)
    _credit_answers(places, sum(term.weight**2 for term in terms))
    usual = sum(p.passage.end - p.passage.start for p in places) / max(1, len(places))
    for n, place in enumerate(places):
        before = places[n - 1] if n and places[n - 1].read.index >= place.read.index - 1 else None
        after = (
            places[n + 1]
            if n + 1 < len(places) and places[n + 1].read.index <= place.read.index + 1
            else None
        )
        place.worth = place.strength + BEFORE * (before.strength if before else 0.0)
        place.worth += AFTER * (after.strength if after else 0.0)
        place.worth /= (
            1 - LENGTH + LENGTH * max(0.3, (place.passage.end - place.passage.start) / usual)
        )
        place.worth *= ASKED if is_question(place.text) else 1.0
        place.worth *= 1.0 if place.read.role == "user" else OTHERS
    return places


def _stands_in(
    shown: str, shown_words: frozenset[str], text: str, passage: Passage
) -> Sequence[tuple[int, int]]:
    """The sentences of a passage that are in what is shown, which is searched for those all of
    whose words it has.
    """
    return [
        (start, end)
        for start, end in passage.sentences
        if shown_words.issuperset(words_of(text[start:end])) and text[start:end] in shown
    ]


def _strength_of(sentences: Sequence[tuple[int, int]], text: str, terms: Sequence[_Term]) -> float:
    if not sentences:
        return 0.0
    return _shared(terms, _marks(words_of(" ".join(text[start:end] for start, end in sentences))))[
        2
    ]


def _credit_answers(places: Sequence[_Place], whole: float) -> None:
    """An answer may contain none of the question's words: the less of the current question is in
    the request, the more is searched in what the assistant said right after it.
    """
    request = max(
        (p for p in places if p.read.role == "user"), key=lambda p: p.strength, default=None
    )
    if request is None or request.strength <= MEANT * whole:
        return
    inherits = ANSWERED * max(0.0, 1 - request.strength / whole)
    last = request.read.index
    for place in (p for p in places if p.read.index > request.read.index):
        if place.read.role == "user" or place.read.index > last + 1:
            break
        last = place.read.index
        if place.read.role == "assistant":
            place.terms |= request.terms
            place.weight += inherits * request.weight
            place.strength += inherits * request.strength


def _chosen(
    places: Sequence[_Place],
    terms: Sequence[_Term],
    words: Collection[str],
    *,
    asks: bool,
    liked: Collection[int],
) -> list[list[_Place]]:
    hidden = [p for p in places if p.hidden]
    best = next((p for p in sorted(hidden, key=lambda p: -p.strength) if _tells(p, words)), None)
    share = (best.weight if best else 0.0) / sum(t.weight for t in terms)
    meant = [[p] for p in hidden if p.read.index in liked]
    told = max((p.told for p in places), default=0.0)
    plain = best is not None and best.strength >= max(
        STRENGTH if asks else STRENGTH_OF_STATEMENT, TOLD * told
    )
    if not plain or share < (SHARE_OF_QUESTION if asks else SHARE_OF_STATEMENT):
        return meant
    most = max(p.worth for p in hidden)
    least = max(
        ENOUGH * most, ENOUGH_BESIDE * max((p.worth for p in places if not p.hidden), default=0.0)
    )
    ranked = sorted((p for p in hidden if p.worth >= least), key=lambda p: -p.worth)[:MAX_RANKED]
    later = _Later(places, terms)
    return [*([p, *later.of(p)] for p in ranked), *meant]


def _tells(place: _Place, words: Collection[str]) -> bool:
    if len(place.terms) < 2 and (place.strength < 1 or len(words) < 2):
        return False
    return len({w for w in place.passage.marks if w[0] not in "^~"} - {*words}) > 1


class _Later:
    """What the user said later about the same, and next if brief; for an assistant's passage, the
    user's answer to it.
    """

    def __init__(self, places: Sequence[_Place], terms: Sequence[_Term]) -> None:
        self._terms = terms
        self._replies: dict[int, list[_Place]] = {}
        self._stated: dict[int, list[_Place]] = {}
        self._last: dict[frozenset[int], tuple[int, _Place]] = {}
        for n, place in enumerate(places):
            if not place.hidden or place.read.role != "user":
                continue
            self._replies.setdefault(place.read.index, []).append(place)
            if place.states:
                self._stated.setdefault(place.read.index, []).append(place)
                self._last[place.terms] = n, place
        self._stating = sorted(self._stated)

    def of(self, place: _Place) -> list[_Place]:
        index = place.read.index
        if place.read.role == "assistant":
            return self._replies.get(index + 1, [])[:MAX_REPLY]
        following = bisect_right(self._stating, index)
        if not place.states or following == len(self._stating):
            return []
        least = REVISES * self._weight_of(place.terms)
        same = [
            last
            for terms, last in self._last.items()
            if last[1].read.index > index and self._weight_of(place.terms & terms) >= least > 0
        ]
        newest = [max(same, key=itemgetter(0))[1]] if same else []
        next_one = [p for p in self._stated[self._stating[following]] if p.read.brief]
        return [*newest, *(p for p in next_one if p not in newest)]

    def _weight_of(self, terms: Collection[int]) -> float:
        return sum(self._terms[n].weight for n in terms)


def _written(
    chosen: Sequence[Sequence[_Place]], *, ref: str, most: int, count: Callable[[str], int]
) -> str | None:
    def write() -> str:
        return _fenced([QUOTED, *_lines([taken[key] for key in sorted(taken)])], ref)

    taken = dict[tuple[int, bool, int], _Place]()
    left = most - count(write())
    text = None
    while left > 0:
        added = list[dict[tuple[int, bool, int], _Place]]()
        for group in chosen:
            new = {p.key: p for p in group if p.key not in taken}
            cost = sum(count(p.text) + LABEL for p in new.values())
            if new and cost <= left:
                taken |= new
                left -= cost
                added.append(new)
        while added and count(write()) > most:
            for key in added.pop():
                del taken[key]
        if not added:
            break
        text = write()
        left = most - count(text)
    return text


def _lines(places: Sequence[_Place]) -> Iterator[str]:
    for _, group in groupby(places, key=lambda p: p.key[:2]):
        within = list(group)
        read = within[0].read
        said = ""
        for n, place in enumerate(within):
            passage = place.passage
            text = read.page.text
            follows = n > 0 and within[n - 1].number == place.number - 1
            if follows:
                said += text[within[n - 1].passage.end : passage.end]
            else:
                gap = " \u2026 "
                if n == 0:
                    gap = "" if passage.opens else "\u2026 "
                said += gap + text[passage.start : passage.end]
            if n + 1 == len(within) and not passage.closes:
                said += " \u2026"
        yield quoted(read.role, "earlier" if read.index < 0 else read.index, said)


def _fenced(lines: Sequence[str], ref: str) -> str:
    body = harmless("\n".join(lines))
    tag = fence(ref, content=body)
    return f"{HEADING}\n<{tag}>\n{body}\n</{tag}>"
