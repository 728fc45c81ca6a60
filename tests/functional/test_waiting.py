"""No client waits for a model that writes summaries, unless its policy says how long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.functional.harness import COUNTER, RunningWeir, Talk, answered, arrays_of, batches, opening, weir
from tests.upstream import SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

pytestmark = pytest.mark.slow

TOLD = "go on from"
YAML = """
upstreams:
  sim: {{kind: openai, base_url: "{upstream}", api_key: pass}}
models:
  - {{match: "notes", upstream: sim, window: 32768, tokenizer: o200k_base}}
  - {{match: "*", upstream: sim, window: 8192, tokenizer: o200k_base}}
policies:
  waiting:
    preset: balanced
    summarizer: notes
    summaries: {{{summaries}}}
    cascade: {cascade}
default_policy: waiting
"""
HANGS = SimulatorSettings(
    window=8192,
    windows={"notes": 32_768},
    summary_model="notes",
    summary_seconds=600.0,
)
"""A summariser that takes a request and never answers it."""
COMPACT = "[{layer: compact}]"


@asynccontextmanager
async def hanging(
    folder: Path, summaries: str = "", cascade: str = COMPACT
) -> AsyncIterator[tuple[RunningWeir, RunningSimulator]]:
    async with serve_simulator(HANGS, counter=COUNTER) as simulator:
        yaml = YAML.format(upstream=simulator.base_url, summaries=summaries or "prepare_at: 0.75", cascade=cascade)
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=None) as target:
            try:
                yield target, simulator
            finally:
                await target.runtime.preparation.close()
                await target.runtime.summarizer.close()


@asynccontextmanager
async def held_back(simulator: RunningSimulator) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A way to the simulator on which no answer comes back before the event."""
    let_go = asyncio.Event()
    port = int(simulator.base_url.rpartition(":")[2].partition("/")[0])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, held: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if held:
                    await let_go.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back, held=False), pump(there, writer, held=True))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", let_go
    finally:
        let_go.set()
        server.close()


def still_open(simulator: RunningSimulator) -> int:
    """Requests that the summariser has and has not answered."""
    return sum(not seen.finished for seen in simulator.ledger if seen.model == "notes")


@pytest.mark.requirement("P13", "R.51", "D14")
async def test_requests_and_batches_are_answered_while_the_summarisers_request_is_open(tmp_path: Path) -> None:
    async with hanging(tmp_path) as (target, simulator):
        talk = Talk(target.client(), opening()[:1])
        talk.grow(8)
        async with asyncio.timeout(10):
            await talk.chat(14)
        unanswered, seen = still_open(simulator), answered(simulator)
        waited = target.runtime.telemetry.metrics.render()[0].decode()
    assert unanswered == 1
    assert [s.status for s in seen] == [200] * 14
    assert any("compact" in action for action in talk.actions())
    assert 'weir_overhead_seconds_count{weir_summarizer="true"' not in waited


@pytest.mark.requirement("D14", "P13", "A2.27")
async def test_a_note_that_comes_after_the_batch_is_in_the_next_one_and_moves_nothing_before(tmp_path: Path) -> None:
    settings = SimulatorSettings(window=8192, windows={"notes": 32_768}, summary_model="notes")
    async with serve_simulator(settings, counter=COUNTER) as simulator, held_back(simulator) as (held, let_go):
        yaml = YAML.format(upstream=simulator.base_url, summaries="prepare_at: 0.5", cascade=COMPACT)
        yaml = yaml.replace('match: "notes", upstream: sim', 'match: "notes", upstream: held')
        yaml = yaml.replace("upstreams:", f'upstreams:\n  held: {{kind: openai, base_url: "{held}", api_key: pass}}')
        async with weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target:
            talk = Talk(target.client(), opening()[:1])
            talk.grow(8)
            while not any("compact" in h["x-weir-actions"] for h in talk.headers):
                await talk.chat(1)
            at_batch = len(answered(simulator))
            assert [seen.model for seen in simulator.ledger].count("notes") == 1, "the note had been asked for"
            let_go.set()
            await target.runtime.preparation.settled()
            await talk.chat(3)
            before_next = batches(arrays_of(answered(simulator))[at_batch - 1 :])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    while not _tells(simulator, -1):
                        await talk.chat(1)
            arrays = arrays_of(answered(simulator))
    assert not _tells_in(arrays[at_batch - 1])
    assert before_next == 0, "a note that is ready breaks no prefix"
    assert _tells_in(arrays[-1])
    first = next(n for n, array in enumerate(arrays) if _tells_in(array))
    assert batches(arrays[at_batch - 1 : first + 1]) == 1


def _tells(simulator: RunningSimulator, number: int) -> bool:
    return _tells_in(arrays_of(answered(simulator))[number])


def _tells_in(array: list[dict[str, object]]) -> bool:
    return any(TOLD in str(message["content"]) for message in array)
