"""The trace of one exchange: a SERVER span, the plan with its layers, and one CLIENT span per model call.

::

    SERVER   POST /v1/chat/completions
    ├── INTERNAL weir context.plan
    │   ├── INTERNAL weir context.read             what took a millisecond or more beside the layers
    │   ├── INTERNAL weir context.layer evict
    │   └── INTERNAL weir context.layer compact
    │       └── CLIENT   chat small-model          the summariser
    ├── CLIENT   chat big-model                    Error context_length_exceeded
    └── CLIENT   chat big-model                    http.request.resend_count 1, compacted

While the request runs, a trace only notes plain values. The spans are built once, when it ends, as the SDK's
read-only spans: a tenth of the cost of the SDK's live ones, and every span carries the conversation even if that
was recognised after the span began. Times are nanoseconds since the epoch.
"""

from collections.abc import Callable, Mapping, Sequence
from os import urandom
from typing import Final, Self

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from policies.ledger import PressureReading, TokenUsage
from proxy.tap import NO_USAGE, ReportedUsage, Tap
from proxy.telemetry import names
from proxy.telemetry.logs import Context, Header, Parent
from proxy.telemetry.names import MAX_LIST, Value, asked_in, choices_in, clean, code, said_in, session_id

MAX_CHILDREN: Final = 64
MAX_EVENTS: Final = 32
LAYER_APART: Final = 2_000
"""Nanoseconds: viewers that keep times as floats tell two microseconds apart, and not always one."""
MIN_PART: Final = 1_000_000
"""Nanoseconds: a part that took less is no span, so that a warm request has none."""
_CHAIN: Final[dict[str, Value]] = {names.SPAN_KIND: names.CHAIN}
_WITHIN_LAYERS: Final = frozenset({"state", "extract", "note"})
_NOT_ERRORS: Final = frozenset({"client_disconnect"})
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)
_ERROR: Final = Status(StatusCode.ERROR)


class Span:
    """A span that ends once; what is set afterwards is ignored. As a context manager it fails by what leaves it."""

    __slots__ = (
        *("_lap", "_laps", "_part", "_shown", "after", "attributes", "ended", "error", "events", "id", "kind", "name"),
        *("parent", "started", "trace"),
    )
    recorded: Final = True

    def __init__(
        self, trace: "ExchangeTrace", name: str, *, kind: SpanKind, parent: "Span | None", started: int
    ) -> None:
        self.trace = trace
        self.name = name
        self.kind = kind
        self.parent = parent
        self.started = started
        self.ended = 0
        self.id = int.from_bytes(urandom(8), "big") or 1
        self.error = False
        self._lap = self._part = self._shown = started
        self._laps: list[tuple[int, int]] = []
        self.after: Span | None = None
        self.attributes: dict[str, Value] = {}
        self.events: list[tuple[str, int, dict[str, Value]]] = []

    def set(self, name: str, value: Value | None) -> None:
        if value is not None:
            self.attributes[name] = value

    def fail(self, reason: str) -> None:
        self.attributes[names.ERROR_TYPE] = code(reason)
        self.error = reason not in _NOT_ERRORS

    def close(self, at: int | None = None) -> None:
        if not self.ended:
            self.ended = max(self.started, self.trace.now() if at is None else at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.fail(kind.__name__)
        if self.trace.plan_open is self:
            self.trace.plan_open = None
        self.close()

    # What it is made of

    def now(self) -> int:
        return self.trace.now()

    def since(self, started: int, what: str, reason: str = "") -> int:
        """What began at ``started`` and has just ended is a span of its own if it took long enough; the time now."""
        now = self.trace.now()
        if now - started >= MIN_PART:
            child = self.trace.child(f"{names.PART_SPAN}{what}", SpanKind.INTERNAL, self, started)
            child.set(names.REASON, reason or None)
            child.close(now)
        return now

    def begin(self) -> None:
        self._laps.clear()
        self.resume(between=True)

    def resume(self, *, between: bool) -> None:
        self._part = self.trace.now()
        if between:
            self._lap = self._part

    def lap(self, what: str) -> None:
        if what == "layer":
            self._laps.append((self._lap, self.trace.now()))
        else:
            self.since(self._part, what)
        self.resume(between=what not in _WITHIN_LAYERS)

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
        """A layer that ran: tokens before and after, units changed, and the ``reason`` why it did less than asked.

        ``trigger`` is the most tokens in its scope at which it is not due, 0 for one that always is, None of a
        ``rung``.
        To be told in the order in which they ran; each begins a little after the one before it: viewers keep the order.
        What was done meanwhile is below it.
        """
        started, ended = self._laps.pop(0) if self._laps else (self.started, 0)
        started = self._shown = max(started, self._shown + LAYER_APART)
        within = self.trace.between(self, started, ended)
        child = self.trace.child(f"{names.LAYER_SPAN} {name}", SpanKind.INTERNAL, self, started)
        for span in within:
            span.parent = child
        child.attributes |= {names.LAYER: name, names.BEFORE: before, names.AFTER: after, names.UNITS: units}
        child.set(names.REF, ref)
        child.set(names.REASON, clean(reason) if reason else None)
        child.set(names.LAYER_TRIGGER, trigger)
        child.set(names.LAYER_SCORER, scorer and clean(scorer))
        child.set(names.LAYER_RUNG, rung or None)
        child.close(ended or None)

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
        """What was decided, on this span and the root, and the seven ``ctx.pressure.*`` values on the root.

        ``base`` is the denominator of the pressure, ``reading`` what was planned by; turns are -1 where pressure does
        not grow, because an attribute cannot be null. ``stage`` is the stage of management in a word, ``strategy`` the
        layers whose work was kept, ``evicted`` how many messages they took.
        """
        root, (before, after, limit, pressure) = self.trace.root, tokens
        velocity, turns = (reading.velocity_tokens_per_turn, reading.turns_until_red) if reading else (None, None)
        decided: dict[str, Value] = {names.BEFORE: before, names.AFTER: after, names.LIMIT: limit, names.ACTION: action}
        self.attributes |= decided
        root.attributes |= decided
        root.attributes |= {
            names.PRESSURE_CURRENT: after,
            names.PRESSURE_MAX: base,
            names.PRESSURE_PERCENT: round(100 * pressure.level, 1),
            names.PRESSURE_ZONE: pressure.zone,
            names.PRESSURE_VELOCITY: round(velocity or 0.0, 1),
            names.PRESSURE_TURNS: -1.0 if turns is None else float(turns),
            names.PRESSURE_SOURCE: "client_estimated" if reading is None else reading.source,
            names.STAGE: stage,
        }
        if evicted or strategy:
            root.attributes |= {names.STRATEGY: clean(strategy), names.EVICTED: evicted}
        root.set(names.BEFORE_PERCENT, None if reading is None else round(100 * before / base, 1))

    def refused_by(self, bucket: str, *, used: int, cap: int) -> None:
        """The bucket that a request was refused for: its tokens, and the most that it may hold."""
        self.attributes |= {names.BUCKET: clean(bucket), names.BUCKET_USED: used, names.BUCKET_CAP: cap}

    def buckets(self, tokens: Mapping[str, int]) -> None:
        self.attributes[names.BUCKETS] = tuple(f"{name}={count}" for name, count in tokens.items() if count)

    # A call to a model

    @property
    def captures(self) -> bool:
        return self.trace.captures

    def asked(self, body: bytes) -> None:
        if self.captures:
            self._show(asked_in(body))

    def said(self, choices: Sequence[object]) -> None:
        if self.captures:
            self._show(said_in(choices))

    def _show(self, found: dict[str, Value]) -> None:
        for name in (names.INPUT_VALUE, names.OUTPUT_VALUE):
            said = found.pop(name, None)
            if said and self.parent is self.trace.root:
                self.trace.root.attributes[name] = said
        self.attributes |= found

    def clamp(self, before: int, after: int) -> None:
        for span in (self, self.trace.root):
            span.attributes |= {names.CLAMPED_FROM: before, names.CLAMPED_TO: after}

    def said_whole(self, body: bytes) -> None:
        if self.captures:
            self.said(choices_in(body))

    def propagation(self) -> tuple[Header, ...]:
        parent = self.trace.parent
        own = (b"traceparent", b"00-%032x-%016x-01" % (parent.trace, self.id))
        return (own, (b"tracestate", parent.state)) if parent.state else (own,)

    def arrived(self, status: int) -> None:
        self.attributes[names.HTTP_STATUS] = status

    def first_chunk(self, seconds: float) -> None:
        self.attributes.setdefault(names.FIRST_CHUNK, seconds)

    def usage(self, usage: ReportedUsage) -> None:
        self.set(names.USAGE_INPUT, usage.prompt)
        self.set(names.USAGE_OUTPUT, usage.completion)
        self.set(names.USAGE_CACHE_READ, usage.cached)
        if not self.trace.newest:
            self.set(names.USAGE_CACHE_CREATION, usage.written)
        self.set(names.USAGE_CACHE_WRITE, usage.written)
        self.set(names.USAGE_REASONING, usage.reasoning)

    def told(self, *, purpose: str, source: str, dollars: float | None = None) -> None:
        self.set(names.SUMMARY_PURPOSE, clean(purpose))
        self.set(names.SUMMARY_SOURCE, source)
        self.set(names.SUMMARY_DOLLARS, dollars)

    def answered(
        self,
        status: int | None = None,
        *,
        seen: Tap = Tap(),
        usage: ReportedUsage | None = None,
        error_type: str | None = None,
    ) -> None:
        """End the span with what the upstream said; ``usage`` stands for what ``seen`` has where they differ.

        A status of 400 and above is an error unless named otherwise. ``error_type`` is ``client_disconnect`` where the
        client left before the end, which is no error of this call.
        """
        if self.ended:
            return
        self.set(names.HTTP_STATUS, status)
        self.set(names.RESPONSE_MODEL, seen.model and clean(seen.model))
        self.set(names.RESPONSE_ID, seen.id and clean(seen.id))
        self.set(names.RESPONSE_TIER, seen.tier and clean(seen.tier))
        self.set(names.FINGERPRINT, seen.fingerprint and clean(seen.fingerprint))
        if seen.finish_reasons:
            self.attributes[names.FINISH_REASONS] = tuple(code(reason) for reason in seen.finish_reasons[:MAX_LIST])
        elif self.trace.newest and seen.id:
            self.attributes[names.FINISH_REASONS] = (names.NO_FINISH,)
        self.usage(usage or seen.usage or NO_USAGE)
        if error_type is not None or (status or 0) >= 400:
            self.fail(error_type or str(status))
        self.close()

    def failed(self, error_type: str) -> None:
        self.answered(error_type=error_type)


class TraceSettings(msgspec.Struct, frozen=True):
    """What the spans of a process share: who they are from, where they go, what time it is, what they may say.

    ``content`` allows message text; ``newest`` takes the newest conventions' name where an attribute has two.
    """

    resource: Resource
    scope: InstrumentationScope
    emit: Callable[[Sequence[ReadableSpan]], None]
    clock: Callable[[], int]
    content: bool = False
    newest: bool = False


class ExchangeTrace:
    """One exchange. Every method is cheap and may be called after the handler returned, until :meth:`end`."""

    __slots__ = (
        *("_children", "_identity", "_last", "_recording", "captures", "newest", "now", "parent", "plan_open", "root"),
    )
    recorded: Final = True

    def __init__(self, recording: TraceSettings, context: Context, name: str, kind: SpanKind = SpanKind.SERVER) -> None:
        self._recording = recording
        self._identity: dict[str, Value] = dict(context.baggage)
        self._children: list[Span] = []
        self._last: Span | None = None
        self.captures = recording.content
        self.newest = recording.newest
        self.now = recording.clock
        self.parent = context.parent
        self.plan_open: Span | None = None
        self.root = Span(self, name, kind=kind, parent=None, started=self.now())

    @property
    def trace_id(self) -> str | None:
        return f"{self.parent.trace:032x}"

    @property
    def has_children(self) -> bool:
        return bool(self._children)

    def child(self, name: str, kind: SpanKind, parent: Span, started: int | None = None) -> Span:
        span = Span(self, name, kind=kind, parent=parent, started=self.now() if started is None else started)
        if len(self._children) < MAX_CHILDREN:
            self._children.append(span)
        return span

    def between(self, parent: Span, started: int, ended: int) -> list[Span]:
        return [s for s in self._children if s.parent is parent and started <= s.started and 0 < s.ended <= ended]

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
        """Who this is, None where that is not known: on every span the conversation, on the root the rest.

        The conversation is ``session.id`` too, unless the client's baggage named another and may be read. ``tenant``
        is the hash, never the key, ``key`` the key's name; ``derived`` marks a conversation that no client named.
        """
        if conversation is not None:
            name = session_id(conversation)
            self._identity = {names.CONVERSATION_ID: name, names.SESSION_ID: name, **self._identity}
        if derived:
            self._identity[names.DERIVED] = True
        note = self.root.set
        note(names.TENANT, tenant and clean(tenant))
        note(names.KEY_NAME, key and clean(key))
        note(names.POLICY, clean(policy))
        note(names.MODEL, clean(model) or None)  # a span with gen_ai.request.model is a generation to viewers

    def cache(self, *, changed: str, is_cold: bool, hit_ratio: float | None) -> None:
        self.root.attributes |= {names.PREFIX_CHANGED: changed, names.CACHE_COLD: is_cold}
        self.root.set(names.CACHE_HIT_RATIO, None if hit_ratio is None else round(hit_ratio, 4))

    def ending(self, label: str) -> None:
        self.root.attributes[names.ENDING] = code(label)

    def plan(self) -> Span:
        self.plan_open = self.child(names.PLAN_SPAN, SpanKind.INTERNAL, self.root)
        return self.plan_open

    def summarizer(self, model: str, provider: str, server: str = "", port: int | None = None) -> Span:
        span = self._call(model, provider, self.plan_open or self.root, server, port)
        span.attributes[names.SUMMARIZER] = True
        return span

    def attempt(
        self,
        model: str,
        provider: str,
        server: str = "",
        port: int | None = None,
        *,
        operation: str = names.OPERATION,
        request: Mapping[str, object] | None = None,
        compacted: bool = False,
    ) -> Span:
        """The span of one more attempt; ``request`` are fields of the body, only known ones are kept.

        After one that failed it counts as sent again, and is linked to that one.
        """
        span = self._call(model, provider, self.root, server, port, operation)
        last = self._last
        if last is not None and last.error:
            span.after = last
            before = last.attributes.get(names.HTTP_RESENDS, 0)
            span.attributes[names.HTTP_RESENDS] = 1 + before if isinstance(before, int) else 1
        self._last = span
        if compacted:
            span.attributes[names.CONVERSATION_COMPACTED] = True
        if request:
            span.attributes |= _request_params(request, content=self.captures)
        return span

    def relayed(self, method: str, server: str = "", port: int | None = None) -> Span:
        span = self.child(method, SpanKind.CLIENT, self.root)
        span.set(names.HTTP_METHOD, method)
        span.set(names.SERVER_ADDRESS, clean(server) or None)
        span.set(names.SERVER_PORT, port)
        return span

    def _call(
        self, model: str, provider: str, parent: Span, server: str, port: int | None, operation: str = names.OPERATION
    ) -> Span:
        model = clean(model)
        span = self.child(f"{operation} {model}".rstrip(), SpanKind.CLIENT, parent)
        span.set(names.OPERATION_NAME, operation)
        span.set(names.PROVIDER_NAME, clean(provider))
        span.set(names.REQUEST_MODEL, model or None)
        span.set(names.SERVER_ADDRESS, clean(server) or None)
        span.set(names.SERVER_PORT, port)
        return span

    def event(self, name: str, /, **fields: str | float) -> None:
        if self.root.ended or len(self.root.events) >= MAX_EVENTS:
            return
        known = ((names.EVENT_FIELDS[field], value) for field, value in fields.items() if field in names.EVENT_FIELDS)
        kept: dict[str, Value] = {name: clean(value) if isinstance(value, str) else value for name, value in known}
        self.root.events.append((f"weir.{code(name)}", self.now(), kept))

    def follow(self, name: str) -> "ExchangeTrace":
        here = Context(Parent(self.parent.trace, self.root.id, self.parent.state))
        later = ExchangeTrace(self._recording, here, name, SpanKind.INTERNAL)
        later._identity = self._identity
        return later

    def end(self, status: int | None, error_type: str | None = None) -> None:
        """End the exchange, and what is still open in it, and hand the spans on; only the first call counts.

        A status from 500 is an error, one from 400 is not (it is the client's); without a status,
        ``error_type`` decides.
        """
        root = self.root
        if root.ended:
            return
        root.set(names.HTTP_STATUS, status)
        action, model = (root.attributes.get(name) for name in (names.ACTION, names.MODEL))
        if action and model:
            root.name = f"weir {action} {model}"
        if error_type is not None:
            root.fail(error_type)
            root.error = root.error and not 400 <= (status or 500) < 500
        elif status is not None and status >= 500:
            root.fail(str(status))
        root.close()
        for child in self._children:
            child.close(root.ended)
        self._recording.emit(self._build())

    def _build(self) -> list[ReadableSpan]:
        trace, shared = self.parent.trace, self._recording
        state = TraceState.from_header([self.parent.state.decode("latin-1")]) if self.parent.state else None
        remote = SpanContext(trace, self.parent.span, True, _SAMPLED, state) if self.parent.span else None  # noqa: FBT003 - the SDK's order
        spans = (self.root, *self._children)
        contexts = {s.id: SpanContext(trace, s.id, False, _SAMPLED, state) for s in spans}  # noqa: FBT003 - the SDK's order
        return [
            ReadableSpan(
                span.name,
                contexts[span.id],
                remote if span.parent is None else contexts.get(span.parent.id, contexts[self.root.id]),
                shared.resource,
                {**span.attributes, **self._identity} | (_CHAIN if span.kind is not SpanKind.CLIENT else {}),
                tuple(Event(name, fields, at) for name, at, fields in span.events),
                _links(span, contexts),
                kind=span.kind,
                status=_ERROR if span.error else _UNSET,
                start_time=span.started,
                end_time=span.ended,
                instrumentation_scope=shared.scope,
            )
            for span in spans
        ]


def _links(span: Span, contexts: Mapping[int, SpanContext]) -> tuple[Link, ...]:
    if span.after is None or span.after.id not in contexts:
        return ()
    reason = span.after.attributes.get(names.ERROR_TYPE)
    return (Link(contexts[span.after.id], {names.REASON: reason} if isinstance(reason, str) else None),)


def _request_params(request: Mapping[str, object], *, content: bool) -> dict[str, Value]:
    """The attributes of those request fields that are in the table and have a scalar value.

    The stop sequences are the client's own words, and so ``content``.
    """
    found: dict[str, Value] = {}
    for field, attribute in names.REQUEST_PARAMS.items():
        value = request.get(field)
        if value is None or (field == "stream" and value is not True) or (field == "n" and value == 1):
            continue
        if field == "stop" and not content:
            continue
        if isinstance(value, str):
            value = clean(value)
            found[attribute] = (value,) if field == "stop" else value
        elif isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
            found[attribute] = value
        elif field == "stop" and isinstance(value, Sequence):
            found[attribute] = tuple(clean(v) for v in value[:MAX_LIST] if isinstance(v, str))
    return found


def _ignore(*_: object, **__: object) -> None: ...


class NullSpan:
    __slots__ = ()
    recorded: Final = False
    captures: Final = False
    started: Final = 0
    layer = decide = clamp = buckets = refused_by = _ignore
    usage = told = fail = first_chunk = arrived = answered = failed = close = _ignore
    asked = said = said_whole = begin = resume = lap = _ignore

    def now(self) -> int:
        return 0

    def since(self, started: int, *_: object) -> int:
        return started

    def propagation(self) -> tuple[Header, ...]:
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


NULL_SPAN: Final = NullSpan()


class NullTrace:
    __slots__ = ("trace_id",)
    recorded: Final = False
    captures: Final = False
    has_children: Final = False
    root: Final = NULL_SPAN

    def __init__(self, trace_id: str | None = None) -> None:
        self.trace_id = trace_id

    def _null(self, *_: object, **__: object) -> NullSpan:
        return NULL_SPAN

    def follow(self, name: str) -> "NullTrace":
        del name
        return self

    identify = event = cache = end = ending = _ignore
    plan = summarizer = attempt = relayed = _null


NULL_TRACE: Final = NullTrace()
Trace = ExchangeTrace | NullTrace
AnySpan = Span | NullSpan
