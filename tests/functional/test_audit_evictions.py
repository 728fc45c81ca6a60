"""What was evicted, what that freed, and what of it was asked for again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.cli import main
from proxy.store.records import EvictionRow
from proxy.wire.chat import digest_of
from tests.functional.harness import (
    ALONE,
    COUNTER,
    EVICTING,
    NOTHING_RECALLED,
    SHARED,
    TOOLS,
    Deployment,
    InTurns,
    Talk,
    opening,
    prose,
    tool_step,
)
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

NAME = "audited"


def asks_for(
    number: int, *, spelt: str = '{{ "path" : "src/module_{0}.py" }}', again: int = 900
) -> list[dict[str, Any]]:
    """A step that calls the tool as step ``number`` did, spelt in another way, and its result."""
    step = tool_step(number, text=prose(40, seed=again))
    call = step[0]["tool_calls"][0]
    call["id"] = step[1]["tool_call_id"] = f"again_{again}"
    call["function"]["arguments"] = spelt.format(number)
    return step


async def evictions(target: InTurns) -> list[EvictionRow]:
    """What is stored of all conversations, oldest first."""
    await target.settled()
    return (await target.store.evictions(None))[::-1]


async def evicted_session(target: InTurns, steps: int = 17) -> Talk:
    """A conversation that was just edited for the first time."""
    talk = Talk(target.client(default_headers={"x-weir-conversation": NAME}))
    for number in range(steps):
        talk.messages += tool_step(number)
    await talk.ask(tools=TOOLS)
    assert "evict=" in talk.actions()[-1]
    return talk


def path_of(talk: Talk, row: EvictionRow) -> int:
    """The number of the step whose result a row is about."""
    refs = {m["tool_call_id"]: m for m in talk.messages if m["role"] == "tool"}
    store = {digest_of(m): int(name.split("_")[1]) for name, m in refs.items()}
    return store[row.digest]


@pytest.mark.requirement("A0.43", "A0.51")
async def test_what_a_batch_freed_is_what_the_request_lost(deployment: Deployment) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, balanced=EVICTING) as target,
    ):
        talk = await evicted_session(target)
        rows = await evictions(target)
        before, after = (int(part.split("=")[1]) for part in talk.headers[-1]["x-weir-tokens"].split(";")[:2])
        assert sum(row.freed for row in rows) == before - after
        assert {row.tokens_remaining for row in rows} == {after}
        assert {(row.tool, row.policy) for row in rows if row.kind == "evict"} == {("read_file", "balanced")}
        assert all(0 < row.tokens_after <= 60 < row.tokens_before for row in rows if row.kind == "evict")


@pytest.mark.requirement("A0.43", "A0.51")
@pytest.mark.parametrize("kind", ["agent", "chat"])
async def test_batches_add_up_over_a_session(kind: str, deployment: Deployment) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=4096), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, window=4096, balanced=EVICTING | NOTHING_RECALLED) as target,
    ):
        talk, seen = Talk(target.client(), opening() if kind == "agent" else opening()[:1]), 0
        for _ in range(20):
            await (talk.agent(1) if kind == "agent" else talk.chat(1))
            rows = await evictions(target)
            if len(rows) == seen:
                continue
            seen = len(rows)
            branch = await target.store.branch(rows[-1].tenant, rows[-1].branch)
            assert branch is not None
            assert branch.trend is not None
            assert branch.trend.raw is not None
            assert sum(row.freed for row in rows) == branch.trend.raw - rows[-1].tokens_remaining
    assert len({row.version for row in rows}) >= 2
    assert {"agent": "evict", "chat": "compact"}[kind] in {row.layer for row in rows}


@SHARED
@pytest.mark.requirement("A0.41")
async def test_a_call_that_comes_again_with_the_same_arguments_marks_what_was_evicted(deployment: Deployment) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, balanced=EVICTING) as target,
    ):
        talk = await evicted_session(target)
        gone = [path_of(talk, row) for row in await evictions(target) if row.tool]
        stays = next(number for number in range(16, 0, -1) if number not in gone)
        talk.messages += asks_for(stays, again=901)
        await talk.ask(tools=TOOLS)
        assert [row for row in await evictions(target) if row.asked_again_at] == []
        talk.messages += asks_for(gone[1], again=902)
        await talk.ask(tools=TOOLS)
        await talk.ask(tools=TOOLS)  # the same again is a retry
        again = [row for row in await evictions(target) if row.asked_again_at]
    assert [(path_of(talk, row), row.asked_again_count) for row in again] == [(gone[1], 1)]


@pytest.mark.requirement("A0.41", "A0.25")
async def test_what_was_evicted_before_a_restart_is_known_after_it(deployment: Deployment) -> None:
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url, balanced=EVICTING) as target:
            talk = await evicted_session(target)
            gone = [path_of(talk, row) for row in await evictions(target) if row.tool]
        async with deployment.serving(simulator.base_url, balanced=EVICTING) as target:
            talk.client = target.client(default_headers={"x-weir-conversation": NAME})
            talk.messages += asks_for(gone[0])
            await talk.ask(tools=TOOLS)
            again = [row for row in await evictions(target) if row.asked_again_at]
    assert [path_of(talk, row) for row in again] == [gone[0]]


@ALONE
@pytest.mark.requirement("A0.41", "P1")
async def test_a_conversation_that_was_rewound_makes_its_calls_anew_without_regret(deployment: Deployment) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, balanced=EVICTING) as target,
    ):
        talk = Talk(target.client())
        await talk.agent(18)
        first = [row for row in await evictions(target) if row.tool]
        number = max(path_of(talk, row) for row in first)
        place = len(opening()) + 2 * (number - 1)
        assert place < len(talk.messages) - 8
        rewound = Talk(talk.client, talk.messages[:place])
        await rewound.ask(tools=TOOLS)
        rewound.messages += [talk.messages[place], tool_step(number, text=prose(50, seed=5))[1]]
        await rewound.ask(tools=TOOLS)
        assert [row for row in await evictions(target) if row.asked_again_at] == []
        fork = Talk(talk.client, talk.messages[: place + 2])
        fork.messages += asks_for(number)
        await fork.ask(tools=TOOLS)
        again = [row for row in await evictions(target) if row.asked_again_at]
    assert [(path_of(talk, row), row.branch) for row in again] == [(number, first[0].branch)]


async def run(*arguments: str, file: Path) -> Any:
    """The result of the command, run beside this loop."""
    given = ["audit", "evictions", *arguments, "--store", f"sqlite+aiosqlite:///{file}"]
    return await asyncio.to_thread(CliRunner().invoke, main, given, env={"WEIR_CONFIG": ""})


@pytest.mark.requirement("A0.41", "A0.43")
async def test_the_command_reports_regret_by_layer_and_by_tool(tmp_path: Path) -> None:
    file = tmp_path / "w.db"
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        Deployment(file).serving(simulator.base_url, balanced=EVICTING) as target,
    ):
        talk = await evicted_session(target)
        rows = await evictions(target)
        gone = [path_of(talk, row) for row in rows if row.tool]
        talk.messages += asks_for(gone[0])
        await talk.ask(tools=TOOLS)
    page, report = (await run(file=file)), json.loads((await run("--json", file=file)).stdout)
    assert report["evicted"] == len(report["rows"]) == len(rows)
    assert (report["results"], report["asked_again"]) == (len(gone), 1)
    assert report["regret"] == round(1 / len(gone), 4)
    assert report["tokens_freed"] == sum(row.freed for row in rows)
    assert [row["call_hash"] for row in report["asked_again_rows"]] == [
        row.call_hash.hex() for row in rows if row.tool and path_of(talk, row) == gone[0]
    ]
    assert {each["layer"] for each in report["by_layer"]} == {row.layer for row in rows}
    [by_tool] = [each for each in report["by_tool"] if each["tool"] == "read_file"]
    assert by_tool["asked_again"] == 1
    assert f"1 of {len(gone)} tool results were requested again (regret {1 / len(gone):.1%})" in page.stdout
    assert "read_file" in page.stdout
    assert NAME in page.stdout.splitlines()[-1]
    assert json.loads((await run("--policy", "other", "--json", file=file)).stdout)["evicted"] == 0
    assert json.loads((await run("--conversation", NAME, "--json", file=file)).stdout)["asked_again"] == 1
    unknown = await run("--conversation", "nobody", file=file)
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (1, 1)
    assert "Nothing was evicted." in (await run("--policy", "other", file=file)).stderr


def test_the_help_has_an_example() -> None:
    for arguments in (["audit", "--help"], ["audit", "evictions", "--help"]):
        shown = CliRunner().invoke(main, arguments)
        assert shown.exit_code == 0
        assert "Example:" in shown.stdout
