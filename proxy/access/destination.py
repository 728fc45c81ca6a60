"""Who asks, and where a request goes: the one place that reads a path, judges a model and chooses an upstream.

:class:`Upstreams` sends nothing without a :class:`Destination`, and no other module makes one: a model that a key may
not use, or the wrong provider, cannot be reached by another spelling of a path, another place for the model, or a route
that somebody adds. (tests/architecture/test_destinations.py)

What is judged must be what the upstream reads, and readers differ: of a key that stands twice some take the first and
some the last, Go's encoding/json takes ``Model`` for ``model``, and every parser of forms is lenient in its own way. So
a body that could be read in two ways is refused.
"""

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import parse_qsl, quote, unquote

import msgspec

from proxy.config.values import Config, ModelRule, UpstreamSettings
from proxy.errors import Forbidden, InvalidRequest, ModelNotAllowed, UnsupportedEncoding
from proxy.wire.codec import ClientRequest
from proxy.wire.raw import Raw, has_repeated_keys, read_value, replace_fields, split_object, write_value

Headers = Sequence[tuple[bytes, bytes]]

MODEL = "model"
_NAMES_MODELS = re.compile(r".*(?:models?|model_list|fallbacks?|deployments?|deployment_(?:id|name))", re.DOTALL)
"""How gateways call a field for another model: OpenRouter's ``models``, LiteLLM's ``context_window_fallbacks`` and
``deployment_id``, Bifrost's ``fallbacks``, Vercel's ``providerOptions.gateway.models``, a tool's ``model``."""
_SAID = frozenset(
    {
        *("messages", "input", "prompt", "instructions", "system", "documents", "metadata", "prediction", "query"),
        *("text", "response_format", "function", "functions", "custom", "parameters", "schema", "json_schema"),
        *("input_schema", "output_schema", "guided_json", "structured_outputs", "format", "properties", "description"),
    }
)
"""What is said to the model, and schemas: there a model is spoken of and not asked for."""
FORM = b"multipart/form-data"
URL_FORM = b"application/x-www-form-urlencoded"
PLAIN = frozenset({b"", b"identity"})

_BOUNDARY = re.compile(
    rb"multipart/form-data\s*;\s*boundary=(\"?)([0-9A-Za-z'()+_,./:=?-]{1,70})\1\s*(?:;\s*charset=\"?utf-8\"?\s*)?",
    re.IGNORECASE,
)
_OTHER_CHARSET = re.compile(rb"charset[*0-9\s]*=\s*(?!\"?utf-?8\"?\s*(?:;|$))", re.IGNORECASE)
_DISPOSITION = re.compile(
    rb"form-data; *name=(?:\"([^\"\\\r\n]+)\"|([0-9A-Za-z_.\[\]-]+))"
    rb"(; *filename\*?=(?:\"[^\"\r\n]*\"|[^\s\";]+))*",
    re.IGNORECASE,
)


TENANT_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One key's owner; ``tenant`` (32 hex digits) separates its conversations from all others.

    ``key`` is the digest of the credential: a rotated key has another one, and the same tenant. ``name`` is None for a
    key that Weir does not know (mode ``open``), ``credential`` what is sent upstream in the client's name.
    """

    tenant: str
    key: str = ""
    name: str | None = None
    policy: str | None = None
    models: tuple[str, ...] = ()
    allow: frozenset[str] = frozenset()
    concurrency: int | None = None
    requests_per_minute: int | None = None
    expires: float | None = None
    credential: bytes = field(default=b"", repr=False)

    @property
    def is_restricted(self) -> bool:
        return bool(self.models) and "*" not in self.models

    @property
    def may_relay(self) -> bool:
        return not self.is_restricted or "relay" in self.allow

    def allows(self, model: str) -> bool:
        return not self.models or any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)

    def require(self, model: str) -> None:
        """ModelNotAllowed; LiteLLM takes several with commas between: each has to be allowed."""
        if self.models and not all(self.allows(each.strip()) for each in model.split(",")):
            raise ModelNotAllowed(f"this key may not use the model {model[:200]!r}", param="model")


def model_in_body(headers: Headers, body: bytes) -> str:
    """The one model that a JSON object or a form names, empty for none.

    Raises InvalidRequest (UnsupportedEncoding where it is compressed) for what cannot be read, or in two ways.
    """
    kind = _kind_of(headers)
    if kind.startswith(FORM):
        return _model_in_form(body, _boundary_of(kind))
    return model_in_object(body, split_object(body))


def model_in_object(body: bytes, fields: Mapping[str, Raw]) -> str:
    _require_one([key for key in fields if key.casefold() == MODEL])
    if has_repeated_keys(body, fields):
        raise InvalidRequest("The request body has a key twice. Readers differ in which of them counts: send one.")
    raw = bytes(fields.get(MODEL, b"null"))
    value = "" if raw == b"null" else read_value(raw)
    if not isinstance(value, str):
        raise InvalidRequest("model must be a string.", param=MODEL)
    return value


class _Pairs(list[tuple[str, object]]): ...


def other_models(fields: Mapping[str, Raw]) -> Iterator[str]:
    """Every model that an object names beside ``model``, at any depth: to fall back to, or for a tool.

    Raises InvalidRequest where that cannot be told.
    """
    for name, raw in fields.items():
        if name != MODEL and name.casefold() not in _SAID:
            yield from _named_in(_Pairs([(name, _pairs_of(raw))]))


def _pairs_of(raw: Raw) -> object:
    try:
        return json.loads(bytes(raw).decode(), object_pairs_hook=_Pairs, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        raise InvalidRequest("The request cannot be read to its end: its models have to be known here.") from None


def _named_in(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, _Pairs):
            waiting += each if isinstance(each, list) else ()
            continue
        for key, inner in each:
            if _names_a_model(key):
                yield from _names_of(key, inner)
            if key.casefold() not in _SAID:
                waiting.append(inner)


def _names_of(field: str, value: object) -> Iterator[str]:
    for each in value if isinstance(value, list) and not isinstance(value, _Pairs) else (value,):
        if isinstance(each, str):
            yield each
        elif isinstance(each, list) and not (isinstance(each, _Pairs) and any(_names_a_model(key) for key, _ in each)):
            text = f"This key may use some models only, and {field[:80]} names them in an unknown way."
            raise InvalidRequest(text, param=field[:80])


def _names_a_model(key: str) -> bool:
    # Go's encoding/json takes Models for models, and a long s for an s.
    return _NAMES_MODELS.fullmatch(key.casefold()) is not None


def with_model(headers: Headers, body: bytes, model: str) -> bytes:
    kind = _kind_of(headers)
    if kind.startswith(FORM):
        field = b'Content-Disposition: form-data; name="model"\r\n\r\n' + model.encode()
        return b"--" + _boundary_of(kind) + b"\r\n" + field + b"\r\n" + body
    return replace_fields(body, split_object(body), {MODEL: write_value(model)})


def is_form(headers: Headers) -> bool:
    return _kind_of(headers).startswith(FORM)


def _kind_of(headers: Headers) -> bytes:
    kinds = [value.strip() for name, value in headers if name == b"content-type"]
    if any(value.strip().lower() not in PLAIN for name, value in headers if name == b"content-encoding"):
        raise UnsupportedEncoding("Send the request body without Content-Encoding: its model has to be read here.")
    if len(kinds) > 1 or any(kind.lower().startswith(URL_FORM) or _OTHER_CHARSET.search(kind) for kind in kinds):
        raise InvalidRequest(
            "Send the request body as JSON in UTF-8 or multipart/form-data: its model has to be read here."
        )
    kind = kinds[0] if kinds else b""
    return FORM + kind[len(FORM) :] if kind.lower().startswith(FORM) else kind


def _boundary_of(kind: bytes) -> bytes:
    found = _BOUNDARY.fullmatch(kind)
    if found is None:
        raise InvalidRequest("The form's boundary cannot be read.")
    return found.group(2)


def _model_in_form(body: bytes, boundary: bytes) -> str:
    mark = b"--" + boundary
    pieces = (b"\r\n" + body).split(b"\r\n" + mark)
    before, parts, after = pieces[0], pieces[1:-1], pieces[-1]
    if before or after not in (b"--", b"--\r\n") or body.count(mark) != len(pieces) - 1:
        raise InvalidRequest("The form cannot be read: its parts do not follow one another as they should.")
    models: list[bytes] = []
    names: list[str] = []
    for part in parts:
        name, value = _field(part)
        if name.casefold() != MODEL and any(_names_a_model(word) for word in re.split(r"[\[\].]", name)):
            raise InvalidRequest(f"A form may not have a field {name[:80]}: its model has to be read here.")
        if name.casefold() == MODEL:
            names.append(name)
            models.append(value)
    _require_one(names)
    if models == [b""]:
        raise InvalidRequest("model is empty.", param=MODEL)
    try:
        return models[0].decode() if models else ""
    except UnicodeDecodeError:
        raise InvalidRequest("model must be a string.", param=MODEL) from None


def _field(part: bytes) -> tuple[str, bytes]:
    head, blank, value = part.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    fields = [line.partition(b":") for line in lines[1:]]
    named = [value.strip() for name, _, value in fields if name.lower() == b"content-disposition"]
    known = {b"content-disposition", b"content-type", b"content-length"}
    odd = not blank or lines[0] or b"\n" in head.replace(b"\r\n", b"") or b"\0" in head
    found = _DISPOSITION.fullmatch(named[0]) if len(named) == 1 else None
    if odd or found is None or any(not colon or name.lower() not in known for name, colon, _ in fields):
        raise InvalidRequest("The form cannot be read: a part has another head than browsers and SDKs write.")
    return (found.group(1) or found.group(2)).decode("utf-8", "replace"), value


def _require_one(names: Sequence[str]) -> None:
    if list(names) not in ([], [MODEL]):
        said = " and ".join(names)
        raise InvalidRequest(f"The request names its model twice, or oddly ({said[:80]}): send one model.", param=MODEL)


CHAT_PATH: Final = "/chat/completions"
EMBEDDINGS_PATH: Final = "/embeddings"
MODELS_PATH: Final = "/models"
Kind = Literal["managed", "counted", "model", "models", "other"]
_NAMING: Mapping[str, Kind] = {
    "chat/completions": "managed",
    "fim/completions": "model",
    "completions": "model",
    "responses/input_tokens": "counted",
    "responses/compact": "counted",
    "responses": "managed",
    "messages/count_tokens": "counted",
    "messages": "managed",
    "embeddings": "model",
    "moderations": "model",
    "images/generations": "model",
    "images/edits": "model",
    "images/variations": "model",
    "audio/speech": "model",
    "audio/transcriptions": "model",
    "audio/translations": "model",
    "videos": "model",
    "rerank": "model",
    "score": "model",
    "pooling": "model",
    "classify": "model",
    "ocr": "model",
}
"""What is asked of the one model that the body names; a longer path stands before what it ends with."""
_IN_PATH = frozenset({"deployments", "engines"})
_PREFIX = re.compile(r"(?:/+v1)+(?=/)|/+openai(?=/+deployments/)")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for.

    ``managed`` is a conversation, ``counted`` one that is only to be measured or summed up; ``model`` is asked of one
    model; ``models`` lists them; ``other`` is the rest: files, batches, stored answers, all that can have models ask or
    tell about other keys' requests. ``path`` stands behind an upstream's base URL, ``model`` stood in the client's
    path.
    """

    kind: Kind
    path: str
    model: str = ""


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    upstream: UpstreamSettings
    path: str
    model: str
    caller: Caller


CHAT: Final = Route(kind="managed", path=CHAT_PATH)
MANAGED: Final = {f"/v1/{n}": Route(kind=kind, path=f"/{n}") for n, kind in _NAMING.items() if kind == "managed"}


def route_of(method: str, target: str) -> Route | None:
    """None where there is none; ``target`` is percent-encoded.

    ``/v1`` may be there twice, slashes may be doubled or stand at the end, and the model may be in the path as in
    ``/openai/deployments/gpt-5/chat/completions`` (Azure) or ``/v1/engines/gpt-5/completions``.
    """
    prefix = _PREFIX.match(target)
    if prefix is None:
        return None
    rest = target[prefix.end() :]
    parts = [part for part in unquote(rest).split("/") if part]
    if method == "POST" and (asked := _asked_of_a_model(parts)) is not None:
        return asked
    if method in ("GET", "HEAD") and parts[:1] == ["models"]:
        model = "/".join(parts[1:])
        return Route(kind="models", path=f"{MODELS_PATH}/{quote(model, safe='/:')}".rstrip("/"), model=model)
    return Route(kind="other", path=rest)


def _asked_of_a_model(parts: list[str]) -> Route | None:
    path = "/".join(parts)
    for name, kind in _NAMING.items():
        if path == name:
            return Route(kind=kind, path=f"/{name}")
        if parts and parts[0] in _IN_PATH and path.endswith(f"/{name}"):
            model = path.removeprefix(f"{parts[0]}/").removesuffix(f"/{name}").strip("/")
            return Route(kind=kind, path=f"/{name}", model=model) if model else None
    return None


def admit(caller: Caller, route: Route) -> None:
    """Forbidden for a key that may use some models only on a route where a model cannot be told."""
    if route.kind == "other" and not caller.may_relay:
        raise Forbidden(
            "This key may use some models only, and what is asked for here names none that could be judged. "
            "The operator can allow it: give the key the permission relay."
        )


def rule_for(rules: Iterable[ModelRule], model: str) -> ModelRule | None:
    return next((rule for rule in rules if fnmatch.fnmatchcase(model, rule.match)), None)


def upstream_for(config: Config, model: str) -> UpstreamSettings:
    rule = rule_for(config.models, model)
    if rule is not None and rule.upstream is not None:
        return config.upstreams[rule.upstream]
    return next(iter(config.upstreams.values()))


def is_decided_by_model(config: Config, caller: Caller, route: Route) -> bool:
    return caller.is_restricted or len(config.upstreams) > 1 or bool(route.model)


def for_managed(
    config: Config, caller: Caller, route: Route, request: ClientRequest, *, query: bytes, headers: Headers = ()
) -> tuple[Destination, ClientRequest]:
    """The destination, and the request naming the model that its path names.

    Raises ModelNotAllowed, and InvalidRequest where the model cannot be told.
    """
    if not is_decided_by_model(config, caller, route):
        return _to(config, caller, route, request.model), request
    if caller.is_restricted and is_form(headers):
        raise InvalidRequest("Send the request body as JSON, with Content-Type: application/json.")
    named = model_in_object(request.body, request.fields)
    model = _agreed(route, "" if route.model else named, query)
    _judge(caller, model, request)
    if model and model != named:
        request = request.codec.parse(with_model((), request.body, model))
    return _to(config, caller, route, model), request


def for_relay(
    config: Config, caller: Caller, route: Route, headers: Headers, body: bytes | None, *, query: bytes
) -> tuple[Destination, bytes | None]:
    """The destination of a request whose body was read, and the body naming its path's model.

    Raises ModelNotAllowed, Forbidden, and InvalidRequest where the model has to be told and cannot.
    """
    admit(caller, route)
    named = ""
    if body:
        try:
            named = model_in_body(headers, body)
        except InvalidRequest:
            # Whoever may relay may send files that name any model; but no conversation goes to a guessed provider.
            if route.kind != "other" or len(config.upstreams) > 1:
                raise
    # Azure's servers take the path's deployment, whatever the body says, and its users call those unlike the model.
    overruled = route.model and body and not is_form(headers)
    model = _agreed(route, "" if overruled else named, query)
    _judge(caller, model, None if not body or is_form(headers) else body)
    if route.model and body and model != named:
        body = with_model(headers, body, model)
    return _to(config, caller, route, model), body


def unread(config: Config, caller: Caller, route: Route, *, model: str = "") -> Destination:
    assert not is_decided_by_model(config, caller, route)  # noqa: S101 - whoever asks has looked
    return _to(config, caller, route, model)


def for_models(config: Config, caller: Caller, route: Route) -> Destination:
    caller.require(route.model)
    return _to(config, caller, route, route.model)


def by_weir(upstream: UpstreamSettings, caller: Caller, *, path: str, model: str) -> Destination:
    return Destination(upstream=upstream, path=_path(upstream, path, model), model=model, caller=caller)


def _judge(caller: Caller, model: str, body: "ClientRequest | bytes | None") -> None:
    if not caller.is_restricted:
        return
    if model:
        caller.require(model)
    if body is None:
        return
    try:
        fields = body.fields if isinstance(body, ClientRequest) else split_object(body)
    except InvalidRequest:
        return
    for each in other_models(fields):
        caller.require(each)


def _agreed(route: Route, named: str, query: bytes) -> str:
    said = parse_qsl(query.decode("latin-1").replace(";", "&")) if query else []
    asked = [value for key, value in said if key.casefold() == "model"]
    models = {model for model in (named, route.model, *asked) if model}
    if len(models) > 1:
        raise InvalidRequest("The request names two models, in its path, its query or its body.", param="model")
    return models.pop() if models else ""


def _to(config: Config, caller: Caller, route: Route, model: str) -> Destination:
    """Once more judged: this is the only way to a destination for a client's request."""
    admit(caller, route)
    if model:
        caller.require(model)
    elif route.kind in ("managed", "counted", "model") and (caller.is_restricted or len(config.upstreams) > 1):
        raise InvalidRequest("The request has to name its model here: it decides who may send it where.", param="model")
    upstream = upstream_for(config, model)
    return Destination(upstream=upstream, path=_path(upstream, route.path, model), model=model, caller=caller)


def _path(upstream: UpstreamSettings, path: str, model: str) -> str:
    named = upstream.has_deployments and model and path.removeprefix("/") in _NAMING
    return f"/deployments/{quote(model, safe='')}{path}" if named else path
