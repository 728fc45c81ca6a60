"""A request as it is to be handled: what it asks, of which upstream, under which policy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from policies import ClientEdits, ContextSettings, Mode
from proxy.access.destination import Caller, Destination
from proxy.config.values import UpstreamSettings
from proxy.effects.allowance import Patience
from proxy.errors import InvalidRequest
from proxy.exchange.replies import Replies, provider_of, summarizer_input
from proxy.models.facts import binds_reasoning
from proxy.planning.values import PlanRequest
from proxy.runtime import Runtime
from proxy.telemetry import Trace
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
from proxy.wire.counting import TextCounter

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked, of whom, and what is to be planned of it; ``asked`` is None for a request that is not managed.

    ``replies`` answer what planning it asks for, and know what that has cost.
    """

    chat: ClientRequest
    destination: Destination
    asked: PlanRequest | None = None
    replies: Replies | None = None

    @property
    def managed_by(self) -> ContextSettings | None:
        """The policy that manages it."""
        return None if self.asked is None else self.asked.settings


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
) -> Request:
    """The request under its policy, with what planning it may ask for and cost."""
    caller = destination.caller
    is_elsewhere = chat.codec.is_held_elsewhere(chat.fields)
    if settings.mode is Mode.OFF or not chat.messages or is_elsewhere or wants_no_editing(chat.fields):
        return Request(chat=chat, destination=destination)
    if (tag := conversation_in(headers, MEMORY_HEADER)) is not None:
        settings = replace(settings, memory=replace(settings.memory, tags=(*settings.memory.tags, tag)))
    chat, edits = _client_edits(chat, destination.upstream, observes=settings.observes)
    counter = _counter(runtime, settings, chat.model)
    pruned, patience = set[str](), Patience(settings.summaries.wait)
    said = [header for header in headers if header[0].startswith(b"anthropic-")] or chat.codec.headers
    replies = Replies(runtime, chat, caller, settings, trace, pruned, patience, said=said)
    asked = PlanRequest(
        request=chat,
        tenant=caller.tenant,
        name=name_from(headers, chat.fields, baggage=runtime.config.telemetry.read_baggage),
        settings=settings,
        counter=counter,
        limits=partial(
            runtime.windows.resolve_limits,
            chat.model,
            settings=settings,
            upstream=destination.upstream,
            caller=caller,
            max_tokens=chat.max_tokens,
            exact=counter.is_exact,
        ),
        ask=replies,
        patience=patience,
        ask_later=Replies(runtime, chat, caller, settings, pruned=pruned, said=said),
        ask_about=Replies(runtime, chat, caller, settings, said=said) if settings.evaluate.sample else None,
        pruned=pruned,
        summarizer_input=summarizer_input(runtime, settings, caller),
        resume=conversation_in(headers, RESUME_HEADER),
        parent=conversation_in(headers, PARENT_HEADER),
        edits=edits,
        binds=chat.codec is MESSAGES
        and (binds_reasoning(chat.model) or (destination.upstream.name, chat.model) in runtime.binding),
        id=request_id,
    )
    return Request(chat=chat, destination=destination, asked=asked, replies=replies)


def _client_edits(
    chat: ClientRequest, upstream: UpstreamSettings, *, observes: bool
) -> tuple[ClientRequest, ClientEdits | None]:
    """What the client asks to have taken out, and the request without that where it is Weir that does it."""
    edits = client_edits(chat.fields)
    if edits is None or observes:
        return chat, None
    if provider_of(upstream) in chat.codec.providers:
        return chat, replace(edits, native=True)
    nothing = (
        edits == ClientEdits() and chat.codec is not CHAT
    )  # Claude Code asks on every request to keep all thinking
    if nothing or upstream.kind != "openai":  # litellm translates it for a provider that may do it itself
        return chat, None
    return without_field(chat, EDITS), edits


def _counter(runtime: Runtime, settings: ContextSettings, model: str) -> TextCounter:
    """What counts a request's tokens: the policy's estimator, else the model's tokenizer."""
    if settings.estimator != "tokenizer":
        return runtime.tokenizer.counter(settings.estimator)
    rule = runtime.config.rule(model)
    return runtime.tokenizer.counter(rule.tokenizer if rule and rule.tokenizer else model)
