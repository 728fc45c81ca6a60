"""Nothing that reads a text takes more than its length: runs of every kind of character, and of what comes in patterns.

Measured is the processor's time for short texts, and of those that took most how it grows with the length.
"""

import json
import sys
import time
import unicodedata
from collections.abc import Callable

import pytest

from policies.memory.state import _error_in, _facts
from policies.messages import Body
from policies.strategies.redundancy import _identifiers, _read
from policies.summary.check import _NOTHING
from policies.text.extract import extract
from policies.text.gist import gist, placeholder
from policies.text.segments import (
    Source,
    TextReading,
    error_lines,
    is_question,
    literals,
    reports_error,
    sentences,
    terms_of,
    words,
)
from policies.tokens import CHARS4
from proxy.features.recall.archive import rank
from proxy.features.recall.archive import terms_of as looked_for
from proxy.upstream.overflow_rules import plain
from proxy.wire.counting import Tokenizer

SHORT, LONGEST = 1_000, 64_000
"""Characters of the texts that are compared with each other, and at most of those whose growth is measured."""
SLOWEST, TIMES = 3, 8
LEAST = 0.002
"""Seconds that can be measured: from this on it is looked at what so many times the text takes."""
MOST_TIMES, NOISE = 3 * TIMES, 0.02
"""What takes the square takes eight times as long as it should: 128 ms where 68 are allowed."""


def _one_of_each_category() -> list[str]:
    found: dict[str, str] = {}
    for character in map(chr, range(sys.maxunicode + 1)):
        found.setdefault(unicodedata.category(character), character)
    return [*found.values()]


PATTERNS = (
    *("!", "?", ".", "? ", ". ", ".)", "?!", "!\t", "!a", ".a", "\u3002", "\u2026 ", "a. ", "a", "\u0130", "E"),
    *(" ", "\u00a0", "\t", "\n", " \n", "\r", "a\u2028", "-", "_", "a_", "a-", "/a", "a/", "a@b.c,", "1.2.3.", "12, "),
    *("(", "(;", "()", "[", "{", "=>", "=> ", ": ", "a: ", "a = ", "`", "```\n", '"', '"a', "'", "\u00ab", "\\", "\\n"),
    *("# a\n", "- a\n", "- [x] a\n", "|a|b|\n", "<a>", "</a>", '{"a":', '{"id":1},', "must never ", "error ", "Error"),
    *(
        "Error: ",
        "E ",
        "exit ",
        "1 failed ",
        "not ",
        "return ",
        "import ",
        "\u6f22",
        "\u0e2b\u0e49",
        "\ud55c",
        "a\u0301",
    ),
    *(
        "\u0301\u0316",
        "\U0001f469\u200d",
        "a\u200b",
        " \uff9e",
        "\uff9e",
        "deadbeef0",
        "AaBb",
        "1 ",
        " 11",
        "1:a",
        "$1,000.00 ",
    ),
)
RUNS = [*dict.fromkeys((*_one_of_each_category(), *PATTERNS))]
AROUND = (("", ""), ("Sure ", ""), ("a.", ""), ("", " a"), ("If so. ", " then error"))


def read(role: str) -> Callable[[str], object]:
    return lambda text: TextReading(Source(1, role, text, tool="run" if role == "tool" else "", tokens=len(text) // 4))


def kept(text: str) -> object:
    said = [Source(n, ("user", "assistant")[n % 2], each, tokens=9) for n, each in enumerate(("Go.", text, "Why?"))]
    return extract(said, max_tokens=400, counter=CHARS4, goal="Do it.", asked="what next")


def recalled(text: str) -> object:
    return rank(looked_for(text[: len(text) // 2]), [text])


O200K = Tokenizer().counter("o200k_base")
READERS: dict[str, Callable[[str], object]] = {
    "sentences": sentences,
    "is_question": is_question,
    "user": read("user"),
    "assistant": read("assistant"),
    "result": read("tool"),
    "terms": terms_of,
    "words": words,
    "literals": literals,
    "error_lines": error_lines,
    "reports_error": reports_error,
    "error": _error_in,
    "facts": lambda text: [
        *_facts(Source(1, "tool", text, "run", json.dumps({"command": f"cd {text}"})), has_failed=False)
    ],
    "references": lambda text: (_read(text), _identifiers(Body(text), frozenset())),
    "nothing": lambda text: _NOTHING.match(text),
    "gist": lambda text: gist(text, max_tokens=50, counter=CHARS4, whole=True),
    "placeholder": lambda text: placeholder(text, tool="run", arguments=text, ref="r", counter=CHARS4),
    "extract": kept,
    "recall": recalled,
    "overflow": plain,
    "tokens": O200K.count,
}


def seconds_of(reader: Callable[[str], object], text: str) -> float:
    begun = time.process_time()
    reader(text)
    return time.process_time() - begun


def grows_too_fast(reader: Callable[[str], object], run: str, around: tuple[str, str]) -> bool:
    def text(size: int) -> str:
        return f"{around[0]}{run * (size // len(run))}{around[1]}"

    size = SHORT
    while (taken := seconds_of(reader, text(size))) < LEAST:
        if size >= LONGEST:
            return False
        size *= 2
    return seconds_of(reader, text(TIMES * size)) > MOST_TIMES * taken + NOISE


@pytest.mark.requirement("D21")
@pytest.mark.parametrize("name", READERS)
def test_a_run_of_anything_is_read_in_the_time_of_its_length(name: str) -> None:
    reader = READERS[name]
    reader("A word.")
    taken: list[tuple[float, str, tuple[str, str]]] = []
    for n, run in enumerate(RUNS):
        for before, after in {AROUND[n % len(AROUND)], AROUND[1]}:
            text = f"{before}{run * (SHORT // len(run))}{after}"
            taken.append((seconds_of(reader, text), run, (before, after)))
    slowest = sorted(taken, reverse=True)[:SLOWEST]
    too_fast = [(run, around) for _, run, around in slowest if grows_too_fast(reader, run, around)]
    assert not [each for each in too_fast if grows_too_fast(reader, *each)]
