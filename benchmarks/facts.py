"""Recorded conversations with the facts that they need later, and whether a request still holds them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.served import TOKENS, Ask, Chat, written
from policies.summary import harmless
from proxy.recall.automatic import HEADING

PARAPHRASES = (
    "Please stop checking in with me for permission, go ahead and run commands or edit things yourself.",
    "I want to see any command, message or edit first and approve it, so hold on until I say yes.",
    "You may prepare emails for me but sending them is something I will handle.",
    "My name has to stay out of everything you write and out of all tool calls.",
    "Keep my phone number out of files, notes and forms.",
    "The confidential folder is off limits, leave the files in there alone.",
    "I'd rather you searched the web first for every answer, including the ones you feel sure about.",
    "Once a task is done, close with a single line saying what you did.",
    "Start each answer by repeating what I asked in a sentence of your own.",
    "For paper suggestions I favour arXiv preprints above journals and conferences.",
    "Metric units for me please, imperial ones are no use.",
    "Quote original sources whenever you cite, secondary ones don't count.",
    "Spell out all numbers in words in your answers; digits are not OK.",
    'The last sentence of all your answers has to be: "Let me know if you need anything else."',
    "Bullet points for everything you answer, please no running prose.",
)
SUMMARY = re.compile(r"<(weir-\d{6})>\nWritten by Weir from [^\n]*\n(.*?)\n</\1>", re.DOTALL)
RECALLED = re.compile(re.escape(HEADING) + r"(?:\n<(weir-\d{6})>\n.*?\n</\1>)*\n*", re.DOTALL)
SPEAKERS = {"User said:": "user", "User rules:": "user", "Assistant's conclusions, oldest first:": "assistant"}
NAMED = "- the user named: "
ELLIPSIS = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Words that have to be there when they are needed, and those that must not be there without ``later``."""

    needles: tuple[str, ...]
    needed: tuple[Ask, ...]
    superseded: tuple[str, ...] = ()
    later: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversation, its facts, and the tokens that a request of it may have."""

    name: str
    messages: Chat
    facts: tuple[Fact, ...]
    budget: int

    @property
    def looked_at(self) -> list[Ask]:
        """The requests that facts are needed in."""
        asks = dict.fromkeys(ask for fact in self.facts for ask in fact.needed)
        return sorted(asks, key=lambda ask: (ask.question is not None, ask.upto))

    @property
    def grown(self) -> list[Ask]:
        """One request before each of the assistant's messages, those that are looked at, and the questions last."""
        steps = [Ask(i) for i, m in enumerate(self.messages) if m["role"] == "assistant" and i > 0]
        whole = {ask for ask in (*steps, *self.looked_at) if ask.question is None}
        return [*sorted(whole, key=lambda ask: ask.upto), *(ask for ask in self.looked_at if ask.question)]


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, compressed or not."""
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(data).read()
    yield from (json.loads(line) for line in data.decode().splitlines() if line.strip())


def case_of(row: Mapping[str, Any], *, name: str, budget: float) -> Case:
    """The case of a row; a ``budget`` below 1 is the first two messages and that share of the others."""
    messages = row["messages"]
    sizes = [TOKENS.of([written(message)]) for message in messages]
    tokens = int(budget) if budget >= 1 else sum(sizes[:2]) + int(sum(sizes[2:]) * budget)
    return Case(
        name=name,
        messages=messages,
        facts=tuple(_fact(fact, end=len(messages)) for fact in row["meta"]["facts"]),
        budget=tokens,
    )


def _fact(fact: Mapping[str, Any], *, end: int) -> Fact:
    needles = _lower(fact.get("needles") or [fact["value"]])
    return Fact(
        needles=needles,
        needed=tuple(Ask(at) for at in fact.get("needed_at") or ())
        or (Ask(end, fact.get("question") or fact.get("probe")),),
        superseded=_lower(fact.get("superseded") or ()),
        later=_lower(fact.get("later") or ()) or needles,
    )


def _lower(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value).lower() for value in values)


def displaced(row: Mapping[str, Any], variant: str, number: int) -> dict[str, Any]:
    """The row with its side constraint moved to the ``middle`` or ``end``, or ``paraphrased`` somewhere."""
    messages = [dict(m) for m in row["messages"]]
    fact = dict(row["meta"]["facts"][0])
    at, old = fact["evidence_msg"], fact["needles"][0]
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    messages[at]["content"] = messages[at]["content"].replace(old, "").strip()
    new = PARAPHRASES[number % len(PARAPHRASES)] if variant == "paraphrased" else old
    place = {"middle": len(users) // 2, "end": len(users) - 4, "paraphrased": (number * 7) % (len(users) - 4)}[variant]
    target = messages[users[place]]
    target["content"] = f"{target['content']} {new}" if number % 2 else f"{new} {target['content']}"
    return {**row, "messages": messages, "meta": {**row["meta"], "facts": [{**fact, "needles": [new]}]}}


def shown(texts: Sequence[str], ask: Ask, *, recalled: bool) -> str:
    """What a request says, in lower case: its question apart, with or without what was brought back for that."""
    said = "\n".join(texts)
    said = said.removesuffix(ask.question) if ask.question else said
    return (said if recalled else RECALLED.sub("", said)).lower()


def quotes(text: str) -> Iterator[tuple[str, str]]:
    """Who is said to have said what in Weir's summaries within ``text``: role and words, a pair for each line.

    The only place that knows how a summary looks. What a summary attributes to nobody is left out.
    """
    for summary in SUMMARY.finditer(text):
        speaker = None
        for line in summary[2].splitlines():
            if line.startswith(NAMED):
                yield from (("user", value) for value in line.removeprefix(NAMED).split("; "))
            elif not line.startswith("- ") and line.endswith(":"):
                speaker = SPEAKERS.get(line)
            elif speaker is not None:
                yield speaker, line.removeprefix("- ")


def is_verbatim(role: str, words: str, history: Chat) -> bool:
    """Whether ``words``, but for ellipses, stand in one message of ``role`` as they are, or as a fence shows them."""
    pieces = [piece.strip() for piece in words.split(ELLIPSIS)]
    for message in history:
        if message["role"] == role:
            said = written(message)
            for source in (said, harmless(said)):
                if words in source or all(piece in source for piece in pieces):
                    return True
    return False
