"""What is done to an SQLite file as a whole while it is in use: copied, and given back what it does not need."""

import contextlib
import os
import sqlite3
from pathlib import Path

from proxy.store.records import CorruptStore, StoreUnavailable

PAGES_AT_ONCE = 256


def pragma(driver: sqlite3.Connection, name: str) -> str:
    return str(driver.execute(f"PRAGMA {name}").fetchone()[0])


def back_up(driver: sqlite3.Connection, *, path: Path) -> None:
    """Write a copy of one moment to a new file that only its owner can read; it is there whole or not at all."""
    unfinished = path.with_name(f"{path.name}.part")
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreUnavailable(f"{unfinished} cannot be made ({error.strerror})", reason="backup") from None
    try:
        with contextlib.closing(sqlite3.connect(unfinished)) as copy:
            driver.backup(copy)
            if (said := pragma(copy, "quick_check")) != "ok":
                raise CorruptStore(f"the copy is not whole, so the database is damaged: {said}", reason="damaged")
        os.link(unfinished, path)  # unlike a rename it replaces nothing
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be made ({error.strerror})", reason="backup") from None
    finally:
        unfinished.unlink(missing_ok=True)


def shrink(driver: sqlite3.Connection) -> bool:
    before = int(pragma(driver, "freelist_count"))
    driver.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
    return 0 < int(pragma(driver, "freelist_count")) < before
