"""Which conversation a request belongs to, seen from outside: what is forwarded, and in how many batches."""

import asyncio
import copy
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import msgspec
import pytest

from proxy.store import Store
from proxy.store.records import Change
from tests.functional.harness import (
    ALONE,
    COUNTER,
    EARLY,
    EVICTING,
    SHARED,
    TOOLS,
    Deployment,
    InTurns,
    Talk,
    answered,
    arrays_of,
    batches,
    opening,
    prose,
    ruled,
    tcp_tap,
    weir,
)
from tests.profile import each_once
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings


@dataclass(frozen=True, slots=True)
class Both:
    """A Weir, or two in turns, and the upstream behind it."""

    simulator: RunningSimulator
    target: InTurns
    database: Path | str

    def talk(self, model: str, *, seed: int, mark: str = "", start: list[dict[str, Any]] | None = None) -> Talk:
        """A conversation whose requests can be told by their model."""
        return Talk(self.target.client(), start or opening(), model=model, seed=seed, mark=mark)

    def arrays(self, model: str) -> list[list[dict[str, Any]]]:
        """What was forwarded for one model, all of it answered with 200."""
        seen = answered(self.simulator, model)
        assert {s.status for s in seen} == {200}
        return arrays_of(seen)

    def rows(self, query: str) -> list[Any]:
        """What the database says, once everything is written."""
        if isinstance(self.database, str):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(asyncio.run, rows_of(self.database, query)).result()
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as connection:
            found = connection.execute(query).fetchall()
        connection.close()
        return found


async def rows_of(database: str, query: str) -> list[Any]:
    """The same of a PostgreSQL."""
    connection = await asyncpg.connect(database)
    try:
        return [tuple(row) for row in await connection.fetch(query)]
    finally:
        await connection.close()


@pytest.fixture
def rules() -> Mapping[str, object]:
    """What a test says of the policy: nothing."""
    return {}


@pytest.fixture
async def both(deployment: Deployment, tmp_path: Path, rules: Mapping[str, object]) -> AsyncIterator[Both]:
    settings = SimulatorSettings(window=8192, summary_model="summariser")
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        deployment.serving(
            "", yaml=ruled(simulator.base_url, rules), folder=tmp_path, window=None, summarizer="summariser"
        ) as target,
    ):
        yield Both(simulator, target, deployment.store)


def names(talk: Talk) -> set[str]:
    """The conversations that a talk's requests were counted to."""
    return {h["x-weir-conversation"] for h in talk.headers}


@ALONE
@pytest.mark.requirement("P1", "P2", "R.26")
async def test_two_conversations_that_begin_alike_never_mix_and_cost_no_more_batches_than_alone(both: Both) -> None:
    alone = both.talk("alone", seed=1, mark="zebra", start=opening(seed=40))
    await alone.agent(24)
    first, second = both.talk("first", seed=1, mark="zebra"), both.talk("second", seed=2, mark="gnu")
    for _ in range(24):
        await first.agent(1)
        await second.agent(1)
    one, two = both.arrays("first"), both.arrays("second")
    assert len(one) == len(two) == 24
    assert "gnu" not in json.dumps(one)
    assert "zebra" not in json.dumps(two)
    assert "zebra" in json.dumps(one)
    allowed = batches(both.arrays("alone"))
    assert 1 <= batches(one) <= allowed
    assert 1 <= batches(two) <= allowed
    assert len(names(first) | names(second)) <= 3


@each_once
@ALONE
@pytest.mark.requirement("P1", "P2")
@pytest.mark.parametrize("moving_files", [0, 60, 1_200])
async def test_a_client_that_rewrites_its_last_user_message_every_turn_keeps_its_edits(
    moving_files: int, both: Both
) -> None:
    """Aider puts rules behind the newest user message, and its files before it; both have moved a turn later."""
    talk = both.talk("sim", seed=1, start=opening()[:1])
    files = [
        {"role": "user", "content": "I have added these files to the chat.\n" + prose(moving_files, seed=77)},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
    ]
    tail = 3 if moving_files else 1
    for _ in range(26):
        talk.add_question()
        *history, newest = talk.messages
        sent = [
            *history,
            *(files if moving_files else []),
            {**newest, "content": newest["content"] + "\n# Rules: be brief."},
        ]
        await talk.ask(sent)
        talk.add_answer()
    arrays = both.arrays("sim")
    thrash = sum(new[: len(old) - tail] != old[:-tail] for old, new in pairwise(arrays))
    assert talk.actions()[-1] != "none"
    assert 1 <= thrash <= 3
    assert len(names(talk)) <= 2, "nothing but the very first request shares no message with what follows"
    assert all(files[0] in array for array in arrays if moving_files), "edits are made to what stands in a file"


@SHARED
@pytest.mark.requirement("P1", "P2")
async def test_the_same_body_sent_twice_is_forwarded_twice_alike_and_changes_nothing(both: Both) -> None:
    talk = both.talk("sim", seed=1)
    talk.grow(8, kind="agent")
    for _ in range(10):
        await talk.ask(tools=TOOLS)
        await talk.ask(tools=TOOLS)
        talk.add_step()
    seen = answered(both.simulator, "sim")
    assert {s.status for s in seen} == {200}
    assert all(first.body == again.body for first, again in zip(seen[::2], seen[1::2], strict=True))
    assert 1 <= batches(arrays_of(seen)) <= 2


@pytest.mark.requirement("P7", "P1", "R.26", "S.4", "S.5")
async def test_two_tenants_with_the_same_conversation_share_no_row_and_no_connection(tmp_path: Path) -> None:
    database = tmp_path / "w.db"
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        tcp_tap(simulator.port) as (port, connections),
    ):
        yaml = ruled(f"http://127.0.0.1:{port}/v1", EVICTING)
        async with weir("", database, yaml=yaml, folder=tmp_path, window=None) as target:
            talks = [Talk(target.client(key), model=key, seed=1) for key in ("sk-one", "sk-two")]
            for _ in range(17):
                for talk in talks:
                    await talk.agent(1)
                    await target.runtime.preparation.settled()
            async with httpx.AsyncClient(base_url=target.root) as http:
                one, two = ({"authorization": f"Bearer {key}"} for key in ("sk-one", "sk-two"))
                (mine,) = (await http.get("/weir/conversations", headers=one)).json()["data"]
                (other,) = (await http.get("/weir/conversations", headers=two)).json()["data"]
                assert mine["id"] != other["id"]
                assert (await http.get(f"/weir/conversations/{mine['id']}", headers=two)).status_code == 404
                third = await http.get("/weir/conversations", headers={"authorization": "Bearer sk-three"})
                assert third.json()["data"] == []
        arrays = [arrays_of(answered(simulator, key)) for key in ("sk-one", "sk-two")]
        assert arrays[0] == arrays[1]
        assert talks[0].actions()[-1] == talks[1].actions()[-1] != "none"
        keys = [{key for key in (b"sk-one", b"sk-two") if key in sent} for sent in connections]
    assert all(len(found) <= 1 for found in keys)
    assert {b"sk-one"} in keys
    assert {b"sk-two"} in keys
    with sqlite3.connect(database) as connection:
        tables = [t for (t,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            columns = [c[1] for c in connection.execute(f"PRAGMA table_info({table})")]
            if "tenant" not in columns or table.startswith(("sqlite_", "originals_fts")):
                continue
            # what requests said stands in bundles, of which there may be more or fewer
            each = "sum(length(refs) + 1)" if table == "inspected_parts" else "count(*)"
            counts = connection.execute(f"SELECT tenant, {each} FROM {table} GROUP BY tenant").fetchall()
            assert len(counts) in (0, 2), table
            assert len({n for _, n in counts}) <= 1, table
    connection.close()
    raw = database.read_bytes() + Path(f"{database}-wal").read_bytes() if Path(f"{database}-wal").exists() else b""
    assert b"sk-one" not in raw


@SHARED
@pytest.mark.parametrize("rules", [pytest.param(EARLY | {"summaries": {"wait": 20}}, id="waiting")])
@pytest.mark.requirement("P8", "P2", "R.24", "R.51")
async def test_twenty_parallel_requests_at_the_trigger_make_one_batch_with_one_summary(both: Both) -> None:
    talk = both.talk("sim", seed=1, start=opening()[:1])
    talk.grow(9)
    talk.add_question()
    await talk.ask()
    while talk.actions()[-1] == "none":
        edge = [*talk.messages]
        talk.add_answer()
        talk.add_question()
        await talk.ask()
    # The request before was the last without an edit: a second conversation gets just as far, then 20 go at once.
    both.simulator.forget()
    twin = both.talk("twin", seed=1, start=[{"role": "system", "content": "Another."}, *copy.deepcopy(edge[1:])])
    twin.messages[1]["content"] = "!" + twin.messages[1]["content"][1:]
    await twin.ask()
    assert twin.actions() == ["none"]
    twin.turns = talk.turns - 1
    twin.add_answer()
    twin.add_question()
    twin.messages[-1]["content"] += prose(132, seed=7)  # well over the trigger, whatever the words of each are
    asked = [
        twin.messages if n % 2 else [*twin.messages[:-1], {"role": "user", "content": prose(264, seed=n)}]
        for n in range(20)
    ]
    await asyncio.gather(*(twin.ask(messages) for messages in asked))
    arrays = both.arrays("twin")[1:]
    assert len(arrays) == 20
    assert twin.actions()[1:] == ["compact=1"] * 20
    assert len({json.dumps(a[:-1]) for a in arrays}) == 1, "not all requests got the same batch"
    most = (
        1 if len(both.target.weirs) == 1 else 2 * len(both.target.weirs)
    )  # processes do not wait for one another's calls
    assert 1 <= len(answered(both.simulator, "summariser")) <= most
    for each in both.target.weirs:
        await each.stored()
    conversation = twin.headers[-1]["x-weir-conversation"]
    versions = both.rows(
        "SELECT b.version FROM branches b JOIN conversations c ON c.id = b.conversation AND c.tenant = b.tenant "
        f"WHERE c.name = '{conversation}'"
    )
    assert versions in ([(1,)], [(len(both.target.weirs),)])  # the other one may save the state of what it found


@pytest.mark.requirement("R.24")
async def test_who_commits_second_plans_again_on_what_the_first_has_decided(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, beaten, theirs = Store.commit, list[Change](), "What another process has summed up."

    async def commit_second(store: Store, change: Change) -> int:
        if change.cut is not None and not beaten:
            beaten.append(change)
            await commit(store, msgspec.structs.replace(change, cut=replace(change.cut, text=theirs)))
        return await commit(store, change)

    monkeypatch.setattr(Store, "commit", commit_second)
    talk = both.talk("sim", seed=1)
    talk.grow(9)
    while not beaten:
        await talk.chat(1)
    assert theirs in json.dumps(both.arrays("sim")[-1])
    assert both.rows("SELECT version FROM branches") == [(1,)]
