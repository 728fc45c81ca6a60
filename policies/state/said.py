"""What the user said: whole sentences, byte for byte, in order; a statement never without the later one about the same.

They are chosen as an extract is, by how much they tell in this conversation, so that a rule weighs the same in every
language. Nothing is declared out of date: the order tells what holds.
"""

from collections.abc import Sequence

from policies.text.extract import Item, candidates, choose, link
from policies.text.literals import normal
from policies.text.segments import Reading, Readings, Segment, Source, is_question, terms_of

MOST_SENTENCES = 60
MOST_TOKENS = 1_000
BYTES_PER_TOKEN = 4
LINE = 12
"""Tokens that a line counts beside its own, so that a few words do not outweigh a rule."""
IN_GOAL = 0.5
"""What a sentence counts that the goal holds as well."""
KNOWN = 2.0
"""What one counts that has been chosen before: a statement that told much does not give way to the next small talk."""
FEWEST_TERMS = 2
FEWEST_LETTERS = 0.5
"""Share of letters below which a line was printed by a program rather than said."""


def statements(
    sources: Sequence[Source], *, goal: str, known: Sequence[str] = (), readings: Readings
) -> tuple[str, ...]:
    """The statements behind those that are known already, within :data:`MOST_SENTENCES` and :data:`MOST_TOKENS`."""
    spoken = [source for source in sources if source.is_users]
    if not spoken:
        return tuple(known)
    every = [*(Source(-1, "user", line, tokens=_tokens(line)) for line in known), *spoken]
    read = [*(_whole(source) for source in every[: len(known)]), *(readings.of(source) for source in spoken)]
    items = _each_once([i for i in candidates(every, read) if not i.segment.key and states(i.segment.text)])
    for item in items:
        item.cost = _tokens(item.segment.text) + LINE
        item.factor *= (IN_GOAL if item.segment.text in goal else 1.0) * (KNOWN if item.source < len(known) else 1.0)
    link(items, every)
    chosen: list[int] = []
    left = MOST_TOKENS
    for group in choose(items, MOST_TOKENS + LINE * MOST_SENTENCES, shown=()):
        left -= sum(_tokens(items[n].segment.text) for n in group)
        if left < 0 or len(chosen) + len(group) > MOST_SENTENCES:
            break
        chosen.extend(group)
    return tuple(items[n].segment.text for n in sorted(chosen))


def states(sentence: str) -> bool:
    """Whether a sentence says something: no question, no single word, not for the most part signs and digits."""
    if is_question(sentence) or len(terms_of(sentence)) < FEWEST_TERMS:
        return False
    telling = [c for c in sentence if not c.isspace()]
    return sum(c.isalpha() or not c.isascii() for c in telling) >= FEWEST_LETTERS * len(telling)


def _tokens(text: str) -> int:
    return 1 + len(text.encode(errors="replace")) // BYTES_PER_TOKEN


def _whole(source: Source) -> Reading:
    """A sentence that is known already, which its neighbours no longer divide."""
    made = Reading(source)
    made.segments = [Segment(source.text, terms_of(source.text))]
    return made


def _each_once(items: Sequence[Item]) -> list[Item]:
    """The items in order, of those with the same words the newest."""
    newest: dict[str, Item] = {}
    for item in sorted(items, key=lambda i: (i.source, i.place)):
        key = normal(item.segment.text)
        newest.pop(key, None)
        newest[key] = item
    return list(newest.values())
