"""Replies to a plan's effects: summaries and likeness by models, an operator's function."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from policies.effects import Compare, Embed, Failed, Reply, Summarize, Summary, Trim, Vectors
from policies.settings import ContextSettings
from proxy.access.destination import (
    EMBEDDINGS_PATH,
    TENANT_SHOWN,
    Caller,
    Destination,
    by_weir,
    upstream_for,
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
from proxy.models.facts import cost_of, prices_of
from proxy.runtime import Runtime
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry.metrics import ModelCall
from proxy.telemetry.names import service_at
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace, Span
from proxy.upstream.client import own_headers, read_of
from proxy.wire import CODECS
from proxy.wire.codec import ClientRequest

SUMMARIZER_SHARE = 0.85
IN_ALL = 2
"""Questions of one plan may take so many times as long as one."""


@dataclass(slots=True)
class Replies(EffectHandler):
    """Replies to the effects that planning one request yields, at the caller's expense.

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
            summary = await self.runtime.summarizer.ask(
                effect,
                terms=terms,
                send=partial(self._post, destination, named, span),
                waits=waits,
            )
            dollars = self._cost(model, summary.usage)
            span.summary(purpose=effect.purpose, source=summary.source, dollars=dollars)
            if summary.usage is not None:
                span.usage(summary.usage)
            if summary.result != "ok":
                span.fail(summary.result)
        self._count(summary, terms, dollars)
        return summary.reply

    def _terms(self, model: str, seconds: float) -> tuple[Destination, SummarizerTerms]:
        upstream = upstream_for(self.runtime.config, model)
        # the client's own endpoint exists on its upstream; on another upstream the first one is
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

    def _count(self, summary: SummaryResult, terms: SummarizerTerms, dollars: float | None) -> None:
        usage = summary.usage or NO_USAGE
        metrics = self.runtime.telemetry.metrics
        asked = usage.prompt or 0
        answered = usage.completion or 0
        cached = usage.cached or 0
        self.spent += Spent(
            calls=int(summary.source == "asked"),
            shared=int(summary.source == "shared"),
            kept=int(summary.source == "kept"),
            asked=asked,
            answered=answered,
            cached=cached,
            seconds=summary.seconds,
            dollars=dollars or 0.0,
        )
        result = summary.source if summary.source in ("kept", "shared") else summary.result
        metrics.summarizer_calls.labels(result).inc()
        if summary.source != "asked":
            return
        for kind, tokens in (("asked", asked), ("cached", cached), ("answered", answered)):
            metrics.summarizer_tokens.labels(kind).inc(tokens)
        if dollars is not None:
            metrics.summarizer_cost.labels(terms.tenant[:TENANT_SHOWN]).inc(dollars)
        metrics.observe_call(
            ModelCall(
                provider=terms.upstream,
                model=terms.model,
                seconds=summary.seconds,
                error="" if summary.result == "ok" else summary.result,
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

    A summariser that refused a prompt of ``caller``'s as too long has the limit that it named for
    an hour.
    """
    named = settings.summarizer
    return None if named in (None, "same") else _reads(runtime, str(named), settings, caller)


def _reads(runtime: Runtime, model: str, settings: ContextSettings, caller: Caller) -> int | None:
    window = runtime.registry.facts(model, settings=settings).window
    upstream = upstream_for(runtime.config, model).name
    refused = runtime.summarizer.input_limit(tenant=caller.tenant, upstream=upstream, model=model)
    window = min((size for size in (window, refused) if size is not None), default=None)
    return None if window is None else int(window * SUMMARIZER_SHARE)
