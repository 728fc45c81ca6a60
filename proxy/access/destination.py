"""Who sends a request, and where it goes: the one place that reads a path, judges a model and
chooses an upstream.

:class:`Upstreams` sends nothing without a :class:`Destination`, and no other module makes one: a
model that a key may not use, or the wrong provider, cannot be reached by another spelling of a path
or a newly added route. (tests/architecture/test_destinations.py)

A key with ``models`` gets the routes whose one model is read here as the upstream reads it, from a
JSON object: the managed ones, lists of models, and embeddings. All else needs the permission
``relay``, and nothing in it is judged but a model that it plainly names.
"""

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import parse_qsl, quote, unquote

import msgspec

from proxy.config.budgets import Budget, TeamSettings
from proxy.config.values import Config, ModelRule, UpstreamSettings
from proxy.errors import Forbidden, InvalidRequest, ModelNotAllowed
from proxy.wire.codec import ClientRequest
from proxy.wire.raw import (
    Raw,
    has_repeated_keys,
    read_value,
    replace_fields,
    split_object,
    write_value,
)

Headers = Sequence[tuple[bytes, bytes]]

MODEL = "model"
_NAMES_MODELS = re.compile(
    r".*(?:models?|model_list|fallbacks?|deployments?|deployment_(?:id|name))", re.DOTALL
)
"""How gateways call a field for another model: OpenRouter's ``models``, LiteLLM's
``context_window_fallbacks`` and ``deployment_id``, Bifrost's ``fallbacks``, Vercel's
``providerOptions.gateway.models``, a tool's ``model``.
"""
_SAID = frozenset(
    {
        *(
            "messages",
            "input",
            "prompt",
            "instructions",
            "system",
            "documents",
            "metadata",
            "prediction",
            "query",
        ),
        *(
            "text",
            "response_format",
            "function",
            "functions",
            "custom",
            "parameters",
            "schema",
            "json_schema",
        ),
        *(
            "input_schema",
            "output_schema",
            "guided_json",
            "structured_outputs",
            "format",
            "properties",
            "description",
        ),
    }
)
"""What is said to the model, and schemas: there a model is mentioned and not requested."""
FORM = b"multipart/form-data"
_FORM_MODEL = re.compile(
    rb"content-disposition: *form-data; *name=\"?model\"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)",
    re.IGNORECASE,
)
_NO_JSON = re.compile(
    rb"multipart/form-data.*|application/x-www-form-urlencoded.*"
    rb"|.*charset[*0-9\s]*=\s*(?!\"?utf-?8\"?\s*(?:;|$)).*",
    re.IGNORECASE | re.DOTALL,
)


TENANT_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One key's owner; ``tenant`` (32 hex digits) separates its conversations from all others.

    ``key`` is the digest of the credential: a rotated key has another one, and the same tenant.
    ``name`` is None for a key that Weir does not know (mode ``open``), ``credential`` what is sent
    upstream in the client's name.

    ``account`` is the tenant that a known key has by itself, whatever ``auth.tenant`` makes of its
    requests: its usage is added up under that. ``team_rules`` are its team's, ``is_counted`` says
      that a request's usage is checked before it goes up.
    """

    tenant: str
    key: str = ""
    name: str | None = None
    policy: str | None = None
    models: tuple[str, ...] = ()
    allow: frozenset[str] = frozenset()
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    expires: float | None = None
    account: str = ""
    team: str = ""
    budgets: tuple[Budget, ...] = ()
    team_rules: TeamSettings | None = None
    is_counted: bool = False
    credential: bytes = field(default=b"", repr=False)

    @property
    def has_budget(self) -> bool:
        return bool(self.budgets or (self.team_rules is not None and self.team_rules.budgets))

    @property
    def counts_dollars(self) -> bool:
        budgets = (*self.budgets, *(self.team_rules.budgets if self.team_rules is not None else ()))
        return any(budget.dollars is not None for budget in budgets)

    @property
    def is_restricted(self) -> bool:
        return bool(self.models) and "*" not in self.models

    @property
    def may_relay(self) -> bool:
        return not self.is_restricted or "relay" in self.allow

    def allows(self, model: str) -> bool:
        return not self.models or any(
            fnmatch.fnmatchcase(model, pattern) for pattern in self.models
        )

    def require(self, model: str) -> None:
        """ModelNotAllowed; LiteLLM takes several with commas between: each has to be allowed."""
        if self.models and not all(self.allows(each.strip()) for each in model.split(",")):
            raise ModelNotAllowed(f"this key may not use the model {model[:200]!r}", param="model")


def _model_in_object(body: bytes, fields: Mapping[str, Raw]) -> str:
    """The one model that a JSON object names, empty for none; InvalidRequest where it could be read
    in two ways.

    If a key occurs twice, some readers take the first and some the last, and Go's encoding/json
    takes ``Model`` for ``model``.
    """
    names = [key for key in fields if key.casefold() == MODEL]
    if names not in ([], [MODEL]) or has_repeated_keys(body, fields):
        raise InvalidRequest(
            "The request has a key twice, or names its model oddly: send one model.", param=MODEL
        )
    raw = bytes(fields.get(MODEL, b"null"))
    value = "" if raw == b"null" else read_value(raw)
    if not isinstance(value, str):
        raise InvalidRequest("model must be a string.", param=MODEL)
    return value


def _model_in_body(headers: Headers, body: bytes) -> str:
    if not is_form(headers):
        return _model_in_object(body, split_object(body))
    named = {model.decode("utf-8", "replace") for model in _FORM_MODEL.findall(body)}
    if len(named) > 1:
        raise InvalidRequest("The form names two models.", param=MODEL)
    return "".join(named)


def _require_others(caller: Caller, headers: Headers, fields: Mapping[str, Raw]) -> None:
    """ModelNotAllowed for a model that a body names in addition to its own: to fall back to, or for
    a tool, at any depth.

    InvalidRequest where that cannot be known.
    """
    kinds = _values(headers, b"content-type")
    if len(kinds) > 1 or any(_NO_JSON.fullmatch(kind.strip()) for kind in kinds):
        raise InvalidRequest(
            "Send the request body as JSON in UTF-8, with Content-Type: application/json."
        )
    for name, raw in fields.items():
        if name == MODEL or name.casefold() in _SAID:
            continue
        try:
            value = json.loads(
                bytes(raw).decode(), object_pairs_hook=_once, parse_int=len, parse_float=len
            )
            named = [*_named_in({name: value})]
        except (ValueError, RecursionError):
            raise InvalidRequest(
                f"{name[:80]} cannot be read, and may name a model.", param=name[:80]
            ) from None
        for each in named:
            caller.require(each)


def _refuse_in_query(query: bytes) -> None:
    if any(name.casefold() == MODEL for name, _ in parse_qsl(query.decode("latin-1"))):
        raise InvalidRequest("Name the model in the body and not in the query.", param=MODEL)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _named_in(value: object, *, names: bool = False) -> Iterator[str]:
    """Every text in a value's fields that are named like a model's; in ``names`` all texts are."""
    if isinstance(value, str) and names:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _named_in(each, names=names)
    elif isinstance(value, dict):
        # Go's encoding/json takes Models for models; next to a model's own name are its options
        named = {key for key in value if _NAMES_MODELS.fullmatch(key.casefold())}
        for key, inner in value.items():
            if key.casefold() not in _SAID or key in named:
                yield from _named_in(inner, names=key in named or (names and not named))


def is_form(headers: Headers) -> bool:
    return any(kind.strip().lower().startswith(FORM) for kind in _values(headers, b"content-type"))


def _values(headers: Headers, wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


def _with_model(body: bytes, model: str) -> bytes:
    return replace_fields(body, split_object(body), {MODEL: write_value(model)})


CHAT_PATH: Final = "/chat/completions"
EMBEDDINGS_PATH: Final = "/embeddings"
MODELS_PATH: Final = "/models"
Kind = Literal["managed", "counted", "model", "models", "other"]
_NAMING: Mapping[str, Kind] = {
    **dict.fromkeys(("chat/completions", "responses", "messages"), "managed"),
    **dict.fromkeys(
        ("responses/input_tokens", "responses/compact", "messages/count_tokens"), "counted"
    ),
    **dict.fromkeys(
        (
            *(
                "embeddings",
                "fim/completions",
                "completions",
                "moderations",
                "rerank",
                "score",
                "pooling",
                "classify",
            ),
            *("images/generations", "images/edits", "images/variations", "videos", "ocr"),
            *("audio/speech", "audio/transcriptions", "audio/translations"),
        ),
        "model",
    ),
}
"""What is requested from the one model that the body names; a longer path precedes its own suffix.
"""
_IN_PATH = frozenset({"deployments", "engines"})
_PREFIX = re.compile(r"(?:/+v1)+(?=/)|/+openai(?=/+deployments/)")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is for.

    ``managed`` is a conversation, ``counted`` one that is only to be measured or summed up;
    ``model`` goes to one model; ``models`` lists them; ``other`` is the rest: files, batches,
    stored answers, everything that can call models or reveal other keys' requests. ``path`` follows
    an upstream's base URL, ``model`` was in the client's path.
    """

    kind: Kind
    path: str
    model: str = ""

    @property
    def embeds(self) -> bool:
        return self.kind == "model" and self.path == EMBEDDINGS_PATH


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    upstream: UpstreamSettings
    path: str
    model: str
    caller: Caller


CHAT: Final = Route(kind="managed", path=CHAT_PATH)
MANAGED: Final = {
    f"/v1/{n}": Route(kind=kind, path=f"/{n}") for n, kind in _NAMING.items() if kind == "managed"
}


def route_of(method: str, target: str) -> Route | None:
    """None where there is none; ``target`` is percent-encoded.

    ``/v1`` may be there twice, slashes may be doubled or trailing, and the model may be in the path
    as in ``/openai/deployments/gpt-5/chat/completions`` (Azure) or
    ``/v1/engines/gpt-5/completions``.
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
        return Route(
            kind="models", path=f"{MODELS_PATH}/{quote(model, safe='/:')}".rstrip("/"), model=model
        )
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
    """Forbidden for a key with ``models`` on a route whose model is not read here, unless it may
    relay.
    """
    if (
        not caller.may_relay
        and route.kind not in ("managed", "counted", "models")
        and not route.embeds
    ):
        raise Forbidden(
            "This key may use some models only: chat completions, responses, messages, embeddings"
            " and models. The operator can allow all other routes: give the key the permission"
            " relay."
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
    config: Config,
    caller: Caller,
    route: Route,
    request: ClientRequest,
    *,
    headers: Headers = (),
    query: bytes = b"",
) -> tuple[Destination, ClientRequest]:
    """The destination, and the request naming the model that its path names.

    Raises ModelNotAllowed, and InvalidRequest where the model cannot be determined.
    """
    if not is_decided_by_model(config, caller, route):
        return _to(config, caller, route, request.model), request
    named = _model_in_object(request.body, request.fields)
    if caller.is_restricted:
        _require_others(caller, headers, request.fields)
        _refuse_in_query(query)
    model = route.model or named
    if model != named:
        request = request.codec.parse(_with_model(request.body, model))
    return _to(config, caller, route, model), request


def for_fallback(
    config: Config, caller: Caller, route: Route, request: ClientRequest, model: str
) -> tuple[Destination, ClientRequest]:
    """The destination of a request that another model is to answer, and the request naming it.

    Raises ModelNotAllowed.
    """
    destination = _to(config, caller, route, model)
    return destination, request.codec.parse(_with_model(request.body, model))


def for_relay(
    config: Config,
    caller: Caller,
    route: Route,
    headers: Headers,
    body: bytes | None,
    *,
    query: bytes = b"",
) -> tuple[Destination, bytes | None]:
    """The destination of a request whose body was read, and the body naming its path's model.

    Raises ModelNotAllowed, Forbidden, and InvalidRequest where the model is needed and cannot be
    determined.
    """
    admit(caller, route)
    named = ""
    if body:
        try:
            named = _model_in_body(headers, body)
        except InvalidRequest:
            # A key that may relay may send files that name any model; but no conversation goes to a
            # guessed provider.
            if route.kind != "other" or len(config.upstreams) > 1:
                raise
    if route.embeds and caller.is_restricted:
        _require_others(caller, headers, split_object(body) if body else {})
        _refuse_in_query(query)
    # Azure's servers take the path's deployment, whatever the body says, and its users call those
    # unlike the model.
    model = route.model or named
    if body and model != named and not is_form(headers):
        body = _with_model(body, model)
    elif named not in ("", model):
        raise InvalidRequest("The request names two models, in its path and its form.", param=MODEL)
    return _to(config, caller, route, model), body


def unread(config: Config, caller: Caller, route: Route, *, model: str = "") -> Destination:
    assert not is_decided_by_model(config, caller, route)  # noqa: S101 - the caller has checked
    return _to(config, caller, route, model)


def for_models(config: Config, caller: Caller, route: Route) -> Destination:
    caller.require(route.model)
    return _to(config, caller, route, route.model)


def by_weir(upstream: UpstreamSettings, caller: Caller, *, path: str, model: str) -> Destination:
    return Destination(
        upstream=upstream, path=_path(upstream, path, model), model=model, caller=caller
    )


def _to(config: Config, caller: Caller, route: Route, model: str) -> Destination:
    """Judged once more: this is the only way to a destination for a client's request."""
    admit(caller, route)
    if model:
        caller.require(model)
    elif route.kind in ("managed", "counted", "model") and (
        caller.is_restricted or len(config.upstreams) > 1
    ):
        raise InvalidRequest(
            "The request has to name its model here: it decides who may send it where.",
            param="model",
        )
    upstream = upstream_for(config, model)
    return Destination(
        upstream=upstream, path=_path(upstream, route.path, model), model=model, caller=caller
    )


def _path(upstream: UpstreamSettings, path: str, model: str) -> str:
    named = upstream.has_deployments and model and path.removeprefix("/") in _NAMING
    return f"/deployments/{quote(model, safe='')}{path}" if named else path
