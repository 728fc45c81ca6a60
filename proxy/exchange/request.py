"""A request as it is to be handled: what it asks, of which upstream, under which policy."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from policies import ClientEdits, ContextSettings, Mode
from proxy.access.destination import Caller, Destination
from proxy.config.values import UpstreamSettings
from proxy.effects.perform import Patience
from proxy.errors import InvalidRequest
from proxy.exchange.held import NOTHING_HELD, HeldState, Request
from proxy.exchange.replies import Replies, summarizer_input
from proxy.models.facts import binds_reasoning
from proxy.planning.values import PlanRequest, ResolveLimits
from proxy.runtime import Runtime
from proxy.telemetry import Trace
from proxy.telemetry.names import service_at
from proxy.wire.anthropic import MESSAGES
from proxy.wire.client import (
    EDITS,
    MEMORY_HEADER,
    PARENT_HEADER,
    RESUME_HEADER,
    client_edits,
    conversation_in,
    name_from,
    wants_no_editing,
)
from proxy.wire.codec import CHAT, ClientRequest, without_field
from proxy.wire.compaction import opened, unseal
from proxy.wire.counting import TextCounter
from proxy.wire.raw import read_value

COMPACT_PATH = "/responses/compact"
CODEX_TURN = b"x-codex-turn-metadata"
SETTING = frozenset({MEMORY_HEADER, RESUME_HEADER, PARENT_HEADER, CODEX_TURN})

Headers = Sequence[tuple[bytes, bytes]]


def settings_for(runtime: Runtime, caller: Caller, headers: Headers) -> ContextSettings:
    """The policy of a request: the key's, or the one that its headers ask for where the key allows it.

    Raises InvalidRequest for a policy or a mode that there is not.
    """
    config, sent = runtime.config, dict(headers)
    name, mode = caller.policy or config.default_policy, None
    if b"x-weir-policy" in sent and "policy" in caller.allow:
        name = sent[b"x-weir-policy"].decode("latin-1").strip()
    if b"x-weir-mode" in sent and "mode" in caller.allow:
        try:
            mode = Mode(sent[b"x-weir-mode"].decode("latin-1").strip().lower())
        except ValueError:
            raise InvalidRequest("x-weir-mode must be enforce, observe or off.") from None
    try:
        return runtime.policy(name, mode)
    except KeyError:
        known = ", ".join(sorted(config.policies))
        raise InvalidRequest(f"There is no policy {name[:80]!r}; there are: {known}.") from None


def request_for(
    runtime: Runtime,
    chat: ClientRequest,
    destination: Destination,
    settings: ContextSettings,
    *,
    headers: Headers,
    request_id: str,
    trace: Trace,
    held: HeldState,
    since: float | None = None,
) -> Request:
    caller, upstream = destination.caller, destination.upstream
    client, chat = chat, chat if held is NOTHING_HELD else opened_for(runtime, caller, held.whole(chat))
    if settings.mode is Mode.OFF or held.elsewhere or not _is_manageable(runtime, upstream, chat):
        return Request(client=client, chat=client, destination=destination, held=held)
    is_aside = chat.codec.is_aside(chat.fields)
    compacts = _may_compact(chat, destination, settings, is_aside=is_aside)
    own = SETTING & {name for name, _ in headers}
    if is_aside or own:
        settings = _as_said(settings, headers, own, is_aside=is_aside)
    edits = _client_edits(chat, upstream, observes=settings.observes)
    if edits is not None and not edits.native:
        client, chat = without_field(client, EDITS), without_field(chat, EDITS)
    counter = _counter(runtime, settings, chat.model)
    pruned, patience = set[str](), Patience(settings.summaries.seconds if compacts else settings.summaries.wait)
    said = [header for header in headers if header[0].startswith(b"anthropic-")] or chat.codec.headers
    replies = Replies(runtime, chat, caller, settings, trace, pruned, patience, said=said)
    name = name_from(headers, chat.fields, baggage=runtime.config.telemetry.read_baggage)
    resume = conversation_in(headers, RESUME_HEADER) if RESUME_HEADER in own else None
    asked = PlanRequest(
        request=chat,
        tenant=caller.tenant,
        name=name,
        settings=settings,
        counter=counter,
        limits=_limits_of(runtime, chat, settings, destination, exact=counter.is_exact),
        ask=replies,
        patience=patience,
        ask_later=partial(Replies, runtime, chat, caller, settings, pruned=pruned, said=said),
        ask_about=Replies(runtime, chat, caller, settings, said=said) if settings.evaluate.sample else None,
        pruned=pruned,
        summarizer_input=summarizer_input(runtime, settings, caller) if settings.summarizer is not None else None,
        resume=resume,
        resumes=_resumes(settings, resume, name),
        parent=conversation_in(headers, PARENT_HEADER) if PARENT_HEADER in own else None,
        edits=edits,
        binds=chat.codec is MESSAGES and _binds(runtime, upstream, chat.model),
        id=request_id,
        since=since,
    )
    return Request(
        client=client,
        chat=chat,
        destination=destination,
        held=held,
        asked=asked,
        replies=replies,
        compacts=compacts or (edits is not None and edits.pauses and not edits.native),
    )


def _is_manageable(runtime: Runtime, upstream: UpstreamSettings, chat: ClientRequest) -> bool:
    lacking, where = runtime.lacking, (upstream.name, chat.codec.path)
    is_there = chat.codec.name in upstream.endpoints and not (lacking.until and where in lacking)
    return is_there and bool(chat.messages) and not wants_no_editing(chat.fields)


def _binds(runtime: Runtime, upstream: UpstreamSettings, model: str) -> bool:
    return binds_reasoning(model) or (upstream.name, model) in runtime.binding


def _resumes(settings: ContextSettings, resume: str | None, name: str | None) -> str | None:
    if settings.resume == "off" or settings.observes:
        return None
    return resume or (name if settings.resume == "auto" else None)


def _may_compact(chat: ClientRequest, destination: Destination, settings: ContextSettings, *, is_aside: bool) -> bool:
    is_asked = is_aside or destination.path.endswith(COMPACT_PATH)
    is_weirs = settings.compaction == "proxy" and not settings.observes
    return is_asked and is_weirs and not is_native(chat, destination.upstream)


def opened_for(runtime: Runtime, caller: Caller, chat: ClientRequest) -> ClientRequest:
    """The request with what its compaction of Weir's stands for. Raises InvalidRequest for another caller's."""
    return opened(chat, partial(unseal, tenant=caller.tenant, secret=runtime.secret))


def is_native(chat: ClientRequest, upstream: UpstreamSettings) -> bool:
    known = chat.codec.providers
    return bool(known) and service_at(upstream.address, upstream.name, upstream.provider)[0] in known


def _is_codex_compaction(headers: Headers) -> bool:
    said = next((value for name, value in headers if name == CODEX_TURN), None)
    about = read_value(said) if said is not None else None
    return isinstance(about, dict) and about.get("request_kind") == "compaction"


def _limits_of(
    runtime: Runtime, chat: ClientRequest, settings: ContextSettings, destination: Destination, *, exact: bool
) -> ResolveLimits:
    return partial(
        runtime.windows.resolve_limits,
        chat.model,
        settings=settings,
        upstream=destination.upstream,
        caller=destination.caller,
        max_tokens=chat.max_tokens,
        exact=exact,
    )


def _as_said(settings: ContextSettings, headers: Headers, own: Collection[bytes], *, is_aside: bool) -> ContextSettings:
    if is_aside or (CODEX_TURN in own and _is_codex_compaction(headers)):
        recall = replace(settings.recall, tool=False, auto=False)
        settings = replace(settings, layers=(), compaction="off", recall=recall)
    if MEMORY_HEADER in own and (tag := conversation_in(headers, MEMORY_HEADER)) is not None:
        settings = replace(settings, memory=replace(settings.memory, tags=(*settings.memory.tags, tag)))
    return settings


def _client_edits(chat: ClientRequest, upstream: UpstreamSettings, *, observes: bool) -> ClientEdits | None:
    edits = client_edits(chat.fields) if EDITS in chat.fields and not observes else None
    if edits is None:
        return None
    if is_native(chat, upstream):
        return replace(edits, native=True)
    # Claude Code asks on every request to keep all thinking; litellm translates for providers that may do it themselves
    asks_nothing = edits == ClientEdits() and chat.codec is not CHAT
    return None if asks_nothing or upstream.kind != "openai" else edits


def _counter(runtime: Runtime, settings: ContextSettings, model: str) -> TextCounter:
    if settings.estimator != "tokenizer":
        return runtime.tokenizer.counter(settings.estimator)
    rule = runtime.config.rule(model) if runtime.config.models else None
    return runtime.tokenizer.counter(rule.tokenizer if rule and rule.tokenizer else model)
