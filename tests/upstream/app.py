"""The simulator as an ASGI application: its routes, the endpoints that answer without a model, and starting one.

It is started on a free port, beside the caller's event loop or in a thread of its own. Everything that arrives is
recorded byte for byte while it is answered, for tests and for ``GET /sim/requests``.
"""

import asyncio
import base64
import contextlib
import json
import math
import re
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import uvicorn
from anyio.from_thread import start_blocking_portal
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.upstream.chat import SimulatedChat
from tests.upstream.delivery import Transmission
from tests.upstream.memory import stored_routes
from tests.upstream.messages import SimulatedMessages
from tests.upstream.model import Model, RecordedRequest, SimulatorSettings, Surface
from tests.upstream.responses import SimulatedCompaction, SimulatedResponses
from tests.upstream.window import Count, Dialect, Request, missing_problem, problem_body

OWN_ROUTES = "/sim/"
VISIT = "simulator.visit"


class Ledger:
    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: deque[RecordedRequest] = deque()
        self._started = time.monotonic()
        self._visits: set[Visit] = set()

    def __iter__(self) -> Iterator[RecordedRequest]:
        return iter(tuple(self._entries))

    def now(self) -> float:
        return time.monotonic() - self._started

    def arrive(self, scope: Scope, body: bytes, send: Send) -> "Visit":
        headers = tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        seen = RecordedRequest(method=scope["method"], path=scope["path"], headers=headers, body=body, at=self.now())
        self._entries.append(seen)
        self._bytes += len(body)
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            self._bytes -= len(self._entries.popleft().body)
        visit = Visit(self, seen, send)
        self._visits.add(visit)
        return visit

    def depart(self, visit: "Visit") -> None:
        self._visits.discard(visit)

    def release(self) -> None:
        for visit in tuple(self._visits):
            visit.done = True
            visit.over.set()

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0


class Visit:
    def __init__(self, ledger: Ledger, seen: RecordedRequest, send: Send) -> None:
        self.seen = seen
        self.over = asyncio.Event()
        self.done = False
        self._ledger = ledger
        self._send = send

    async def wait(self, seconds: float | None) -> bool:
        if seconds == 0:
            await asyncio.sleep(0)
            return self.over.is_set()
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            return False
        return True

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.seen.status = message["status"]
        else:
            self.seen.sent += len(message.get("body", b""))
            self.seen.finished = not message.get("more_body", False)
            self.done = self.done or self.seen.finished
        await self._send(message)

    async def deliver(self, delivery: Transmission) -> None:
        if delivery.stall_at == -1:
            await self.wait(None)
            return
        if await self.wait(delivery.before):
            return
        headers = [(name.encode(), value.encode()) for name, value in delivery.headers.items()]
        if delivery.length is not None:
            headers.append((b"content-length", str(delivery.length).encode()))
        await self.send({"type": "http.response.start", "status": delivery.status, "headers": headers})
        last = len(delivery.chunks) - 1 if delivery.stall_at is None and delivery.cut_at is None else None
        for index, chunk in enumerate(delivery.chunks):
            if index == delivery.stall_at:
                await self.wait(None)
                return
            if index == delivery.cut_at or await self.wait(delivery.between if index else 0):
                return
            await self.send({"type": "http.response.body", "body": chunk, "more_body": index != last})
        if delivery.stall_at is not None:
            await self.wait(None)
        if last == -1:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    def leave(self) -> None:
        if not self.done:
            self.seen.client_gone, self.seen.gone_at = True, self._ledger.now()
        self.over.set()


class Recorder:
    def __init__(self, app: ASGIApp, *, ledger: Ledger) -> None:
        self._app = app
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        try:
            body = await HTTPRequest(scope, receive).body()
        except ClientDisconnect:
            body = None
        visit = self._ledger.arrive(scope, body or b"", send)
        if body is None:
            visit.leave()
            self._ledger.depart(visit)
            return
        watch = asyncio.create_task(_watch(receive, visit))
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if pending:
                return pending.pop()
            await visit.over.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app({**scope, VISIT: visit}, replay, visit.send)
        finally:
            watch.cancel()
            self._ledger.depart(visit)


async def _watch(receive: Receive, visit: Visit) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    visit.leave()


DIMENSIONS = 32
TRAINED_WINDOW = 131_072
_WORD = re.compile(r"\w+")


class WordCounter(Protocol):
    def count(self, text: str) -> int: ...


class Simulator:
    def __init__(self, settings: SimulatorSettings, *, counter: WordCounter) -> None:
        self.settings = settings
        self.counter = counter
        self.model = Model(settings, count=counter.count)
        self.ledger = Ledger(max_bytes=settings.ledger_bytes)


class _Endpoint:
    """An instance, since starlette would hand a plain function a parsed request, and send what it answers itself."""

    def __init__(self, answer: Callable[[RecordedRequest], Transmission]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, *_: object) -> None:
        visit: Visit = scope[VISIT]
        await visit.deliver(self._answer(visit.seen))


def _application(simulator: Simulator) -> Starlette:
    settings = simulator.settings

    async def missing(request: HTTPRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        problem = missing_problem(request.method, request.url.path, status=status, dialect=settings.dialect)
        return JSONResponse(problem_body(problem, settings.dialect), status)

    return Starlette(
        routes=[*_answering_routes(simulator), *_plain_routes(simulator), *_ledger_routes(simulator)],
        middleware=[Middleware(Recorder, ledger=simulator.ledger)],
        exception_handlers={HTTPException: missing},
    )


def _answering_routes(simulator: Simulator) -> list[BaseRoute]:
    """OpenAI has chat and responses, Anthropic messages, vLLM and llama.cpp all three."""
    settings, model, counter = simulator.settings, simulator.model, simulator.model.counter
    routes: list[BaseRoute] = [Route("/", lambda _: Response(), methods=["HEAD"])]  # Claude Code asks before it begins

    def add(path: str, surface: Surface, counting: str = "") -> None:
        routes.append(Route(f"/v1/{path}", _Endpoint(partial(model.exchange, surface)), methods=["POST"]))
        if counting:
            routes.append(Route(f"/v1/{path}/{counting}", _Endpoint(partial(model.measure, surface)), methods=["POST"]))

    if settings.dialect is not Dialect.ANTHROPIC:
        add("chat/completions", SimulatedChat(settings, counter), "input_tokens")
        responses = SimulatedResponses(settings, counter)
        add("responses", responses, "input_tokens")
        if settings.dialect is Dialect.OPENAI:
            add("responses/compact", SimulatedCompaction(responses))
        routes += stored_routes(responses.memory, settings.dialect)
    if settings.dialect is not Dialect.OPENAI:
        add("messages", SimulatedMessages(settings, counter), "count_tokens")
    return routes


def _plain_routes(simulator: Simulator) -> list[BaseRoute]:
    settings, count = simulator.settings, simulator.counter.count

    def route(method: str, path: str, answer: Callable[[Request], Mapping[str, Any]]) -> Route:
        async def endpoint(request: HTTPRequest) -> Response:
            return JSONResponse(answer(request.path_params if method == "GET" else await request.json()))

        return Route(path, endpoint, methods=[method])

    routes: list[BaseRoute] = [
        route("GET", "/v1/models", lambda _: _list_models(settings)),
        route("GET", "/v1/models/{name:path}", lambda named: _model_card(named["name"], settings)),
        route("POST", "/tokenize", lambda asked: _tokenize(asked, settings, count)),
    ]
    if settings.dialect is not Dialect.ANTHROPIC:
        routes.append(route("POST", "/v1/embeddings", lambda asked: _embed(asked, count)))
    if settings.dialect is Dialect.LLAMACPP:
        routes.append(route("GET", "/props", lambda _: _server_properties(settings)))
    return routes


def _ledger_routes(simulator: Simulator) -> list[BaseRoute]:
    async def read(_: HTTPRequest) -> Response:
        # not JSONResponse, which cannot encode lone surrogates
        return Response(json.dumps([seen.report() for seen in simulator.ledger]), media_type="application/json")

    async def clear(_: HTTPRequest) -> Response:
        simulator.ledger.clear()
        return Response(status_code=204)

    return [Route("/sim/requests", read, methods=["GET"]), Route("/sim/requests", clear, methods=["DELETE"])]


def _model_card(name: str, settings: SimulatorSettings) -> Mapping[str, Any]:
    window = settings.window_of(name)
    if settings.dialect is Dialect.ANTHROPIC:
        return {"type": "model", "id": name, "display_name": name, "created_at": "2025-01-01T00:00:00Z"}
    card: dict[str, Any] = {"id": name, "object": "model", "created": 1_735_689_600, "owned_by": "simulator"}
    if settings.dialect is Dialect.VLLM:
        card |= {"root": name, "parent": None, "permission": []}
        card |= {"max_model_len": window} if settings.tells_window else {}
    if settings.dialect is Dialect.LLAMACPP:
        trained = max(window, TRAINED_WINDOW)
        card["meta"] = {"n_ctx": window, "n_ctx_train": trained, "n_vocab": 32_000, "n_params": 1, "size": 1}
    return card


def _list_models(settings: SimulatorSettings) -> Mapping[str, Any]:
    names = tuple(dict.fromkeys((*settings.models, *settings.windows)))
    cards = [_model_card(name, settings) for name in names]
    if settings.dialect is Dialect.ANTHROPIC:
        return {"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": cards}


def _server_properties(settings: SimulatorSettings) -> Mapping[str, Any]:
    return {
        "default_generation_settings": {"n_ctx": settings.window, "id": 0, "is_processing": False},
        "total_slots": 1,
        "model_path": settings.models[0],
        "chat_template": "",
    }


def _tokenize(request: Request, settings: SimulatorSettings, count: Count) -> Mapping[str, Any]:
    text = request.get("content") or request.get("prompt") or ""
    size = count(str(text)) if text else 0
    return {"count": size, "max_model_len": settings.window, "tokens": list(range(size))}


def _embed(request: Request, count: Count) -> Mapping[str, Any]:
    given = request.get("input")
    texts = [str(item) for item in given] if isinstance(given, list) else [str(given or "")]
    size = request.get("dimensions")
    size = size if isinstance(size, int) and size > 0 else DIMENSIONS
    packed = request.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if packed else vector}
        for index, vector in enumerate(_vector(text, size) for text in texts)
    ]
    tokens = sum(count(text) for text in texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.get("model"), "usage": usage}


def _vector(text: str, size: int) -> list[float]:
    vector = [0.0] * size
    for word in _WORD.findall(text.lower()) or [text]:
        digest = blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        vector[int.from_bytes(digest[:4], "big") % size] += 1.0 if digest[4] & 1 else -1.0
    norm = math.sqrt(sum(value * value for value in vector))
    return [value / norm for value in vector] if norm else [1.0, *vector[1:]]


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


START_SECONDS = 10.0
BACKLOG = 2048
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RunningSimulator:
    simulator: Simulator
    host: str
    port: int

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.origin}/v1"

    @property
    def ledger(self) -> list[RecordedRequest]:
        return list(self.simulator.ledger)

    def forget(self) -> None:
        self.simulator.ledger.clear()

    def answered(self) -> list[RecordedRequest]:
        return [seen for seen in self.ledger if seen.path in {"/v1/chat/completions", "/v1/responses", "/v1/messages"}]


class _QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its host program and stops at once when told to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        """Serve until :meth:`stop`, without the tick that uvicorn polls its flags with."""
        await self.on_tick(0)
        await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _configure(settings: SimulatorSettings, counter: WordCounter) -> tuple[uvicorn.Config, Simulator]:
    simulator = Simulator(settings, counter=counter)
    app = _application(simulator)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    return config, simulator


@contextlib.asynccontextmanager
async def serve_simulator(settings: SimulatorSettings, *, counter: WordCounter) -> AsyncIterator[RunningSimulator]:
    """A simulator on a free port, in the running event loop for the length of the block."""
    listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
    config, simulator = _configure(settings, counter)
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(START_SECONDS):
            while not server.started:
                if serving.done():
                    await serving
                await asyncio.sleep(0.005)
        yield RunningSimulator(simulator, LOOPBACK, listener.getsockname()[1])
    finally:
        simulator.ledger.release()
        server.stop()
        await serving
        listener.close()


@contextlib.contextmanager
def run_simulator(settings: SimulatorSettings, *, counter: WordCounter) -> Iterator[RunningSimulator]:
    simulator = serve_simulator(settings, counter=counter)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(simulator) as running:
        yield running
