"""Reading a request's body, and noticing that its client has gone."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any

from proxy.errors import RequestTooLarge
from proxy.server import DISCONNECT
from proxy.telemetry.process import give_back

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Headers = Sequence[tuple[bytes, bytes]]
Hold = Callable[[int], Awaitable[None]]


LARGE = 8 * 2**20
"""Bytes of a body whose parts are worth giving back to the system: the allocator would keep them."""


class ClientGone(Exception): ...


def declared_length(headers: Headers) -> int | None:
    given = next((value for name, value in headers if name == b"content-length"), b"")
    return int(given) if given.isdigit() else None


async def read_part(receive: Receive, before: int, *, limit: int) -> tuple[bytes, bool]:
    """The body's next part behind ``before`` bytes, and whether more may come. Raises as :func:`read_body` does."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    part: bytes = message.get("body", b"")
    if before + len(part) > limit:
        raise RequestTooLarge.of_body(limit)
    return part, message.get("more_body", False)


async def read_body(receive: Receive, *, limit: int, hold: Hold | None = None) -> bytes:
    """The whole body. Raises RequestTooLarge above ``limit`` bytes, ClientGone if the client leaves meanwhile.

    ``hold`` is told of each part that comes, and may take its time.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        part, more = await read_part(receive, size, limit=limit)
        size += len(part)
        if hold is not None:
            await hold(len(part))
        parts.append(part)
        if not more:
            whole = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if size > LARGE:
                give_back()
            return whole


async def read_held(receive: Receive, headers: Headers, *, limit: int, hold: Hold) -> bytes:
    """The whole body, counted by ``hold`` before it is read where its length is known, else part by part."""
    length = declared_length(headers)
    if length is None:
        return await read_body(receive, limit=limit, hold=hold)
    if length > limit:
        raise RequestTooLarge.of_body(limit)
    await hold(length)
    return await read_body(receive, limit=limit)


async def while_connected(scope: MutableMapping[str, Any], receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``, and cancel it as soon as the client has gone. Raises ClientGone then.

    An answer that is not streamed is never cancelled by the server itself, so this is what closes the upstream.
    Weir's own server tells when a client leaves; any other ASGI server is asked by reading on.
    """
    when_gone = scope.get("extensions", {}).get(DISCONNECT)
    task = asyncio.current_task()
    if when_gone is None or task is None:
        await _while_receiving(receive, work)
        return
    left: list[bool] = []

    def leave() -> None:
        left.append(True)
        task.cancel()

    when_gone(leave)
    try:
        await work
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        when_gone(None)


async def _while_receiving(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise ClientGone
        await task
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
