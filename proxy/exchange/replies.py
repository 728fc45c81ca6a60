"""What a flow is told: summaries and likeness by real models, what an operator's own function leaves."""

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from policies import ContextSettings, Failed, Reply, Summarize, Summary
from policies.effects import Compare, Embed, Trim, Vectors
from policies.quality.advise import TokenPrices
from policies.quality.fidelity import JUDGE
from policies.quality.fidelity import PROMPTS as EVALUATING
from proxy.access.destination import EMBEDDINGS_PATH, TENANT_SHOWN, Caller, Destination, by_weir
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
from proxy.effects.summarizer import MAX_ANSWER, Compose, SummarizerTerms, SummaryResult
from proxy.errors import UpstreamUnreachable
from proxy.monitor.caching import prices_of
from proxy.runtime import Runtime
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry import NULL_TRACE, AnySpan, ModelCall, Trace
from proxy.telemetry.metrics import SUMMARIZER_CALLS, SUMMARIZER_COST, SUMMARIZER_TOKENS
from proxy.telemetry.names import service_at
from proxy.upstream.client import StreamBroken
from proxy.upstream.providers import own_headers
from proxy.wire.codec import ClientRequest
from proxy.wire.codecs import codec_of
from proxy.wire.render import Form, forces_a_call, standing_body

SUMMARIZER_SHARE = 0.85
EVALUATION_SHARE = 0.5
"""Share of the summariser's hourly tokens up to which evaluations are paid: the rest is for summaries."""
_EVALUATING = frozenset(prompt.purpose for prompt in EVALUATING.values())
NOT_IN_PLACE = Failed("not_in_place")
IN_ALL = 2
"""Questions of one plan may take so many times as long as one."""


@dataclass(slots=True)
class Replies(EffectHandler):
    """Replies to the effects that planning one request asks for, at the caller's expense.

    ``patience`` is that of the client whose request is open; ``pruned`` are the tools that the forwarded requests go
    without, for notes in place; ``said`` the client's headers by which its body is read.
    """

    runtime: Runtime
    request: ClientRequest
    caller: Caller
    settings: ContextSettings
    trace: Trace = NULL_TRACE
    pruned: Collection[str] = ()
    patience: Patience | None = None
    spent: Spent = NOTHING_SPENT
    said: Sequence[tuple[bytes, bytes]] = ()
    clock: Callable[[], float] = time.monotonic
    _until: float | None = None

    async def summarize(self, effect: Summarize) -> Summary | Failed:
        runtime, purpose = self.runtime, effect.purpose
        model = self.model_for(purpose)
        tokens = self.settings.summaries.tokens_per_hour
        compose: Compose | None = None
        if effect.standing:
            if model != self.request.model or not self.request.messages or forces_a_call(self.request):
                return NOT_IN_PLACE
            compose = partial(self._in_place, effect)
        waits = None if self.patience is None else self.patience.left()
        if (seconds := self._seconds_left()) <= 0:
            return Failed("timeout")
        upstream = runtime.config.upstream(model)
        is_same = model == self.request.model
        # the client's own endpoint is one that its upstream has; of another upstream's the first is tried
        is_near = is_same or upstream is runtime.config.upstream(self.request.model)
        codec = self.request.codec if is_near else codec_of(f"/{upstream.endpoints[0]}")
        destination = by_weir(upstream, self.caller, path=codec.path, model=model)
        terms = SummarizerTerms(
            tenant=self.caller.tenant,
            upstream=upstream.name,
            model=model,
            seconds=seconds,
            tokens_per_hour=int(tokens * EVALUATION_SHARE) if purpose in _EVALUATING else tokens,
            codec=codec,
        )
        with self.trace.summarizer(model, *service_at(upstream.address, upstream.name, upstream.provider)) as span:
            told = await runtime.summarizer.ask(
                effect,
                terms=terms,
                send=partial(self._post, destination, self.said if is_same else codec.headers, span),
                compose=compose,
                waits=waits,
            )
            prices = self._prices(model) if told.usage is not None else None
            dollars = None if prices is None or told.usage is None else _dollars(prices, told.usage)
            span.told(purpose=effect.purpose, source=told.source, dollars=dollars)
            if told.usage is not None:
                span.usage(told.usage)
            if told.result != "ok":
                span.fail(told.result)
        self._count(told, terms, dollars)
        return told.reply

    def _seconds_left(self) -> float:
        """Seconds that one more answer may take; all of one plan together take no more than two answers' time."""
        most, now = self.settings.summaries.seconds, self.clock()
        if self._until is None or now - self._until > most:
            self._until = now + IN_ALL * most
        return min(most, self._until - now)

    def model_for(self, purpose: str) -> str:
        named, evaluation = self.settings.summarizer, self.settings.evaluate
        if purpose in _EVALUATING:
            named = evaluation.model or named
            named = evaluation.judge or named if purpose == JUDGE.purpose else named
        return self.request.model if named in (None, "same") else str(named)

    def reads(self, purpose: str) -> int | None:
        return _reads(self.runtime, self.model_for(purpose), self.settings, self.caller)

    def _in_place(self, effect: Summarize, form: Form) -> bytes:
        role = self.settings.summaries.role
        return standing_body(effect, request=self.request, role=role, pruned=self.pruned, form=form)

    async def _post(
        self, destination: Destination, named: Sequence[tuple[bytes, bytes]], span: AnySpan, body: bytes
    ) -> tuple[int, bytes]:
        headers = [*own_headers(destination), *named]
        if destination.upstream.forward_trace:
            headers += span.propagation()
        span.asked(body)
        answer = await self.runtime.upstreams.send(destination, method="POST", headers=headers, body=body)
        try:
            span.arrived(answer.status)
            said = await answer.read(MAX_ANSWER)
        except StreamBroken as error:
            raise UpstreamUnreachable(str(error)) from None
        finally:
            answer.close()
        span.said_whole(said)
        return answer.status, said

    def _prices(self, model: str) -> TokenPrices | None:
        return prices_of(model, self.runtime.registry.facts(model, settings=self.settings))

    def _count(self, told: SummaryResult, terms: SummarizerTerms, dollars: float | None) -> None:
        usage, metrics = told.usage or NO_USAGE, self.runtime.telemetry.metrics
        asked, answered, cached = usage.prompt or 0, usage.completion or 0, usage.cached or 0
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
        metrics.add(SUMMARIZER_CALLS, told.source if told.source in ("kept", "shared") else told.result)
        if told.source != "asked":
            return
        for kind, tokens in (("asked", asked), ("cached", cached), ("answered", answered)):
            metrics.add(SUMMARIZER_TOKENS, kind, value=tokens)
        if dollars is not None:
            metrics.add(SUMMARIZER_COST, terms.tenant[:TENANT_SHOWN], value=dollars)
        metrics.called(
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
        upstream = self.runtime.config.upstream(model)
        destination = by_weir(upstream, self.caller, path=EMBEDDINGS_PATH, model=model)
        return partial(self.runtime.upstreams.post, destination)

    async def trim(self, effect: Trim) -> Reply:
        return await self.runtime.custom.trim(effect, [self.request.view(i) for i in effect.indices])


def summarizer_input(runtime: Runtime, settings: ContextSettings, caller: Caller | None = None) -> int | None:
    """The tokens that the policy's summariser can read at once, None for the request's own limit.

    A summariser that refused a prompt of ``caller``'s as too long holds what it said for an hour.
    """
    named = settings.summarizer
    return None if named in (None, "same") else _reads(runtime, str(named), settings, caller)


def _reads(runtime: Runtime, model: str, settings: ContextSettings, caller: Caller | None) -> int | None:
    window = runtime.registry.facts(model, settings=settings).window
    if caller is not None:
        upstream = runtime.config.upstream(model).name
        refused = runtime.summarizer.input_limit(tenant=caller.tenant, upstream=upstream, model=model)
        window = min((size for size in (window, refused) if size is not None), default=None)
    return None if window is None else int(window * SUMMARIZER_SHARE)


def _dollars(prices: TokenPrices, usage: ReportedUsage) -> float:
    prompt, cached, written = usage.prompt or 0, usage.cached or 0, usage.written or 0
    read = prices.input * max(0, prompt - cached - written) + prices.cache_read * cached
    read += prices.cache_write * written
    is_long = prices.cliff is not None and prompt > prices.cliff.above
    factor = prices.cliff.output if is_long and prices.cliff is not None else 1.0
    return read * prices.factor(prompt) + prices.output * (usage.completion or 0) * factor
