"""Where a request goes: the one place that reads a path, judges a model and chooses an upstream.

:class:`Upstreams` sends nothing without a :class:`Destination`, and no other module makes one. So a model that a key
may not use, or the wrong provider, cannot be reached by another spelling of a path, another place for the model, or a
route that somebody adds. (tests/architecture/test_destinations.py)
"""

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import parse_qsl, quote, unquote

from proxy.access.caller import Caller
from proxy.config.values import Config, UpstreamSettings
from proxy.errors import Forbidden, InvalidRequest
from proxy.wire.chat import ChatRequest, parse_chat
from proxy.wire.models_named import (
    Headers,
    is_form,
    model_in_body,
    model_in_object,
    other_models,
    require_json,
    with_model,
)
from proxy.wire.raw import split_object

CHAT_PATH: Final = "/chat/completions"
EMBEDDINGS_PATH: Final = "/embeddings"
MODELS_PATH: Final = "/models"
_NAMING = (
    "chat/completions",
    "fim/completions",
    "completions",
    "responses/input_tokens",
    "responses/compact",
    "responses",
    "messages/count_tokens",
    "messages",
    "embeddings",
    "moderations",
    "images/generations",
    "images/edits",
    "images/variations",
    "audio/speech",
    "audio/transcriptions",
    "audio/translations",
    "videos",
    "rerank",
    "score",
    "pooling",
    "classify",
    "ocr",
)
"""What is asked of the one model that the body names; a longer path stands before what it ends with."""
_IN_PATH = frozenset({"deployments", "engines"})
_PREFIX = re.compile(r"(?:/+v1)+(?=/)|/+openai(?=/+deployments/)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a request asks for, by its method and path.

    Attributes:
        kind: ``chat`` is managed; ``model`` is asked of one model; ``models`` lists them; ``other`` is the rest:
            files, batches, stored answers, all that can have models ask or tell about other keys' requests.
        path: what is put after an upstream's base URL.
        model: the one that stands in the path.
    """

    kind: Literal["chat", "model", "models", "other"]
    path: str
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where one request goes and for whom: the upstream, the path after its base URL, the model it is asked for."""

    upstream: UpstreamSettings
    path: str
    model: str
    caller: Caller


CHAT: Final = Route(kind="chat", path=CHAT_PATH)


def route_of(method: str, target: str) -> Route | None:
    """The route of a path as it came, percent-encoded; None where there is none.

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
    for name in _NAMING:
        kind: Literal["chat", "model"] = "chat" if name == "chat/completions" else "model"
        if path == name:
            return Route(kind=kind, path=f"/{name}")
        if parts and parts[0] in _IN_PATH and path.endswith(f"/{name}"):
            model = path.removeprefix(f"{parts[0]}/").removesuffix(f"/{name}").strip("/")
            return Route(kind=kind, path=f"/{name}", model=model) if model else None
    return None


def admit(caller: Caller, route: Route) -> None:
    """Nothing, or Forbidden for a key that may use some models only on a route where a model cannot be told."""
    if caller.is_restricted and route.kind == "other" and "relay" not in caller.allow:
        raise Forbidden(
            "This key may use some models only, and what is asked for here names none that could be judged. "
            "The operator can allow it: give the key the permission relay."
        )


def is_decided_by_model(config: Config, caller: Caller, route: Route) -> bool:
    """Whether a body has to be read before it is known where it goes, or that it may."""
    return caller.is_restricted or len(config.upstreams) > 1 or bool(route.model)


def for_chat(
    config: Config, caller: Caller, route: Route, request: ChatRequest, *, query: bytes, headers: Headers = ()
) -> tuple[Destination, ChatRequest]:
    """Where a managed request goes, and the request naming the model that its path names.

    Raises ModelNotAllowed, and InvalidRequest where the model cannot be told.
    """
    if not is_decided_by_model(config, caller, route):
        return _to(config, caller, route, request.model), request
    if caller.is_restricted:
        require_json(headers)
    named = model_in_object(request.body, request.fields)
    model = _agreed(route, "" if route.model else named, query)
    _judge(caller, model, request)
    if model and model != named:
        request = parse_chat(with_model((), request.body, model))
    return _to(config, caller, route, model), request


def for_relay(
    config: Config, caller: Caller, route: Route, headers: Headers, body: bytes | None, *, query: bytes
) -> tuple[Destination, bytes | None]:
    """Where a relayed request goes whose body (None without one) was read, and the body naming its path's model.

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
    """Where a relayed request goes whose model decides nothing; ``model`` is for those who count it."""
    assert not is_decided_by_model(config, caller, route)  # noqa: S101 - whoever asks has looked
    return _to(config, caller, route, model)


def for_models(config: Config, caller: Caller, route: Route) -> Destination:
    """Where is known what a model is; ModelNotAllowed."""
    caller.require(route.model)
    return _to(config, caller, route, route.model)


def by_weir(upstream: UpstreamSettings, caller: Caller, *, path: str, model: str) -> Destination:
    """Where a question of Weir's own goes, on the caller's account: the operator's policy has chosen the model."""
    return Destination(upstream=upstream, path=_path(upstream, path, model), model=model, caller=caller)


def _judge(caller: Caller, model: str, body: "ChatRequest | bytes | None") -> None:
    """Nothing, or ModelNotAllowed for a model that the request names anywhere."""
    if not caller.is_restricted:
        return
    if model:
        caller.require(model)
    if body is None:
        return
    try:
        fields = body.fields if isinstance(body, ChatRequest) else split_object(body)
    except InvalidRequest:
        return
    for each in other_models(fields):
        caller.require(each)


def _agreed(route: Route, named: str, query: bytes) -> str:
    """The model of body, path and query, which have to say the same where they say one."""
    said = parse_qsl(query.decode("latin-1").replace(";", "&")) if query else []
    asked = [value for key, value in said if key.casefold() == "model"]
    models = {model for model in (named, route.model, *asked) if model}
    if len(models) > 1:
        raise InvalidRequest("The request names two models, in its path, its query or its body.", param="model")
    return models.pop() if models else ""


def _to(config: Config, caller: Caller, route: Route, model: str) -> Destination:
    """The destination for a caller, once more judged: this is the only way to one for a client's request."""
    admit(caller, route)
    if model:
        caller.require(model)
    elif route.kind in ("chat", "model") and (caller.is_restricted or len(config.upstreams) > 1):
        raise InvalidRequest("The request has to name its model here: it decides who may send it where.", param="model")
    upstream = config.upstream(model)
    return Destination(upstream=upstream, path=_path(upstream, route.path, model), model=model, caller=caller)


def _path(upstream: UpstreamSettings, path: str, model: str) -> str:
    named = upstream.has_deployments and model and path.removeprefix("/") in _NAMING
    return f"/deployments/{quote(model, safe='')}{path}" if named else path
