"""Requests that are relayed untouched, of any method, streaming both ways."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

from proxy.access.admission import Slot, admitted, without_grants
from proxy.access.budgets import BYTES_A_TOKEN, BudgetUse
from proxy.access.destination import (
    Caller,
    Destination,
    Route,
    admit,
    for_models,
    for_relay,
    is_decided_by_model,
    is_form,
    unread,
    upstream_for,
)
from proxy.access.provider_ids import MAX_ANSWER, ids_in, is_judged, is_list
from proxy.conversation.thread import name_from
from proxy.errors import Busy, LoopDetected, ProxyError, RequestTooLarge, UpstreamUnreachable
from proxy.exchange.exchange import CLIENT_CLOSED
from proxy.exchange.reserve import MAX_CHOICES
from proxy.exchange.sinks import NO_POLICY, record_relayed
from proxy.http.request import as_error
from proxy.runtime import Runtime
from proxy.store.records import StoreError
from proxy.stream import (
    NOT_RELAYED,
    READ_OUT,
    ClientGone,
    Headers,
    Hold,
    Receive,
    Send,
    StreamCut,
    declared_length,
    is_stream,
    read_held,
    read_part,
    read_plain,
    relay_stream,
    unbuffered,
    while_connected,
)
from proxy.tap import Reported, ReportedUsage, Tap, read_completion
from proxy.telemetry.logs import LOG_CONTEXT
from proxy.telemetry.metrics import ModelCall
from proxy.telemetry.names import OPERATIONS, service_at
from proxy.telemetry.trace import CONTEXT_HEADERS, NULL_SPAN, ExchangeTrace, Span
from proxy.upstream.client import came_through
from proxy.upstream.connection import Answer, StreamBroken
from proxy.wire import CODECS
from proxy.wire.codec import CHAT
from proxy.wire.raw import read_value, split_object

log = logging.getLogger("weir")

MAX_HELD = 1024 * 1024
MAX_READ = 64 * 1024
MAX_ANSWER_LEN = 10_000_000
"""Tokens; what names more is refused by any model."""
NOTHING = frozenset[bytes]()
READ_HERE = frozenset({b"accept-encoding"})
VIDEOS = "/videos"
CONTENT = "/content"
ROUTES = frozenset({*OPERATIONS, "/v1/models", "/v1/files", "/v1/batches", "/v1/moderations"})
OTHER_ROUTE = "/v1/{rest}"
RELAYED = (b"x-weir-actions", b"relayed")
DEGRADED = (b"x-weir-actions", b"relayed,degraded=budget")
_ANSWER = re.compile(r"/+responses/+([^/]+)/*")


@dataclass(slots=True)
class RelayedRequest:
    """One request that is relayed; ``run`` is the whole of it. What is None is not known yet."""

    runtime: Runtime
    scope: MutableMapping[str, Any]
    receive: Receive
    send: Send
    route: Route
    id: str
    trace: ExchangeTrace
    started: float
    caller: Caller | None = None
    destination: Destination | None = None
    status: int | None = None
    error: str | None = None
    reported: Reported | None = None
    headers: Headers = ()
    remembers: bool = False
    lists: bool = False
    slot: Slot | None = None
    budget: BudgetUse | None = None
    reserved: bool = False
    assumed: int = 0
    degraded: bool = False

    async def run(self) -> None:
        refused = None
        try:
            await self._relay()
        except ClientGone:
            self.error = "client_disconnect"
        except StreamCut:
            self.error = "stream_broken"
            log.warning("a relayed answer broke off before its end")
        except ProxyError as error:
            self.error = error.code
            self.status = error.status
            refused = error.status
            codec = CODECS.get(self.route.path.split("/")[1], CHAT)
            response = as_error(error, request_id=self.id, codec=codec)
            response.raw_headers += self._budget()
            await response(self.scope, self.receive, self.send)
        finally:
            self.trace.end(refused, self.error)
            self._settle()
        if self.error == "stream_broken":
            await asyncio.sleep(READ_OUT)

    async def _relay(self) -> None:
        runtime = self.runtime
        route = self.route
        headers = self.scope["headers"]
        self.headers = headers
        if came_through(headers, runtime.instance):
            raise LoopDetected(
                "This request has come through this proxy before: an upstream points back at it."
            )
        config = runtime.config
        self.caller = caller = admitted(
            self.scope, runtime.keyring, runtime.auth_throttle, runtime.config
        )
        admit(caller, route)
        if self.scope["method"] == "DELETE" and (answer := _ANSWER.fullmatch(route.path)):
            await runtime.answers.forget_answer(caller.tenant, unquote(answer[1]))
        with runtime.admission.enter(caller) as slot:
            self.slot = slot
            if runtime.admission.shared is not None:
                await runtime.admission.share_limits(slot, caller)
            length = declared_length(headers)
            has_body = bool(length) or any(name == b"transfer-encoding" for name, _ in headers)
            decides = is_decided_by_model(config, caller, route)
            judged = is_judged(caller, upstream_for(config, ""))
            names = route.kind == "other" and judged and not is_form(headers)
            if has_body and not decides and not names and (length is None or length > MAX_HELD):
                if length is not None and length > config.limits.body:
                    raise RequestTooLarge.of_body(config.limits.body)
                self.destination = unread(config, caller, route)
                await self._judge(self.destination, None)
                await self._reserve(caller, length or 0)
                await self._forward(
                    self.destination, _parts(self.receive, config.limits.body), length
                )
                return
            # what need not be read here is forwarded unread
            take = read_plain if decides or judged else _read_as_it_came
            read, self.headers = await take(
                self.receive, headers, limit=config.limits.body, hold=slot.hold
            )
            headers = self.headers
            body = read if has_body else None
            if route.kind == "models":
                destination = for_models(config, caller, route)
            elif decides:
                query = self.scope.get("query_string", b"")
                destination, body = for_relay(config, caller, route, headers, body, query=query)
            else:
                looks = has_body and (route.kind == "model" or self.trace.recorded)
                destination = unread(config, caller, route, model=_model_in(read) if looks else "")
            self.destination = destination
            await self._judge(destination, body)
            await self._reserve(caller, len(body or b""), body or b"")
            await while_connected(self.scope, self._forward(destination, body))

    async def _reserve(self, caller: Caller, size: int, body: bytes = b"") -> None:
        """Reserve what a request with a body of so many bytes may take, and its answer where the
        body was read and names its length.

        Raises BudgetExceeded or RateLimited where there is not enough left.
        """
        if not caller.is_counted or self.scope["method"] != "POST" or self.slot is None:
            return
        runtime = self.runtime
        self.reserved = True
        names_model = self.route.kind == "model" and not is_form(self.headers)
        self.assumed = tokens = size // BYTES_A_TOKEN if names_model else 0
        answer = _answer_length(body) if names_model else 0
        await runtime.admission.take_tokens(self.slot, caller, tokens + answer)
        if not caller.has_budget:
            return
        model = "" if self.destination is None else self.destination.model
        took = ReportedUsage(prompt=tokens, completion=answer)
        dollars = runtime.registry.list_price(model, took)
        self.budget, refusal = await runtime.budgets.reserve(
            caller, self.id, tokens=tokens + answer, dollars=dollars or 0.0
        )
        if refusal is not None:
            raise refusal
        if self.budget is None:
            self.degraded = True
            runtime.telemetry.metrics.degraded.labels("budget").inc()

    async def _judge(self, destination: Destination, body: bytes | None) -> None:
        """Raises NotFound for what is not the caller's, Busy, InvalidRequest."""
        caller = destination.caller
        route = self.route
        if not is_judged(caller, destination.upstream):
            return
        named = self.runtime.provider_ids.require_relayed
        query = self.scope.get("query_string", b"")
        await named(caller, route, query=query, headers=self.headers, body=body)
        is_file = route.path.rstrip("/").endswith(CONTENT)  # whose content is the owner's own
        self.remembers = route.path == VIDEOS or (route.kind == "other" and not is_file)
        self.lists = is_list(self.scope["method"], route)

    async def _forward(
        self,
        destination: Destination,
        body: "bytes | AsyncIterator[bytes] | None",
        length: int | None = None,
    ) -> None:
        trace = self.trace
        span = _span(trace, self.scope, destination)
        context = span.propagation() if destination.upstream.forward_trace else ()
        sent = self.headers
        if context:
            sent = [*(header for header in sent if header[0] not in CONTEXT_HEADERS), *context]
        try:
            answer = await self.runtime.upstreams.send(
                destination,
                method=self.scope["method"],
                query=self.scope.get("query_string", b""),
                headers=sent,
                body=body,
                length=length,
                drop=(NOTHING if destination.upstream.forward_trace else CONTEXT_HEADERS)
                | self._unpacked(),
            )
        except ProxyError as error:
            span.end_call(error_type=error.code)
            raise
        self.status = answer.status
        self.reported = Reported(answer.headers)
        span.status(answer.status)
        held = bytearray()
        failed = None
        keeps = trace.recorded and _is_plain_json(answer)
        headers = self._headers_of(answer)
        if self.lists:
            headers = [each for each in headers if each[0].lower() != b"content-length"]
        try:
            given = await self._chunks_of(answer, destination.caller)
            watched = _watched(given, held if keeps else None, self.reported)
            async with aclosing(watched) as chunks:
                await relay_stream(
                    self.send, status=answer.status, headers=headers, opening=None, chunks=chunks
                )
        except (StreamCut, asyncio.CancelledError) as error:
            failed = "stream_broken" if isinstance(error, StreamCut) else "client_disconnect"
            raise
        finally:
            answer.close()
            if trace.recorded:
                seen = read_completion(bytes(held)) if 0 < len(held) <= MAX_READ else Tap()
                span.end_call(answer.status, seen=seen, error_type=failed)
                trace.end(answer.status, failed)

    def _unpacked(self) -> frozenset[bytes]:
        return READ_HERE if self.remembers else NOTHING

    async def _chunks_of(self, answer: Answer, caller: Caller) -> AsyncGenerator[bytes, None]:
        """An answer, what it gives known as the caller's before its end; a list has nothing of
        others in it.
        """
        if not self.remembers or answer.status >= 300:
            return answer.chunks()
        if self.lists:
            return _one(await self._own_only(answer, caller))
        remember = partial(self.runtime.provider_ids.remember, caller.tenant)
        if _is_json(answer):
            return _remembered_whole(answer.chunks(), remember)
        return (
            _remembered_by_events(answer.chunks(), remember)
            if is_stream(answer)
            else answer.chunks()
        )

    async def _own_only(self, answer: Answer, caller: Caller) -> bytes:
        try:
            whole = await answer.read(MAX_ANSWER)
            return await self.runtime.provider_ids.listed(
                caller.tenant, whole if answer.ended else b""
            )
        except (StreamBroken, TypeError):
            raise UpstreamUnreachable(
                "The upstream's list cannot be read, so nothing of it is shown."
            ) from None
        except StoreError:
            raise Busy(
                "Whose it is what the upstream lists cannot be known now. Please try again."
            ) from None

    def _headers_of(self, answer: Answer) -> list[tuple[bytes, bytes]]:
        granted = without_grants(answer.headers, self.scope, self.caller, self.runtime.config)
        named = ((n.lower(), n, v) for n, v in granted)
        headers = [
            (n, v)
            for low, n, v in named
            if low not in NOT_RELAYED and not low.startswith(b"x-weir-")
        ]
        headers.append(DEGRADED if self.degraded else RELAYED)
        headers += self._budget()
        if not any(name.lower() == b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", self.id.encode()))
        return unbuffered(headers) if is_stream(answer) else headers

    def _budget(self) -> list[tuple[bytes, bytes]]:
        return [] if self.budget is None else [(b"x-weir-budget", str(self.budget).encode())]

    def _usage(self) -> ReportedUsage | None:
        """What the upstream has reported; of a stream that says nothing an estimate, where the
        request was reserved: else whoever does not ask for usage would pay nothing.
        """
        reported = self.reported
        if reported is None or reported.usage is not None or not self.reserved:
            return None if reported is None else reported.usage
        if not reported.events or (self.status or 0) >= 400:
            return None
        return ReportedUsage(prompt=self.assumed, completion=reported.events, estimated=True)

    def _settle(self) -> None:
        metrics = self.runtime.telemetry.metrics
        outcome = self.error or "relayed"
        metrics.requests.labels(outcome, NO_POLICY).inc()
        if self.caller is None:
            return
        if self.reserved:
            self.runtime.budgets.ended(self.id)
        usage = self._usage()
        destination = self.destination
        model = self.destination.model if self.destination is not None else ""
        record_relayed(
            self.runtime,
            self.caller,
            request=self.id,
            model=model,
            status=self.status or CLIENT_CLOSED,
            outcome=outcome,
            usage=usage,
            reserved=self.reserved,
        )
        operation = OPERATIONS.get(f"/v1{self.route.path}")
        if destination is not None and operation is not None:
            upstream = destination.upstream
            provider, address, port = service_at(upstream.address, upstream.name, upstream.provider)
            metrics.observe_call(
                ModelCall(
                    provider=provider,
                    model=model,
                    seconds=time.perf_counter() - self.started,
                    operation=operation,
                    address=address,
                    port=port,
                    error=self.error or (str(self.status) if (self.status or 0) >= 400 else ""),
                    usage=(
                        ReportedUsage()
                        if usage is None
                        else ReportedUsage(usage.prompt, usage.completion)
                    ),
                )
            )


async def relay_untouched(
    runtime: Runtime, scope: MutableMapping[str, Any], receive: Receive, send: Send, route: Route
) -> None:
    about = LOG_CONTEXT.get()
    request_id = about.request if about is not None else f"req_{secrets.token_hex(12)}"
    path = scope["path"]
    named = path if path in ROUTES else OTHER_ROUTE
    trace = runtime.telemetry.exchange(scope, named, path=path, request_id=request_id)
    await RelayedRequest(
        runtime, scope, receive, send, route, request_id, trace, time.perf_counter()
    ).run()


def _span(trace: ExchangeTrace, scope: MutableMapping[str, Any], destination: Destination) -> Span:
    if not trace.recorded:
        return NULL_SPAN
    named = name_from(scope["headers"], {})
    upstream = destination.upstream
    model = destination.model
    trace.identify(
        conversation=named, tenant=destination.caller.tenant, policy=NO_POLICY, model=model
    )
    operation = OPERATIONS.get(f"/v1{destination.path}") if scope["method"] == "POST" else None
    provider, address, port = service_at(upstream.address, upstream.name, upstream.provider)
    if operation is None:
        return trace.relayed(scope["method"], address, port)
    return trace.attempt(model, provider, address, port, operation=operation)


async def _read_as_it_came(
    receive: Receive, headers: Headers, *, limit: int, hold: Hold
) -> tuple[bytes, Headers]:
    return await read_held(receive, headers, limit=limit, hold=hold), headers


def _is_plain_json(answer: Answer) -> bool:
    return _is_json(answer) and b"content-encoding" not in {
        name.lower() for name, _ in answer.headers
    }


def _is_json(answer: Answer) -> bool:
    named = {name.lower(): value for name, value in answer.headers}
    return named.get(b"content-type", b"").startswith(b"application/json")


async def _one(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


async def _remembered_whole(
    chunks: AsyncGenerator[bytes, None], remember: Callable[[Iterable[str]], None]
) -> AsyncGenerator[bytes, None]:
    """A JSON answer, whose last piece waits until the owner of everything in it is known."""
    held = bytearray()
    last = b""
    async with aclosing(chunks) as going:
        async for chunk in going:
            held += chunk if len(held) < MAX_ANSWER else b""
            if last:
                yield last
            last = chunk
    remember(ids_in(bytes(held)))
    yield last


async def _remembered_by_events(
    chunks: AsyncGenerator[bytes, None], remember: Callable[[Iterable[str]], None]
) -> AsyncGenerator[bytes, None]:
    rest = b""
    async with aclosing(chunks) as going:
        async for chunk in going:
            lines, _, rest = (rest + chunk).rpartition(b"\n")
            rest = rest[-MAX_HELD:]
            remember(ids_in(lines))
            yield chunk


async def _watched(
    chunks: AsyncGenerator[bytes, None], held: bytearray | None, reported: Reported
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks) as going:
        async for chunk in going:
            reported.feed(chunk)
            if held is not None and len(held) <= MAX_READ:
                held += chunk
            yield chunk


def _model_in(body: bytes) -> str:
    try:
        fields = split_object(body)
    except ProxyError:
        return ""
    model = read_value(fields["model"]) if "model" in fields else None
    return model if isinstance(model, str) else ""


def _answer_length(body: bytes) -> int:
    """The tokens that all answers to a request may have, 0 where it does not say."""
    try:
        fields = split_object(body)
    except ProxyError:
        return 0
    said = {name: read_value(fields[name]) for name in ("max_tokens", "n") if name in fields}
    most = said.get("max_tokens", 0)
    count = said.get("n", 1)
    if type(most) is not int or not 0 < most <= MAX_ANSWER_LEN:
        return 0
    return most * (count if type(count) is int and 1 <= count <= MAX_CHOICES else 1)


async def _parts(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    size = 0
    more = True
    while more:
        part, more = await read_part(receive, size, limit=limit)
        size += len(part)
        if part:
            yield part
