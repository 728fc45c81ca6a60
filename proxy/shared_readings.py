"""The readings of messages that all conversations of a process share: flows that compact run on several threads."""

from threading import Lock

from policies.text.segments import Readings, TextReading


class SharedReadings(Readings):
    """Readings that any thread may use; what is read is read outside the lock."""

    def __init__(self, *, most: int = 30_000) -> None:
        super().__init__(most=most)
        self._lock = Lock()

    def find(self, key: bytes) -> TextReading | None:
        """What is kept under a key."""
        with self._lock:
            return super().find(key)

    def keep(self, key: bytes, made: TextReading) -> None:
        """Keep what was read."""
        with self._lock:
            super().keep(key, made)
