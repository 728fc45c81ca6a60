"""The tables, and the three places where SQLite and PostgreSQL differ: column types, upserts, full text.

Every table that holds something of a conversation has ``tenant`` as the first column of its key, and every
statement on it names the tenant. What people wrote is kept as exact UTF-8 bytes (:class:`ExactText`), because
JSON may carry lone surrogates and NUL, which neither database takes as text.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from proxy.store.packing import Damaged, pack_words, unpack_words

metadata = sa.MetaData()

NOTHING: Mapping[str, str] = MappingProxyType({})
HEX = re.compile(r"(?:[0-9a-f]{2})+").fullmatch
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


class ExactText(sa.types.TypeDecorator[str]):
    """Text kept byte for byte, whatever code points it has."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> bytes | None:  # noqa: ARG002 - signature
        """The bytes to store."""
        return None if value is None else value.encode("utf-8", "surrogatepass")

    def process_result_value(self, value: bytes | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002 - signature
        """The text as it was given."""
        return None if value is None else value.decode("utf-8", "surrogatepass")


def plain_text(value: str) -> str:
    """The text without NUL and lone surrogates, which no database takes as text."""
    if value.isascii() and "\0" not in value:
        return value
    return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


class PlainText(sa.types.TypeDecorator[str]):
    """Text that is searched or shown; what a database cannot take is replaced."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002 - signature
        """The text without NUL and lone surrogates."""
        return None if value is None else plain_text(value)


class Id(sa.types.TypeDecorator[str]):
    """An id of Weir's own: ``prefix`` and hex digits. SQLite keeps the bytes alone, and any other text as it is."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        """The bytes that the digits stand for, where they give the same text back."""
        if value is None or dialect.name != "sqlite":
            return value
        digits = value[len(self.prefix) :]
        if not digits or not value.startswith(self.prefix) or not HEX(digits):
            return value
        return bytes.fromhex(digits)

    def process_result_value(self, value: object, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        """The text as it was given."""
        return self.shown(value)

    def shown(self, stored: object) -> Any:
        """The text as it was given; what no id can be as it is."""
        return self.prefix + stored.hex() if isinstance(stored, bytes) else stored


class Packed(sa.types.TypeDecorator[str]):
    """Short text that Weir wrote, packed (:func:`proxy.store.packing.pack_words`)."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> bytes | None:  # noqa: ARG002 - signature
        """The bytes to store."""
        return None if value is None else pack_words(value)

    def process_result_value(self, value: object, dialect: sa.Dialect) -> str | None:  # noqa: ARG002 - signature
        """The text as it was given; what somebody has put there instead as the text that it may be."""
        if not isinstance(value, bytes):
            return None if value is None else str(value)
        try:
            return unpack_words(value)
        except Damaged:
            return value.decode(errors="replace")


TENANT, CONVERSATION, BRANCH, REQUEST = Id(), Id("conv-"), Id("br-"), Id("req_")
OF_BRANCH = (sa.bindparam("tenant", type_=TENANT), sa.bindparam("branch", type_=BRANCH))
"""What a statement in SQL text about a branch is given."""


def _branch_key() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant", "branch"], ["branches.tenant", "branches.branch"], ondelete="CASCADE", name=None
    )


def _conversation_key() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant", "conversation"], ["conversations.tenant", "conversations.id"], ondelete="CASCADE"
    )


meta = sa.Table(
    "meta",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("body", sa.LargeBinary),
    sa.Column("number", sa.BigInteger),
)

conversations = sa.Table(
    "conversations",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("id", CONVERSATION, primary_key=True),
    sa.Column("name", PlainText, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("updated", sa.Double, nullable=False),
    sa.Column("model", PlainText, nullable=False),
    sa.Column("requests", sa.Integer, nullable=False),
    sa.Column("tokens_before", sa.BigInteger, nullable=False),
    sa.Column("tokens_after", sa.BigInteger, nullable=False),
    sa.Column("token_limit", sa.BigInteger, nullable=False),
    sa.Column("zone", sa.Text, nullable=False),
    sa.Column("actions", sa.Text, nullable=False),
    sa.Column("parent", PlainText),
    sa.Column("closed", sa.Double),
    sa.Column("health", sa.Text),
    sa.Index("conversations_name", "tenant", "name", unique=True),
    sa.Index("conversations_of_tenant", "tenant", "updated"),
    sa.Index("conversations_updated", "updated"),
)

branches = sa.Table(
    "branches",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("branch", BRANCH, primary_key=True),
    sa.Column("conversation", CONVERSATION, nullable=False),
    sa.Column("parent", BRANCH),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("longest", sa.Integer, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("updated", sa.Double, nullable=False),
    sa.Column("trend", sa.Text),
    sa.Column("prepared", ExactText),
    sa.Column("wanted", sa.Text),
    sa.Column("resumed", ExactText),
    sa.Column("undone", sa.Text),
    sa.Column("preparing", sa.Double),
    sa.Column("trend_at", sa.Double, nullable=False, server_default="0"),
    sa.ForeignKeyConstraint(
        ["tenant", "conversation"], ["conversations.tenant", "conversations.id"], ondelete="CASCADE"
    ),
    sa.Index("branches_of_conversation", "tenant", "conversation"),
)

spending = sa.Table(
    "spending",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("slot", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)

chains = sa.Table(
    "chains",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("hash", sa.LargeBinary, primary_key=True),
    sa.Column("branch", BRANCH, primary_key=True),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    _branch_key(),
    sa.Index("chains_of_branch", "tenant", "branch"),
    sqlite_with_rowid=False,
)

edits = sa.Table(
    "edits",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("branch", BRANCH, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("occurrence", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("text", Packed, nullable=False),
    sa.Column("ref", sa.Text, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("chain", sa.LargeBinary, nullable=False),
    sa.Column("sha", sa.LargeBinary, nullable=False),
    sa.Column("length", sa.Integer, nullable=False, server_default="0"),
    _branch_key(),
    sqlite_with_rowid=False,
)

cuts = sa.Table(
    "cuts",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("branch", BRANCH, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("covers", sa.Integer, nullable=False),
    sa.Column("prefix", sa.LargeBinary, nullable=False),
    sa.Column("text", ExactText, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("ref", sa.Text, nullable=False),
    sa.Column("stays", sa.Text, nullable=False),
    sa.Column("origin", sa.Text, nullable=False),
    sa.Column("narrative", ExactText, nullable=False),
    sa.Column("sha", sa.LargeBinary, nullable=False),
    sa.Column("covered", sa.Text, nullable=False),
    sa.Column("length", sa.Integer, nullable=False, server_default="0"),
    sa.Column("batch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("noted", sa.Integer, nullable=False, server_default="0"),
    _branch_key(),
    sa.Index("cuts_ref", "tenant", "ref"),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("branch", BRANCH, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("window_id", sa.Integer, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("sha", sa.LargeBinary, nullable=False),
    _branch_key(),
)

notes = sa.Table(
    "notes",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("conversation", CONVERSATION, primary_key=True),
    sa.Column("id", sa.LargeBinary, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("category", sa.Text, nullable=False),
    sa.Column("importance", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("text", ExactText, nullable=False),
    sa.Column("sha", sa.LargeBinary, nullable=False),
    sa.ForeignKeyConstraint(
        ["tenant", "conversation"], ["conversations.tenant", "conversations.id"], ondelete="CASCADE"
    ),
)

summaries = sa.Table(
    "summaries",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("key", sa.LargeBinary, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("model", PlainText, nullable=False),
    sa.Column("tokens_in", sa.BigInteger, nullable=False),
    sa.Column("tokens_out", sa.BigInteger, nullable=False),
    sa.Column("text", ExactText, nullable=False),
    sa.Column("sha", sa.LargeBinary, nullable=False),
    sa.Index("summaries_at", "at"),
    sa.Index("summaries_of_tenant", "tenant", "at"),
)

originals = sa.Table(
    "originals",
    metadata,
    sa.Column("id", Serial, primary_key=True),
    sa.Column("tenant", TENANT, nullable=False),
    sa.Column("ref", sa.Text, nullable=False),
    sa.Column("role", PlainText, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("sha", sa.LargeBinary, nullable=False),
    sa.Column("body", sa.LargeBinary),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("quarantined", sa.Boolean, nullable=False),
    sa.Index("originals_ref", "tenant", "ref", unique=True),
    sqlite_autoincrement=True,  # the full-text index has everything up to an id, so no id may come twice
)

removed = sa.Table(
    "removed",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("branch", BRANCH, primary_key=True),
    sa.Column("ref", sa.Text, primary_key=True),
    _branch_key(),
    sa.Index("removed_ref", "tenant", "ref"),
    sqlite_with_rowid=False,
)

vectors = sa.Table(
    "vectors",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("ref", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.ForeignKeyConstraint(["tenant", "ref"], ["originals.tenant", "originals.ref"], ondelete="CASCADE"),
)

evictions = sa.Table(
    "evictions",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("branch", BRANCH, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("occurrence", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("layer", sa.Text, nullable=False),
    sa.Column("policy", PlainText, nullable=False),
    sa.Column("scorer", sa.Text, nullable=False),
    sa.Column("tool", PlainText, nullable=False),
    sa.Column("call_hash", sa.LargeBinary, nullable=False),
    sa.Column("tokens_before", sa.BigInteger, nullable=False),
    sa.Column("tokens_after", sa.BigInteger, nullable=False),
    sa.Column("tokens_remaining", sa.BigInteger, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("asked_again_at", sa.Double),
    sa.Column("asked_again_count", sa.Integer, nullable=False),
    _branch_key(),
    sqlite_with_rowid=False,
)

exchanges = sa.Table(
    "exchanges",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("id", REQUEST, primary_key=True),
    sa.Column("conversation", CONVERSATION, nullable=False),
    sa.Column("branch", BRANCH, nullable=False),
    sa.Column("parent", BRANCH),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("model", PlainText, nullable=False),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("chain_end", sa.LargeBinary, nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("tokens_before", sa.BigInteger, nullable=False),
    sa.Column("tokens_after", sa.BigInteger, nullable=False),
    sa.Column("token_limit", sa.BigInteger, nullable=False),
    sa.Column("pressure", sa.Double, nullable=False),
    sa.Column("zone", sa.Text, nullable=False),
    sa.Column("actions", sa.Text, nullable=False),
    sa.Column("usage_prompt", sa.BigInteger),
    sa.Column("usage_completion", sa.BigInteger),
    sa.Column("usage_cached", sa.BigInteger),
    sa.Column("overhead_ms", sa.Double, nullable=False),
    sa.Column("duration_ms", sa.Double, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("detail", Packed, nullable=False),
    sa.Column("action", sa.Text, nullable=False, server_default="none"),
    sa.Column("observed", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("evicted", sa.Integer, nullable=False, server_default="0"),
    sa.Column("strategy", sa.Text, nullable=False, server_default=""),
    sa.Column("pressure_before", sa.Double),
    sa.Column("velocity", sa.Double),
    sa.Column("turns_until_red", sa.Double),
    sa.Column("cost", sa.Double),
    sa.Column("cost_saved", sa.Double),
    sa.Column("summaries", sa.BigInteger),
    sa.Column("summaries_cost", sa.Double),
    sa.ForeignKeyConstraint(
        ["tenant", "conversation"], ["conversations.tenant", "conversations.id"], ondelete="CASCADE"
    ),
    sa.Index("exchanges_of_conversation", "conversation", "at"),
    sa.Index("exchanges_at", "at"),
)

relayed = sa.Table(
    "relayed",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("id", REQUEST, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("model", PlainText, nullable=False),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("usage_prompt", sa.BigInteger),
    sa.Column("usage_completion", sa.BigInteger),
    sa.Column("usage_cached", sa.BigInteger),
    sa.Column("cost", sa.Double),
    sa.Index("relayed_at", "at"),
)

health_snapshots = sa.Table(
    "health_snapshots",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("conversation", CONVERSATION, primary_key=True),
    sa.Column("at", sa.Double, primary_key=True),
    sa.Column("id", REQUEST, primary_key=True),
    sa.Column("utilization", sa.Double, nullable=False),
    sa.Column("eviction_rate", sa.Double, nullable=False),
    sa.Column("compression_ratio", sa.Double),
    sa.Column("burn_rate", sa.Double),
    sa.Column("fidelity_score", sa.Double),
    sa.Column("tool_result_bloat", sa.Double, nullable=False),
    sa.Column("window_id", sa.Integer, nullable=False),
    _conversation_key(),
    sqlite_with_rowid=False,
)

alerts = sa.Table(
    "alerts",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("conversation", CONVERSATION, primary_key=True),
    sa.Column("at", sa.Double, primary_key=True),
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("level", sa.Text, nullable=False),
    sa.Column("category", sa.Text, nullable=False),
    sa.Column("value", sa.Double, nullable=False),
    sa.Column("threshold", sa.Double, nullable=False),
    sa.Column("said", sa.Text, nullable=False),
    sa.Column("closed", sa.Double),
    _conversation_key(),
    sa.Index("alerts_open", "tenant", "closed"),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("name", PlainText, primary_key=True),
    sa.Column("document", ExactText, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("tenant", TENANT, primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("conversation", CONVERSATION, nullable=False),
    sa.Column("branch", BRANCH, nullable=False),
    sa.Column("request", REQUEST, nullable=False),
    sa.Column("sealed", sa.BigInteger, nullable=False),
    sa.Column("facts", Packed, nullable=False),
    sa.Column("prev", sa.LargeBinary, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Index("audit_of_conversation", "tenant", "conversation", "seq"),
    sa.Index(
        "audit_seals",
        "tenant",
        "sealed",
        sqlite_where=sa.text("sealed > 0"),
        postgresql_where=sa.text("sealed > 0"),
    ),
    sqlite_with_rowid=False,
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("name", PlainText, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("policy", PlainText),
    sa.Column("models", sa.Text, nullable=False),
    sa.Column("allow", sa.Text, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("revoked", sa.Double),
    sa.Index("keys_digest", "digest", unique=True),
)

limits = sa.Table(
    "limits",
    metadata,
    sa.Column("scope", PlainText, primary_key=True),
    sa.Column("token_limit", sa.BigInteger, nullable=False),
    sa.Column("seen", sa.Integer, nullable=False),
    sa.Column("expires", sa.Double, nullable=False),
)

calibrations = sa.Table(
    "calibrations",
    metadata,
    sa.Column("scope", PlainText, primary_key=True),
    sa.Column("ratio", sa.Double, nullable=False),
    sa.Column("samples", sa.Integer, nullable=False),
    sa.Column("recent", sa.Text, nullable=False, server_default="[]"),
    sa.Column("drift", sa.Double, nullable=False, server_default="0"),
    sa.Column("strict", sa.Boolean, nullable=False, server_default=sa.false()),
)


def keep_first(table: sa.Table) -> dict[str, sa.Insert]:
    """An INSERT that leaves a row which is there already as it is, for every dialect by name."""
    return {
        "sqlite": sqlite.insert(table).on_conflict_do_nothing(),
        "postgresql": postgresql.insert(table).on_conflict_do_nothing(),
    }


def keep_last(
    table: sa.Table,
    *,
    replaced: Sequence[str] = (),
    greatest: Sequence[str] = (),
    newest: Mapping[str, str] = NOTHING,
) -> dict[str, sa.Insert]:
    """An INSERT that overwrites some columns of a row which is there already, for every dialect by name.

    ``replaced`` columns take the new value, ``greatest`` ones only if it is greater. A ``newest`` column takes a
    value that is not null unless the row is ahead in the column that it is mapped to.
    """

    def changes(given: sa.ColumnCollection[str, sa.ColumnElement[object]]) -> dict[str, sa.ColumnElement[object]]:
        return (
            {name: given[name] for name in replaced}
            | {name: sa.case((given[name] > table.c[name], given[name]), else_=table.c[name]) for name in greatest}
            | {
                name: sa.case(
                    (sa.and_(given[name].is_not(None), given[by] >= table.c[by]), given[name]), else_=table.c[name]
                )
                for name, by in newest.items()
            }
        )

    key = list(table.primary_key.columns)
    lite, post = sqlite.insert(table), postgresql.insert(table)
    return {
        "sqlite": lite.on_conflict_do_update(index_elements=key, set_=changes(lite.excluded)),
        "postgresql": post.on_conflict_do_update(index_elements=key, set_=changes(post.excluded)),
    }
