"""What a store is told in the tests of databases of before, and all that can be read of it afterwards."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

import msgspec

from policies.ledger import EVERY_WINDOW, Prepared, Trend
from policies.pressure import advance
from proxy.store import Store
from proxy.store.chain import AuditEvent, AuditRow, AuditType
from proxy.store.records import Arrival, Branch, CalibrationRow, ConversationRow, KeyRow, LimitRow, RelayedRow
from tests.proxy.store_rows import (
    change,
    cut,
    decided,
    digest,
    edit,
    eviction,
    exchange,
    note,
    original,
    saved,
    summary,
)
from tests.proxy.test_store_health import session

TENANT, OTHER = "4cb8843d2164dd76f13c4f6a3e960c35", "somebody-by-name"
CONVERSATION, BRANCH, FORK = "conv-cbc9753ecb6830312d75", "br-cbc9753ecb6830312d75", "br-00009753ecb6830312d7"
MODEL = "embedding-x"


async def tell(store: Store) -> None:
    """Every kind of thing that a store keeps, of two tenants and the operator."""
    await _operate(store)
    await _converse(store, TENANT, CONVERSATION, BRANCH, FORK)
    await _converse(store, OTHER, "somewhere", "somehow", "elsehow")
    await _sicken(store)


async def _operate(store: Store) -> None:
    keys = [
        KeyRow(name=name, digest=digest(name).hex(), policy=policy, models=models, allow=("mode",), created=at)
        for name, policy, models, at in (("bot", None, ("gpt-*",), 1.0), ("old", "tight", (), 2.0))
    ]
    for key in keys:
        await store.add_key(key)
    await store.revoke_key("old", 3.0)
    await store.save_policy("support", "trigger: 0.5\n# \ud800\n", 4.0)
    await store.save_policy("gone", "trigger: 0.6\n", 5.0)
    await store.delete_policy("gone", 6.0)
    facts = {"policy": "file", "change": "set"}
    changes = [AuditEvent(tenant="", at=7.0, type=AuditType.POLICY_CHANGE, facts=facts)]
    await store.note_changes(changes)
    await store.note_changes(changes)
    await store.learn(
        calibrations=[
            CalibrationRow(scope="a", ratio=1.25, samples=3, recent=(1.0, 1.5), drift=0.5),
            CalibrationRow(scope="b", ratio=1.0, samples=1),
        ],
        limits=[
            LimitRow(scope="a", limit=8192, seen=2, expires=9000.0),
            LimitRow(scope="a", kind="completion", limit=0, seen=1, expires=1e10),
        ],
    )


async def _converse(store: Store, tenant: str, conversation: str, branch: str, forked: str) -> None:
    home: dict[str, Any] = {"tenant": tenant, "conversation": conversation, "branch": branch}
    ends = [digest(tenant, n) for n in range(6)]
    arrival = Arrival(
        id="req_00aa",
        name="work",
        parent=None,
        at=1000.0,
        model="gpt-x",
        ends=((ends[0], 1),),
        length=1,
        trend=_trend(1000),
        **home,
    )
    await store.arrive(arrival)
    rows = [exchange(n, name="work", end=ends[n], length=n + 1, **home) for n in range(4)]
    detail = {"buckets": {"system": 15}, "cost": 0.5, "cost_saved": 0.25, "said": "\ud800 \x01"}
    rows[1] = msgspec.structs.replace(
        rows[1], detail=detail | {"summarizer": {"asked": 100, "answered": 20, "dollars": 0.125}}
    )
    rows[1] = msgspec.structs.replace(
        rows[1], id="req_520746284824ab4e0000016b", trend=_trend(1000, 3000), velocity=12.5
    )
    rows[2] = msgspec.structs.replace(
        rows[2], action="evict_and_compress", observed=True, evicted=4, strategy="evict+compact"
    )
    rows[2] = msgspec.structs.replace(rows[2], pressure_before=0.93, turns_until_red=3.5, parent_conversation="c\x000")
    rows[3] = msgspec.structs.replace(
        rows[3], outcome="context_length_exceeded", status=400, refusal={"bucket": "system", "used": 9}
    )
    await store.record(rows[:3])
    relayed = RelayedRow(
        id="req_00bb", tenant=tenant, at=1001.0, model="m\ud800", policy="none", status=200, outcome="ok"
    )
    await store.record([rows[3], msgspec.structs.replace(relayed, usage_prompt=9, usage_completion=2, cost=0.75)])
    evictions = (
        eviction(1),
        eviction(2),
        eviction(3, tool="search", before=900),
        eviction(4, tool="", layer="compact"),
    )
    first = msgspec.structs.replace(
        change(0, of=tenant, **home), name="work", evictions=evictions, chain_end=ends[4], length=5
    )
    await store.commit(msgspec.structs.replace(first, request=rows[1].id, figures={"action": "evict"}))
    edits = (edit(7, of=tenant, text="\x01 looks packed \ud800"), edit(8, of=tenant, text=""))
    second = msgspec.structs.replace(
        change(1, of=f"{tenant}2", count=2, with_cut=False, at=2001.0, **home), edits=edits, resumed="{}"
    )
    await store.commit(second)
    await store.commit(msgspec.structs.replace(saved(2, at=2002.0), **home, length=5))
    measured = {"score": 0.875, "judged": 3}
    detail = {**rows[0].detail, "alike": 0.5, "fidelity": measured}
    await store.record([msgspec.structs.replace(rows[0], id="req_00cc", at=3000.0, detail=detail)])
    # a kind of row that is not written any more
    of_before = AuditEvent(tenant, 3001.0, cast("AuditType", "evaluation"), conversation, branch, "req_00cc")
    await store.note_changes([msgspec.structs.replace(of_before, facts=measured)])
    await store.prepare(tenant, branch, Prepared(2, ends[1], "the text", purpose="compact-1", calls=2))
    await store.want(tenant, branch, "compact", 3002.0)
    found = await store.branch(tenant, branch)
    assert found is not None
    known = decided(found)
    few = {EVERY_WINDOW: known._replace(edits=dict(list(known.edits.items())[:2]))}
    await store.fork(found, msgspec.structs.replace(found, branch=forked, views=few, length=10), at=3003.0)
    more = {EVERY_WINDOW: known._replace(cuts=(*known.cuts, cut(2, of=tenant)))}
    await store.restate(msgspec.structs.replace(found, version=9, views=more), at=3004.0)
    await store.add_notes(tenant, conversation, [note(1), note(2, importance="critical"), note(1)])
    await store.keep_summary(tenant, summary(1, text="what was said \ud800"))
    await store.add_vectors(tenant, MODEL, {o.ref: [1.0, float(n)] for n, o in enumerate(first.originals)})


async def _sicken(store: Store) -> None:
    rows = session((0.95, 0.95, 0.95, 0.5, 0.95, 0.95, 0.95), tenant=TENANT, conversation="sick", branch="sick")
    await store.record([msgspec.structs.replace(row, events=()) for row in rows])
    row = await _row(store, TENANT, "sick")
    await store.close_conversation(row, 4000.0)
    await store.commit(change(0, tenant=TENANT, conversation="back", branch="back", at=4001.0))
    await store.commit(
        msgspec.structs.replace(change(1, tenant=TENANT, conversation="back", branch="back", at=4002.0), cut=None)
    )
    await store.rollback(await _row(store, TENANT, "back"), version=1, at=4003.0)
    await store.commit(change(0, tenant=TENANT, conversation="gone", branch="gone", at=4004.0, of="gone"))
    await store.delete(await _row(store, TENANT, "gone"), 4005.0)
    await store.record([exchange(1, tenant=OTHER, conversation="past", branch="past", at=10.0)])
    await store.prune(50.0, 4006.0)
    await store.keep_summary(TENANT, summary(2, at=4007.0))


async def read(store: Store) -> dict[str, Any]:
    """Everything that can be read of a store, as plain data."""
    tenants = {tenant: await _of_tenant(store, tenant) for tenant in (TENANT, OTHER)}
    found = {
        "tenants": tenants,
        "keys": await store.list_keys(),
        "policies": await store.policies(),
        "limits": await store.limits(),
        "calibrations": await store.calibrations(),
        "broken": [chain.tenant for chain in await store.verify() if chain.broken],
        "audit": [_without_facts(await store.audit(tenant, limit=1000)) for tenant in (TENANT, OTHER)],
        "alerts": await store.open_alerts(None),
        "usage": {by: await store.usage(None, since=0.0, by=by) for by in ("model", "policy", "day", "conversation")},
        "damaged": store.damaged,
        "schema": store.schema,
    }
    plain: dict[str, Any] = json.loads(json.dumps(_plain(found)))
    return plain


async def _of_tenant(store: Store, tenant: str) -> dict[str, Any]:
    rows = await store.conversations(tenant)
    ends = [digest(tenant, n) for n in range(6)]
    refs = [original(n, of=tenant).ref for n in range(3)]
    return {
        "conversations": rows,
        "named": await store.named(tenant, "work"),
        "found": [await store.find(tenant, ends[:n]) for n in (1, 3, 6)],
        "branches": [await store.branch(tenant, b) for b in (BRANCH, FORK, "somehow", "elsehow", "sick", "back")],
        "originals": [await store.original(tenant, ref) for ref in refs],
        "covered": await store.covered(tenant, cut(1, of=tenant).ref),
        "search": await store.search(tenant, "tool about app1"),
        "lacking": await store.lacking_vectors(tenant, rows[-1].id, MODEL, limit=9),
        "nearest": [await store.nearest(tenant, row.id, MODEL, [1.0, 1.0], limit=2) for row in rows],
        "summaries": [await store.summary(tenant, summary(n).key) for n in (1, 2)],
        "evictions": await store.evictions(tenant, limit=3),
        "latest": [await store.latest_checkpoint(tenant, row.name) for row in rows],
        "audit": _without_facts(await store.audit(tenant, kind="save")),
        "of": {row.name: await _of_conversation(store, row) for row in rows},
    }


async def _of_conversation(store: Store, row: ConversationRow) -> dict[str, Any]:
    return {
        "held": sorted(await store.held(row.tenant, row.id)),
        "timeline": await store.timeline(row),
        "evictions": await store.evictions(row.tenant, conversation=row),
        "checkpoints": await store.checkpoints(row),
        "checkpoint": await store.checkpoint_at(row, 1),
        "newest": await store.newest_branch(row),
        "notes": await store.notes(row.tenant, row.id),
        "removed": await store.removed(row),
        "snapshots": await store.snapshots(row),
        "alerts": await store.alerts(row),
        "export": _without_clock(await store.export(row)),
    }


def _without_clock(export: Mapping[str, Any]) -> dict[str, Any]:
    """An export without what the clock of the machine says, and what another Weir wrote in other words."""
    branches = [{**each, "preparing": None, "prepared": None} for each in export["branches"]]
    audit = [[each["type"], each["request"]] for each in export["audit"] if each["type"] != AuditType.EVICTION]
    return {**export, "branches": branches, "audit": audit}


def _without_facts(rows: Sequence[AuditRow]) -> list[object]:
    """What a row is where another Weir wrote it, whose facts were others, and evictions of batches that had none."""
    kept = [row for row in rows if row.type != AuditType.EVICTION]
    return [[row.at, row.type, row.conversation, row.request] for row in kept]


async def _row(store: Store, tenant: str, name: str) -> ConversationRow:
    found = await store.conversation(tenant, name)
    assert found is not None
    return found


def _trend(*sizes: int) -> Trend:
    state = Trend()
    for at, size in enumerate(sizes):
        buckets = {"history": size}
        state = advance(state, raw=size, length=at + 1, buckets=buckets, zone="green", at=float(at + 1))
    return state


KNOWN = ("prepared", "wanted", "resumed", "checkpoint", "checkpoint_length")


def _plain(value: Any) -> Any:
    if isinstance(value, Branch):  # with what is known of it beside the rest, as it is told of a database of before
        beside = ("known", "views", "floating")
        told = {name: value for name, value in msgspec.structs.asdict(value).items() if name not in beside}
        told |= {name: getattr(value.known, name) for name in KNOWN}
        return _plain({**told, "edits": list(decided(value).edits.values()), "cuts": decided(value).cuts})
    if isinstance(value, msgspec.Struct):
        return {name: _plain(each) for name, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, msgspec.Struct):
        return {name: _plain(each) for name, each in msgspec.structs.asdict(value).items()}
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(map(_plain, value))
    if isinstance(value, str):
        return ascii(str(value.value) if isinstance(value, Enum) else value)
    if isinstance(value, Sequence):
        return [_plain(each) for each in value]
    return round(value, 9) if isinstance(value, float) and math.isfinite(value) else value
