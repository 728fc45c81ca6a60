"""What remembering costs and keeps: summaries by strategy, and how long a request waits for one.

    python -m benchmarks.memory [--data DIR] [--most N] [--seconds S] [--json]

The first table plays recorded conversations in a window of a quarter of each, with one layer that
may ask a model and the compaction behind it; the summariser is the simulator's, which copies lines
out of its material. Shown are requests that fit, batches, questions, tokens asked and answered, how
many times shorter what was condensed became, facts in the window when they were needed (with a
model and without), and what the archive could give back. The second table is a chat through a real
Weir on real ports whose summariser takes S seconds, with and without preparation.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import openai

from benchmarks.cost import prose, recorded
from benchmarks.retention import default_data
from policies.effects import Effect, Failed, Reply, Summarize, Summary
from policies.settings import ContextSettings, Layer
from proxy.app import create_app
from proxy.config.loading import load_config
from proxy.config.values import Flags
from proxy.features.replay.scenarios import Conditions, Managed, store_in_memory
from proxy.features.replay.script import Retention, Script, judge
from proxy.server import serve
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.wire.counting import TextCounter, Tokenizer
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator
from tests.upstream.delivery import SummaryWriter

SETS = {
    "tau_airline, 6 chained": recorded("tau_airline", at_once=6),
    "tau_airline_long": recorded("tau_airline_long"),
    "swe_agent, 4 chained": recorded("swe_agent", at_once=4),
}
STRATEGIES: Mapping[str, tuple[Layer, ...]] = {
    "compact": (Layer(strategy="compact"),),
    "summarize_tool_result": (
        Layer(strategy="summarize_tool_result", params={"over": 200}),
        Layer(strategy="compact"),
    ),
    "progressive": (Layer(strategy="progressive"), Layer(strategy="compact")),
    "delegate": (Layer(strategy="delegate", params={"least": 0.05}), Layer(strategy="compact")),
    "rollover": (Layer(strategy="rollover"),),
}
MIN_WINDOW = 4_096
SHARE = 4
TURNS = 30
WINDOW = 8_192


@dataclass(slots=True)
class Row:
    """The sums of one strategy on one set."""

    requests: int = 0
    fit: int = 0
    batches: int = 0
    questions: int = 0
    asked: int = 0
    answered: int = 0
    original: int = 0
    condensed: int = 0
    needed: int = 0
    kept: int = 0
    recoverable: int = 0

    def facts(self) -> str:
        """Share of the needed facts that were in the window."""
        return f"{self.kept / self.needed:.1%}" if self.needed else "-"


class Model:
    """The simulator's summariser without a port."""

    def __init__(self, counter: TextCounter) -> None:
        self._counter = counter
        self.questions = self.asked = self.answered = 0

    async def __call__(self, effect: Effect) -> Reply:
        """The reply to one question."""
        if not isinstance(effect, Summarize):
            return Failed("no_model")
        request: dict[str, object] = {
            "model": "summariser",
            "messages": [
                {"role": "system", "content": effect.system},
                {"role": "user", "content": effect.prompt},
            ],
        }
        if effect.schema:
            schema = {"name": "notes", "strict": True, "schema": dict(effect.schema)}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        count = self._counter.count
        text = SummaryWriter().answer(request, max_output=effect.max_tokens, count=count).text
        self.questions += 1
        self.asked += self._counter.count(effect.system) + self._counter.count(effect.prompt)
        self.answered += self._counter.count(text)
        return Summary(text)


async def play(
    script: Script, settings: ContextSettings, conditions: Conditions, model: Model | None
) -> Row:
    """One conversation, request by request, as Weir plans and prepares it."""
    row = Row()
    archived = set[int]()
    async with store_in_memory() as store:
        scenario = Managed(settings, conditions, store, ask=model)
        await _play(script, scenario, row, archived)
    if model is not None:
        row.questions = model.questions
        row.asked = model.asked
        row.answered = model.answered
    return row


async def _play(script: Script, scenario: Managed, row: Row, archived: set[int]) -> None:
    for request in script.requests:
        sent = await scenario.forward(script, request.length)
        row.requests += request.counts
        if sent.pieces is None:
            continue
        row.fit += request.counts
        row.batches += sent.new
        archived |= set(sent.removed)
        for report in sent.decision.trail if sent.decision is not None else ():
            row.original += sum(each.original_tokens for each in report.condensed if report.kept)
            row.condensed += sum(each.compressed_tokens for each in report.condensed if report.kept)
        kept: Retention = judge(
            script, request.facts, length=request.length, sent=sent.pieces, archived=archived
        )
        row.needed += kept.needed
        row.kept += kept.kept
        row.recoverable += kept.recoverable


def added(rows: Sequence[Row]) -> Row:
    """The sums of several conversations."""
    return Row(**{name: sum(getattr(row, name) for row in rows) for name in asdict(Row())})


def strategies(
    data: Path, *, most: int, counter: TextCounter
) -> dict[str, dict[str, dict[str, object]]]:
    """Every strategy on every set, with and without a model; printed as it goes."""
    found: dict[str, dict[str, dict[str, object]]] = {}
    for name, read in SETS.items():
        scripts = [
            Script(recording, counter=counter, model="") for recording in islice(read(data), most)
        ]
        if not scripts:
            continue
        print(f"\n{name}: {len(scripts)} conversations")
        print(
            f"{'strategy':22} {'fit':>9} {'batches':>7} {'questions':>9} {'asked':>8}"
            f" {'answered':>8} {'ratio':>6} {'facts':>6} {'plain':>6} {'archive':>7}"
        )
        for strategy, layers in STRATEGIES.items():
            with_model = list[Row]()
            plain = list[Row]()
            for script in scripts:
                whole = script.transcript(len(script.messages)).tokens
                window = max(MIN_WINDOW, whole // SHARE)
                conditions = Conditions(
                    counter=counter, window=window, max_tokens=min(512, window // 8)
                )
                settings = ContextSettings(layers=layers, summarizer="sim")
                with_model.append(asyncio.run(play(script, settings, conditions, Model(counter))))
                plain.append(
                    asyncio.run(play(script, replace(settings, summarizer=None), conditions, None))
                )
            row = added(with_model)
            none = added(plain)
            ratio = row.original / row.condensed if row.condensed else 1.0
            archive = f"{row.recoverable / row.needed:.1%}" if row.needed else "-"
            print(
                f"{strategy:22} {row.fit:>4}/{row.requests:<4} {row.batches:>7} {row.questions:>9}"
                f" {row.asked:>8,} {row.answered:>8,} {ratio:>6.1f} {row.facts():>6}"
                f" {none.facts():>6} {archive:>7}",
                flush=True,
            )
            found.setdefault(name, {})[strategy] = {"model": asdict(row), "plain": asdict(none)}
    return found


async def waits(seconds: float, *, prepared: bool) -> dict[str, float]:
    """A chat whose summariser takes so long: questions, and the longest time that Weir held a
    request, seconds.
    """
    tokenizer = Tokenizer()
    counter = tokenizer.counter("o200k_base")
    settings = SimulatorSettings(window=WINDOW, summary_model="summariser", summary_seconds=seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weir.yaml"
        async with serve_simulator(settings, counter=counter) as simulator:
            path.write_text(
                f"upstreams: {{sim: {{base_url: '{simulator.base_url}', api_key: pass}}}}\n"
                f"models: [{{match: '*', upstream: sim, window: {WINDOW}}}]\n"
                "policies: {mine: {preset: balanced, summarizer: summariser, "
                f"summaries: {{prepare_at: {0.75 if prepared else 'null'}}}}}}}\n"
                f"default_policy: mine\nstore: {{url: 'sqlite+aiosqlite:///{folder}/w.db'}}\n"
            )
            config = load_config(path, env={}, flags=Flags())
            app = create_app(
                config, telemetry=Telemetry.create(OtelSettings()), tokenizer=tokenizer
            )
            async with serve(app) as server:
                held = await _chat(f"http://127.0.0.1:{server.port}/v1", app.runtime)
            questions = sum(1 for seen in simulator.answered() if seen.model == "summariser")
    return {"questions": questions, "longest": max(held), "median": sorted(held)[len(held) // 2]}


async def _chat(base_url: str, runtime: object) -> list[float]:
    """Seconds that Weir held each request of a chat; between two of them all is done that is done
    after answers.
    """
    held: list[float] = []
    async with openai.AsyncOpenAI(base_url=base_url, api_key="sk-bench", max_retries=0) as client:
        messages: list[Any] = [{"role": "system", "content": "You help."}]
        for turn in range(TURNS):
            messages.append({"role": "user", "content": prose(132, seed=turn)})
            raw = await client.chat.completions.with_raw_response.create(
                model="sim",
                messages=messages,
                max_tokens=256,
            )
            held.append(float(raw.headers["x-weir-overhead-ms"]) / 1000)
            await runtime.preparation.settled()  # type: ignore[attr-defined]
            messages.append({"role": "assistant", "content": prose(132, seed=1_000 + turn)})
    return held


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--most", type=int, default=2, help="conversations of a set")
    parser.add_argument("--seconds", type=float, default=1.0, help="what the slow summariser takes")
    parser.add_argument("--json", action="store_true", help="figures as JSON at the end")
    options = parser.parse_args(arguments)
    found = strategies(options.data, most=options.most, counter=Tokenizer().counter("o200k_base"))
    held = {
        name: asyncio.run(waits(options.seconds, prepared=name == "prepared"))
        for name in ("prepared", "asked")
    }
    print(f"\na chat of {TURNS} turns, a summariser that takes {options.seconds:g} s")
    for name, row in held.items():
        wait = f"longest wait {row['longest']:.3f} s   median {row['median']:.4f} s"
        print(f"{name:10} questions {row['questions']:.0f}   {wait}")
    if options.json:
        print(json.dumps({"strategies": found, "waits": held}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
