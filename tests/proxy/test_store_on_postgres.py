"""The store on a real PostgreSQL server: migrations, audit and health, and a whole Weir on top of it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from policies.ledger import Trend
from policies.messages import Body, Message, Transcript, chain_of, seed_of
from proxy.conversation.book import Conversations
from proxy.store import Store, archive
from proxy.store.budgets import Limit
from proxy.store.packing import Packed, unpack
from proxy.store.records import KeyRow
from proxy.store.schema import HEAD
from tests.functional.harness import COUNTER, Talk, weir
from tests.postgres import Postgres
from tests.proxy.store_rows import TO_THE_FIRST_SCHEMA, change, exchange, original, saved
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

TENANT = "tenant-a"


@pytest.fixture
async def url(postgres: Postgres) -> AsyncIterator[str]:
    """A database for this test alone, with its schema."""
    name = await postgres.with_schema()
    yield postgres.url(name)
    await postgres.drop(name)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = await Store.open(url)
    yield opened
    await opened.close()


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    """Another way in: somebody who has the password."""
    opened = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
    yield opened
    await opened.dispose()


async def run(engine: AsyncEngine, *statements: str) -> None:
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(sa.text(statement))


async def test_the_schema_is_made_once_and_is_the_newest(postgres_url: str) -> None:
    opened = await asyncio.gather(*(Store.open(postgres_url) for _ in range(3)))
    assert {each.schema for each in opened} == {HEAD}
    for each in opened:
        await each.ping()
        await each.close()

    def tables(connection: sa.Connection) -> set[str]:
        return set(sa.inspect(connection).get_table_names())

    engine = create_async_engine(postgres_url.replace("postgresql:", "postgresql+asyncpg:"))
    async with engine.connect() as connection:
        assert {"audit", "alerts", "health_snapshots"} <= await connection.run_sync(tables)
    await engine.dispose()


@pytest.mark.requirement("R.67")
async def test_a_database_of_the_first_release_is_brought_up_by_several_at_once(url: str, engine: AsyncEngine) -> None:
    tenant = "ab" * 16
    store = await Store.open(url)
    rows = [exchange(number, tenant=tenant) for number in range(3)]
    await store.record([msgspec.structs.replace(row, usage_prompt=10, usage_completion=5) for row in rows])
    await store.add_key(KeyRow(name="bot", digest="d", policy=None, models=("m",), allow=(), created=1.0))
    before = await store.usage(None, since=0)
    await store.close()
    await run(engine, *TO_THE_FIRST_SCHEMA)
    first, *others = await asyncio.gather(*(Store.open(url) for _ in range(3)))
    for each in others:
        await each.close()
    assert await first.usage(None, since=0) == before
    limit = Limit(scope="key", name=tenant, since=0, tokens=100)
    assert [use.tokens for use in await first.spent([limit], at=1.0)] == [45]
    (key,) = await first.list_keys()
    assert (key.models, key.team, key.budgets, key.tokens_per_minute) == (("m",), None, None, None)
    await first.add_key(
        KeyRow(name="two", digest="e", policy=None, models=(), allow=(), created=2.0, budgets=("day,tokens=5",))
    )
    assert [each.budgets for each in await first.list_keys()] == [None, ("day,tokens=5",)]
    await first.close()


@pytest.mark.requirement("S.26")
async def test_a_large_original_is_compressed_off_the_event_loop(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, within = 0, list[int]()

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    pack = archive.pack

    def counted(value: object, *, level: int) -> bytes:
        before = ticks
        packed = pack(value, level=level)
        within.append(ticks - before)
        return packed

    monkeypatch.setattr("proxy.store.archive.pack", counted)
    ticking = asyncio.create_task(tick())
    given = original(0, text=random.Random(1).randbytes(4_000_000).hex())
    await store.commit(msgspec.structs.replace(change(0), originals=(given,), covered=(given.ref,)))
    ticking.cancel()
    assert len(within) == 1
    assert within[0] > 10, "the event loop waited"
    assert await store.original(TENANT, given.ref) == given


@pytest.mark.requirement("P9")
async def test_two_servers_that_archive_the_same_keep_it_once(store: Store, url: str, engine: AsyncEngine) -> None:
    other = await Store.open(url)
    for number in range(8):
        given = tuple(original(n, of=f"batch {number}") for n in range(3))
        mine, theirs = (
            msgspec.structs.replace(
                change(number, branch=branch, conversation=branch), originals=given, cut=None, edits=()
            )
            for branch in ("b1", "b2")
        )
        await asyncio.gather(store.commit(mine), other.commit(msgspec.structs.replace(theirs, originals=given[1:])))
    await other.close()
    async with engine.connect() as connection:
        framed = (
            (await connection.execute(sa.text("SELECT ref FROM originals WHERE frame IS NOT NULL"))).scalars().all()
        )
        bodies = (await connection.execute(sa.text("SELECT body FROM frames"))).scalars().all()
    assert sorted(ref for body in bodies for ref in unpack(body, dict[str, Packed])) == sorted(framed)
    for number in range(8):
        for given in (original(n, of=f"batch {number}") for n in range(3)):
            assert await store.original(TENANT, given.ref) == given


@pytest.mark.requirement("A0.25", "R.72")
async def test_what_another_server_saves_meanwhile_does_not_hide_how_a_conversation_has_grown(
    store: Store, url: str
) -> None:
    other = await Store.open(url)
    grown = [Trend(raw=1000 * n, length=n, at=float(n)) for n in (1, 2, 3)]
    await store.record([msgspec.structs.replace(exchange(0, at=1.5), trend=grown[0])])
    await other.commit(saved(0, at=5000.0))
    await store.record([msgspec.structs.replace(exchange(2, at=3.5), trend=grown[2])])
    await other.record([msgspec.structs.replace(exchange(1, at=6000.0), trend=grown[1])])
    found = await other.branch(TENANT, "b1")
    await other.close()
    assert found is not None
    assert found.trend == grown[2]


@pytest.mark.requirement("A0.138", "A0.124", "A0.127")
async def test_a_whole_weir_keeps_conversations_health_and_audit_on_it(url: str) -> None:
    async with serve_simulator(SimulatorSettings(window=8_192), counter=COUNTER) as simulator:
        talk: Any = None
        for _ in range(2):  # the second one goes on from what the first has stored
            async with weir(simulator.base_url, url, window=8_192) as target:
                client = target.client(default_headers={"x-weir-conversation": "agent"})
                talk = Talk(client) if talk is None else replace(talk, client=client)
                await talk.agent(14)
                await target.stored()
                async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
                    health = (await http.get(f"{target.root}/weir/conversations/agent/health")).json()
                    audit = (await http.get(f"{target.root}/weir/conversations/agent/audit")).json()
    assert any("compact" in actions or "evict" in actions for actions in talk.actions())
    assert len(health["history"]) == 28
    assert health["trend"]["samples"] == 10
    assert {"eviction", "pressure_change"} & {row["type"] for row in audit["events"]}
    assert json.dumps(audit["events"]).count("alpha") == 0
    opened = await Store.open(url, read_only=True)
    audited = await opened.verify()
    await opened.close()
    assert audited
    assert all(chain.broken is None for chain in audited)


@pytest.mark.requirement("R.75")
async def test_a_summary_is_prepared_by_one_server_and_by_another_once_that_one_is_gone(
    url: str, store: Store, engine: AsyncEngine
) -> None:
    await store.record([exchange(1)])
    other = await Store.open(url)
    branch = exchange(1).branch
    assert await store.claim(TENANT, branch, 60.0)
    assert not await other.claim(TENANT, branch, 60.0)
    await store.release(TENANT, branch)
    assert await other.claim(TENANT, branch, 60.0)
    assert not await store.claim(TENANT, branch, 60.0)
    await run(engine, "UPDATE branches SET preparing = preparing - 61")  # the server that had it stopped
    assert await store.claim(TENANT, branch, 60.0)
    await other.close()


@pytest.mark.requirement("A4.25")
async def test_vectors_are_kept_found_by_likeness_and_go_with_their_texts(store: Store) -> None:
    made = msgspec.structs.replace(change(0), conversation="conv-1", name="trip")
    await store.commit(made)
    texts = await store.lacking_vectors(made.tenant, "conv-1", "m", limit=10)
    assert texts
    given = {ref: [1.0 + n, 1.0, 0.0] for n, ref in enumerate(texts)} | {"gone": [1.0]}
    await store.add_vectors(made.tenant, "m", given)
    await store.commit(change(0, of="another", branch="b2", conversation="conv-2"))
    others = await store.lacking_vectors(made.tenant, "conv-2", "m", limit=10)
    assert others.keys().isdisjoint(texts)
    await store.add_vectors(made.tenant, "m", {ref: [1.0, 1.0, 0.0] for ref in others})
    await store.commit(change(0, tenant="another", of="tenant-ab10"))  # the same texts
    await store.add_vectors("another", "m", {ref: [0.0, 0.0, 1.0] for ref in texts})
    near = await store.nearest(made.tenant, "conv-1", "m", [2.0, 2.0, 0.0], limit=5)
    assert {each.ref for each, _ in near} == set(texts), "of its own conversation alone"
    assert near[0][0].ref == next(iter(texts))
    assert near[0][1] == pytest.approx(1.0)
    assert await store.lacking_vectors(made.tenant, "conv-1", "m", limit=10) == {}
    assert await store.nearest("another", "conv-1", "m", [2.0, 2.0, 0.0], limit=5) == []
    row = await store.conversation(made.tenant, "trip")
    assert row is not None
    await store.delete(row, at=9.0)
    assert await store.nearest(made.tenant, "conv-1", "m", [2.0, 2.0, 0.0], limit=5) == []


@pytest.mark.requirement("A0.112", "S.6")
async def test_what_one_server_has_deleted_another_does_not_go_on_with(url: str, store: Store) -> None:
    other = await Store.open(url)
    messages = tuple(Message(role=role, digest=role.encode().ljust(32), tokens=5) for role in ("user", "assistant"))
    transcript = Transcript(messages, lambda _: Body(text=""), chain_of(TENANT, messages, 0))
    here, there = Conversations(store), Conversations(other)
    for each in (here, there):
        found = await each.recognise(TENANT, transcript, seed=seed_of(TENANT), name="trip")
        view = await each.view(found.thread, 8_192)
        await each.announce(found.thread, each.arrival(found.thread, view, transcript, request="r", model="m"))
    row = await store.conversation(TENANT, "trip")
    assert row is not None
    await store.delete(row, at=9.0)
    again = await there.recognise(TENANT, transcript, seed=seed_of(TENANT), name="trip")
    assert again.thread.branch.branch != found.thread.branch.branch
    assert again.length == 0
    await other.close()
