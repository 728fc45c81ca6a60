"""Checkpoints of their own, notes, kept summaries, parents, and what a branch has prepared or is asked to do."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def upgrade() -> None:
    op.add_column("conversations", sa.Column("parent", sa.Text))
    op.add_column("conversations", sa.Column("closed", sa.Double))
    for name in ("prepared", "resumed"):
        op.add_column("branches", sa.Column(name, sa.LargeBinary))
    for name in ("wanted", "undone"):
        op.add_column("branches", sa.Column(name, sa.Text))
    _checkpoints()
    _notes()
    _summaries()
    _words()


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("branch", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("window_id", sa.Integer, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("sha", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["tenant", "branch"], ["branches.tenant", "branches.branch"], ondelete="CASCADE"),
    )
    op.execute(
        "INSERT INTO checkpoints (tenant, branch, version, at, reason, window_id, length, body, sha) "
        "SELECT tenant, branch, version, at, 'compaction', 1, length, body, body_sha FROM cuts "
        "WHERE length(body) > 0"
    )
    op.drop_column("cuts", "body")
    op.drop_column("cuts", "body_sha")
    op.add_column("cuts", sa.Column("batch", sa.Integer, nullable=False, server_default="0"))
    op.execute("UPDATE cuts SET batch = version")


def _notes() -> None:
    op.create_table(
        "notes",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("conversation", sa.Text, primary_key=True),
        sa.Column("id", sa.LargeBinary, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("category", sa.Text, nullable=False),
        sa.Column("importance", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("text", sa.LargeBinary, nullable=False),
        sa.Column("sha", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "conversation"], ["conversations.tenant", "conversations.id"], ondelete="CASCADE"
        ),
    )


def _summaries() -> None:
    op.create_table(
        "summaries",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("key", sa.LargeBinary, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("tokens_in", sa.BigInteger, nullable=False),
        sa.Column("tokens_out", sa.BigInteger, nullable=False),
        sa.Column("text", sa.LargeBinary, nullable=False),
        sa.Column("sha", sa.LargeBinary, nullable=False),
    )
    op.create_index("summaries_at", "summaries", ["at"])
    op.create_index("summaries_of_tenant", "summaries", ["tenant", "at"])


def _words() -> None:
    """PostgreSQL's words become a column, so that ranking reads them; what is beyond its limit of 1 MB is left out.

    Punctuation parts words, as it does in SQLite: else PostgreSQL takes a path or a host for one word.
    """
    if op.get_context().dialect.name != "postgresql":
        return
    op.execute("DROP INDEX originals_fts")
    marks = PUNCTUATION.replace("'", "''")
    parted = f"translate(left(coalesce(text, ''), 200000), '{marks}', repeat(' ', {len(PUNCTUATION)}))"
    op.execute(
        f"ALTER TABLE originals ADD COLUMN words tsvector GENERATED ALWAYS AS (to_tsvector('simple', {parted})) STORED"
    )
    op.execute("CREATE INDEX originals_fts ON originals USING gin (words)")
