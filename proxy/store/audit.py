"""The audit: rows that are only ever added, each in the transaction that does what it tells of, and what they say.

The database itself refuses the rest: a row is inserted behind the last one or not at all, never updated, and deleted
only once a later row seals it (triggers of :mod:`proxy.store.schema`). An append is the last thing that a transaction
does, tenants in order, so that two of them never wait for each other; on PostgreSQL it holds a lock of the tenant's
until the commit, on SQLite the transaction has the whole file. Events are counts, tokens, digests, and words of Weir's
own.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from hashlib import blake2b, sha256
from typing import Any

import sqlalchemy as sa

from policies.health import Checkup
from policies.ledger import ADDING, DROPPING, WINDOWS, Cut, Edit, EditKind, Event
from proxy.store.chain import (
    GENESIS,
    OPERATOR,
    AuditEvent,
    AuditRow,
    AuditType,
    Broken,
    Verified,
    VerifiedChains,
    digest_of,
    hash_of,
    head_text,
    linked,
    name_digest,
)
from proxy.store.packing import BRANCH, CONVERSATION, REQUEST, TENANT, Damaged, unpack_words
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
SEALED_AT_ONCE = 1_000
GUARDS = frozenset({"audit_appends", "audit_never_changes", "audit_goes_sealed"})
MINE = of(audit, "tenant")
HEAD = sa.select(audit.c.seq, audit.c.hash).where(MINE).order_by(audit.c.seq.desc()).limit(1)
LOCK = sa.select(sa.func.pg_advisory_xact_lock(sa.bindparam("key", type_=sa.BigInteger)))
ADD = sa.insert(audit)
STARTS = sa.select(audit.c.tenant, sa.func.min(audit.c.seq)).group_by(audit.c.tenant).order_by(audit.c.tenant)
SEALS = sa.select(audit.c.tenant, sa.func.max(audit.c.sealed).label("sealed")).where(audit.c.sealed > 0)
SEALS = SEALS.group_by(audit.c.tenant).order_by(audit.c.tenant)
YOUNGEST = sa.select(audit.c.seq).where(MINE, audit.c.at >= sa.bindparam("before")).order_by(audit.c.seq).limit(1)
WORTH_SEALING = sa.select(sa.func.count()).where(
    MINE, audit.c.seq < sa.bindparam("end"), audit.c.type != str(AuditType.SEAL)
)
DROP_SEALED = sa.delete(audit).where(MINE, audit.c.seq < sa.bindparam("end"))
ONE = sa.select(audit.c.prev, audit.c.hash).where(of(audit, "tenant", "seq"))


def append(tx: Transaction, events: Sequence[AuditEvent]) -> None:
    for tenant in sorted({event.tenant for event in events}):
        seq, prev = hold_head(tx, tenant)
        rows = linked((event for event in events if event.tenant == tenant), seq=seq, prev=prev)
        tx.many(ADD, [stored(audit, row) for row in rows])


def append_if(tx: Transaction, change: sa.Update | sa.Delete, event: AuditEvent) -> bool:
    """Whether a statement changed a row, which is told then."""
    found = tx.execute(change).rowcount > 0
    append(tx, [event] if found else [])
    return found


def hold_head(tx: Transaction, tenant: str) -> tuple[int, bytes]:
    """The last row's number and hash, which nobody else can write behind until this transaction ends."""
    if tx.dialect == "postgresql":
        key = int.from_bytes(blake2b(b"weir audit " + tenant.encode(), digest_size=8).digest(), "big", signed=True)
        tx.execute(LOCK, {"key": key})
    row = tx.execute(HEAD, {"of_tenant": tenant}).first()
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
    query, order = sa.select(audit), [(audit.c.at, True), (audit.c.tenant, False), (audit.c.seq, True)]
    only: dict[str, object] = {} if kind is None else {"type": kind}
    if conversation is not None:
        only["conversation"] = [conversation, *_deleted_as(tx, tenant, conversation)]
    order = order if tenant is None else order[2:]
    rows = tx.execute(ordered(query.where(owned(audit, tenant, **only)), order, after=after, limit=limit))
    return [recorded(AuditRow, audit, row) for row in rows]


def tenants(tx: Transaction) -> list[str]:
    return list(tx.scalars(STARTS))


def seal_one(tx: Transaction, *, before: float, at: float) -> bool:
    """Seal the rows from before ``before`` at the start of one chain; False when no chain has any.

    The seal is a row like any other at the chain's end: which rows it stands for, and the hashes before and after.
    """
    seals = {row.tenant: row.sealed for row in tx.execute(SEALS)}
    for tenant, first in tx.execute(STARTS).all():
        seq, _ = hold_head(tx, tenant)
        sealed = seals.get(tenant, 0)
        youngest = tx.scalar(YOUNGEST, {"of_tenant": tenant, "before": before})
        end = seq + 1 if youngest is None else youngest
        if end - 1 <= sealed or not tx.scalar(WORTH_SEALING, {"of_tenant": tenant, "end": end}):
            continue
        start = max(first, sealed + 1)
        opening = tx.execute(ONE, {"of_tenant": tenant, "of_seq": start}).one()
        last = tx.execute(ONE, {"of_tenant": tenant, "of_seq": end - 1}).one()
        facts = {
            "first": start,
            "last": end - 1,
            "count": end - start,
            "before": opening.prev,
            "after": last.hash,
            "older_than": before,
        }
        append(tx, [AuditEvent(tenant, at, AuditType.SEAL, sealed=end - 1, facts=facts)])
        return True
    return False


def drop_sealed(tx: Transaction) -> int:
    for tenant, sealed in tx.execute(SEALS).all():
        first = tx.scalar(sa.select(sa.func.min(audit.c.seq)).where(owned(audit, tenant)))
        if first is not None and first <= sealed:
            end = min(sealed + 1, first + SEALED_AT_ONCE)
            return tx.execute(DROP_SEALED, {"of_tenant": tenant, "end": end}).rowcount
    return 0


def missing_guards(tx: Transaction) -> list[str]:
    guards, query = GUARDS, "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'audit'"
    if tx.dialect == "postgresql":
        guards = GUARDS | {"audit_stays"}
        query = "SELECT tgname FROM pg_trigger WHERE tgrelid = 'audit'::regclass AND tgenabled <> 'D'"
    return sorted(guards - set(tx.scalars(sa.text(query))))


def of_change(change: Change, *, conversation: str, version: int | None) -> list[AuditEvent]:
    """What a batch did: evicted, cut, saved, pinned. ``version`` is None for one that is not in the database."""
    told: list[tuple[AuditType, dict[str, object]]] = []
    figures = dict(change.figures)
    gone = [row for row in change.evictions if row.kind != CUT]
    edited = [edit for edit in change.edits if edit.kind not in ADDING]
    if gone or edited:
        condensed = [each for each in change.condensed if each["strategy"] != COMPACT]
        also = {"condensed": condensed, "calls": sum(each["calls"] for each in condensed)} if condensed else {}
        told.append((AuditType.EVICTION, figures | _evicted(gone, edited) | also))
    if change.cut is not None:
        told.append((_type_of(change.cut), figures | _cut(change.cut, change)))
    if change.checkpoint is not None:
        told.append((AuditType.SAVE, _saved(change)))
    pinned = [edit.ref for edit in change.edits if edit.kind is EditKind.PIN]
    if pinned:
        told.append((AuditType.PIN, {"refs": pinned[:MAX_REFS]}))
    shared: dict[str, object] = {"version": version, "messages": change.length}
    return [_of_request(change, conversation, kind, change.request, shared | facts) for kind, facts in told]


def _of_request(
    by: Change | ExchangeRow, conversation: str, kind: AuditType, request: str, facts: Mapping[str, object]
) -> AuditEvent:
    return AuditEvent(by.tenant, by.at, kind, conversation, by.branch, request, facts=facts)


def _type_of(cut: Cut) -> AuditType:
    if cut.origin in WINDOWS:
        return AuditType(cut.origin)
    return AuditType.EVICTION if cut.origin in DROPPING else AuditType.COMPACTION


def _evicted(rows: Sequence[EvictionRow], edits: Sequence[Edit]) -> dict[str, object]:
    if not rows:
        refs, kinds = [edit.ref for edit in edits], Counter(str(edit.kind) for edit in edits)
        return {"count": len(edits), "kinds": kinds, "refs": refs[:MAX_REFS]}
    before, after = sum(row.tokens_before for row in rows), sum(row.tokens_after for row in rows)
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
        "scorers": sorted({row.scorer for row in rows if row.scorer}),
        "refs": [row.digest[:REF_BYTES].hex() for row in rows[:MAX_REFS]],
        "rows": digest_of_evictions(rows),
    }


def digest_of_evictions(rows: Iterable[EvictionRow]) -> bytes:
    digest = sha256()
    for row in rows:
        tokens = f"{row.tokens_before} {row.tokens_after} {row.tokens_remaining}"
        digest.update(f"{row.digest.hex()} {row.occurrence} {row.kind} {row.layer} {row.scorer} {tokens}\n".encode())
    return digest.digest()


def _cut(cut: Cut, change: Change) -> dict[str, object]:
    rows = [row for row in change.evictions if row.kind == CUT]
    told = next((each for each in change.condensed if each["strategy"] == COMPACT), {})
    before = sum(row.tokens_before for row in rows)
    original = told.get("original_tokens", before)
    found: dict[str, object] = {
        "strategy": cut.layer,
        "origin": cut.origin,
        "cut": cut.version,
        "covers": cut.covers,
        "removed": len(change.covered),
        "ref": cut.ref,
        "tokens_before": before,
        "summary_tokens": cut.tokens,
        "original_tokens": original,
        "compressed_tokens": cut.tokens,
        "compression_ratio": round(original / cut.tokens, 2) if isinstance(original, int) and cut.tokens else None,
        "content": digest_of(cut.text),
        "fidelity": None,
        "calls": told.get("calls", 0),
        "prompt": told.get("purpose"),
        "prompt_digest": told.get("prompt_digest"),
        "failure": told.get("failure") or None,
    }
    if rows:
        found |= {"policy": rows[-1].policy, "remaining": rows[-1].tokens_remaining, "rows": digest_of_evictions(rows)}
    return found | ({"window": change.window_id} if cut.origin in WINDOWS else {})


def _saved(change: Change) -> dict[str, object]:
    body = (change.checkpoint or "").encode("utf-8", "surrogatepass")
    return {"reason": change.reason, "window": change.window_id, "size": len(body), "content": sha256(body).digest()}


def of_exchange(row: ExchangeRow, *, conversation: str) -> list[AuditEvent]:
    """What a request said of budgets and pressure, and that it was refused: a row of each type at most."""
    found: dict[AuditType, list[dict[str, object]]] = {}
    for event in row.events:
        kind = OF_EVENT.get(event.kind)
        if kind is not None:
            found.setdefault(kind, []).append(_event(event))
    shared: dict[str, object] = {"messages": row.length, "policy": row.policy, "action": row.action}
    if row.observed:
        shared["observed"] = True
    told = [(kind, shared | {"pressure": round(row.pressure, 4), "events": each}) for kind, each in found.items()]
    if row.health is not None and (row.health.opened or row.health.closed):
        told.append((AuditType.ALERT, shared | _alerts(row.health)))
    if row.outcome == REFUSED or row.refusal:
        if "bucket" in row.refusal and AuditType.BUDGET_VIOLATION not in found:
            told.append((AuditType.BUDGET_VIOLATION, shared | {"events": [_over(row.refusal)]}))
        told.append((AuditType.REFUSED, shared | {"status": row.status, "code": REFUSED, **row.refusal}))
    return [_of_request(row, conversation, kind, row.id, facts) for kind, facts in told]


def _alerts(checkup: Checkup) -> dict[str, object]:
    opened = [
        {"kind": a.kind, "level": a.level, "class": a.category, "value": round(a.value, 4), "threshold": a.limit}
        for a in checkup.opened
    ]
    return {"opened": opened, "closed": [{"kind": each.kind, "since": each.at} for each in checkup.closed]}


def _event(event: Event) -> dict[str, object]:
    facts = {name: value.replace(" ", "_") if isinstance(value, str) else value for name, value in event.facts.items()}
    return {"kind": event.kind, **facts}


def _over(refusal: Mapping[str, object]) -> dict[str, object]:
    used, cap = refusal.get("used"), refusal.get("cap")
    excess = used - cap if isinstance(used, int) and isinstance(cap, int) else None
    facts = {"component": refusal.get("bucket"), "current": used, "limit": cap, "excess": excess}
    return {"kind": "hard_violation", "allowed": False, "reason": "over_its_cap", **facts}


def of_deletion(
    tenant: str, conversation: str, *, name: str, at: float, reason: str, counts: Mapping[str, int]
) -> AuditEvent:
    facts = {"reason": reason, "name": name_digest(tenant, name), **counts}
    return AuditEvent(tenant, at, AuditType.DELETE, conversation, facts=facts)


def of_notes(tenant: str, conversation: str, notes: Sequence[NoteRow]) -> AuditEvent:
    facts = {
        "count": len(notes),
        "categories": Counter(note.category for note in notes),
        "sources": Counter(note.source for note in notes),
        "ids": [note.id for note in notes[:MAX_REFS]],
    }
    return AuditEvent(tenant, max(note.at for note in notes), AuditType.NOTE, conversation, facts=facts)


def of_policy(row: PolicyRow | str, *, at: float) -> AuditEvent:
    facts: dict[str, object] = {"change": "removed", "policy": row}
    if isinstance(row, PolicyRow):
        facts = {"change": "set", "policy": row.name, "document": digest_of(row.document)}
    return AuditEvent(OPERATOR, at, AuditType.POLICY_CHANGE, facts=facts)


def of_key(key: KeyRow | str, *, at: float, change: str = "created") -> AuditEvent:
    facts: dict[str, object] = {"change": "revoked", "key": key}
    if isinstance(key, KeyRow):
        own = {"key": key.name, "policy": key.policy, "models": len(key.models), "allow": list(key.allow)}
        limits = {name: getattr(key, name) for name in ("concurrency", "requests_per_minute", "expires")}
        facts = {"change": change, "digest": key.digest, **own, **{n: v for n, v in limits.items() if v is not None}}
    return AuditEvent(OPERATOR, at, AuditType.KEY_CHANGE, facts=facts)


def _deleted_as(tx: Transaction, tenant: str | None, name: str) -> list[str]:
    query = sa.select(audit.c.tenant, audit.c.conversation, audit.c.facts)
    query = query.where(owned(audit, tenant, type=str(AuditType.DELETE)))
    return [row.conversation for row in tx.execute(query) if name_digest(row.tenant, name) in row.facts]


AT_ONCE = 2_000
FIRST = -(2**63)
NAMES = [each.name for each in fields(AuditRow)]
FIELDS = ", ".join(NAMES)
# As text: a column that was tampered with may hold a value of another type, which no conversion would let through.
PAGE = sa.text(
    f"SELECT {FIELDS} FROM audit WHERE tenant = :tenant AND seq > :seq ORDER BY seq LIMIT {AT_ONCE}"  # noqa: S608 - constants
).bindparams(OF_TENANT)
AFTER = sa.text(
    f"SELECT {FIELDS} FROM audit WHERE tenant = :tenant AND prev = :prev ORDER BY seq LIMIT 5"  # noqa: S608
).bindparams(OF_TENANT)
BEFORE = sa.text("SELECT seq FROM audit WHERE tenant = :tenant AND hash = :prev ORDER BY seq LIMIT 1").bindparams(
    OF_TENANT
)
LAST_SEAL = (
    sa.text(
        "SELECT sealed, facts FROM audit WHERE tenant = :tenant AND sealed > 0 ORDER BY sealed DESC, seq DESC LIMIT 1"
    )
    .bindparams(OF_TENANT)
    .columns(sa.column("sealed"), audit.c.facts)
)
CHAINS = sa.text("SELECT tenant, count(*) AS size FROM audit GROUP BY tenant ORDER BY tenant").columns(
    audit.c.tenant, sa.column("size", sa.Integer)
)

IDS = {"tenant": TENANT, "conversation": CONVERSATION, "branch": BRANCH, "request": REQUEST}
Progress = Callable[[int, int], None]


def _raw(row: sa.Row[*tuple[Any, ...]]) -> AuditRow:
    """A row as it stands there; what was tampered with may have values of other types."""
    found: dict[str, Any] = dict(zip(NAMES, row, strict=True))
    found |= {name: kind.shown(found[name]) for name, kind in IDS.items()}
    with suppress(Damaged):
        found["facts"] = unpack_words(found["facts"]) if isinstance(found["facts"], bytes) else found["facts"]
    return AuditRow(**found)


def _is_at(row: AuditRow, seq: int) -> bool:
    """Whether a row is what its hash says, under this number."""
    _, _, *told, link = (getattr(row, name) for name in NAMES)
    try:
        return bool(hash_of(row.tenant, seq, *told) == link)
    except (TypeError, ValueError):
        return False


def verify(
    tx: Transaction, tenant: str | None = None, *, heads: Collection[bytes] = (), progress: Progress | None = None
) -> VerifiedChains:
    """Every chain of the audit, or a tenant's, walked to the first row that is wrong.

    ``progress`` is told after every page how many rows of how many were looked at, on the thread of the store.
    """
    sizes = {row.tenant: row.size for row in tx.execute(CHAINS) if tenant is None or row.tenant == tenant}
    total, done, found = sum(sizes.values()), 0, []
    for each, size in sizes.items():
        walk = _Walk(tx, each, frozenset(heads))
        for number in walk.pages():
            if progress is not None:
                progress(done + min(number, size), total)
        done += size
        found.append(walk.result(size))
    return VerifiedChains(found, missing_guards(tx))


class _Walk:
    def __init__(self, tx: Transaction, tenant: str, heads: frozenset[bytes]) -> None:
        self._tx = tx
        self._tenant = tenant
        self._heads = heads
        self._found: set[bytes] = set()
        self._good = 0
        self._seq, self._link = 0, GENESIS
        self._sealed, self._seal_link = self._last_seal()
        self._broken: Broken | None = None

    def pages(self) -> Iterator[int]:
        at, looked = FIRST, 0
        while rows := [_raw(row) for row in self._tx.execute(PAGE, {"tenant": self._tenant, "seq": at})]:
            if looked == 0:
                self._begin(rows[0])
            self._broken = next((broken for row in rows if (broken := self._look(row)) is not None), None)
            if self._broken is not None:
                return
            at, looked = self._seq, looked + len(rows)
            yield looked

    def result(self, size: int) -> Verified:
        return Verified(
            tenant=self._tenant,
            rows=size,
            good=self._good,
            sealed=self._sealed,
            head=head_text(self._seq, self._link) if self._good else "",
            broken=self._broken,
            found=frozenset(self._found),
        )

    def _last_seal(self) -> tuple[int, bytes | None]:
        row = self._tx.execute(LAST_SEAL, {"tenant": self._tenant}).first()
        if row is None:
            return 0, None
        try:
            return int(row.sealed), bytes.fromhex(json.loads(row.facts)["after"])
        except (KeyError, TypeError, ValueError):
            return 0, None

    def _begin(self, row: AuditRow) -> None:
        first = row.seq
        if self._seal_link is None or first == 1 or not isinstance(first, int):
            return
        if first > self._sealed:
            self._advance(self._sealed, self._seal_link)
        elif 1 < first <= self._sealed and isinstance(row.prev, bytes):
            self._seq, self._link = first - 1, row.prev

    def _look(self, row: AuditRow) -> Broken | None:
        expected = self._seq + 1
        if row.seq != expected or row.prev != self._link or not _is_at(row, expected) or not self._agrees(row):
            return self._diagnosed(row, expected)
        self._advance(expected, row.hash)
        self._good += 1
        return None

    def _agrees(self, row: AuditRow) -> bool:
        if row.seq == self._sealed and row.hash != self._seal_link:
            return False
        return (row.type == AuditType.SEAL) == (row.sealed > 0)

    def _advance(self, seq: int, link: bytes) -> None:
        self._seq, self._link = seq, link
        self._found |= self._heads & {link}

    def _diagnosed(self, row: AuditRow, expected: int) -> Broken:
        if not isinstance(row.seq, int) or row.seq < 1:
            return Broken(row.seq if isinstance(row.seq, int) else expected, "inserted")
        if row.seq > expected:
            return Broken(expected, "missing")
        rightful = self._fits(expected)
        if _is_at(row, expected):
            if row.prev == self._link or self._good == 0:
                return Broken(expected, "edited")
            return Broken(expected - 1, "edited")
        true = self._place_of(row)
        if true is None or true == expected:
            return Broken(expected, "inserted" if rightful else "edited")
        if true < expected:
            return Broken(true, "inserted")
        return Broken(expected, "reordered" if rightful else "missing")

    def _fits(self, seq: int) -> bool:
        rows = self._tx.execute(AFTER, {"tenant": self._tenant, "prev": self._link})
        return any(raw.seq != seq and _is_at(raw, seq) for raw in (_raw(row) for row in rows))

    def _place_of(self, row: AuditRow) -> int | None:
        tried = {row.seq - 1, row.seq + 1}
        if isinstance(row.prev, bytes):
            before = self._tx.execute(BEFORE, {"tenant": self._tenant, "prev": row.prev}).scalar()
            tried |= {before + 1} if isinstance(before, int) else {1} if row.prev == GENESIS else set()
        return next((seq for seq in sorted(tried) if _is_at(row, seq)), None)
