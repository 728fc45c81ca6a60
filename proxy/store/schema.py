"""The tables, each column declared once, where SQLite and PostgreSQL differ, and which revision a
database has.

Every table that holds something of a conversation has ``tenant`` as the first column of its key,
and every statement on it names the tenant. What people wrote is kept as exact UTF-8 bytes
(``EXACT``), because JSON may carry lone surrogates and NUL, which neither database takes as text.

Columns that a record of :mod:`proxy.store.records` has as well are taken from its fields. Alembic
is loaded only where there is something to migrate: it costs 110 ms and 9 MB at every start
otherwise.
"""

import importlib
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

import sqlalchemy as sa

from policies.health import Snapshot
from policies.ledger import Cut, Edit
from proxy.store import records
from proxy.store.chain import AuditRow
from proxy.store.packing import (
    BRANCH,
    CONVERSATION,
    REQUEST,
    TENANT,
    Compressed,
    Exact,
    Listed,
    Plain,
)
from proxy.store.records import CorruptStore, SchemaTooNew, StoreError

HEAD = "2"
"""The newest of the revisions in ``proxy/store/migrations/versions``."""
OLDER = frozenset(str(number) for number in range(1, int(HEAD)))
"""Those that a database is brought up from."""
UNRELEASED = re.compile("00[0-9]{2}")
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
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
BY_NAME |= dict.fromkeys(("model", "name", "role", "tool"), Plain())
BY_NAME |= dict.fromkeys(("kind", "level", "category"), sa.Text())
BY_NAME |= dict.fromkeys(
    (
        *(
            "version",
            "position",
            "occurrence",
            "length",
            "covers",
            "noted",
            "window_id",
            "status",
            "attempts",
        ),
        *("evicted", "requests", "samples", "seen"),
    ),
    sa.Integer(),
)
NO_CONVERSATION = ""
"""Of usage: what belongs to no conversation, or to one that was deleted."""
RENAMED = {"limit": "token_limit"}
"""Fields whose column is called otherwise: the word is SQL's."""

metadata = sa.MetaData()


def _required(**kinds: Kind | type[Kind]) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name, kind in kinds.items()]


def _optional(**kinds: Kind | type[Kind]) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name, kind in kinds.items()]


def _fields(
    record: type, *, without: str = "", renamed: Mapping[str, str] = RENAMED, **kinds: Kind
) -> list[Any]:
    columns = []
    for name, hint in get_type_hints(record).items():
        if name not in without.split():
            said = [each for each in get_args(hint) if each is not NoneType] or [hint]
            kind = kinds.get(name) or BY_NAME.get(name) or BY_TYPE[said[0]]
            is_optional = NoneType in get_args(hint)
            columns.append(sa.Column(renamed.get(name, name), kind, key=name, nullable=is_optional))
    return columns


def _table(
    name: str, key: str, *groups: list[Any], within: sa.Table | None = None, **options: Any
) -> sa.Table:
    """A table with a primary key; its rows go with the conversation or branch that they are
    ``within``.
    """
    items = [item for group in groups for item in group]
    if within is not None:
        own = ("tenant", "conversation" if within.name == "conversations" else "branch")
        theirs = [f"{within.name}.{column.name}" for column in within.primary_key]
        items.append(sa.ForeignKeyConstraint(own, theirs, ondelete="CASCADE"))
    return sa.Table(name, metadata, *items, sa.PrimaryKeyConstraint(*key.split()), **options)


meta = _table(
    "meta", "name", _required(name=sa.Text), _optional(body=sa.LargeBinary, number=sa.BigInteger)
)

conversations = _table(
    "conversations",
    "tenant id",
    _fields(records.ConversationRow, without="branches version", id=CONVERSATION, parent=Plain()),
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
    _required(
        tenant=TENANT,
        branch=BRANCH,
        conversation=CONVERSATION,
        version=sa.Integer,
        longest=sa.Integer,
    ),
    _required(created=sa.Double, updated=sa.Double, trend_at=sa.Double),
    _optional(parent=BRANCH, trend=sa.Text, prepared=Exact(), wanted=sa.Text, resumed=Exact()),
    _optional(undone=sa.Text, preparing=sa.Double, failed=sa.Integer, floating=sa.Text),
    [sa.Index("branches_of_conversation", "tenant", "conversation")],
    within=conversations,
)

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
    "tenant branch window_tokens version position",
    _required(
        tenant=TENANT,
        branch=BRANCH,
        window_tokens=sa.BigInteger,
        version=sa.Integer,
        position=sa.Integer,
    ),
    _required(sha=sa.LargeBinary),
    _fields(Edit, text=Compressed()),
    within=branches,
    sqlite_with_rowid=False,
)

cuts = _table(
    "cuts",
    "tenant branch window_tokens version",
    _required(
        tenant=TENANT,
        branch=BRANCH,
        window_tokens=sa.BigInteger,
        at=sa.Double,
        batch=sa.Integer,
        stays=sa.Text,
        covered=sa.Text,
    ),
    _required(sha=sa.LargeBinary),
    _fields(Cut, without="before after", text=Compressed(), narrative=Compressed()),
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
    _fields(records.NoteRow, text=Exact()),
    within=conversations,
)

summaries = _table(
    "summaries",
    "tenant key",
    _required(tenant=TENANT, sha=sa.LargeBinary),
    _fields(records.SummaryRow, text=Exact()),
    [sa.Index("summaries_at", "at"), sa.Index("summaries_of_tenant", "tenant", "at")],
)

frames = _table(
    "frames", "id", _required(id=Serial, body=sa.LargeBinary), sqlite_autoincrement=True
)

originals = _table(
    "originals",
    "id",
    _required(
        id=Serial,
        tenant=TENANT,
        size=sa.BigInteger,
        sha=sa.LargeBinary,
        at=sa.Double,
        quarantined=sa.Boolean,
    ),
    _fields(records.Original, without="body text"),
    _optional(frame=sa.BigInteger),
    [sa.Index("originals_ref", "tenant", "ref", unique=True)],
    # the full-text index has everything up to an id, so no id may come twice
    sqlite_autoincrement=True,
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
    [
        sa.ForeignKeyConstraint(
            ["tenant", "ref"], ["originals.tenant", "originals.ref"], ondelete="CASCADE"
        )
    ],
)

evictions = _table(
    "evictions",
    "tenant branch version position",
    _fields(records.EvictionRow, without="conversation", policy=Plain()),
    within=branches,
    sqlite_with_rowid=False,
)

exchanges = _table(
    "exchanges",
    "tenant id",
    _fields(
        records.ExchangeRow,
        without=" ".join(("name", "parent_conversation", *records.NOT_READ_BACK)),
        id=REQUEST,
        parent=BRANCH,
        detail=Compressed(),
    ),
    _optional(
        cost=sa.Double, cost_saved=sa.Double, summaries=sa.BigInteger, summaries_cost=sa.Double
    ),
    [
        # With the tenant in it, SQLite does not take the index below for a conversation's requests
        # in their order.
        sa.Index("exchanges_of_conversation", "conversation", "tenant", "at"),
        sa.Index("exchanges_of_tenant", "tenant", "at"),
        sa.Index("exchanges_at", "at"),
    ],
    within=conversations,
)

usage_days = _table(
    "usage_days",
    "tenant conversation at model policy",
    _required(
        tenant=TENANT, conversation=CONVERSATION, at=sa.Double, model=Plain(), policy=sa.Text
    ),
    _fields(records.UsageRow, without="tenant group"),
    [sa.Index("usage_days_at", "at")],
    sqlite_with_rowid=False,
)
"""The usage table, which outlives conversations: when one is deleted, its rows go on under
``NO_CONVERSATION``.
"""

key_days = _table(
    "key_days",
    "key team at model",
    _required(key=TENANT, team=Plain(), at=sa.Double, model=Plain()),
    _fields(records.UsageRow, without="tenant group"),
    [sa.Index("key_days_of_team", "team", "at"), sa.Index("key_days_at", "at")],
    sqlite_with_rowid=False,
)
"""The same by key and team, which is what budgets are looked up in. ``key`` is the tenant that a
key has by itself, whatever ``auth.tenant`` makes of its requests; a team is empty for a key without
one.
"""

reservations = _table(
    "reservations",
    "id",
    _required(id=REQUEST, key=TENANT, team=Plain(), tokens=sa.BigInteger, dollars=sa.Double),
    _required(expires=sa.Double),
    [sa.Index("reservations_of_key", "key"), sa.Index("reservations_of_team", "team")],
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
    _required(
        tenant=TENANT,
        conversation=CONVERSATION,
        number=sa.Integer,
        refs=sa.Text,
        body=sa.LargeBinary,
    ),
    within=conversations,
)

relayed = _table(
    "relayed",
    "tenant id",
    _fields(records.RelayedRow, without="key team reserved", id=REQUEST),
    [sa.Index("relayed_at", "at")],
)

answers = _table(
    "answers",
    "tenant id",
    _required(
        tenant=TENANT, id=Plain(), conversation=CONVERSATION, at=sa.Double, body=sa.LargeBinary
    ),
    _required(tokens=sa.BigInteger, reasoned=sa.BigInteger, length=sa.Integer),
    _optional(parent=Plain()),
    [sa.Index("answers_of_conversation", "tenant", "conversation"), sa.Index("answers_at", "at")],
)

answer_items = _table(
    "answer_items",
    "tenant item",
    _required(tenant=TENANT, item=Plain(), answer=Plain()),
    [
        sa.ForeignKeyConstraint(
            ["tenant", "answer"], ["answers.tenant", "answers.id"], ondelete="CASCADE"
        ),
        sa.Index("answer_items_of_answer", "tenant", "answer"),
    ],
)

provider_ids = _table(
    "provider_ids",
    "tenant digest",
    _required(tenant=TENANT, digest=sa.LargeBinary, at=sa.Double),
    [sa.Index("provider_ids_of_tenant", "tenant", "at"), sa.Index("provider_ids_at", "at")],
    sqlite_with_rowid=False,
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

policies = _table("policies", "name", _fields(records.PolicyRow, document=Exact()))

audit = _table(
    "audit",
    "tenant seq",
    _fields(AuditRow, request=REQUEST, facts=Compressed()),
    [sa.Index("audit_of_conversation", "tenant", "conversation", "seq")],
    sqlite_with_rowid=False,
)

keys = _table(
    "keys",
    "name",
    _fields(
        records.KeyRow,
        without="tenant",
        policy=Plain(),
        models=Listed(),
        allow=Listed(),
        team=Plain(),
        budgets=Listed(),
    ),
    [sa.Index("keys_digest", "digest", unique=True)],
)

key_use = _table(
    "key_use",
    "key",
    _required(key=sa.Text, begun=sa.Text, open=sa.Text, refused=sa.Integer, since=sa.BigInteger),
)

limits = _table("limits", "scope kind", _fields(records.LimitRow, scope=Plain()))

calibrations = _table(
    "calibrations", "scope", _fields(records.CalibrationRow, scope=Plain(), recent=Listed())
)

# Which messages have a word, and no more: its place would take four times the room.
FULL_TEXT = (
    "CREATE VIRTUAL TABLE originals_fts USING fts5(text, content='', detail=none, tokenize='ascii')"
)
_WORDS = (
    "ALTER TABLE originals ADD COLUMN words tsvector",
    "CREATE INDEX originals_fts ON originals USING gin (words)",
)

OF_CONVERSATION = sa.and_(
    branches.c.tenant == conversations.c.tenant, branches.c.conversation == conversations.c.id
)


def make(connection: sa.Connection) -> None:
    metadata.create_all(connection)
    for statement in (FULL_TEXT,) if connection.dialect.name == "sqlite" else _WORDS:
        connection.exec_driver_sql(statement)
    connection.execute(sa.insert(meta), {"name": "indexed", "number": 0})


def ensure(connection: sa.Connection) -> None:
    """Make the tables of a new database. Raises :class:`StoreError` for one that this Weir cannot
    use.
    """
    found = known(connection)
    if found is None:  # as all revisions would, without alembic
        make(connection)
        connection.execute(
            sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
        )
        connection.execute(sa.text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})
    elif found != HEAD:  # alembic is 130 modules: loaded only where there is something to migrate
        importlib.import_module("proxy.store.migrations").upgrade(connection)


def check(connection: sa.Connection) -> None:
    found = known(connection)
    if found is None:
        raise StoreError("the database has no tables: run `weir db migrate`", reason="schema")
    if found != HEAD:
        raise StoreError(
            f"the database has schema {found}, and this Weir has {HEAD}: run `weir db migrate`",
            reason="schema",
        )


def known(connection: sa.Connection) -> str | None:
    """The database's revision, None where there are no tables yet. Raises what
    :func:`ensure` does.
    """
    names = sa.inspect(connection).get_table_names()
    if "alembic_version" not in names:
        if names and connection.dialect.name == "sqlite":
            raise CorruptStore("the file is a database of some other program", reason="foreign")
        return None
    found: str | None = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    if found is None or found == HEAD or found in OLDER:
        return found
    if UNRELEASED.fullmatch(found):
        raise StoreError(
            f"the database has schema {found}, of a Weir before the first release, which this one"
            " cannot read; nothing in it was changed. Name another file or database (--store,"
            " store.url), or go on with the Weir that wrote it",
            reason="schema",
        )
    raise SchemaTooNew(
        f"the database has schema {found}, which this Weir (schema {HEAD}) does not know: update"
        " Weir",
        reason="schema",
    )
