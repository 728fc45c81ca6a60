"""What anybody can do in twenty lines: keep the newest messages, or these beside an index of
identifiers.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache

from benchmarks.served import PER_MESSAGE, Chat, size, tokens, written

Baseline = Callable[[Chat, int], list[str]]
IDENTIFIER = re.compile(
    r"(?<![\w-])\d{2,4}[-/.]\d{1,2}[-/.]\d{1,4}(?![\w-])"  # dates
    # letters and digits
    r"|(?<![\w/.-])(?=[\w./@:-]*\d)(?=[\w./@:-]*[A-Za-z_])[A-Za-z0-9][\w./@:-]{3,60}[A-Za-z0-9]"
    r"|(?<![\w])[\w.-]+/[\w./-]+\w|\b[a-zA-Z]\w*_\w+\b"  # paths, snake_case
)
TAIL = 0.5


def keep_last(messages: Chat, budget: int) -> list[str]:
    """The sliding window: the system messages that it begins with, then the newest that fit, the
    last one always.
    """
    head = next(
        (i for i, m in enumerate(messages) if m["role"] not in {"system", "developer"}),
        len(messages),
    )
    texts = written(messages)
    return [*texts[:head], *_newest(texts[head:], budget - sum(map(tokens, texts[:head])))]


def indexed(messages: Chat, budget: int) -> list[str]:
    """All up to the first user message, an index of identifiers newest first, and in half of the
    room the newest.
    """
    texts = written(messages)
    if sum(map(tokens, texts)) <= budget:
        return texts
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0) + 1
    room = budget - sum(map(tokens, texts[:first]))
    tail = _newest(texts[first:], int(room * TAIL))
    left = room - sum(map(tokens, tail)) - PER_MESSAGE
    seen = {name for text in (*texts[:first], *tail) for name in identifiers(text)}
    names: list[str] = []
    for name in (
        name
        for text in reversed(texts[first : len(texts) - len(tail)])
        for name in identifiers(text)
    ):
        if name not in seen and (cost := tokens(f" {name}") - PER_MESSAGE) <= left:
            left -= cost
            names.append(name)
            seen.add(name)
    return [*texts[:first], *([" ".join(names)] if names else ()), *tail]


def _newest(texts: Sequence[str], room: int) -> list[str]:
    first = max(0, len(texts) - 1)
    room -= sum(map(tokens, texts[first:]))
    while first > 0 and (room := room - tokens(texts[first - 1])) >= 0:
        first -= 1
    return list(texts[first:])


@cache
def identifiers(text: str) -> tuple[str, ...]:
    """Identifiers, paths and dates of a text, the last first."""
    return tuple(reversed(dict.fromkeys(IDENTIFIER.findall(text))))


def matched(baseline: Baseline, requests: Sequence[Chat], wanted: int) -> list[list[str]]:
    """What a baseline sends for ``requests`` at the budget at which it sends ``wanted`` tokens in
    all.

    Messages are not cut, so that a step of the budget may be a leap: what is missing then goes to
    some of the requests.
    """
    below = 0
    above = max(map(size, requests), default=0) + 1
    while above - below > 1:
        middle = (below + above) // 2
        sent = sum(tokens(text) for messages in requests for text in baseline(messages, middle))
        below, above = (middle, above) if sent <= wanted else (below, middle)
    found = [baseline(messages, below) for messages in requests]
    missing = wanted - sum(tokens(text) for texts in found for text in texts)
    for number, messages in enumerate(requests):
        more = baseline(messages, below + max(1, missing))
        step = sum(map(tokens, more)) - sum(map(tokens, found[number]))
        if abs(missing - step) < abs(missing):
            found[number] = more
            missing -= step
    return found
