import asyncio
import fcntl
import hmac
import json
import logging
import re
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from click.testing import CliRunner
from sqlalchemy.dialects import postgresql

from policies.ledger import Prepared
from proxy.cli.db import db
from proxy.store import (
    Store,
    answers,
    archive,
    audit,
    budgets,
    checkpoints,
    configuration,
    conversations,
    exchanges,
    ledger,
    migrations,
    notes,
    schema,
    transaction,
    usage,
)
from proxy.store.budgets import Limit
from proxy.store.records import CorruptStore, KeyRow, SchemaTooNew, StoreError, StoreUnavailable
from proxy.store.sqlite import SqliteDatabase
from tests.proxy.store_rows import change, eviction, exchange, note, original, summary, url


def beside(path: Path) -> list[Path]:
    return [p for p in path.parent.iterdir() if p.name.startswith(path.name)]


def wal_bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in beside(path) if p.name.endswith("-wal"))


@pytest.mark.requirement("P9")
def test_the_schema_that_tests_start_from_is_the_one_that_is_made() -> None:
    dumps = []
    for make in (schema.ensure.__wrapped__, schema.ensure, schema.ensure):  # type: ignore[attr-defined]
        with sa.create_engine("sqlite://").begin() as connection:
            make(connection)
            made = connection.exec_driver_sql("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY 1, 2").all()
            tables = sa.inspect(connection).get_table_names()
            dumps.append((made, {name: connection.exec_driver_sql(f"SELECT * FROM {name}").all() for name in tables}))
    assert dumps[0] == dumps[1] == dumps[2]


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
async def test_a_database_without_a_schema_and_one_of_before_the_first_release_are_refused_to_a_reader(
    tmp_path: Path,
) -> None:
    path = tmp_path / "w.db"
    path.touch()
    with pytest.raises(StoreError, match=r"no tables.*weir db migrate"):
        await Store.open(url(path), read_only=True)
    await (await Store.open(url(path))).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0026'")
    connection.close()
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"0026.*before the first release.*--store, store.url"):
            await Store.open(url(path), read_only=read_only)


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


async def test_the_wal_does_not_grow_without_end(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    store = await Store.open(url(path))
    largest = 0
    for step in range(24):
        await store.commit(change(step, count=60, with_cut=False, of="x" * 9000 + str(step)))
        await store.record([exchange(step, end=bytes([step]) * 60_000, length=step + 1)])
        await store.record([exchange(100 + step * 10 + n, end=bytes([n]) * 90_000, length=1) for n in range(9)])
        largest = max(largest, wal_bytes(path))
    assert path.stat().st_size > 16 << 20
    assert largest < 8 << 20
    await store.close()


async def test_a_reader_sees_commits_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    server = await Store.open(url(path))
    reader = await Store.open(url(path), read_only=True)
    await server.commit(change(0))
    branch = await reader.branch("tenant-a", "b1")
    assert branch is not None
    assert branch.version == 1
    await reader.ping()
    for write in (reader.commit(change(1)), reader.record([exchange(1)]), reader.secret()):
        with pytest.raises(StoreUnavailable) as refused:
            await write
        assert refused.value.reason == "read_only"
    await reader.close()
    await server.close()


async def test_a_store_in_memory_lives_as_long_as_it_is_open() -> None:
    store = await Store.open("sqlite+aiosqlite://")
    assert store.journal == "memory"
    await store.commit(change(0))
    await store.record([exchange(1)])
    await store.ping()
    assert len(await store.conversations(None)) == 1
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.ping()


@pytest.mark.requirement("S.2")
async def test_no_file_has_the_plain_key_and_no_log_the_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, logger="sqlalchemy")  # its DEBUG shows rows
    path = tmp_path / "w.db"
    store = await Store.open(url(path))
    plain = b"sk-weir-a-secret-of-the-client"
    hashed = hmac.new(await store.secret(), plain, "sha256").hexdigest()
    await store.add_key(KeyRow(name="bot", digest=hashed, policy=None, models=(), allow=(), created=1.0))
    given = msgspec.structs.replace(change(0, tenant=hashed), originals=(original(0, text="about the zeppelin"),))
    await store.commit(given)
    await store.record([exchange(1, tenant=hashed, end=b"e" * 16, length=1)])
    assert len(await store.search(hashed, "zeppelin")) == 1
    assert await store.find(hashed, [b"e" * 16]) is not None
    written = b"".join(p.read_bytes() for p in beside(path))
    assert plain not in written
    assert b"zeppelin" in written
    assert hashed.encode() in written
    assert "sqlalchemy.engine.Engine" in {r.name for r in caplog.records}
    assert not re.search(r"zeppelin|\[evicted|sk-weir", caplog.text)
    await store.close()


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


STATEMENTS = (
    *(answers, archive, audit, budgets, checkpoints, notes, configuration, conversations, exchanges, ledger, usage),
    transaction,
)


def statements() -> Iterator[tuple[str, sa.ClauseElement]]:
    for module in STATEMENTS:
        for name, value in vars(module).items():
            if isinstance(value, sa.Executable) and isinstance(value, sa.ClauseElement) and name.isupper():
                yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize(("name", "statement"), list(statements()))
def test_every_prepared_statement_can_be_written_for_postgresql(name: str, statement: sa.ClauseElement) -> None:
    dialect: sa.Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy leaves it bare
    assert str(statement.compile(dialect=dialect)), name


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


def test_weir_db_migrate_makes_a_database_and_is_quiet_the_second_time(tmp_path: Path) -> None:
    runner = CliRunner()
    there = url(tmp_path / "w.db")
    for _ in range(2):
        result = runner.invoke(db, ["migrate", "--store", there])
        assert (result.exit_code, result.output) == (0, f"Schema {schema.HEAD}, up to date (journal: wal).\n")
    told = runner.invoke(db, ["migrate", "--store", there, "--json"])
    assert json.loads(told.output) == {"schema": schema.HEAD, "journal": "wal", "notices": []}
    failed = runner.invoke(db, ["migrate", "--store", url(tmp_path / "no" / "w.db")])
    assert failed.exit_code == 1
    assert "cannot be written" in failed.output
    assert "Example:" in runner.invoke(db, ["migrate", "--help"]).output


def in_the_first_schema(path: Path) -> None:
    """Make of a database one of the first release."""
    with closing(sqlite3.connect(path)) as connection:
        for table in ("key_days", "reservations"):
            connection.execute(f"DROP TABLE {table}")
        for name in ("tokens_per_minute", "team", "budgets"):
            connection.execute(f"ALTER TABLE keys DROP COLUMN {name}")
        connection.execute("UPDATE alembic_version SET version_num = '1'")
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
