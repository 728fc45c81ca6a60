"""The audit's chain: what is written, that nothing in it can be changed unseen, and what retention leaves of it."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from policies.ledger import Edit, EditKind, Event
from proxy.store import Store, WriteBehindQueue
from proxy.store.chain import GENESIS, AuditRow, harmless, name_digest
from proxy.store.records import ConversationRow, KeyRow, StoreError
from tests.proxy.audit_writer import PART
from tests.proxy.store_rows import change, eviction, exchange, note, original, url

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WRITER = Path(__file__).with_name("audit_writer.py")
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
TENANT = "tenant-a"
ROWS = 12


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"))
    yield opened
    await opened.close()


async def grow(store: Store, rows: int = ROWS, *, start: int = 0, at: float = 2000.0) -> None:
    """A chain of ``rows`` rows of one tenant, from commits that have one each."""
    for number in range(start, start + rows):
        given = change(number, count=1, with_cut=False, at=at + number)
        await store.commit(msgspec.structs.replace(given, evictions=(eviction(number),)))


async def chain_of(store: Store, tenant: str = TENANT) -> list[AuditRow]:
    """The rows of a tenant, oldest first."""
    return (await store.audit(tenant, limit=10_000))[::-1]


async def only(store: Store) -> ConversationRow:
    (row,) = await store.conversations(None)
    return row


def tamper(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


TAMPERINGS: dict[str, tuple[tuple[str, ...], int]] = {
    "its facts": (("UPDATE audit SET facts = '{}' WHERE seq = 5",), 5),
    "its time": (("UPDATE audit SET at = at + 1 WHERE seq = 5",), 5),
    "its type": (("UPDATE audit SET type = 'save' WHERE seq = 5",), 5),
    "its conversation": (("UPDATE audit SET conversation = 'c2' WHERE seq = 5",), 5),
    "its branch": (("UPDATE audit SET branch = 'b9' WHERE seq = 5",), 5),
    "its request": (("UPDATE audit SET request = 'r' WHERE seq = 5",), 5),
    "its hash": (("UPDATE audit SET hash = zeroblob(32) WHERE seq = 5",), 5),
    "the hash before": (("UPDATE audit SET prev = zeroblob(32) WHERE seq = 5",), 5),
    "the last row": ((f"UPDATE audit SET at = 7 WHERE seq = {ROWS}",), ROWS),
    "a value of another type": (("UPDATE audit SET facts = x'00ff' WHERE seq = 5",), 5),
    "a text for a hash": (("UPDATE audit SET prev = 'x', hash = 'y' WHERE seq = 5",), 5),
    "a row that is deleted": (("DELETE FROM audit WHERE seq = 5",), 6),
    "a row below the first": (("UPDATE audit SET seq = -3 WHERE seq = 5",), -3),
    "two rows swapped": (
        (
            "UPDATE audit SET seq = 99 WHERE seq = 5",
            "UPDATE audit SET seq = 5 WHERE seq = 9",
            "UPDATE audit SET seq = 9 WHERE seq = 99",
        ),
        5,
    ),
}


@pytest.mark.requirement("A0.138", "A0.147")
@pytest.mark.parametrize("what", TAMPERINGS)
async def test_every_change_to_the_chain_is_found(what: str, store: Store, tmp_path: Path) -> None:
    statements, broken = TAMPERINGS[what]
    await grow(store)
    (chain,) = await store.verify()
    assert (chain.first, chain.last, chain.broken) == (1, ROWS, None)
    tamper(tmp_path / "w.db", *statements)
    (chain,) = await store.verify()
    assert chain.broken == broken


@pytest.mark.requirement("A0.138", "A0.43", "A0.72", "D20", "A0.148")
async def test_a_batch_says_what_it_evicted_cut_and_saved_in_figures_and_digests(store: Store) -> None:
    figures: dict[str, object] = {
        "policy": "balanced", "action": "evict_and_compress", "utilization_before": 0.88, "utilization_after": 0.41,
        "compression_strategy": "evict+compact", "new_window_id": None,
    }  # fmt: skip
    condensed = [
            {"strategy": "delegate", "original_tokens": 900, "compressed_tokens": 90, "calls": 2, "ratio": 10.0},
            {"strategy": "compact", "original_tokens": 700, "compressed_tokens": 40, "calls": 3,
             "purpose": "structured-1", "prompt_digest": "0badf00d", "failure": ""},
    ]  # fmt: skip
    rows = (
        eviction(1),
        eviction(2, before=200, after=0),
        msgspec.structs.replace(eviction(3, layer="compact"), kind="cut"),
    )
    await store.commit(
        msgspec.structs.replace(
            change(0), evictions=rows, figures=figures, condensed=condensed, request="req-1", length=9
        )
    )
    told = {row.type: json.loads(row.facts) for row in await chain_of(store)}
    assert list(told) == ["eviction", "compaction", "save"]
    evicted, cut, kept = told.values()
    assert {**evicted, "refs": []} == {
        "version": 1, "messages": 9, "policy": "balanced", "action": "evict_and_compress", "utilization_before": 0.88,
        "utilization_after": 0.41, "compression_strategy": "evict+compact", "new_window_id": None, "count": 2,
        "tokens_before": 500, "tokens_after": 30, "freed": 470, "remaining": 4000, "placeholders": 1,
        "kinds": {"evict": 2}, "layers": {"evict": 2}, "refs": [], "condensed": [condensed[0]],
    }  # fmt: skip
    assert cut["prompt"] == "structured-1"
    assert cut["prompt_digest"] == "0badf00d"
    assert (cut["calls"], cut["original_tokens"], cut["compressed_tokens"]) == (3, 700, 40)
    assert cut["compression_ratio"] == 17.5
    assert len(cut["content"]) == len(kept["content"]) == 64
    assert kept["reason"] == "compaction"
    assert {row.request for row in await chain_of(store)} == {"req-1"}


@pytest.mark.requirement("A0.87", "A0.147", "A0.138")
async def test_a_request_is_audited_for_its_budgets_pressure_and_refusal_and_else_not_at_all(store: Store) -> None:
    over: dict[str, str | int | float | bool] = {
        "reason": "over its cap",
        "component": "tools",
        "current": 90,
        "limit": 80,
        "excess": 10,
    }
    events = (
        Event("zone_change", {"old": "green", "new": "red"}),
        Event("rot_guard", {"tokens": 70_000}),
        Event("hard_violation", over),
        Event("hard_violation", {**over, "component": "history"}),
        Event("soft_warning", {"component": "system", "utilization_after": 0.83}),
    )
    weir = {
        "window": 100,
        "reserve": 10,
        "buckets": {"tools": 90},
        "protected": 5,
        "bucket": "tools",
        "used": 90,
        "cap": 80,
    }
    await store.record(
        [
            exchange(1),
            msgspec.structs.replace(exchange(2), events=(Event("rot_guard", {"tokens": 70_000}),)),
            msgspec.structs.replace(exchange(3), events=events),
            msgspec.structs.replace(exchange(4), outcome="context_length_exceeded", status=400, refusal=weir),
        ]
    )
    await store.record([msgspec.structs.replace(exchange(3), events=events)])  # what is there already is not told twice
    rows = await chain_of(store)
    assert [(row.type, row.request[-1]) for row in rows] == [
        ("pressure_change", "3"),
        ("budget_violation", "3"),
        ("budget_warning", "3"),
        ("budget_violation", "4"),
        ("refused", "4"),
    ]
    told = [json.loads(row.facts) for row in rows]
    assert told[1]["events"] == [
        {"kind": "hard_violation", **over, "reason": "over_its_cap"},
        {"kind": "hard_violation", **over, "reason": "over_its_cap", "component": "history"},
    ]
    assert told[3]["events"] == [
        {"kind": "hard_violation", "allowed": False, "reason": "over_its_cap", "component": "tools", "current": 90,
         "limit": 80, "excess": 10}
    ]  # fmt: skip
    assert {**weir, "code": "context_length_exceeded", "status": 400}.items() <= told[4].items()


@pytest.mark.requirement("A0.138")
async def test_what_is_done_to_a_conversation_is_audited_and_outlives_it(store: Store) -> None:
    await store.commit(msgspec.structs.replace(change(0), evictions=(eviction(1),)))
    row = await only(store)
    pinned = Edit(bytes.fromhex("0123456789ab"), 0, EditKind.PIN, "", "0123456789ab", 0)
    await store.commit(msgspec.structs.replace(change(1, count=0, with_cut=False), edits=(pinned,)))
    await store.add_notes(TENANT, row.id, [note(1), note(2)])
    await store.add_notes(TENANT, row.id, [note(2)])
    await store.want(TENANT, "b1", "compact", 2500.0)
    await store.rollback(row, version=1, at=2600.0)
    await store.close_conversation(row, 2700.0)
    before = await chain_of(store)
    assert [each.type for each in before] == [
        "eviction", "compaction", "save", "pin", "note", "want", "rollback", "close",
    ]  # fmt: skip
    assert {each.conversation for each in before} == {row.id}
    assert json.loads(before[4].facts)["count"] == 2
    assert json.loads(before[6].facts) == {"from": 2, "to": 1, "version": 3}
    assert await store.delete(row, 2800.0) is True
    assert await store.delete(row, 2900.0) is False
    after = await chain_of(store)
    assert after[:-1] == before
    assert (after[-1].type, after[-1].conversation, after[-1].at) == ("delete", row.id, 2800.0)
    assert json.loads(after[-1].facts)["name"] == name_digest(TENANT, row.name)
    assert [each.seq for each in await store.audit(TENANT, conversation=row.id)] == [each.seq for each in after[::-1]]
    assert (await store.verify())[0].broken is None


@pytest.mark.requirement("A0.138")
async def test_keys_and_policies_are_in_the_operators_chain(store: Store) -> None:
    key = KeyRow(name="bot", digest="d" * 64, policy=None, models=("gpt-*",), allow=("mode",), created=5.0)
    await store.add_key(key)
    with pytest.raises(StoreError):
        await store.add_key(key)
    await store.revoke_key("bot", 6.0)
    await store.revoke_key("bot", 7.0)
    await store.save_policy("support", "window: 1\n", 8.0)
    await store.delete_policy("support", 9.0)
    await store.delete_policy("support", 10.0)
    rows = await chain_of(store, "")
    assert [(row.type, row.told["change"], row.at) for row in rows] == [  # type: ignore[index]
        ("key_change", "created", 5.0),
        ("key_change", "revoked", 6.0),
        ("policy_change", "set", 8.0),
        ("policy_change", "removed", 9.0),
    ]


async def test_a_transaction_that_fails_leaves_nothing_in_the_audit(store: Store) -> None:
    await grow(store, 2)
    for expected in (0, 5):
        with pytest.raises(StoreError):
            await store.commit(change(expected))
    assert len(await chain_of(store)) == 2


@pytest.mark.requirement("A0.138")
async def test_a_batch_that_another_process_was_first_with_is_audited_without_a_version(store: Store) -> None:
    await grow(store, 1)
    settler = WriteBehindQueue(store, degraded=lambda _: None)
    settler.keep(
        msgspec.structs.replace(change(0, count=1, with_cut=False), originals=(original(7),), evictions=(eviction(1),))
    )
    await settler.flush()
    rows = await chain_of(store)
    assert [(row.type, json.loads(row.facts)["version"]) for row in rows] == [("eviction", 1), ("eviction", None)]


@pytest.mark.requirement("P7")
async def test_tenants_have_chains_of_their_own(store: Store) -> None:
    await store.record(
        [
            msgspec.structs.replace(exchange(n, tenant=t), outcome="context_length_exceeded")
            for n in range(3)
            for t in ("b", "a", "c")
        ]
    )
    for tenant in ("a", "b", "c"):
        rows = await chain_of(store, tenant)
        assert [row.seq for row in rows] == [1, 2, 3]
        assert rows[0].prev == GENESIS
    assert [(chain.tenant, chain.last) for chain in await store.verify()] == [("a", 3), ("b", 3), ("c", 3)]


@pytest.mark.requirement("A0.138")
async def test_two_processes_and_two_hundred_commits_make_one_line(postgres_url: str) -> None:
    await (await Store.open(postgres_url)).close()
    writers = [
        await asyncio.create_subprocess_exec(
            sys.executable, str(WRITER), "many", postgres_url, name, "100", env=ENVIRONMENT, **PIPES
        )
        for name in ("b1", "b2")
    ]
    for _ in range(100 // PART):
        for writer in writers:
            assert writer.stdout is not None
            line = await writer.stdout.readline()
            assert line == b"ready\n", (await writer.communicate())[1].decode()[-1500:]
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(b"go\n")
    for writer in writers:
        _, said = await writer.communicate()
        assert writer.returncode == 0, said.decode()
    store = await Store.open(postgres_url)
    rows = await chain_of(store)
    (chain,) = await store.verify()
    await store.close()
    assert (chain.broken, chain.last) == (None, len(rows))
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    for branch in ("b1", "b2"):
        mine = [row for row in rows if row.branch == branch]
        assert [json.loads(row.facts)["version"] for row in mine if row.type == "eviction"] == list(range(1, 101))
        assert sum(row.type == "compaction" for row in mine) == 50
        assert sum(row.type == "refused" for row in mine) == 25
    switches = sum(one.branch != two.branch for one, two in zip(rows, rows[1:], strict=False))
    assert switches > 2, "the two wrote at the same time"


@pytest.mark.requirement("A0.138", "R.60")
async def test_killed_writers_leave_a_whole_chain_with_every_commit(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    await (await Store.open(url(path))).close()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(WRITER), "killed", str(path), "10"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    store = await Store.open(url(path))
    (chain,) = await store.verify()
    branch = await store.branch(TENANT, "b1")
    rows = await chain_of(store)
    await store.close()
    assert branch is not None
    assert branch.version >= int(done.stdout)
    assert chain.broken is None
    for kind in ("eviction", "compaction", "save"):
        told = [json.loads(row.facts)["version"] for row in rows if row.type == kind]
        assert told == list(range(1, branch.version + 1))


@pytest.mark.requirement("A0.138")
async def test_retention_takes_the_oldest_rows_but_not_the_last(store: Store, tmp_path: Path) -> None:
    await grow(store)
    await store.record([exchange(1, at=8000.0)])
    whole = await chain_of(store)
    assert await store.prune(2007.0, at=9000.0) == 0, "the conversation is still in use"
    assert await chain_of(store) == whole[7:]
    (chain,) = await store.verify()
    assert (chain.first, chain.last, chain.head, chain.broken) == (8, ROWS, whole[-1].hash.hex(), None)
    assert await store.prune(7000.0, at=9000.0) == 0
    assert await chain_of(store) == whole[-1:]
    await grow(store, 2, start=ROWS)
    (chain,) = await store.verify()
    assert (chain.first, chain.last, chain.broken) == (ROWS, ROWS + 2, None)
    tamper(tmp_path / "w.db", f"UPDATE audit SET prev = zeroblob(32) WHERE seq = {ROWS}")
    assert (await store.verify())[0].broken == ROWS


async def test_a_chain_of_several_pages_is_verified(store: Store) -> None:
    rows = [msgspec.structs.replace(exchange(n), outcome="context_length_exceeded") for n in range(2_100)]
    await store.record(rows)
    (chain,) = await store.verify()
    assert (chain.last, chain.broken) == (2_100, None)


def test_facts_hold_no_prose_whatever_is_put_into_them() -> None:
    told = json.dumps(harmless({"note": "the zeppelin flies", "a key": ["sk-x y", b"\x01"], "n": 1, "ok": "evict-2"}))
    assert "zeppelin" not in told
    assert "sk-x" not in told
    assert "a key" not in told
    assert '"01"' in told
    assert '"n": 1' in told
    assert '"ok": "evict-2"' in told
