"""What all requests share: the API keys with the secret that hashes them, policies, and what was
learned of upstreams.
"""

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from proxy.store import schema
from proxy.store.audit import append, append_if, hold_last, of_key, of_policy
from proxy.store.chain import OPERATOR, AuditEvent, AuditType, harmless
from proxy.store.records import CalibrationRow, KeyRow, LimitRow, NameTaken, PolicyRow
from proxy.store.schema import audit, conversations, keys, meta, policies
from proxy.store.transaction import Transaction, keep_first, keep_last, recorded, stored

R = TypeVar("R")
SECRET_BYTES = 32
MAX_COMPARED = 500
ADD_KEY = keep_first(keys)
MAKE_SECRET = keep_first(meta)
STORED_SECRET = sa.select(meta.c.body).where(meta.c.name == "secret")
SAVE_POLICY = keep_last(policies)
LEARN = keep_last(schema.limits)
CALIBRATE = keep_last(schema.calibrations)
FACT = "fact:"
FACTS = sa.select(meta).where(
    meta.c.name.in_(sa.bindparam("names", expanding=True)), meta.c.number >= sa.bindparam("now")
)
TELL = keep_last(meta, "body", "number")
TENANT = "tenant:"
TENANT_DIGITS = 32
TENANTS = sa.select(meta.c.name, meta.c.body).where(meta.c.name.startswith(TENANT))


def make_secret(tx: Transaction) -> bytes:
    tx.execute(MAKE_SECRET, {"name": "secret", "body": secrets.token_bytes(SECRET_BYTES)})
    return bytes(tx.execute(STORED_SECRET).scalar_one())


def stored_secret(tx: Transaction) -> bytes | None:
    return tx.scalar(STORED_SECRET)


def add_key(tx: Transaction, key: KeyRow) -> None:
    if not tx.is_new(ADD_KEY, stored(keys, key)):
        raise NameTaken(
            f"a key named {key.name!r}, or with the same secret, exists already", reason="name"
        )
    append(tx, [of_key(key, at=key.created)])


def list_keys(tx: Transaction) -> list[KeyRow]:
    tenants = {row.name: row.body.decode() for row in tx.execute(TENANTS)}
    return [
        recorded(KeyRow, keys, row, tenant=tenants.get(TENANT + row.digest))
        for row in tx.execute(sa.select(keys).order_by(keys.c.created, keys.c.name))
    ]


def rotate_key(tx: Transaction, name: str, digest: str, *, at: float, until: float) -> str | None:
    found = next((key for key in list_keys(tx) if key.name == name and key.revoked is None), None)
    if found is None:
        return None
    former = f"{name}-until-{int(until)}"
    tx.execute(sa.update(keys).where(keys.c.name == name).values(name=former, revoked=until))
    tenant = found.tenant or found.digest[:TENANT_DIGITS]
    tx.execute(MAKE_SECRET, {"name": TENANT + digest, "body": tenant.encode()})
    append(tx, [of_key(former, at=at)])
    add_key(tx, msgspec.structs.replace(found, digest=digest, created=at))
    return former


def change_key(
    tx: Transaction,
    name: str,
    values: Mapping[str, object],
    at: float,
    *,
    change: str = "limited",
) -> bool:
    changed = sa.update(keys).where(keys.c.name == name, keys.c.revoked.is_(None)).values(**values)
    found = tx.execute(changed).rowcount == 1
    if found:
        append(
            tx,
            [of_key(next(key for key in list_keys(tx) if key.name == name), at=at, change=change)],
        )
    return found


def revoke_key(tx: Transaction, name: str, at: float) -> bool:
    mine = (keys.c.name == name, sa.or_(keys.c.revoked.is_(None), keys.c.revoked > at))
    return append_if(tx, sa.update(keys).where(*mine).values(revoked=at), of_key(name, at=at))


def save_policy(tx: Transaction, name: str, document: str, at: float) -> None:
    row = PolicyRow(name=name, document=document, at=at)
    tx.execute(SAVE_POLICY, stored(policies, row))
    append(tx, [of_policy(row, at=at)])


def delete_policy(tx: Transaction, name: str, at: float) -> bool:
    return append_if(tx, sa.delete(policies).where(policies.c.name == name), of_policy(name, at=at))


def note_changes(tx: Transaction, changes: Sequence[AuditEvent]) -> None:
    if not changes:
        return
    hold_last(tx, OPERATOR)
    known: dict[tuple[str, object], object] = {}
    kinds = (AuditType.POLICY_CHANGE, AuditType.KEY_CHANGE)
    query = sa.select(audit.c.type, audit.c.facts).where(
        audit.c.tenant == OPERATOR, audit.c.type.in_(kinds)
    )
    for row in tx.execute(query.order_by(audit.c.seq.desc()).limit(MAX_COMPARED)):
        facts = json.loads(row.facts)
        known.setdefault(_subject(row.type, facts), facts)
    compared = [(each, harmless(each.facts)) for each in changes]
    append(tx, [each for each, facts in compared if known.get(_subject(each.type, facts)) != facts])


def _all_of(kind: type[R], table: sa.Table) -> Callable[[Transaction], list[R]]:
    query = sa.select(table).order_by(*table.primary_key.columns)
    return lambda tx: [recorded(kind, table, row) for row in tx.execute(query)]


all_policies = _all_of(PolicyRow, policies)
all_limits = _all_of(LimitRow, schema.limits)
all_calibrations = _all_of(CalibrationRow, schema.calibrations)


def learn(
    tx: Transaction, *, calibrations: Sequence[CalibrationRow] = (), limits: Sequence[LimitRow] = ()
) -> None:
    ratios = {row.scope: stored(schema.calibrations, row) for row in calibrations}
    tx.many(CALIBRATE, [ratios[scope] for scope in sorted(ratios)])
    sizes = {(row.scope, row.kind): stored(schema.limits, row) for row in limits}
    tx.many(LEARN, [sizes[key] for key in sorted(sizes)])


def forget_limit(tx: Transaction, scope: str) -> bool:
    return tx.execute(sa.delete(schema.limits).where(schema.limits.c.scope == scope)).rowcount > 0


def facts(tx: Transaction, names: Sequence[str], at: float) -> dict[str, tuple[str, float]]:
    rows = tx.execute(FACTS, {"names": [FACT + name for name in names], "now": int(at)})
    return {row.name.removeprefix(FACT): (row.body.decode(), float(row.number)) for row in rows}


def tell(tx: Transaction, name: str, value: str, *, until: float, at: float) -> None:
    tx.execute(
        sa.delete(meta).where(
            meta.c.name.startswith(FACT, autoescape=True), meta.c.number < int(at)
        )
    )
    tx.execute(TELL, {"name": FACT + name, "body": value.encode(), "number": math.ceil(until)})


def newest(tx: Transaction) -> float | None:
    """When a conversation was used last, seconds since the epoch; None where there is none."""
    found: float | None = tx.scalar(sa.select(sa.func.max(conversations.c.updated)))
    return found


def _subject(kind: str, facts: object) -> tuple[str, object]:
    named = facts if isinstance(facts, dict) else {}
    return (str(kind), named.get("policy") if kind == AuditType.POLICY_CHANGE else named.get("key"))
