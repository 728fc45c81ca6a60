import asyncio
import fcntl
import re
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from policies.ledger import Prepared
from proxy.store import (
    Store,
    migrations,
    schema,
)
from proxy.store.budgets import Limit
from proxy.store.records import CorruptStore, KeyRow, SchemaTooNew, StoreError, StoreUnavailable
from proxy.store.sqlite import SqliteDatabase
from tests.proxy.store_rows import TO_THE_FIRST_SCHEMA, change, eviction, exchange, note, summary, url


def beside(path: Path) -> list[Path]:
    return [p for p in path.parent.iterdir() if p.name.startswith(path.name)]


def wal_bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in beside(path) if p.name.endswith("-wal"))


@pytest.mark.requirement("P9")
async def test_the_revisions_make_exactly_the_tables_that_the_code_knows(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        migrations.upgrade(connection)

    def ours(_: object, name: str | None, kind: str, *__: object) -> bool:
        return not (kind == "table" and (name or "").startswith("originals_fts"))

    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": ours, "compare_type": True})
        assert context.get_current_revision() == schema.HEAD
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


@pytest.mark.requirement("R.67")
async def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    await (await Store.open(url(path))).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    for read_only in (False, True):
        with pytest.raises(SchemaTooNew, match=r"9999.*update Weir"):
            await Store.open(url(path), read_only=read_only)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]
    connection.close()


@pytest.mark.requirement("R.67")
async def test_garbage_and_foreign_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"this is not a database at all" * 200)
    with pytest.raises(CorruptStore):
        await Store.open(url(garbage))
    assert garbage.read_bytes() == b"this is not a database at all" * 200
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    connection.close()
    with pytest.raises(CorruptStore, match="other program"):
        await Store.open(url(foreign))


@pytest.mark.requirement("R.66")
async def test_a_store_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"cannot be written .*; choose one .* with --store"):
        await Store.open(url(tmp_path / "no" / "such" / "w.db"))
    with pytest.raises(StoreUnavailable, match="no database"):
        await Store.open(url(tmp_path / "none.db"), read_only=True)
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(StoreError, match="cannot be a mysql"):
        await Store.open("mysql://u:secret@h/d")
    with pytest.raises(StoreError, match="cannot be read"):
        await Store.open("nonsense")


async def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "with space and #.db"
    store = await Store.open(url(path))
    await store.record([exchange(1)])
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in beside(path)}
    assert set(modes) >= {path.name, f"{path.name}.lock", f"{path.name}-wal", f"{path.name}-shm"}
    assert set(modes.values()) == {0o600}
    await store.close()


@pytest.mark.requirement("R.69")
async def test_two_who_write_one_file_take_turns_and_wait_no_longer_than_they_may(tmp_path: Path) -> None:
    """Where one writes while the other checkpoints, most SQLite libraries may corrupt the file."""
    path = tmp_path / "w.db"
    server = await Store.open(url(path))
    command = await Store.open(url(path), busy_timeout=1.0)
    assert (server.journal, server.notices) == ("wal", ())
    await server.commit(change(0))
    key = KeyRow(name="bot", digest="d", policy=None, models=(), allow=(), created=1.0)
    await command.add_key(key)
    assert await server.list_keys() == [key]
    await asyncio.gather(*(store.record([exchange(n)]) for n, store in enumerate([server, command] * 20)))
    assert wal_bytes(path) > 0
    with path.with_name(f"{path.name}.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match="another process writes"):
            await command.revoke_key("bot", 2.0)
        with pytest.raises(StoreUnavailable, match="another process writes"):
            await command.checkpoint()
    assert await server.checkpoint() is True
    assert wal_bytes(path) == 0
    await command.close()
    await server.close()


@pytest.mark.requirement("S.2")
async def test_an_error_tells_no_content(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    with pytest.raises(StoreError) as refused:
        await store.record([exchange(1, tenant=None)])  # type: ignore[arg-type]  # what a bug would do
    text = f"{refused.value!r} {refused.value.__cause__!r}"
    assert "gpt-x" not in text
    assert "INSERT" not in text
    assert refused.value.__suppress_context__
    await store.close()


TENANTED = (
    "conversations",
    "branches",
    "chains",
    "edits",
    "cuts",
    "checkpoints",
    "notes",
    "summaries",
    "originals",
    "removed",
    "exchanges",
    "evictions",
    "audit",
)


@pytest.mark.requirement("S.1", "P7")
async def test_every_statement_on_conversations_names_the_tenant(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    database = store._database
    assert isinstance(database, SqliteDatabase)
    seen: list[str] = []

    for engine in (database._reader, database._writer):
        assert engine is not None
        sa.event.listen(engine.sync_engine, "before_cursor_execute", lambda *a: seen.append(a[2]))
    given = msgspec.structs.replace(change(0), evictions=(eviction(1),))
    await store.record([exchange(1, end=b"x" * 16, length=1)])
    await store.commit(given)
    found = await store.find("tenant-a", [b"x" * 16])
    assert found is not None
    assert given.cut is not None
    await store.fork(found, msgspec.structs.replace(found, branch="b2"), at=1.0)
    await store.named("tenant-a", "c1")
    await store.original("tenant-a", given.originals[0].ref)
    await store.covered("tenant-a", given.cut.ref)
    await store.search("tenant-a", "output")
    await store.conversations("tenant-a")
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    await store.timeline(row)
    await store.checkpoints(row)
    await store.evictions("tenant-a", conversation=row)
    await store.count_evictions(row)
    await store.record([msgspec.structs.replace(exchange(2), parent_conversation="c0")])
    await store.search("tenant-a", "output", conversation=row.id)
    await store.checkpoint_at(row, 1)
    await store.latest_checkpoint("tenant-a", "c1")
    await store.newest_branch(row)
    await store.prepare("tenant-a", "b1", Prepared(2, b"p", "text"))
    await store.want("tenant-a", "b1", "compact", 1.0)
    await store.add_notes("tenant-a", row.id, [note(n) for n in range(502)])
    await store.notes("tenant-a", row.id)
    await store.keep_summary("tenant-a", summary(1))
    await store.summary("tenant-a", summary(1).key)
    await store.removed(row)
    await store.export(row)
    await store.rollback(row, version=0, at=9000.0)
    await store.close_conversation(row, 9001.0)
    await store.delete(row)
    await store.audit("tenant-a", conversation="c1", kind="save")
    await store.close()
    ours = [s for s in seen if re.search(rf"\b({'|'.join(TENANTED)})\b", s)]
    assert len(ours) > 70
    indexing = ("max(originals.id)", "WHERE originals.id >", "originals_fts (rowid, tenant, text)")
    unscoped = [s for s in ours if not scoped(s) and not any(part in s for part in indexing)]
    assert unscoped == []


def scoped(statement: str) -> bool:
    if statement.startswith("INSERT") and "SELECT" not in statement:
        return "tenant" in statement
    return re.search(r"tenant = \?", statement) is not None


def in_the_first_schema(path: Path) -> None:
    """Make of a database one of the first release."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in TO_THE_FIRST_SCHEMA:
            connection.execute(statement)
        connection.commit()


@pytest.mark.requirement("R.67")
async def test_a_database_of_the_first_release_is_brought_up_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    store = await Store.open(url(path))
    tenant = "ab" * 16
    rows = [exchange(number, tenant=tenant) for number in range(3)]
    await store.record([msgspec.structs.replace(row, usage_prompt=10, usage_completion=5) for row in rows])
    await store.add_key(KeyRow(name="bot", digest="d", policy=None, models=("m",), allow=(), created=1.0))
    before = await store.usage(None, since=0)
    await store.close()
    in_the_first_schema(path)
    with pytest.raises(StoreError, match=r"schema 1, and this Weir has 2: run `weir db migrate`"):
        await Store.open(url(path), read_only=True)
    store = await Store.open(url(path))
    assert await store.usage(None, since=0) == before
    (taken,) = await store.usage(None, since=0, by="key")
    assert (taken.group, taken.requests, taken.prompt + taken.completion) == (tenant, 3, 45)
    limit = Limit(scope="key", name=tenant, since=0, tokens=100)
    assert [use.tokens for use in await store.spent([limit], at=1.0)] == [45]
    (key,) = await store.list_keys()
    assert (key.models, key.team, key.budgets, key.tokens_per_minute) == (("m",), None, None, None)
    await store.close()
    await (await Store.open(url(path), read_only=True)).close()
