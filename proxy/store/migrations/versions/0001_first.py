"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _meta()
    _conversations()
    _branches()
    _chains()
    _edits()
    _cuts()
    _originals()
    _removed()
    _exchanges()
    _keys()
    _limits()
    _calibrations()
    _full_text()
    _first_rows()


def _meta() -> None:
    op.create_table(
        "meta",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("body", sa.LargeBinary),
        sa.Column("number", sa.BigInteger),
    )


def _conversations() -> None:
    op.create_table(
        "conversations",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("updated", sa.Double, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("requests", sa.Integer, nullable=False),
        sa.Column("tokens_before", sa.BigInteger, nullable=False),
        sa.Column("tokens_after", sa.BigInteger, nullable=False),
        sa.Column("token_limit", sa.BigInteger, nullable=False),
        sa.Column("zone", sa.Text, nullable=False),
        sa.Column("actions", sa.Text, nullable=False),
    )
    op.create_index("conversations_name", "conversations", ["tenant", "name"], unique=True)
    op.create_index("conversations_of_tenant", "conversations", ["tenant", "updated"])
    op.create_index("conversations_updated", "conversations", ["updated"])


def _branches() -> None:
    op.create_table(
        "branches",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("branch", sa.Text, primary_key=True),
        sa.Column("conversation", sa.Text, nullable=False),
        sa.Column("parent", sa.Text),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("longest", sa.Integer, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("updated", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "conversation"], ["conversations.tenant", "conversations.id"], ondelete="CASCADE"
        ),
    )
    op.create_index("branches_of_conversation", "branches", ["tenant", "conversation"])


def _chains() -> None:
    op.create_table(
        "chains",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("hash", sa.LargeBinary, primary_key=True),
        sa.Column("branch", sa.Text, primary_key=True),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(["tenant", "branch"], ["branches.tenant", "branches.branch"], ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_index("chains_of_branch", "chains", ["tenant", "branch"])


def _edits() -> None:
    op.create_table(
        "edits",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("branch", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("occurrence", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("text", sa.LargeBinary, nullable=False),
        sa.Column("ref", sa.Text, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("sha", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["tenant", "branch"], ["branches.tenant", "branches.branch"], ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )


def _cuts() -> None:
    op.create_table(
        "cuts",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("branch", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("covers", sa.Integer, nullable=False),
        sa.Column("prefix", sa.LargeBinary, nullable=False),
        sa.Column("text", sa.LargeBinary, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("ref", sa.Text, nullable=False),
        sa.Column("stays", sa.Text, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("narrative", sa.LargeBinary, nullable=False),
        sa.Column("sha", sa.LargeBinary, nullable=False),
        sa.Column("covered", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("body_sha", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["tenant", "branch"], ["branches.tenant", "branches.branch"], ondelete="CASCADE"),
    )
    op.create_index("cuts_ref", "cuts", ["tenant", "ref"])


def _originals() -> None:
    op.create_table(
        "originals",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("ref", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("sha", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("text", sa.Text),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("quarantined", sa.Boolean, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("originals_ref", "originals", ["tenant", "ref"], unique=True)


def _removed() -> None:
    op.create_table(
        "removed",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("branch", sa.Text, primary_key=True),
        sa.Column("ref", sa.Text, primary_key=True),
        sa.ForeignKeyConstraint(["tenant", "branch"], ["branches.tenant", "branches.branch"], ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_index("removed_ref", "removed", ["tenant", "ref"])


def _exchanges() -> None:
    op.create_table(
        "exchanges",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("conversation", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("branch", sa.Text, nullable=False),
        sa.Column("parent", sa.Text),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
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
        sa.Column("detail", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "conversation"], ["conversations.tenant", "conversations.id"], ondelete="CASCADE"
        ),
    )
    op.create_index("exchanges_at", "exchanges", ["at"])
    op.create_index("exchanges_of_conversation", "exchanges", ["tenant", "conversation", "at"])


def _keys() -> None:
    op.create_table(
        "keys",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("policy", sa.Text),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("allow", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("revoked", sa.Double),
    )
    op.create_index("keys_digest", "keys", ["digest"], unique=True)


def _limits() -> None:
    op.create_table(
        "limits",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("token_limit", sa.BigInteger, nullable=False),
        sa.Column("seen", sa.Integer, nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
    )


def _calibrations() -> None:
    op.create_table(
        "calibrations",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("ratio", sa.Double, nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
    )


def _full_text() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            "CREATE VIRTUAL TABLE originals_fts USING fts5(tenant, text, content='originals', content_rowid='id', "
            "tokenize='unicode61 remove_diacritics 2')"
        )
    else:
        op.execute("CREATE INDEX originals_fts ON originals USING gin (to_tsvector('simple', coalesce(text, '')))")


def _first_rows() -> None:
    op.execute("INSERT INTO meta (name, number) VALUES ('commits', 0), ('indexed', 0)")
