"""Everything that arrives, recorded byte for byte while it is answered, for tests and for ``GET /sim/requests``."""

import asyncio
import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OWN_ROUTES = "/sim/"
VISIT = "simulator.visit"


@dataclass(slots=True, kw_only=True)
class RecordedRequest:
    """One request as it arrived, and what became of it so far.

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
    """The requests in order of arrival."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: deque[RecordedRequest] = deque()
        self._started = time.monotonic()
        self._visits: set[Visit] = set()

    def __iter__(self) -> Iterator[RecordedRequest]:
        return iter(tuple(self._entries))

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def arrive(self, scope: Scope, body: bytes, send: Send) -> "Visit":
        """Record a request that has arrived in full."""
        headers = tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        seen = RecordedRequest(method=scope["method"], path=scope["path"], headers=headers, body=body, at=self.now())
        self._entries.append(seen)
        self._bytes += len(body)
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            self._bytes -= len(self._entries.popleft().body)
        visit = Visit(self, seen, send)
        self._visits.add(visit)
        return visit

    def depart(self, visit: "Visit") -> None:
        """The request is over."""
        self._visits.discard(visit)

    def release(self) -> None:
        """End everything that stalls, so that the server can stop."""
        for visit in tuple(self._visits):
            visit.done = True
            visit.over.set()

    def clear(self) -> None:
        """Forget every entry."""
        self._entries.clear()
        self._bytes = 0


class Visit:
    """One request while it is being answered: its entry, and whether the client is still there."""

    def __init__(self, ledger: Ledger, seen: RecordedRequest, send: Send) -> None:
        self.seen = seen
        self.over = asyncio.Event()
        self.done = False
        self._ledger = ledger
        self._send = send

    async def wait(self, seconds: float | None) -> bool:
        """Sleep (None: for ever); True as soon as the client left or the simulator stops."""
        if seconds == 0:
            await asyncio.sleep(0)
            return self.over.is_set()
        try:
            await asyncio.wait_for(self.over.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Hand an ASGI message to the server, noting status, size and end."""
        if message["type"] == "http.response.start":
            self.seen.status = message["status"]
        else:
            self.seen.sent += len(message.get("body", b""))
            self.seen.finished = not message.get("more_body", False)
            self.done = self.done or self.seen.finished
        await self._send(message)

    def leave(self) -> None:
        """The client is gone; an answer that was complete by then does not count as broken off."""
        if not self.done:
            self.seen.client_gone, self.seen.gone_at = True, self._ledger.now()
        self.over.set()


class Recorder:
    """ASGI middleware: reads the whole body, records it, and watches the client while the answer is made."""

    def __init__(self, app: ASGIApp, *, ledger: Ledger) -> None:
        self._app = app
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request under observation; the simulator's own routes pass unseen."""
        if scope["type"] != "http" or scope["path"].startswith(OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        visit = self._ledger.arrive(scope, body or b"", send)
        if body is None:
            visit.leave()
            self._ledger.depart(visit)
            return
        watch = asyncio.create_task(_watch(receive, visit))
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if pending:
                return pending.pop()
            await visit.over.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app({**scope, VISIT: visit}, replay, visit.send)
        finally:
            watch.cancel()
            self._ledger.depart(visit)


async def _read(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _watch(receive: Receive, visit: Visit) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    visit.leave()
