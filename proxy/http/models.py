"""``GET /v1/models``: the models of all upstreams that a key may use, in OpenAI's shape.

One upstream that speaks OpenAI's protocol is simply relayed to a key that may use everything.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterable, MutableMapping
from typing import Any

from proxy.access.admission import admitted
from proxy.access.destination import (
    MODELS_PATH,
    Caller,
    Route,
    by_weir,
    for_models,
    rule_for,
    upstream_for,
)
from proxy.config.values import Config, UpstreamSettings
from proxy.errors import NotFound, ProxyError
from proxy.exchange.sinks import NO_POLICY, record_relayed
from proxy.http.relay import relay_untouched
from proxy.http.request import as_error, as_json
from proxy.runtime import Runtime
from proxy.stream import Headers, Receive, Send
from proxy.telemetry.logs import LOG_CONTEXT
from proxy.upstream.client import came_through
from proxy.upstream.connection import StreamBroken

PATIENCE = 5.0
MAX_BODY = 4 * 1024 * 1024
PATTERN = frozenset("*?[")
NOT_ASKED_WITH = frozenset({b"accept-encoding", b"content-type", b"if-none-match", b"range"})
VERSION = (b"anthropic-version", b"2023-06-01")
"""Anthropic refuses requests without it."""
Entry = dict[str, Any]


async def answer_models(
    runtime: Runtime, scope: MutableMapping[str, Any], receive: Receive, send: Send, route: Route
) -> None:
    headers = scope["headers"]
    try:
        caller = admitted(scope, runtime.keyring, runtime.auth_throttle, runtime.config)
        looped = came_through(headers, runtime.instance)
        body = None if looped else await _own(runtime, caller, headers, route)
    except ProxyError as error:
        runtime.telemetry.metrics.requests.labels(error.code, NO_POLICY).inc()
        await as_error(error)(scope, receive, send)
        return
    if body is None:
        await relay_untouched(runtime, scope, receive, send, route)
        return
    await as_json(body)(scope, receive, send)
    about = LOG_CONTEXT.get()
    request = about.request if about is not None else ""
    runtime.telemetry.metrics.requests.labels("relayed", NO_POLICY).inc()
    record_relayed(
        runtime, caller, request=request, model="", status=200, outcome="relayed", usage=None
    )


async def _own(runtime: Runtime, caller: Caller, headers: Headers, route: Route) -> Entry | None:
    config = runtime.config
    upstreams = tuple(config.upstreams.values())
    if route.model:
        upstream = for_models(config, caller, route).upstream
        if upstream.kind == "openai":
            return None
        if rule_for(config.models, route.model) is None:
            raise NotFound(f"The model {route.model[:200]!r} is not known here.", param="model")
        return _entry(upstream, route.model)
    if len(upstreams) == 1 and upstreams[0].kind == "openai" and not caller.is_restricted:
        return None
    lists = await asyncio.gather(
        *(_models_of(runtime, each, caller, headers) for each in upstreams)
    )
    found: dict[str, Entry] = {}
    for upstream, entries in zip(upstreams, lists, strict=True):
        for entry in entries:
            name = entry["id"]
            if (
                name not in found
                and caller.allows(name)
                and upstream_for(config, name).name == upstream.name
            ):
                found[name] = entry
    return {"object": "list", "data": list(found.values())}


async def _models_of(
    runtime: Runtime, upstream: UpstreamSettings, caller: Caller, headers: Headers
) -> list[Entry]:
    listed: list[Entry] = []
    config = runtime.config
    # A client's own key goes only to the upstream of its requests.
    if upstream.kind == "openai" and (
        not upstream.passes_key or upstream is next(iter(config.upstreams.values()))
    ):
        with contextlib.suppress(
            TimeoutError, ProxyError, StreamBroken, ValueError, RecursionError
        ):
            async with asyncio.timeout(PATIENCE):
                listed = await _listed(runtime, upstream, caller, headers)
    known = {entry["id"] for entry in listed}
    return listed + [_entry(upstream, name) for name in _named(config, caller) if name not in known]


async def _listed(
    runtime: Runtime, upstream: UpstreamSettings, caller: Caller, headers: Headers
) -> list[Entry]:
    sent = [(name, value) for name, value in headers if name not in NOT_ASKED_WITH]
    if upstream.credential == "x-api-key" and not any(name == VERSION[0] for name, _ in sent):
        sent.append(VERSION)
    destination = by_weir(upstream, caller, path=MODELS_PATH, model="")
    answer = await runtime.upstreams.send(destination, method="GET", headers=sent, body=None)
    try:
        body = await answer.read(MAX_BODY)
    finally:
        answer.close()
    value = json.loads(body) if answer.status == 200 else None
    data = value.get("data") if isinstance(value, dict) else None
    entries = [
        each for each in data or () if isinstance(each, dict) and isinstance(each.get("id"), str)
    ]
    return [{**_entry(upstream, each["id"]), **each} for each in entries]


def _named(config: Config, caller: Caller) -> Iterable[str]:
    stated = (*(rule.match for rule in config.models), *caller.models)
    return (name for name in dict.fromkeys(stated) if PATTERN.isdisjoint(name))


def _entry(upstream: UpstreamSettings, name: str) -> Entry:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": upstream.provider or upstream.name,
    }
