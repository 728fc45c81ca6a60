"""The management API: what Weir knows of a caller's conversations, the originals of what it removed, and its levers.

A caller sees its own conversations only; for everybody else's it gets the 404 of what does not exist. The admin token
sees and changes all of them, and reads no originals. docs/api.md describes every route of the table.
"""

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote

from proxy.access.browsers import refuse_foreign_pages
from proxy.access.caller import Caller
from proxy.access.keys import credentials_in, presented, same_secret
from proxy.errors import Conflict, Forbidden, MethodNotAllowed, NotFound, ProxyError
from proxy.http.openapi import document
from proxy.http.request import ManagementAnswer, ManagementRequest, as_json, query_of
from proxy.http.respond import respond, respond_error
from proxy.http.table import PREFIX, ROUTES, ManagementRoute
from proxy.runtime import Runtime
from proxy.store import StaleVersion, StoreError
from proxy.stream.receive import ClientGone, Receive
from proxy.stream.relay import Send

READING = frozenset({"GET", "HEAD"})
NOT_KEPT = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
"""Headers of every answer: what is told to one key is kept for nobody else, and shown as what it says that it is."""

Found = list[tuple[ManagementRoute, Mapping[str, str]]]


class Management:
    """The ASGI application of ``/weir/…``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        error: ProxyError
        try:
            answer = await self._answer(scope, receive)
        except ClientGone:
            return
        except StaleVersion:
            error = Conflict("A request of this conversation came first: try again.")
        except StoreError as fault:
            error = ProxyError(f"The store cannot do this now: {type(fault).__name__}. Try again.")
        except ProxyError as fault:
            error = fault
        else:
            headers = [*answer.headers, *NOT_KEPT]
            await respond(send, answer.body, status=answer.status, kind=answer.kind, headers=headers)
            return
        await respond_error(send, error, headers=NOT_KEPT)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive) -> ManagementAnswer:
        headers = credentials_in(scope["headers"])
        refuse_foreign_pages(scope, has_key=bool(presented(headers)))
        method, path = scope["method"], _path(scope)
        found: Found = [(route, parts) for route in ROUTES if (parts := route.match(path)) is not None]
        if method == "OPTIONS" and found:
            return ManagementAnswer(b"", 204, headers=[(b"allow", ", ".join(_methods(found)).encode())])
        if found and found[0][0].asker == "anyone":
            route, _ = _of_method(method, found)
            query_of(scope.get("query_string", b""), route.query)
            return ManagementAnswer(await asyncio.to_thread(document))
        caller = self._caller(scope, headers)
        route, named = _of_method(method, found) if found else _nothing_at(path)
        if route.asker == "operator" and caller is not None:
            error = Forbidden("This is for the operator: send the admin token (auth.admin_token).")
            raise error if caller.name is not None else self._runtime.unauthorised(scope, error)
        asked = ManagementRequest(
            runtime=self._runtime,
            tenant=None if caller is None else caller.tenant,
            path=named,
            query=query_of(scope.get("query_string", b""), route.query),
            receive=receive,
            rows=route.rows,
            most=route.most,
        )
        if not self._runtime.settler.failing:
            await self._runtime.settler.flush()  # what was answered a moment ago is there to be asked for
        assert route.handler is not None  # noqa: S101 - only the document has none, and was given above
        answer = await route.handler(asked)
        return answer if isinstance(answer, ManagementAnswer) else as_json(answer)

    def _caller(self, scope: MutableMapping[str, Any], headers: Mapping[str, str]) -> Caller | None:
        """Who asks, None for the operator with the admin token."""
        token = self._runtime.config.admin_token
        if token is not None and same_secret(presented(headers), token.get_secret_value()):
            return None
        return self._runtime.identify(scope)


def _path(scope: MutableMapping[str, Any]) -> tuple[str, ...]:
    """The parts of the path below ``/weir/``; an escaped slash belongs to a part."""
    raw = scope.get("raw_path")
    whole = raw.decode("latin-1").partition("?")[0] if isinstance(raw, bytes) else scope["path"]
    return tuple(unquote(part) for part in whole.removeprefix(PREFIX).strip("/").split("/"))


def _of_method(method: str, found: Found) -> tuple[ManagementRoute, Mapping[str, str]]:
    """The route that answers a method. Raises MethodNotAllowed that says which are."""
    asked = "GET" if method in READING else method
    for route, named in found:
        if route.method == asked:
            return route, named
    there = [route.method for route, _ in found]
    verb = f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'}"
    text = f"{method[:10]} is not answered at {PREFIX}{found[0][0].pattern}: {verb}."
    raise MethodNotAllowed(text, allowed=_methods(found))


def _methods(found: Found) -> tuple[str, ...]:
    there = [route.method for route, _ in found]
    return (*there, *(["HEAD"] if "GET" in there else []), "OPTIONS")


def _nothing_at(path: tuple[str, ...]) -> tuple[ManagementRoute, Mapping[str, str]]:
    """Raises NotFound that says what there is."""
    patterns = [route.pattern.split("/") for route in ROUTES]
    if path[0] == "conversations" and len(path) > 2:
        parts = dict.fromkeys(each[2] for each in patterns if each[0] == "conversations" and len(each) > 2)
        raise NotFound(f"A conversation has no {'/'.join(path[2:])[:40]!r} here: there are {', '.join(parts)}.")
    top = list(dict.fromkeys(each[0] for each in patterns))
    where = "/".join(path)[:80]
    raise NotFound(f"There is nothing at {PREFIX}{where}: there are {', '.join(top[:-1])} and {top[-1]}.")
