"""What a database's errors mean."""

import sqlite3

from sqlalchemy import exc

from proxy.store.records import CorruptStore, StoreError, StoreUnavailable

RETRIED = {"40001", "40P01"}
"""SQLSTATE of a transaction that is worth another attempt."""
UNAVAILABLE = {
    sqlite3.SQLITE_BUSY: ("locked", "the database is locked by another connection"),
    sqlite3.SQLITE_LOCKED: ("locked", "the database is locked by another connection"),
    sqlite3.SQLITE_FULL: ("full", "the disk is full: make room first, for deleting takes some too"),
    sqlite3.SQLITE_READONLY: ("read_only", "the database is read-only"),
    sqlite3.SQLITE_PERM: ("read_only", "the database may not be written"),
    sqlite3.SQLITE_IOERR: ("io", "the disk failed while reading or writing the database"),
    sqlite3.SQLITE_CANTOPEN: ("open", "the database file cannot be opened"),
    sqlite3.SQLITE_NOMEM: ("memory", "out of memory"),
    sqlite3.SQLITE_INTERRUPT: ("interrupted", "the statement was interrupted"),
}
CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
SERVER = {
    "25006": ("read_only", "the server is a standby, or read-only"),
    "42501": ("refused", "the user of the database lacks a right"),
    "53100": ("full", "the server's disk is full"),
    "53300": ("busy", "the server has no free connection"),
    "55P03": ("locked", "the database is locked by another connection"),
    "57014": ("slow", "a statement took longer than the store's timeout"),
}
"""By SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html"""
ENTRANCE = ("08", "28", "3D", "42704")
"""SQLSTATE with which a server refuses a connection; its message names user, database and setting,
no content.
"""
LOST = ("57P", "25P03")


def is_disconnect(error: Exception) -> bool:
    return isinstance(error, exc.DBAPIError) and error.connection_invalidated


def is_retried(error: Exception) -> bool:
    cause = error.orig if isinstance(error, exc.DBAPIError) else None
    return getattr(cause, "sqlstate", None) in RETRIED


def translate(error: Exception) -> StoreError:
    """The store's error for a driver's or SQLAlchemy's; its message says what to do."""
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
        return StoreUnavailable(f"the database server says: {plain(cause)}", reason="unreachable")
    # asyncpg's, of what it does not take in a URL
    if type(cause.__cause__).__name__ == "ClientConfigurationError":
        return StoreError(f"the store's URL cannot be used: {plain(cause.__cause__)}", reason="url")
    if isinstance(error, exc.TimeoutError):
        return StoreUnavailable("no free connection to the database", reason="busy")
    if isinstance(cause, TimeoutError):
        return StoreUnavailable("the database does not answer", reason="unreachable")
    if isinstance(cause, ConnectionError) and "SSL" in str(cause):
        return StoreUnavailable(
            "the database takes no encrypted connection, as sslmode wants it", reason="unreachable"
        )
    if isinstance(cause, OSError):
        return StoreUnavailable(
            f"the database cannot be reached: {plain(cause)}", reason="unreachable"
        )
    if is_disconnect(error) or state.startswith(LOST) or _is_drivers(error, cause):
        return StoreUnavailable(
            f"the database cannot be reached ({type(cause).__name__})", reason="unreachable"
        )
    return StoreError(
        f"the database refused a statement ({type(cause).__name__})", reason="refused"
    )


def _is_drivers(error: Exception, cause: BaseException) -> bool:
    kinds = exc.OperationalError | exc.InterfaceError | exc.InternalError
    return isinstance(error, kinds) and not isinstance(cause.__cause__, ValueError)


def plain(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:300]
