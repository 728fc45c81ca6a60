"""Which schema a database has, and bringing it to the newest one.

Alembic is loaded only when there is something to do: it costs 110 ms and 9 MB at every start otherwise.
"""

import importlib

import sqlalchemy as sa

from proxy.store.errors import SchemaTooNew, StoreError

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011", "0012", "0013")
HEAD = REVISIONS[-1]


def revision(connection: sa.Connection) -> str | None:
    """The schema's revision; None for an empty database."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return None if found is None else str(found)


def ensure(connection: sa.Connection) -> tuple[str | None, str]:
    """Bring the schema to the newest revision inside the caller's transaction: the one before and the one now."""
    before = _known(revision(connection))
    if before != HEAD:
        importlib.import_module("proxy.store.migrations").upgrade(connection)
    return before, HEAD


def check(connection: sa.Connection) -> None:
    """Raise :class:`StoreError` unless the schema is the newest one."""
    found = _known(revision(connection))
    if found != HEAD:
        raise StoreError(
            f"the database has schema {found or 'none'}, this Weir needs {HEAD}: run `weir db upgrade`", reason="schema"
        )


def _known(found: str | None) -> str | None:
    if found is not None and found not in REVISIONS:
        raise SchemaTooNew(
            f"the database has schema {found}, which this Weir (schema {HEAD}) does not know: update Weir",
            reason="schema",
        )
    return found
