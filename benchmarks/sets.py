"""Conversations with facts planted in them, written before the code they measure; nobody tunes on
them.

``load(name)`` gives rows ``{"messages": [...], "meta": {...}}``; meta has ``id``, ``set``,
``budget`` (tokens sent), ``window``, ``language``, ``carrier`` and ``facts``. A fact has ``kind``,
``needles`` (exact substrings of one message), ``question``, ``place``, ``language``, ``said_by``
and ``message`` (its index). One that was said otherwise later has ``superseded`` (words of the old
statement), ``later`` (words of the newer one, which are its needles) and ``later_message``.

Texts are in ``sets/``; carriers are written from them by a fixed seed, so rows are the same bytes
each time. Real English chats are used where ``../shared/data`` is there, and written ones in their
place where it is not.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import yaml

Message = dict[str, Any]
Row = dict[str, Any]
TEXTS = Path(__file__).with_name("sets")
SHARED = Path(__file__).parents[2] / "shared" / "data"
SEED = 1722
LANGUAGES = ("en", "de", "fr", "es", "zh", "ja", "ar", "ru")
TOKENS_PER_CHARACTER = {
    "en": 0.23,
    "de": 0.25,
    "fr": 0.25,
    "es": 0.25,
    "zh": 0.83,
    "ja": 0.81,
    "ar": 0.36,
    "ru": 0.31,
}
"""Of o200k_base in these carriers, to plan sizes by; the tests count exactly."""
NO_BLANKS = frozenset({"zh", "ja"})
_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d+)~(\d+)")
_SHAPES = {
    "#": "0123456789",
    "^": "012345",
    "?": "ABCDEFGHJKLMNPQRSTUVWXYZ",
    "~": "0123456789abcdef",
}
_SENTENCE_END = re.compile(r"(?<=[.!?;؛؟])\s+|(?<=[。\uff01\uff1f])")


@cache
def texts(name: str) -> Any:
    """A file of ``sets/``."""
    return yaml.safe_load((TEXTS / f"{name}.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Topic:
    """Lines with alternatives that users and assistants say about one thing."""

    user: tuple[str, ...]
    assistant: tuple[str, ...]


@cache
def lines_of(language: str) -> tuple[dict[str, str], tuple[Topic, ...]]:
    """Named words and topics of a language."""
    document = dict(texts(f"carriers/{language}"))
    words = dict(line.split(": ", 1) for line in document.pop("words").splitlines())
    topics = [
        Topic(tuple(topic["user"].splitlines()), tuple(topic["assistant"].splitlines()))
        for topic in document.values()
    ]
    return words, tuple(topics)


def sentences(text: str) -> list[str]:
    """Sentences of a text that a writer made."""
    return [
        part.strip(" \n-*0123456789.")
        for part in _SENTENCE_END.split(text)
        if part.strip(" \n-*0123456789.")
    ]


@dataclass(slots=True)
class Writer:
    """Writes chat in one language; no sentence twice."""

    language: str
    random: Random
    said: set[str] = field(default_factory=set)
    left: int = 0
    topic: int = -1

    def _render(self, line: str) -> str:
        words, _ = lines_of(self.language)

        def choose(match: re.Match[str]) -> str:
            inner = match.group(1)
            if inner.startswith("@"):
                inner = words[inner[1:]]
            if numbers := _NUMBERS.fullmatch(inner):
                return str(self.random.randint(int(numbers.group(1)), int(numbers.group(2))))
            choices = inner.split("|")
            return choices[int(self.random.random() * len(choices))]

        while "{" in line:
            line = _ALTERNATIVES.sub(choose, line)
        return line[:1].upper() + line[1:]

    def _fresh(self, line: str) -> str | None:
        for _ in range(30):
            text = self._render(line)
            made = sentences(text)
            if not self.said.intersection(made):
                self.said.update(made)
                return text
        return None

    def _lines(self, pool: Callable[[Topic], Sequence[str]], count: int) -> list[str]:
        _, topics = lines_of(self.language)
        found: list[str] = []
        for step in range(len(topics)):
            lines = list(pool(topics[(self.topic + step) % len(topics)]))
            self.random.shuffle(lines)
            for line in lines:
                if len(found) == count:
                    return found
                if text := self._fresh(line):
                    found.append(text)
        raise ValueError(f"the lines of {self.language} are used up")

    def one_of(self, lines: Sequence[str]) -> str:
        """One of the lines, new if there is a new one."""
        shuffled = self.random.sample(lines, len(lines))
        return next(filter(None, map(self._fresh, shuffled)), "") or self._render(shuffled[0])

    def ask(self) -> str:
        """A message of a user, who stays with a topic for a few turns."""
        _, topics = lines_of(self.language)
        if self.left == 0:
            self.left = self.random.randint(2, 5)
            others = [number for number in range(len(topics)) if number != self.topic]
            self.topic = self.random.choice(others)
        self.left -= 1
        joint = "" if self.language in NO_BLANKS else " "
        return joint.join(self._lines(lambda topic: topic.user, self.random.choice((1, 1, 1, 2))))

    def answer(self, count: int) -> str:
        """An answer of so many sentences: paragraphs, a numbered list or points."""
        lines = self._lines(lambda topic: topic.assistant, count)
        joint = "" if self.language in NO_BLANKS else " "
        match self.random.randrange(5):
            case 0:
                return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
            case 1:
                return lines[0] + "\n\n" + "\n".join(f"- {line}" for line in lines[1:])
            case 2:
                half = (count + 1) // 2
                return joint.join(lines[:half]) + "\n\n" + joint.join(lines[half:])
            case _:
                return joint.join(lines)

    def turn(self, least: int = 4, most: int = 9) -> list[Message]:
        """A question and its answer."""
        return [
            says("user", self.ask()),
            says("assistant", self.answer(self.random.randint(least, most))),
        ]

    def pasted(self) -> list[Message]:
        """A turn in which the user brings a page of notes along."""
        notes = "\n".join(self._lines(lambda topic: topic.assistant, self.random.randint(20, 30)))
        return [says("user", f"{self.ask()}\n\n{notes}"), says("assistant", self.answer(5))]


def says(role: str, content: str) -> Message:
    """A message of text."""
    return {"role": role, "content": content}


def tokens_about(messages: Sequence[Message], language: str) -> int:
    """Tokens to plan by."""
    return sum(int(len(m["content"] or "") * TOKENS_PER_CHARACTER[language]) + 4 for m in messages)


def written(language: str, tokens: int, random: Random) -> list[list[Message]]:
    """Turns wholly in a language."""
    writer = Writer(language, random)
    turns = []
    size = 0
    while size < tokens:
        turns.append(writer.turn())
        size += tokens_about(turns[-1], language)
    return turns


def windows(data: Path) -> list[list[list[Message]]]:
    """The turns of real English chats, each beginning with a user's message; empty where the data
    is not there.
    """
    path = data / "longmemeval_windows.jsonl"
    if not path.is_file():
        return []
    chats: list[list[list[Message]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        turns: list[list[Message]] = []
        for message in json.loads(line)["messages"]:
            if message["role"] == "user" or not turns:
                turns.append([])
            turns[-1].append(says(message["role"], message["content"]))
        chats.append([turn for turn in turns if [m["role"] for m in turn] == ["user", "assistant"]])
    return chats


def _ack(language: str, random: Random) -> Message:
    return says("assistant", random.choice(texts("acks")[language]))


def calls(
    wanted: Sequence[tuple[str, str, Mapping[str, Any]]], content: str | None = None
) -> Message:
    """A message that calls tools: of each the call's id, the name and the arguments."""
    made = [
        {
            "id": i,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)},
        }
        for i, name, given in wanted
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _looked_up(identity: str, text: str, entry: Mapping[str, Any]) -> list[Message]:
    """A question, the call, its result and what the assistant makes of it."""
    return [
        says("user", entry["ask"]),
        calls([(identity, entry["tool"], entry["call"])]),
        {"role": "tool", "tool_call_id": identity, "content": text},
        says("assistant", entry["reply"]),
    ]


@dataclass(slots=True)
class Loops:
    """Writes loops of tools over made-up records of one trade."""

    trade: str
    random: Random
    number: int = 0

    def turns(self, tokens: int) -> list[list[Message]]:
        """Turns of about so many tokens; the first begins with the system prompt."""
        trade = texts("agents")[self.trade]
        writer = Writer("en", self.random)
        turns: list[list[Message]] = []
        size = 0
        while size < tokens:
            asked = writer.one_of(trade["user"].splitlines())
            turn = [says("user", asked)]
            for _ in range(self.random.choice((1, 1, 2, 2, 3))):
                turn += self._step(trade)
            lines = self.random.sample(trade["assistant"].splitlines(), self.random.randint(1, 3))
            said = [writer.one_of([line]) for line in lines]
            turns.append([*turn, says("assistant", " ".join(said))])
            size += int(1.65 * tokens_about(turns[-1], "en"))
        turns[0].insert(0, says("system", trade["system"]))
        return turns

    def _step(self, trade: Mapping[str, Any]) -> list[Message]:
        wanted = []
        for _ in range(self.random.choice((1, 1, 1, 2))):
            self.number += 1
            name = self.random.choice(trade["tools"].split("|"))
            key = self.random.choice(list(trade["fields"]))
            wanted.append(
                (f"call_{self.number:04d}", name, {key: self._value(trade["fields"][key])})
            )
        results = [
            {"role": "tool", "tool_call_id": i, "content": self._records(trade["fields"])}
            for i, _, _ in wanted
        ]
        return [calls(wanted), *results]

    def _records(self, fields: Mapping[str, str]) -> str:
        count = self.random.randint(4, 14)
        records = [{key: self._value(field) for key, field in fields.items()} for _ in range(count)]
        match self.random.randrange(3):
            case 0:
                return json.dumps({"count": count, "items": records})
            case 1:
                return "\n".join(
                    " ".join(f"{key}={value}" for key, value in each.items()) for each in records
                )
            case _:
                rows = [list(fields), *(map(str, each.values()) for each in records)]
                return "\n".join(" | ".join(row) for row in rows)

    def _value(self, field: str) -> str | int:
        if "|" in field:
            field = self.random.choice(field.split("|"))
        if numbers := _NUMBERS.fullmatch(field):
            return self.random.randint(int(numbers.group(1)), int(numbers.group(2)))
        return "".join(
            self.random.choice(_SHAPES[mark]) if mark in _SHAPES else mark for mark in field
        )


def _needs_own_turn(text: str, entry: Mapping[str, Any]) -> bool:
    return "@@" not in text or entry.get("by") == "tool"


@dataclass(slots=True)
class Plan:
    """What is said at which turn of a carrier, put in from the end so that places stay right."""

    turns: list[list[Message]]
    random: Random
    added: dict[int, list[list[Message]]] = field(default_factory=dict)
    lookups: int = 0

    def say(self, at: int, text: str, entry: Mapping[str, Any], language: str) -> None:
        """Plant a text: in the turn at this place if it is attached to another message, else as a
        turn before it.
        """
        by = entry.get("by", "user")
        if "@@" in text:
            message = next(m for m in reversed(self.turns[at]) if m["role"] == by)
            message["content"] = text.replace("@@", message["content"].rstrip())
        elif by == "tool" or entry.get("place") == "tool":
            self.lookups += 1
            self._before(at, _looked_up(f"lookup_{self.lookups:02d}", text, entry))
        else:
            self._before(at, [says("user", text), _ack(language, self.random)])

    def _before(self, at: int, turn: list[Message]) -> None:
        self.added.setdefault(at, []).append(turn)

    def messages(self, *last: Message) -> list[Message]:
        """The conversation with all that was planted."""
        return [
            message
            for number, turn in enumerate(self.turns)
            for planted in (*self.added.get(number, ()), turn)
            for message in planted
        ] + [*last]


def _copied(turns: Sequence[list[Message]]) -> list[list[Message]]:
    return [[dict(message) for message in turn] for turn in turns]


def _where(messages: Sequence[Message], needles: Sequence[str]) -> int:
    found = [
        n
        for n, m in enumerate(messages)
        if all(needle in (m["content"] or "") for needle in needles)
    ]
    if len(found) != 1:
        raise ValueError(f"{needles} stand in the messages {found}, not in one")
    return found[0]


_FACT_KINDS = {"tool": "laundering", "revised": "revised", "revoked": "revoked"}


def fact_of(entry: Mapping[str, Any], messages: Sequence[Message], language: str) -> dict[str, Any]:
    """What is looked for, with where it stands."""
    attached = "attached" if "@@" in entry["text"] else "own"
    place = entry.get("place") or ("tool" if entry.get("by") == "tool" else attached)
    fact: dict[str, Any] = {
        "kind": entry.get("kind") or _FACT_KINDS.get(place, "rule"),
        "needles": list(entry.get("later") or entry["needles"]),
        "question": entry["question"],
        "place": place,
        "language": language,
    }
    if superseded := entry.get("superseded"):
        fact |= {"later": list(entry["later"]), "superseded": list(superseded)}
        fact["later_message"] = _where(messages, entry["later"])
    fact["message"] = _where(messages, entry.get("superseded") or entry["needles"])
    fact["said_by"] = messages[fact["message"]]["role"]
    return fact


def _row(
    name: str, number: int | str, messages: list[Message], facts: list[dict[str, Any]], **meta: Any
) -> Row:
    return {
        "messages": messages,
        "meta": {"id": f"{name}-{number}", "set": name, **meta, "facts": facts},
    }


def _one_rule(
    name: str, number: int, entry: Mapping[str, Any], turns: list[list[Message]], carrier: str
) -> Row:
    random = Random(f"{SEED}:{name}:{number}:place")
    plan = Plan(turns, random)
    last = turns.pop()[0]
    at = max(1, int(len(turns) * random.uniform(0.04, 0.5)))
    plan.say(at, entry["text"], entry, entry["lang"])
    if later := entry.get("later_text"):
        plan.say(int(len(turns) * random.uniform(0.55, 0.68)), later, entry, entry["lang"])
    messages = plan.messages(last)
    facts = [fact_of(entry, messages, entry["lang"])]
    return _row(
        name,
        f"{number:02d}",
        messages,
        facts,
        budget=3_900,
        window=8_192,
        language=entry["lang"],
        carrier=carrier,
    )


def rules(data: Path) -> Iterator[Row]:
    """One rule in a chat wholly in the rule's language."""
    for number, entry in enumerate(texts("rules")):
        random = Random(f"{SEED}:rules:{number}")
        turns = written(entry["lang"], random.randint(12_800, 14_800), random)
        yield _one_rule("rules", number, entry, turns, "written")


def rules_in_english(data: Path) -> Iterator[Row]:
    """The same rules in real English chats, where a sentence in another language is rare by
    itself.
    """
    chats = windows(data)
    for number, entry in enumerate(texts("rules")):
        if chats:
            turns = _copied(chats[number % len(chats)])
            carrier = "real"
        else:
            turns = written("en", 13_000, Random(f"{SEED}:rules_in_english:{number}"))
            carrier = "written"
        yield _one_rule("rules_in_english", number, entry, turns, carrier)


def rules_many(data: Path) -> Iterator[Row]:
    """45 rules of six languages in one chat of about 49,000 tokens."""
    random = Random(f"{SEED}:rules_many")
    chats = windows(data)
    turns = (
        _copied([t for chat in chats[:4] for t in chat]) if chats else written("en", 47_500, random)
    )
    entries = [(language, *rule) for language, said in texts("rules_many").items() for rule in said]
    random.shuffle(entries)
    last = turns.pop()[0]
    plan = Plan(turns, random)
    planted = []
    for number, (language, text, needle) in enumerate(entries):
        at = max(1, int((number + random.random()) / len(entries) * len(turns) * 0.93))
        shown = f"@@ {text}" if number % 3 == 2 else text
        entry = {"text": shown, "needles": [needle], "question": ""}
        plan.say(at, shown, entry, language)
        planted.append((entry, language))
    messages = plan.messages(last)
    facts = [fact_of(entry, messages, language) for entry, language in planted]
    carrier = "real" if chats else "written"
    yield _row(
        "rules_many",
        0,
        messages,
        facts,
        budget=4_000,
        window=8_192,
        language="many",
        carrier=carrier,
    )


def _long_chat(data: Path, count: int, random: Random) -> list[list[Message]]:
    """So many turns: real chats where they are there, with written ones between them."""
    chats = [_copied(chat) for chat in windows(data)]
    writer = Writer("en", random)
    missing = count - sum(len(chat) for chat in chats)
    words = (22, 28) if chats else (24, 30)  # recorded chats have the longer turns
    turns: list[list[Message]] = []
    for number, chat in enumerate([*chats, []], 1):
        share = missing * number // (len(chats) + 1) - missing * (number - 1) // (len(chats) + 1)
        turns += [
            writer.pasted() if random.random() < 0.2 else writer.turn(*words) for _ in range(share)
        ]
        turns += chat
    return turns


def facts300(data: Path, *, name: str = "facts300", asked: str = "question") -> Iterator[Row]:
    """60 facts over 300 turns, asked for in other words; the same chat for two windows.

    ``asked`` is which of an entry's questions asks: ``plain`` is what one would type who wants to
    know it.
    """
    random = Random(f"{SEED}:facts300")
    entries = list(texts("facts"))
    random.shuffle(entries)
    said = [e["text"] for e in entries] + [e["later_text"] for e in entries if "later_text" in e]
    by = entries + [e for e in entries if "later_text" in e]
    own = sum(_needs_own_turn(text, entry) for text, entry in zip(said, by, strict=True))
    turns = _long_chat(data, 300 - own, random)
    last = turns.pop()[0]
    plan = Plan(turns, random)
    for number, entry in enumerate(entries):
        revised = "later_text" in entry
        reach = 0.6 if revised else 0.94
        at = max(1, int((number + random.random()) / len(entries) * len(turns) * reach))
        plan.say(at, entry["text"], entry, "en")
        if revised:
            plan.say(
                int(at + len(turns) * random.uniform(0.08, 0.3)), entry["later_text"], entry, "en"
            )
    messages = plan.messages(last)
    facts = [fact_of(entry | {"question": entry[asked]}, messages, "en") for entry in entries]
    carrier = "mixed" if windows(data) else "written"
    for label, window, budget in (("8k", 8_192, 4_100), ("32k", 32_768, 20_000)):
        yield _row(
            name,
            label,
            messages,
            facts,
            budget=budget,
            window=window,
            language="en",
            carrier=carrier,
        )


_TRADES = ("guesthouse", "desk", "stores", "logs")


def questions(data: Path) -> Iterator[Row]:
    """One fact in a long chat or in long loops of tools; the rows end with an answer, the question
    comes next.
    """
    for number, entry in enumerate(texts("questions")):
        random = Random(f"{SEED}:questions:{number}")
        language = entry.get("lang", "en")
        size = random.randint(19_000, 23_000)
        loops = entry.get("carrier") == "loops"
        turns = (
            Loops(_trade(entry, number), random).turns(size)
            if loops
            else written(language, size, random)
        )
        plan = Plan(turns, random)
        made = {"kind": "fact", "by": "tool" if "tool" in entry else "user", **entry}
        plan.say(max(1, int(len(turns) * random.uniform(0.05, 0.6))), entry["text"], made, language)
        messages = plan.messages()
        facts = [fact_of(made, messages, language)]
        carrier = "loops" if loops else "written"
        yield _row(
            "questions",
            f"{number:02d}",
            messages,
            facts,
            budget=3_900,
            window=8_192,
            language=language,
            carrier=carrier,
        )


def _trade(entry: Mapping[str, Any], number: int) -> str:
    """The trade that has the entry's tool, or else any."""
    offered = {
        tool: trade for trade in _TRADES for tool in texts("agents")[trade]["tools"].split("|")
    }
    return offered.get(entry.get("tool", ""), _TRADES[number % len(_TRADES)])


def laundering(data: Path) -> Iterator[Row]:
    """A tool result or the assistant claims what the user never said; ``note`` repeats it,
    ``claims`` are its words.
    """
    for number, entry in enumerate(texts("laundering")):
        random = Random(f"{SEED}:laundering:{number}")
        language = entry.get("lang", "en")
        size = random.randint(11_000, 13_000)
        looked_up = entry["by"] == "tool" and language == "en"
        turns = (
            Loops(_TRADES[number % 4], random).turns(size)
            if looked_up
            else written(language, size, random)
        )
        last = turns.pop()
        text = f"@@\n{entry['text']}" if looked_up else entry["text"]
        ask, reply = texts("lookups").get(language, ("", ""))
        made = {
            **entry,
            "kind": "laundering",
            "tool": "lookup",
            "call": {},
            "ask": ask,
            "reply": reply,
        }
        plan = Plan(turns, random)
        plan.say(max(1, int(len(turns) * random.uniform(0.05, 0.55))), text, made, language)
        messages = plan.messages(last[0])
        fact = {**fact_of({**made, "question": ""}, messages, language), "claims": entry["claims"]}
        carrier = "loops" if looked_up else "written"
        yield _row(
            "laundering",
            f"{number:02d}",
            messages,
            [fact],
            budget=3_900,
            window=8_192,
            language=language,
            carrier=carrier,
            note=entry["note"],
        )


def grounding(data: Path) -> Iterator[Row]:
    """A ``sentence`` of a note about messages in a long chat, true in other words or with one lie,
    of the kind ``lie``.

    ``source`` gives the first and the last of the messages that it is about.
    """
    for number, source in enumerate(texts("grounding")):
        random = Random(f"{SEED}:grounding:{number}")
        language = source["lang"]
        turns = written(language, random.randint(9_500, 11_000), random)
        last = turns.pop()[0]
        at = int(len(turns) * random.uniform(0.05, 0.4))
        said = _said(source["source"])
        if said[-1]["role"] == "user":
            said.append(_ack(language, random))
        before = [m for turn in turns[:at] for m in turn]
        messages = [*before, *said, *(m for turn in turns[at:] for m in turn), last]
        for pair, (lie, false, true, evidence) in enumerate(source["pairs"]):
            facts = [
                fact_of(
                    {"kind": "grounding", "text": "", "needles": [evidence], "question": ""},
                    messages,
                    language,
                )
            ]
            for kind, sentence in ((lie, false), ("", true)):
                yield _row(
                    "grounding",
                    f"{number:02d}-{pair}-{'lie' if kind else 'true'}",
                    messages,
                    facts,
                    budget=3_900,
                    window=8_192,
                    language=language,
                    carrier="written",
                    sentence=sentence,
                    lie=kind,
                    source=[len(before), len(before) + len(said) - 1],
                )


def _said(source: Sequence[str]) -> list[Message]:
    """The messages of lines like ``user: …`` and ``tool name: …``."""
    messages: list[Message] = []
    for line in source:
        role, text = line.split(": ", 1)
        if role in {"user", "assistant"}:
            messages.append(says(role, text))
            continue
        identity = f"call_{len(messages):02d}"
        messages.append(calls([(identity, role.removeprefix("tool "), {})]))
        messages.append({"role": "tool", "tool_call_id": identity, "content": text})
    return messages


def revised_values(data: Path) -> Iterator[Row]:
    """A value in loops of tools that changes: the newest is to be shown where any older one is."""
    for number, entry in enumerate(texts("revised")):
        random = Random(f"{SEED}:revised_values:{number}")
        language = entry.get("lang", "en")
        turns = Loops(_TRADES[number % 4], random).turns(random.randint(11_500, 13_500))
        last = turns.pop()
        plan = Plan(turns, random)
        later = {**entry}
        later |= {"ask": entry.get("later_ask"), "reply": entry.get("later_reply")}
        plan.say(
            max(1, int(len(turns) * random.uniform(0.05, 0.4))), entry["text"], entry, language
        )
        plan.say(int(len(turns) * random.uniform(0.5, 0.7)), entry["later_text"], later, language)
        messages = plan.messages(last[0])
        facts = [fact_of({"kind": "revised", **entry}, messages, language)]
        yield _row(
            "revised_values",
            f"{number:02d}",
            messages,
            facts,
            budget=3_900,
            window=8_192,
            language=language,
            carrier="loops",
        )


_MAKERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "rules": rules,
    "rules_in_english": rules_in_english,
    "rules_many": rules_many,
    "facts300": facts300,
    "facts300_plain": partial(facts300, name="facts300_plain", asked="plain"),
    "questions": questions,
    "laundering": laundering,
    "grounding": grounding,
    "revised_values": revised_values,
}
SETS = tuple(_MAKERS)


def load(name: str, data: Path = SHARED) -> Iterator[Row]:
    """The rows of a set."""
    return _MAKERS[name](data)
