"""What managing costs beside not managing: recorded and generated conversations played through
`balanced`.

    python -m benchmarks.cost [--data DIR] [--json] [--set NAME]

Requests are planned in this process without a model and priced as a provider with a prompt cache
does: 0.1 for a token read from the cache, 1.25 for one written to it. Cost is cumulative, against
the same requests unmanaged in a window that is large enough. Results are also written to
``benchmarks/results/cost.json``.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.retention import default_data
from policies.quality.prices import PROVIDERS, TokenPrices
from policies.settings import ContextSettings
from proxy.features.replay.play import Tally, replay
from proxy.features.replay.scenarios import Conditions, store_in_memory
from proxy.features.replay.script import Fact, Recording, Script, read_recordings, recording_of
from proxy.wire.counting import TextCounter, Tokenizer

PRICES = PROVIDERS["anthropic"]
MAX_TOKENS = 512
RESULTS = Path(__file__).parent / "results" / "cost.json"
WORDS = [
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "server",
    "request",
    "file",
    "module",
    "path",
    "value",
    "index",
    "error",
    "result",
    "class",
    "function",
    "import",
    "token",
    "window",
    "buffer",
    "stream",
    "client",
    "proxy",
    "cache",
    "ledger",
    "archive",
    "commit",
    "branch",
    "table",
    "query",
    "schema",
    "field",
    "number",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file of the project.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One row: which conversations, in which window, and what it should come to.

    ``batches`` is a bound per conversation, ``reuse`` a lower bound, ``peak`` an upper bound of the
    cumulative cost from the first batch on, ``final`` one of the cost at the end, both against
    unmanaged.
    """

    name: str
    window: int
    source: Callable[[Path], Iterator[Recording]]
    batches: int | None = None
    reuse: float | None = None
    peak: float | None = None
    final: float = 1.0


def prose(count: int, *, seed: int) -> str:
    """``count`` words, some of them numbers; the same seed gives the same text."""
    rng = random.Random(seed)
    return " ".join(
        rng.choice(WORDS) + (f" {rng.randint(10, 9999)}" if rng.random() < 0.2 else "")
        for _ in range(count)
    )


def opening(seed: int) -> list[dict[str, Any]]:
    """System rules and the task."""
    return [
        {"role": "system", "content": "You are a careful coding agent. " + prose(60, seed=seed)},
        {
            "role": "user",
            "content": "Migrate the project from axios to fetch. " + prose(60, seed=seed + 1),
        },
    ]


def agent_loop(steps: int, *, words: int, name: str) -> Recording:
    """An agent that calls one tool a step, about 1.5 tokens for each of the result's words."""
    messages = opening(1)
    for number in range(steps):
        call = {"id": f"call_{number}", "type": "function"}
        function = {"name": "read_file", "arguments": f'{{"path": "src/module_{number}.py"}}'}
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}
        )
        messages.append(
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": prose(words, seed=1000 + number),
            }
        )
    return recording_of(messages[:-1], name=name, tools=[TOOL])


def chat(turns: int, *, name: str) -> Recording:
    """Questions and answers of about 225 tokens each."""
    messages = opening(1)[:1]
    for number in range(turns):
        messages.append({"role": "user", "content": prose(132, seed=2000 + number)})
        messages.append({"role": "assistant", "content": prose(132, seed=3000 + number)})
    return recording_of(messages, name=name)


def chained(recordings: Sequence[Recording], *, name: str) -> Recording:
    """Several recordings as one session: the system message once, ids of tool calls made unique,
    facts moved along.
    """
    messages: list[Mapping[str, object]] = []
    facts: list[Fact] = []
    for number, recording in enumerate(recordings):
        skipped = 1 if number and recording.values[0]["role"] == "system" else 0
        shift = len(messages) - skipped
        facts += [
            Fact(
                needles=f.needles,
                needed_at=tuple(i + shift for i in f.needed_at),
                superseded=f.superseded,
            )
            for f in recording.facts
        ]
        messages += [_renamed(value, number) for value in recording.values[skipped:]]
    return recording_of(messages, name=name, tools=recordings[0].tools, facts=facts)


def _renamed(message: Mapping[str, object], number: int) -> Mapping[str, object]:
    value = dict(message)
    if "tool_call_id" in value:
        value["tool_call_id"] = f"{number}.{value['tool_call_id']}"
    calls = value.get("tool_calls")
    if isinstance(calls, list):
        value["tool_calls"] = [{**call, "id": f"{number}.{call.get('id')}"} for call in calls]
    return value


def recorded(
    file: str, *, at_once: int = 1, most: int | None = None
) -> Callable[[Path], Iterator[Recording]]:
    """The conversations of a set, ``at_once`` of them chained to one session; nothing where the
    file is missing.
    """

    def read(data: Path) -> Iterator[Recording]:
        path = data / f"{file}.jsonl"
        waiting = list[Recording]()
        made = 0
        if not path.exists():
            return
        for place in read_recordings(path):
            waiting.append(place.recording)
            if len(waiting) == at_once:
                yield waiting[0] if at_once == 1 else chained(waiting, name=f"{file}-{made}")
                waiting = []
                made = made + 1
                if most is not None and made >= most:
                    return

    return read


def generated(recording: Callable[[], Recording]) -> Callable[[Path], Iterator[Recording]]:
    """One conversation that is made, not read."""
    return lambda _: iter((recording(),))


PLANS: tuple[Plan, ...] = (
    Plan(
        name="agent loop, 30 steps",
        window=8_192,
        source=generated(lambda: agent_loop(30, words=280, name="agent")),
        batches=3,
        reuse=0.82,
        peak=1.10,
    ),
    Plan(
        name="chat, 30 turns",
        window=8_192,
        source=generated(lambda: chat(30, name="chat")),
        batches=3,
        reuse=0.82,
        peak=1.10,
    ),
    Plan(
        name="tau airline, 10 customers chained",
        window=8_192,
        source=recorded("tau_airline", at_once=10),
        peak=1.10,
    ),
    Plan(
        name="tau airline, 10 customers chained",
        window=32_768,
        source=recorded("tau_airline", at_once=10),
    ),
    Plan(name="swe agent", window=8_192, source=recorded("swe_agent"), peak=1.10),
    Plan(name="swe agent, all chained", window=32_768, source=recorded("swe_agent", at_once=9)),
    Plan(
        name="tau airline long, 4 chained (125K)",
        window=128_000,
        source=recorded("tau_airline_long", at_once=4),
        peak=1.05,
    ),
    Plan(
        name="agent loop, 120 steps of 1,000 tokens",
        window=128_000,
        source=generated(lambda: agent_loop(120, words=620, name="agent-long")),
        peak=1.05,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan played: sums over its conversations, and which targets were missed."""

    plan: Plan
    tally: Tally
    sliding: Tally
    worst_batches: int
    missed: tuple[str, ...]


async def played(
    script: Script, policies: Sequence[ContextSettings], conditions: Conditions, prices: TokenPrices
) -> Mapping[str, Tally]:
    """A conversation played in every scenario, over a store of its own in memory."""
    async with store_in_memory() as store:
        return await replay(script, policies, conditions, prices, store)


def play(plan: Plan, data: Path, counter: TextCounter) -> Row | None:
    """The row of a plan, None where its set is not there."""
    conditions = Conditions(counter=counter, window=plan.window, max_tokens=MAX_TOKENS)
    total = Tally()
    sliding = Tally()
    worst = 0
    for recording in plan.source(data):
        script = Script(recording, counter=counter, model="")
        _, window, managed = asyncio.run(
            played(script, (ContextSettings(),), conditions, PRICES)
        ).values()
        sliding.add(window)
        total.add(managed)
        worst = max(worst, managed.batches)
    if not total.conversations:
        return None
    missed = tuple(_missed(plan, total, worst))
    return Row(plan=plan, tally=total, sliding=sliding, worst_batches=worst, missed=missed)


def _missed(plan: Plan, total: Tally, worst: int) -> Iterator[str]:
    if total.fit < total.requests:
        yield f"{total.requests - total.fit} requests did not fit"
    if plan.batches is not None and worst > plan.batches:
        yield f"{worst} batches > {plan.batches}"
    if plan.reuse is not None and total.reuse < plan.reuse:
        yield f"reuse {total.reuse:.1%} < {plan.reuse:.0%}"
    if total.early > 1.0:
        yield f"cost {total.early:.2f} before the first batch"
    if plan.peak is not None and total.peak > plan.peak:
        yield f"peak cost {total.peak:.2f} > {plan.peak:.2f}"
    if total.ratio > plan.final:
        yield f"final cost {total.ratio:.2f} > {plan.final:.2f}"


def values(row: Row) -> dict[str, object]:
    """One row for programs."""
    return {
        "set": row.plan.name,
        "window": row.plan.window,
        **row.tally.values(),
        "retention_sliding_window": [row.sliding.retention.kept, row.sliding.retention.needed],
        "most_batches_in_a_conversation": row.worst_batches,
        "missed": list(row.missed),
    }


def line(row: Row) -> str:
    """One row for people."""
    tally = row.tally
    kept = row.tally.retention
    held = f"{kept.kept / kept.needed:.1%}" if kept.needed else "-"
    return (
        f"{row.plan.name:52} {row.plan.window:>7,} {tally.requests:>5} {tally.fit:>5}"
        f" {tally.batches:>4} {100 * tally.batches / tally.requests:>5.1f} {tally.reuse:>6.1%}"
        f" {tally.peak or 1.0:>5.2f} {tally.ratio:>5.2f} {tally.against_sliding:>7.2f} {held:>7}"
        f" {1000 * tally.seconds / tally.requests:>6.1f}  {'; '.join(row.missed) or 'met'}"
    )


HEADER = (
    f"{'set':52} {'window':>7} {'reqs':>5} {'fit':>5} {'bat.':>4} {'/100':>5} {'reuse':>6}"
    f" {'peak':>5} {'cost':>5} {'sliding':>7} {'facts':>7} {'ms':>6}  targets"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit 0, a missed target is shown and is no error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--set", dest="name", help="only the sets whose name contains this")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="where the JSON is written as well"
    )
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer()
    counter = tokenizer.counter("o200k_base")
    rows: list[dict[str, object]] = []
    if not options.json:
        print(HEADER)
    for plan in PLANS:
        if (options.name or "") not in plan.name:
            continue
        row = play(plan, options.data, counter)
        if row is not None:
            rows.append(values(row))
            if not options.json:
                print(line(row), flush=True)
    tokenizer.close()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
