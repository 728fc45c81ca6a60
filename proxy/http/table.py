"""The management API: what Weir knows of a caller's conversations, the originals of what it removed, and its levers.

One table says what is routed, who may ask, and what the OpenAPI document says of it. A caller sees its own
conversations only; for everybody else's it gets the 404 of what does not exist. The admin token sees and changes all of
them, and reads no originals. docs/api.md describes every route of the table. The document names no conversation, key or
policy of this installation, so it is given to anybody who asks: a client or a gateway reads it before it has a key.
"""

import asyncio
import dataclasses
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import cache
from importlib.metadata import version
from types import UnionType
from typing import Any, Literal, get_args
from urllib.parse import unquote

import msgspec

from policies.health import KEPT
from proxy.access.admission import credentials_in, identify, presented, refuse_foreign_pages, same_secret
from proxy.access.destination import Caller
from proxy.errors import Conflict, Forbidden, MethodNotAllowed, NotFound, ProxyError
from proxy.http import archive, conversations, levers, reports
from proxy.http.request import (
    MAX_BODY,
    MAX_DIGITS,
    MAX_ROWS,
    ZONES,
    Error,
    ManagementAnswer,
    ManagementRequest,
    as_json,
    query_of,
    respond,
    respond_error,
    respond_live,
)
from proxy.runtime import Runtime
from proxy.store.chain import AuditType
from proxy.store.exchanges import By
from proxy.store.records import StaleVersion, StoreError
from proxy.stream import ClientGone, Receive, Send

PREFIX = "/weir/"
Asker = Literal["anyone", "key", "caller", "operator"]
Handler = Callable[[ManagementRequest], Awaitable[ManagementAnswer | msgspec.Struct]]


class ManagementRoute(msgspec.Struct, frozen=True):
    """One route below ``/weir/``.

    Attributes:
        pattern: its path; parts in braces are any.
        handler: what answers it, its docstring the text of the document, what it returns the shape of the answer; None
            for the OpenAPI document itself.
        query: its parameters.
        takes: the shape of the body, None where there is none; ``yaml`` for a policy.
        statuses: of answers that are no errors; what a handler returns as a shape goes with the first.
        rows: how many rows a list gives where no limit is asked for, ``most`` how many at most.
        asker: who may ask: ``anyone``, whoever has a ``key``, the ``caller`` with its own key, the ``operator``.
    """

    method: str
    pattern: str
    handler: Handler | None
    query: tuple[str, ...] = ()
    takes: object = None
    statuses: tuple[int, ...] = (200,)
    kind: Literal["json", "markdown", "pages", "text", "events"] = "json"
    rows: int = 200
    most: int = MAX_ROWS
    asker: Asker = "key"

    @property
    def gives(self) -> object:
        """The shape of its JSON; None for an answer of another ``kind``."""
        said = dict if self.handler is None else inspect.signature(self.handler).return_annotation
        shapes = get_args(said) if isinstance(said, UnionType) else (said,)
        return next((each for each in shapes if each is not ManagementAnswer), None)

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
    _R("GET", f"{_ONE}/checkpoint.md", archive.checkpoint_markdown, kind="markdown"),
    _R("GET", f"{_ONE}/checkpoints", archive.checkpoints, _LIST),
    _R("GET", _VERSION, archive.checkpoint_version),
    _R("GET", f"{_VERSION}/source", archive.source, query=("cursor",), kind="pages", asker="caller"),
    _R("GET", f"{_ONE}/removed", archive.removed, _LIST),
    _R("GET", f"{_ONE}/audit", reports.conversation_audit, _LIST),
    _R("GET", f"{_ONE}/health", reports.health_of, ("limit",), rows=KEPT, most=KEPT),
    _R("GET", f"{_ONE}/notes", conversations.notes, _LIST, rows=MAX_ROWS),
    _R("POST", f"{_ONE}/notes", conversations.add_note, takes=conversations.NewNote, statuses=(201, 200)),
    _R("POST", f"{_ONE}/compact", conversations.compact, statuses=(202,)),
    _R("POST", f"{_ONE}/rollback/{{version}}", archive.rollback),
    _R("POST", f"{_ONE}/pin", archive.pin, takes=archive.Pin),
    _R("POST", f"{_ONE}/close", conversations.close),
    _R("GET", "blobs/{ref}", archive.blob, query=("cursor",), kind="text", asker="caller"),
    _R("GET", "search", archive.search, ("q", "conversation", *_LIST), rows=20, asker="caller"),
    _R("GET", "health", reports.health, _LIST),
    _R("GET", "usage", reports.usage, ("since", "by", *_LIST)),
    _R("GET", "series", reports.series, ("metric", "step", "since")),
    _R("GET", "live", reports.live, kind="events"),
    _R("GET", "keys", levers.keys, _LIST, asker="operator"),
    _R("POST", "keys", levers.create_key, takes=levers.NewKey, statuses=(201,), asker="operator"),
    _R("POST", "keys/{key}/rotate", levers.rotate_key, statuses=(201,), asker="operator"),
    _R("POST", "keys/{key}/limits", levers.limit_key, takes=levers.NewLimits, asker="operator"),
    _R("POST", "keys/{key}/policy", levers.set_key_policy, takes=levers.NewKeyPolicy, asker="operator"),
    _R("DELETE", "keys/{key}", levers.revoke_key, asker="operator"),
    _R("GET", "audit", reports.audit, ("type", *_LIST)),
    _R("GET", "policies", levers.policies, _LIST),
    _R("GET", _POLICY, levers.policy),
    _R("PUT", _POLICY, levers.put_policy, takes="yaml", statuses=(200, 201), asker="operator"),
    _R("DELETE", _POLICY, levers.delete_policy, asker="operator"),
    _R("GET", "windows", levers.windows, _LIST, asker="operator"),
    _R("POST", "windows/forget", levers.forget_window, takes=levers.Scope, asker="operator"),
    _R("GET", "config", levers.config, asker="operator"),
    _R("GET", "openapi.json", None, asker="anyone"),
)
"""Every route there is; the first that matches answers."""


REQUIRED = frozenset({"q", "metric"})
IN_BYTES = frozenset({"pages", "text"})  # kinds of answers whose cursor counts bytes
TEXTS = {"markdown": "text/markdown", "events": "text/event-stream"}
REF = "#/components/schemas/{name}"
JSON = "application/json"
YAML = "application/yaml"

Schema = dict[str, Any]

PARAMETERS: Mapping[str, tuple[Schema, str]] = {
    "closed": ({"type": "boolean"}, "Only conversations that were closed, or were not."),
    "cursor": ({"type": "string", "maxLength": 1024}, "The next of the page before."),
    "since": (
        {"type": "string", "pattern": r"^([0-9]{1,6}[smhd]|[0-9]{1,12}(\.[0-9]{1,9})?)$"},
        "Only what is newer: seconds since 1970, or how long ago, like 90m, 24h or 7d.",
    ),
    "by": ({"type": "string", "enum": list(get_args(By))}, "What to tell apart beside keys."),
    "name": ({"type": "string", "maxLength": 256}, "Only conversations with this in their name."),
    "model": ({"type": "string", "maxLength": 256}, "Only conversations of this model."),
    "policy": ({"type": "string", "maxLength": 256}, "Only conversations whose newest request had this policy."),
    "zone": ({"type": "string", "enum": list(ZONES)}, "Only conversations in this zone."),
    "key": ({"type": "string", "maxLength": 256}, "Only conversations of this key, by its name or tenant."),
    "metric": ({"type": "string", "enum": list(reports.METRICS)}, "What to tell."),
    "step": ({"type": "string", "enum": list(reports.STEPS), "default": "1h"}, "How long each step is."),
    "type": ({"type": "string", "enum": [str(each) for each in AuditType]}, "Only this kind of row."),
    "q": ({"type": "string", "minLength": 1, "maxLength": 1000}, "The words to search for."),
    "conversation": ({"type": "string", "maxLength": 256}, "Only what was removed from this conversation."),
}
IN_PATH: Mapping[str, tuple[Schema, str]] = {
    "id": ({"type": "string", "minLength": 1, "maxLength": 256}, "The name or id of a conversation."),
    "version": ({"type": "integer", "minimum": 0, "maximum": 999_999_999}, "A version of the conversation."),
    "ref": (
        {"type": "string", "minLength": 1, "maxLength": 104},
        "The key of an original; with .txt behind it only what it says.",
    ),
    "rid": ({"type": "string", "minLength": 1, "maxLength": 100}, "The id of a request, as the timeline has it."),
    "key": ({"type": "string", "minLength": 1, "maxLength": 100}, "The name of a key."),
    "name": ({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}, "The name of a policy."),
}
PAGE_HEADERS: Mapping[str, tuple[Schema, str]] = {
    "x-weir-size": ({"type": "integer", "minimum": 0}, "Bytes of the whole."),
    "x-weir-sha256": ({"type": "string", "pattern": "^[0-9a-f]{64}$"}, "SHA-256 of the whole."),
    "x-weir-end": ({"type": "boolean"}, "Whether this is the last page."),
    "x-weir-cursor": ({"type": "integer", "minimum": 0}, "Where the next page begins; not there on the last."),
}
FAULTS: Mapping[int, str] = {
    400: "A parameter, a field or the body is wrong; the message says what there is.",
    401: "No key, or one that is not known.",
    403: "Not for this key, or not for a web page of another origin.",
    404: "There is no such thing, or it is another caller's.",
    409: "A request of the same conversation came first; try again.",
    413: "The body is too large.",
    429: "Too many wrong keys came from this address; Retry-After says how long to wait.",
    500: "The database cannot be read or written now; try again.",
}


@cache
def document() -> bytes:
    shapes = {id(route): route.gives for route in ROUTES if route.gives is not None and route.gives is not dict}
    taken = {id(route): route.takes for route in ROUTES if not isinstance(route.takes, str | None)}
    types = [*shapes.values(), *taken.values(), Error]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    known = {id(each): schema for each, schema in zip(types, schemas, strict=True)}
    records = {each.__name__: each for each in types_in(types) if is_record(each)}
    for name, component in components.items():
        _close(component, records.get(name))
    paths: dict[str, dict[str, Schema]] = {}
    for route in ROUTES:
        operation = _operation(route, known)
        paths.setdefault(PREFIX + route.pattern, {})[route.method.lower()] = operation
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "Weir's management API",
            "version": version("weir-proxy"),
            "description": "What Weir knows of conversations, the originals of what it removed, and its levers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}, {"x-api-key": []}, {"api-key": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _security()},
    }
    return json.dumps(whole, ensure_ascii=False).encode()


def is_record(shape: type) -> bool:
    """Whether it is a value of which every field is told, as a row is told whole."""
    return dataclasses.is_dataclass(shape) or shape.__module__.startswith("proxy.store.")


def types_in(shapes: Iterable[object]) -> Iterable[type]:
    seen: set[int] = set()
    waiting = list(shapes)
    while waiting:
        shape = waiting.pop()
        if id(shape) in seen:
            continue
        seen.add(id(shape))
        waiting += get_args(shape)
        origin = getattr(shape, "__origin__", shape)
        if isinstance(origin, type):
            yield origin
            waiting += inspect.get_annotations(origin, eval_str=True).values()


def _close(schema: Schema, record: type | None) -> None:
    """Have an object hold what is listed and nothing else; of a record's fields all are always there."""
    if "properties" in schema:
        schema["additionalProperties"] = False
        if record is not None:
            schema["required"] = list(schema["properties"])
    if record is not None or not schema.get("description", "x"):
        schema.pop("description", None)


def _operation(route: ManagementRoute, known: Mapping[int, Schema]) -> Schema:
    summary, _, more = _text(route)
    operation: Schema = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"[a-z]+", route.pattern)]),
        "summary": summary,
        "tags": [route.pattern.split("/")[0]],
        "parameters": _parameters(route),
        "responses": {str(status): _answer(route, status, known) for status in route.statuses},
    }
    if more:
        operation["description"] = more
    if route.takes is not None:
        operation["requestBody"] = _body(route, known)
    for status in _faults_of(route):
        content = {JSON: {"schema": known[id(Error)]}}
        operation["responses"][str(status)] = {"description": FAULTS[status], "content": content}
    if route.asker == "operator":
        operation["security"] = [{"admin": []}]
    elif route.asker == "anyone":
        operation["security"] = []
    elif route.asker == "key":
        operation["security"] = [{"key": []}, {"x-api-key": []}, {"api-key": []}, {"admin": []}]
    return operation


def _text(route: ManagementRoute) -> tuple[str, str, str]:
    told = inspect.getdoc(route.handler) if route.handler is not None else None
    said = " ".join((told or "This document.").replace("``", "").split())
    return re.sub(r"\.( |$)", "\0", said, count=1).partition("\0")


def _parameters(route: ManagementRoute) -> list[Schema]:
    found = [("path", name, True, *IN_PATH[name]) for name in re.findall(r"{(\w+)}", route.pattern)]
    for name in route.query:
        if name == "limit":
            schema: Schema = {"type": "integer", "minimum": 1, "default": route.rows}
            said = f"How many rows; at most {route.most} are given."
        elif name == "cursor" and route.kind in IN_BYTES:
            schema = {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1, "default": 0}
            said = "Where the page begins, in bytes."
        else:
            schema, said = PARAMETERS[name]
        found.append(("query", name, name in REQUIRED, schema, said))
    return [
        {"name": name, "in": place, "required": required, "schema": schema, "description": said}
        for place, name, required, schema, said in found
    ]


def _answer(route: ManagementRoute, status: int, known: Mapping[int, Schema]) -> Schema:
    said = {200: "What was asked for.", 201: "It was made.", 202: "It was noted."}[status]
    if route.kind in TEXTS:
        return {"description": said, "content": {TEXTS[route.kind]: {"schema": {"type": "string"}}}}
    if route.kind in IN_BYTES:
        headers = {
            name: {"schema": schema, "description": text, "required": name != "x-weir-cursor"}
            for name, (schema, text) in PAGE_HEADERS.items()
        }
        part = {"schema": {"description": "a part of a JSON document; all pages together are one"}}
        content: Schema = {JSON: part}
        if route.kind == "text":
            content["text/plain"] = {"schema": {"type": "string"}}
        return {"description": "A page of at most 64 KiB.", "headers": headers, "content": content}
    schema = {"type": "object"} if route.gives is dict else known[id(route.gives)]
    return {"description": said, "content": {JSON: {"schema": schema}}}


def _body(route: ManagementRoute, known: Mapping[int, Schema]) -> Schema:
    if route.takes == "yaml":
        content: Schema = {YAML: {"schema": {"type": "string"}}, JSON: {"schema": {"type": "object"}}}
        return {"required": True, "content": content, "description": "The policy; see docs/policies.md."}
    said = f"At most {MAX_BODY // 1024} KiB."
    return {"required": True, "content": {JSON: {"schema": known[id(route.takes)]}}, "description": said}


def _faults_of(route: ManagementRoute) -> list[int]:
    if route.asker == "anyone":
        return [400, 403]
    found = [400, 401, 403, 404, 429, 500]
    if route.method in {"POST", "PUT"}:
        found.append(413)
    if route.method == "POST":
        found.append(409)
    return sorted(found)


def _security() -> Schema:
    key = "The key that requests to /v1 are sent with; it sees its own conversations."
    return {
        "key": {"type": "http", "scheme": "bearer", "description": key},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": key},
        "api-key": {"type": "apiKey", "in": "header", "name": "api-key", "description": key},
        "admin": {
            "type": "http",
            "scheme": "bearer",
            "description": "auth.admin_token of the configuration; it sees every conversation and no originals.",
        },
    }


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
