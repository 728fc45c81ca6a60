"""The audit's chain: what is written, that nothing in it can be changed unseen, and how it is sealed."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from policies.ledger import Edit, EditKind, Event
from proxy.store import Store, WriteBehindQueue
from proxy.store.chain import GENESIS, AuditEvent, AuditRow, AuditType, Broken, harmless, hash_of, linked, name_digest
from proxy.store.packing import pack_words, unpack_words
from proxy.store.records import ConversationRow, KeyRow, StoreError
from tests.proxy.audit_writer import PART
from tests.proxy.store_rows import change, edit, eviction, exchange, note, original, saved, url

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WRITER = Path(__file__).with_name("audit_writer.py")
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
TENANT = "tenant-a"
ROWS = 12
REST = "type, conversation, branch, request, sealed, facts, prev, hash FROM audit"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"))
    yield opened
    await opened.close()


async def grow(store: Store, rows: int = ROWS, *, start: int = 0, at: float = 2000.0) -> None:
    """A chain of ``rows`` rows of one tenant, from commits that have one each."""
    for number in range(start, start + rows):
        await store.commit(change(number, count=1, with_cut=False, at=at + number))


async def chain_of(store: Store, tenant: str = TENANT) -> list[AuditRow]:
    """The rows of a tenant, oldest first."""
    return (await store.audit(tenant, limit=10_000))[::-1]


async def only(store: Store) -> ConversationRow:
    (row,) = await store.conversations(None)
    return row


def tamper(path: Path, *statements: str) -> None:
    """Change the file as somebody who has it: without the triggers, which are put back."""
    connection = sqlite3.connect(path, isolation_level=None)
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'audit'")
    guards = triggers.fetchall()
    assert len(guards) == 3
    for name, _ in guards:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(statement)
    for _, sql in guards:
        connection.execute(sql)
    connection.close()


def rehashed(path: Path, seq: int, **fields: object) -> str:
    """The statement by which somebody changes a row and makes its own hash fit."""
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    row = dict(connection.execute("SELECT * FROM audit WHERE tenant = ? AND seq = ?", (TENANT, seq)).fetchone())
    connection.close()
    row |= {"facts": unpack_words(row["facts"]), **fields}
    names = ("tenant", "seq", "at", "type", "conversation", "branch", "request", "sealed", "facts", "prev")
    link = hash_of(*(row[name] for name in names)).hex()
    assert set(fields) == {"at"}
    return f"UPDATE audit SET at = {row['at']!r}, hash = x'{link}' WHERE seq = {seq}"


def recounted(path: Path, seq: int, count: int) -> str:
    """The statement by which somebody changes the count that a row tells."""
    with closing(sqlite3.connect(path)) as connection:
        (facts,) = connection.execute("SELECT facts FROM audit WHERE tenant = ? AND seq = ?", (TENANT, seq)).fetchone()
    told = json.loads(unpack_words(facts))
    assert told["count"] != count
    changed = pack_words(json.dumps(told | {"count": count}, separators=(",", ":"), sort_keys=True))
    return f"UPDATE audit SET facts = x'{changed.hex()}' WHERE tenant = '{TENANT}' AND seq = {seq}"


def forged(path: Path, seq: int) -> str:
    """The statement that puts a row of somebody's own behind the row before ``seq``, its hash being right."""
    connection = sqlite3.connect(path)
    (prev,) = connection.execute("SELECT hash FROM audit WHERE tenant = ? AND seq = ?", (TENANT, seq - 1)).fetchone()
    connection.close()
    event = AuditEvent(tenant=TENANT, at=1.0, type=AuditType.SAVE, conversation="c1", branch="b1")
    (row,) = linked([event], seq=seq - 1, prev=prev)
    return (
        f"INSERT INTO audit VALUES ('{row.tenant}', {row.seq}, {row.at}, 'save', 'c1', 'b1', '', 0, '{row.facts}', "
        f"x'{row.prev.hex()}', x'{row.hash.hex()}')"
    )


def moved(seq: int, to: int) -> str:
    return f"UPDATE audit SET seq = {to} WHERE seq = {seq}"


def shifted(start: int, by: int) -> tuple[str, str]:
    """Renumber all rows from ``start`` on, by way of numbers that none has."""
    return (
        f"UPDATE audit SET seq = -seq WHERE seq >= {start}",
        f"UPDATE audit SET seq = -seq + {by} WHERE seq < 0",
    )


Tampering = Callable[[Path], tuple[str, ...]]

TAMPERINGS: dict[str, tuple[Tampering, Broken, int]] = {
    "a fact": (
        lambda path: (recounted(path, 5, 0),),
        Broken(5, "edited"),
        4,
    ),
    "its time": (lambda _: ("UPDATE audit SET at = at + 1 WHERE seq = 5",), Broken(5, "edited"), 4),
    "its type": (lambda _: ("UPDATE audit SET type = 'save' WHERE seq = 5",), Broken(5, "edited"), 4),
    "its conversation": (lambda _: ("UPDATE audit SET conversation = 'c2' WHERE seq = 5",), Broken(5, "edited"), 4),
    "its branch": (lambda _: ("UPDATE audit SET branch = 'b9' WHERE seq = 5",), Broken(5, "edited"), 4),
    "its request": (lambda _: ("UPDATE audit SET request = 'r' WHERE seq = 5",), Broken(5, "edited"), 4),
    "what it seals": (lambda _: ("UPDATE audit SET sealed = 1 WHERE seq = 5",), Broken(5, "edited"), 4),
    "its hash": (lambda _: ("UPDATE audit SET hash = zeroblob(32) WHERE seq = 5",), Broken(5, "edited"), 4),
    "the hash before": (lambda _: ("UPDATE audit SET prev = zeroblob(32) WHERE seq = 5",), Broken(5, "edited"), 4),
    "the first row": (lambda _: ("UPDATE audit SET at = 7 WHERE seq = 1",), Broken(1, "edited"), 0),
    "the last row": (lambda _: (f"UPDATE audit SET at = 7 WHERE seq = {ROWS}",), Broken(ROWS, "edited"), ROWS - 1),
    "a value of another type": (lambda _: ("UPDATE audit SET facts = x'00ff' WHERE seq = 5",), Broken(5, "edited"), 4),
    "a text for a hash": (lambda _: ("UPDATE audit SET prev = 'x', hash = 'y' WHERE seq = 5",), Broken(5, "edited"), 4),
    "a time with a new hash": (lambda path: (rehashed(path, 5, at=9.5),), Broken(5, "edited"), 5),
    "a row that is deleted": (lambda _: ("DELETE FROM audit WHERE seq = 5",), Broken(5, "missing"), 4),
    "the first row deleted": (lambda _: ("DELETE FROM audit WHERE seq = 1",), Broken(1, "missing"), 0),
    "a row deleted and the rest renumbered": (
        lambda _: ("DELETE FROM audit WHERE seq = 5", *shifted(6, -1)),
        Broken(5, "missing"),
        4,
    ),
    "a row put between": (lambda path: (forged(path, 5), *shifted(5, 1))[::-1], Broken(5, "inserted"), 5),
    "a careless row put between": (
        lambda path: (forged(path, 5).replace("'save'", "'note'"), *shifted(5, 1))[::-1],
        Broken(5, "inserted"),
        4,
    ),
    "a row below the first": (
        lambda path: (forged(path, 5).replace(f"('{TENANT}', 5", f"('{TENANT}', -3"),),
        Broken(-3, "inserted"),
        0,
    ),
    "two neighbours swapped": (
        lambda _: (moved(5, 99), moved(6, 5), moved(99, 6)),
        Broken(5, "reordered"),
        4,
    ),
    "two distant rows swapped": (
        lambda _: (moved(5, 99), moved(9, 5), moved(99, 9)),
        Broken(5, "reordered"),
        4,
    ),
}  # fmt: skip


@pytest.mark.requirement("A0.138", "A0.147")
@pytest.mark.parametrize("what", TAMPERINGS)
async def test_every_change_to_the_chain_is_found_and_named(what: str, store: Store, tmp_path: Path) -> None:
    await grow(store)
    assert (await store.verify()).chains[0].broken is None
    tampering, broken, good = TAMPERINGS[what]
    statements = tampering(tmp_path / "w.db")
    if statements[0].startswith("UPDATE audit SET seq = -seq +"):
        statements = (statements[1], statements[0], statements[2])
    tamper(tmp_path / "w.db", *statements)
    (found,) = (await store.verify()).chains
    assert found.broken == broken
    assert found.good == good


@pytest.mark.requirement("A0.138")
async def test_a_chain_cut_short_is_found_by_a_head_that_was_noted(store: Store, tmp_path: Path) -> None:
    await grow(store)
    head = (await chain_of(store))[-1].hash
    (whole,) = (await store.verify(heads=[head])).chains
    assert (whole.found, whole.head) == (frozenset({head}), f"{ROWS}:{head.hex()}")
    await grow(store, 2, start=ROWS)
    assert (await store.verify(heads=[head])).chains[0].found == {head}, "a head stays in the chain as it grows"
    tamper(tmp_path / "w.db", f"DELETE FROM audit WHERE seq > {ROWS - 3}")
    (without,) = (await store.verify()).chains
    (with_anchor,) = (await store.verify(heads=[head])).chains
    assert (without.broken, without.good) == (None, ROWS - 3), "what is left is a chain like any other"
    assert with_anchor.found == frozenset()
    tamper(tmp_path / "w.db", "DELETE FROM audit")
    assert (await store.verify(heads=[head])).chains == []


@pytest.mark.requirement("A0.138")
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET at = 1 WHERE seq = 3",
        "UPDATE audit SET facts = facts",
        "UPDATE OR REPLACE audit SET seq = 2 WHERE seq = 3",
        "DELETE FROM audit WHERE seq = 3",
        "DELETE FROM audit",
        f"INSERT OR REPLACE INTO audit SELECT tenant, seq, 1, {REST} WHERE seq = 3",
        f"INSERT OR IGNORE INTO audit SELECT tenant, 99, at, {REST} WHERE seq = 3",
        f"INSERT INTO audit SELECT tenant, {ROWS + 1}, at, {REST} WHERE seq = 3",
    ],
)
async def test_the_database_refuses_every_change(statement: str, store: Store, tmp_path: Path) -> None:
    await grow(store)
    before = await chain_of(store)
    connection = sqlite3.connect(tmp_path / "w.db", isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError, match="audit rows are"):
        connection.execute(statement)
    connection.close()
    assert await chain_of(store) == before


@pytest.mark.requirement("A0.138")
async def test_a_guard_that_was_taken_away_is_noticed(store: Store, tmp_path: Path) -> None:
    assert (await store.verify()).unguarded == []
    connection = sqlite3.connect(tmp_path / "w.db")
    connection.execute("DROP TRIGGER audit_never_changes")
    connection.close()
    assert (await store.verify()).unguarded == ["audit_never_changes"]


@pytest.mark.requirement("A0.138")
def test_nothing_but_the_seal_takes_audit_rows_away() -> None:
    changing = re.compile(r"(?:sa\.)?(?:update|delete)\(\s*audit\b|(?:UPDATE|DELETE FROM)\s+audit\b", re.IGNORECASE)
    found = {
        (path.name, match[0])
        for path in sorted([*(ROOT / "proxy").rglob("*.py"), *(ROOT / "policies").rglob("*.py")])
        for match in changing.finditer(path.read_text())
    }
    assert found == {("audit.py", "sa.delete(audit")}
    text = (ROOT / "proxy" / "store" / "audit.py").read_text()
    assert text.count("DROP_SEALED") == 2, "made once, used once"
    assert "DROP_SEALED" in text[text.index("def drop_sealed") : text.index("def missing_guards")]


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
    assert {**evicted, "rows": "", "refs": []} == {
        "version": 1, "messages": 9, "policy": "balanced", "action": "evict_and_compress", "utilization_before": 0.88,
        "utilization_after": 0.41, "compression_strategy": "evict+compact", "new_window_id": None, "count": 2,
        "tokens_before": 500, "tokens_after": 30, "freed": 470, "remaining": 4000, "placeholders": 1,
        "kinds": {"evict": 2}, "layers": {"evict": 2}, "scorers": ["hybrid"], "refs": [], "rows": "", "calls": 2,
        "condensed": [condensed[0]],
    }  # fmt: skip
    assert len(evicted["rows"]) == 64
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
    await store.commit(change(0))
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
    assert (await store.verify()).chains[0].broken is None


@pytest.mark.requirement("A0.138")
async def test_a_name_finds_what_was_said_of_a_conversation_that_is_gone(store: Store) -> None:
    await store.commit(msgspec.structs.replace(change(0), name="support-4711"))
    row = await only(store)
    await store.delete(row)
    for tenant in (TENANT, None):
        found = await store.audit(tenant, conversation="support-4711")
        assert [each.type for each in found] == ["delete", "save", "compaction", "eviction"]
    assert await store.audit("tenant-b", conversation="support-4711") == []


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
    assert await store.audited_tenants() == [""]


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
    assert [chain.tenant for chain in (await store.verify()).chains] == ["a", "b", "c"]
    assert [chain.rows for chain in (await store.verify("b")).chains] == [3]


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
            assert await writer.stdout.readline() == b"ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(b"go\n")
    for writer in writers:
        _, said = await writer.communicate()
        assert writer.returncode == 0, said.decode()
    store = await Store.open(postgres_url)
    rows = await chain_of(store)
    (chain,) = (await store.verify()).chains
    await store.close()
    assert (chain.broken, chain.good, chain.rows) == (None, len(rows), len(rows))
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
    (chain,) = (await store.verify()).chains
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
async def test_retention_takes_rows_out_under_a_seal_and_the_chain_goes_on(store: Store, tmp_path: Path) -> None:
    await grow(store)
    await store.record([exchange(1, at=8000.0)])
    whole = await chain_of(store)
    noted = [row.hash for row in whole]
    assert await store.prune(2007.0, at=9000.0) == 0, "the conversation is still in use"
    rows = await chain_of(store)
    assert [row.seq for row in rows] == list(range(8, ROWS + 2))
    assert rows[:-1] == whole[7:]
    seal = rows[-1]
    assert (seal.type, seal.sealed, seal.at) == ("seal", 7, 9000.0)
    assert json.loads(seal.facts) == {
        "first": 1, "last": 7, "count": 7, "before": GENESIS.hex(), "after": noted[6].hex(), "older_than": 2007.0,
    }  # fmt: skip
    (chain,) = (await store.verify(heads=noted)).chains
    assert (chain.broken, chain.good, chain.sealed) == (None, 6, 7)
    assert chain.found == set(noted[6:]), "the row that the seal ends at is still vouched for"
    await grow(store, 3, start=ROWS)
    assert await store.prune(2011.0, at=9100.0) == 0
    (chain,) = (await store.verify()).chains
    assert (chain.broken, chain.sealed, (await chain_of(store))[0].seq) == (None, 11, 12)
    tamper(tmp_path / "w.db", "DELETE FROM audit WHERE seq = 12")
    assert (await store.verify()).chains[0].broken == Broken(12, "missing")


@pytest.mark.requirement("A0.138")
async def test_a_seal_that_was_interrupted_is_valid_and_finished_by_the_next_one(store: Store, tmp_path: Path) -> None:
    await grow(store)
    await store.record([exchange(1, at=8000.0)])
    await store.prune(2007.0, at=9000.0)
    path = tmp_path / "other.db"
    other = await Store.open(url(path))
    await grow(other)
    await other.record([exchange(1, at=8000.0)])
    connection = sqlite3.connect(path, isolation_level=None)
    for row in await chain_of(store):  # the same history, so the same seal, with half of its work done
        if row.type == "seal":
            values = (row.tenant, row.seq, row.at, row.type, "", "", "", row.sealed, row.facts, row.prev, row.hash)
            connection.execute(f"INSERT INTO audit VALUES ({', '.join('?' * 11)})", values)
    connection.execute("DELETE FROM audit WHERE seq <= 3")
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute("DELETE FROM audit WHERE seq <= 8")
    connection.close()
    (half,) = (await other.verify()).chains
    assert (half.broken, half.good, half.sealed) == (None, ROWS - 3 + 1, 7)
    await other.prune(2007.0, at=9001.0)
    assert await chain_of(other) == await chain_of(store)
    await other.close()


@pytest.mark.requirement("A0.138")
async def test_a_seal_does_not_hide_what_is_wrong(store: Store, tmp_path: Path) -> None:
    await grow(store)
    await store.record([exchange(1, at=8000.0)])
    await store.prune(2007.0, at=9000.0)
    tamper(tmp_path / "w.db", recounted(tmp_path / "w.db", ROWS + 1, 9))
    assert (await store.verify()).chains[0].broken == Broken(ROWS + 1, "edited")
    tamper(tmp_path / "w.db", "DELETE FROM audit WHERE type = 'seal'")
    assert (await store.verify()).chains[0].broken == Broken(1, "missing"), "nothing vouches for the rows before"


async def test_a_chain_at_rest_is_not_sealed_again_and_again(store: Store) -> None:
    await grow(store, 3)
    await store.prune(5000.0, at=9000.0)
    assert [row.type for row in await chain_of(store)] == ["delete", "seal"]
    for at in (20_000.0, 40_000.0, 60_000.0):
        await store.prune(at - 1000, at=at)
    assert [row.type for row in await chain_of(store)] == ["seal"]
    (chain,) = (await store.verify()).chains
    assert (chain.broken, chain.good) == (None, 1)


async def test_a_long_chain_is_walked_in_pages_and_says_how_far_it_is(store: Store) -> None:
    rows = [msgspec.structs.replace(exchange(n), outcome="context_length_exceeded") for n in range(4_100)]
    await store.record(rows)
    said: list[tuple[int, int]] = []
    (chain,) = (await store.verify(progress=lambda done, total: said.append((done, total)))).chains
    assert (chain.good, chain.broken) == (4_100, None)
    assert said == [(2_000, 4_100), (4_000, 4_100), (4_100, 4_100)]


def test_facts_hold_no_prose_whatever_is_put_into_them() -> None:
    told = json.dumps(harmless({"note": "the zeppelin flies", "a key": ["sk-x y", b"\x01"], "n": 1, "ok": "evict-2"}))
    assert "zeppelin" not in told
    assert "sk-x" not in told
    assert "a key" not in told
    assert '"01"' in told
    assert '"n": 1' in told
    assert '"ok": "evict-2"' in told


async def test_a_batch_without_rows_of_evictions_is_still_told(store: Store) -> None:
    await store.commit(msgspec.structs.replace(change(0, count=0, with_cut=False), edits=(edit(1), edit(2))))
    await store.commit(saved(1, reason="milestone"))
    rows = await chain_of(store)
    assert [(row.type, json.loads(row.facts).get("count")) for row in rows] == [("eviction", 2), ("save", None)]
