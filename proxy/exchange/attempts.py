"""The requests to the upstream that one exchange makes, and what their answers say.

An answer may say that the request does not fit.
"""

import math
import time
from collections.abc import Mapping, Sequence

import msgspec

from policies.settings import ContextSettings
from proxy.access.destination import Destination
from proxy.errors import ProxyError, UpstreamEmpty, UpstreamUnreachable
from proxy.models.limits import COUNTED_IN, ModelLimitsResolver
from proxy.planning.values import Plan
from proxy.stream import (
    IN_THE_MIDDLE,
    MAX_WHOLE,
    Opening,
    UpstreamResponse,
    capture_stream,
    is_readable,
    is_stream,
    open_stream,
)
from proxy.tap import NO_USAGE, ReportedUsage, Tap, error_code, read_completion, unpacker_for
from proxy.telemetry.metrics import Metrics, ModelCall
from proxy.telemetry.names import REQUEST_PARAMS, service_at
from proxy.telemetry.trace import CONTEXT_HEADERS, NULL_SPAN, ExchangeTrace, Span
from proxy.upstream.client import Upstreams
from proxy.upstream.connection import Answer, StreamBroken
from proxy.upstream.overflow import (
    NONE,
    Kind,
    Verdict,
    classify,
    classify_answer,
    classify_event,
    is_cut_short,
)
from proxy.wire.codec import ClientRequest, with_fields

MIN_OUTPUT = 16
CLAMP_MARGIN = 8
BETA = b"anthropic-beta"
DROPPED = frozenset({b"accept-encoding"})
DROPPED_WITH_CONTEXT = DROPPED | CONTEXT_HEADERS
OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}


class Attempts(msgspec.Struct):
    """The requests to the upstream that one client's request makes, until an answer can be relayed.

    Without a ``policy`` no stream is looked into beforehand. ``room`` is the length requested for
    the answer in place of the client's number; ``rounds`` what the upstream reported of the answers
    before the last one; ``called`` when the call began that is not counted yet, ``received`` when
    its answer was whole (``time.perf_counter``); ``first_chunk`` the seconds until its stream
    began.
    """

    upstreams: Upstreams
    limits_resolver: ModelLimitsResolver
    metrics: Metrics
    request: ClientRequest
    destination: Destination
    headers: Sequence[tuple[bytes, bytes]]
    query: bytes
    trace: ExchangeTrace
    policy: ContextSettings | None
    span: Span | None = None
    made: int = 0
    room: int | None = None
    retries: int = 0
    overflows: int = 0
    rounds: list[ReportedUsage] = msgspec.field(default_factory=list)
    called: float | None = None
    received: float | None = None
    first_chunk: float | None = None

    async def make(self, body: bytes, plan: Plan) -> tuple[UpstreamResponse, Verdict]:
        upstream = self.destination.upstream
        self.made += 1
        self.span = span = self._begin_span(body, plan) if self.trace.recorded else NULL_SPAN
        self.called = time.perf_counter()
        self.received = None
        self.first_chunk = None
        context = span.propagation() if span.recorded and upstream.forward_trace else ()
        drop = DROPPED if upstream.forward_trace else DROPPED_WITH_CONTEXT
        headers = self.headers
        if context or plan.betas:
            kept = [h for h in headers if h[0] not in (DROPPED_WITH_CONTEXT if context else drop)]
            drop = frozenset()
            headers = [*_with_betas(kept, plan.betas), *context]
        try:
            answer = await self.upstreams.send(
                self.destination,
                method="POST",
                query=self.query,
                headers=headers,
                drop=drop,
                body=body,
                attempt=self.made - 1,
            )
            if span.recorded:
                span.status(answer.status)
            try:
                received, verdict = await self._look(answer, plan, span)
            except BaseException as error:
                answer.close()
                if isinstance(error, StreamBroken):
                    raise UpstreamUnreachable(str(error)) from None
                raise
        except ProxyError as error:
            span.end_call(error_type=error.code)
            self.count_call(error=error.code)
            raise
        if answer.status >= 400 or (verdict is not NONE and verdict.is_overflow):
            reason = (
                "context_length_exceeded"
                if verdict.is_overflow
                else error_code(received.body or b"")
            )
            span.end_call(error_type=reason or str(answer.status))
            self.count_call(error=reason or str(answer.status))
        return received, verdict

    def _begin_span(self, body: bytes, plan: Plan) -> Span:
        observes = self.policy is not None and self.policy.observes
        upstream = self.destination.upstream
        span = self.trace.attempt(
            self.request.model,
            *service_at(upstream.address, upstream.name, upstream.provider),
            request=self._params(),
            compacted=plan.decision is not None
            and "compact" in plan.decision.applied
            and not observes,
        )
        if self.room is not None and self.request.max_tokens is not None:
            span.clamp(self.request.max_tokens, self.room)
        span.request_body(body)
        return span

    def begin_stream(self) -> None:
        if self.first_chunk is None and self.called is not None:
            self.first_chunk = time.perf_counter() - self.called
            if self.span is not None:
                self.span.first_chunk(self.first_chunk)

    def end_call(self, usage: ReportedUsage, seen: Tap | None, error: str) -> ModelCall | None:
        """The call that ends now, None where none is under way; an answer's model is the one that
        it names.
        """
        begun = self.called
        self.called = None
        if begun is None:
            return None
        upstream = self.destination.upstream
        provider, address, port = service_at(upstream.address, upstream.name, upstream.provider)
        return ModelCall(
            provider=provider,
            model=self.request.model,
            seconds=(self.received or time.perf_counter()) - begun,
            response_model=(seen.model if seen is not None else None) or "",
            address=address,
            port=port,
            error=error,
            usage=usage,
            first_chunk=self.first_chunk,
        )

    def count_call(self, *, seen: Tap | None = None, error: str = "") -> None:
        used = seen.usage if seen is not None else None
        if (call := self.end_call(used or NO_USAGE, seen, error)) is not None:
            self.metrics.observe_call(call)

    def _params(self) -> Mapping[str, object]:
        request = self.request
        params = {name: request.value(name) for name in REQUEST_PARAMS if name in request.fields}
        if self.room is not None:
            params[self.request.limit] = self.room
        form = request.value("response_format") if "response_format" in request.fields else None
        if isinstance(form, dict) and (kind := OUTPUT_TYPES.get(str(form.get("type")))):
            params["output_type"] = kind
        return params

    async def _look(
        self, answer: Answer, plan: Plan, span: Span
    ) -> tuple[UpstreamResponse, Verdict]:
        if is_stream(answer) and answer.status < 400:
            chunks = answer.chunks()
            if span.captures:
                chunks = capture_stream(chunks, span, codec=self.request.codec)
            if self.policy is None:
                return UpstreamResponse(answer, chunks=chunks), NONE
            opening = await open_stream(chunks, codec=self.request.codec, begun=self.begin_stream)
            verdict = self._of_opening(opening, plan)
            if (
                opening.ended
                and not (opening.error or opening.tap.complete)
                and is_readable(answer)
            ):
                if not opening.tap.seen.ends:
                    raise UpstreamEmpty("The upstream ended its stream without an answer.")
                raise UpstreamUnreachable(IN_THE_MIDDLE)
            return UpstreamResponse(answer, chunks=chunks, opening=opening), verdict
        body = await answer.read(MAX_WHOLE)
        if answer.ended:
            self.received = time.perf_counter()
        if answer.status == 200 and not body.strip():
            raise UpstreamEmpty("The upstream answered 200 with an empty body.")
        unpacker = unpacker_for(answer.headers)
        said = body if unpacker is None else unpacker.feed(body)
        seen = read_completion(said, self.request.codec) if answer.status < 400 else None
        if seen is not None and seen.truncated and answer.ended and unpacker is None:
            raise UpstreamUnreachable(IN_THE_MIDDLE)
        if seen is not None and span.captures:
            span.response_body(body)
        if seen is not None and seen.said:
            return UpstreamResponse(answer, body=body, seen=seen), NONE
        verdict = classify(answer.status, body, window=_window(plan))
        if seen is not None and verdict.kind is not Kind.CONTEXT:
            verdict = NONE  # an answer that was only cut short
        return UpstreamResponse(answer, body=body, seen=seen), verdict

    def _of_opening(self, opening: Opening, plan: Plan) -> Verdict:
        if opening.error is not None:
            return classify_event(opening.error)
        seen = opening.tap.seen
        if seen.said or seen.usage is None or not is_cut_short(seen.finish_reasons):
            return NONE
        verdict = classify_answer(
            seen.finish_reasons[0],
            prompt=seen.usage.prompt,
            completion=seen.usage.completion,
            max_tokens=self.request.max_tokens,
            window=_window(plan),
        )
        return verdict if verdict.kind is Kind.CONTEXT else NONE

    def within_window(self, plan: Plan) -> bytes:
        recognized = plan.recognized
        decision = plan.decision
        if self.policy is None or self.policy.observes or recognized is None or decision is None:
            return plan.body
        limits = recognized.limits
        if not self.limits_resolver.knows(limits.scope, COUNTED_IN):
            return plan.body
        used = math.ceil(decision.after * (1 + limits.budget.margin))
        return self._asking_for(plan.body, limits.budget.window - used - CLAMP_MARGIN) or plan.body

    def clamped(self, body: bytes, verdict: Verdict, plan: Plan, *, floor: bool) -> bytes | None:
        """The same body requesting a shorter answer, where only prompt plus answer is too large;
        None where it is not.

        None also where the client requests nothing that could be cut, and with ``floor`` where less
        would be left for the answer than the floor of its reserve.
        """
        if verdict.kind is not Kind.COMPLETION:
            return None
        least = plan.recognized.limits.budget.floor if floor and plan.recognized is not None else 0
        return self._asking_for(body, verdict.clamp(CLAMP_MARGIN), least=least)

    def _asking_for(self, body: bytes, room: int | None, *, least: int = 0) -> bytes | None:
        max_tokens = self.request.max_tokens
        least = max(least, MIN_OUTPUT, self.request.codec.least_output(self.request))
        if (
            room is None
            or max_tokens is None
            or room >= max_tokens
            or room < min(least, max_tokens)
        ):
            return None
        self.room = room
        return with_fields(body, **{self.request.limit: room})


def _with_betas(
    headers: list[tuple[bytes, bytes]], betas: Sequence[bytes]
) -> list[tuple[bytes, bytes]]:
    if not betas:
        return headers
    named = [value for name, value in headers if name == BETA]
    return [
        *(header for header in headers if header[0] != BETA),
        (BETA, b",".join((*named, *betas))),
    ]


def _window(plan: Plan) -> int | None:
    return None if plan.recognized is None else plan.recognized.limits.budget.window
