"""The tables, each column declared once, where SQLite and PostgreSQL differ, and which revision a database has.

Every table that holds something of a conversation has ``tenant`` as the first column of its key, and every
statement on it names the tenant. What people wrote is kept as exact UTF-8 bytes (``EXACT``), because
JSON may carry lone surrogates and NUL, which neither database takes as text.

Columns that a record of :mod:`proxy.store.records` has as well are taken from its fields. A new database is made of
these tables; migrations are for what is older. Alembic is loaded only where there is something to migrate: it costs
110 ms and 9 MB at every start otherwise.
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import sqlalchemy as sa

from policies.ledger import Cut, Edit
from policies.quality.health import Snapshot
from proxy.store import records
from proxy.store.chain import AuditRow
from proxy.store.packing import FRAME, Damaged, exact_bytes, pack_text, pack_words, unpack_text, unpack_words
from proxy.store.records import SchemaTooNew, StoreError, is_disconnect, is_retried

R = TypeVar("R")
Bind = Callable[[Any], Any]
REVISIONS = ("0013", "0016", "0017", "0018", "0019")
HEAD = REVISIONS[-1]
NOTHING: Mapping[str, str] = MappingProxyType({})
HEX = re.compile(r"(?:[0-9a-f]{2})+").fullmatch
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def plain_text(value: str) -> str:
    if value.isascii() and "\0" not in value:
        return value
    return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


class StoredText(sa.types.TypeDecorator[str]):
    """Text that is stored as ``write`` makes it, and shown as ``read`` reads that; text that is no bytes as it is."""

    impl: Any = sa.Text
    cache_ok = True

    def __init__(self, write: Bind = plain_text, read: Bind | None = None) -> None:
        super().__init__()
        self.write = write
        self.read = read

    def binding(self, dialect: sa.Dialect) -> Bind | None:  # noqa: ARG002 - those of ids differ
        return self.write

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        bind = None if value is None else self.binding(dialect)
        return value if bind is None else bind(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return self.read(value) if isinstance(value, bytes) and self.read is not None else value


class StoredBytes(StoredText):
    impl = sa.LargeBinary
    cache_ok = True


class Id(StoredText):
    """An id of Weir's own: ``prefix`` and hex digits. SQLite keeps the bytes alone, and any other text as it is."""

    cache_ok = True

    def __init__(self, prefix: str = "") -> None:
        super().__init__(partial(_bytes_of, prefix), self.shown)
        self.prefix = prefix

    def binding(self, dialect: sa.Dialect) -> Bind | None:
        return self.write if dialect.name == "sqlite" else None

    def shown(self, stored: object) -> Any:
        return self.prefix + stored.hex() if isinstance(stored, bytes) else stored


@lru_cache(maxsize=4_096)  # one batch has the same few many times
def _bytes_of(prefix: str, value: str) -> str | bytes:
    digits = value[len(prefix) :]
    return bytes.fromhex(digits) if digits and value.startswith(prefix) and HEX(digits) else value


def _exactly(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


def _unpacked(value: bytes) -> str:
    try:
        return unpack_text(value) if value.startswith(FRAME) else _exactly(value)
    except Damaged:
        return value.decode(errors="replace")


def _in_words(value: bytes) -> str:
    try:
        return unpack_words(value)
    except Damaged:
        return value.decode(errors="replace")


PLAIN, EXACT = StoredText(), StoredBytes(exact_bytes, _exactly)
LONG, PACKED = StoredBytes(pack_text, _unpacked), StoredBytes(pack_words, _in_words)
TENANT, CONVERSATION, BRANCH, REQUEST = Id(), Id("conv-"), Id("br-"), Id("req_")
OF_TENANT = sa.bindparam("tenant", type_=TENANT)
OF_BRANCH = (OF_TENANT, sa.bindparam("branch", type_=BRANCH))

Kind = sa.types.TypeEngine[Any]
BY_TYPE: Mapping[Any, Kind] = {
    bool: sa.Boolean(),
    bytes: sa.LargeBinary(),
    float: sa.Double(),
    int: sa.BigInteger(),
    str: sa.Text(),
}
BY_NAME: dict[str, Kind] = {"tenant": TENANT, "conversation": CONVERSATION, "branch": BRANCH}
BY_NAME |= dict.fromkeys(("model", "name", "role", "tool"), PLAIN)
BY_NAME |= dict.fromkeys(("kind", "level", "category"), sa.Text())
BY_NAME |= dict.fromkeys(
    (
        *("version", "position", "occurrence", "length", "covers", "noted", "window_id", "status", "attempts"),
        *("evicted", "requests", "samples", "seen", "asked_again_count"),
    ),
    sa.Integer(),
)
RENAMED = {"limit": "token_limit"}
"""Fields whose column is called otherwise: the word is SQL's."""

metadata = sa.MetaData()


def _required(**kinds: Kind | type[Kind]) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name, kind in kinds.items()]


def _optional(**kinds: Kind | type[Kind]) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name, kind in kinds.items()]


def _fields(record: type, *, without: str = "", renamed: Mapping[str, str] = RENAMED, **kinds: Kind) -> list[Any]:
    columns = []
    for name, hint in get_type_hints(record).items():
        if name not in without.split():
            said = [each for each in get_args(hint) if each is not NoneType] or [hint]
            kind = kinds.get(name) or BY_NAME.get(name) or BY_TYPE[said[0]]
            is_optional = NoneType in get_args(hint)
            columns.append(sa.Column(renamed.get(name, name), kind, key=name, nullable=is_optional))
    return columns


def _table(name: str, key: str, *groups: list[Any], within: sa.Table | None = None, **options: Any) -> sa.Table:
    """A table with a primary key; its rows go with the conversation or branch that they are ``within``."""
    items = [item for group in groups for item in group]
    if within is not None:
        own = ("tenant", "conversation" if within.name == "conversations" else "branch")
        theirs = [f"{within.name}.{column.name}" for column in within.primary_key]
        items.append(sa.ForeignKeyConstraint(own, theirs, ondelete="CASCADE"))
    return sa.Table(name, metadata, *items, sa.PrimaryKeyConstraint(*key.split()), **options)


alembic_version = sa.Table(
    "alembic_version",
    metadata,
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)

meta = _table("meta", "name", _required(name=sa.Text), _optional(body=sa.LargeBinary, number=sa.BigInteger))

conversations = _table(
    "conversations",
    "tenant id",
    _fields(records.ConversationRow, without="branches version", id=CONVERSATION, parent=PLAIN),
    _optional(health=sa.Text),
    [
        sa.Index("conversations_name", "tenant", "name", unique=True),
        sa.Index("conversations_of_tenant", "tenant", "updated"),
        sa.Index("conversations_updated", "updated"),
    ],
)

branches = _table(
    "branches",
    "tenant branch",
    _required(tenant=TENANT, branch=BRANCH, conversation=CONVERSATION, version=sa.Integer, longest=sa.Integer),
    _required(created=sa.Double, updated=sa.Double, trend_at=sa.Double),
    _optional(parent=BRANCH, trend=sa.Text, prepared=EXACT, wanted=sa.Text, resumed=EXACT),
    _optional(undone=sa.Text, preparing=sa.Double, failed=sa.Integer),
    [sa.Index("branches_of_conversation", "tenant", "conversation")],
    within=conversations,
)

spending = _table("spending", "tenant slot", _required(tenant=TENANT, slot=sa.BigInteger, tokens=sa.BigInteger))

chains = _table(
    "chains",
    "tenant hash branch",
    _required(tenant=TENANT, hash=sa.LargeBinary, branch=BRANCH, length=sa.Integer, at=sa.Double),
    [sa.Index("chains_of_branch", "tenant", "branch")],
    within=branches,
    sqlite_with_rowid=False,
)

edits = _table(
    "edits",
    "tenant branch version position",
    _required(tenant=TENANT, branch=BRANCH, version=sa.Integer, position=sa.Integer, sha=sa.LargeBinary),
    _fields(Edit, text=PACKED),
    within=branches,
    sqlite_with_rowid=False,
)

cuts = _table(
    "cuts",
    "tenant branch version",
    _required(tenant=TENANT, branch=BRANCH, at=sa.Double, batch=sa.Integer, stays=sa.Text, covered=sa.Text),
    _required(sha=sa.LargeBinary),
    _fields(Cut, without="before after", text=LONG, narrative=LONG),
    [sa.Index("cuts_ref", "tenant", "ref")],
    within=branches,
)

checkpoints = _table(
    "checkpoints",
    "tenant branch version",
    _required(tenant=TENANT, sha=sa.LargeBinary),
    _fields(records.CheckpointRow, without="cut covered", body=sa.LargeBinary()),
    _optional(base=sa.Integer),
    within=branches,
)

notes = _table(
    "notes",
    "tenant conversation id",
    _required(tenant=TENANT, conversation=CONVERSATION, sha=sa.LargeBinary),
    _fields(records.NoteRow, text=EXACT),
    within=conversations,
)

summaries = _table(
    "summaries",
    "tenant key",
    _required(tenant=TENANT, sha=sa.LargeBinary),
    _fields(records.SummaryRow, text=EXACT),
    [sa.Index("summaries_at", "at"), sa.Index("summaries_of_tenant", "tenant", "at")],
)

frames = _table("frames", "id", _required(id=Serial, body=sa.LargeBinary), sqlite_autoincrement=True)

originals = _table(
    "originals",
    "id",
    _required(id=Serial, tenant=TENANT, size=sa.BigInteger, sha=sa.LargeBinary, at=sa.Double, quarantined=sa.Boolean),
    _fields(records.Original, without="body text"),
    _optional(body=sa.LargeBinary, frame=sa.BigInteger),
    [sa.Index("originals_ref", "tenant", "ref", unique=True)],
    sqlite_autoincrement=True,  # the full-text index has everything up to an id, so no id may come twice
)

removed = _table(
    "removed",
    "tenant branch ref",
    _required(tenant=TENANT, branch=BRANCH, ref=sa.Text),
    [sa.Index("removed_ref", "tenant", "ref")],
    within=branches,
    sqlite_with_rowid=False,
)

vectors = _table(
    "vectors",
    "tenant ref model",
    _required(tenant=TENANT, ref=sa.Text, model=sa.Text, body=sa.LargeBinary),
    [sa.ForeignKeyConstraint(["tenant", "ref"], ["originals.tenant", "originals.ref"], ondelete="CASCADE")],
)

evictions = _table(
    "evictions",
    "tenant branch version position",
    _fields(records.EvictionRow, without="conversation", policy=PLAIN),
    within=branches,
    sqlite_with_rowid=False,
)

exchanges = _table(
    "exchanges",
    "tenant id",
    _fields(
        records.ExchangeRow,
        without="name trend parent_conversation asked_again health events refusal ends inspection",
        id=REQUEST,
        parent=BRANCH,
        detail=PACKED,
    ),
    _optional(cost=sa.Double, cost_saved=sa.Double, summaries=sa.BigInteger, summaries_cost=sa.Double),
    [
        # With the tenant in it, SQLite does not take the index below for a conversation's requests in their order.
        sa.Index("exchanges_of_conversation", "conversation", "tenant", "at"),
        sa.Index("exchanges_of_tenant", "tenant", "at"),
        sa.Index("exchanges_at", "at"),
    ],
    within=conversations,
)

usage_days = _table(
    "usage_days",
    "tenant conversation at model policy",
    _required(tenant=TENANT, conversation=CONVERSATION, at=sa.Double, model=PLAIN, policy=sa.Text),
    _fields(records.UsageRow, without="tenant group"),
    [sa.Index("usage_days_at", "at")],
    within=conversations,
    sqlite_with_rowid=False,
)

inspected = _table(
    "inspected",
    "tenant conversation",
    _required(tenant=TENANT, conversation=CONVERSATION, body=sa.LargeBinary),
    within=conversations,
)

inspected_parts = _table(
    "inspected_parts",
    "tenant conversation number",
    _required(tenant=TENANT, conversation=CONVERSATION, number=sa.Integer, refs=sa.Text, body=sa.LargeBinary),
    within=conversations,
)

relayed = _table("relayed", "tenant id", _fields(records.RelayedRow, id=REQUEST), [sa.Index("relayed_at", "at")])

answers = _table(
    "answers",
    "tenant id",
    _required(tenant=TENANT, id=PLAIN, conversation=CONVERSATION, at=sa.Double, body=sa.LargeBinary),
    _required(tokens=sa.BigInteger, reasoned=sa.BigInteger, length=sa.Integer),
    _optional(parent=PLAIN),
    [sa.Index("answers_of_conversation", "tenant", "conversation"), sa.Index("answers_at", "at")],
)

answer_items = _table(
    "answer_items",
    "tenant item",
    _required(tenant=TENANT, item=PLAIN, answer=PLAIN),
    [
        sa.ForeignKeyConstraint(["tenant", "answer"], ["answers.tenant", "answers.id"], ondelete="CASCADE"),
        sa.Index("answer_items_of_answer", "tenant", "answer"),
    ],
)

health_snapshots = _table(
    "health_snapshots",
    "tenant conversation at id",
    _required(tenant=TENANT, conversation=CONVERSATION, id=REQUEST),
    _fields(Snapshot),
    within=conversations,
    sqlite_with_rowid=False,
)

alerts = _table(
    "alerts",
    "tenant conversation at kind",
    _fields(records.AlertRow, renamed={"limit": "threshold"}),
    [sa.Index("alerts_open", "tenant", "closed")],
    within=conversations,
)

policies = _table("policies", "name", _fields(records.PolicyRow, document=EXACT))

audit = _table(
    "audit",
    "tenant seq",
    _fields(AuditRow, request=REQUEST, facts=PACKED),
    [
        sa.Index("audit_of_conversation", "tenant", "conversation", "seq"),
        sa.Index(
            "audit_seals",
            "tenant",
            "sealed",
            sqlite_where=sa.text("sealed > 0"),
            postgresql_where=sa.text("sealed > 0"),
        ),
    ],
    sqlite_with_rowid=False,
)

keys = _table(
    "keys",
    "name",
    _fields(records.KeyRow, without="tenant", policy=PLAIN, models=sa.Text(), allow=sa.Text()),
    [sa.Index("keys_digest", "digest", unique=True)],
)

limits = _table("limits", "scope", _fields(records.LimitRow, scope=PLAIN))

calibrations = _table("calibrations", "scope", _fields(records.CalibrationRow, scope=PLAIN, recent=sa.Text()))

_LAST = "(SELECT max(seq) FROM audit WHERE tenant = NEW.tenant)"
_BEFORE = "(SELECT hash FROM audit WHERE tenant = NEW.tenant AND seq = NEW.seq - 1)"
_SEALED = (
    "EXISTS (SELECT 1 FROM audit AS s WHERE s.tenant = OLD.tenant AND s.sealed > 0 AND s.sealed >= OLD.seq "
    "AND s.seq > OLD.seq)"
)
_APPENDED = "audit rows are put behind the last one"
_CHANGED = "audit rows are never changed"
_DELETED = "audit rows are deleted only once they are sealed"
# Which messages have a word, and no more: where it stands would take four times the room.
FULL_TEXT = "CREATE VIRTUAL TABLE originals_fts USING fts5(text, content='', detail=none, tokenize='ascii')"
# An insert that replaces a row would delete it unseen: so an insert must be behind the last row.
_SQLITE = (
    FULL_TEXT,
    (
        f"CREATE TRIGGER audit_appends BEFORE INSERT ON audit WHEN NEW.seq IS NOT coalesce({_LAST}, 0) + 1 "
        f"OR NEW.prev IS NOT coalesce({_BEFORE}, zeroblob(32)) BEGIN SELECT RAISE(ABORT, '{_APPENDED}'); END"
    ),
    f"CREATE TRIGGER audit_never_changes BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, '{_CHANGED}'); END",
    (
        f"CREATE TRIGGER audit_goes_sealed BEFORE DELETE ON audit WHEN NOT {_SEALED} "
        f"BEGIN SELECT RAISE(ABORT, '{_DELETED}'); END"
    ),
)
_POSTGRESQL = (
    "ALTER TABLE originals ADD COLUMN words tsvector",
    "CREATE INDEX originals_fts ON originals USING gin (words)",
    (
        "CREATE FUNCTION audit_guard() RETURNS trigger LANGUAGE plpgsql AS $guard$ BEGIN "
        f"IF TG_OP = 'INSERT' THEN IF NEW.seq = coalesce({_LAST}, 0) + 1 "
        f"AND NEW.prev = coalesce({_BEFORE}, decode(repeat('00', 32), 'hex')) THEN RETURN NEW; END IF; "
        f"RAISE EXCEPTION '{_APPENDED}'; END IF; "
        f"IF TG_OP = 'DELETE' THEN IF {_SEALED} THEN RETURN OLD; END IF; RAISE EXCEPTION '{_DELETED}'; END IF; "
        f"RAISE EXCEPTION '{_CHANGED}'; END $guard$"
    ),
    *(
        f"CREATE TRIGGER {name} BEFORE {what} ON audit FOR EACH {unit} EXECUTE FUNCTION audit_guard()"
        for name, what, unit in (
            ("audit_appends", "INSERT", "ROW"),
            ("audit_never_changes", "UPDATE", "ROW"),
            ("audit_goes_sealed", "DELETE", "ROW"),
            ("audit_stays", "TRUNCATE", "STATEMENT"),
        )
    ),
)


def make(connection: sa.Connection) -> None:
    metadata.create_all(connection)
    for statement in _SQLITE if connection.dialect.name == "sqlite" else _POSTGRESQL:
        connection.exec_driver_sql(statement)
    connection.execute(sa.insert(meta), [{"name": "commits", "number": 0}, {"name": "indexed", "number": 0}])
    connection.execute(sa.insert(alembic_version), {"version_num": HEAD})


NOT_MIGRATED = (
    "its schema could not be brought from {found} to {head} ({why}); nothing in it was changed. Go on with the Weir "
    "that wrote it; or take a copy (weir db backup COPY; of PostgreSQL: pg_dump), mend that, and run weir db upgrade"
)


def ensure(connection: sa.Connection) -> None:
    found = _known(connection)
    if found is None:
        make(connection)
    elif found != HEAD:
        try:
            importlib.import_module("proxy.store.migrations").upgrade(connection, found=found)
        except Exception as fault:
            if is_disconnect(fault) or is_retried(fault):
                raise
            why = fault.orig if isinstance(fault, sa.exc.DBAPIError) else fault
            said = NOT_MIGRATED.format(found=found, head=HEAD, why=why or type(fault).__name__)
            raise StoreError(said, reason="migration") from fault


def check(connection: sa.Connection) -> None:
    found = _known(connection)
    if found != HEAD:
        raise StoreError(
            f"the database has schema {found or 'none'}, this Weir needs {HEAD}: run `weir db upgrade`", reason="schema"
        )


def _known(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(sa.select(alembic_version.c.version_num))
    if found is None or found in REVISIONS:
        return found
    if found < HEAD:
        raise StoreError(f"the database has schema {found}, of a Weir that was never released", reason="schema")
    raise SchemaTooNew(
        f"the database has schema {found}, which this Weir (schema {HEAD}) does not know: update Weir", reason="schema"
    )


class Upsert(dict[str, sa.Insert]):
    """An INSERT for every dialect by name, made when it is asked for: the other dialect is imported by nobody."""

    def __init__(self, make: Callable[[Callable[[sa.Table], Any]], sa.Insert]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, dialect: str) -> sa.Insert:
        made = self[dialect] = self._make(importlib.import_module(f"sqlalchemy.dialects.{dialect}").insert)
        return made


def keep_first(table: sa.Table) -> Upsert:
    return Upsert(lambda insert: insert(table).on_conflict_do_nothing())


def overwriting(
    table: sa.Table, changes: Callable[[Any, Any], dict[str, Any]], taken: Callable[[str], Any] | None = None
) -> Upsert:
    """An INSERT, of rows or what a query has ``taken``, that changes a row which is there already."""

    def made(insert: Callable[[sa.Table], Any]) -> sa.Insert:
        statement = insert(table)
        if taken is not None:
            statement = statement.from_select(list(table.c.keys()), taken(statement.stringify_dialect))
        key, new = list(table.primary_key.columns), statement.excluded
        overwritten: sa.Insert = statement.on_conflict_do_update(index_elements=key, set_=changes(new, table.c))
        return overwritten

    return Upsert(made)


def keep_last(table: sa.Table, *names: str) -> Upsert:
    """An INSERT that overwrites some columns of a row which is there already, without any named all but its key."""
    names = names or tuple(column.key for column in table.c if not column.primary_key)
    return overwriting(table, lambda new, _: {name: new[name] for name in names})


def larger(one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((one > other, one), else_=other)


def of(table: sa.FromClause, *names: str) -> sa.ColumnElement[bool]:
    """That columns are what a statement is given: parameters ``of_NAME``, for those of an UPDATE would be set else."""
    return sa.and_(*(table.c[name] == sa.bindparam(f"of_{name}") for name in names))


def among(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    """That a column is one of the ``ids`` that :meth:`~proxy.store.transaction.Transaction.ask` is given."""
    return sa.and_(of(column.table, "tenant"), column.in_(sa.bindparam("ids", expanding=True)))


def same(one: sa.FromClause, other: sa.FromClause, *names: str) -> sa.ColumnElement[bool]:
    return sa.and_(*(one.c[name] == other.c[name] for name in names))


def total(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(sa.func.sum(value), 0)


OF_CONVERSATION = sa.and_(branches.c.tenant == conversations.c.tenant, branches.c.conversation == conversations.c.id)


def stored(table: sa.Table, record: Any, **more: object) -> dict[str, Any]:
    keys, values = _taking(table, record.__class__)
    return {**dict(zip(keys, values(record), strict=True)), **more}


def columns_of(table: sa.Table, records: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The columns of records of one kind, of which there is at least one."""
    keys, values = _taking(table, records[0].__class__)
    return dict(zip(keys, zip(*map(values, records), strict=True), strict=True))


def recorded(kind: Callable[..., R], table: sa.Table, row: sa.Row[*tuple[Any, ...]], **more: object) -> R:
    found = row._mapping  # noqa: SLF001 - SQLAlchemy's public name
    return kind(**{key: found[name] for key, name in _shared(table, kind) if key not in more}, **more)


@lru_cache(maxsize=64)
def _taking(table: sa.Table, kind: Any) -> tuple[tuple[str, ...], Callable[[object], Sequence[Any]]]:
    keys = tuple(key for key, _ in _shared(table, kind))
    return keys, attrgetter(*keys)


@lru_cache(maxsize=64)
def _shared(table: sa.Table, kind: Any) -> tuple[tuple[str, str], ...]:
    names = getattr(kind, "_fields", None) or [each.name for each in fields(kind)]
    return tuple((key, column.name) for key, column in table.c.items() if key in names)
