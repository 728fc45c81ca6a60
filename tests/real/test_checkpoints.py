"""Checkpoints that a real small model writes: code guards what they say, and the figures tell who kept what."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from policies import Failed, Summarize
from policies.checkpoint import Checkpoint
from policies.summaries import invented
from proxy.cli.recording import load_recording
from proxy.simulator.serving import serve_simulator
from proxy.simulator.settings import SimulatorSettings
from proxy.store import Store
from proxy.store.records import CheckpointRow, ConversationRow
from proxy.summarizer import Compose, Send, Summarizer, Terms, Told
from tests.functional.harness import COUNTER, RunningWeir, answered, arrays_of, weir
from tests.real.environments import Unavailable
from tests.real.llama import Llama
from tests.real.summariser import summariser_server
from tests.real.test_model_server import pairs_are_whole

pytestmark = [pytest.mark.real, pytest.mark.timeout(1_800)]

Array = list[dict[str, Any]]
WINDOW = 8_192
MAX_TOKENS = 256
RECORDING = load_recording()
REQUESTS = RECORDING.requests
YAML = """
upstreams:
  sim: {{base_url: "{simulator}", api_key: pass}}
  llama: {{base_url: "{llama}"}}
models:
  - {{match: "{model}", upstream: llama, window: {window}}}
  - {{match: "*", upstream: sim, window: {window}, tokenizer: o200k_base}}
policies:
  written:
    preset: balanced
    summarizer: {model}
    summaries: {{seconds: 120, prepare_at: null}}
default_policy: written
"""
ID = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])\w{5,}\b|\b\d{4}-\d{2}-\d{2}\b|\b\d{5,}\b")
"""What is surely an identifier, found by other means than the product's."""
REF = re.compile(r"\b[0-9a-f]{12}\b")


class Listening(Summarizer):
    """A summarizer that remembers what was asked and what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Summarize, Told]] = []

    async def ask(self, effect: Summarize, *, terms: Terms, send: Send, compose: Compose | None = None) -> Told:
        """The model's reply, which is remembered."""
        told = await super().ask(effect, terms=terms, send=send, compose=compose)
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
    heard: tuple[tuple[Summarize, Told], ...]
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
        parts += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
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
        yaml = YAML.format(simulator=simulator.base_url, llama=llama.base_url, model=model, window=WINDOW)
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=None, asking=listening) as target:
            for index in REQUESTS:
                await target.client(timeout=900).chat.completions.create(
                    model="sim", messages=RECORDING.messages[:index], tools=RECORDING.tools, max_tokens=MAX_TOKENS
                )
            return await told(target, answered(simulator, "sim"), listening)


async def told(target: RunningWeir, seen: Any, listening: Listening) -> Run:
    await target.runtime.settler.flush()
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
    condensed = [figures for row in timeline for figures in row.detail.get("condensed", ())]
    return Run(tuple(steps), tuple(listening.heard), tuple(condensed), tuple(rows), tuple(first))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("checkpoints")
    try:
        with summariser_server(folder, window=WINDOW) as (llama, model):
            yield asyncio.run(play(llama, model, folder))
    except Unavailable as reason:
        pytest.skip(str(reason))
