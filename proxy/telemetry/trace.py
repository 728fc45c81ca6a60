"""The trace of one exchange: a SERVER span, the plan with its layers, and one CLIENT span per model
call.

::

    SERVER   POST /v1/chat/completions
    ├── INTERNAL weir context.plan
    │   ├── INTERNAL weir context.read             what took 1 ms or more outside the layers
    │   ├── INTERNAL weir context.layer evict
    │   └── INTERNAL weir context.layer compact
    │       └── CLIENT   chat small-model          the summariser
    ├── CLIENT   chat big-model                    Error context_length_exceeded
    └── CLIENT   chat big-model                    http.request.resend_count 1, compacted

Spans are OpenTelemetry's. Layers run in a thread or a process that knows no spans: theirs have the
times that were reported of them. Times are nanoseconds since the epoch.
"""

from collections.abc import Mapping, Sequence
from time import time_ns
from typing import Final, Self

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NoOpTracer,
    SpanKind,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from policies.ledger import PressureReading, TokenUsage
from proxy.tap import NO_USAGE, ReportedUsage, Tap
from proxy.telemetry import names
from proxy.telemetry.content import request_content, response_choices, response_content
from proxy.telemetry.names import MAX_LIST, Value, clean, code, session_id

Header = tuple[bytes, bytes]

CONTEXT_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})
PROPAGATOR: Final = TraceContextTextMapPropagator()
LAYER_APART: Final = 2_000
"""Nanoseconds: viewers that keep times as floats distinguish two microseconds, and not always one.
"""
MIN_PART: Final = 1_000_000
"""Nanoseconds: a part that took less is no span, so that a warm request has none."""
_WITHIN_LAYERS: Final = frozenset({"state", "extract", "note"})
_NOT_ERRORS: Final = frozenset({"client_disconnect"})


class Span:
    """A span of an exchange, with what Weir says of a plan or of a call to a model.

    What is set after its end is ignored. As a context manager it ends with the block, failed by
    what leaves it.
    """

    __slots__ = (
        "_lap",
        "_laps",
        "_layer",
        "_part",
        "_shown",
        "error_type",
        "otel",
        "parent",
        "recorded",
        "resends",
        "started",
        "trace",
    )

    def __init__(
        self, trace: "ExchangeTrace", otel: OtelSpan, parent: "Span | None" = None, started: int = 0
    ) -> None:
        self.trace = trace
        self.otel = otel
        self.parent = parent
        self.recorded = otel.is_recording()
        self.started = started
        self.error_type: str | None = None
        self.resends = 0
        self._lap = started
        self._part = started
        self._shown = started
        self._layer: Span | None = None
        self._laps: list[tuple[Span | None, int, int]] = []

    def set(self, name: str, value: Value | None) -> None:
        """Set an attribute; None is no value."""
        if value is not None and self.otel.is_recording():
            self.otel.set_attribute(name, value)

    def fail(self, reason: str) -> None:
        """Mark the span as failed; a client that left is no error."""
        self.error_type = code(reason)
        self.set(names.ERROR_TYPE, self.error_type)
        if reason not in _NOT_ERRORS and self.otel.is_recording():
            self.otel.set_status(StatusCode.ERROR)

    def end(self, at: int | None = None) -> None:
        """End the span; only the first call counts."""
        if self.otel.is_recording():
            self.otel.end(at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.fail(kind.__name__)
        self._end_laps()
        if self.trace.plan_span is self:
            self.trace.plan_span = None
        self.end()

    # Slow parts

    def now(self) -> int:
        """The time, 0 where nothing is recorded."""
        return time_ns() if self.recorded else 0

    def since(self, started: int, what: str, reason: str = "") -> int:
        """Record what began at ``started`` and has just ended, if it took long enough; the time
        now.
        """
        if not self.recorded:
            return 0
        now = time_ns()
        if now - started >= MIN_PART:
            parent = self.layer_span() if what in _WITHIN_LAYERS else self
            part = self.trace.start(
                f"{names.PART_SPAN}{what}", SpanKind.INTERNAL, parent, started=started
            )
            part.set(names.REASON, reason or None)
            self.trace.end_part(part, now)
        return now

    def begin(self) -> None:
        """A plan begins, perhaps again."""
        self._end_laps()
        self.resume(between=True)

    def resume(self, *, between: bool) -> None:
        """The planner goes on now; ``between`` two layers, or within one."""
        self._part = self.now()
        if between:
            self._lap = self._part
            self._layer = None

    def lap(self, what: str) -> None:
        """The planner has just done ``what``: a layer, or a part of one."""
        if not self.recorded:
            return
        if what == "layer":
            self._laps.append((self._layer, self._lap, time_ns()))
        else:
            self.since(self._part, what)
        self.resume(between=what not in _WITHIN_LAYERS)

    def layer_span(self) -> "Span":
        """The span of the layer that runs now; its name is known when the layer is reported."""
        if self._layer is None:
            self._layer = self.trace.start(
                names.LAYER_SPAN, SpanKind.INTERNAL, self, started=self._lap
            )
        return self._layer

    def _end_laps(self) -> None:
        for span, _, ended in self._laps:
            if span is not None:
                span.end(ended)
        self._laps.clear()

    # A plan

    def layer(
        self,
        name: str,
        *,
        before: int,
        after: int,
        units: int,
        ref: str | None = None,
        reason: str = "",
        trigger: int | None = None,
        scorer: str | None = None,
        rung: bool = False,
    ) -> None:
        """Record a layer that ran; to be called in the order in which they ran.

        Args:
            before: Tokens before it.
            after: Tokens after it.
            units: What it changed.
            reason: Why it did less than it should have.
            trigger: The most tokens in its scope at which it is not due, 0 for one that always is,
                None of a rung.
        """
        span, started, ended = self._laps.pop(0) if self._laps else (None, self.started, 0)
        # each begins a little after the one before it: viewers keep the order
        self._shown = max(started, self._shown + LAYER_APART)
        if span is None:
            span = self.trace.start(names.LAYER_SPAN, SpanKind.INTERNAL, self, started=self._shown)
        span.otel.update_name(f"{names.LAYER_SPAN} {name}")
        span.set(names.LAYER, name)
        span.set(names.BEFORE, before)
        span.set(names.AFTER, after)
        span.set(names.UNITS, units)
        span.set(names.REF, ref)
        span.set(names.REASON, clean(reason) if reason else None)
        span.set(names.LAYER_TRIGGER, trigger)
        span.set(names.LAYER_SCORER, scorer and clean(scorer))
        span.set(names.LAYER_RUNG, rung or None)
        span.end(max(ended, self._shown) if ended else None)

    def decide(
        self,
        action: str,
        tokens: TokenUsage,
        *,
        base: int,
        reading: PressureReading | None = None,
        stage: str = "none",
        strategy: str = "",
        evicted: int = 0,
    ) -> None:
        """Record what was decided, on this span and the root, and the seven ``ctx.pressure.*``
        values on the root.

        Args:
            base: The denominator of the pressure.
            reading: What was planned by. Turns are -1 where pressure does not grow: an attribute
                cannot be null.
            stage: The stage of management in a word.
            strategy: The layers whose work was kept.
            evicted: How many messages they took.
        """
        before, after, limit, pressure = tokens
        root = self.trace.root
        for span in {self, root}:
            span.set(names.BEFORE, before)
            span.set(names.AFTER, after)
            span.set(names.LIMIT, limit)
            span.set(names.ACTION, action)
        velocity = reading.velocity_tokens_per_turn if reading is not None else None
        turns = reading.turns_until_red if reading is not None else None
        self.trace.action = action
        root.set(names.PRESSURE_CURRENT, after)
        root.set(names.PRESSURE_MAX, base)
        root.set(names.PRESSURE_PERCENT, round(100 * pressure.level, 1))
        root.set(names.PRESSURE_ZONE, pressure.zone)
        root.set(names.PRESSURE_VELOCITY, round(velocity or 0.0, 1))
        root.set(names.PRESSURE_TURNS, -1.0 if turns is None else float(turns))
        root.set(names.PRESSURE_SOURCE, "client_estimated" if reading is None else reading.source)
        root.set(names.STAGE, stage)
        if evicted or strategy:
            root.set(names.STRATEGY, clean(strategy))
            root.set(names.EVICTED, evicted)
        root.set(names.BEFORE_PERCENT, None if reading is None else round(100 * before / base, 1))

    def refused_by(self, bucket: str, *, used: int, cap: int) -> None:
        """Record the bucket that a request was refused for: its tokens, and the most that it may
        hold.
        """
        self.set(names.BUCKET, clean(bucket))
        self.set(names.BUCKET_USED, used)
        self.set(names.BUCKET_CAP, cap)

    def buckets(self, tokens: Mapping[str, int]) -> None:
        """Record the tokens by bucket."""
        self.set(names.BUCKETS, tuple(f"{name}={count}" for name, count in tokens.items() if count))

    # A call to a model

    @property
    def captures(self) -> bool:
        """Whether the span may hold message text."""
        return self.recorded and self.trace.captures

    def request_body(self, body: bytes) -> None:
        """Record the messages of a request, where that is allowed."""
        if self.captures:
            self._show(request_content(body))

    def response_body(self, body: bytes) -> None:
        """Record the messages of a whole answer, where that is allowed."""
        if self.captures:
            self.choices(response_choices(body))

    def choices(self, choices: Sequence[object]) -> None:
        """Record the choices of an answer, where that is allowed."""
        if self.captures:
            self._show(response_content(choices))

    def _show(self, found: dict[str, Value]) -> None:
        for name in (names.INPUT_VALUE, names.OUTPUT_VALUE):
            text = found.pop(name, None)
            if text and self.parent is self.trace.root:
                self.trace.root.set(name, text)
        for name, value in found.items():
            self.set(name, value)

    def clamp(self, before: int, after: int) -> None:
        """Record that ``max_tokens`` was lowered."""
        for span in (self, self.trace.root):
            span.set(names.CLAMPED_FROM, before)
            span.set(names.CLAMPED_TO, after)

    def propagation(self) -> tuple[Header, ...]:
        """The trace context that goes to the upstream, as headers; none where nothing is
        recorded.
        """
        carrier: dict[str, str] = {}
        if self.recorded:
            PROPAGATOR.inject(carrier, set_span_in_context(self.otel, Context()))
        return tuple((name.encode(), value.encode("latin-1")) for name, value in carrier.items())

    def status(self, status: int | None) -> None:
        """Record the status of the answer."""
        self.set(names.HTTP_STATUS, status)

    def first_chunk(self, seconds: float) -> None:
        """Record the time to the first chunk of a streamed answer."""
        self.set(names.FIRST_CHUNK, seconds)

    def usage(self, usage: ReportedUsage) -> None:
        """Record the tokens that the upstream reported."""
        self.set(names.USAGE_INPUT, usage.prompt)
        self.set(names.USAGE_OUTPUT, usage.completion)
        self.set(names.USAGE_CACHE_READ, usage.cached)
        self.set(names.USAGE_CACHE_CREATION, usage.written)
        self.set(names.USAGE_CACHE_WRITE, usage.written)
        self.set(names.USAGE_REASONING, usage.reasoning)

    def summary(self, *, purpose: str, source: str, dollars: float | None = None) -> None:
        """Record what a summariser was called for, and what the call cost."""
        self.set(names.SUMMARY_PURPOSE, clean(purpose))
        self.set(names.SUMMARY_SOURCE, source)
        self.set(names.SUMMARY_DOLLARS, dollars)

    def end_call(
        self,
        status: int | None = None,
        *,
        seen: Tap = Tap(),
        usage: ReportedUsage | None = None,
        error_type: str | None = None,
    ) -> None:
        """End the span with the upstream's answer; ``usage`` is taken instead of what ``seen`` has.

        A status of 400 and above is an error unless named otherwise. ``error_type`` is
        ``client_disconnect`` where the client left before the end, which is no error of this call.
        """
        if not self.otel.is_recording():
            return
        self.status(status)
        self.set(names.RESPONSE_MODEL, seen.model and clean(seen.model))
        self.set(names.RESPONSE_ID, seen.id and clean(seen.id))
        self.set(names.RESPONSE_TIER, seen.tier and clean(seen.tier))
        self.set(names.FINGERPRINT, seen.fingerprint and clean(seen.fingerprint))
        if seen.finish_reasons:
            self.set(
                names.FINISH_REASONS,
                tuple(code(reason) for reason in seen.finish_reasons[:MAX_LIST]),
            )
        self.usage(usage or seen.usage or NO_USAGE)
        if error_type is not None or (status or 0) >= 400:
            self.fail(error_type or str(status))
        self.end()


class ExchangeTrace:
    """The spans of one exchange below the span ``root``; they may be started and ended until
    :meth:`end`.

    Args:
        identity: Attributes of every span.
        captures: Whether spans may hold message text.
    """

    def __init__(
        self,
        tracer: Tracer,
        root: OtelSpan,
        *,
        identity: Mapping[str, Value] = {},
        captures: bool = False,
    ) -> None:
        self.captures = captures
        self.action = ""
        self.plan_span: Span | None = None
        self.root = Span(self, root, started=time_ns())
        self.recorded = self.root.recorded
        self._tracer = tracer
        self._identity = dict(identity)
        self._is_identified = False
        self._model = ""
        self._children: list[Span] = []
        self._early: list[tuple[Span, int]] = []
        self._last: Span | None = None

    @property
    def trace_id(self) -> str | None:
        """The id of the trace in hexadecimal, None where traces are off."""
        context = self.root.otel.get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else None

    @property
    def has_children(self) -> bool:
        """Whether a span below the root was started."""
        return bool(self._children)

    def start(
        self,
        name: str,
        kind: SpanKind,
        parent: Span,
        attributes: Mapping[str, Value] = {},
        *,
        links: Sequence[Link] = (),
        started: int | None = None,
    ) -> Span:
        """Start a span below another one."""
        begun = time_ns() if started is None else started
        own = {**self._identity, **attributes}
        if kind is not SpanKind.CLIENT:
            own[names.SPAN_KIND] = names.CHAIN
        context = set_span_in_context(parent.otel, Context())
        otel = self._tracer.start_span(name, context, kind, own, links, begun)
        child = Span(self, otel, parent, begun)
        self._children.append(child)
        return child

    def end_part(self, part: Span, at: int) -> None:
        """End a span; one from before the conversation was known waits for it, because a span's end
        is final.
        """
        if self._is_identified:
            part.end(at)
        else:
            self._early.append((part, at))

    def identify(
        self,
        *,
        conversation: str | None,
        tenant: str | None,
        policy: str,
        model: str,
        derived: bool = False,
        key: str | None = None,
    ) -> None:
        """Record the identity of the request, as far as it is known: on every span the
        conversation, on the root the rest.

        Args:
            conversation: Its name; ``session.id`` too, unless the client's baggage named another
                and may be read.
            tenant: The hash of the key, never the key.
            derived: Whether no client named the conversation.
            key: The key's name.
        """
        if not self.recorded:
            return
        if conversation is not None:
            name = session_id(conversation)
            self._identity = {names.CONVERSATION_ID: name, names.SESSION_ID: name, **self._identity}
        if derived:
            self._identity[names.DERIVED] = True
        self._is_identified = True
        for span in (self.root, *self._children):
            if span.otel.is_recording():
                span.otel.set_attributes(self._identity)
        self._end_early()
        self._model = clean(model)
        self.root.set(names.TENANT, tenant and clean(tenant))
        self.root.set(names.KEY_NAME, key and clean(key))
        self.root.set(names.POLICY, clean(policy))
        # not gen_ai.request.model: a span that has it is a generation to viewers
        self.root.set(names.MODEL, self._model or None)

    def _end_early(self) -> None:
        for part, at in self._early:
            part.end(at)
        self._early.clear()

    def cache(self, *, changed: str, is_cold: bool, hit_ratio: float | None) -> None:
        """Record what the provider's cache made of the request."""
        self.root.set(names.PREFIX_CHANGED, changed)
        self.root.set(names.CACHE_COLD, is_cold)
        self.root.set(names.CACHE_HIT_RATIO, None if hit_ratio is None else round(hit_ratio, 4))

    def ending(self, label: str) -> None:
        """Record how the answer ended."""
        self.root.set(names.ENDING, code(label))

    def plan(self) -> Span:
        """Start the span of a plan."""
        if not self.recorded:
            return NULL_SPAN
        self.plan_span = self.start(names.PLAN_SPAN, SpanKind.INTERNAL, self.root)
        return self.plan_span

    def summarizer(
        self, model: str, provider: str, server: str = "", port: int | None = None
    ) -> Span:
        """Start the span of a call of the summariser, below the layer that wants it."""
        if not self.recorded:
            return NULL_SPAN
        parent = self.root if self.plan_span is None else self.plan_span.layer_span()
        return self._call(model, provider, parent, server, port, extra={names.SUMMARIZER: True})

    def attempt(
        self,
        model: str,
        provider: str,
        server: str = "",
        port: int | None = None,
        *,
        operation: str = names.OPERATION,
        request: Mapping[str, object] = {},
        compacted: bool = False,
    ) -> Span:
        """Start the span of one more attempt; ``request`` are fields of the body, only known ones
        are recorded.

        After one that failed it counts as sent again, and is linked to that one.
        """
        if not self.recorded:
            return NULL_SPAN
        last = self._last
        links: list[Link] = []
        extra = _request_attributes(request, content=self.captures)
        resends = 0
        if compacted:
            extra[names.CONVERSATION_COMPACTED] = True
        if last is not None and last.error_type is not None and last.error_type not in _NOT_ERRORS:
            resends = last.resends + 1
            extra[names.HTTP_RESENDS] = resends
            links.append(Link(last.otel.get_span_context(), {names.REASON: last.error_type}))
        span = self._call(
            model, provider, self.root, server, port, operation, extra=extra, links=links
        )
        span.resends = resends
        self._last = span
        return span

    def relayed(self, method: str, server: str = "", port: int | None = None) -> Span:
        """Start the span of a call that is no model's."""
        if not self.recorded:
            return NULL_SPAN
        span = self.start(method, SpanKind.CLIENT, self.root, {names.HTTP_METHOD: method})
        span.set(names.SERVER_ADDRESS, clean(server) or None)
        span.set(names.SERVER_PORT, port)
        return span

    def _call(
        self,
        model: str,
        provider: str,
        parent: Span,
        server: str,
        port: int | None,
        operation: str = names.OPERATION,
        *,
        extra: Mapping[str, Value],
        links: Sequence[Link] = (),
    ) -> Span:
        model = clean(model)
        attributes = {
            **extra,
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: clean(provider),
        }
        span = self.start(
            f"{operation} {model}".rstrip(), SpanKind.CLIENT, parent, attributes, links=links
        )
        span.set(names.REQUEST_MODEL, model or None)
        span.set(names.SERVER_ADDRESS, clean(server) or None)
        span.set(names.SERVER_PORT, port)
        return span

    def event(self, name: str, /, **fields: str | float) -> None:
        """Record an event on the root; fields that are not in the table are left out."""
        if not self.root.otel.is_recording():
            return
        known = (
            (names.EVENT_FIELDS[field], value)
            for field, value in fields.items()
            if field in names.EVENT_FIELDS
        )
        kept = {name: clean(value) if isinstance(value, str) else value for name, value in known}
        self.root.otel.add_event(f"weir.{code(name)}", kept)

    def follow(self, name: str) -> "ExchangeTrace":
        """A trace of what follows the exchange, its root below this one's."""
        if not self.recorded:
            return self
        identity = {**self._identity, names.SPAN_KIND: names.CHAIN}
        context = set_span_in_context(self.root.otel, Context())
        root = self._tracer.start_span(name, context, SpanKind.INTERNAL, identity)
        later = ExchangeTrace(self._tracer, root, identity=self._identity, captures=self.captures)
        later._is_identified = True
        return later

    def end(self, status: int | None, error_type: str | None = None) -> None:
        """End the exchange, and what is still open in it; only the first call counts.

        A status from 500 is an error, one from 400 is not (it is the client's); without a status,
        ``error_type`` decides.
        """
        root = self.root
        if not root.otel.is_recording():
            return
        root.status(status)
        if self.action and self._model:
            root.otel.update_name(f"weir {self.action} {self._model}")
        if error_type is not None and 400 <= (status or 500) < 500:
            root.set(names.ERROR_TYPE, code(error_type))
        elif error_type is not None:
            root.fail(error_type)
        elif status is not None and status >= 500:
            root.fail(str(status))
        self._end_early()
        now = time_ns()
        for child in self._children:
            child.end(now)
        root.end(now)


def _request_attributes(request: Mapping[str, object], *, content: bool) -> dict[str, Value]:
    """The attributes of those request fields that are in the table and have a scalar value.

    The stop sequences are the client's own words, and so ``content``.
    """
    found: dict[str, Value] = {}
    for field, attribute in names.REQUEST_PARAMS.items():
        value = request.get(field)
        if (
            value is None
            or (field == "stream" and value is not True)
            or (field == "n" and value == 1)
        ):
            continue
        if field == "stop":
            texts = [value] if isinstance(value, str) else value
            if content and isinstance(texts, Sequence):
                found[attribute] = tuple(
                    clean(text) for text in texts[:MAX_LIST] if isinstance(text, str)
                )
        elif isinstance(value, str):
            found[attribute] = clean(value)
        elif isinstance(value, bool | float) or (
            isinstance(value, int) and -(2**63) <= value < 2**63
        ):
            found[attribute] = value
    return found


NULL_TRACE: Final = ExchangeTrace(NoOpTracer(), INVALID_SPAN)
NULL_SPAN: Final = NULL_TRACE.root
