"""The schema's history: what brings an older database to the tables of today.

A new database is made by :func:`proxy.store.schema.make`. The first schema that databases are brought up from is the
first of :data:`~proxy.store.schema.REVISIONS`, each other one has a step here.
"""

from collections.abc import Callable, Mapping

import msgspec
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

from proxy.store.chain import AuditRow, hash_of
from proxy.store.exchanges import add_up_days
from proxy.store.packing import Damaged, pack_named, unpack
from proxy.store.schema import (
    FULL_TEXT,
    HEAD,
    REVISIONS,
    alembic_version,
    answer_items,
    answers,
    audit,
    cuts,
    edits,
    exchanges,
    frames,
    inspected,
    inspected_parts,
    key_use,
    limits,
    meta,
    provider_ids,
    relayed,
    usage_days,
)
from proxy.store.transaction import of, recorded

NEVER = 1e10
"""A time that no clock will show, seconds since 1970."""


def upgrade(connection: sa.Connection, *, found: str) -> None:
    """Work on the connection, and in the transaction, that is given; ``found`` is the revision that it has."""
    op = Operations(MigrationContext.configure(connection))
    for revision in REVISIONS[REVISIONS.index(found) + 1 :]:
        STEPS[revision](connection, op)
    connection.execute(sa.update(alembic_version).values(version_num=HEAD))


def add_answers(connection: sa.Connection, _: Operations) -> None:
    for table in (answers, answer_items, inspected, inspected_parts):
        table.create(connection)


def limit_keys(connection: sa.Connection, op: Operations) -> None:
    for name, kind in (("concurrency", sa.BigInteger), ("requests_per_minute", sa.BigInteger), ("expires", sa.Double)):
        op.add_column("keys", sa.Column(name, kind))
    op.drop_index("exchanges_of_conversation", "exchanges")
    for index in exchanges.indexes:
        if index.name in ("exchanges_of_conversation", "exchanges_of_tenant"):
            index.create(connection)


def frame_originals(connection: sa.Connection, op: Operations) -> None:
    op.add_column("originals", sa.Column("frame", sa.BigInteger))
    op.add_column("checkpoints", sa.Column("base", sa.Integer))
    op.add_column("branches", sa.Column("failed", sa.Integer))
    frames.create(connection)
    op.rename_table("inspected_parts", "inspected_parts_before")
    if connection.dialect.name == "postgresql":  # an index keeps its name when its table does not
        op.execute("ALTER INDEX inspected_parts_pkey RENAME TO inspected_parts_before_pkey")
    inspected_parts.create(connection)
    own = inspected_parts.c
    before = sa.table(
        "inspected_parts_before",
        sa.column("tenant", own.tenant.type),
        sa.column("conversation", own.conversation.type),
        sa.column("ref", sa.Text),
        sa.column("body", sa.LargeBinary),
    )
    homes = connection.execute(sa.select(before.c.tenant, before.c.conversation).distinct()).all()
    for tenant, conversation in homes:
        mine = (before.c.tenant == tenant, before.c.conversation == conversation)
        bodies = {}
        for ref, body in connection.execute(sa.select(before.c.ref, before.c.body).where(*mine).order_by(before.c.ref)):
            try:
                bodies[ref] = unpack(body, parts=1)
            except Damaged:
                continue
        if bodies:
            row = {"tenant": tenant, "conversation": conversation, "number": 1, "refs": " ".join(bodies)}
            connection.execute(sa.insert(inspected_parts), row | {"body": pack_named(bodies)})
    op.drop_table("inspected_parts_before")
    if connection.dialect.name == "sqlite":  # the words of what is there are indexed again in small steps
        op.execute("DROP TABLE originals_fts")
        op.execute(FULL_TEXT)
        connection.execute(sa.update(meta).where(meta.c.name == "indexed").values(number=0))


def await_usage_days(_: sa.Connection, __: Operations) -> None:
    """Do nothing: what came with this revision is made anew by ``keep_usage_apart``, which adds up what there is."""


def keep_usage_apart(connection: sa.Connection, op: Operations) -> None:
    """Usage no longer goes with its conversation, and has what was only relayed in it."""
    added = sa.Column("usage_estimated", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("exchanges", added)
    if not sa.inspect(connection).has_table("usage_days"):
        usage_days.create(connection)
        add_up_days(connection, exchanges)
    else:
        op.rename_table("usage_days", "usage_days_before")
        op.drop_index("usage_days_at", "usage_days_before")
        if connection.dialect.name == "postgresql":  # an index keeps its name when its table does not
            op.execute("ALTER INDEX usage_days_pkey RENAME TO usage_days_before_pkey")
        usage_days.create(connection)
        names = [column.name for column in usage_days.c if column.name != "estimated"]
        before = sa.table("usage_days_before", *(sa.column(name, usage_days.c[name].type) for name in names))
        taken = sa.select(*before.c, sa.literal(0))
        connection.execute(sa.insert(usage_days).from_select([*names, "estimated"], taken))
        op.drop_table("usage_days_before")
    add_up_days(connection, relayed)


def add_provider_ids(connection: sa.Connection, _: Operations) -> None:
    provider_ids.create(connection)


def forget_rounds(_: sa.Connection, op: Operations) -> None:
    op.execute("DELETE FROM edits WHERE kind = 'round'")  # of the recall tool on endpoints where it is offered no more


def hash_anew(connection: sa.Connection, op: Operations) -> None:
    """Without what made sure of the audit by triggers and seals: hashes cover other fields, and are made anew."""
    if connection.dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_guard() CASCADE")
    else:
        for name in ("audit_appends", "audit_never_changes", "audit_goes_sealed"):
            op.execute(f"DROP TRIGGER IF EXISTS {name}")
    op.drop_table("spending")
    op.drop_index("audit_seals", "audit")
    op.drop_column("audit", "sealed")
    for name in ("call_hash", "asked_again_at", "asked_again_count"):
        op.drop_column("evictions", name)
    change = sa.update(audit).where(of(audit, "tenant", "seq"))
    change = change.values(prev=sa.bindparam("new_prev"), hash=sa.bindparam("new_hash"))
    query = sa.select(audit).where(of(audit, "tenant"), audit.c.seq > sa.bindparam("after"))
    query = query.order_by(audit.c.seq).limit(1_000)
    for tenant in connection.scalars(sa.select(audit.c.tenant).distinct()).all():
        prev = None
        after = -1
        while rows := connection.execute(query, {"of_tenant": tenant, "after": after}).all():
            changed = []
            for each in rows:
                row = recorded(AuditRow, audit, each)
                row = msgspec.structs.replace(row, prev=row.prev if prev is None else prev)
                prev = hash_of(row)
                changed.append({"of_tenant": tenant, "of_seq": row.seq, "new_prev": row.prev, "new_hash": prev})
            connection.execute(change, changed)
            after = rows[-1].seq


def limit_kinds(connection: sa.Connection, op: Operations) -> None:
    """Limits are of a kind; that an upstream counts the answer into the window is one of them."""
    plain = limits.c.scope.type
    names = ("token_limit", "seen", "expires")
    before = sa.table("limits", sa.column("scope", plain), *(sa.column(name) for name in names))
    known = connection.execute(sa.select(before)).all()
    strict = sa.table("calibrations", sa.column("scope", plain), sa.column("strict", sa.Boolean))
    counting = connection.scalars(sa.select(strict.c.scope).where(strict.c.strict)).all()
    op.drop_table("limits")
    limits.create(connection)
    rows = [dict(zip(("scope", "limit", "seen", "expires"), row, strict=True), kind="tokens") for row in known]
    rows += [{"scope": each, "kind": "completion", "limit": 0, "seen": 1, "expires": NEVER} for each in counting]
    if rows:
        connection.execute(sa.insert(limits), rows)
    op.drop_column("calibrations", "strict")


def add_key_use(connection: sa.Connection, _: Operations) -> None:
    key_use.create(connection)


def add_windows(connection: sa.Connection, op: Operations) -> None:
    """What was decided holds for one window; what was decided before that, for every one."""
    op.add_column("branches", sa.Column("floating", sa.Text))
    op.drop_index("cuts_ref", "cuts")
    for table in (edits, cuts):
        before = f"{table.name}_before"
        op.rename_table(table.name, before)
        if connection.dialect.name == "postgresql":  # an index keeps its name when its table does not
            op.execute(f"ALTER INDEX {table.name}_pkey RENAME TO {before}_pkey")
        table.create(connection)
        names = ", ".join([column.name for column in table.c if column.name != "window_tokens"])
        op.execute(f"INSERT INTO {table.name} (window_tokens, {names}) SELECT 0, {names} FROM {before}")  # noqa: S608
        op.drop_table(before)


STEPS: Mapping[str, Callable[[sa.Connection, Operations], None]] = {
    "0016": add_answers,
    "0017": limit_keys,
    "0018": frame_originals,
    "0019": await_usage_days,
    "0020": add_provider_ids,
    "0021": forget_rounds,
    "0022": hash_anew,
    "0023": limit_kinds,
    "0024": add_key_use,
    "0025": keep_usage_apart,
    "0026": add_windows,
}
