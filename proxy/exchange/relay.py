"""The answer on its way to the client: as it comes from the upstream, or Weir's own."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from functools import partial
from typing import Any

from proxy.access.admission import without_grants
from proxy.access.destination import Headers
from proxy.access.provider_ids import ids_in, is_judged
from proxy.errors import ProxyError, ShuttingDown, UpstreamPage, UpstreamUnreachable
from proxy.exchange.exchange import Exchange, Request
from proxy.exchange.learn import learn_from_exchange
from proxy.exchange.recall import Recalling
from proxy.features.held_history import record_answer
from proxy.features.recall.rounds import Relaying, Rounds, follow_whole
from proxy.runtime import Runtime
from proxy.server import WRITE
from proxy.stream import (
    EVENT_STREAM,
    NOT_RELAYED,
    Listener,
    Send,
    UpstreamResponse,
    is_readable,
    is_stream,
    relay_stream,
    relay_whole,
    send_start,
    unbuffered,
)
from proxy.tap import StreamTap, Tap, unpacker_for
from proxy.upstream.connection import Answer, HTTPAnswer
from proxy.upstream.overflow import Verdict
from proxy.wire.codec import Codec

JSON = b"application/json"
STOPPING = "The proxy is stopping; please send the request again."


class Relay:
    """Gives one client its answer.

    Attributes:
        answer: the upstream's answer that is relayed, None before there is one.
        asking: the task that waits for its next round, None where none does.
        stopping: whether the process ends, which then is the reason given for a broken stream.
    """

    def __init__(
        self,
        runtime: Runtime,
        exchange: Exchange,
        scope: MutableMapping[str, Any],
        send: Send,
        codec: Codec,
    ) -> None:
        self.runtime = runtime
        self.exchange = exchange
        self.scope = scope
        self.send = send
        self.codec = codec
        self.answer: Answer | None = None
        self.asking: asyncio.Task[Any] | None = None
        self.stopping = False

    def stop(self) -> bool:
        """End the answer; False where there is none yet."""
        self.stopping = True
        if self.asking is not None:
            self.asking.cancel()
        elif self.answer is not None:
            self.answer.close()
        else:
            return False
        return True

    def listen(self, request: Request) -> None:
        """Have the answer read on its way, where later requests may name what is in it."""
        remember = self._remembering(request)
        if remember is not None or request.held.keeps:
            ended = partial(self._remember_whole, request, remember)
            listener = Listener(self.send, ended, remember, codec=self.codec)
            self.exchange.listener = listener
            self.send = listener

    def _remembering(self, request: Request) -> Callable[[bytes], None] | None:
        """What remembers the provider's ids in an answer; None where there are none."""
        destination = request.destination
        if not is_judged(
            destination.caller, destination.upstream
        ) or not request.client.codec.gives_ids(request.client.fields):
            return None

        def remember(held: bytes) -> None:
            if (self.exchange.status or 0) < 300:
                self.runtime.provider_ids.remember(destination.caller.tenant, ids_in(held))

        return remember

    async def _remember_whole(
        self, request: Request, remember: Callable[[bytes], None] | None
    ) -> None:
        exchange = self.exchange
        if exchange.listener is None:
            return
        body = bytes(exchange.listener.held)
        if remember is not None:
            remember(body)
        if request.held.keeps and (exchange.status or 0) < 400:
            await record_answer(
                self.runtime.answers,
                request.held,
                request.client,
                exchange.plan,
                request.destination.caller.tenant,
                body,
                at=self.runtime.planner.clock(),
            )

    async def respond(
        self, body: bytes, more: Headers = (), *, status: int = 200, kind: bytes = JSON
    ) -> None:
        """Answer with a body of Weir's own."""
        self.exchange.status = status
        headers = [
            (b"content-type", kind),
            (b"content-length", b"%d" % len(body)),
            *more,
            *self.exchange.own_headers(),
        ]
        if kind == EVENT_STREAM:
            headers = unbuffered(headers)
        await send_start(self.send, status=status, headers=headers)
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def relay(self, received: UpstreamResponse) -> None:
        """Give the client an answer as it comes. Raises StreamCut where it breaks off."""
        answer = received.answer
        exchange = self.exchange
        self.answer = answer
        if answer.status >= 400 and is_page(answer, received.body or b""):
            answer.close()
            raise UpstreamPage.of(answer.status, wait_in(answer.headers))
        exchange.status = answer.status
        headers = self._headers(answer)
        if received.rewritten:
            headers = [h for h in headers if h[0] != b"content-length"]
            headers.append((b"content-length", str(len(received.body or b"")).encode()))
        try:
            if received.body is not None:
                await relay_whole(
                    self.send,
                    answer,
                    status=answer.status,
                    headers=headers,
                    body=received.body,
                )
                exchange.seen = received.seen or Tap()
            elif received.chunks is not None:
                tap = StreamTap(codec=self.codec, unpacker=unpacker_for(answer.headers))
                exchange.seen = tap.seen  # also of a stream that breaks off
                attempts = exchange.attempts
                async with aclosing(received.chunks) as chunks:
                    await relay_stream(
                        self.send,
                        status=answer.status,
                        headers=headers,
                        opening=received.opening,
                        chunks=chunks,
                        pour=self._pouring(answer),
                        explain=self._explain if is_readable(answer) else None,
                        tap=tap,
                        begun=None if attempts is None else attempts.begin_stream,
                    )
        finally:
            answer.close()
            learn_from_exchange(self.runtime, exchange)

    async def relay_rounds(
        self, received: UpstreamResponse, rounds: Rounds, recalling: Recalling
    ) -> None:
        """Give the client an answer in which the model may call the recall tool; its calls are
        answered.
        """
        exchange = self.exchange
        self.answer = received.answer

        async def ask(body: bytes) -> tuple[UpstreamResponse, Verdict]:
            self.asking = asyncio.current_task()
            try:
                found = await recalling.attempts.make(body, exchange.plan)
            finally:
                self.asking = None
            self.answer = found[0].answer
            return found

        try:
            if received.chunks is None:
                received = await follow_whole(received, rounds, ask, recalling.note_round)
            if received.chunks is not None:
                relaying = Relaying(
                    rounds=rounds,
                    ask=ask,
                    send=self.send,
                    headers=self._stream_headers,
                    explain=self._explain,
                    ended=recalling.note_round,
                )
                exchange.seen = relaying.tap.seen
                left = await relaying.run(received)
                if left is None:
                    return
                received = left
        finally:
            rounds.finish()
            exchange.recalls = rounds.recalled
            if received.chunks is not None:
                received.answer.close()
                learn_from_exchange(self.runtime, exchange)
        await self.relay(received)

    def _stream_headers(self, received: UpstreamResponse) -> list[tuple[bytes, bytes]]:
        self.exchange.status = received.answer.status
        return self._headers(received.answer)

    def _headers(self, answer: Answer) -> list[tuple[bytes, bytes]]:
        granted = without_grants(
            answer.headers, self.scope, self.exchange.caller, self.runtime.config
        )
        kept = [
            (name, value)
            for name, value in granted
            if name not in NOT_RELAYED and not name.startswith(b"x-weir-")
        ]
        if is_stream(answer):
            kept = unbuffered(kept)
        own = self.exchange.own_headers()
        if b"x-request-id" in dict(kept):
            own = [(name, value) for name, value in own if name != b"x-request-id"]
        return kept + own

    def _pouring(
        self, answer: Answer
    ) -> Callable[[Callable[[bytes], bytes]], Awaitable[bool]] | None:
        """How an answer goes past ``send``, where only the client needs its pieces."""
        exchange = self.exchange
        write = self.scope.get("extensions", {}).get(WRITE)
        span = None if exchange.attempts is None else exchange.attempts.span
        is_kept = exchange.listener is not None or span is None or span.captures
        is_chunked = b"content-length" not in dict(answer.headers)
        if write is None or is_kept or not is_chunked or not isinstance(answer, HTTPAnswer):
            return None
        return partial(answer.pour, write)

    def _explain(self, error: Exception) -> ProxyError:
        if self.stopping:
            return ShuttingDown(STOPPING)
        return error if isinstance(error, ProxyError) else UpstreamUnreachable(str(error))


def is_page(answer: Answer, body: bytes) -> bool:
    """Whether an answer is a web page: some servers call JSON one."""
    kind = next((value for name, value in answer.headers if name == b"content-type"), b"")
    begins = body[:512].lstrip().lower()
    if kind.strip().lower().startswith((b"text/html", b"application/xhtml+xml")):
        return not begins.startswith((b"{", b"["))
    return begins.startswith((b"<!doctype html", b"<html"))


def wait_in(headers: Headers) -> int | None:
    """The whole seconds of a header ``retry-after``, None without one."""
    said = next((value.strip() for name, value in headers if name == b"retry-after"), b"")
    return int(said) if said.isdigit() and len(said) < 10 else None
