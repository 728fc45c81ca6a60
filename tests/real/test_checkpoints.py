"""Checkpoints that a real small model writes: code guards what they say, and the figures tell who kept what."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from policies.effects import Summarize
from policies.memory.checkpoint import Checkpoint
from policies.summary.identifiers import invented
from proxy.effects.summarizer import Send, Summarizer, SummarizerTerms, SummaryResult
from proxy.store import Store
from proxy.store.records import CheckpointRow, ConversationRow
from tests.functional.harness import COUNTER, RunningWeir, answered, arrays_of, weir
from tests.real.environments import Unavailable
from tests.real.llama import Llama
from tests.real.summariser import summariser_server
from tests.real.test_model_server import pairs_are_whole
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = [pytest.mark.real, pytest.mark.timeout(1_800)]

Array = list[dict[str, Any]]
WINDOW = 6_400
"""The smallest round one in which `balanced` asks a model beside this run's rules and tools."""
READS = 16_384
"""Tokens that the summariser reads at once: the whole of what a batch takes out."""
MAX_TOKENS = 256
RAW = json.loads((Path(__file__).parent / "data" / "airline.jsonl").read_text())
RULE = "Never move any of my flights to another day, whatever it saves."
STATED_AT = 7
"""The user's message that states the rule; the recorded user states none."""
MESSAGES: Array = [
    {**message, "content": f"{message['content']} {RULE}"} if index == STATED_AT else message
    for index, message in enumerate(RAW["messages"])
]
FACTS: Array = RAW["meta"]["facts"]
"""Literals that calls of the recorded agent need: the ``value``, and the messages that it is ``needed_at``."""
REQUESTS = tuple(i for i, message in enumerate(MESSAGES) if message["role"] == "assistant")
YAML = """
upstreams:
  sim: {{base_url: "{simulator}", api_key: pass}}
  llama: {{base_url: "{llama}"}}
models:
  - {{match: "{model}", upstream: llama, window: {reads}}}
  - {{match: "*", upstream: sim, window: {window}, tokenizer: o200k_base}}
policies:
  written:
    preset: balanced
    summarizer: {model}
    summaries: {{seconds: 300, prepare_at: null}}
default_policy: written
"""
ID = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])\w{5,}\b|\b\d{4}-\d{2}-\d{2}\b|\b\d{5,}\b")
"""What is surely an identifier, found by other means than the product's."""
REF = re.compile(r"\b[0-9a-f]{12}\b")


class Listening(Summarizer):
    """A summarizer that remembers what was asked and what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Summarize, SummaryResult]] = []

    async def ask(
        self, effect: Summarize, *, terms: SummarizerTerms, send: Send, waits: float | None = None
    ) -> SummaryResult:
        """The model's reply, which is remembered."""
        told = await super().ask(effect, terms=terms, send=send, waits=waits)
        self.heard.append((effect, told))
        return told


@dataclass(frozen=True, slots=True)
class Step:
    """A request: the recorded message that it asks for, what was forwarded, and the removed text that its refs name."""

    index: int
    status: int
    sent: Array
    removed: str

    @property
    def text(self) -> str:
        """What the upstream was given to read."""
        return "\n".join(json.dumps(message, ensure_ascii=False) for message in self.sent)


@dataclass(frozen=True, slots=True)
class Run:
    """The recorded run behind Weir; ``batches`` are the versions with a summary, by the step that first sent it."""

    steps: tuple[Step, ...]
    heard: tuple[tuple[Summarize, SummaryResult], ...]
    condensed: tuple[dict[str, Any], ...]
    rows: tuple[CheckpointRow, ...]
    batches: tuple[tuple[int, CheckpointRow], ...]

    def state(self, row: CheckpointRow) -> Checkpoint:
        """The checkpoint that a row holds."""
        return Checkpoint.from_json(row.body)


def said(messages: Any) -> str:
    """All that these messages say, calls included."""
    parts = []
    for message in messages:
        parts.append(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            parts += (call["function"]["name"], call["function"]["arguments"])
    return "\n".join(parts)


async def removed_text(store: Store, conversation: ConversationRow, refs: set[str], known: dict[str, str]) -> str:
    """The originals behind these refs: of one message, or of all that a summary stands for."""
    for ref in refs - known.keys():
        one = await store.original(conversation.tenant, ref)
        found = [one] if one is not None else await store.covered(conversation.tenant, ref)
        known[ref] = "\n".join(original.body.decode() for original in found)
    return "\n".join(known[ref] for ref in sorted(refs))


async def play(llama: Llama, model: str, folder: Path) -> Run:
    """The recorded run through a Weir whose summaries the model writes, in front of a strict window."""
    listening = Listening()
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        yaml = YAML.format(simulator=simulator.base_url, llama=llama.base_url, model=model, window=WINDOW, reads=READS)
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=None, asking=listening) as target:
            client = target.client(timeout=900)
            for index in REQUESTS:
                await client.chat.completions.create(
                    model="sim", messages=MESSAGES[:index], tools=RAW["tools"], max_tokens=MAX_TOKENS
                )
            return await told(target, answered(simulator, "sim"), listening)


async def told(target: RunningWeir, seen: Any, listening: Listening) -> Run:
    await target.stored()
    store = target.runtime.store
    assert store is not None
    (conversation,) = await store.conversations(None)
    rows, timeline = await store.checkpoints(conversation), await store.timeline(conversation)
    steps, known = [], dict[str, str]()
    for index, each, array in zip(REQUESTS, seen, arrays_of(seen), strict=True):
        refs = set(REF.findall(json.dumps(array)))
        steps.append(Step(index, each.status, array, await removed_text(store, conversation, refs, known)))
    first = [
        (next(step.index for step in steps if json.dumps(row.cut.text)[1:-1] in json.dumps(step.sent)), row)
        for row in rows
        if row.cut is not None
    ]
    condensed = [figures for row in timeline for figures in figures_of(row.detail)]
    return Run(tuple(steps), tuple(listening.heard), tuple(condensed), tuple(rows), tuple(first))


def figures_of(detail: Any) -> Array:
    """What the summaries of one request came to."""
    return list(detail.get("condensed", ()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("checkpoints")
    try:
        with summariser_server(folder, window=READS) as (llama, model):
            yield asyncio.run(play(llama, model, folder))
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.requirement("A0.3", "P3", "P16")
def test_every_request_of_the_run_fits_and_is_whole(run: Run) -> None:
    assert [step.status for step in run.steps] == [200] * len(REQUESTS)
    assert all(pairs_are_whole(step.sent) for step in run.steps)
    assert run.batches


@pytest.mark.requirement("P13")
def test_the_model_was_asked_and_what_it_said_is_used_or_refused_for_a_reason(run: Run, record_property: Any) -> None:
    assert run.heard
    for effect, told in run.heard:
        usage = told.usage
        spent = "" if usage is None else f", {usage.prompt} tokens read, {usage.completion} written"
        report(record_property, "call", f"{effect.purpose}: {told.result} after {told.seconds:.1f} s{spent}")
    for figures in run.condensed:
        report(record_property, "batch", str(figures))
        assert figures["failure"] or figures["purpose"] == "structured-2"
    for _, row in run.batches:
        assert row.cut is not None
        assert (row.cut.origin == "extract") == (not row.cut.narrative)
        assert row.cut.narrative in row.cut.text


@pytest.mark.requirement("A0.100")
def test_every_checkpoint_is_valid_and_newer_than_the_one_before(run: Run) -> None:
    assert [row.version for row in run.rows] == sorted({row.version for row in run.rows})
    assert all(run.state(row).validate().valid for row in run.rows)
    for (_, old), (_, new) in pairwise(run.batches):
        assert run.state(new).validate(after=run.state(old)).valid


@pytest.mark.requirement("A0.100", "R.55")
def test_the_goal_is_the_first_user_message_byte_for_byte(run: Run) -> None:
    goal = next(message["content"] for message in MESSAGES if message["role"] == "user")
    assert {run.state(row).goal for row in run.rows} == {goal}


@pytest.mark.requirement("A0.100", "R.55")
def test_every_constraint_is_the_users_own_words_and_the_rule_is_never_lost(run: Run) -> None:
    users = said(message for message in MESSAGES if message["role"] == "user")
    stated = False
    for row in run.rows:
        constraints = run.state(row).constraints
        assert all(constraint in users for constraint in constraints)
        assert RULE in constraints or not stated
        stated = RULE in constraints
    assert stated
    assert all(RULE in step.text for step in run.steps if step.index > STATED_AT)


@pytest.mark.requirement("A0.106", "P13")
def test_no_identifier_in_a_checkpoint_or_a_summary_was_invented(run: Run) -> None:
    for index, row in run.batches:
        assert row.cut is not None
        source, state = said(MESSAGES[:index]), run.state(row)
        summary = "\n".join(row.cut.text.split("\n")[2:-1])
        page = "\n".join(line for _, lines in state.sections() for line in lines)
        for text in (summary, page):
            assert invented(text, source) == ()
            assert {found for found in ID.findall(text) if found not in source} == set()
        listed = "\n".join(each.value for each in state.identifiers)
        assert {found for found in ID.findall(listed) if found not in source} == set()


@pytest.mark.requirement("A0.106", "A0.113")
def test_what_later_calls_need_is_in_the_checkpoint_or_one_step_away(run: Run, record_property: Any) -> None:
    window, checkpoint = Counter[str](), Counter[str]()
    for index, row in run.batches:
        assert row.cut is not None
        covered = said(MESSAGES[1 : 1 + row.cut.covers])
        step = next(step for step in run.steps if step.index == index)
        seen = step.text.replace(json.dumps(row.cut.text, ensure_ascii=False)[1:-1], "")
        for value in needed_from(index):
            if value in covered and value not in seen:
                window[keeper(value, narrative=row.cut.narrative, whole=row.cut.text)] += 1
                checkpoint[keeper(value, narrative=run.state(row).narrative, whole=row.body)] += 1
    for name, figures in (("in the window", window), ("in the checkpoint", checkpoint)):
        report(record_property, f"literals that only the summary can hold, {name}", shares(figures))
    assert window.total() >= 5
    assert checkpoint["missing"] == 0


@pytest.mark.requirement("A0.106", "R.55")
def test_all_that_a_call_needs_is_in_its_request_or_behind_a_ref_in_it(run: Run, record_property: Any) -> None:
    found = Counter[str]()
    cuts = [row.cut for _, row in run.batches if row.cut is not None]
    for step in run.steps:
        summary = next((cut for cut in reversed(cuts) if json.dumps(cut.text)[1:-1] in json.dumps(step.sent)), None)
        whole, narrative = (summary.text, summary.narrative) if summary is not None else ("", "")
        kept = step.text.replace(json.dumps(whole, ensure_ascii=False)[1:-1], "") if whole else step.text
        for value in (fact["value"] for fact in FACTS if step.index in fact["needed_at"]):
            where = "untouched" if value in kept else keeper(value, narrative=narrative, whole=whole)
            found[where if where != "missing" or value not in step.removed else "behind a ref"] += 1
    report(record_property, "literals when they were needed", shares(found))
    assert found.total() >= 20
    assert found["missing"] == 0


def needed_from(index: int) -> list[str]:
    """The literals that calls of the run need from the recorded message ``index`` on."""
    return [fact["value"] for fact in FACTS if max(fact["needed_at"]) >= index]


def keeper(value: str, *, narrative: str, whole: str) -> str:
    """Who kept a literal: the model in its text, or code in the rest of the summary."""
    if value in narrative:
        return "kept by the model"
    return "added by code" if value in whole else "missing"


def shares(figures: Counter[str]) -> str:
    """Every figure with its share of all."""
    return ", ".join(f"{name} {count} ({count / figures.total():.0%})" for name, count in figures.most_common())


def report(record_property: Any, name: str, figures: str) -> None:
    """Keep a figure in the test report, and print it for ``pytest -s``."""
    record_property(name, figures)
    print(f"{name}: {figures}")
