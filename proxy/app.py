"""The composition root: everything is made here and given to what needs it. Importing it starts
nothing.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router

from policies.health import RULES
from proxy.access.admission import Admission, Keyring, tenant_source
from proxy.access.budgets import RENEWED_EVERY as RESERVED_EVERY
from proxy.access.budgets import Budgets
from proxy.access.destination import MANAGED, route_of
from proxy.access.provider_ids import ProviderIds
from proxy.config.loading import WATCH_EVERY, Reload, changes, reloading
from proxy.config.values import Config, StoreSettings
from proxy.conversation.book import Conversations
from proxy.dashboard import Dashboard
from proxy.effects.summarizer import Summarizer
from proxy.errors import ContextLengthExceeded, MethodNotAllowed, NotFound, UpgradeRequired
from proxy.exchange.exchange import CLIENT_CLOSED
from proxy.exchange.run import answering
from proxy.features import (
    activity,
    audit,
    budgets,
    checkpoints,
    health_routes,
    inspect,
    notes,
    removed,
    usage,
)
from proxy.features.activity import store_growth
from proxy.features.alerts import Alerts
from proxy.features.feature import Features
from proxy.features.health import HealthBook
from proxy.features.held_history import AnswerBook
from proxy.features.mcp import McpServer
from proxy.features.plugins import Plugin, Plugins
from proxy.http import admin, conversations
from proxy.http.models import answer_models
from proxy.http.probes import Probes
from proxy.http.relay import OTHER_ROUTE, relay_untouched
from proxy.http.request import JSON, NOT_KEPT, PROBLEMS, Counted, as_error, problem_of
from proxy.http.routes import OPENAPI, PREFIX, Management
from proxy.models.facts import ModelRegistry, Probe
from proxy.models.limits import TOKENS, LearnedLimits, ModelLimitsResolver
from proxy.planning.planner import Planner
from proxy.planning.preparation import Preparation
from proxy.planning.workers import Workers, processes_for_plans
from proxy.runtime import Runtime
from proxy.store import Store, WriteBehindQueue
from proxy.store.key_use import OPEN_FOR
from proxy.store.records import DAY, KeyRow, StoreError
from proxy.stream import ClientGone, Receive, Send
from proxy.telemetry.logs import LOG_CONTEXT, RequestContext
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.process import give_back, keep_little, watch_loop
from proxy.telemetry.setup import Telemetry
from proxy.upstream.client import Client, LitellmProvider, Upstreams
from proxy.wire.counting import Tokenizer, installed_estimators
from proxy.wire.transcripts import Transcripts

log = logging.getLogger("weir")

NO_WEBSOCKET = (
    "WebSockets are not spoken here: send the request over HTTP, with stream: true for an answer in"
    " pieces."
)
KEYS_EVERY = 2.0
FOLLOWED_EVERY = 30.0
RENEWED_EVERY = OPEN_FOR / 3
SIZE_KEPT_EVERY = 3600.0
MEASURED_EVERY = 60.0
IN_USE = 600.0  # a conversation used within this many seconds is not deleted for its size


ROUTES = (
    *conversations.ROUTES,
    *admin.ROUTES,
    *activity.ROUTES,
    *audit.ROUTES,
    *budgets.ROUTES,
    *checkpoints.ROUTES,
    *health_routes.ROUTES,
    *inspect.ROUTES,
    *notes.ROUTES,
    *removed.ROUTES,
    *usage.ROUTES,
    OPENAPI,
)
"""Every route of the management API."""


def routes(runtime: Runtime) -> list[BaseRoute]:
    """Every path of Weir, as it is spelled in the request; the pages' own are in
    ``proxy.dashboard.site``.
    """
    api = Api(runtime, answering)
    probes = Probes(runtime)
    dashboard = Dashboard(runtime)
    mcp = McpServer(runtime)
    metrics = runtime.telemetry.metrics
    own = [Middleware(Counted, metrics=metrics)]
    kept_by_nobody = [Middleware(Counted, metrics=metrics, headers=NOT_KEPT)]
    return [
        Route("/v1/{rest:path}", api, methods=METHODS),
        Route("/openai/deployments/{rest:path}", api, methods=METHODS),
        Route("/healthz", probes.healthz),
        Route("/readyz", probes.readyz),
        Route("/metrics", probes.metrics),
        Route("/weir/ui", dashboard, middleware=own),
        Mount("/weir/ui", dashboard, middleware=own),
        Route("/weir/mcp", mcp, middleware=own),
        Mount("/weir", routes=Management(runtime, ROUTES).routes(), middleware=kept_by_nobody),
        Route("/", there, methods=["HEAD"]),
    ]


async def there(_: Request) -> Response:
    """Claude Code checks this way whether a server is there."""
    return Response(media_type=JSON)


async def refused(_: Request, error: Exception) -> Response:
    return as_error(problem_of(error))


async def gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def no_route(request: Request, error: Any) -> Response:
    if error.status_code == 404:
        there = "the API is under /v1, Weir's own under /weir, its pages at /weir/ui."
        return as_error(NotFound(f"There is nothing at {request.scope['path'][:200]}: {there}"))
    allowed = tuple(
        method for method in METHODS if method in (error.headers or {}).get("Allow", "")
    )
    more = ": GET is" if allowed == ("GET", "HEAD") else ""
    return as_error(
        MethodNotAllowed(f"{request.method[:10]} is not answered here{more}.", allowed=allowed)
    )


HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    **dict.fromkeys(PROBLEMS, refused),
    ClientGone: gone,
    HTTPException: no_route,
}


class App:
    """The ASGI application. A managed request at its plain path bypasses the router, which would
    cost 17 µs.
    """

    def __init__(
        self,
        start: Callable[[], AbstractAsyncContextManager[Runtime]],
        telemetry: Telemetry,
        reload: Callable[[], Config] | None,
    ) -> None:
        self.runtime: Runtime | None = None
        self._start = start
        self._telemetry = telemetry
        self._reload = reload
        self._router = Router(redirect_slashes=False, lifespan=self._lifespan)
        self._answering = ExceptionMiddleware(self._router, handlers=HANDLERS)

    def __call__(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> Coroutine[Any, Any, None]:
        if self.runtime is not None and scope["type"] == "http" and scope["method"] == "POST":
            route = MANAGED.get(scope["path"])
            if route is not None:
                return answering(self.runtime, scope, receive, send, route)
        return self._answer(scope, receive, send)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        LOG_CONTEXT.set(RequestContext(request_id))

        async def named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", request_id)
            await send(message)

        if any(
            name == b"upgrade" and b"websocket" in value.lower() for name, value in scope["headers"]
        ):
            response = as_error(UpgradeRequired(NO_WEBSOCKET))
            response.headers["upgrade"] = "HTTP/1.1"
            await response(scope, receive, named)
            return
        # Routed as it is spelled: an escaped slash belongs to a name. Slashes around Weir's own
        # paths say nothing.
        path = scope["raw_path"].decode("latin-1")
        if path.startswith(PREFIX):
            path = PREFIX + path.removeprefix(PREFIX).strip("/")
        await self._answering({**scope, "app": self, "path": path}, receive, named)

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        async with self._start() as runtime:
            self.runtime = runtime
            self._router.routes = routes(runtime)
            read = self._reload
            async with (
                contextlib.nullcontext() if read is None else reloading(_reload(runtime, read))
            ):
                yield
        await asyncio.to_thread(self._telemetry.shutdown)


def create_app(
    config: Config,
    *,
    telemetry: Telemetry,
    tokenizer: Tokenizer | None = None,
    providers: Mapping[str, LitellmProvider] | None = None,
    reload: Callable[[], Config] | None = None,
    hooks: Sequence[Plugin] = (),
) -> App:
    """Weir as an ASGI application.

    ``reload`` reads the configuration anew; it is called on SIGHUP. ``hooks`` are called for every
    managed request.
    """
    start = partial(
        running, config, telemetry=telemetry, tokenizer=tokenizer, providers=providers, hooks=hooks
    )
    return App(start, telemetry, reload)


@asynccontextmanager
async def running(
    config: Config,
    *,
    telemetry: Telemetry,
    tokenizer: Tokenizer | None = None,
    providers: Mapping[str, LitellmProvider] | None = None,
    hooks: Sequence[Plugin] = (),
) -> AsyncIterator[Runtime]:
    plugins = [Plugins(hooks)] if hooks else []
    store = await _open_store(config, telemetry.metrics)
    runtime = await _assemble(
        config,
        store,
        telemetry=telemetry,
        tokenizer=tokenizer or Tokenizer(estimators=installed_estimators()),
        providers=providers or {},
        plugins=plugins,
    )
    runtime.take_policies(await store.policies())
    runtime.features.start()
    runtime.write_queue.start()
    tending = asyncio.create_task(_tend(runtime), name="weir-tend")
    lagging = asyncio.create_task(watch_loop(telemetry.metrics), name="weir-loop")
    try:
        yield runtime
    finally:
        tending.cancel()
        lagging.cancel()
        await asyncio.gather(tending, lagging, return_exceptions=True)
        await runtime.preparation.close()
        await runtime.planner.workers.close()
        await runtime.summarizer.close()
        await runtime.custom.close()
        await runtime.features.close()
        await runtime.upstreams.close()
        await runtime.write_queue.close()
        await runtime.limits_resolver.save()
        if runtime.admission.shared is not None:
            await runtime.admission.shared.settle()
        await store.close()
        if tokenizer is None:
            runtime.tokenizer.close()


async def _open_store(config: Config, metrics: Metrics) -> Store:
    store = await Store.open(
        config.store.url,
        content=config.store.content,
        busy_timeout=config.store.timeout,
        connections=config.store.pool,
    )
    store.took = lambda operation, seconds: metrics.store_latency.labels(operation).observe(seconds)
    for notice in store.notices:
        log.warning("%s", notice)
    return store


async def _assemble(
    config: Config,
    store: Store,
    *,
    telemetry: Telemetry,
    tokenizer: Tokenizer,
    providers: Mapping[str, LitellmProvider],
    plugins: Sequence[Plugins],
) -> Runtime:
    secret = await store.secret()
    instance = blake2b(secret, digest_size=6, person=b"weir-via").hexdigest()
    client = Client(instance=instance)
    upstreams = Upstreams(client, providers)
    registry = ModelRegistry(config.models)
    await asyncio.to_thread(registry.load)
    # building an encoding holds the GIL: not while requests run
    await tokenizer.counter("o200k_base").load()
    metrics = telemetry.metrics
    alerts = Alerts(client, config.telemetry.alerts, metrics)
    callbacks = {"stored": alerts.emit_stored} if store.shared else {}
    write_queue = WriteBehindQueue(
        store, degraded=lambda reason: metrics.degraded.labels(reason).inc(), **callbacks
    )
    learned = LearnedLimits(await store.limits())
    limits_resolver = ModelLimitsResolver(
        registry, learned, Probe(), upstreams.get, clock=time.time, write=store.learn
    )
    limits_resolver.follow(await store.calibrations())
    conversations = Conversations(store)
    write_queue.overtaken = conversations.distrust if store.shared else write_queue.overtaken
    planner = Planner(
        transcripts=Transcripts(most=config.limits.messages, depth=config.limits.depth),
        conversations=conversations,
        store=store,
        write_queue=write_queue,
        saved=lambda reason: metrics.checkpoints.labels(reason).inc(),
        workers=Workers(processes_for_plans()),
    )
    answers = AnswerBook(store, write_queue)
    health = HealthBook()
    runtime = Runtime(
        config=config,
        keyring=Keyring(
            config.keys,
            await store.list_keys(),
            secret=secret,
            mode=config.auth.mode,
            tenant=tenant_source(config.auth, config.listen),
            teams=config.teams,
        ),
        secret=secret,
        registry=registry,
        limits_resolver=limits_resolver,
        tokenizer=tokenizer,
        planner=planner,
        preparation=_preparation(
            planner, happened=lambda result: metrics.preparations.labels(result).inc()
        ),
        health=health,
        summarizer=Summarizer(store=store),
        upstreams=upstreams,
        store=store,
        write_queue=write_queue,
        answers=answers,
        provider_ids=ProviderIds(store, write_queue, clock=planner.clock),
        telemetry=telemetry,
        features=Features([alerts, answers, health, *plugins]),
        instance=instance,
        admission=Admission(config.limits),
        budgets=Budgets(
            store,
            settle=write_queue.flush,
            clock=planner.clock,
            notify=lambda notice: alerts.emit(budgets.notice_of_budget(notice)),
            refused=lambda use: metrics.budget_refusals.labels(*use.labels).inc(),
        ),
    )
    if store.shared:
        runtime.admission.share(store)
    _watch(runtime)
    return runtime


def _preparation(planner: Planner, happened: Callable[[str], None]) -> Preparation:
    return Preparation(
        store=planner.store,
        write_queue=planner.write_queue,
        workers=planner.workers,
        readings=planner.readings,
        save=planner.save,
        happened=happened,
        clock=planner.clock,
    )


def _begin_counting(metrics: Metrics, config: Config) -> None:
    """Start the counters that alert rules use at 0: in a series that begins at 1 they miss the
    first event.
    """
    for policy in config.policies:
        for outcome in ("ok", ContextLengthExceeded.code):
            metrics.requests.labels(outcome, policy)
    begun = {
        metrics.retries: ("overflow", "tools_refused"),
        metrics.degraded: ("store", "plan", "resume", "budget", "price"),
        metrics.summarizer_calls: ("ok", "kept", "shared", "timeout"),
        metrics.preparations: ("prepared", "used", "wasted"),
        metrics.alerts_undelivered: ("dropped", "failed"),
    }
    for counter, values in begun.items():
        for value in values:
            counter.labels(value)
    for rule in RULES:
        metrics.alerts.labels(rule.level, rule.category, rule.kind)
    for kind, level in budgets.BUDGET_ALERTS.items():
        metrics.alerts.labels(level, "notice", kind)


def _watch(runtime: Runtime) -> None:
    loop = asyncio.get_running_loop()
    metrics = runtime.telemetry.metrics
    metrics.unauthorised.watch(lambda: dict(runtime.auth_throttle.counted))
    metrics.health.watch(runtime.health.read)
    metrics.budget_used.watch(runtime.budgets.ratios)
    metrics.store_waiting.watch(runtime.write_queue.waiting)
    metrics.store_size.watch(lambda: {(): runtime.sizes[-1][1]} if runtime.sizes else {})
    metrics.store_growth.watch(partial(_growth, runtime))
    metrics.tasks.watch(lambda: {(): len(asyncio.all_tasks(loop))})
    metrics.queue.watch(partial(_queues, runtime, loop))
    metrics.bodies_held.watch(lambda: {(): runtime.admission.held})
    metrics.connections.watch(partial(_connections, runtime))
    keep_little()
    metrics.windows_learned.watch(
        lambda: {(): sum(row.kind == TOKENS for row in runtime.limits_resolver.learned())}
    )
    _begin_counting(metrics, runtime.config)


def _growth(runtime: Runtime) -> Mapping[tuple[str, ...], float]:
    if not runtime.sizes:
        return {}
    at, size = runtime.sizes[-1]
    return {(period,): grown for period, grown in store_growth(runtime.sizes, size, now=at).items()}


def _queues(runtime: Runtime, loop: asyncio.AbstractEventLoop) -> Mapping[tuple[str, ...], float]:
    # what asyncio.to_thread uses, once it was used
    executor = getattr(loop, "_default_executor", None)
    return {
        ("bodies",): runtime.admission.waiting,
        ("threads",): (0 if executor is None else executor._work_queue.qsize()),  # noqa: SLF001 - said nowhere else
        ("tokens",): runtime.tokenizer.waiting,
        ("store",): runtime.store.load().get("waiting", 0),
        ("preparations",): runtime.preparation.waiting,
        ("plans",): runtime.planner.workers.waiting,
    }


def _connections(runtime: Runtime) -> Mapping[tuple[str, ...], float]:
    busy, idle = runtime.upstreams.connections
    counts = {"upstream_busy": busy, "upstream_idle": idle}
    counts |= {
        f"store_{kind}": count for kind, count in runtime.store.load().items() if kind != "waiting"
    }
    counts |= {f"worker_{kind}": count for kind, count in runtime.planner.workers.processes.items()}
    return {(kind,): count for kind, count in counts.items()}


async def _tend(runtime: Runtime) -> None:
    sized = -SIZE_KEPT_EVERY
    measured = -MEASURED_EVERY
    pruned = -DAY
    followed = time.monotonic()
    renewed = time.monotonic()
    reserved = time.monotonic()
    while True:
        await asyncio.sleep(KEYS_EVERY)
        # bytes of bodies since it was given back
        if runtime.admission.passed > 2**24 and not runtime.admission.held:
            runtime.admission.passed = 0
            await asyncio.to_thread(give_back)
        store = runtime.store
        clock = runtime.planner.clock
        try:
            await store.ping()
            shared = runtime.admission.shared
            if shared is not None and time.monotonic() - renewed >= RENEWED_EVERY:
                renewed = time.monotonic()
                await shared.renew()
            if time.monotonic() - reserved >= RESERVED_EVERY:
                reserved = time.monotonic()
                await runtime.budgets.renew()
            runtime.take_keys(await store.list_keys())
            runtime.take_policies(await store.policies())
            _begin_counting(runtime.telemetry.metrics, runtime.config)
            await runtime.limits_resolver.save()
            if store.shared and time.monotonic() - followed >= FOLLOWED_EVERY:
                followed = time.monotonic()
                runtime.limits_resolver.follow(await store.calibrations(), await store.limits())
            if time.monotonic() - sized >= SIZE_KEPT_EVERY:
                sized = time.monotonic()
                await store.keep_size(clock())
                runtime.sizes = await store.sizes()
            if time.monotonic() - measured >= MEASURED_EVERY:
                measured = time.monotonic()
                await _fit(runtime, store, clock())
            if time.monotonic() - pruned >= DAY:
                pruned = time.monotonic()
                await _prune(runtime.config.store, store, clock())
        except StoreError as error:
            log.warning("the store could not be tended: %s", error)


async def _prune(settings: StoreSettings, store: Store, at: float) -> None:
    # not by the clock alone: a clock that has jumped ahead would make everything old
    now = min(at, await store.newest() or 0.0)
    if settings.retention is not None:
        gone = await store.prune(now - settings.retention, at)
        log.log(logging.INFO if gone else logging.DEBUG, "retention has deleted %d rows", gone)
    if settings.usage_retention is not None:
        await store.prune_usage(now - settings.usage_retention)


async def _fit(runtime: Runtime, store: Store, now: float) -> None:
    most = runtime.config.store.max_size
    if most is not None and (gone := await store.fit(most, before=now - IN_USE, at=now)):
        log.warning(
            "the database had more than store.max_size: %d conversations were deleted, the oldest"
            " ones",
            gone,
        )


def _reload(runtime: Runtime, read: Callable[[], Config]) -> Reload:
    async def adopt(fresh: Config) -> None:
        rows: list[KeyRow] | None = []
        before = runtime.config
        try:
            rows = await runtime.store.list_keys()
        except StoreError:
            rows = None  # the keys are read again in a moment
        runtime.adopt(fresh)
        if rows is not None:
            runtime.take_keys(rows)
        try:
            await runtime.store.note_changes(
                [*changes(before, runtime.config, at=runtime.planner.clock())]
            )
        except StoreError as error:
            log.warning("what changed with the configuration could not be audited: %s", error)

    return Reload(current=lambda: runtime.config, read=read, adopt=adopt, every=WATCH_EVERY)


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Api:
    """``managed`` answers what is managed or counted, whatever name it is requested under."""

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
