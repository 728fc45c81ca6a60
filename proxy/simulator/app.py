"""The simulator as an ASGI application: routes, and a recorder that sees every byte that comes in."""

import asyncio
import json
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.simulator.chat import CHAT
from proxy.simulator.delivery import deliver
from proxy.simulator.dialects import missing_problem, problem_body
from proxy.simulator.exchange import Model
from proxy.simulator.extras import embed, list_models, model_card, server_properties, tokenize
from proxy.simulator.faults import HEADER
from proxy.simulator.ledger import Ledger, Seen
from proxy.simulator.messages import MESSAGES
from proxy.simulator.settings import Dialect, SimulatorSettings
from proxy.simulator.surface import Surface

OWN_ROUTES = "/sim/"
VISIT = "simulator.visit"


class TokenCounter(Protocol):
    """Counts the tokens of a text."""

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        ...


class Visit:
    """One request while it is being answered: its ledger entry, and whether the client is still there."""

    def __init__(self, simulator: "Simulator", key: int, send: Send) -> None:
        self._simulator = simulator
        self._key = key
        self._send = send
        self._sent = 0
        self.over = asyncio.Event()
        self.done = False

    async def wait(self, seconds: float | None) -> bool:
        """Sleep (None: for ever); True as soon as the client left or the simulator stops."""
        if seconds == 0:
            await asyncio.sleep(0)
            return self.over.is_set()
        try:
            await asyncio.wait_for(self.over.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Hand an ASGI message to the server, noting status, size and end in the ledger."""
        if message["type"] == "http.response.start":
            self.note(status=message["status"])
        else:
            self._sent += len(message.get("body", b""))
            ends = not message.get("more_body", False)
            self.done = self.done or ends
            self.note(sent=self._sent, finished=ends)
        await self._send(message)

    def note(self, **changes: Any) -> None:
        """Change the ledger entry."""
        self._simulator.ledger.note(self._key, **changes)

    def leave(self) -> None:
        """The client is gone; an answer that was complete by then does not count as broken off."""
        if not self.done:
            self.note(client_gone=True, gone_at=self._simulator.now())
        self.over.set()


class Simulator:
    """A simulated model server: what it knows, what it received, and how to make it forget."""

    def __init__(self, settings: SimulatorSettings, *, counter: TokenCounter) -> None:
        self.settings = settings
        self.counter = counter
        self.model = Model(settings, count=counter.count)
        self.ledger = Ledger(max_bytes=settings.ledger_bytes)
        self._started = time.monotonic()
        self._visits: set[Visit] = set()

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def close(self) -> None:
        """End everything that stalls, so that the server can stop."""
        for visit in tuple(self._visits):
            visit.done = True
            visit.over.set()

    def arrive(self, scope: Scope, body: bytes, send: Send) -> Visit:
        """Record a request that has arrived in full."""
        headers = tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        seen = Seen(method=scope["method"], path=scope["path"], headers=headers, body=body, at=self.now())
        visit = Visit(self, self.ledger.open(seen), send)
        self._visits.add(visit)
        return visit

    def depart(self, visit: Visit) -> None:
        """The request is over."""
        self._visits.discard(visit)


class Recorder:
    """ASGI middleware: reads the whole body, records it, and watches the client while the answer is made."""

    def __init__(self, app: ASGIApp, *, simulator: Simulator) -> None:
        self._app = app
        self._simulator = simulator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request under observation; the simulator's own routes pass unseen."""
        if scope["type"] != "http" or scope["path"].startswith(OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        visit = self._simulator.arrive(scope, body or b"", send)
        if body is None:
            visit.leave()
            self._simulator.depart(visit)
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
            self._simulator.depart(visit)


async def _read(receive: Receive) -> bytes | None:
    """The whole body, or None where the client left in the middle of it."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _watch(receive: Receive, visit: Visit) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    visit.leave()


class Answering:
    """The ASGI endpoint of a surface."""

    def __init__(self, simulator: Simulator, surface: Surface) -> None:
        self._simulator = simulator
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in words, or refuse, or misbehave."""
        request, visit = HTTPRequest(scope, receive, send), scope[VISIT]
        delivery, noted = self._simulator.model.exchange(
            self._surface, await request.body(), credential=credential_of(request), header=request.headers.get(HEADER)
        )
        visit.note(**{name: getattr(noted, name) for name in noted.__slots__})
        await deliver(delivery, visit)


def credential_of(request: HTTPRequest) -> str:
    """The bearer token or API key of a request; its cache and its limits are this owner's."""
    bearer = request.headers.get("authorization", "")
    return bearer.removeprefix("Bearer ") or request.headers.get("x-api-key") or request.headers.get("api-key") or ""


def create_simulator(settings: SimulatorSettings, *, counter: TokenCounter) -> Starlette:
    """The application; its :class:`Simulator` is ``app.state.simulator``."""
    simulator = Simulator(settings, counter=counter)

    async def missing(request: HTTPRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        problem = missing_problem(request.method, request.url.path, status=status, dialect=settings.dialect)
        return JSONResponse(problem_body(problem, settings.dialect), status)

    app = Starlette(
        routes=[*_answering_routes(simulator), *_plain_routes(simulator), *_ledger_routes(simulator)],
        middleware=[Middleware(Recorder, simulator=simulator)],
        exception_handlers={HTTPException: missing},
    )
    app.state.simulator = simulator
    return app


def _answering_routes(simulator: Simulator) -> list[BaseRoute]:
    if simulator.settings.dialect is Dialect.ANTHROPIC:
        counted = _counting(simulator, MESSAGES)
        return [
            Route("/v1/messages/count_tokens", counted, methods=["POST"]),
            Route("/v1/messages", Answering(simulator, MESSAGES), methods=["POST"]),
        ]
    counted = _counting(simulator, CHAT)
    return [
        Route("/v1/chat/completions", Answering(simulator, CHAT), methods=["POST"]),
        Route("/v1/chat/completions/input_tokens", counted, methods=["POST"]),
    ]


def _counting(simulator: Simulator, surface: Surface) -> Callable[[HTTPRequest], Any]:
    async def counted(request: HTTPRequest) -> Response:
        return JSONResponse({"input_tokens": simulator.model.measure(surface, await request.body()).total})

    return counted


def _plain_routes(simulator: Simulator) -> list[BaseRoute]:
    settings, count = simulator.settings, simulator.counter.count

    async def models(_: HTTPRequest) -> Response:
        return JSONResponse(list_models(settings))

    async def model(request: HTTPRequest) -> Response:
        return JSONResponse(model_card(request.path_params["name"], settings))

    async def props(_: HTTPRequest) -> Response:
        return JSONResponse(server_properties(settings))

    async def tokens(request: HTTPRequest) -> Response:
        return JSONResponse(tokenize(await request.json(), settings, count))

    async def embeddings(request: HTTPRequest) -> Response:
        return JSONResponse(embed(await request.json(), count))

    routes: list[BaseRoute] = [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/tokenize", tokens, methods=["POST"]),
    ]
    if settings.dialect is not Dialect.ANTHROPIC:
        routes.append(Route("/v1/embeddings", embeddings, methods=["POST"]))
    if settings.dialect is Dialect.LLAMACPP:
        routes.append(Route("/props", props, methods=["GET"]))
    return routes


def _ledger_routes(simulator: Simulator) -> list[BaseRoute]:
    async def read(_: HTTPRequest) -> Response:
        reports = [seen.report() for seen in simulator.ledger]
        return Response(json.dumps(reports), media_type="application/json")

    async def clear(_: HTTPRequest) -> Response:
        simulator.ledger.clear()
        return Response(status_code=204)

    return [
        Route("/sim/requests", read, methods=["GET"]),
        Route("/sim/requests", clear, methods=["DELETE"]),
    ]
