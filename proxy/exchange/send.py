"""The requests to the upstream that one exchange makes: what they ask for, and what is learned from
their answers.

An answer may say that the request does not fit. What was removed from the conversation has the
request carry the recall tool, and its rounds are asked from there.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence

import msgspec

from policies.limits import RECALL_TOKENS
from policies.settings import ContextSettings
from proxy.access.destination import Destination
from proxy.errors import ProxyError, UpstreamEmpty, UpstreamUnreachable
from proxy.features.recall.archive import Archive
from proxy.features.recall.rounds import MAX_ROUNDS, Rounds
from proxy.features.recall.tool import Offer, offer_for, with_more
from proxy.models.limits import COUNTED_IN, TOKENS, ModelLimitsResolver, cut_at, stays_cut
from proxy.planning.loads import SIZES, Scales
from proxy.planning.planner import Planner
from proxy.planning.values import Plan, PlanRequest, Recognized
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
    plausible_limit,
)
from proxy.wire.codec import ClientRequest, with_fields
from proxy.wire.transcripts import Transcripts

MIN_OUTPUT = 16
CLAMP_MARGIN = 8
CUT_IN_SILENCE = (
    "%s reads %d tokens of a request of %d, and said nothing: a window of %d is taken for its own; "
    "set num_ctx (Ollama) or what the server calls it, or state the window under models"
)
BETA = b"anthropic-beta"
DROPPED = frozenset({b"accept-encoding"})
DROPPED_WITH_CONTEXT = DROPPED | CONTEXT_HEADERS
log = logging.getLogger("weir.windows")
OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}


class Attempts(msgspec.Struct):
    """The requests to the upstream that one client's request makes, until an answer can be relayed.

    Without a ``policy`` no stream is looked into beforehand. ``room`` is what was asked for the
    answer in place of the client's number; ``rounds`` what the upstream reported of the answers
    before the last one; ``called`` when the call began that is not counted yet, ``received`` when
    its answer was whole (``time.perf_counter``); ``first_chunk`` the seconds until its stream
    began.
    """

    upstreams: Upstreams
    windows: ModelLimitsResolver
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
            request=self._asked(),
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

    def _asked(self) -> Mapping[str, object]:
        request = self.request
        asked = {name: request.value(name) for name in REQUEST_PARAMS if name in request.fields}
        if self.room is not None:
            asked[self.request.limit] = self.room
        form = request.value("response_format") if "response_format" in request.fields else None
        if isinstance(form, dict) and (kind := OUTPUT_TYPES.get(str(form.get("type")))):
            asked["output_type"] = kind
        return asked

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
        if not self.windows.knows(limits.scope, COUNTED_IN):
            return plan.body
        used = math.ceil(decision.after * (1 + limits.budget.margin))
        return self._asking_for(plan.body, limits.budget.window - used - CLAMP_MARGIN) or plan.body

    def clamped(self, body: bytes, verdict: Verdict, plan: Plan, *, floor: bool) -> bytes | None:
        """The same body asking for a shorter answer, where only prompt plus answer is too large;
        None where it is not.

        None also where the client asks for nothing that could be cut, and with ``floor`` where less
        would be left for the answer than the floor of its reserve.
        """
        if verdict.kind is not Kind.COMPLETION:
            return None
        least = plan.recognized.limits.budget.floor if floor and plan.recognized is not None else 0
        return self._asking_for(body, verdict.clamp(CLAMP_MARGIN), least=least)

    def _asking_for(self, body: bytes, room: int | None, *, least: int = 0) -> bytes | None:
        asked = self.request.max_tokens
        least = max(least, MIN_OUTPUT, self.request.codec.least_output(self.request))
        if room is None or asked is None or room >= asked or room < min(least, asked):
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


def learn_from_error(windows: ModelLimitsResolver, verdict: Verdict, plan: Plan) -> int | None:
    """Learn from an overflow; the window that it named where that holds for this request only,
    tokens.
    """
    recognized = plan.recognized
    if recognized is None:
        return None
    known = recognized.limits
    is_counted = not (recognized.has_media or recognized.sampled)
    if verdict.kind is Kind.COMPLETION:
        windows.know(known.scope, COUNTED_IN)
    limit = plausible_limit(verdict)
    doubted = None
    is_within = limit == known.budget.window and not windows.knows(known.scope, TOKENS)
    if limit is not None:  # a repeat that was planned within it is not another that names it
        doubted = limit if is_within or not windows.learn(known.scope, limit) else None
    elif verdict.prompt is not None or is_counted:
        windows.refused(known.scope, verdict.prompt or known.budget.estimate(plan.sent))
    if verdict.prompt is not None and not verdict.at_least and is_counted:
        windows.calibrate(known.counted, estimated=plan.sent, reported=verdict.prompt)
    return doubted


def learn_load(
    windows: ModelLimitsResolver,
    scales: Scales,
    verdict: Verdict,
    plan: Plan,
    request: ClientRequest,
) -> None:
    """Learn what an upstream takes beside tokens, from its refusal of a request."""
    recognized = plan.recognized
    if recognized is None:
        return
    scope = recognized.limits.scope
    kind = verdict.kind.value
    if verdict.limit is not None:
        windows.learn(scope, verdict.limit, kind)
    else:
        windows.refused(scope, load_of(kind, scales, plan, request), kind)


def load_of(kind: str, scales: Scales, plan: Plan, request: ClientRequest) -> int:
    """How much of a kind went up."""
    if kind == "bytes" or plan.recognized is None:
        return len(plan.body)
    pieces = None if plan.decision is None else plan.decision.pieces
    return scales.amount(kind, request, plan.recognized.transcript, pieces)


def learn_loads_passed(
    windows: ModelLimitsResolver, scales: Scales, plan: Plan, request: ClientRequest
) -> None:
    """Note what an upstream has taken of each kind of which it is known to take only so much."""
    if plan.recognized is None:
        return
    for kind in plan.recognized.limits.most:
        if kind not in SIZES:
            amount = load_of(kind, scales, plan, request)
            windows.limits.passed(plan.recognized.limits.scope, amount, kind=kind)


def learn_from_answer(
    windows: ModelLimitsResolver,
    transcripts: Transcripts,
    plan: Plan,
    asked: PlanRequest,
    *,
    usage: ReportedUsage,
    accepted: bool,
) -> bool:
    """Learn from what the upstream says that the forwarded request took; whether it has read only a
    part of it.
    """
    recognized = plan.recognized
    prompt = usage.prompt
    if recognized is None or prompt is None:
        return False
    known = recognized.limits
    has_media = recognized.has_media
    is_counted = not (has_media or recognized.sampled)
    if accepted and is_counted and windows.is_too_little(known, plan.sent, prompt):
        if bytes(asked.request.fields.get("truncation", b"")) == b'"auto"':
            windows.refused(known.scope, known.budget.estimate(plan.sent))
            return True
        new = _new_tokens(plan, recognized, usage)
        window = None if new is None else cut_at(prompt, new=new)
        if window is not None and not stays_cut(recognized.thread, prompt, plan.sent, window):
            return False
        if window is not None:
            log.warning(
                CUT_IN_SILENCE,
                asked.request.model[:200],
                prompt,
                known.budget.estimate(plan.sent),
                window,
            )
            windows.learn_cut(known.scope, window, counted=known.counted)
            return True
    recognized.thread.still = None
    if accepted:
        windows.limits.passed(known.scope, prompt)
    if is_counted:
        windows.calibrate(known.counted, estimated=plan.sent, reported=prompt)
    elif has_media and plan.body is asked.request.body:
        beyond = prompt - known.budget.estimate(plan.sent)
        transcripts.learn_files(asked.request, tenant=asked.tenant, tokens=beyond)
    return False


def _new_tokens(plan: Plan, recognized: Recognized, usage: ReportedUsage) -> int | None:
    """What of a request the upstream's cache cannot hold, None where its usage tells nothing of a
    cut.

    A server that counts only what its cache did not give reports about so much, one that reads from
    a cache says so.
    """
    if plan.decision is None or plan.decision.is_new or usage.cached or not recognized.length:
        return None
    transcript = recognized.transcript
    known = len(transcript.messages) - len(transcript.chain) + recognized.length
    return sum(message.tokens for message in transcript.messages[known:])


REFUSALS = frozenset({400, 404, 405, 422, 501})
WORDS = (b"tool", b"function")
MAX_ERROR_LEN = 16 * 1024
MAX_SCOPES = 1_000


class Recalling(msgspec.Struct):
    """The recall tool of one request that is managed; ``offer`` is None as long as it does not
    carry it.

    ``without_tools`` are the scopes (origin, model, credential) whose upstream was seen to take no
    tools.
    """

    asked: PlanRequest
    attempts: Attempts
    planner: Planner
    without_tools: set[str]
    offer: Offer | None = None

    def consider(self, plan: Plan) -> Plan:
        """Have the request carry the tool from now on, if something was removed from its
        conversation.

        The plan comes back, with what the definition costs added to what it says is sent.
        """
        before = self.offer
        self.offer = None
        asked = self.asked
        if (
            plan.recognized is None
            or not is_due(plan)
            or plan.recognized.limits.scope in self.without_tools
        ):
            return plan
        offer = before or offer_for(asked.request, asked.settings, asked.counter)
        if offer is None or not plan.recognized.limits.budget.hard_fits(plan.sent + offer.tokens):
            return plan
        self.offer = offer
        return msgspec.structs.replace(plan, sent=plan.sent + offer.tokens)

    async def make(self, body: bytes, plan: Plan) -> tuple[UpstreamResponse, Verdict]:
        received, verdict = await self.attempts.make(self._carrying(body), plan)
        if self.offer is None or verdict.is_overflow or not refuses_tools(received):
            return received, verdict
        received.answer.close()
        self.attempts.metrics.retries.labels("tools_refused").inc()
        received, verdict = await self.attempts.make(body, plan)
        if received.answer.status < 400:
            self.offer = None
            if plan.recognized is not None and len(self.without_tools) < MAX_SCOPES:
                self.without_tools.add(plan.recognized.limits.scope)
        return received, verdict

    def note_round(self, received: UpstreamResponse, seen: Tap | None) -> None:
        attempts = self.attempts
        seen = seen or Tap()
        if attempts.span is not None:
            attempts.span.end_call(received.answer.status, seen=seen)
        attempts.count_call(seen=seen)
        attempts.rounds.append(seen.usage or NO_USAGE)

    def _carrying(self, body: bytes) -> bytes:
        return body if self.offer is None else with_more(body, "tools", [self.offer.definition])

    def rounds(self, body: bytes, plan: Plan) -> Rounds | None:
        """The rounds that may follow an answer to ``body``, the request without the tool; None
        where it had none.
        """
        offer = self.offer
        asked = self.asked
        recognized = plan.recognized
        if offer is None or recognized is None:
            return None
        thread = recognized.thread
        archive = Archive(
            transcript=recognized.transcript,
            pieces=plan.decision.pieces if plan.decision is not None else None,
            edits=tuple(recognized.view.ledger.edits.values()),
            cuts=recognized.view.ledger.cuts,
            tenant=asked.tenant,
            conversation=thread.branch.conversation,
            named=asked.name is not None,
            store=self.planner.store,
            unstored=self.planner.settler.original,
            ask=asked.ask,
            embeddings=asked.settings.embeddings,
        )
        return Rounds(
            offer=offer,
            archive=archive,
            counter=asked.counter,
            model=asked.request.model,
            body=self._carrying(body),
            plain=body,
            room=recognized.limits.budget.hard_limit - plan.sent,
            most=MAX_ROUNDS,
            max_tokens=RECALL_TOKENS,
            joins="response_format" not in asked.request.fields,
        )


def is_due(plan: Plan) -> bool:
    """Whether something is out of the window of a request's conversation, by this request's batch
    or an earlier one.

    For a request that begins anew from an early point it is what was out by then.
    """
    if plan.recognized is None or plan.decision is None:
        return False
    return plan.recognized.known().at(len(plan.recognized.transcript.chain)).has_removed


def refuses_tools(received: UpstreamResponse) -> bool:
    if received.body is None or received.answer.status not in REFUSALS:
        return False
    said = received.body[:MAX_ERROR_LEN].lower()
    return any(word in said for word in WORDS)
