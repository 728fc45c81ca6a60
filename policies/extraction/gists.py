"""What code can say of one message in fewer tokens: telling sentences and lines, in their own words and order."""

import re
from collections.abc import Sequence

from policies.extraction.conclusions import conclusions
from policies.extraction.findings import (
    AN_ERROR,
    ERROR,
    clip,
    finding,
    informative_lines,
    is_code,
    leaves,
    parse,
    shorten,
)
from policies.extraction.identifiers import STRONG, scan
from policies.extraction.rules import read_sentence, sentences
from policies.tokens import TokenCounter

MOST = 400
"""Tokens of a gist beyond which more lines of a result tell little more."""
FINDING = 60
LONGEST_ERROR = 240
BEFORE_ERROR = 60
LONGEST_READ = 20_000
"""Characters of a message's prose that are read for sentences."""
SHORTEST = 24
"""Characters under which a sentence says nothing by itself ("Certainly!")."""
_LINE_NUMBER = re.compile(r"^[ \t]{0,8}\d{1,6}(?:[:|]|\t|\u2192)[ \t]?", re.MULTILINE)


def error_lines(text: str) -> tuple[str, ...]:
    """Every line of a result that reports an error, once each; a line beyond 240 characters from its error on."""
    document = parse(text)
    if document is not None:
        stated = (f"{leaf.key} {leaf.value}" for leaf in leaves(document))
        return tuple(dict.fromkeys(_around_error(line) for line in stated if ERROR.search(line)))
    found = (line for line in text.splitlines() if ERROR.search(line) and not is_code(line[:LONGEST_READ]))
    return tuple(dict.fromkeys(_around_error(line) for line in found))


def _around_error(line: str) -> str:
    match = ERROR.search(line)
    start = max(0, match.start() - BEFORE_ERROR) if match and len(line) > LONGEST_ERROR else 0
    return shorten(" ".join(line[start : start + 2 * LONGEST_ERROR].split()), LONGEST_ERROR)


def result_gist(
    text: str, *, tool: str = "", arguments: str = "", max_tokens: int, counter: TokenCounter, whole: bool = False
) -> str:
    """What a tool result found in a line, its errors, then the lines that tell most, in at most ``max_tokens``.

    ``whole`` asks for every line that reports an error: empty where they do not fit.
    """
    text = _without_line_numbers(text)
    errors = [*error_lines(text)]
    taken = _cost(errors, counter)
    if taken >= max_tokens:
        if whole:
            return ""
        errors = _fitting([(line, 1.0) for line in errors], max_tokens=max_tokens // 2, counter=counter)
        taken = _cost(errors, counter)
    room = min(max_tokens - taken, MOST)
    is_document = parse(text) is not None
    length = room if is_document else min(room, FINDING)
    said = finding(text, tool=tool, arguments=arguments, max_tokens=length, counter=counter)
    errors = [line for line in errors if line not in said]
    left = 0 if is_document else room - counter.count(said) - 1
    lines = [said, *errors]
    lines += _telling(text, said=lines, max_tokens=left, counter=counter)
    gist = "\n".join(line for line in lines if line)
    if counter.count(gist) <= max_tokens:
        return gist
    return "" if whole else clip(gist, max_tokens=max_tokens, counter=counter)


def _without_line_numbers(text: str) -> str:
    """A listing without the numbers of its lines, which hide that it is source; anything else as it is."""
    bare, count = _LINE_NUMBER.subn("", text)
    return bare if count * 2 > text.count("\n") + 1 else text


def _cost(lines: Sequence[str], counter: TokenCounter) -> int:
    return sum(counter.count(line) + 1 for line in lines)


def _telling(text: str, *, said: Sequence[str], max_tokens: int, counter: TokenCounter) -> list[str]:
    """Lines of a plain result that are not errors, the most telling that fit, in order."""
    known = "\n".join(said)
    lines = {line: weight for line, weight in informative_lines(text, limit=200) if weight < AN_ERROR}
    return _fitting([(s, w) for s, w in lines.items() if s not in known], max_tokens=max_tokens, counter=counter)


def answer_gist(text: str, *, max_tokens: int, counter: TokenCounter) -> str:
    """The sentences of an answer that conclude most: what was found, decided, done, in vain; then those with names."""
    said = sentences(text[:LONGEST_READ], longest=320)
    concluded = {c.text: 1.0 + c.weight for c in conclusions(text)}
    weighed = [
        (s, concluded.get(s, min(0.6, 0.2 * _literals(s)) + (0.3 if n == 0 else 0.1))) for n, s in enumerate(said)
    ]
    return _joined(weighed, text, max_tokens=max_tokens, counter=counter)


def user_gist(text: str, *, max_tokens: int, counter: TokenCounter) -> str:
    """The sentences of a user's message that tell most, word for word."""
    said = sentences(text[:LONGEST_READ])
    weighed = [(s, read_sentence(s, index=n).weight) for n, s in enumerate(said)]
    return _joined(weighed, text, max_tokens=max_tokens, counter=counter)


def _literals(sentence: str) -> int:
    return sum(m.kind in STRONG for m in scan(sentence))


def _joined(weighed: Sequence[tuple[str, float]], text: str, *, max_tokens: int, counter: TokenCounter) -> str:
    """The weightiest that fit, in order; the beginning of the weightiest where that does not fit."""
    telling = [w for w in weighed if len(w[0]) >= SHORTEST] or weighed
    best = max(telling, key=lambda w: w[1], default=(" ".join(text[:LONGEST_READ].split()), 0.0))[0]
    if counter.count(best) > max_tokens:
        return clip(" ".join(best.split()), max_tokens=max_tokens, counter=counter)
    return "\n".join(_fitting(telling, max_tokens=max_tokens, counter=counter)) or best


def _fitting(weighed: Sequence[tuple[str, float]], *, max_tokens: int, counter: TokenCounter) -> list[str]:
    """The weightiest texts that together take at most ``max_tokens``, in order of appearance."""
    chosen: set[int] = set()
    for n in sorted(range(len(weighed)), key=lambda n: (-weighed[n][1], n)):
        cost = counter.count(weighed[n][0]) + 1
        if cost <= max_tokens:
            chosen.add(n)
            max_tokens -= cost
    return [weighed[n][0] for n in sorted(chosen)]
