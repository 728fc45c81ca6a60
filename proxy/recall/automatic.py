"""What was removed and what the newest user message asks for: found by its words, without a model.

It is brought back only where the message plainly refers to it: by an identifier, or because half of its telling
words, and three at the least, stand close together in a removed text and in few others. Unsure means nothing.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from policies import TokenCounter
from policies.extraction.identifiers import Kind, scan
from proxy.recall.answering import FLOOR, Past, fenced
from proxy.recall.likeness import LIKE
from proxy.recall.ranking import IDENTIFIER_WEIGHT, Term, passages, terms_of
from proxy.store import Original, Store

LONGEST_MESSAGE = 8_000  # characters of the newest message that are read
MOST_FOUND = 40
MOST_SHOWN = 3
SMALLEST_PART = 80
NAMING = frozenset({Kind.CODE, Kind.URL, Kind.HOST, Kind.EMAIL, Kind.PATH, Kind.SYMBOL})
"""What names one thing; a date, a time or an amount is about many."""
_NUMBERED = re.compile(r"(?!(?:19|20)\d\d\Z)[a-z_#-]*\d{4,}[a-z_-]*")
COMMON = 6
"""What stands in more of the found texts than this says nothing of any of them."""
NEAR = 200
"""Characters within which words have to stand that mean one thing."""
FEWEST = 3
SHARE = 0.5
"""Least share of the message's telling words that have to stand there."""
MOST_PLACES = 50
Alike = Callable[[str], Awaitable[Sequence[tuple[Original, float]]]]
SPEAKERS = {"user": "what the user said", "assistant": "what the assistant said", "tool": "a tool's result"}
HEADING = "[weir: brought back from what was removed, because the newest message refers to it.]"


@dataclass(frozen=True, slots=True)
class _Found:
    past: Past
    score: float


async def remembered(
    store: Store,
    tenant: str,
    conversation: str,
    text: str,
    *,
    counter: TokenCounter,
    max_tokens: int,
    visible_refs: Collection[str] = (),
    alike: Alike | None = None,
) -> str | None:
    """What was removed from a conversation (by id) and ``text`` asks for, fenced, in at most ``max_tokens``.

    None where nothing is plainly asked for. ``visible_refs`` are texts that the model sees anyway. Where no words say
    what is meant, ``alike`` gives the texts that are most like this one, each with its cosine. Raises StoreError.
    """
    by_words = await _by_words(
        store, tenant, conversation, text, counter=counter, max_tokens=max_tokens, visible_refs=visible_refs
    )
    if by_words is not None or alike is None or max_tokens < FLOOR:
        return by_words
    near = [
        each for each, score in await alike(text[:LONGEST_MESSAGE]) if score >= LIKE and each.ref not in visible_refs
    ]
    if not near:
        return None
    terms = terms_of(text[:LONGEST_MESSAGE])
    return await asyncio.to_thread(shown, near[:MOST_SHOWN], terms, counter=counter, max_tokens=max_tokens)


async def _by_words(
    store: Store,
    tenant: str,
    conversation: str,
    text: str,
    *,
    counter: TokenCounter,
    max_tokens: int,
    visible_refs: Collection[str],
) -> str | None:
    text = text[:LONGEST_MESSAGE]
    named = {m.value.casefold() for m in scan(text) if m.kind in NAMING}
    terms = terms_of(text)
    identifiers = [t for t in terms if t.text in named or _NUMBERED.fullmatch(t.text)]
    words = [t for t in terms if t.weight < IDENTIFIER_WEIGHT]
    if max_tokens < FLOOR or (not identifiers and len(words) < 2):
        return None
    originals: dict[str, Original] = {}
    for part in (identifiers, words):
        query = " ".join(t.text for t in part)
        if query:
            hits = await store.search(tenant, query, limit=MOST_FOUND, conversation=conversation)
            originals |= {each.ref: each for each in hits if each.ref not in visible_refs}
    if not originals:
        return None
    return await asyncio.to_thread(
        bring_back, list(originals.values()), identifiers, words, counter=counter, max_tokens=max_tokens
    )


def bring_back(
    originals: Sequence[Original],
    identifiers: Sequence[Term],
    words: Sequence[Term],
    *,
    counter: TokenCounter,
    max_tokens: int,
) -> str | None:
    """The texts among ``originals`` that are plainly meant, fenced; None for none."""
    rare_identifiers, rare_words = _rare(identifiers, originals), _rare(words, originals)
    found = [_Found(_past(each), _score(each.text, rare_identifiers, rare_words, len(words))) for each in originals]
    meant = sorted((each for each in found if each.score > 0), key=lambda each: -each.score)[:MOST_SHOWN]
    terms = (*rare_identifiers, *rare_words)
    return _fenced([each.past for each in meant], terms, counter=counter, max_tokens=max_tokens)


def shown(
    originals: Sequence[Original], terms: Sequence[Term], *, counter: TokenCounter, max_tokens: int
) -> str | None:
    """These texts, fenced, with the passages around the terms where they are too long; None without room."""
    return _fenced([_past(each) for each in originals], terms, counter=counter, max_tokens=max_tokens)


def _fenced(meant: Sequence[Past], terms: Sequence[Term], *, counter: TokenCounter, max_tokens: int) -> str | None:
    parts, left = [HEADING], max_tokens - counter.count(HEADING) - 2
    for number, past in enumerate(meant):
        frame = counter.count(fenced(past, "", ", in part")) + 4
        share = left // (1 if number + 1 == len(meant) else 2) - frame
        if share < SMALLEST_PART:
            break
        part = passages(past.text, terms, most=share, count=counter.count)
        parts.append(fenced(past, part.text, "" if part.whole else ", in part"))
        left -= counter.count(parts[-1]) + 1
    return "\n".join(parts) if len(parts) > 1 else None


def _rare(terms: Sequence[Term], originals: Sequence[Original]) -> list[Term]:
    return [t for t in terms if 0 < sum(bool(t.pattern.search(each.text)) for each in originals) <= COMMON]


def _score(text: str, identifiers: Sequence[Term], words: Sequence[Term], asked: int) -> float:
    """How plainly a text is meant: by its identifiers, else by its share of ``asked`` words; 0 for not."""
    named = sum(bool(t.pattern.search(text)) for t in identifiers)
    share = _near(text, words) / max(1, asked)
    return 2.0 * named + share if named or (share >= SHARE and _near(text, words) >= FEWEST) else 0.0


def _near(text: str, words: Sequence[Term]) -> int:
    """The most different words that stand within ``NEAR`` characters of one another."""
    places = sorted((m.start(), n) for n, t in enumerate(words) for m in islice(t.pattern.finditer(text), MOST_PLACES))
    most = first = 0
    for last, (at, _) in enumerate(places):
        while at - places[first][0] > NEAR:
            first += 1
        most = max(most, len({n for _, n in places[first : last + 1]}))
    return most


def _past(original: Original) -> Past:
    origin = SPEAKERS.get(original.role, "an earlier message")
    return Past(original.ref, origin, original.tokens, original.text)
