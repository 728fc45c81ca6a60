"""A fault inside planning costs a client nothing: rows that something else has spoilt, read by a Weir that starts."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from proxy.simulator.app import serve_simulator
from proxy.simulator.model import SimulatorSettings
from tests.functional.harness import COUNTER, Talk, answered, arrays_of, opening, weir

WINDOW = 8192


def spoil(database: Path, statement: str) -> None:
    """Change rows behind Weir's back."""
    with sqlite3.connect(database) as connection:
        changed = connection.execute(statement).rowcount
    connection.close()
    assert changed, "there was nothing to spoil"


@pytest.mark.requirement("P6", "S.29")
async def test_a_request_whose_plan_fails_is_trimmed_until_it_fits(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        async with weir(simulator.base_url, tmp_path / "w.db") as target:
            talk = Talk(target.client(), opening())
            talk.grow(14)
            await talk.chat(6)
            await target.runtime.preparation.settled()
        assert talk.actions()[-1] != "none"
        spoil(tmp_path / "w.db", "UPDATE checkpoints SET length = 'x'")
        async with weir(simulator.base_url, tmp_path / "w.db") as target:
            talk.client = target.client()
            await talk.chat(1)
        sent, seen = arrays_of(answered(simulator))[-1], simulator.answered()
    assert talk.actions()[-1].endswith("degraded=plan")
    assert {s.status for s in seen} == {200}
    assert sum(len(str(m["content"])) for m in talk.messages) > 4 * WINDOW, "it fitted as it came"
    assert sent[-1] == talk.messages[-2]
    assert sent[0] == talk.messages[0]


@pytest.mark.requirement("P6", "S.29")
async def test_a_request_that_cannot_be_recognised_goes_up_as_it_came(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        async with weir(simulator.base_url, tmp_path / "w.db") as target:
            talk: Any = Talk(target.client(), opening())
            await talk.chat(2)
        spoil(tmp_path / "w.db", "UPDATE branches SET longest = 'x'")
        async with weir(simulator.base_url, tmp_path / "w.db") as target:
            talk.client = target.client()
            await talk.chat(1)
        sent = arrays_of(answered(simulator))[-1]
    assert talk.actions()[-1] == "degraded=plan"
    assert sent == talk.messages[:-1]


@pytest.mark.requirement("P6", "S.29")
async def test_a_request_that_cannot_be_recognised_goes_up_without_weirs_own_marks(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        async with weir(simulator.base_url, tmp_path / "w.db") as target:
            talk: Any = Talk(target.client(), opening())
            await talk.chat(2)
        spoil(tmp_path / "w.db", "UPDATE branches SET longest = 'x'")
        talk.messages[1]["weir"] = {"keep": True}
        async with weir(simulator.base_url, tmp_path / "w.db") as target:
            talk.client = target.client()
            await talk.chat(1)
        sent = arrays_of(answered(simulator))[-1]
    assert talk.actions()[-1] == "degraded=plan"
    assert talk.messages[1].pop("weir")
    assert sent == talk.messages[:-1]
