"""The audit: rows that are only ever added, each in the transaction that does what it records, and
their verification.

An append is the last thing that a transaction does, tenants in order, so that two of them never
wait for each other; on PostgreSQL it holds a lock of the tenant's until the commit, on SQLite the
transaction has the whole file. Retention removes the oldest rows of a chain and never the last one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import msgspec
import sqlalchemy as sa

from policies.ledger import DROPPING, WINDOWS, Cut, EditKind
from proxy.store.chain import (
    GENESIS,
    OPERATOR,
    AuditEvent,
    AuditRow,
    AuditType,
    Verified,
    digest_of,
    hash_of,
    linked,
    name_digest,
)
from proxy.store.packing import BRANCH, CONVERSATION, REQUEST, TENANT, Damaged, unpack_text
from proxy.store.records import Change, EvictionRow, ExchangeRow, KeyRow, NoteRow, PolicyRow
from proxy.store.schema import OF_TENANT, audit
from proxy.store.transaction import Place, Transaction, of, ordered, owned, recorded, stored

CUT = "cut"
MAX_REFS = 40
REF_BYTES = 6
REFUSED = "context_length_exceeded"
COMPACT = "compact"
OF_EVENT: Mapping[str, AuditType] = {
    "hard_violation": AuditType.BUDGET_VIOLATION,
    "soft_warning": AuditType.BUDGET_WARNING,
    "burn_rate": AuditType.BUDGET_WARNING,
    "headroom_hit": AuditType.BUDGET_WARNING,
    "zone_change": AuditType.PRESSURE_CHANGE,
    "velocity_spike": AuditType.PRESSURE_CHANGE,
}
AT_ONCE = 1_000
MINE = of(audit, "tenant")
LAST = sa.select(audit.c.seq, audit.c.hash).where(MINE).order_by(audit.c.seq.desc()).limit(1)
LOCK = sa.select(
    sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(sa.bindparam("name", type_=sa.Text), 0))
)
ADD = sa.insert(audit)
KEPT_FROM = sa.func.coalesce(
    sa.func.min(sa.case((audit.c.at >= sa.bindparam("before"), audit.c.seq))),
    sa.func.max(audit.c.seq),
)
KEPT = sa.select(audit.c.tenant, sa.func.min(audit.c.seq).label("first"), KEPT_FROM.label("kept"))
KEPT = KEPT.group_by(audit.c.tenant)
DROP = sa.delete(audit).where(MINE, audit.c.seq < sa.bindparam("end"))
# As text: a row that was tampered with may hold a value of another type, on which a conversion
# would fail.
PAGE = sa.text(
    f"SELECT {', '.join(AuditRow.__struct_fields__)} FROM audit "  # noqa: S608 - constants
    f"WHERE tenant = :tenant AND seq > :seq ORDER BY seq LIMIT {AT_ONCE}"
).bindparams(OF_TENANT)
IDS = {"tenant": TENANT, "conversation": CONVERSATION, "branch": BRANCH, "request": REQUEST}


def append(tx: Transaction, events: Sequence[AuditEvent]) -> None:
    for tenant in sorted({event.tenant for event in events}):
        seq, prev = hold_last(tx, tenant)
        rows = linked((event for event in events if event.tenant == tenant), seq=seq, prev=prev)
        tx.many(ADD, [stored(audit, row) for row in rows])


def append_if(tx: Transaction, change: sa.Update | sa.Delete, event: AuditEvent) -> bool:
    """Whether a statement changed a row, which is recorded then."""
    found = tx.execute(change).rowcount > 0
    append(tx, [event] if found else [])
    return found


def hold_last(tx: Transaction, tenant: str) -> tuple[int, bytes]:
    """The last row's number and hash, after which no other transaction can write until this one
    ends.
    """
    if tx.dialect == "postgresql":
        tx.execute(LOCK, {"name": f"weir audit {tenant}"})
    row = tx.execute(LAST, {"of_tenant": tenant}).first()
    return (0, GENESIS) if row is None else (row.seq, bytes(row.hash))


def listed(
    tx: Transaction,
    tenant: str | None,
    *,
    conversation: str | None = None,
    kind: str | None = None,
    limit: int = 200,
    after: Place | None = None,
) -> list[AuditRow]:
    """The newest rows first; ``conversation`` is an id."""
    only = {"conversation": conversation, "type": kind}
    order = [(audit.c.at, True), (audit.c.tenant, False), (audit.c.seq, True)]
    query = sa.select(audit).where(
        owned(audit, tenant, **{n: v for n, v in only.items() if v is not None})
    )
    rows = tx.execute(
        ordered(query, order if tenant is None else order[2:], after=after, limit=limit)
    )
    return [recorded(AuditRow, audit, row) for row in rows]


def drop(tx: Transaction, *, before: float) -> int:
    """Remove up to 1,000 rows from the start of one chain, all older than ``before``; how many were
    removed.
    """
    for tenant, first, kept in tx.execute(KEPT, {"before": before}).all():
        if first < kept:
            return tx.execute(
                DROP, {"of_tenant": tenant, "end": min(kept, first + AT_ONCE)}
            ).rowcount
    return 0


def verify(tx: Transaction) -> list[Verified]:
    """Every chain, walked from its first kept row to the first one that does not follow."""
    tenants = tx.scalars(sa.select(audit.c.tenant).distinct().order_by(audit.c.tenant))
    return [_verified(tenant, _rows(tx, tenant)) for tenant in list(tenants)]


def _verified(tenant: str, rows: Iterator[AuditRow]) -> Verified:
    found = Verified(tenant=tenant)
    last: AuditRow | None = None
    for row in rows:
        if not _is_next(row, last):
            return msgspec.structs.replace(found, broken=row.seq)
        last = row
        found = msgspec.structs.replace(
            found, first=found.first or row.seq, last=row.seq, head=row.hash.hex()
        )
    return found


def _rows(tx: Transaction, tenant: str) -> Iterator[AuditRow]:
    seq = -(2**63)
    while page := tx.execute(PAGE, {"tenant": tenant, "seq": seq}).all():
        for each in page:
            row: dict[str, Any] = dict(each._mapping)  # noqa: SLF001 - SQLAlchemy's name for a public thing
            row |= {name: kind.shown(row[name]) for name, kind in IDS.items()}
            with suppress(Damaged):
                row["facts"] = (
                    unpack_text(row["facts"]) if isinstance(row["facts"], bytes) else row["facts"]
                )
            yield AuditRow(**row)
        seq = page[-1].seq


def _is_next(row: AuditRow, last: AuditRow | None) -> bool:
    if last is not None:
        follows = row.seq == last.seq + 1 and row.prev == last.hash
    else:
        follows = row.seq > 1 or (row.seq == 1 and row.prev == GENESIS)
    try:
        return follows and row.hash == hash_of(row)
    except (AttributeError, TypeError, ValueError):
        return False


def of_change(change: Change, *, conversation: str, version: int | None) -> list[AuditEvent]:
    """What a batch did: evicted, cut, saved, pinned. ``version`` is None for one that is not in the
    database.
    """
    found: list[tuple[AuditType, Mapping[str, object]]] = []
    gone = [row for row in change.evictions if row.kind != CUT]
    if gone:
        condensed = [each for each in change.condensed if each["strategy"] != COMPACT]
        found.append(
            (AuditType.EVICTION, {**change.figures, **_evicted(gone), "condensed": condensed})
        )
    if change.cut is not None:
        found.append((_type_of(change.cut), {**change.figures, **_cut(change.cut, change)}))
    if change.checkpoint is not None:
        found.append((AuditType.SAVE, _saved(change, change.checkpoint)))
    pinned = [edit.ref for edit in change.edits if edit.kind is EditKind.PIN]
    if pinned:
        found.append((AuditType.PIN, {"refs": pinned[:MAX_REFS]}))
    shared = {"version": version, "messages": change.length}
    return [
        _of_request(change, conversation, kind, change.request, {**shared, **facts})
        for kind, facts in found
    ]


def _of_request(
    by: Change | ExchangeRow,
    conversation: str,
    kind: AuditType,
    request: str,
    facts: Mapping[str, object],
) -> AuditEvent:
    return AuditEvent(by.tenant, by.at, kind, conversation, by.branch, request, facts)


def _type_of(cut: Cut) -> AuditType:
    if cut.origin in WINDOWS:
        return AuditType(cut.origin)
    return AuditType.EVICTION if cut.origin in DROPPING else AuditType.COMPACTION


def _evicted(rows: Sequence[EvictionRow]) -> dict[str, object]:
    before = sum(row.tokens_before for row in rows)
    after = sum(row.tokens_after for row in rows)
    return {
        "count": len(rows),
        "tokens_before": before,
        "tokens_after": after,
        "freed": before - after,
        "remaining": rows[-1].tokens_remaining,
        "placeholders": sum(1 for row in rows if row.tokens_after),
        "policy": rows[-1].policy,
        "kinds": Counter(row.kind for row in rows),
        "layers": Counter(row.layer for row in rows),
        "refs": [row.digest[:REF_BYTES].hex() for row in rows[:MAX_REFS]],
    }


def _cut(cut: Cut, change: Change) -> dict[str, object]:
    written = next((each for each in change.condensed if each["strategy"] == COMPACT), {})
    original = written.get("original_tokens") or sum(
        row.tokens_before for row in change.evictions if row.kind == CUT
    )
    return {
        "strategy": cut.layer,
        "origin": cut.origin,
        "cut": cut.version,
        "removed": len(change.covered),
        "ref": cut.ref,
        "window": change.window_id,
        "original_tokens": original,
        "compressed_tokens": cut.tokens,
        "compression_ratio": round(original / cut.tokens, 2) if cut.tokens else None,
        "content": digest_of(cut.text),
        "fidelity": None,
        "calls": written.get("calls", 0),
        "prompt": written.get("purpose"),
        "prompt_digest": written.get("prompt_digest"),
        "failure": written.get("failure") or None,
    }


def _saved(change: Change, checkpoint: str) -> dict[str, object]:
    body = checkpoint.encode("utf-8", "surrogatepass")
    return {
        "reason": change.reason,
        "window": change.window_id,
        "size": len(body),
        "content": sha256(body).digest(),
    }


def of_exchange(row: ExchangeRow, *, conversation: str) -> list[AuditEvent]:
    """What a request reported of budgets, pressure and alerts, and that it was refused: a row of
    each type at most.
    """
    events: dict[AuditType, list[Mapping[str, object]]] = {}
    for event in row.events:
        if kind := OF_EVENT.get(event.kind):
            words = {
                name: v.replace(" ", "_") if isinstance(v, str) else v
                for name, v in event.facts.items()
            }
            events.setdefault(kind, []).append({"kind": event.kind, **words})
    is_refused = row.outcome == REFUSED or bool(row.refusal)
    if is_refused and "bucket" in row.refusal:
        events.setdefault(AuditType.BUDGET_VIOLATION, [_over(row.refusal)])
    pressure = {"pressure": round(row.pressure, 4)}
    found: list[tuple[AuditType, Mapping[str, object]]] = [
        (k, {**pressure, "events": v}) for k, v in events.items()
    ]
    if row.health is not None and (row.health.opened or row.health.closed):
        opened = [
            {
                "kind": a.kind,
                "level": a.level,
                "class": a.category,
                "value": round(a.value, 4),
                "threshold": a.limit,
            }
            for a in row.health.opened
        ]
        closed = [{"kind": alert.kind, "since": alert.at} for alert in row.health.closed]
        found.append((AuditType.ALERT, {"opened": opened, "closed": closed}))
    if is_refused:
        found.append((AuditType.REFUSED, {"status": row.status, "code": REFUSED, **row.refusal}))
    shared = {"messages": row.length, "policy": row.policy, "action": row.action}
    shared |= {"observed": True} if row.observed else {}
    return [
        _of_request(row, conversation, kind, row.id, {**shared, **facts}) for kind, facts in found
    ]


def _over(refusal: Mapping[str, object]) -> dict[str, object]:
    used = refusal.get("used")
    cap = refusal.get("cap")
    excess = used - cap if isinstance(used, int) and isinstance(cap, int) else None
    facts = {"component": refusal.get("bucket"), "current": used, "limit": cap, "excess": excess}
    return {"kind": "hard_violation", "allowed": False, "reason": "over_its_cap", **facts}


def of_deletion(
    tenant: str, conversation: str, *, name: str, at: float, reason: str, counts: Mapping[str, int]
) -> AuditEvent:
    facts = {"reason": reason, "name": name_digest(tenant, name), **counts}
    return AuditEvent(tenant, at, AuditType.DELETE, conversation, facts=facts)


def of_notes(tenant: str, conversation: str, notes: Sequence[NoteRow]) -> AuditEvent:
    facts = {"count": len(notes), "categories": Counter(note.category for note in notes)}
    facts |= {
        "sources": Counter(note.source for note in notes),
        "ids": [note.id for note in notes[:MAX_REFS]],
    }
    return AuditEvent(
        tenant, max(note.at for note in notes), AuditType.NOTE, conversation, facts=facts
    )


def of_policy(row: PolicyRow | str, *, at: float) -> AuditEvent:
    facts: dict[str, object] = {"change": "removed", "policy": row}
    if isinstance(row, PolicyRow):
        facts = {"change": "set", "policy": row.name, "document": digest_of(row.document)}
    return AuditEvent(OPERATOR, at, AuditType.POLICY_CHANGE, facts=facts)


OF_A_KEY = ("concurrency", "requests_per_minute", "tokens_per_minute", "expires", "team", "budgets")
"""A key's limits, expiry and team: each is in the audit where it is set."""


def of_key(key: KeyRow | str, *, at: float, change: str = "created") -> AuditEvent:
    facts: dict[str, object] = {"change": "revoked", "key": key}
    if isinstance(key, KeyRow):
        own = {
            "key": key.name,
            "policy": key.policy,
            "models": len(key.models),
            "allow": list(key.allow),
        }
        limits = {name: getattr(key, name) for name in OF_A_KEY}
        facts = {
            "change": change,
            "digest": key.digest,
            **own,
            **{n: v for n, v in limits.items() if v},
        }
    return AuditEvent(OPERATOR, at, AuditType.KEY_CHANGE, facts=facts)
