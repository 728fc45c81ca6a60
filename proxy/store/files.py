"""What stands beside a SQLite file: advisory locks and the gate for versions that lose data in WAL mode."""

import asyncio
import fcntl
import os
import time
from pathlib import Path
from typing import Literal

from proxy.store.errors import StoreUnavailable

SqliteVersion = tuple[int, int, int]


def has_wal_reset_bug(version: SqliteVersion) -> bool:
    """Whether this SQLite may corrupt a WAL database that two connections write and checkpoint at once.

    sqlite.org/wal.html, "The WAL-reset bug": 3.7.0 to 3.51.2, corrected in 3.51.3, 3.50.7 and 3.44.6.
    """
    if (3, 44, 6) <= version < (3, 45, 0) or (3, 50, 7) <= version < (3, 51, 0):
        return False
    return (3, 7, 0) <= version < (3, 51, 3)


def journal_for(version: SqliteVersion, *, shared: bool) -> Literal["wal", "delete"]:
    """The journal mode that is safe for one process, or with ``shared`` for several."""
    return "delete" if shared and has_wal_reset_bug(version) else "wal"


class LockFile:
    """An advisory lock on a file of its own, which also keeps the number of commits that were made.

    The number is how a database that lost its ``-wal`` file, or was replaced by an older copy, is noticed.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"{path} cannot be opened ({error.strerror})", reason="read_only") from None
        self._path = path

    def take(self, *, shared: bool = False) -> bool:
        """Whether the lock is ours now, with ``shared`` together with others who say so; never waits."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    async def wait(self, patience: float) -> None:
        """Take the lock within ``patience`` seconds, or raise :class:`StoreUnavailable`."""
        deadline = time.monotonic() + patience
        while not self.take():
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"another weir command holds {self._path.name}", reason="locked")
            await asyncio.sleep(0.01)

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def commits(self) -> int:
        """The last number that :meth:`note` wrote; 0 if none."""
        written = os.pread(self._file, 20, 0)
        return int(written) if written.isdigit() else 0

    def note(self, commits: int) -> None:
        os.pwrite(self._file, b"%020d" % commits, 0)

    def close(self) -> None:
        os.close(self._file)
