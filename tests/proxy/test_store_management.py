"""What the planning leaves behind: growth, evictions and regret, policies; and the way there from the first schema."""

import importlib
import io
import json
import pkgutil
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations

from policies.pressure import Trend
from policies.settings import ContextSettings
from proxy.store import Change, PolicyRow, Store, ledger, migrations
from proxy.store.migrations import versions
from proxy.store.schema import REVISIONS
from tests.proxy.store_rows import chain, change, digest, eviction, exchange, saved, url

RULES = ContextSettings().trend


def trend(*sizes: int) -> Trend:
    """A conversation after requests of these sizes, one a second."""
    state = Trend()
    for at, size in enumerate(sizes):
        buckets = {"history": size}
        state = state.advance(raw=size, length=at + 1, buckets=buckets, zone="green", at=float(at + 1), rules=RULES)
    return state


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"))
    yield opened
    await opened.close()


@pytest.mark.requirement("A0.25")
async def test_a_branch_is_found_with_the_growth_of_its_last_exchange(store: Store) -> None:
    hashes = chain(3)
    grown = [trend(1000), trend(1000, 3000), trend(1000, 3000, 3500)]
    for number, state in enumerate(grown[:2]):
        await store.record([replace(exchange(number, end=hashes[number], length=number + 1), trend=state)])
    found = await store.find("tenant-a", hashes)
    assert found is not None
    assert found.trend == grown[1]
    await store.record([exchange(7, end=hashes[1], length=2)])
    await store.record([replace(exchange(2, end=hashes[2], length=3, at=5000.0), trend=grown[2])])
    await store.record([replace(exchange(3, end=hashes[2], length=3, at=4000.0), trend=grown[0])])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == grown[2]


@pytest.mark.requirement("A0.25")
async def test_what_was_saved_after_an_answer_does_not_hide_the_growth_that_it_ended(store: Store) -> None:
    """Whatever else was done with the branch meanwhile, it is the newer reading that is kept."""
    grown = [trend(1000), trend(1000, 3000), trend(1000, 3000, 3500)]
    await store.record([replace(exchange(0, at=10.0), trend=grown[0])])
    await store.commit(saved(0, at=5000.0))
    await store.record([replace(exchange(1, at=20.0), trend=grown[1])])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == grown[1]
    await store.record([replace(exchange(2, at=30.0), trend=grown[2]), replace(exchange(3, at=40.0), trend=grown[0])])
    await store.record([replace(exchange(4, at=6000.0), trend=grown[1])])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == grown[2]


@pytest.mark.requirement("A0.25")
async def test_of_a_batch_the_newest_growth_is_kept_and_a_damaged_one_is_none(store: Store, tmp_path: Path) -> None:
    rows = [replace(exchange(n), trend=trend(*range(1000, 2000 + n, 100))) for n in range(1, 4)]
    await store.record([*rows, exchange(9)])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == rows[-1].trend
    with sqlite3.connect(tmp_path / "w.db") as connection:
        connection.execute("UPDATE branches SET trend = '{]'")
    connection.close()
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == Trend()


@pytest.mark.requirement("A0.148")
async def test_an_exchange_keeps_what_was_decided(store: Store) -> None:
    detail = {"buckets": {"system": 40, "history": 900}, "events": [{"kind": "zone_change", "new": "red"}]}
    given = replace(
        exchange(1),
        action="emergency_compaction",
        observed=True,
        evicted=4,
        strategy="evict+compact",
        pressure_before=0.93,
        velocity=12000.0,
        turns_until_red=3.9,
        detail=detail,
    )
    await store.record([given, exchange(2)])
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    assert await store.timeline(row) == [given, exchange(2)]


@pytest.mark.requirement("A0.41", "A0.43")
async def test_evictions_add_up_and_the_one_that_was_asked_for_again_is_marked(store: Store) -> None:
    rows = (eviction(1), eviction(2), eviction(3, tool="search", before=900), eviction(4, tool="", layer="compact"))
    await store.commit(replace(change(0), evictions=rows))
    await store.commit(replace(change(1), evictions=(eviction(2, policy="tight"),)))
    for _ in range(2):  # a row that was stored already is not counted twice
        await store.record([replace(exchange(1, at=3000.0), asked_again=(("b1", digest("call", 2)),))])
    marked = await store.evictions("tenant-a", asked_again=True)
    assert [(r.version, r.policy, r.asked_again_at, r.asked_again_count) for r in marked] == [(2, "tight", 3000.0, 1)]
    sums = {(s.layer, s.tool): s for s in await store.eviction_sums(None)}
    assert {key: (s.evicted, s.asked_again) for key, s in sums.items()} == {
        ("evict", "read_file"): (3, 1),
        ("evict", "search"): (1, 0),
        ("compact", ""): (1, 0),
    }
    assert sums[("evict", "search")].tokens_before - sums[("evict", "search")].tokens_after == 870
    assert [s.evicted for s in await store.eviction_sums(None, policy="tight")] == [1]
    listed = await store.evictions(None, limit=3)
    assert len(listed) == 3
    assert listed[0].freed == 270
    assert (listed[0].conversation, listed[0].tokens_remaining) == ("c1", 4000)


@pytest.mark.requirement("P7", "S.1", "S.3")
async def test_one_tenant_neither_sees_nor_marks_the_evictions_of_another(store: Store) -> None:
    for tenant in ("tenant-a", "tenant-b"):
        await store.commit(replace(change(0, tenant=tenant), evictions=(eviction(1),)))
    await store.record([replace(exchange(1, tenant="tenant-b"), asked_again=(("b1", digest("call", 1)),))])
    assert [r.asked_again_count for r in await store.evictions("tenant-a")] == [0]
    assert [r.asked_again_count for r in await store.evictions("tenant-b")] == [1]
    assert len(await store.evictions(None)) == 2


@pytest.mark.requirement("A0.41")
async def test_a_branch_knows_the_calls_that_it_and_its_parents_have_evicted(store: Store) -> None:
    await store.commit(replace(change(0, at=100.0), evictions=(eviction(1), eviction(2), eviction(3, tool=""))))
    parent = await store.branch("tenant-a", "b1")
    assert parent is not None
    assert dict(parent.evicted) == {digest("call", 1): "b1", digest("call", 2): "b1"}
    await store.fork(parent, branch="b2", keep_edits=parent.edits, keep_cuts=parent.cuts, at=150.0)
    await store.commit(replace(change(1, at=200.0), evictions=(eviction(4),)))
    await store.commit(replace(change(1, branch="b2", at=300.0, with_cut=False), evictions=(eviction(5),)))
    await store.record([replace(exchange(1), asked_again=(("b1", digest("call", 2)),))])
    fork = await store.branch("tenant-a", "b2")
    assert fork is not None
    assert dict(fork.evicted) == {digest("call", 1): "b1", digest("call", 5): "b2"}


async def test_evictions_go_with_their_conversation(store: Store, tmp_path: Path) -> None:
    await store.commit(replace(change(0), evictions=(eviction(1),)))
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    await store.delete(row)
    connection = sqlite3.connect(tmp_path / "w.db")
    assert connection.execute("SELECT count(*) FROM evictions").fetchone() == (0,)
    connection.close()


@pytest.mark.requirement("A0.45")
async def test_a_saved_policy_is_given_back_word_for_word_and_replaced_by_name(store: Store) -> None:
    await store.save_policy("support", "window: 1\n", 1.0)
    await store.save_policy("audit", "when_full: reject  # \ud83d\ude00 \x00\n", 2.0)
    await store.save_policy("support", "window: 2\n", 3.0)
    assert await store.policies() == [
        PolicyRow(name="audit", document="when_full: reject  # \ud83d\ude00 \x00\n", at=2.0),
        PolicyRow(name="support", document="window: 2\n", at=3.0),
    ]


def old_schema(path: Path, revision: str = "0001") -> None:
    """A database as an earlier release made and filled it."""
    config = Config()
    config.set_main_option("script_location", str(migrations.HERE))
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for statement in FIRST_ROWS:
            connection.exec_driver_sql(statement)
        command.upgrade(config, revision)
    engine.dispose()


FIRST_ROWS = (
    "INSERT INTO conversations VALUES ('tenant-a', 'c1', 'c1', 1, 2, 'gpt-x', 1, 10, 9, 8000, 'green', 'none')",
    (
        "INSERT INTO branches (tenant, branch, conversation, version, longest, created, updated) "
        "VALUES ('tenant-a', 'b1', 'c1', 1, 1, 1, 2)"
    ),
    f"INSERT INTO chains VALUES ('tenant-a', x'{chain(1)[0].hex()}', 'b1', 1, 2)",
    (
        "INSERT INTO exchanges VALUES ('tenant-a', 'e1', 'c1', 'c1', 'b1', NULL, 2, 'gpt-x', 'balanced', x'', 1, 200, "
        "'ok', 10, 9, 8000, 0.25, 'green', 'none', NULL, NULL, NULL, 1, 2, 1, '{}')"
    ),
)


@pytest.mark.requirement("P9", "R.67")
async def test_a_database_of_the_first_schema_is_upgraded_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    old_schema(path)
    store = await Store.open(url(path))
    found = await store.find("tenant-a", chain(1))
    assert found is not None
    assert (found.version, found.trend, found.evicted) == (1, None, ())
    row = await store.conversation(None, "c1")
    assert row is not None
    before = (await store.timeline(row))[0]
    assert (before.pressure, before.action, before.observed, before.velocity) == (0.25, "none", False, None)
    await store.commit(replace(change(1), evictions=(eviction(1),)))
    await store.record([replace(exchange(1, at=3000.0), trend=trend(5, 9), velocity=4.0)])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert (found.version, found.trend, found.evicted) == (2, trend(5, 9), ((digest("call", 1), "b1"),))
    await store.close()


def add_old_cuts(path: Path) -> tuple[Change, Change]:
    """Two cuts as they were stored before checkpoints had rows of their own; the second has no checkpoint."""
    told = change(0), replace(change(1), checkpoint="")
    with sqlite3.connect(path) as connection:
        for each in told:
            assert each.cut is not None
            row = ledger._cut_row(each.cut, at=each.at)
            row = {k: v.encode() if k in {"text", "narrative"} else v for k, v in row.items()}  # type: ignore[attr-defined]
            body = (each.checkpoint or "").encode()
            row |= {"tenant": "tenant-a", "branch": "b1", "covered": json.dumps(each.covered)}
            row |= {"body": body, "body_sha": sha256(body).digest()}
            known = {name for _, name, *_ in connection.execute("PRAGMA table_info(cuts)")}
            names = [name for name in row if name in known]
            marks = ", ".join("?" * len(names))
            connection.execute(f"INSERT INTO cuts ({', '.join(names)}) VALUES ({marks})", [row[n] for n in names])
        connection.execute("UPDATE branches SET version = 2")
    connection.close()
    return told


@pytest.mark.requirement("P9", "R.67", "A0.101")
@pytest.mark.parametrize("revision", ["0001", "0002"])
async def test_checkpoints_that_were_stored_with_their_cuts_get_rows_of_their_own(
    tmp_path: Path, revision: str
) -> None:
    path = tmp_path / "w.db"
    old_schema(path, revision)
    first, second = add_old_cuts(path)
    for _ in range(2):
        store = await Store.open(url(path))
        row = await store.conversation("tenant-a", "c1")
        assert row is not None
        assert (row.parent, row.closed) == (None, None)
        [found] = await store.checkpoints(row)
        assert (found.version, found.body, found.cut, found.covered, found.reason) == (
            (1, first.checkpoint, first.cut, first.covered, "compaction")
        )
        branch = await store.find("tenant-a", chain(1))
        assert branch is not None
        assert (branch.cuts, branch.checkpoint) == ((first.cut, second.cut), first.checkpoint)
        assert (branch.prepared, branch.wanted, branch.resumed) == (None, None, None)
        assert store.damaged == 0
        await store.close()
    assert row is not None
    store = await Store.open(url(path))
    await store.commit(change(2))
    assert await store.rollback(row, version=1, at=9000.0) == 4
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert (branch.cuts, branch.checkpoint) == ((first.cut,), first.checkpoint)
    await store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(cuts)")}
    assert not columns & {"body", "body_sha"}
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("DELETE FROM conversations")
    assert connection.execute("SELECT count(*) FROM checkpoints").fetchone() == (0,)
    connection.close()


async def test_a_reader_of_the_first_schema_says_how_to_upgrade_it(tmp_path: Path) -> None:
    old_schema(tmp_path / "w.db")
    with pytest.raises(Exception, match="weir db upgrade"):
        await Store.open(url(tmp_path / "w.db"), read_only=True)


def postgresql_schema() -> str:
    """The statements by which every migration in turn would make a PostgreSQL database."""
    script = io.StringIO()
    options = {"as_sql": True, "output_buffer": script}
    context = MigrationContext.configure(dialect_name="postgresql", opts=options)
    with Operations.context(context):
        for number in REVISIONS:
            [module] = [m.name for m in pkgutil.iter_modules(versions.__path__) if m.name.startswith(number)]
            importlib.import_module(f"{versions.__name__}.{module}").upgrade()
    return script.getvalue()


def test_every_migration_can_be_written_for_postgresql() -> None:
    script = postgresql_schema()
    assert "ALTER TABLE branches ADD COLUMN trend TEXT" in script
    assert "ADD COLUMN observed BOOLEAN DEFAULT false NOT NULL" in script
    assert "document BYTEA NOT NULL" in script
    assert "ALTER TABLE cuts DROP COLUMN body" in script
    assert "ADD COLUMN words tsvector GENERATED ALWAYS AS" in script
    assert "FOREIGN KEY(tenant, branch) REFERENCES branches (tenant, branch) ON DELETE CASCADE" in script
