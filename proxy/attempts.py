"""One request to the upstream: what it may ask for, what its answer says about size, what is learned from it."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies import ContextSettings
from proxy.access.destination import Destination
from proxy.errors import ProxyError, UpstreamEmpty, UpstreamUnreachable
from proxy.heard import capture_stream
from proxy.outcome import Outcome, address_of, provider_of
from proxy.planning import PlannedRequest
from proxy.record import count_call
from proxy.relay import IN_THE_MIDDLE, MAX_WHOLE, Opening, UpstreamResponse, is_readable, is_stream, open_stream
from proxy.runtime import Runtime
from proxy.tap import error_code, read_completion
from proxy.telemetry import CONTEXT_HEADERS, AnySpan
from proxy.telemetry.names import REQUEST_PARAMS
from proxy.upstream.client import Answer, StreamBroken
from proxy.upstream.overflow import (
    NONE,
    Kind,
    Verdict,
    classify,
    classify_answer,
    classify_event,
    is_cut_short,
    plausible_limit,
)
from proxy.wire.messages import ChatRequest, with_fields

MIN_OUTPUT = 16
CLAMP_MARGIN = 8
DROPPED = frozenset({b"accept-encoding"})
DROPPED_WITH_CONTEXT = DROPPED | CONTEXT_HEADERS
OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}


@dataclass(slots=True)
class Attempts:
    """The requests to the upstream that one client's request makes, until an answer can be relayed.

    ``policy`` is what manages the request, None where nothing does: then no stream is looked into beforehand.
    """

    runtime: Runtime
    request: ChatRequest
    destination: Destination
    headers: Sequence[tuple[bytes, bytes]]
    outcome: Outcome
    policy: ContextSettings | None
    made: int = 0
    room: int | None = None

    async def make(self, body: bytes, planned: PlannedRequest) -> tuple[UpstreamResponse, Verdict]:
        """Send ``body`` as one more attempt: the answer, and what it says about size."""
        outcome = self.outcome
        self.made += 1
        span = outcome.trace.attempt(
            self.request.model,
            provider_of(self.destination.upstream),
            *address_of(self.destination.upstream),
            request=self._asked() if outcome.trace.recorded else None,
            compacted=planned.decision is not None and "compact" in planned.decision.applied and not outcome.observed,
        )
        outcome.attempt = span
        outcome.begin_call()
        span.asked(body)
        context = span.propagation() if self.destination.upstream.forward_trace else ()
        drop = DROPPED_WITH_CONTEXT if context or not self.destination.upstream.forward_trace else DROPPED
        try:
            answer = await self.runtime.upstreams.send(
                self.destination,
                method="POST",
                query=outcome.query,
                headers=[*[h for h in self.headers if h[0] not in drop], *context],
                body=body,
                attempt=self.made - 1,
            )
            span.arrived(answer.status)
            received, verdict = await self._look(answer, planned, span)
        except ProxyError as error:
            span.failed(error.code)
            count_call(self.runtime.telemetry.metrics, outcome, error=error.code)
            raise
        if answer.status >= 400 or verdict.is_overflow:
            reason = "context_length_exceeded" if verdict.is_overflow else error_code(received.body or b"")
            span.failed(reason or str(answer.status))
            count_call(self.runtime.telemetry.metrics, outcome, error=reason or str(answer.status))
        return received, verdict

    def _asked(self) -> Mapping[str, object]:
        """What the request asks of the model, for the trace: the fields in the table, as they go up."""
        request = self.request
        asked = {name: request.value(name) for name in REQUEST_PARAMS if name in request.fields}
        if self.room is not None:
            asked["max_completion_tokens" if "max_completion_tokens" in asked else "max_tokens"] = self.room
        form = request.value("response_format") if "response_format" in request.fields else None
        if isinstance(form, dict) and (kind := OUTPUT_TYPES.get(str(form.get("type")))):
            asked["output_type"] = kind
        return asked

    async def _look(self, answer: Answer, planned: PlannedRequest, span: AnySpan) -> tuple[UpstreamResponse, Verdict]:
        """Read as much of an answer as tells whether it is an overflow, before anything goes to the client."""
        if is_stream(answer) and answer.status < 400:
            chunks = capture_stream(answer.chunks(), span) if span.captures else answer.chunks()
            if self.policy is None:
                return UpstreamResponse(answer, chunks=chunks), NONE
            try:
                opening = await open_stream(chunks, begun=self.outcome.begin_stream)
            except StreamBroken as error:
                answer.close()
                raise UpstreamUnreachable(str(error)) from None
            except BaseException:
                answer.close()
                raise
            verdict = self._of_opening(opening, planned)
            if opening.ended and not (opening.error or opening.tap.complete) and is_readable(answer):
                answer.close()
                if not opening.tap.seen.ends:
                    raise UpstreamEmpty("The upstream ended its stream without an answer.")
                raise UpstreamUnreachable(IN_THE_MIDDLE)
            return UpstreamResponse(answer, chunks=chunks, opening=opening), verdict
        try:
            body = await answer.read(MAX_WHOLE)
        except StreamBroken as error:
            answer.close()
            raise UpstreamUnreachable(str(error)) from None
        if answer.ended:
            self.outcome.received = time.perf_counter()
        if answer.status == 200 and not body.strip():
            answer.close()
            raise UpstreamEmpty("The upstream answered 200 with an empty body.")
        seen = read_completion(body) if answer.status < 400 else None
        if seen is not None and seen.truncated and answer.ended:
            answer.close()
            raise UpstreamUnreachable(IN_THE_MIDDLE)
        if seen is not None:
            span.said_whole(body)
        if seen is not None and seen.said:
            return UpstreamResponse(answer, body=body, seen=seen), NONE
        window = planned.belief.budget.window if planned.belief is not None else None
        verdict = classify(answer.status, body, window=window)
        if seen is not None and verdict.kind is not Kind.CONTEXT:
            verdict = NONE  # an answer that was only cut short
        return UpstreamResponse(answer, body=body, seen=seen), verdict

    def _of_opening(self, opening: Opening, planned: PlannedRequest) -> Verdict:
        """What the beginning of a stream says: an error, or that the window was full before a word of the answer."""
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
            window=planned.belief.budget.window if planned.belief is not None else None,
        )
        return verdict if verdict.kind is Kind.CONTEXT else NONE

    def within_window(self, planned: PlannedRequest) -> bytes:
        """The planned body, asking for no more than fits where the upstream is known to refuse more than that."""
        belief, decision = planned.belief, planned.decision
        if self.policy is None or self.policy.observes or belief is None or decision is None:
            return planned.body
        if not self.runtime.windows.is_strict(belief.scope):
            return planned.body
        used = math.ceil(decision.after * (1 + belief.budget.margin))
        return self._asking_for(planned.body, belief.budget.window - used - CLAMP_MARGIN) or planned.body

    def clamped(self, body: bytes, verdict: Verdict) -> bytes | None:
        """The same body asking for a shorter answer, where only prompt plus answer is too large; None where it is not.

        None also where the client asks for nothing that could be cut.
        """
        return self._asking_for(body, verdict.clamp(CLAMP_MARGIN)) if verdict.kind is Kind.COMPLETION else None

    def _asking_for(self, body: bytes, room: int | None) -> bytes | None:
        """The body with the client's ``max_tokens`` cut to ``room``; None if there is nothing to cut or no room."""
        asked = self.request.max_tokens
        if room is None or asked is None or room >= asked or room < min(MIN_OUTPUT, asked):
            return None
        name = "max_completion_tokens" if "max_completion_tokens" in self.request.fields else "max_tokens"
        self.outcome.clamped, self.room = True, room
        return with_fields(body, **{name: room})


def learn_from_error(runtime: Runtime, verdict: Verdict, planned: PlannedRequest) -> None:
    """Remember the limit and the count that an upstream put into its error."""
    belief, windows = planned.belief, runtime.windows
    if belief is None:
        return
    if verdict.kind is Kind.COMPLETION:
        windows.mark_strict(belief.scope)
    limit = plausible_limit(verdict)
    if limit is not None:
        windows.learn(belief.scope, limit)
    elif verdict.prompt is not None or not planned.has_media:
        windows.refused(belief.scope, verdict.prompt or belief.budget.estimate(planned.sent or 0))
    if verdict.prompt is not None and not verdict.at_least:
        _calibrate(runtime, planned, verdict.prompt)


def learn_from_answer(runtime: Runtime, outcome: Outcome) -> None:
    """Learn from what the upstream says the forwarded request took: the first one, where rounds followed it."""
    planned, seen = outcome.planned, outcome.seen
    usage = outcome.rounds[0] if outcome.rounds else seen.usage
    if planned.belief is None or usage is None or usage.prompt is None:
        return
    if outcome.status is not None and outcome.status < 400:
        runtime.windows.passed(planned.belief.scope, usage.prompt)
    _calibrate(runtime, planned, usage.prompt)
    job = outcome.job
    if planned.has_media and planned.sent is not None and job is not None and planned.body is job.request.body:
        beyond = usage.prompt - planned.belief.budget.estimate(planned.sent)
        runtime.planner.transcripts.learn_files(job.request, tenant=job.tenant, tokens=beyond)


def _calibrate(runtime: Runtime, planned: PlannedRequest, reported: int) -> None:
    if planned.belief is not None and planned.sent is not None and not planned.has_media:
        runtime.windows.calibrate(planned.belief.counted, estimated=planned.sent, reported=reported)
