"""Recorded conversations with the facts that they need later, and whether a request still holds
them.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.served import Ask, Chat, tokens, window_for, written
from policies.strategies.recall import HEADING
from policies.summary.material import harmless

PARAPHRASES = Path(__file__).with_name("paraphrases.txt")
Limit = tuple[str, float]
"""``W`` and a window, or ``@`` and a budget: the tokens that a request may have, or below 1 a share
of them.
"""
SUMMARY = re.compile(r"<(weir-\d{6})>\nWritten by Weir[^\n]*\n(.*?)\n</\1>", re.DOTALL)
RECALLED = re.compile(re.escape(HEADING) + r"(?:\n<(weir-\d{6})>\n.*?\n</\1>)*\n*", re.DOTALL)
QUOTED = re.compile(r"(\w+) \d+: (.*)")
"""A line of a summary: whose message, its number, its words."""
ELLIPSIS = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Words that have to be there when they are needed, and older ones that may not stand without
    ``later``.

    Of each needle one wording has to be there, and one of each within so many characters of the
    first one's.
    """

    needles: tuple[tuple[str, ...], ...]
    needed: tuple[Ask, ...]
    superseded: tuple[str, ...]
    later: tuple[tuple[str, ...], ...]
    within: float = math.inf

    def lost_in(self, text: str) -> list[str]:
        """What a text in lower case does not hold of the needles; all of them where they stand far
        apart.
        """
        return _lost(self.needles, text, self.within)

    def is_stale_in(self, text: str) -> bool:
        """Whether a text in lower case holds an older statement without the newer one."""
        return any(word in text for word in self.superseded) and bool(
            _lost(self.later, text, self.within)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversation, its facts, and the window that it is played in."""

    name: str
    messages: Chat
    facts: tuple[Fact, ...]
    window: int

    @property
    def looked_at(self) -> list[Ask]:
        """The requests that facts are needed in."""
        return sorted({ask for fact in self.facts for ask in fact.needed}, key=Ask.order)

    def asks(self, *, growing: bool) -> list[Ask]:
        """Those; ``growing``: and one before each of the assistant's messages, all as they came."""
        steps = (
            Ask(i)
            for i, m in enumerate(self.messages)
            if growing and m["role"] == "assistant" and i > 0
        )
        return sorted({*steps, *self.looked_at}, key=Ask.order)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, compressed or not."""
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(data).read()
    yield from (json.loads(line) for line in data.decode().split("\n") if line.strip())


def case_of(row: Mapping[str, Any], limit: Limit, number: int) -> Case:
    """The case of a row; a budget below 1 is the first two messages and that share of the
    others.
    """
    messages = row["messages"]
    kind, amount = limit
    if amount < 1:
        sizes = [tokens(text) for text in written(messages)]
        amount = sum(sizes[:2]) + int(sum(sizes[2:]) * amount)
    return Case(
        name=str(row["meta"].get("id", number)),
        messages=messages,
        facts=tuple(_fact(fact, end=len(messages)) for fact in counted(row)),
        window=int(amount) if kind == "W" else window_for(int(amount)),
    )


def counted(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A row's facts that have to be in a request; those of other kinds are about who said what."""
    return [
        fact for fact in row["meta"]["facts"] if fact.get("kind") not in {"laundering", "grounding"}
    ]


def limit_of(row: Mapping[str, Any]) -> Limit | None:
    """The window that a row asks for, or else the budget; None for neither."""
    meta = row["meta"]
    found = [
        (kind, float(meta[name]))
        for kind, name in (("W", "window"), ("@", "budget"))
        if meta.get(name)
    ]
    return found[0] if found else None


def _fact(fact: Mapping[str, Any], *, end: int) -> Fact:
    """Without ``needed_at`` a fact is needed at the end; its question, if it has one, is asked when
    it is needed.
    """
    needles = _wordings(fact.get("needles") or [fact["value"]])
    question = fact.get("question") or fact.get("probe")
    return Fact(
        needles=needles,
        needed=tuple(Ask(at, question) for at in fact.get("needed_at") or [end]),
        superseded=_lower(fact.get("superseded") or ()),
        later=_wordings(fact.get("later") or ()) or needles,
        within=fact.get("within", math.inf),
    )


def _lower(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value).lower() for value in values)


def _wordings(needles: Sequence[object]) -> tuple[tuple[str, ...], ...]:
    return tuple(_lower(needle if isinstance(needle, list) else [needle]) for needle in needles)


def _lost(needles: Sequence[Sequence[str]], text: str, within: float) -> list[str]:
    lost = [needle for needle in needles if not any(wording in text for wording in needle)]
    if not lost and within != math.inf:
        first, *others = (
            [m.start() for w in needle for m in re.finditer(re.escape(w), text)]
            for needle in needles
        )
        near = any(
            all(any(abs(place - at) <= within for place in each) for each in others) for at in first
        )
        lost = [] if near else [*needles]
    return [" or ".join(needle) for needle in lost]


def displaced(row: Mapping[str, Any], variant: str, number: int) -> dict[str, Any]:
    """The row with its side constraint moved to the ``middle`` or ``end``, or ``paraphrased``
    somewhere.
    """
    messages = [dict(m) for m in row["messages"]]
    fact = dict(row["meta"]["facts"][0])
    at = fact["evidence_msg"]
    old = fact["needles"][0]
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    messages[at]["content"] = messages[at]["content"].replace(old, "").strip()
    others = PARAPHRASES.read_text(encoding="utf-8").splitlines()
    new = others[number % len(others)] if variant == "paraphrased" else old
    place = {
        "middle": len(users) // 2,
        "end": len(users) - 4,
        "paraphrased": (number * 7) % (len(users) - 4),
    }[variant]
    target = messages[users[place]]
    target["content"] = f"{target['content']} {new}" if number % 2 else f"{new} {target['content']}"
    return {
        **row,
        "messages": messages,
        "meta": {**row["meta"], "facts": [{**fact, "needles": [new]}]},
    }


def shown(texts: Sequence[str], ask: Ask, *, recalled: bool) -> str:
    """What a request says, in lower case: its question apart, with or without what was brought back
    for that.
    """
    said = "\n".join(texts).removesuffix(ask.question or "")
    return (said if recalled else RECALLED.sub("", said)).lower()


def quotes(text: str) -> Iterator[tuple[str, str]]:
    """Who is said to have said what in Weir's summaries within ``text``: role and words, a pair for
    each line.

    The only place that knows how a summary looks. What it attributes to nobody, and labels that are
    Weir's own, are left out.
    """
    for summary in SUMMARY.finditer(text):
        for line in summary[2].split("\n"):
            quoted = QUOTED.fullmatch(line)
            if quoted is not None and quoted[1] not in {"call", "tool"}:
                yield quoted[1], quoted[2]


def altered(sent: Iterable[Chat], history: Chat) -> list[tuple[str, str]]:
    """Quotes in requests that put other words into somebody's mouth: role and words, each once.

    Words are whole where they, but for ellipses, stand in one message of their speaker as they are,
    or as a fence shows them.
    """
    said: dict[str, list[str]] = {}
    for text, message in zip(written(history), history, strict=True):
        said.setdefault(message["role"], []).extend((text, harmless(text)))
    found = sorted(
        {quote for messages in sent for text in written(messages) for quote in quotes(text)}
    )
    return [(role, words) for role, words in found if not _stands(words, said.get(role, ()))]


def _stands(words: str, sources: Sequence[str]) -> bool:
    pieces = [piece.strip() for piece in words.split(ELLIPSIS)]
    return any(words in source or all(piece in source for piece in pieces) for source in sources)
