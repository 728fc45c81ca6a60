"""The OpenAPI document of the management API, made of its table of routes and the shapes of its answers.

It names no conversation, key or policy of this installation, so it is given to anybody who asks: a client or a gateway
reads it before it has a key.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, get_args

import msgspec

from proxy.http.request import MAX_BODY, MAX_DIGITS
from proxy.http.shape import Error
from proxy.http.table import PREFIX, ROUTES, ManagementRoute
from proxy.store.chain import AuditType
from proxy.store.exchanges import By

IN_BYTES = frozenset({"pages", "text"})  # kinds of answers whose cursor counts bytes
REF = "#/components/schemas/{name}"
JSON = "application/json"
YAML = "application/yaml"

Schema = dict[str, Any]

PARAMETERS: Mapping[str, tuple[Schema, str]] = MappingProxyType(
    {
        "closed": ({"type": "boolean"}, "Only conversations that were closed, or were not."),
        "cursor": ({"type": "string", "maxLength": 1024}, "The next of the page before."),
        "since": (
            {"type": "string", "pattern": r"^([0-9]{1,6}[smhd]|[0-9]{1,12}(\.[0-9]{1,9})?)$"},
            "Only what is newer: seconds since 1970, or how long ago, like 90m, 24h or 7d.",
        ),
        "by": ({"type": "string", "enum": list(get_args(By))}, "What to tell apart beside keys."),
        "type": ({"type": "string", "enum": [str(each) for each in AuditType]}, "Only this kind of row."),
        "q": ({"type": "string", "minLength": 1, "maxLength": 1000}, "The words to search for."),
        "conversation": ({"type": "string", "maxLength": 256}, "Only what was removed from this conversation."),
    }
)
IN_PATH: Mapping[str, tuple[Schema, str]] = MappingProxyType(
    {
        "id": ({"type": "string", "minLength": 1, "maxLength": 256}, "The name or id of a conversation."),
        "version": ({"type": "integer", "minimum": 0, "maximum": 999_999_999}, "A version of the conversation."),
        "ref": (
            {"type": "string", "minLength": 1, "maxLength": 104},
            "The key of an original; with .txt behind it only what it says.",
        ),
        "name": ({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}, "The name of a policy."),
    }
)
PAGE_HEADERS: Mapping[str, tuple[Schema, str]] = MappingProxyType(
    {
        "x-weir-size": ({"type": "integer", "minimum": 0}, "Bytes of the whole."),
        "x-weir-sha256": ({"type": "string", "pattern": "^[0-9a-f]{64}$"}, "SHA-256 of the whole."),
        "x-weir-end": ({"type": "boolean"}, "Whether this is the last page."),
        "x-weir-cursor": ({"type": "integer", "minimum": 0}, "Where the next page begins; not there on the last."),
    }
)
FAULTS: Mapping[int, str] = MappingProxyType(
    {
        400: "A parameter, a field or the body is wrong; the message says what there is.",
        401: "No key, or one that is not known.",
        403: "Not for this key, or not for a web page of another origin.",
        404: "There is no such thing, or it is another caller's.",
        409: "A request of the same conversation came first; try again.",
        413: "The body is too large.",
        429: "Too many wrong keys came from this address; Retry-After says how long to wait.",
        500: "The database cannot be read or written now; try again.",
    }
)


@cache
def document() -> bytes:
    """The document as JSON."""
    shapes = {id(route): route.gives for route in ROUTES if route.gives is not None and route.gives is not dict}
    taken = {id(route): route.takes for route in ROUTES if not isinstance(route.takes, str | None)}
    types = [*shapes.values(), *taken.values(), Error]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    known = {id(each): schema for each, schema in zip(types, schemas, strict=True)}
    records = {each.__name__: each for each in types_in(types) if dataclasses.is_dataclass(each)}
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


def types_in(shapes: Iterable[object]) -> Iterable[type]:
    """Every class that the shapes are made of."""
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
        "operationId": _name_of(route),
        "summary": summary,
        "tags": [route.pattern.split("/")[0]],
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
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


def _name_of(route: ManagementRoute) -> str:
    words = re.findall(r"[a-z]+", route.pattern)
    return "_".join([route.method.lower(), *words])


def _path_parameters(route: ManagementRoute) -> list[Schema]:
    named = re.findall(r"{(\w+)}", route.pattern)
    return [
        {"name": name, "in": "path", "required": True, "schema": IN_PATH[name][0], "description": IN_PATH[name][1]}
        for name in named
    ]


def _query_parameters(route: ManagementRoute) -> list[Schema]:
    found = []
    for name in route.query:
        if name == "limit":
            schema: Schema = {"type": "integer", "minimum": 1, "default": route.rows}
            said = f"How many rows; at most {route.most} are given."
        elif name == "cursor" and route.kind in IN_BYTES:
            schema = {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1, "default": 0}
            said = "Where the page begins, in bytes."
        else:
            schema, said = PARAMETERS[name]
        found.append({"name": name, "in": "query", "required": name == "q", "schema": schema, "description": said})
    return found


def _answer(route: ManagementRoute, status: int, known: Mapping[int, Schema]) -> Schema:
    said = {200: "What was asked for.", 201: "It was made.", 202: "It was noted."}[status]
    if route.kind == "markdown":
        return {"description": said, "content": {"text/markdown": {"schema": {"type": "string"}}}}
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
