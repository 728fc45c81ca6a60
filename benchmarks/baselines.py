"""What anybody can do in twenty lines: the newest messages, or these beside an index of identifiers."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from benchmarks.served import TOKENS, Chat, written

Baseline = Callable[[Chat, int], list[str]]
IDENTIFIER = re.compile(
    r"(?<![\w-])\d{2,4}[-/.]\d{1,2}[-/.]\d{1,4}(?![\w-])"  # dates
    r"|(?<![\w/.-])(?=[\w./@:-]*\d)(?=[\w./@:-]*[A-Za-z_])[A-Za-z0-9][\w./@:-]{3,60}[A-Za-z0-9]"  # letters and digits
    r"|(?<![\w])[\w.-]+/[\w./-]+\w|\b[a-zA-Z]\w*_\w+\b"  # paths, snake_case
)
INDEX_SHARE = 0.5


def keep_last(messages: Chat, budget: int) -> list[str]:
    """The sliding window: system messages, then the newest messages that fit, the last one always."""
    head = next((i for i, m in enumerate(messages) if m["role"] not in {"system", "developer"}), len(messages))
    texts = [written(message) for message in messages]
    return [*texts[:head], *_newest(texts[head:], budget - TOKENS.of(texts[:head]))]


def indexed(messages: Chat, budget: int) -> list[str]:
    """System messages, the first user message, an index of identifiers newest first, the newest messages."""
    texts = [written(message) for message in messages]
    if TOKENS.of(texts) <= budget:
        return texts
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0) + 1
    room = budget - TOKENS.of(texts[:first])
    tail = _newest(texts[first:], int(room * (1 - INDEX_SHARE)))
    left = room - TOKENS.of(tail) - TOKENS.of([""])
    seen = {name for text in (*texts[:first], *tail) for name in identifiers(text)}
    names: list[str] = []
    for text in reversed(texts[first : len(texts) - len(tail)]):
        for name in identifiers(text):
            cost = TOKENS.of([f" {name}"]) - TOKENS.of([""])
            if name not in seen and cost <= left:
                left -= cost
                names.append(name)
                seen.add(name)
    return [*texts[:first], *([" ".join(names)] if names else ()), *tail]


def _newest(texts: Sequence[str], room: int) -> list[str]:
    first = max(0, len(texts) - 1)
    room -= TOKENS.of(texts[first:])
    while first > 0 and (room := room - TOKENS.of([texts[first - 1]])) >= 0:
        first -= 1
    return list(texts[first:])


@lru_cache(20_000)
def identifiers(text: str) -> tuple[str, ...]:
    """The identifiers, paths and dates of a text, the last first."""
    return tuple(reversed(dict.fromkeys(IDENTIFIER.findall(text))))


def matched(baseline: Baseline, requests: Sequence[Chat], tokens: int) -> list[list[str]]:
    """What a baseline sends for ``requests`` at the budget at which it sends so many tokens in all.

    Messages are not cut, so that a step of the budget may be a leap: some requests then have a step more than others.
    """
    below, above = 0, max((TOKENS.of([written(m) for m in messages]) for messages in requests), default=0) + 1
    while above - below > 1:
        middle = (below + above) // 2
        if sum(TOKENS.of(baseline(messages, middle)) for messages in requests) <= tokens:
            below = middle
        else:
            above = middle
    sent = [baseline(messages, below) for messages in requests]
    total = sum(map(TOKENS.of, sent))
    for number, messages in enumerate(requests):
        more = baseline(messages, above)
        grown = total + TOKENS.of(more) - TOKENS.of(sent[number])
        if abs(grown - tokens) < abs(total - tokens):
            sent[number], total = more, grown
    return sent
