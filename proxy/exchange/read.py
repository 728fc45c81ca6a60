"""A request as it is to be planned: its fields, its policy, and the limits that hold for it."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import msgspec

from policies.settings import ClientEdits, ContextSettings, Mode
from proxy.access.destination import (
    Caller,
    Destination,
    Headers,
    for_fallback,
    for_managed,
    rule_for,
)
from proxy.access.provider_ids import is_judged, named_in_request
from proxy.config.values import UpstreamSettings
from proxy.conversation.thread import (
    MEMORY_HEADER,
    PARENT_HEADER,
    RESUME_HEADER,
    conversation_in,
    name_from,
)
from proxy.effects.perform import Patience
from proxy.errors import ContextLengthExceeded, InvalidRequest, ModelNotAllowed, ProxyError
from proxy.exchange.exchange import Exchange, Request
from proxy.exchange.replies import Replies, summarizer_input
from proxy.features.compaction import COMPACT_PATH, is_native, opened, unseal
from proxy.features.held_history import NOTHING_HELD, HeldState, held_by
from proxy.models.facts import BETA, binds_reasoning, long_name
from proxy.planning.values import PlanRequest, ResolveLimits
from proxy.runtime import Runtime
from proxy.wire import CODECS
from proxy.wire.codec import SEAL, ClientRequest, Codec, without_field
from proxy.wire.compactions import EDITS, client_edits
from proxy.wire.counting import TextCounter
from proxy.wire.raw import Raw, read_value

log = logging.getLogger("weir.exchange")

STEERING = (("policy", b"x-weir-policy"), ("mode", b"x-weir-mode"))
CODEX_TURN = b"x-codex-turn-metadata"
SETTING = frozenset({MEMORY_HEADER, RESUME_HEADER, PARENT_HEADER, CODEX_TURN})


async def read_request(
    runtime: Runtime, exchange: Exchange, body: bytes, caller: Caller
) -> Request:
    """The request in a body, as it is to be planned.

    Raises InvalidJSON, InvalidRequest, Forbidden and other errors of the client's.
    """
    sent = dict(exchange.headers)
    chat = parsed_for(runtime, caller, CODECS[exchange.route.path.split("/")[1]], body)
    exchange.chat = chat
    destination, chat = for_managed(
        runtime.config, caller, exchange.route, chat, headers=exchange.headers, query=exchange.query
    )
    exchange.chat = chat
    if is_judged(caller, destination.upstream):
        await runtime.provider_ids.require(caller, named_in_request(chat))
    settings = settings_for(runtime, caller, sent)
    exchange.settings = settings
    exchange.observed = settings.observes and settings.mode is not Mode.OFF
    exchange.ignored = [
        what for what, header in STEERING if header in sent and what not in caller.allow
    ]
    if runtime.features.on_read:
        exchange.emit(runtime.features.on_read)
    held = NOTHING_HELD
    if chat.codec.link is not None:
        held = await held_by(runtime.answers, chat, caller, settings)
    request = request_for(runtime, exchange, chat, destination, settings, held, sent=sent)
    exchange.chat = request.chat
    exchange.request = request
    return request


def fall_back(
    runtime: Runtime, exchange: Exchange, request: Request, refusal: ContextLengthExceeded
) -> Request:
    """The request as one to the policy's ``fallback``. Raises the refusal where there is none, or
    the key may not use it.
    """
    settings = exchange.settings
    caller = request.destination.caller
    model = None if settings is None else settings.fallback
    if model is None or settings is None or model == request.chat.model:
        raise refusal
    try:
        destination, chat = for_fallback(
            runtime.config, caller, exchange.route, request.chat, model
        )
    except ModelNotAllowed:
        raise refusal from None
    if chat.codec.name not in destination.upstream.endpoints:
        raise refusal
    held = request.held
    if held is not NOTHING_HELD:  # all of it goes up, as to a provider that holds nothing
        held = msgspec.structs.replace(held, parent=None, chain=(), known={})
    sent = dict(exchange.headers)
    new = request_for(runtime, exchange, chat, destination, settings, held, sent=sent)
    exchange.chat = new.chat
    exchange.request = new
    exchange.fallback = True
    exchange.refusal = {}
    exchange.trace.event("fallback", model=model, reason=refusal.code)
    return new


def refused_twice(
    first: ContextLengthExceeded, second: ContextLengthExceeded, model: str
) -> ContextLengthExceeded:
    """The refusal of a request that does not fit into its fallback either."""
    window = (second.weir or {}).get("window")
    return ContextLengthExceeded(
        f"{first.message} It does not fit into the fallback {model[:200]} either, whose maximum"
        f" context length is {window} tokens.",
        param=first.param,
        weir=second.weir,
    )


def settings_for(runtime: Runtime, caller: Caller, sent: Mapping[bytes, bytes]) -> ContextSettings:
    """The policy of a request: the key's, or the one that its headers name where the key allows it.

    Raises InvalidRequest for an unknown policy or mode.
    """
    config = runtime.config
    name = caller.policy or config.default_policy
    mode = None
    if b"x-weir-policy" in sent and "policy" in caller.allow:
        name = sent[b"x-weir-policy"].decode("latin-1").strip()
    if b"x-weir-mode" in sent and "mode" in caller.allow:
        try:
            mode = Mode(sent[b"x-weir-mode"].decode("latin-1").strip().lower())
        except ValueError:
            raise InvalidRequest("x-weir-mode must be enforce, observe or off.") from None
    try:
        if (settings := runtime.policies.get((name, mode))) is None:
            settings = config.policy(name)
            settings = settings if mode is None else replace(settings, mode=mode)
            runtime.policies[name, mode] = settings
    except KeyError:
        known = ", ".join(sorted(config.policies))
        raise InvalidRequest(f"There is no policy {name[:80]!r}; there are: {known}.") from None
    return settings


def parsed_for(runtime: Runtime, caller: Caller, codec: Codec, body: bytes) -> ClientRequest:
    """The request in a body. Raises InvalidJSON or InvalidRequest."""
    try:
        chat = runtime.planner.transcripts.parse(codec, body, tenant=caller.tenant)
    except ProxyError:
        raise
    except Exception:
        log.exception("a body is parsed by itself: what is known of earlier ones could not be used")
        chat = codec.parse(body)
    return opened_for(runtime, caller, chat)


def opened_for(runtime: Runtime, caller: Caller, chat: ClientRequest) -> ClientRequest:
    """The request with Weir's compaction in it replaced by its content. Raises InvalidRequest for
    another caller's.
    """
    is_sealed = (
        SEAL in chat.codec.words and chat.messages is not None and chat.messages.mentions(SEAL)
    )
    return (
        opened(chat, partial(unseal, tenant=caller.tenant, secret=runtime.secret))
        if is_sealed
        else chat
    )


def request_for(
    runtime: Runtime,
    exchange: Exchange,
    chat: ClientRequest,
    destination: Destination,
    settings: ContextSettings,
    held: HeldState,
    *,
    sent: Mapping[bytes, bytes],
) -> Request:
    caller = destination.caller
    upstream = destination.upstream
    headers = exchange.headers
    client = chat
    chat = chat if held is NOTHING_HELD else opened_for(runtime, caller, held.whole(chat))
    if settings.mode is Mode.OFF or held.elsewhere or not _is_manageable(runtime, upstream, chat):
        return Request(client=client, chat=client, destination=destination, held=held)
    is_aside = chat.codec.is_aside(chat.fields)
    compacts = _may_compact(chat, destination, settings, is_aside=is_aside)
    if (own := SETTING & sent.keys()) or is_aside:
        settings = _as_said(settings, headers, own, is_aside=is_aside)
    if (
        settings.recall.tool and not chat.codec.has_recall_tool
    ):  # there it is the MCP server that searches
        settings = replace(settings, recall=replace(settings.recall, tool=False))
    edits = _client_edits(chat, upstream, observes=settings.observes)
    if edits is not None and not edits.native:
        client = without_field(client, EDITS)
        chat = without_field(chat, EDITS)
    counter = _counter(runtime, settings, chat.model)
    patience = Patience(settings.summaries.seconds if compacts else settings.summaries.wait)
    said = _anthropics_own(chat, headers, sent)
    replies = Replies(runtime, chat, caller, settings, exchange.trace, patience, said=said)
    name = name_from(headers, chat.fields, baggage=runtime.config.telemetry.read_baggage)
    resume = conversation_in(headers, RESUME_HEADER) if RESUME_HEADER in own else None
    plan_request = PlanRequest(
        request=chat,
        tenant=caller.tenant,
        name=name,
        settings=settings,
        counter=counter,
        limits=_limits_of(
            runtime,
            chat,
            settings,
            destination,
            model=chat.model if BETA not in sent else long_name(chat.model, headers),
            exact=counter.is_exact,
        ),
        ask=replies,
        patience=patience,
        ask_later=partial(Replies, runtime, chat, caller, settings, said=said),
        summarizer_input=(
            summarizer_input(runtime, settings, caller) if settings.summarizer is not None else None
        ),
        resume=resume,
        resumes=_resumes(settings, resume, name),
        parent=conversation_in(headers, PARENT_HEADER) if PARENT_HEADER in own else None,
        edits=edits,
        binds=chat.codec.binds_thinking
        and (
            binds_reasoning(chat.model)
            or runtime.limits_resolver.binds(chat.model, upstream=upstream, caller=caller)
        ),
        follows=bool(held.chain),
        id=exchange.id,
        since=exchange.since,
    )
    return Request(
        client=client,
        chat=chat,
        destination=destination,
        held=held,
        plan_request=plan_request,
        replies=replies,
        compacts=compacts or (edits is not None and edits.pauses and not edits.native),
    )


def _anthropics_own(chat: ClientRequest, headers: Headers, sent: Mapping[bytes, bytes]) -> Headers:
    """The client's Anthropic headers, which also go with requests made on its behalf, or the
    codec's.
    """
    named = headers if b"anthropic-" in b" ".join(sent) else ()
    return [header for header in named if header[0].startswith(b"anthropic-")] or chat.codec.headers


def _is_manageable(runtime: Runtime, upstream: UpstreamSettings, chat: ClientRequest) -> bool:
    where = (upstream.name, chat.codec.path)
    is_there = chat.codec.name in upstream.endpoints and where not in runtime.unsupported
    return is_there and bool(chat.messages) and not wants_no_editing(chat.fields)


def _resumes(settings: ContextSettings, resume: str | None, name: str | None) -> str | None:
    if settings.resume == "off" or settings.observes:
        return None
    return resume or (name if settings.resume == "auto" else None)


def _may_compact(
    chat: ClientRequest, destination: Destination, settings: ContextSettings, *, is_aside: bool
) -> bool:
    is_asked = is_aside or destination.path.endswith(COMPACT_PATH)
    is_weirs = settings.compaction == "proxy" and not settings.observes
    return is_asked and is_weirs and not is_native(chat, destination.upstream)


def _limits_of(
    runtime: Runtime,
    chat: ClientRequest,
    settings: ContextSettings,
    destination: Destination,
    *,
    model: str,
    exact: bool,
) -> ResolveLimits:
    return partial(
        runtime.limits_resolver.resolve_limits,
        model,
        settings=settings,
        upstream=destination.upstream,
        caller=destination.caller,
        max_tokens=chat.max_tokens,
        exact=exact,
    )


def _as_said(
    settings: ContextSettings, headers: Headers, own: Collection[bytes], *, is_aside: bool
) -> ContextSettings:
    if is_aside or (CODEX_TURN in own and _is_codex_compaction(headers)):
        recall = replace(settings.recall, tool=False, auto=False)
        settings = replace(settings, layers=(), compaction="off", recall=recall)
    if MEMORY_HEADER in own and (tag := conversation_in(headers, MEMORY_HEADER)) is not None:
        settings = replace(settings, memory=(*settings.memory, tag))
    return settings


def _is_codex_compaction(headers: Headers) -> bool:
    about = read_value(dict(headers)[CODEX_TURN])
    return isinstance(about, dict) and about.get("request_kind") == "compaction"


def _client_edits(
    chat: ClientRequest, upstream: UpstreamSettings, *, observes: bool
) -> ClientEdits | None:
    edits = client_edits(chat.fields) if EDITS in chat.fields and not observes else None
    if edits is None:
        return None
    if is_native(chat, upstream):
        return replace(edits, native=True)
    # Claude Code requests every time that all thinking is kept; litellm translates for providers
    # that may do it themselves
    asks_nothing = edits == ClientEdits() and not chat.codec.has_translated_edits
    return None if asks_nothing or upstream.kind != "openai" else edits


def _counter(runtime: Runtime, settings: ContextSettings, model: str) -> TextCounter:
    if settings.estimator != "tokenizer":
        return runtime.tokenizer.counter(settings.estimator)
    rule = rule_for(runtime.config.models, model) if runtime.config.models else None
    return runtime.tokenizer.counter(rule.tokenizer if rule and rule.tokenizer else model)


def wants_no_editing(fields: Mapping[str, Raw]) -> bool:
    """Whether the request forbids editing: OpenRouter's plugin or transforms switched off.

    ``truncation: "disabled"`` of Responses does not: it is the API's default, and some clients
    always send it.
    """
    if "transforms" in fields and read_value(fields["transforms"]) == []:
        return True
    plugins = read_value(fields["plugins"]) if "plugins" in fields else None
    return isinstance(plugins, list) and any(
        isinstance(p, dict) and p.get("id") == "context-compression" and p.get("enabled") is False
        for p in plugins
    )
