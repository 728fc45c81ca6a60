"""A request that is only measured, or summed up by the provider: as it would be sent.

A client that sizes its window by the raw number compacts although the request that is sent is small. So what is
counted is the request with the known edits of its conversation, and nothing is decided, stored or asked for it.
"""

import logging
import time

from proxy.access.destination import Caller
from proxy.exchange.run import ExchangeHandler
from proxy.planning.values import Plan
from proxy.stream.relay import Send, UpstreamResponse, send_start
from proxy.wire.raw import write_value

log = logging.getLogger("weir.counting")

SUMMED_UP = frozenset({"/responses/compact"})
NO_SUCH_ROUTE = frozenset({404, 405})


class CountHandler(ExchangeHandler):
    """One request to ``/v1/messages/count_tokens``, ``/v1/responses/input_tokens`` or ``/v1/responses/compact``."""

    async def _answer(self, body: bytes, caller: Caller) -> None:
        progress = self.progress
        request = await self.read(body, caller)
        sent, tokens = request.chat.body, None
        if request.asked is not None:
            try:
                sent, tokens = await self.runtime.planner.replayed(request.asked)
            except Exception:
                log.exception("a request is counted as it came, its conversation's edits cannot be read")
        progress.plan = plan = Plan(body=sent)
        progress.ready = time.perf_counter()
        attempts, _ = self.attempts_of(request)
        received, _ = await attempts.make(sent, plan)
        if received.answer.status in NO_SUCH_ROUTE and tokens is not None and self.route.path not in SUMMED_UP:
            received.answer.close()
            await self._estimate(self.send, received, tokens)
        else:
            await self._relay(received)

    async def _estimate(self, send: Send, received: UpstreamResponse, tokens: int) -> None:
        """Say what Weir counts, for an upstream that does not."""
        self.answer, self.progress.status = received.answer, 200
        kind = {} if self.codec.name == "messages" else {"object": "response.input_tokens"}
        told = write_value({**kind, "input_tokens": tokens})
        own = [(b"content-type", b"application/json"), (b"content-length", str(len(told)).encode())]
        counted = (b"x-weir-tokens", f"~{tokens}".encode())
        await send_start(send, status=200, headers=[*own, *self.progress.own_headers(), counted])
        await send({"type": "http.response.body", "body": told, "more_body": False})
