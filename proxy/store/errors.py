"""What can go wrong in the store, as one short tree, and how a driver's error becomes one of these.

::

    StoreError
    ├── StoreUnavailable    locked, full, read-only, unreadable, gone: try again or go on without
    ├── StaleVersion        somebody else committed first; plan again on what is there now
    ├── NoSuchVersion       a branch was never at that version, or was taken back from it
    ├── NameTaken           a key of that name exists
    ├── SchemaTooNew        a newer Weir has written here
    └── CorruptStore        this is not a database, or a damaged one

No message carries SQL, parameters or content. ``reason`` is a short code, fit for a metric's label.
"""

import sqlite3

from sqlalchemy import exc


class StoreError(Exception):
    """Base of everything that the store raises on purpose."""

    def __init__(self, message: str, *, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


class StoreUnavailable(StoreError):
    """The database cannot be used now; nothing of the failed transaction was stored."""


class StaleVersion(StoreError):
    """The branch has moved on to version ``current`` since the plan was made; nothing was stored."""

    def __init__(self, current: int) -> None:
        super().__init__(f"the branch is at version {current}", reason="stale")
        self.current = current


class NoSuchVersion(StoreError):
    """The conversation cannot go back to this version: there was none, or a rollback has taken it back."""


class NameTaken(StoreError):
    """A key with this name, or with this very secret, exists already."""


class SchemaTooNew(StoreError):
    """The database was written by a newer version of Weir."""


class CorruptStore(StoreError):
    """The file is not a database, or its pages are damaged."""


UNAVAILABLE = {
    sqlite3.SQLITE_BUSY: ("locked", "the database is locked by another connection"),
    sqlite3.SQLITE_LOCKED: ("locked", "the database is locked by another connection"),
    sqlite3.SQLITE_FULL: ("full", "the disk is full"),
    sqlite3.SQLITE_READONLY: ("read_only", "the database is read-only"),
    sqlite3.SQLITE_PERM: ("read_only", "the database may not be written"),
    sqlite3.SQLITE_IOERR: ("io", "the disk failed while reading or writing the database"),
    sqlite3.SQLITE_CANTOPEN: ("open", "the database file cannot be opened"),
    sqlite3.SQLITE_NOMEM: ("memory", "out of memory"),
    sqlite3.SQLITE_INTERRUPT: ("interrupted", "the statement was interrupted"),
}
CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
RETRIED = {"40001", "40P01"}
SERVER = {
    "25006": ("read_only", "the server is a standby, or read-only"),
    "42501": ("refused", "the user of the database lacks a right"),
    "53100": ("full", "the server's disk is full"),
    "53300": ("busy", "the server has no free connection"),
    "55P03": ("locked", "the database is locked by another connection"),
    "57014": ("slow", "a statement took longer than the store's timeout"),
}
"""By SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html"""
ENTRANCE = ("08", "28", "3D")
"""Classes of SQLSTATE in which a server says why it lets nobody in; its words name user and database, no content."""
LOST = ("57P", "25P03")


def translate(error: Exception) -> StoreError:
    """The store's error for what SQLAlchemy or a driver raised."""
    cause = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
    code = getattr(cause, "sqlite_errorcode", None)
    if code is not None:
        primary = code & 0xFF
        if primary in CORRUPT:
            return CorruptStore("the file is not a database, or it is damaged", reason="corrupt")
        if primary in UNAVAILABLE:
            reason, words = UNAVAILABLE[primary]
            return StoreUnavailable(words, reason=reason)
    state = getattr(cause, "sqlstate", None) or ""
    if state in SERVER:
        reason, words = SERVER[state]
        return StoreUnavailable(words, reason=reason)
    if state.startswith(ENTRANCE):
        return StoreUnavailable(f"the database server says: {_plain(cause)}", reason="unreachable")
    if isinstance(error, exc.TimeoutError):
        return StoreUnavailable("no free connection to the database", reason="busy")
    if isinstance(cause, TimeoutError):
        return StoreUnavailable("the database does not answer", reason="unreachable")
    if isinstance(cause, ConnectionError) and "SSL" in str(cause):
        return StoreUnavailable("the database takes no encrypted connection, as sslmode wants it", reason="unreachable")
    if isinstance(cause, OSError):
        return StoreUnavailable(f"the database cannot be reached: {_plain(cause)}", reason="unreachable")
    if is_disconnect(error) or state.startswith(LOST) or _is_drivers(error, cause):
        return StoreUnavailable(f"the database cannot be reached ({type(cause).__name__})", reason="unreachable")
    return StoreError(f"the database refused a statement ({type(cause).__name__})", reason="refused")


def _is_drivers(error: Exception, cause: BaseException) -> bool:
    """Whether a driver cannot go on, other than for a value that it cannot send."""
    kinds = exc.OperationalError | exc.InterfaceError | exc.InternalError
    return isinstance(error, kinds) and not isinstance(cause.__cause__, ValueError)


def _plain(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def is_disconnect(error: Exception) -> bool:
    return isinstance(error, exc.DBAPIError) and error.connection_invalidated


def is_retried(error: Exception) -> bool:
    """Whether PostgreSQL asks to run the transaction again: serialization failure or deadlock."""
    cause = error.orig if isinstance(error, exc.DBAPIError) else None
    return getattr(cause, "sqlstate", None) in RETRIED
