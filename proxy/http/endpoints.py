"""What is asked for outside the management API: ``/v1``, Azure's spelling of it, and the probes.

Chat completions are an exchange. ``GET /v1/models`` has the models of all upstreams that a key may
use, in OpenAI's shape; one upstream that speaks OpenAI's protocol is simply relayed to a key that
may use everything. Every other ``/v1/*``, of any method, is relayed untouched, streaming both ways.

``/healthz``: the process is alive. ``/readyz``: store and at least one upstream reachable.
``/metrics``.
"""

import asyncio
import contextlib
import json
import logging
import re
import secrets
import ssl
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    MutableMapping,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from urllib.parse import unquote, urlsplit

from cachetools import TTLCache
from starlette.requests import Request
from starlette.responses import Response

from proxy.access.admission import Stay, admitted, without_grants
from proxy.access.budgets import BYTES_A_TOKEN, BudgetUse
from proxy.access.destination import (
    MODELS_PATH,
    Caller,
    Destination,
    Route,
    admit,
    by_weir,
    for_models,
    for_relay,
    is_decided_by_model,
    is_form,
    route_of,
    rule_for,
    unread,
    upstream_for,
)
from proxy.access.provider_ids import MAX_ANSWER, ids_in, is_judged, is_list
from proxy.config.values import Config, UpstreamSettings
from proxy.conversation.thread import name_from
from proxy.errors import (
    Busy,
    LoopDetected,
    NotFound,
    ProxyError,
    RequestTooLarge,
    UpstreamUnreachable,
)
from proxy.exchange.record import CLIENT_CLOSED
from proxy.exchange.tell import NO_POLICY, record_relayed
from proxy.http.request import Counted, as_error, as_json
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
from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import CHAT
from proxy.wire.raw import read_value, split_object

log = logging.getLogger("weir")

MAX_HELD = 1024 * 1024
MAX_READ = 64 * 1024
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
    stay: Stay | None = None
    budget: BudgetUse | None = None
    reserved: bool = False
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
            self.error, self.status, refused = error.code, error.status, error.status
            codec = MESSAGES if self.route.path.startswith("/messages/") else CHAT
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
            self.scope, runtime.keyring, runtime.guesses, runtime.config
        )
        admit(caller, route)
        if self.scope["method"] == "DELETE" and (answer := _ANSWER.fullmatch(route.path)):
            await runtime.answers.forget(caller.tenant, unquote(answer[1]))
        with runtime.admission.enter(caller) as stay:
            self.stay = stay
            if runtime.admission.shared is not None:
                await runtime.admission.share_limits(stay, caller)
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
            # what nobody has to read here goes on as it came
            take = read_plain if decides or judged else _read_as_it_came
            read, self.headers = await take(
                self.receive, headers, limit=config.limits.body, hold=stay.hold
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
            await self._reserve(caller, len(body or b""))
            await while_connected(self.scope, self._forward(destination, body))

    async def _reserve(self, caller: Caller, size: int) -> None:
        """Reserve what a request with a body of so many bytes may take.

        Raises BudgetExceeded or RateLimited where there is not enough left.
        """
        if not caller.is_counted or self.scope["method"] != "POST" or self.stay is None:
            return
        runtime = self.runtime
        self.reserved = True
        names_model = self.route.kind == "model" and not is_form(self.headers)
        tokens = size // BYTES_A_TOKEN if names_model else 0
        await runtime.admission.take_tokens(self.stay, caller, tokens)
        if not caller.has_budget:
            return
        self.budget, refusal = await runtime.budgets.reserve(
            caller, self.id, tokens=tokens, dollars=0.0
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
        is_file = route.path.rstrip("/").endswith(CONTENT)  # whatever its owner has written there
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
            return _told_whole(answer.chunks(), remember)
        return _told_by_events(answer.chunks(), remember) if is_stream(answer) else answer.chunks()

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

    def _settle(self) -> None:
        metrics = self.runtime.telemetry.metrics
        outcome = self.error or "relayed"
        metrics.requests.labels(outcome, NO_POLICY).inc()
        if self.caller is None:
            return
        if self.reserved:
            self.runtime.budgets.ended(self.id)
        usage = self.reported.usage if self.reported is not None else None
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


async def _told_whole(
    chunks: AsyncGenerator[bytes, None], remember: Callable[[Iterable[str]], None]
) -> AsyncGenerator[bytes, None]:
    """A JSON answer, the last piece of which waits until it is known whose all of it is."""
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


async def _told_by_events(
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


async def _parts(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    size = 0
    more = True
    while more:
        part, more = await read_part(receive, size, limit=limit)
        size += len(part)
        if part:
            yield part


PATIENCE = 5.0
MAX_BODY = 4 * 1024 * 1024
PATTERN = frozenset("*?[")
NOT_ASKED_WITH = frozenset({b"accept-encoding", b"content-type", b"if-none-match", b"range"})
VERSION = (b"anthropic-version", b"2023-06-01")
"""Anthropic answers nobody who does not say it."""

Entry = dict[str, Any]


async def answer_models(
    runtime: Runtime, scope: MutableMapping[str, Any], receive: Receive, send: Send, route: Route
) -> None:
    headers = scope["headers"]
    try:
        caller = admitted(scope, runtime.keyring, runtime.guesses, runtime.config)
        looped = came_through(headers, runtime.instance)
        body = None if looped else await _own(runtime, caller, headers, route)
    except ProxyError as error:
        runtime.telemetry.metrics.requests.labels(error.code, NO_POLICY).inc()
        await as_error(error)(scope, receive, send)
        return
    if body is None:
        await relay_untouched(runtime, scope, receive, send, route)
        return
    await as_json(body)(scope, receive, send)
    about = LOG_CONTEXT.get()
    request = about.request if about is not None else ""
    runtime.telemetry.metrics.requests.labels("relayed", NO_POLICY).inc()
    record_relayed(
        runtime, caller, request=request, model="", status=200, outcome="relayed", usage=None
    )


async def _own(runtime: Runtime, caller: Caller, headers: Headers, route: Route) -> Entry | None:
    config = runtime.config
    upstreams = tuple(config.upstreams.values())
    if route.model:
        upstream = for_models(config, caller, route).upstream
        if upstream.kind == "openai":
            return None
        if rule_for(config.models, route.model) is None:
            raise NotFound(f"The model {route.model[:200]!r} is not known here.", param="model")
        return _entry(upstream, route.model)
    if len(upstreams) == 1 and upstreams[0].kind == "openai" and not caller.is_restricted:
        return None
    lists = await asyncio.gather(
        *(_models_of(runtime, each, caller, headers) for each in upstreams)
    )
    found: dict[str, Entry] = {}
    for upstream, entries in zip(upstreams, lists, strict=True):
        for entry in entries:
            name = entry["id"]
            if (
                name not in found
                and caller.allows(name)
                and upstream_for(config, name).name == upstream.name
            ):
                found[name] = entry
    return {"object": "list", "data": list(found.values())}


async def _models_of(
    runtime: Runtime, upstream: UpstreamSettings, caller: Caller, headers: Headers
) -> list[Entry]:
    listed: list[Entry] = []
    config = runtime.config
    # A client's own key is for the upstream that its requests go to, and nobody else sees it.
    if upstream.kind == "openai" and (
        not upstream.passes_key or upstream is next(iter(config.upstreams.values()))
    ):
        with contextlib.suppress(
            TimeoutError, ProxyError, StreamBroken, ValueError, RecursionError
        ):
            async with asyncio.timeout(PATIENCE):
                listed = await _asked(runtime, upstream, caller, headers)
    known = {entry["id"] for entry in listed}
    return listed + [_entry(upstream, name) for name in _named(config, caller) if name not in known]


async def _asked(
    runtime: Runtime, upstream: UpstreamSettings, caller: Caller, headers: Headers
) -> list[Entry]:
    sent = [(name, value) for name, value in headers if name not in NOT_ASKED_WITH]
    if upstream.credential == "x-api-key" and not any(name == VERSION[0] for name, _ in sent):
        sent.append(VERSION)
    destination = by_weir(upstream, caller, path=MODELS_PATH, model="")
    answer = await runtime.upstreams.send(destination, method="GET", headers=sent, body=None)
    try:
        body = await answer.read(MAX_BODY)
    finally:
        answer.close()
    value = json.loads(body) if answer.status == 200 else None
    data = value.get("data") if isinstance(value, dict) else None
    entries = [
        each for each in data or () if isinstance(each, dict) and isinstance(each.get("id"), str)
    ]
    return [{**_entry(upstream, each["id"]), **each} for each in entries]


def _named(config: Config, caller: Caller) -> Iterable[str]:
    stated = (*(rule.match for rule in config.models), *caller.models)
    return (name for name in dict.fromkeys(stated) if PATTERN.isdisjoint(name))


def _entry(upstream: UpstreamSettings, name: str) -> Entry:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": upstream.provider or upstream.name,
    }


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Api:
    """``managed`` answers what is managed or counted, under whatever name it is asked for."""

    def __init__(self, runtime: Runtime, managed: Callable[..., Awaitable[None]]) -> None:
        self._runtime = runtime
        self._managed = managed

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        runtime = self._runtime
        method = scope["method"]
        route = route_of(method, scope["path"])
        if route is None:
            raise NotFound(f"There is nothing at {scope['path'][:200]}: the API is under /v1.")
        if route.kind in ("managed", "counted"):
            await self._managed(runtime, scope, receive, send, route)
            return
        answers = answer_models if route.kind == "models" else relay_untouched
        answer = partial(answers, runtime, route=route)
        await Counted(answer, metrics=runtime.telemetry.metrics, route=OTHER_ROUTE)(
            scope, receive, send
        )


GOOD_FOR = 5.0
MAX_UPSTREAMS = 1_000
PROBE_PATIENCE = 2.0


class Probes:
    """Whether the process is alive, whether it is ready, and its metrics."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reachable: TTLCache[str, bool] = TTLCache(MAX_UPSTREAMS, GOOD_FOR)
        self._heard: set[str] = set()
        self._asking: dict[str, asyncio.Task[bool]] = {}

    async def healthz(self, _: Request) -> Response:
        return as_json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        accept = ",".join(request.headers.getlist("accept"))
        page, kind = await asyncio.to_thread(self._runtime.telemetry.metrics.render, accept)
        return Response(page, headers={"content-type": kind})

    async def readyz(self, request: Request) -> Response:
        draining = request.state.shutdown.draining.is_set()
        store = await self._store()
        upstreams = await asyncio.gather(
            *(self._upstream(u) for u in self._runtime.config.upstreams.values())
        )
        names = self._runtime.config.upstreams
        ready = not draining and store == "ok" and any(upstreams)
        state = {
            "status": "ready" if ready else "draining" if draining else "not ready",
            "store": store,
            "upstreams": {
                n: "ok" if up else "unreachable" for n, up in zip(names, upstreams, strict=True)
            },
        }
        return as_json(state, status=200 if ready else 503)

    async def _store(self) -> str:
        try:
            await self._runtime.store.ping()
        except StoreError as error:
            return f"unavailable: {type(error).__name__}"
        return "failing" if self._runtime.settler.failing else "ok"

    async def _upstream(self, upstream: UpstreamSettings) -> bool:
        base = upstream.address
        if not base:
            return True
        known = self._reachable.get(base)
        if known is not None:
            return known
        asking = self._asking.get(base)
        # whoever asks meanwhile waits for the same answer: no key is needed to ask
        if asking is None:
            asking = self._asking[base] = asyncio.create_task(self._probe(base))
            asking.add_done_callback(lambda _: self._asking.pop(base, None))
        return await asyncio.shield(asking)

    async def _probe(self, base: str) -> bool:
        answers = await _answers(base)
        if answers:
            self._heard.add(base)
        up = answers or (answers is False and base not in self._heard)
        self._reachable[base] = up
        return up


async def connects(base: str) -> bool:
    return await _answers(base) is not None


async def _answers(base: str) -> bool | None:
    """Whether an upstream answers anything at all, None where nobody listens.

    One that is frozen still has its connections accepted for it; one that never answered such a
    question may only know no better.
    """
    parts = urlsplit(base)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    told = None
    try:
        async with asyncio.timeout(PROBE_PATIENCE):
            reader, writer = await asyncio.open_connection(
                parts.hostname, port, ssl=_handshake() if secure else None
            )
            told = secure
            try:
                host = parts.netloc.rpartition("@")[2]
                asked = (
                    f"HEAD {parts.path or '/'} HTTP/1.1\r\nHost: {host}\r\nConnection:"
                    " close\r\n\r\n"
                )
                if not secure:
                    writer.write(asked.encode())
                    told = bool(await reader.read(1))
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        pass
    return told


@cache
def _handshake() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
