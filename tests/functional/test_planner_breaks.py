"""A fault inside planning costs a client nothing: rows that something else has spoilt, read by a Weir that starts."""

import sqlite3
from contextlib import closing
from typing import Any

import asyncpg
import pytest

from tests.functional.harness import ALONE, COUNTER, SHARED, Deployment, Talk, answered, arrays_of, opening
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 8192


async def spoil(deployment: Deployment, table: str, column: str) -> None:
    """Have words where Weir has put numbers, behind its back."""
    if isinstance(deployment.store, str):
        connection = await asyncpg.connect(deployment.store)
        await connection.execute(f"ALTER TABLE {table} ALTER {column} DROP DEFAULT, ALTER {column} TYPE text USING 'x'")
        changed = await connection.fetchval(f"SELECT count(*) FROM {table}")
        await connection.close()
    else:
        with closing(sqlite3.connect(deployment.store, isolation_level=None)) as database:
            changed = database.execute(f"UPDATE {table} SET {column} = 'x'").rowcount
    assert changed, "there was nothing to spoil"


@SHARED
@pytest.mark.requirement("P6", "S.29")
async def test_a_request_whose_plan_fails_is_trimmed_until_it_fits(deployment: Deployment) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url) as target:
            talk = Talk(target.client(), opening())
            talk.grow(14)
            await talk.chat(6)
            await target.settled()
        assert talk.actions()[-1] != "none"
        await spoil(deployment, "checkpoints", "length")
        async with deployment.serving(simulator.base_url) as target:
            talk.client = target.client()
            await talk.chat(1)
        sent, seen = arrays_of(answered(simulator))[-1], simulator.answered()
    assert talk.actions()[-1].endswith("degraded=plan")
    assert {s.status for s in seen} == {200}
    assert sum(len(str(m["content"])) for m in talk.messages) > 4 * WINDOW, "it fitted as it came"
    assert sent[-1] == talk.messages[-2]
    assert sent[0] == talk.messages[0]


@ALONE
@pytest.mark.requirement("P6", "S.29")
async def test_a_request_that_cannot_be_recognised_goes_up_as_it_came(deployment: Deployment) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url) as target:
            talk: Any = Talk(target.client(), opening())
            await talk.chat(2)
        await spoil(deployment, "branches", "longest")
        async with deployment.serving(simulator.base_url) as target:
            talk.client = target.client()
            await talk.chat(1)
        sent = arrays_of(answered(simulator))[-1]
    assert talk.actions()[-1] == "degraded=plan"
    assert sent == talk.messages[:-1]
