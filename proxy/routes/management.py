"""The management API: what Weir knows of a caller's conversations, the originals of what it removed, and its levers.

A caller sees its own conversations only; for everybody else's it gets the 404 of what does not exist. The admin token
sees and changes all of them, and reads no originals. docs/api.md describes every route of the table below.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from proxy.errors import NotFound, ProxyError
from proxy.intake import ClientGone, Receive
from proxy.keys import credentials_in, presented, same_secret
from proxy.relay import Send
from proxy.routes import alerts, blobs, control, conversations
from proxy.routes.question import Answer, Question, query_of
from proxy.routes.respond import respond, respond_error
from proxy.runtime import Runtime
from proxy.store import StoreError

PREFIX = "/weir/"
READING = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class ManagementRoute:
    """One route below ``/weir/``: parts of the pattern in braces are any, ``query`` are its parameters."""

    method: str
    pattern: str
    answer: Callable[[Question], Awaitable[Answer]]
    query: tuple[str, ...] = ()

    def match(self, path: tuple[str, ...]) -> dict[str, str] | None:
        """The named parts of a path, None where the pattern is another one."""
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


OF_ONE = "conversations/{id}"
ROUTES = (
    ManagementRoute("GET", "conversations", conversations.listing, ("limit", "closed")),
    ManagementRoute("GET", OF_ONE, conversations.one),
    ManagementRoute("DELETE", OF_ONE, control.delete),
    ManagementRoute("GET", f"{OF_ONE}/timeline", conversations.timeline, ("limit",)),
    ManagementRoute("GET", f"{OF_ONE}/checkpoint", conversations.checkpoint),
    ManagementRoute("GET", f"{OF_ONE}/checkpoint.md", conversations.checkpoint_markdown),
    ManagementRoute("GET", f"{OF_ONE}/checkpoints", conversations.checkpoints, ("limit",)),
    ManagementRoute("GET", f"{OF_ONE}/checkpoints/{{version}}", conversations.checkpoint_version),
    ManagementRoute("GET", f"{OF_ONE}/checkpoints/{{version}}/source", conversations.source, ("cursor",)),
    ManagementRoute("GET", f"{OF_ONE}/removed", conversations.removed, ("limit",)),
    ManagementRoute("GET", f"{OF_ONE}/audit", conversations.audit, ("limit",)),
    ManagementRoute("GET", f"{OF_ONE}/health", alerts.health_of, ("limit",)),
    ManagementRoute("GET", f"{OF_ONE}/notes", conversations.notes),
    ManagementRoute("POST", f"{OF_ONE}/notes", control.add_note),
    ManagementRoute("POST", f"{OF_ONE}/compact", control.compact),
    ManagementRoute("POST", f"{OF_ONE}/rollback/{{version}}", control.rollback),
    ManagementRoute("POST", f"{OF_ONE}/pin", control.pin),
    ManagementRoute("POST", f"{OF_ONE}/close", control.close),
    ManagementRoute("GET", "blobs/{ref}", blobs.blob, ("cursor",)),
    ManagementRoute("GET", "health", alerts.health, ("limit",)),
    ManagementRoute("GET", "search", conversations.search, ("q", "conversation", "limit")),
)


class Management:
    """The ASGI application of ``/weir/…``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one question."""
        try:
            answer = await self._answer(scope, receive)
        except StoreError as error:
            await respond_error(send, ProxyError(f"The store cannot do this now: {type(error).__name__}. Try again."))
        except ProxyError as error:
            await respond_error(send, error)
        except ClientGone:
            return
        else:
            await respond(send, answer.body, status=answer.status, kind=answer.kind, headers=answer.headers)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive) -> Answer:
        tenant = self._tenant(scope)
        route, named = _find(scope["method"], _path(scope))
        question = Question(
            runtime=self._runtime,
            tenant=tenant,
            path=named,
            query=query_of(scope.get("query_string", b""), route.query),
            receive=receive,
        )
        if not self._runtime.settler.failing:
            await self._runtime.settler.flush()  # what was answered a moment ago is there to be asked for
        return await route.answer(question)

    def _tenant(self, scope: MutableMapping[str, Any]) -> str | None:
        """The tenant that asks, None for the operator with the admin token."""
        headers = credentials_in(scope["headers"])
        token = self._runtime.config.admin_token
        if token is not None and same_secret(presented(headers), token.get_secret_value()):
            return None
        return self._runtime.keyring.identify(headers).tenant


def _path(scope: MutableMapping[str, Any]) -> tuple[str, ...]:
    """The parts of the path below ``/weir/``; an escaped slash belongs to a part."""
    raw = scope.get("raw_path")
    whole = raw.decode("latin-1").partition("?")[0] if isinstance(raw, bytes) else scope["path"]
    return tuple(unquote(part) for part in whole.removeprefix(PREFIX).strip("/").split("/"))


def _find(method: str, path: tuple[str, ...]) -> tuple[ManagementRoute, Mapping[str, str]]:
    """The route of a path, and its named parts. Raises NotFound that says what there is."""
    asked = "GET" if method in READING else method
    found = [(route, named) for route in ROUTES if (named := route.match(path)) is not None]
    for route, named in found:
        if route.method == asked:
            return route, named
    if found:
        there = " and ".join(route.method for route, _ in found)
        raise NotFound(f"{method[:10]} is not answered at {PREFIX}{found[0][0].pattern}: {there} is.")
    where = "/".join(path)[:80]
    if path[0] == "conversations" and len(path) > 2:
        parts = dict.fromkeys(route.pattern.split("/")[2] for route in ROUTES if route.pattern.startswith(f"{OF_ONE}/"))
        raise NotFound(f"A conversation has no {'/'.join(path[2:])[:40]!r} here: there are {', '.join(parts)}.")
    top = dict.fromkeys(route.pattern.split("/")[0] for route in ROUTES)
    raise NotFound(f"There is nothing at {PREFIX}{where}: there are {', '.join(top)} and policies.")
