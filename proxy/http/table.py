"""The management API: what Weir knows of a caller's conversations, the originals of what it removed, and its levers.

One table says what is routed and who may ask, openapi.json what it takes and gives. A caller sees its own
conversations only; for everybody else's it gets the 404 of what does not exist. The admin token sees and changes all of
them, and reads no originals. docs/api.md describes every route of the table. The document names no conversation, key or
policy of this installation, so it is given to anybody who asks: a client or a gateway reads it before it has a key.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from policies.health import KEPT
from proxy.access.admission import credentials_in, identify, presented, refuse_foreign_pages, same_secret
from proxy.access.destination import Caller
from proxy.errors import Conflict, Forbidden, MethodNotAllowed, NotFound, ProxyError
from proxy.http import archive, conversations, levers, reports
from proxy.http.request import (
    MAX_ROWS,
    Json,
    ManagementAnswer,
    ManagementRequest,
    as_json,
    query_of,
    respond,
    respond_error,
    respond_live,
)
from proxy.runtime import Runtime
from proxy.store.records import StaleVersion, StoreError
from proxy.stream import ClientGone, Receive, Send

PREFIX = "/weir/"
Asker = Literal["anyone", "key", "caller", "operator"]
Handler = Callable[[ManagementRequest], Awaitable[ManagementAnswer | Json]]


class ManagementRoute(msgspec.Struct, frozen=True):
    """One route below ``/weir/``.

    Attributes:
        pattern: its path; parts in braces are any.
        handler: what answers it; None for the OpenAPI document itself.
        query: its parameters.
        statuses: of answers that are no errors; what a handler returns as JSON goes with the first.
        rows: how many rows a list gives where no limit is asked for, ``most`` how many at most.
        asker: who may ask: ``anyone``, whoever has a ``key``, the ``caller`` with its own key, the ``operator``.
    """

    method: str
    pattern: str
    handler: Handler | None
    query: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (200,)
    rows: int = 200
    most: int = MAX_ROWS
    asker: Asker = "key"

    def match(self, path: tuple[str, ...]) -> dict[str, str] | None:
        parts = self.pattern.split("/")
        if len(parts) != len(path):
            return None
        found = {}
        for part, given in zip(parts, path, strict=True):
            if part.startswith("{"):
                found[part.strip("{}")] = given
            elif part != given:
                return None
        return found


_LIST = ("limit", "cursor")
_NARROWED = ("name", "model", "policy", "zone", "key", "closed", *_LIST)
_ONE = "conversations/{id}"
_VERSION = f"{_ONE}/checkpoints/{{version}}"
_POLICY = "policies/{name}"
_R = ManagementRoute

ROUTES = (
    _R("GET", "conversations", conversations.listing, _NARROWED, rows=50),
    _R("GET", _ONE, conversations.one),
    _R("DELETE", _ONE, conversations.delete),
    _R("GET", f"{_ONE}/timeline", conversations.timeline, ("since", *_LIST)),
    _R("GET", f"{_ONE}/requests/{{rid}}", archive.both_sides),
    _R("GET", f"{_ONE}/checkpoint", archive.checkpoint),
    _R("GET", f"{_ONE}/checkpoint.md", archive.checkpoint_markdown),
    _R("GET", f"{_ONE}/checkpoints", archive.checkpoints, _LIST),
    _R("GET", _VERSION, archive.checkpoint_version),
    _R("GET", f"{_VERSION}/source", archive.source, query=("cursor",), asker="caller"),
    _R("GET", f"{_ONE}/removed", archive.removed, _LIST),
    _R("GET", f"{_ONE}/audit", reports.conversation_audit, _LIST),
    _R("GET", f"{_ONE}/health", reports.health_of, ("limit",), rows=KEPT, most=KEPT),
    _R("GET", f"{_ONE}/notes", conversations.notes, _LIST, rows=MAX_ROWS),
    _R("POST", f"{_ONE}/notes", conversations.add_note, statuses=(201, 200)),
    _R("POST", f"{_ONE}/compact", conversations.compact, statuses=(202,)),
    _R("POST", f"{_ONE}/rollback/{{version}}", archive.rollback),
    _R("POST", f"{_ONE}/pin", archive.pin),
    _R("POST", f"{_ONE}/close", conversations.close),
    _R("GET", "blobs/{ref}", archive.blob, query=("cursor",), asker="caller"),
    _R("GET", "search", archive.search, ("q", "conversation", *_LIST), rows=20, asker="caller"),
    _R("GET", "health", reports.health, _LIST),
    _R("GET", "usage", reports.usage, ("since", "by", *_LIST)),
    _R("GET", "series", reports.series, ("metric", "step", "since")),
    _R("GET", "live", reports.live),
    _R("GET", "keys", levers.keys, _LIST, asker="operator"),
    _R("POST", "keys", levers.create_key, statuses=(201,), asker="operator"),
    _R("POST", "keys/{key}/rotate", levers.rotate_key, statuses=(201,), asker="operator"),
    _R("POST", "keys/{key}/limits", levers.limit_key, asker="operator"),
    _R("POST", "keys/{key}/policy", levers.set_key_policy, asker="operator"),
    _R("DELETE", "keys/{key}", levers.revoke_key, asker="operator"),
    _R("GET", "audit", reports.audit, ("type", *_LIST)),
    _R("GET", "policies", levers.policies, _LIST),
    _R("GET", _POLICY, levers.policy),
    _R("PUT", _POLICY, levers.put_policy, statuses=(200, 201), asker="operator"),
    _R("DELETE", _POLICY, levers.delete_policy, asker="operator"),
    _R("GET", "windows", levers.windows, _LIST, asker="operator"),
    _R("POST", "windows/forget", levers.forget_window, asker="operator"),
    _R("GET", "config", levers.config, asker="operator"),
    _R("GET", "openapi.json", None, asker="anyone"),
)
"""Every route there is; the first that matches answers."""


@cache
def document() -> bytes:
    """The OpenAPI document, which says what every route takes and gives."""
    text = (files("proxy.http") / "openapi.json").read_text(encoding="utf-8")
    whole = json.loads(text)
    whole["info"]["version"] = version("weir-proxy")
    return json.dumps(whole, ensure_ascii=False).encode()


READING = frozenset({"GET", "HEAD"})
NOT_KEPT = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
"""Headers of every answer: what is told to one key is kept for nobody else, and shown as what it says that it is."""

Found = list[tuple[ManagementRoute, Mapping[str, str]]]


class Management:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
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
            if answer.stream is not None:
                await respond_live(scope, send, msgspec.structs.replace(answer, headers=headers))
                return
            await respond(send, answer.body, status=answer.status, kind=answer.kind, headers=headers)
            return
        await respond_error(send, error, headers=NOT_KEPT)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive) -> ManagementAnswer:
        headers = credentials_in(scope["headers"])
        refuse_foreign_pages(scope, self._runtime.config, has_key=bool(presented(headers)))
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
            raise error if caller.name is not None else self._runtime.guesses.answer(scope, error)
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
        return answer if isinstance(answer, ManagementAnswer) else as_json(answer, status=route.statuses[0])

    def _caller(self, scope: MutableMapping[str, Any], headers: Mapping[str, str]) -> Caller | None:
        token = self._runtime.config.admin_token
        if token is not None and same_secret(presented(headers), token.get_secret_value()):
            return None
        return identify(scope, self._runtime.keyring, self._runtime.guesses)


def _path(scope: MutableMapping[str, Any]) -> tuple[str, ...]:
    """The parts of the path below ``/weir/``; an escaped slash belongs to a part."""
    raw = scope.get("raw_path")
    whole = raw.decode("latin-1").partition("?")[0] if isinstance(raw, bytes) else scope["path"]
    return tuple(unquote(part) for part in whole.removeprefix(PREFIX).strip("/").split("/"))


def _of_method(method: str, found: Found) -> tuple[ManagementRoute, Mapping[str, str]]:
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
    patterns = [route.pattern.split("/") for route in ROUTES]
    if path[0] == "conversations" and len(path) > 2:
        parts = dict.fromkeys(each[2] for each in patterns if each[0] == "conversations" and len(each) > 2)
        raise NotFound(f"A conversation has no {'/'.join(path[2:])[:40]!r} here: there are {', '.join(parts)}.")
    top = list(dict.fromkeys(each[0] for each in patterns))
    where = "/".join(path)[:80]
    raise NotFound(f"There is nothing at {PREFIX}{where}: there are {', '.join(top[:-1])} and {top[-1]}.")
