"""Everything a simulator received, for tests and for ``GET /sim/requests``."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request as it arrived, and what became of it.

    Attributes:
        headers: name and value in the order received, names in lower case.
        status: of the answer, 0 while there is none.
        prompt_tokens: of the request, 0 where it was not counted; ``cached_tokens`` of them were in the cache.
        at: seconds from the start of the simulator; ``gone_at`` likewise, None while the client stayed.
        client_gone: the client left before the answer was complete.
        sent: bytes of the answer's body that were handed to the server.
        finished: the answer was sent to its end.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    at: float
    status: int = 0
    model: str = ""
    fault: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    client_gone: bool = False
    gone_at: float | None = None
    sent: int = 0
    finished: bool = False

    def header(self, name: str) -> str | None:
        """The first header of that name, or None."""
        return next((value for key, value in self.headers if key == name.lower()), None)

    def json(self) -> Any:
        """The body as JSON; raises ValueError where it is none."""
        return json.loads(self.body)

    def report(self) -> dict[str, Any]:
        """The entry for ``GET /sim/requests``: ``body`` as JSON where it is JSON, else as text."""
        try:
            body = self.json()
        except ValueError:
            body = self.body.decode("utf-8", "replace")
        values = {name: getattr(self, name) for name in self.__slots__ if name != "body"}
        return {**values, "body": body, "body_bytes": len(self.body), "sha256": hashlib.sha256(self.body).hexdigest()}


class Ledger:
    """The requests in order of arrival; an entry is replaced as its answer goes on."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._next = 0
        self._entries: dict[int, Seen] = {}

    def __iter__(self) -> Iterator[Seen]:
        return iter(tuple(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, seen: Seen) -> int:
        """Add an entry; the answer is its key for :meth:`note`."""
        key = self._next
        self._next += 1
        self._entries[key] = seen
        self._bytes += len(seen.body)
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            oldest = next(iter(self._entries))
            self._bytes -= len(self._entries.pop(oldest).body)
        return key

    def note(self, key: int, **changes: Any) -> None:
        """Change fields of an entry; one that was cleared meanwhile stays away."""
        if key in self._entries:
            self._entries[key] = replace(self._entries[key], **changes)

    def clear(self) -> None:
        """Forget every entry."""
        self._entries.clear()
        self._bytes = 0
