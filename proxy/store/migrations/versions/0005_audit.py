"""The audit: a table that is only added to, and triggers that see to it."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

APPENDED = "audit rows are put behind the last one"
CHANGED = "audit rows are never changed"
DELETED = "audit rows are deleted only once they are sealed"
LAST = "(SELECT max(seq) FROM audit WHERE tenant = NEW.tenant)"
BEFORE = "(SELECT hash FROM audit WHERE tenant = NEW.tenant AND seq = NEW.seq - 1)"
SEALED = (
    "EXISTS (SELECT 1 FROM audit AS s WHERE s.tenant = OLD.tenant AND s.sealed > 0 AND s.sealed >= OLD.seq "
    "AND s.seq > OLD.seq)"
)


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("conversation", sa.Text, nullable=False),
        sa.Column("branch", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("sealed", sa.BigInteger, nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("prev", sa.LargeBinary, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
    )
    op.create_index("audit_of_conversation", "audit", ["tenant", "conversation", "seq"])
    sealed = sa.text("sealed > 0")
    op.create_index("audit_seals", "audit", ["tenant", "sealed"], sqlite_where=sealed, postgresql_where=sealed)
    for statement in _sqlite() if op.get_context().dialect.name == "sqlite" else _postgresql():
        op.execute(statement)


def _sqlite() -> tuple[str, ...]:
    """An insert that replaces a row would delete it unseen: so an insert must be behind the last row."""
    appends = (
        f"CREATE TRIGGER audit_appends BEFORE INSERT ON audit WHEN NEW.seq IS NOT coalesce({LAST}, 0) + 1 "
        f"OR NEW.prev IS NOT coalesce({BEFORE}, zeroblob(32)) BEGIN SELECT RAISE(ABORT, '{APPENDED}'); END"
    )
    never = f"CREATE TRIGGER audit_never_changes BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, '{CHANGED}'); END"
    sealed = (
        f"CREATE TRIGGER audit_goes_sealed BEFORE DELETE ON audit WHEN NOT {SEALED} "
        f"BEGIN SELECT RAISE(ABORT, '{DELETED}'); END"
    )
    return appends, never, sealed


def _postgresql() -> tuple[str, ...]:
    guard = (
        "CREATE FUNCTION audit_guard() RETURNS trigger LANGUAGE plpgsql AS $guard$ BEGIN "
        f"IF TG_OP = 'INSERT' THEN IF NEW.seq = coalesce({LAST}, 0) + 1 "
        f"AND NEW.prev = coalesce({BEFORE}, decode(repeat('00', 32), 'hex')) THEN RETURN NEW; END IF; "
        f"RAISE EXCEPTION '{APPENDED}'; END IF; "
        f"IF TG_OP = 'DELETE' THEN IF {SEALED} THEN RETURN OLD; END IF; RAISE EXCEPTION '{DELETED}'; END IF; "
        f"RAISE EXCEPTION '{CHANGED}'; END $guard$"
    )
    each = (
        ("audit_appends", "INSERT", "ROW"),
        ("audit_never_changes", "UPDATE", "ROW"),
        ("audit_goes_sealed", "DELETE", "ROW"),
        ("audit_stays", "TRUNCATE", "STATEMENT"),
    )
    return (
        guard,
        *(
            f"CREATE TRIGGER {name} BEFORE {what} ON audit FOR EACH {unit} EXECUTE FUNCTION audit_guard()"
            for name, what, unit in each
        ),
    )
