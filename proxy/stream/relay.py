"""Moving an answer to the client as it arrives, byte for byte, watching it on the way.

Before the first byte goes out the beginning of a stream is looked at, for at most ``PEEK`` seconds after its
first byte: an upstream may say 200 and then, as its first event, that the prompt does not fit. Half an event, which
is of no use to the client, is waited for.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.errors import ProxyError, UpstreamTimeout
from proxy.tap import StreamTap, Tap
from proxy.upstream.client import Answer, StreamBroken
from proxy.upstream.overflow import is_cut_short
from proxy.wire.raw import Lines

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

PEEK = 0.025
MAX_WHOLE = 8 * 1024 * 1024
EVENT_STREAM = b"text/event-stream"
IN_THE_MIDDLE = "The upstream ended its answer in the middle."


class StreamCut(Exception):
    """The answer to the client ended before its end; its connection has to be closed."""


def is_stream(answer: Answer) -> bool:
    """Whether an answer is a stream of server-sent events."""
    return any(name.lower() == b"content-type" and value.startswith(EVENT_STREAM) for name, value in answer.headers)


def is_readable(answer: Answer) -> bool:
    """Whether the body of an answer is what it seems: nobody has compressed it."""
    return not any(n.lower() == b"content-encoding" and v.strip().lower() != b"identity" for n, v in answer.headers)


@dataclass(slots=True)
class Opening:
    """The beginning of a stream that has not gone to the client yet."""

    held: list[bytes] = field(default_factory=list)
    tap: StreamTap = field(default_factory=StreamTap)
    error: bytes | None = None
    pending: "asyncio.Future[bytes] | None" = None
    ended: bool = False


@dataclass(slots=True)
class UpstreamResponse:
    """An answer that is to be relayed: as a whole (``body``), or as a stream of which a beginning was read.

    ``rewritten`` says that ``body`` is not what the upstream has sent.
    """

    answer: Answer
    body: bytes | None = None
    seen: Tap | None = None
    chunks: AsyncGenerator[bytes, None] | None = None
    opening: Opening | None = None
    rewritten: bool = False


async def open_stream(chunks: AsyncGenerator[bytes, None], *, begun: Callable[[], None] | None = None) -> Opening:
    """Read until the stream has said something, failed, or shown nothing of either for a moment.

    ``begun`` is called when its first piece has come.
    """
    opening = Opening()
    tap = opening.tap
    loop = asyncio.get_running_loop()
    deadline: float | None = None
    while True:
        pending = asyncio.ensure_future(anext(chunks))
        timeout = None if deadline is None else max(0.0, deadline - loop.time())
        await asyncio.wait({pending}, timeout=None if tap.in_event else timeout)
        if not pending.done():
            opening.pending = pending
            return opening
        try:
            chunk = pending.result()
        except StopAsyncIteration:
            tap.end()
            opening.ended, opening.error = True, tap.seen.error or _unframed(opening.held, tap)
            return opening
        if begun is not None and not opening.held:
            begun()
        opening.held.append(chunk)
        tap.feed(chunk)
        if tap.seen.error is not None and not tap.seen.said:
            opening.error = tap.seen.error
        if opening.error is not None or tap.seen.said or (tap.seen.finished and not _may_be_full(tap.seen)):
            return opening
        deadline = deadline or loop.time() + PEEK


def _unframed(held: Sequence[bytes], tap: StreamTap) -> bytes | None:
    """A JSON body in a stream's place: gateways send a backend's error so (Lemonade before August 2026)."""
    body = b"".join(held).strip()
    return body if not tap.events and body.startswith(b"{") else None


def _may_be_full(seen: Tap) -> bool:
    """Whether a stream ended at a length without a word and may still report how long its prompt was."""
    return is_cut_short(seen.finish_reasons) and seen.usage is None and not seen.done


async def relay_stream(
    send: Send,
    *,
    status: int,
    headers: Headers,
    opening: Opening | None,
    chunks: AsyncGenerator[bytes, None],
    explain: Callable[[Exception], ProxyError] | None = None,
    begun: Callable[[], None] | None = None,
) -> Tap:
    """Send a stream on; what was seen of it comes back. Raises Cut if it broke off, or ended in the middle.

    ``explain`` says what the client is told of that, as an event. Without it the stream may be anything: nothing
    is read of it, and nothing is added to it. ``begun`` is called when the first piece after ``opening`` has come.
    """
    tap, lines = StreamTap(), Lines()
    await send_start(send, status=status, headers=headers)

    async def relay(chunk: bytes) -> None:
        if explain is not None:
            tap.feed(chunk)
            chunk = lines.whole(chunk)
        if chunk:
            await send_more(send, chunk)

    try:
        if opening is not None:
            for chunk in opening.held:
                await relay(chunk)
            if opening.pending is not None:
                with contextlib.suppress(StopAsyncIteration):
                    await relay(await opening.pending)
        async for chunk in chunks:
            if begun is not None:
                begun()
                begun = None
            await relay(chunk)
        if explain is not None:
            end_of(tap)
            await send_more(send, lines.rest)
    except (StreamBroken, UpstreamTimeout) as error:
        if explain is not None:
            await send_more(send, explain(error).event())
        raise StreamCut(str(error)) from error
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return tap.seen


def end_of(tap: StreamTap) -> None:
    """Take note of a stream's proper end; StreamBroken if there its answer is not at its own."""
    tap.end()
    if not tap.complete:
        raise StreamBroken(IN_THE_MIDDLE)


async def relay_whole(
    send: Send, answer: Answer, *, status: int, headers: Headers, body: bytes, seen: Tap | None
) -> Tap:
    """Send an answer on whose first ``body`` bytes were read; ``seen`` of it, with what else goes by, comes back."""
    await send_start(send, status=status, headers=headers)
    if answer.ended:
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return seen or Tap(bytes_seen=len(body))
    await send_more(send, body)
    seen = seen or Tap(bytes_seen=len(body))
    try:
        async for chunk in answer.chunks():
            seen.bytes_seen += len(chunk)
            await send_more(send, chunk)
    except (StreamBroken, UpstreamTimeout) as error:
        raise StreamCut(str(error)) from error
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return seen


async def send_start(send: Send, *, status: int, headers: Headers) -> None:
    """Begin an answer."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def send_more(send: Send, chunk: bytes) -> None:
    """Send a part of the body that is not its last."""
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
