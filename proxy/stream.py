"""A request's body in, and an answer to the client as it arrives, byte for byte, watched on the
way.

Before the first byte goes out the beginning of a stream is looked at, for at most ``PEEK`` seconds
after its first byte: an upstream may say 200 and then, as its first event, that the prompt does not
fit. Half an event is useless to the client, so the rest is awaited.

What an answer said is put together again for the trace, only where message text may be captured,
and to know the conversation by that answer where its opening is not enough.
"""

import asyncio
import contextlib
import re
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import aclosing
from io import BytesIO
from typing import Any

import msgspec

from proxy.errors import ProxyError, RequestTooLarge, UpstreamTimeout
from proxy.server import WHEN_GONE
from proxy.tap import StreamTap, Tap
from proxy.telemetry.trace import Span
from proxy.upstream.connection import Answer, StreamBroken
from proxy.upstream.overflow import is_cut_short
from proxy.wire.codec import CHAT, Codec
from proxy.wire.encodings import HEADER, decoded, encodings_in
from proxy.wire.raw import DONE, Decoder, Lines, read_value

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
NOT_RELAYED = frozenset({b"connection", b"date", b"keep-alive", b"transfer-encoding"})
"""Headers of an upstream's answer that Weir's server writes itself, for its own connection."""
Hold = Callable[[int], Awaitable[None]]
READ_IN_THE_LOOP = 16 * 1024
"""Bytes of an encoded body up to which it is read where it came: at most 1.6 MB come of them."""


class ClientGone(Exception): ...


def declared_length(headers: Headers) -> int | None:
    values = [value for name, value in headers if name == b"content-length"]
    return int(values[-1]) if values and values[-1].isdigit() else None


async def read_part(receive: Receive, before: int, *, limit: int) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    part: bytes = message.get("body", b"")
    if before + len(part) > limit:
        raise RequestTooLarge.of_body(limit)
    return part, message.get("more_body", False)


async def read_body(receive: Receive, *, limit: int, hold: Hold | None = None) -> bytes:
    """The whole body. Raises RequestTooLarge above ``limit`` bytes, ClientGone if the client leaves
    meanwhile.

    ``hold`` is called with each part that comes, and may take its time.
    """
    part, more = await read_part(receive, 0, limit=limit)
    if hold is not None:
        await hold(len(part))
    if not more:
        return part
    whole = BytesIO()
    whole.write(part)
    while more:
        part, more = await read_part(receive, whole.tell(), limit=limit)
        if hold is not None:
            await hold(len(part))
        whole.write(part)
    return whole.getvalue()  # what it has grown to, uncopied


async def read_held(receive: Receive, headers: Headers, *, limit: int, hold: Hold) -> bytes:
    """The whole body, counted by ``hold`` before it is read where its length is known, else part by
    part.
    """
    length = declared_length(headers)
    if length is not None:
        if length > limit:
            raise RequestTooLarge.of_body(limit)
        await hold(length)
    return await read_body(receive, limit=limit, hold=hold if length is None else None)


async def read_plain(
    receive: Receive, headers: Headers, *, limit: int, hold: Hold
) -> tuple[bytes, Headers]:
    """The whole body without its ``Content-Encoding``, counted by ``hold`` as it grows, and the
    headers without it.

    Raises UnsupportedEncoding, RequestTooLarge, and InvalidRequest for a body that is broken.
    """
    encodings = encodings_in(headers)
    body = await read_held(receive, headers, limit=limit, hold=hold)
    if encodings is None:
        return body, headers
    headers = [header for header in headers if header[0] != HEADER]
    if not encodings:
        return body, headers
    pieces = decoded(body, encodings, limit=limit)
    whole = BytesIO()
    while True:
        takes_long = len(body) > READ_IN_THE_LOOP
        piece = await asyncio.to_thread(next, pieces, None) if takes_long else next(pieces, None)
        if piece is None:
            return whole.getvalue(), headers
        await hold(len(piece))
        whole.write(piece)


async def while_connected(scope: MutableMapping[str, Any], work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``, and cancel it as soon as the client has gone. Raises ClientGone then.

    An answer that is not streamed is never cancelled by the server itself, so this is what closes
    the upstream.
    """
    when_gone = scope.get("extensions", {}).get(WHEN_GONE)
    task = asyncio.current_task()
    if when_gone is None or task is None:
        await work
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


PEEK = 0.025
MAX_WHOLE = 8 * 1024 * 1024
EVENT_STREAM = b"text/event-stream"
CACHE_CONTROL = b"cache-control"
ACCEL_BUFFERING = b"x-accel-buffering"
MAX_CAPTURED = 256 * 1024
MAX_CHOICES = 16
MAX_LISTENED = 4 * 1024 * 1024
LAST_EVENT = re.compile(
    rb"^(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed)))",
    re.MULTILINE,
)
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
READ_OUT = 0.25
"""Seconds that a connection stays after a cut: Bun's fetch and aiohttp drop what they have not yet
delivered.
"""
IN_THE_MIDDLE = "The upstream ended its answer in the middle."


class StreamCut(Exception): ...


def is_stream(answer: Answer) -> bool:
    return dict(answer.headers).get(b"content-type", b"").startswith(EVENT_STREAM)


def unbuffered(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of a stream, which tell proxies in front of Weir not to buffer it.

    The upstream's own are kept: nginx reads ``X-Accel-Buffering``, and a compressor waits for more
    data.
    """
    found = [header for header in headers if header[0] != CACHE_CONTROL]
    said = [value for name, value in headers if name == CACHE_CONTROL and value]
    if b"no-transform" not in b",".join(said).lower():
        said.append(b"no-transform")
    found.append((CACHE_CONTROL, b", ".join(said)))
    if not any(name == ACCEL_BUFFERING for name, _ in headers):
        found.append((ACCEL_BUFFERING, b"no"))
    return found


def is_readable(answer: Answer) -> bool:
    return all(
        v.strip().lower() == b"identity" for n, v in answer.headers if n == b"content-encoding"
    )


class Opening(msgspec.Struct):
    held: list[bytes] = msgspec.field(default_factory=list)
    tap: StreamTap = msgspec.field(default_factory=StreamTap)
    error: bytes | None = None
    pending: "asyncio.Future[bytes] | None" = None
    ended: bool = False


class UpstreamResponse(msgspec.Struct):
    """An answer that is to be relayed: as a whole (``body``), or as a stream of which a beginning
    was read.

    ``rewritten`` says that ``body`` is not what the upstream has sent.
    """

    answer: Answer
    body: bytes | None = None
    seen: Tap | None = None
    chunks: AsyncGenerator[bytes, None] | None = None
    opening: Opening | None = None
    rewritten: bool = False


async def open_stream(
    chunks: AsyncGenerator[bytes, None],
    *,
    codec: Codec = CHAT,
    begun: Callable[[], None] | None = None,
) -> Opening:
    """Read until the stream has content, has failed, or has shown neither for a moment.

    ``begun`` is called when its first piece has come.
    """
    opening = Opening(tap=StreamTap(codec=codec))
    tap = opening.tap
    loop = asyncio.get_running_loop()
    deadline: float | None = None
    while True:
        wait = None if deadline is None or tap.in_event else max(0.0, deadline - loop.time())
        try:
            if wait is None:
                chunk = await anext(chunks)
            else:
                pending = asyncio.ensure_future(anext(chunks))
                await asyncio.wait({pending}, timeout=wait)
                if not pending.done():
                    opening.pending = pending
                    return opening
                chunk = pending.result()
        except StopAsyncIteration:
            tap.end()
            opening.ended = True
            opening.error = tap.seen.error or _unframed(opening.held, tap)
            return opening
        if begun is not None and not opening.held:
            begun()
        opening.held.append(chunk)
        tap.feed(chunk)
        if tap.seen.error is not None and not tap.seen.said:
            opening.error = tap.seen.error
        may_be_full = (
            is_cut_short(tap.seen.finish_reasons) and tap.seen.usage is None and not tap.seen.done
        )
        if opening.error is not None or tap.seen.said or (tap.seen.finished and not may_be_full):
            return opening
        deadline = deadline or loop.time() + PEEK


def _unframed(held: Sequence[bytes], tap: StreamTap) -> bytes | None:
    """A JSON body in a stream's place: gateways send a backend's error so (Lemonade before August
    2026).
    """
    body = b"".join(held).strip()
    return body if not tap.events and body.startswith(b"{") else None


async def relay_stream(
    send: Send,
    *,
    status: int,
    headers: Headers,
    opening: Opening | None,
    chunks: AsyncGenerator[bytes, None],
    pour: Callable[[Callable[[bytes], bytes]], Awaitable[bool]] | None = None,
    explain: Callable[[Exception], ProxyError] | None = None,
    begun: Callable[[], None] | None = None,
    tap: StreamTap | None = None,
) -> None:
    """Send a stream on, past a ``tap``. Raises Cut if it broke off, or ended in the middle.

    ``explain`` gives the event that the client then receives. Without it nothing is added to the
    stream, which may be anything, or have an encoding. ``begun`` is called when the first piece has
    come. ``pour`` sends on what follows the opening past ``send``, and returns as
    :meth:`HTTPAnswer.pour`.
    """
    lines = Lines()
    await send_start(send, status=status, headers=headers)

    def seen(chunk: bytes) -> bytes:
        nonlocal begun
        if begun is not None:
            begun()
            begun = None
        if tap is not None:
            tap.feed(chunk)
        return chunk if explain is None else lines.whole(chunk)

    try:
        with contextlib.nullcontext() if explain is None or tap is None else to_its_end(tap):
            for chunk in () if opening is None else opening.held:
                await send_more(send, seen(chunk))
            if opening is not None and opening.pending is not None:
                with contextlib.suppress(StopAsyncIteration):
                    await send_more(send, seen(await opening.pending))
            if pour is None:
                async for chunk in chunks:
                    await send_more(send, seen(chunk))
            else:
                while not await pour(seen):
                    await send_more(send, b"")  # which waits for the client
        await send_more(send, lines.rest)
    except (StreamBroken, UpstreamTimeout) as error:
        if explain is not None and tap is not None:
            await send_more(send, tap.codec.error_event(explain(error), tap.seen.id))
        raise StreamCut(str(error)) from error
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def to_its_end(tap: StreamTap) -> Iterator[None]:
    """Around the reading of a stream: raises if that ends before its answer. A break after the last
    event is none.
    """
    broken: Exception | None = None
    try:
        yield
    except (StreamBroken, UpstreamTimeout) as error:
        broken = error
    tap.end()
    ended = (
        tap.complete
        if broken is None
        else tap.seen.done or (tap.codec.ends_with_reason and tap.seen.finished)
    )
    if not ended:
        raise broken or StreamBroken(IN_THE_MIDDLE)


async def relay_whole(
    send: Send, answer: Answer, *, status: int, headers: Headers, body: bytes
) -> None:
    """Send an answer on whose first ``body`` bytes were read."""
    await send_start(send, status=status, headers=headers)
    if answer.ended:
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    await send_more(send, body)
    try:
        async for chunk in answer.chunks():
            await send_more(send, chunk)
    except (StreamBroken, UpstreamTimeout) as error:
        raise StreamCut(str(error)) from error
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_start(send: Send, *, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def send_more(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def capture_stream(
    chunks: AsyncGenerator[bytes, None], span: Span, *, codec: Codec = CHAT
) -> AsyncGenerator[bytes, None]:
    held = bytearray()
    try:
        async with aclosing(chunks) as going:
            async for chunk in going:
                if len(held) < MAX_CAPTURED:
                    held += chunk
                yield chunk
    finally:
        span.choices(choices_of(bytes(held), codec))


class Listener(msgspec.Struct):
    """Sends an answer on and keeps what went to the client of it, at most 4 MiB.

    ``ended`` is waited for before the client gets the piece by which it knows that the answer is
    whole, ``begun`` is called with the first events of a stream before the client has them.
    """

    send: Callable[[MutableMapping[str, Any]], Awaitable[None]]
    ended: Callable[[], Awaitable[None]] | None = None
    begun: Callable[[bytes], None] | None = None
    held: bytearray = msgspec.field(default_factory=bytearray)
    codec: Codec = CHAT
    ending: bool = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if len(self.held) < MAX_LISTENED:
            self.held += message.get("body", b"")
        if self.begun is not None and any(end in self.held for end in EVENT_ENDS):
            begun = self.begun
            self.begun = None
            begun(bytes(self.held))
        if (
            self.ended is not None
            and message["type"] == "http.response.body"
            and self._ends_with(message)
        ):
            ended = self.ended
            self.ended = None
            await ended()
        await self.send(message)

    def _ends_with(self, message: MutableMapping[str, Any]) -> bool:
        body: bytes = message.get("body", b"")
        self.ending = self.ending or LAST_EVENT.search(body) is not None
        if not message.get("more_body") or (self.ending and self.held.endswith(EVENT_ENDS)):
            return True
        return (
            body.rstrip().endswith(b"}")
            and self.held.lstrip().startswith(b"{")
            and bool(self.messages())
        )

    def messages(self) -> list[dict[str, Any]]:
        given = messages_in(bytes(self.held), self.codec)
        return [
            {name: m[name] for name in ("role", "content", "tool_calls") if name in m}
            for m in given
        ]


def messages_in(body: bytes, codec: Codec) -> list[dict[str, Any]]:
    """The messages of an answer, whole, or as much of a stream as has come, one per choice."""
    found = _choices_in(body, codec) if body.lstrip().startswith(b"{") else choices_of(body, codec)
    return [choice["message"] for choice in found if isinstance(choice.get("message"), dict)]


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """The model's output in a message: text, reasoning, and the names and arguments of calls."""
    for name, value in message.items():
        if isinstance(value, str) and name != "role":
            yield value
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        given = call.get("function") if isinstance(call, dict) else None
        if isinstance(given, dict):
            yield from (value for value in given.values() if isinstance(value, str))


def _choices_in(body: bytes, codec: Codec) -> list[dict[str, Any]]:
    value = codec.completion(read_value(body))
    given = value.get("choices") if isinstance(value, dict) else None
    return (
        [c for c in given if isinstance(c, dict)][:MAX_CHOICES] if isinstance(given, list) else []
    )


def choices_of(stream: bytes, codec: Codec = CHAT) -> list[dict[str, Any]]:
    choices: dict[int, _Choice] = {}
    for event in Decoder().feed(stream):
        if event.data == DONE:
            continue
        value = codec.chunk(read_value(event.data))
        given = value.get("choices") if isinstance(value, dict) else None
        for choice in given if isinstance(given, list) else ():
            index = choice.get("index", 0) if isinstance(choice, dict) else None
            if isinstance(index, int) and (index in choices or len(choices) < MAX_CHOICES):
                choices.setdefault(index, _Choice()).add(choice)
    return [choices[index].whole() for index in sorted(choices)]


_NO_TEXT = frozenset({"role", "begun"})


class _Choice(msgspec.Struct):
    """A choice as far as a stream has sent it; its calls by the numbers that they are sent under.

    Those of Responses and Messages count texts and thoughts too, so they have gaps.
    """

    texts: dict[str, str] = msgspec.field(default_factory=dict)
    calls: dict[int, dict[str, Any]] = msgspec.field(default_factory=dict)
    finish: Any = None

    def add(self, choice: Mapping[str, Any]) -> None:
        self.finish = choice.get("finish_reason") or self.finish
        delta = choice.get("delta")
        for name, value in delta.items() if isinstance(delta, dict) else ():
            if name == "tool_calls" and isinstance(value, list):
                for part in value:
                    self._add_call(part)
            elif isinstance(value, str) and name not in _NO_TEXT:
                self.texts[name] = self.texts.get(name, "") + value

    def _add_call(self, part: object) -> None:
        number = part.get("index", len(self.calls)) if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(number, int):
            return
        given = part.get("function")
        said = (
            {k: v for k, v in given.items() if isinstance(v, str)}
            if isinstance(given, dict)
            else {}
        )
        if number not in self.calls and "name" not in said and "id" not in part:
            return  # arguments of a call that never began
        call = self.calls.setdefault(number, {"function": {"name": "", "arguments": ""}})
        if isinstance(part.get("id"), str):
            call["id"] = part["id"]
        for name in ("name", "arguments"):
            call["function"][name] += said.get(name, "")

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", **self.texts}
        if self.calls:
            message["tool_calls"] = list(self.calls.values())
        return {"message": message} | ({"finish_reason": self.finish} if self.finish else {})
