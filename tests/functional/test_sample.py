"""What a model still sees of four conversations that nothing was tuned to, beside what it saw before.

Each is played through a served Weir in a window of 8,192: the client resends all it has before each of the assistant's
messages, then asks each probe. Who changes what is kept writes new figures here, and why.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.facts import Case, altered, case_of, shown
from benchmarks.served import Ask, Chat, play, size, written

SAMPLE = Path(__file__).parents[1] / "data" / "sample"
WINDOW = 8_192
POINTS = 0.02
MORE = 1.02
"""How many more tokens still are the same ones."""
PROBED: Mapping[str, tuple[float, float]] = {
    "agent_shelfmark": (1.0, 4_920),
    "agent_tidewatch": (0.937, 4_896),
    "incident_parcels": (0.875, 5_086),
    "support_trains": (1.0, 4_447),
}
"""By conversation the share of probes whose answer is in the request without what recall brought back, and the mean
tokens of all requests that Weir edited."""
READ_BEFORE: Mapping[str, float] = {"agent_shelfmark": 0.636, "agent_tidewatch": 0.588}
"""By agent the share of lines that stand in the request whose answer edits them, of those that a tool had returned."""
QUOTED = re.compile(r"^tool \d+(?:\.\d+)?: ")
"""What begins a line in which Weir quotes a result; several of the result's lines may follow in it."""
NUMBERED = re.compile(r"^ *\d+\t")
OUTCOME = re.compile(r"=+ ((?:\d+ failed, )?\d+ passed in [\d.]+s) =+")


@dataclass(frozen=True, slots=True)
class Edit:
    """One file that a call of the message at ``place`` edits, and the lines that it replaces."""

    place: int
    tool: str
    path: str
    replaced: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """A conversation, and what went up for each of its requests."""

    case: Case
    sent: Mapping[Ask, Chat]

    @property
    def edited(self) -> dict[Ask, Chat]:
        """The requests that Weir changed."""
        return {ask: chat for ask, chat in self.sent.items() if chat != ask.messages(self.case.messages)}

    @property
    def last(self) -> Chat:
        """The last request before the probes."""
        return self.sent[max((ask for ask in self.sent if ask.question is None), key=Ask.order)]


@pytest.fixture(scope="module")
def played() -> Mapping[str, Played]:
    rows = {name: json.loads((SAMPLE / f"{name}.json").read_text(encoding="utf-8")) for name in PROBED}
    cases = [case_of(with_facts(row), ("W", WINDOW), number) for number, row in enumerate(rows.values())]
    plans = [(case.messages, case.asks(growing=True), case.window) for case in cases]
    sent = asyncio.run(play(plans, growing=True, override={}))
    return {case.name: Played(case, each) for case, each in zip(cases, sent, strict=True)}


def with_facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the sample with its probes as the facts that are needed at its end."""
    facts = [{**probe, "superseded": probe["stale"]} for probe in row["probes"]]
    return {"messages": row["messages"], "meta": {**row["meta"], "facts": facts}}


def edits(messages: Chat) -> Iterator[Edit]:
    for place, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            arguments = json.loads(call["function"]["arguments"])
            if name == "str_replace":
                yield Edit(place, name, arguments["path"], lines_in(arguments["old_str"].split("\n")))
            elif name == "apply_patch":
                yield from patched(place, arguments["patch"])


def patched(place: int, patch: str) -> Iterator[Edit]:
    for part in re.split(r"^--- .*\n", patch, flags=re.MULTILINE)[1:]:
        head, *body = part.split("\n")
        removed = [line[1:] for line in body if line.startswith("-")]
        yield Edit(place, "apply_patch", head.removeprefix("+++ b/"), lines_in(removed))


def lines_in(lines: list[str]) -> tuple[str, ...]:
    """Lines as they are compared: without a number before and space around them; empty ones are left out."""
    return tuple(bare for line in lines if (bare := NUMBERED.sub("", line).strip()))


def told(messages: Chat) -> str:
    """Of a request a line for each call that is still there, and all that is said, as Weir's lines about calls."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    raw = [f"call 0: {call['name']} {json.dumps(call['arguments'])}" for call in calls]
    return "\n".join([*raw, *(text_of(message) for message in messages)])


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def tells(text: str, edit: Edit) -> bool:
    """Whether a line about a call says that the file was edited."""
    about = rf"^call \d+(?:\.\d+)?: {edit.tool} .*{re.escape(edit.path)}"
    return re.search(about, text, re.MULTILINE) is not None


@pytest.mark.parametrize("name", PROBED)
def test_answers_of_probes_stay(played: Mapping[str, Played], name: str) -> None:
    one = played[name]
    assert all(one.sent.values()), "a request was refused"
    lost = []
    stale = []
    for fact in one.case.facts:
        for ask in fact.needed:
            text = shown(written(one.sent[ask]), ask, recalled=False)
            if fact.lost_in(text):
                lost.append(ask.question)
            if fact.is_stale_in(text):
                stale.append(ask.question)
    kept = 1 - len(lost) / len(one.case.facts)
    tokens = sum(map(size, one.edited.values())) / len(one.edited)
    share, before = PROBED[name]
    assert kept >= share - POINTS, lost
    assert tokens <= before * MORE
    assert stale == []
    assert altered(one.edited.values(), one.case.messages) == []


@pytest.mark.parametrize("name", READ_BEFORE)
def test_edited_files_and_the_newest_test_run_are_told(played: Mapping[str, Played], name: str) -> None:
    one = played[name]
    history = one.case.messages
    made = list(edits(history))
    ends = {place: found[1] for place, message in enumerate(history) if (found := OUTCOME.search(text_of(message)))}
    silent = set()
    for ask, sent in one.edited.items():
        text = told(sent)
        so_far = [edit for edit in made if edit.place < ask.upto]
        known = {edit.path for edit in so_far if tells(text, edit)}
        silent |= {(ask.upto, edit.path) for edit in so_far if edit.path not in known}
        newest = max((place for place in ends if place < ask.upto), default=None)
        if newest is not None and ends[newest] not in text:
            silent.add((ask.upto, ends[newest]))
    assert silent == set()


@pytest.mark.parametrize("name", READ_BEFORE)
def test_lines_that_are_edited_next_are_in_the_request(played: Mapping[str, Played], name: str) -> None:
    one = played[name]
    there = 0
    missing = []
    for edit in edits(one.case.messages):
        ask = Ask(edit.place)
        if ask not in one.edited:
            continue
        read = read_in(one.case.messages[: edit.place])
        stands = read_in(one.sent[ask])
        due = [line for line in edit.replaced if line in read]
        there += sum(line in stands for line in due)
        missing += [f"{edit.path}: {line}" for line in due if line not in stands]
    share = there / (there + len(missing))
    assert share >= READ_BEFORE[name] - POINTS, missing


def read_in(messages: Chat) -> set[str]:
    """The lines of results of tools, and of what Weir quotes of them."""
    texts = [text_of(message) for message in messages if message["role"] in {"tool", "user"}]
    pieces = [piece for text in texts for line in text.split("\n") for piece in QUOTED.sub("", line).split(" … ")]
    return set(lines_in(pieces))
