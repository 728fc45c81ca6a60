"""The way from schema 0010: what a database held before rows became shorter is the same after it, on both databases."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.ext.asyncio import create_async_engine

from policies.ledger import Edit, EditKind
from proxy.store import AuditType, Store, ledger, migrations
from proxy.store.chain import GENESIS, AuditEvent, linked
from proxy.store.packing import pack_message
from proxy.store.usage import UsageRow
from tests.proxy.store_rows import digest
from tests.proxy.store_rows import url as sqlite_url

TENANT, OTHER = "4cb8843d2164dd76f13c4f6a3e960c35", "somebody-by-name"
CONVERSATION, BRANCH, REQUEST = "conv-cbc9753ecb6830312d75", "br-cbc9753ecb6830312d75", "req_520746284824ab4e0000016b"
DETAIL = {
    "buckets": {"system": 15},
    "cost": 0.5,
    "cost_saved": 0.25,
    "summarizer": {"asked": 100, "answered": 20, "dollars": 0.125},
    "said": "\ud800 \x01",
}
BODY = b'{"role":"tool","content":"the canary sings"}'
TEXTS = ("[weir: result of read_file(a) removed. Archived as 5f04caf29bf8]", "\x01 looks packed \ud800", "")


def old_edit(position: int, text: str) -> Edit:
    return Edit(digest("m", position), 0, EditKind.EVICT, text, f"{position:012x}", 7, digest("c", position), 3)


def fill(connection: sa.Connection, tenant: str, mark: str) -> None:
    """One conversation as schema 0010 kept it."""
    conversation, branch, request = (f"{each}{mark}" for each in (CONVERSATION, BRANCH, REQUEST))

    def add(table: str, **row: object) -> None:
        names = ", ".join(row)
        connection.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({', '.join(f':{n}' for n in row)})"), row)

    mine: dict[str, Any] = {"tenant": tenant, "branch": branch}
    counts = {"tokens_before": 10, "tokens_after": 9, "token_limit": 8000, "zone": "green", "actions": "none"}
    add(
        "conversations",
        tenant=tenant,
        id=conversation,
        name=f"name{mark}",
        created=1.0,
        updated=2.0,
        **{"model": "gpt-x", "requests": 1, **counts},
    )
    add("branches", **mine, conversation=conversation, version=1, longest=1, created=1.0, updated=2.0)
    add("chains", **mine, hash=digest("chain", 1), length=1, at=2.0)
    add(
        "exchanges",
        **{**mine, **counts, "id": request, "conversation": conversation, "name": f"name{mark}", "at": 2.0},
        model="gpt-x",
        policy="balanced",
        chain_end=digest("chain", 1),
        length=1,
        status=200,
        outcome="ok",
        pressure=0.25,
        overhead_ms=1.0,
        duration_ms=2.0,
        attempts=1,
        detail=json.dumps(DETAIL, separators=(",", ":")),
    )
    for position, text in enumerate(TEXTS):
        each, said = old_edit(position, text), text.encode("utf-8", "surrogatepass")
        add(
            "edits",
            **{**mine, "version": 1, "position": position, "digest": each.digest, "occurrence": 0, "kind": "evict"},
            text=said,
            ref=each.ref,
            tokens=7,
            chain=each.chain,
            length=3,
            sha=ledger._edit_sha(each.digest, 0, "evict", said, each.ref, 7, each.chain),
        )
    add(
        "originals",
        tenant=tenant,
        ref="5f04caf29bf8",
        role="tool",
        tokens=5,
        size=len(BODY),
        at=1.0,
        sha=sha256(BODY).digest(),
        body=pack_message(BODY, "the canary sings"),
        quarantined=False,
    )
    add("removed", **mine, ref="5f04caf29bf8")
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("UPDATE originals SET words = to_tsvector('simple', 'the canary sings')"))
    events = [
        AuditEvent(
            tenant=tenant,
            at=float(n),
            type=AuditType.SAVE,
            conversation=conversation,
            branch=branch,
            request=request,
            facts={"version": n},
        )
        for n in range(3)
    ]
    for row in linked(events, seq=0, prev=GENESIS):
        add("audit", **{name: getattr(row, name) for name in row.__slots__})


def before(connection: sa.Connection) -> None:
    """A database as the release with schema 0010 made and filled it: one whose tenant is a key's, one by name."""
    config = Config()
    config.set_main_option("script_location", str(migrations.HERE))
    config.attributes["connection"] = connection
    command.upgrade(config, "0010")
    fill(connection, TENANT, "")
    fill(connection, OTHER, "-not-hex")


async def check(store: Store, tenant: str, mark: str) -> None:
    """Everything of one conversation is what was put there."""
    row = await store.conversation(tenant, f"name{mark}")
    assert row is not None
    assert (row.id, row.tenant) == (f"{CONVERSATION}{mark}", tenant)
    [told] = await store.timeline(row)
    assert (told.id, told.name, told.branch, told.detail) == (f"{REQUEST}{mark}", row.name, f"{BRANCH}{mark}", DETAIL)
    found = await store.find(tenant, [digest("chain", 1)])
    assert found is not None
    assert (found.branch, found.conversation) == (f"{BRANCH}{mark}", row.id)
    assert found.edits == tuple(old_edit(position, text) for position, text in enumerate(TEXTS))
    events = await store.audit(tenant, conversation=row.id)
    assert [(e.conversation, e.branch, e.request, json.loads(e.facts)) for e in events] == [
        (row.id, found.branch, told.id, {"version": n}) for n in (2, 1, 0)
    ]
    [one] = await store.search(tenant, "canary")
    assert one.body == BODY
    [used] = await store.usage(tenant, since=0.0, by="conversation")
    assert used == UsageRow(
        tenant=tenant,
        group=row.name,
        requests=1,
        failed=0,
        tokens_before=10,
        tokens_after=9,
        prompt=0,
        cached=0,
        completion=0,
        priced=1,
        cost=0.5,
        cost_saved=0.25,
        summarizer_tokens=120,
        summarizer_cost=0.125,
        first=2.0,
        last=2.0,
    )
    assert await store.delete(row)
    assert await store.search(tenant, "canary") == []


async def upgrade(url: str, filled: Callable[[], Any]) -> None:
    await filled()
    store = await Store.open(url)
    chains = (await store.verify()).chains
    assert sorted((c.tenant, c.good, c.broken) for c in chains) == [(TENANT, 3, None), (OTHER, 3, None)]
    for tenant, mark in ((TENANT, ""), (OTHER, "-not-hex")):
        await check(store, tenant, mark)
    assert store.damaged == 0
    await store.close()


@pytest.mark.requirement("P9", "R.67", "A0.138")
async def test_what_sqlite_held_before_is_the_same_in_shorter_rows(tmp_path: Path) -> None:
    path = tmp_path / "w.db"

    def fill_file() -> None:
        engine = sa.create_engine(f"sqlite:///{path}")
        with engine.begin() as connection:
            before(connection)
        engine.dispose()

    await upgrade(sqlite_url(path), lambda: asyncio.to_thread(fill_file))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert {t for (t,) in connection.execute("SELECT tenant FROM audit")} == {OTHER, bytes.fromhex(TENANT)}


@pytest.mark.timeout(300)
@pytest.mark.requirement("P9", "R.67", "A0.138")
async def test_what_postgresql_held_before_is_the_same_in_shorter_rows(postgres_url: str) -> None:
    async def fill_server() -> None:
        engine = create_async_engine(postgres_url.replace("postgresql:", "postgresql+asyncpg:"))
        async with engine.begin() as connection:
            await connection.run_sync(before)
        await engine.dispose()

    await upgrade(postgres_url, fill_server)
