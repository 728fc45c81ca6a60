"""The API under ``/v1``, and Azure's spelling of it: what each request is for, and who answers it."""

from collections.abc import MutableMapping
from typing import Any

from proxy.access.destination import route_of
from proxy.errors import MethodNotAllowed, NotFound
from proxy.exchange.run import ExchangeHandler
from proxy.http.models import answer_models
from proxy.http.passthrough import relay_untouched
from proxy.http.respond import counted, respond_error
from proxy.runtime import Runtime
from proxy.stream.receive import Receive
from proxy.stream.relay import Send

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Api:
    """The ASGI application of all of it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def chat(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/chat/completions``, the managed route."""
        await ExchangeHandler(self._runtime, scope, receive, send).run()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        runtime, method = self._runtime, scope["method"]
        if method not in METHODS:
            error = MethodNotAllowed(f"{method[:10]} is not answered here.", allowed=METHODS)
            await respond_error(send, error)
            return
        route = route_of(method, (scope.get("raw_path") or scope["path"].encode()).decode("latin-1"))
        if route is None:
            await respond_error(send, NotFound(f"There is nothing at {scope['path'][:200]}: the API is under /v1."))
            return
        if route.kind == "chat":
            await ExchangeHandler(runtime, scope, receive, send, route).run()
            return

        async def answer(sending: Send) -> None:
            answers = answer_models if route.kind == "models" else relay_untouched
            await answers(runtime, scope, receive, sending, route)

        await counted(runtime.telemetry.metrics, "/v1/{rest}", scope, send, answer)
