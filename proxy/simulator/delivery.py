"""An answer as it goes over the wire, decided before the first byte: what, how fast, and how it ends."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

JSON_TYPE = "application/json"
SSE_TYPE = "text/event-stream; charset=utf-8"


class Visit(Protocol):
    """One request while it is being answered."""

    async def wait(self, seconds: float | None) -> bool:
        """Sleep (None: for ever); True as soon as the client left or the server stops."""
        ...

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Hand an ASGI message to the server."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What is sent.

    Attributes:
        chunks: the body in the pieces in which it is sent; one for JSON, one an event for a stream.
        length: the Content-Length to state, None for a chunked body.
        before: seconds until the headers; ``between`` until each further chunk.
        stall_at: index of the chunk that is never sent, headers included at -1.
        cut_at: index of the chunk before which the connection is dropped without a proper end.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: tuple[bytes, ...] = ()
    length: int | None = None
    before: float = 0.0
    between: float = 0.0
    stall_at: int | None = None
    cut_at: int | None = None

    @property
    def streamed(self) -> bool:
        """Whether the body is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def answers(self) -> bool:
        """Whether the client gets a complete 200."""
        return self.status == 200 and self.stall_at is None and self.cut_at is None


def as_json(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Delivery:
    """A JSON answer with its length."""
    named = {"content-type": JSON_TYPE, **(headers or {})}
    return Delivery(status=status, headers=named, chunks=(body,), length=len(body))


def as_stream(events: tuple[bytes, ...], *, headers: Mapping[str, str] | None = None) -> Delivery:
    """A stream of server-sent events."""
    return Delivery(headers={"content-type": SSE_TYPE, "cache-control": "no-cache", **(headers or {})}, chunks=events)


async def deliver(delivery: Delivery, visit: Visit) -> bool:
    """Send it; True where it was sent to its end, False where it stalled, was cut or the client left."""
    if delivery.stall_at == -1:
        await visit.wait(None)
        return False
    if await visit.wait(delivery.before):
        return False
    headers = [(name.encode(), value.encode()) for name, value in delivery.headers.items()]
    if delivery.length is not None:
        headers.append((b"content-length", str(delivery.length).encode()))
    await visit.send({"type": "http.response.start", "status": delivery.status, "headers": headers})
    last = len(delivery.chunks) - 1 if delivery.stall_at is None and delivery.cut_at is None else None
    for index, chunk in enumerate(delivery.chunks):
        if index == delivery.stall_at:
            await visit.wait(None)
            return False
        if index == delivery.cut_at or await visit.wait(delivery.between if index else 0):
            return False
        await visit.send({"type": "http.response.body", "body": chunk, "more_body": index != last})
    if delivery.stall_at is not None:
        await visit.wait(None)
    if last == -1:
        await visit.send({"type": "http.response.body", "body": b"", "more_body": False})
    return last is not None
