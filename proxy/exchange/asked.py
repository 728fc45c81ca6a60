"""What is asked of the planner for one request and under which policy, and who replies to what its
plan asks for: summaries and likeness by real models, what an operator's own function leaves.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from policies.effects import Compare, Embed, Failed, Reply, Summarize, Summary, Trim, Vectors
from policies.settings import ClientEdits, ContextSettings, Mode
from proxy.access.destination import (
    EMBEDDINGS_PATH,
    TENANT_SHOWN,
    Caller,
    Destination,
    Headers,
    by_weir,
    rule_for,
    upstream_for,
)
from proxy.config.values import UpstreamSettings
from proxy.conversation.thread import (
    MEMORY_HEADER,
    PARENT_HEADER,
    RESUME_HEADER,
    conversation_in,
    name_from,
)
from proxy.effects.perform import (
    MAX_EMBEDDED_LEN,
    NOTHING_SPENT,
    PATIENCE,
    EffectHandler,
    Patience,
    Spent,
    by_vectors,
    embed,
)
from proxy.effects.summarizer import MAX_ANSWER, SummarizerTerms, SummaryResult
from proxy.errors import InvalidRequest, ProxyError
from proxy.exchange.record import ExchangeProgress
from proxy.exchange.request import Request
from proxy.features.compaction import COMPACT_PATH, EDITS, client_edits, is_native, opened, unseal
from proxy.features.held_history import NOTHING_HELD, HeldState
from proxy.models.facts import BETA, binds_reasoning, cost_of, long_name, prices_of
from proxy.planning.values import PlanRequest, ResolveLimits
from proxy.runtime import Runtime
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry.metrics import ModelCall
from proxy.telemetry.names import service_at
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace, Span
from proxy.upstream.client import own_headers, read_of
from proxy.wire import CODECS
from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import CHAT, SEAL, ClientRequest, Codec, without_field
from proxy.wire.counting import TextCounter
from proxy.wire.raw import Raw, read_value

log = logging.getLogger("weir.exchange")

CODEX_TURN = b"x-codex-turn-metadata"
SETTING = frozenset({MEMORY_HEADER, RESUME_HEADER, PARENT_HEADER, CODEX_TURN})
SUMMARIZER_SHARE = 0.85
IN_ALL = 2
"""Questions of one plan may take so many times as long as one."""


@dataclass(slots=True)
class Replies(EffectHandler):
    """Replies to the effects that planning one request asks for, at the caller's expense.

    ``patience`` is that of the client whose request is open, ``said`` the client's headers by which
    its body is read.
    """

    runtime: Runtime
    request: ClientRequest
    caller: Caller
    settings: ContextSettings
    trace: ExchangeTrace = NULL_TRACE
    patience: Patience | None = None
    spent: Spent = NOTHING_SPENT
    said: Sequence[tuple[bytes, bytes]] = ()
    clock: Callable[[], float] = time.monotonic
    _until: float | None = None

    async def summarize(self, effect: Summarize) -> Summary | Failed:
        model = self._model()
        waits = None if self.patience is None else self.patience.left()
        if (seconds := self._seconds_left()) <= 0:
            return Failed("timeout")
        destination, terms = self._terms(model, seconds)
        upstream = destination.upstream
        named = self.said if model == self.request.model else terms.codec.headers
        with self.trace.summarizer(
            model, *service_at(upstream.address, upstream.name, upstream.provider)
        ) as span:
            told = await self.runtime.summarizer.ask(
                effect,
                terms=terms,
                send=partial(self._post, destination, named, span),
                waits=waits,
            )
            dollars = self._cost(model, told.usage)
            span.summary(purpose=effect.purpose, source=told.source, dollars=dollars)
            if told.usage is not None:
                span.usage(told.usage)
            if told.result != "ok":
                span.fail(told.result)
        self._count(told, terms, dollars)
        return told.reply

    def _terms(self, model: str, seconds: float) -> tuple[Destination, SummarizerTerms]:
        upstream = upstream_for(self.runtime.config, model)
        # the client's own endpoint is one that its upstream has; of another upstream's the first is
        # tried
        is_near = model == self.request.model or upstream is upstream_for(
            self.runtime.config, self.request.model
        )
        codec = self.request.codec if is_near else CODECS[upstream.endpoints[0]]
        return by_weir(upstream, self.caller, path=codec.path, model=model), SummarizerTerms(
            tenant=self.caller.tenant,
            upstream=upstream.name,
            model=model,
            seconds=seconds,
            codec=codec,
        )

    def _seconds_left(self) -> float:
        """Seconds that one more answer may take; all of one plan together take no more than two
        answers' time.
        """
        most = self.settings.summaries.seconds
        now = self.clock()
        if self._until is None or now - self._until > most:
            self._until = now + IN_ALL * most
        return min(most, self._until - now)

    def _model(self) -> str:
        named = self.settings.summarizer
        return self.request.model if named in (None, "same") else str(named)

    async def _post(
        self,
        destination: Destination,
        named: Sequence[tuple[bytes, bytes]],
        span: Span,
        body: bytes,
    ) -> tuple[int, bytes]:
        headers = [*own_headers(destination), *named]
        if destination.upstream.forward_trace:
            headers += span.propagation()
        span.request_body(body)
        answer = await self.runtime.upstreams.send(
            destination, method="POST", headers=headers, body=body
        )
        span.status(answer.status)
        said = await read_of(answer, MAX_ANSWER)
        span.response_body(said)
        return answer.status, said

    def _cost(self, model: str, usage: ReportedUsage | None) -> float | None:
        if usage is None:
            return None
        prices = prices_of(model, self.runtime.registry.facts(model, settings=self.settings))
        return None if prices is None else cost_of(prices, usage)

    def _count(self, told: SummaryResult, terms: SummarizerTerms, dollars: float | None) -> None:
        usage = told.usage or NO_USAGE
        metrics = self.runtime.telemetry.metrics
        asked = usage.prompt or 0
        answered = usage.completion or 0
        cached = usage.cached or 0
        self.spent += Spent(
            calls=int(told.source == "asked"),
            shared=int(told.source == "shared"),
            kept=int(told.source == "kept"),
            asked=asked,
            answered=answered,
            cached=cached,
            seconds=told.seconds,
            dollars=dollars or 0.0,
        )
        result = told.source if told.source in ("kept", "shared") else told.result
        metrics.summarizer_calls.labels(result).inc()
        if told.source != "asked":
            return
        for kind, tokens in (("asked", asked), ("cached", cached), ("answered", answered)):
            metrics.summarizer_tokens.labels(kind).inc(tokens)
        if dollars is not None:
            metrics.summarizer_cost.labels(terms.tenant[:TENANT_SHOWN]).inc(dollars)
        metrics.observe_call(
            ModelCall(
                provider=terms.upstream,
                model=terms.model,
                seconds=told.seconds,
                error="" if told.result == "ok" else told.result,
                usage=usage,
            )
        )

    async def compare(self, effect: Compare) -> Reply:
        waits = PATIENCE if self.patience is None else min(PATIENCE, self.patience.left())
        if effect.model is None or waits <= 0:
            return await EffectHandler.compare(self, effect)
        send = self._post_embeddings(effect.model)
        return await by_vectors(effect, model=effect.model, send=send, patience=waits)

    async def embed(self, effect: Embed) -> Reply:
        texts = [text[:MAX_EMBEDDED_LEN] for text in effect.texts]
        send = self._post_embeddings(effect.model)
        found = await embed(texts, model=effect.model, send=send, patience=effect.seconds)
        return found if isinstance(found, Failed) else Vectors(tuple(tuple(row) for row in found))

    def _post_embeddings(self, model: str) -> Callable[[bytes], Awaitable[tuple[int, bytes]]]:
        upstream = upstream_for(self.runtime.config, model)
        destination = by_weir(upstream, self.caller, path=EMBEDDINGS_PATH, model=model)
        return partial(self.runtime.upstreams.post, destination)

    async def trim(self, effect: Trim) -> Reply:
        return await self.runtime.custom.trim(
            effect, [self.request.view(i) for i in effect.indices]
        )


def summarizer_input(runtime: Runtime, settings: ContextSettings, caller: Caller) -> int | None:
    """The tokens that the policy's summariser can read at once, None for the request's own limit.

    A summariser that refused a prompt of ``caller``'s as too long holds what it said for an hour.
    """
    named = settings.summarizer
    return None if named in (None, "same") else _reads(runtime, str(named), settings, caller)


def _reads(runtime: Runtime, model: str, settings: ContextSettings, caller: Caller) -> int | None:
    window = runtime.registry.facts(model, settings=settings).window
    upstream = upstream_for(runtime.config, model).name
    refused = runtime.summarizer.input_limit(tenant=caller.tenant, upstream=upstream, model=model)
    window = min((size for size in (window, refused) if size is not None), default=None)
    return None if window is None else int(window * SUMMARIZER_SHARE)


def settings_for(runtime: Runtime, caller: Caller, sent: Mapping[bytes, bytes]) -> ContextSettings:
    """The policy of a request: the key's, or the one that its headers ask for where the key allows
    it.

    Raises InvalidRequest for a policy or a mode that there is not.
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
    """The request with what its compaction of Weir's stands for. Raises InvalidRequest for another
    caller's.
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
    progress: ExchangeProgress,
    chat: ClientRequest,
    destination: Destination,
    settings: ContextSettings,
    held: HeldState,
    *,
    sent: Mapping[bytes, bytes],
) -> Request:
    caller = destination.caller
    upstream = destination.upstream
    headers = progress.headers
    client = chat
    chat = chat if held is NOTHING_HELD else opened_for(runtime, caller, held.whole(chat))
    if settings.mode is Mode.OFF or held.elsewhere or not _is_manageable(runtime, upstream, chat):
        return Request(client=client, chat=client, destination=destination, held=held)
    is_aside = chat.codec.is_aside(chat.fields)
    compacts = _may_compact(chat, destination, settings, is_aside=is_aside)
    if (own := SETTING & sent.keys()) or is_aside:
        settings = _as_said(settings, headers, own, is_aside=is_aside)
    if settings.recall.tool and chat.codec is not CHAT:  # there it is the MCP server that searches
        settings = replace(settings, recall=replace(settings.recall, tool=False))
    edits = _client_edits(chat, upstream, observes=settings.observes)
    if edits is not None and not edits.native:
        client = without_field(client, EDITS)
        chat = without_field(chat, EDITS)
    counter = _counter(runtime, settings, chat.model)
    patience = Patience(settings.summaries.seconds if compacts else settings.summaries.wait)
    said = _anthropics_own(chat, headers, sent)
    replies = Replies(runtime, chat, caller, settings, progress.trace, patience, said=said)
    name = name_from(headers, chat.fields, baggage=runtime.config.telemetry.read_baggage)
    resume = conversation_in(headers, RESUME_HEADER) if RESUME_HEADER in own else None
    asked = PlanRequest(
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
        binds=chat.codec is MESSAGES
        and (
            binds_reasoning(chat.model)
            or runtime.windows.binds(chat.model, upstream=upstream, caller=caller)
        ),
        follows=bool(held.chain),
        id=progress.id,
        since=progress.since,
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


def _anthropics_own(chat: ClientRequest, headers: Headers, sent: Mapping[bytes, bytes]) -> Headers:
    """The client's headers of Anthropic's, which go with what is asked for it too, or the
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
        runtime.windows.resolve_limits,
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
    # Claude Code asks on every request to keep all thinking; litellm translates for providers that
    # may do it themselves
    asks_nothing = edits == ClientEdits() and chat.codec is not CHAT
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
