"""What is routed below ``/v1``, and Azure's spelling of it."""

from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from proxy.access.destination import route_of
from proxy.errors import NotFound
from proxy.http.models import answer_models
from proxy.http.relay import OTHER_ROUTE, relay_untouched
from proxy.http.request import Counted
from proxy.runtime import Runtime
from proxy.stream import Receive, Send

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
