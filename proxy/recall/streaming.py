"""The rounds inside one stream: the client sees one answer that goes on.

Nothing is sent while all that an upstream has said is a call of the recall tool: until then its next
answer may still be an error with a status of its own. After ``PATIENCE`` seconds the stream is opened all the same,
and comments keep it alive.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from proxy.errors import ProxyError, UpstreamTimeout, UpstreamUnreachable
from proxy.recall.chat import Filter
from proxy.recall.elements import ListView
from proxy.recall.rounds import AskAgain, Ended, Rounds, next_answer
from proxy.recall.tool import decoded
from proxy.stream import Headers, Send, StreamCut, UpstreamResponse, end_of, send_more, send_start
from proxy.tap import StreamTap, Tap
from proxy.upstream.client import StreamBroken

PATIENCE = 10.0
KEEP_ALIVE = b": keep-alive\n\n"

T = TypeVar("T")


@dataclass(slots=True)
class Gate:
    send: Send
    headers: Callable[[UpstreamResponse], Headers]
    received: UpstreamResponse
    tap: StreamTap
    is_open: bool = False
    _held: bytearray = field(default_factory=bytearray)

    async def write(self, data: bytes) -> None:
        if not data:
            return
        if self.is_open:
            self.tap.feed(data)
            await send_more(self.send, data)
        else:
            self._held += data

    async def open(self) -> None:
        if not self.is_open:
            self.is_open = True
            answer = self.received.answer
            await send_start(self.send, status=answer.status, headers=self.headers(self.received))
            held, self._held = bytes(self._held), bytearray()
            await self.write(held)

    async def keep_alive(self) -> None:
        await self.open()
        await send_more(self.send, KEEP_ALIVE)

    async def close(self) -> None:
        await self.open()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


async def patiently(work: Coroutine[Any, Any, T], waiting: Callable[[], Awaitable[None]], *, every: float) -> T:
    task = asyncio.ensure_future(work)
    try:
        while True:
            await asyncio.wait({task}, timeout=every)
            if task.done():
                return task.result()
            await waiting()
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


@dataclass(slots=True, kw_only=True)
class Relaying:
    """The relay of one streamed answer with its rounds.

    Attributes:
        headers: the client's response headers for an upstream's answer.
        explain: what a client is told whose stream broke off.
        ended: told what each round that is followed by another one has said of itself.
        whole: waited for before the client gets the piece by which it knows that the answer is whole.
        patience: seconds before a client that waits is told so.
    """

    rounds: Rounds
    ask: AskAgain
    send: Send
    headers: Callable[[UpstreamResponse], Headers]
    explain: Callable[[Exception], ProxyError]
    ended: Ended
    whole: Callable[[], Awaitable[None]]
    patience: float = PATIENCE

    async def run(self, received: UpstreamResponse) -> Tap | UpstreamResponse:
        """What the client saw, or an answer that is to be relayed instead, nothing having been sent.

        Raises Cut if the stream broke off, ProxyError if the upstream could not be asked again and nothing was sent.
        """
        surface = self.rounds.surface
        gate = Gate(self.send, self.headers, received, StreamTap(codec=surface.codec))
        earlier: Any = None
        while True:
            view = surface.view(self.rounds.offer.name, earlier, may_recall=self.rounds.may_go_on)
            seen = await self._round(gate, view, received)
            turn = view.turn() if view.recalling and seen.error is None else None
            if turn is None:
                break
            earlier = view.leaves()
            self.ended(received, seen)
            gate.received = received = await self._next(gate, next_answer(self.rounds, turn, self.ask), earlier)
            if received.chunks is None:
                if not gate.is_open:
                    return received
                received.answer.close()
                await self._fail(gate, self._refusal(received, earlier))
        await gate.close()
        return gate.tap.seen

    async def _round(self, gate: Gate, view: Filter | ListView, received: UpstreamResponse) -> Tap:
        tap = StreamTap(codec=self.rounds.surface.codec)
        try:
            async with aclosing(_chunks(received)) as chunks:
                async for chunk in chunks:
                    if chunk is not None:
                        tap.feed(chunk)
                        await self._show(gate, view, view.feed(chunk))
                    if view.visible or (chunk is None and not view.recalling):
                        await gate.open()
            end_of(tap)
            await self._show(gate, view, view.end())
            if not view.recalling:
                await gate.open()
        except (StreamBroken, UpstreamTimeout) as error:
            if not gate.is_open:
                raise self.explain(error) from error
            await self._fail(gate, self._broken(self.explain(error), view.leaves()), error)
        finally:
            received.answer.close()
        return tap.seen

    async def _show(self, gate: Gate, view: Filter | ListView, data: bytes) -> None:
        unseen = self.rounds.unseen
        if isinstance(view, ListView) and view.complete and unseen is not None and not unseen.whole:
            self.rounds.finish()
            unseen.end(view.shown, view.turn())
            await self.whole()
        await gate.write(data)

    async def _next(self, gate: Gate, asking: Coroutine[Any, Any, UpstreamResponse], earlier: Any) -> UpstreamResponse:
        try:
            return await patiently(asking, gate.keep_alive, every=self.patience)
        except (ProxyError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the client has gone; else it was the question alone that was cancelled: the process ends
            told = self.explain(StreamBroken("cancelled")) if isinstance(error, asyncio.CancelledError) else error
            if gate.is_open:
                await self._fail(gate, self._broken(told, earlier), error)
            raise told from error

    async def _fail(self, gate: Gate, event: bytes, cause: BaseException | None = None) -> NoReturn:
        await gate.write(event)
        raise StreamCut("the answer broke off between two rounds") from cause

    def _broken(self, error: ProxyError, earlier: Any) -> bytes:
        return self.rounds.surface.broken(error, earlier)

    def _refusal(self, received: UpstreamResponse, earlier: Any) -> bytes:
        said = decoded(received.body or b"")
        if said is not None and said.get("error"):
            return self.rounds.surface.refused(said, earlier)
        error = UpstreamUnreachable(f"The upstream answered {received.answer.status} inside this answer.")
        return self._broken(error, earlier)


async def _chunks(received: UpstreamResponse) -> AsyncGenerator[bytes | None, None]:
    opening, chunks = received.opening, received.chunks
    assert chunks is not None  # noqa: S101 - the caller looked
    async with aclosing(chunks) as rest:
        for chunk in opening.held if opening is not None else ():
            yield chunk
        yield None
        if opening is not None and opening.pending is not None:
            with contextlib.suppress(StopAsyncIteration):
                yield await opening.pending
        async for chunk in rest:
            yield chunk
