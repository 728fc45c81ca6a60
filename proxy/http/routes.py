"""The management API below ``/weir/``: which route answers a request, and who may call it.

Each module with routes has its own ``ROUTES``; ``proxy.app`` lists them, and openapi.json says what
each takes and gives. A caller sees its own conversations only; for everybody else's it gets the 404
of what does not exist. The admin token sees and changes all of them, and reads no originals.
docs/api.md describes every route. The document names no conversation, key or policy of this
installation, so it is public: a client or a gateway reads it before it has a key.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from importlib.resources import files
from typing import Literal
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, request_response

from proxy.access.admission import (
    credentials_in,
    identify,
    presented,
    refuse_foreign_pages,
    same_secret,
)
from proxy.access.destination import Caller
from proxy.errors import Forbidden, MethodNotAllowed, NotFound
from proxy.http.request import JSON, MAX_ROWS, Json, ManagementRequest, as_json, query_of
from proxy.runtime import Runtime

PREFIX = "/weir/"
Asker = Literal["anyone", "key", "caller", "operator"]
Handler = Callable[[ManagementRequest], Awaitable[Response | Json]]


class ManagementRoute(msgspec.Struct, frozen=True):
    """One route below ``/weir/``.

    Attributes:
        pattern: its path; parts in braces are any.
        handler: what answers it; None for the OpenAPI document itself.
        query: its parameters.
        statuses: of answers that are no errors; what a handler returns as JSON goes with the first.
        rows: how many rows a list gives where no limit is requested, ``most`` how many at most.
        asker: who may call it: ``anyone``, whoever has a ``key``, the ``caller`` with its own key,
            the ``operator``.
    """

    method: str
    pattern: str
    handler: Handler | None
    query: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (200,)
    rows: int = 200
    most: int = MAX_ROWS
    asker: Asker = "key"


PAGED = ("limit", "cursor")
CONVERSATION = "conversations/{id}"
OPENAPI = ManagementRoute("GET", "openapi.json", None, asker="anyone")


@cache
def document() -> bytes:
    """The OpenAPI document, which says what every route takes and gives."""
    text = (files("proxy.http") / "openapi.json").read_text(encoding="utf-8")
    whole = json.loads(text)
    whole["info"]["version"] = version("weir-proxy")
    return json.dumps(whole, ensure_ascii=False).encode()


class Management:
    """The management API; what it raises is answered by the application."""

    def __init__(self, runtime: Runtime, routes: Sequence[ManagementRoute]) -> None:
        self._runtime = runtime
        self._routes = routes

    def routes(self) -> list[BaseRoute]:
        made = [
            Route(f"/{each.pattern}", partial(self._answer, each), methods=[each.method])
            for each in self._routes
        ]
        self._patterns = [
            (each, route.path_regex) for each, route in zip(self._routes, made, strict=True)
        ]
        return [*made, Mount("", request_response(self._otherwise))]

    async def _answer(self, route: ManagementRoute, request: Request) -> Response:
        runtime = self._runtime
        headers = self._credentials(request)
        query = request.scope["query_string"]
        if route.handler is None:
            query_of(query, route.query)
            return Response(await asyncio.to_thread(document), media_type=JSON)
        caller = self._caller(request, headers)
        if route.asker == "operator" and caller is not None:
            error = Forbidden("This is for the operator: send the admin token (auth.admin_token).")
            raise (
                error
                if caller.name is not None
                else runtime.auth_throttle.answer(request.scope, error)
            )
        parsed = ManagementRequest(
            runtime=runtime,
            tenant=None if caller is None else caller.tenant,
            path={name: unquote(part) for name, part in request.path_params.items()},
            query=query_of(query, route.query),
            receive=request.receive,
            rows=route.rows,
            most=route.most,
            shutdown=request.state.shutdown,
            caller=caller,
        )
        if not runtime.write_queue.failing:
            # what was answered a moment ago can be requested
            await runtime.write_queue.flush()
        answer = await route.handler(parsed)
        return answer if isinstance(answer, Response) else as_json(answer, status=route.statuses[0])

    async def _otherwise(self, request: Request) -> Response:
        """The error for a request that no route answers: another method, or another path."""
        headers = self._credentials(request)
        method = request.method
        path = request.scope["path"].removeprefix("/weir")
        there = [route for route, pattern in self._patterns if pattern.match(path)]
        allowed = [route.method for route in there]
        allowed += ["HEAD", "OPTIONS"] if "GET" in allowed else ["OPTIONS"]
        if there and method == "OPTIONS":
            return Response(status_code=204, headers={"allow": ", ".join(allowed)})
        if not there or there[0].asker != "anyone":
            self._caller(request, headers)
        if not there:
            raise _nothing_at([unquote(part) for part in path.strip("/").split("/")])
        answered = [route.method for route in there]
        verb = f"{' and '.join(answered)} {'is' if len(answered) == 1 else 'are'}"
        text = f"{method[:10]} is not answered at {PREFIX}{there[0].pattern}: {verb}."
        raise MethodNotAllowed(text, allowed=tuple(allowed))

    def _credentials(self, request: Request) -> Mapping[str, str]:
        headers = credentials_in(request.scope["headers"])
        refuse_foreign_pages(request.scope, self._runtime.config, has_key=bool(presented(headers)))
        return headers

    def _caller(self, request: Request, headers: Mapping[str, str]) -> Caller | None:
        token = self._runtime.config.admin_token
        if token is not None and same_secret(presented(headers), token.get_secret_value()):
            return None
        return identify(request.scope, self._runtime.keyring, self._runtime.auth_throttle)


@cache
def _paths() -> list[str]:
    """Every path of the OpenAPI document, in its order."""
    return list(json.loads(document())["paths"])


def _nothing_at(path: list[str]) -> NotFound:
    patterns = [known.removeprefix(PREFIX).split("/") for known in _paths()]
    if path[0] == "conversations" and len(path) > 2:
        parts = dict.fromkeys(
            each[2] for each in patterns if each[0] == "conversations" and len(each) > 2
        )
        return NotFound(
            f"A conversation has no {'/'.join(path[2:])[:40]!r} here: there are {', '.join(parts)}."
        )
    top = list(dict.fromkeys(each[0] for each in patterns))
    where = "/".join(path)[:80]
    return NotFound(
        f"There is nothing at {PREFIX}{where}: there are {', '.join(top[:-1])} and {top[-1]}."
    )
