"""The trace of one exchange: a SERVER span, the plan with its layers, and one CLIENT span per model call.

::

    SERVER   POST /v1/chat/completions
    ├── INTERNAL weir context.plan
    │   ├── INTERNAL weir context.layer evict
    │   └── CLIENT   chat small-model              the summariser
    ├── CLIENT   chat big-model                    Error context_length_exceeded
    └── CLIENT   chat big-model                    http.request.resend_count 1, compacted

While the request runs, a trace only notes plain values. The spans are built once, when it ends, as the SDK's
read-only spans: a tenth of the cost of the SDK's live ones, and every span carries the conversation even if that
was recognised after the span began. Times are nanoseconds since the epoch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from os import urandom
from types import TracebackType
from typing import Final, Self, TypeVar

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from proxy.redaction import redact
from proxy.telemetry import names

Value = str | int | float | bool | tuple[str, ...]
Header = tuple[bytes, bytes]

LONGEST_VALUE: Final = 256
LONGEST_LIST: Final = 8
MOST_CHILDREN: Final = 64
MOST_EVENTS: Final = 32
CONTEXT_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_CODE: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")
_UNSET: Final = Status(StatusCode.UNSET)
_ERROR: Final = Status(StatusCode.ERROR)
_NOT_ERRORS: Final = frozenset({"client_disconnect"})


def is_baggage(name: bytes) -> bool:
    """True for a lower-case header name that carries baggage, which goes to no upstream."""
    return name == b"baggage" or name.startswith(b"uberctx-")


@lru_cache(maxsize=1024)
def clean(text: str) -> str:
    """``text`` as an attribute value: at most 256 characters, without what looks like a credential."""
    return redact(text[: 2 * LONGEST_VALUE])[:LONGEST_VALUE]


@lru_cache(maxsize=1024)
def code(text: str) -> str:
    """``text`` if it is a low-cardinality code, else ``_OTHER`` (the fallback of the conventions)."""
    return text if _CODE.fullmatch(text) and redact(text) == text else "_OTHER"


def session_id(conversation: str) -> str:
    """The conversation as ``session.id``, hashed where viewers would drop it: not ASCII, or over 200 characters."""
    if len(conversation) <= 200 and conversation.isascii() and conversation.isprintable():
        return clean(conversation)
    return blake2b(conversation.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


S = TypeVar("S", bound="OpenSpan")


@dataclass(frozen=True, slots=True)
class Parent:
    """The W3C context that a trace continues; ``span`` is 0 and ``state`` empty for a trace that starts here."""

    trace: int
    span: int = 0
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Recording:
    """What the spans of a process share: who they are from, where they go, what time it is."""

    resource: Resource
    scope: InstrumentationScope
    emit: Callable[[Sequence[ReadableSpan]], None]
    clock: Callable[[], int]


class OpenSpan:
    """One span while it is recorded; it ends once, and what is set afterwards is ignored."""

    __slots__ = ("attributes", "ended", "error", "events", "id", "kind", "name", "parent", "started", "trace")

    def __init__(
        self, trace: "ExchangeTrace", name: str, *, kind: SpanKind, parent: "OpenSpan | None", started: int
    ) -> None:
        self.trace = trace
        self.name = name
        self.kind = kind
        self.parent = parent
        self.started = started
        self.ended = 0
        self.id = int.from_bytes(urandom(8), "big") or 1
        self.error = False
        self.attributes: dict[str, Value] = {}
        self.events: list[tuple[str, int, dict[str, Value]]] = []

    def set(self, name: str, value: Value | None) -> None:
        """Note an attribute unless it is None."""
        if value is not None:
            self.attributes[name] = value

    def fail(self, reason: str) -> None:
        """Note ``error.type`` and the status; a client that hung up is no error."""
        self.attributes[names.ERROR_TYPE] = code(reason)
        self.error = reason not in _NOT_ERRORS

    def close(self, at: int | None = None) -> None:
        """End the span now or at ``at``, never before it started."""
        if not self.ended:
            self.ended = max(self.started, self.trace.now() if at is None else at)


class PlanSpan(OpenSpan):
    """``weir context.plan``, a context manager: what was decided, with a child per layer."""

    __slots__ = ()

    def layer(
        self,
        name: str,
        *,
        before: int,
        after: int,
        units: int,
        ref: str | None = None,
        started_ns: int | None = None,
        ended_ns: int | None = None,
    ) -> None:
        """A layer that ran: tokens before and after, units changed; without times it spans the plan until now."""
        started = self.started if started_ns is None else started_ns
        child = self.trace.child(OpenSpan, f"{names.LAYER_SPAN} {name}", SpanKind.INTERNAL, started, self)
        child.attributes.update(
            {names.LAYER: name, names.BEFORE: before, names.AFTER: after, names.UNITS: units},
        )
        child.set(names.REF, ref)
        child.close(ended_ns)

    def decide(
        self,
        action: str,
        *,
        before: int,
        after: int,
        limit: int,
        pressure: float,
        zone: str,
        base: int | None = None,
        velocity: float = 0.0,
        turns_until_red: float | None = None,
        source: str = "client_estimated",
        stage: str = "none",
        strategy: str = "",
        evicted: int = 0,
        before_percent: float | None = None,
    ) -> None:
        """What was decided, on this span and the root, and the seven ``ctx.pressure.*`` values on the root.

        ``base`` is the denominator of ``pressure`` (default ``limit``); ``turns_until_red`` is -1 where pressure
        does not grow, because an attribute cannot be null. ``stage`` is the stage of management in a word,
        ``strategy`` the layers whose work was kept, ``evicted`` how many messages they took.
        """
        decided: dict[str, Value] = {
            names.BEFORE: before,
            names.AFTER: after,
            names.LIMIT: limit,
            names.ACTION: action,
        }
        self.attributes.update(decided)
        self.trace.root.attributes.update(decided)
        self.trace.root.attributes.update(
            {
                names.PRESSURE_CURRENT: after,
                names.PRESSURE_MAX: limit if base is None else base,
                names.PRESSURE_PERCENT: round(100 * pressure, 1),
                names.PRESSURE_ZONE: zone,
                names.PRESSURE_VELOCITY: round(velocity, 1),
                names.PRESSURE_TURNS: -1.0 if turns_until_red is None else float(turns_until_red),
                names.PRESSURE_SOURCE: source,
                names.STAGE: stage,
            }
        )
        if evicted or strategy:
            self.trace.root.attributes.update({names.STRATEGY: clean(strategy), names.EVICTED: evicted})
        self.trace.root.set(names.BEFORE_PERCENT, before_percent)

    def __enter__(self) -> Self:
        self.trace.plan_open = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.fail(kind.__name__)
        self.trace.plan_open = None
        self.close()


class SummarizerSpan(OpenSpan):
    """``chat <model>`` of the summariser, a context manager; an exception that leaves it is its failure."""

    __slots__ = ()

    def usage(
        self, *, input_tokens: int | None = None, output_tokens: int | None = None, cache_read: int | None = None
    ) -> None:
        """Tokens that the summariser's upstream reported."""
        self.set(names.USAGE_INPUT, input_tokens)
        self.set(names.USAGE_OUTPUT, output_tokens)
        self.set(names.USAGE_CACHE_READ, cache_read)

    def told(self, *, purpose: str, source: str, dollars: float | None = None) -> None:
        """Which prompt was asked, whether a call was made for it (``asked``, ``shared``, ``kept``), and its price."""
        self.set(names.SUMMARY_PURPOSE, clean(purpose))
        self.set(names.SUMMARY_SOURCE, source)
        self.set(names.SUMMARY_DOLLARS, dollars)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.fail(kind.__name__)
        self.close()


class AttemptSpan(OpenSpan):
    """``chat <model>``: one request to the upstream, ended by :meth:`answered` or :meth:`failed`."""

    __slots__ = ()

    def traceparent(self) -> Header | None:
        """The header that names this span as the upstream's parent; it replaces the client's."""
        return b"traceparent", b"00-%032x-%016x-01" % (self.trace.parent.trace, self.id)

    def propagation(self) -> tuple[Header, ...]:
        """``traceparent`` and, unchanged, the ``tracestate`` that came with the trace."""
        state = self.trace.parent.state
        own = (b"traceparent", b"00-%032x-%016x-01" % (self.trace.parent.trace, self.id))
        return (own, (b"tracestate", state)) if state else (own,)

    def first_chunk(self) -> None:
        """Note the time to the first chunk of a streamed answer, once."""
        if names.FIRST_CHUNK not in self.attributes:
            self.attributes[names.FIRST_CHUNK] = max(0, self.trace.now() - self.started) / 1e9

    def answered(
        self,
        status: int,
        *,
        response_model: str | None = None,
        response_id: str | None = None,
        finish_reasons: Sequence[str] = (),
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cache_read: int | None = None,
        cache_write: int | None = None,
        reasoning: int | None = None,
        error_type: str | None = None,
    ) -> None:
        """End the span with what the upstream said; a status of 400 and above is an error unless named otherwise.

        ``input_tokens`` is the total, cached tokens included. ``error_type`` is ``client_disconnect`` where the
        client left before the end, which is no error of this call.
        """
        if self.ended:
            return
        note = self.set
        note(names.HTTP_STATUS, status)
        note(names.RESPONSE_MODEL, response_model and clean(response_model))
        note(names.RESPONSE_ID, response_id and clean(response_id))
        if finish_reasons:
            self.attributes[names.FINISH_REASONS] = tuple(code(r) for r in finish_reasons[:LONGEST_LIST])
        note(names.USAGE_INPUT, input_tokens)
        note(names.USAGE_OUTPUT, output_tokens)
        note(names.USAGE_CACHE_READ, cache_read)
        note(names.USAGE_CACHE_CREATION, cache_write)
        note(names.USAGE_CACHE_WRITE, cache_write)
        note(names.USAGE_REASONING, reasoning)
        if error_type is not None or status >= 400:
            self.fail(error_type or str(status))
        self.close()

    def failed(self, error_type: str, *, status: int | None = None) -> None:
        """End the span with an error code such as ``context_length_exceeded`` and the upstream's status, if any."""
        if not self.ended:
            self.set(names.HTTP_STATUS, status)
            self.fail(error_type)
            self.close()


class ExchangeTrace:
    """One exchange. Every method is cheap and may be called after the handler returned, until :meth:`end`."""

    __slots__ = ("_children", "_identity", "_recording", "now", "parent", "plan_open", "root")

    def __init__(
        self,
        recording: Recording,
        parent: Parent,
        *,
        method: str,
        route: str,
        scheme: str = "http",
        client: str | None = None,
        user_agent: bytes = b"",
        request_id: str | None = None,
    ) -> None:
        self._recording = recording
        self._identity: dict[str, Value] = {}
        self._children: list[OpenSpan] = []
        self.now = recording.clock
        self.parent = parent
        self.plan_open: PlanSpan | None = None
        root = OpenSpan(self, f"{method} {route}", kind=SpanKind.SERVER, parent=None, started=self.now())
        root.attributes = {
            names.HTTP_METHOD: method,
            names.HTTP_ROUTE: route,
            names.URL_PATH: route,
            names.URL_SCHEME: scheme,
        }
        if client:
            root.attributes[names.CLIENT_ADDRESS] = clean(client)
        if user_agent:
            root.attributes[names.USER_AGENT] = clean(user_agent.decode("latin-1"))
        root.set(names.REQUEST_ID, request_id and clean(request_id))
        self.root = root

    @property
    def trace_id(self) -> str | None:
        """32 hex digits, for logs."""
        return f"{self.parent.trace:032x}"

    def child(self, of: type[S], name: str, kind: SpanKind, started: int, parent: OpenSpan) -> S:
        """A new span; above 64 children of one exchange it is not kept."""
        span = of(self, name, kind=kind, parent=parent, started=started)
        if len(self._children) < MOST_CHILDREN:
            self._children.append(span)
        return span

    def identify(
        self, *, conversation: str, tenant: str, policy: str, model: str, derived: bool, preset: str | None = None
    ) -> None:
        """Who this is: on every span the conversation (as ``session.id`` too), on the root the rest.

        ``tenant`` is the hash, never the key; ``derived`` marks a conversation that no client named.
        """
        name = session_id(conversation)
        self._identity = {names.CONVERSATION_ID: name, names.SESSION_ID: name}
        if derived:
            self._identity[names.DERIVED] = True
        note = self.root.set
        note(names.TENANT, clean(tenant))
        note(names.POLICY, clean(policy))
        note(names.PRESET, preset and clean(preset))
        note(names.REQUEST_MODEL, clean(model))

    def cache(self, *, changed: str, is_cold: bool, hit_ratio: float | None) -> None:
        """What the provider's prompt cache made of the request, on the root: who changed its prefix, and the rest."""
        note = self.root.attributes
        note[names.PREFIX_CHANGED] = changed
        note[names.CACHE_COLD] = is_cold
        if hit_ratio is not None:
            note[names.CACHE_HIT_RATIO] = round(hit_ratio, 4)

    def ending(self, label: str) -> None:
        """What stopped the answer before its own end, on the root."""
        self.root.attributes[names.ENDING] = code(label)

    def plan(self) -> PlanSpan:
        """``weir context.plan``, to be entered; each round after an overflow has its own."""
        return self.child(PlanSpan, names.PLAN_SPAN, SpanKind.INTERNAL, self.now(), self.root)

    def summarizer(self, model: str, provider: str) -> SummarizerSpan:
        """The span of a summariser call, under the plan that is open."""
        span = self._call(SummarizerSpan, model, provider, self.plan_open or self.root)
        span.attributes[names.SUMMARIZER] = True
        return span

    def attempt(
        self,
        model: str,
        provider: str,
        server_address: str = "",
        port: int | None = None,
        number: int = 1,
        *,
        request: Mapping[str, object] | None = None,
        compacted: bool = False,
    ) -> AttemptSpan:
        """The span of attempt ``number`` (from 1); ``request`` are fields of the body, only known ones are kept."""
        span = self._call(AttemptSpan, model, provider, self.root)
        if server_address:
            span.attributes[names.SERVER_ADDRESS] = clean(server_address)
        span.set(names.SERVER_PORT, port)
        if number > 1:
            span.attributes[names.HTTP_RESENDS] = number - 1
        if compacted:
            span.attributes[names.CONVERSATION_COMPACTED] = True
        if request:
            span.attributes.update(_request_params(request))
        return span

    def event(self, name: str, /, **fields: str | float) -> None:
        """An event ``weir.<name>`` on the root, with those fields that are in the table."""
        if self.root.ended or len(self.root.events) >= MOST_EVENTS:
            return
        kept: dict[str, Value] = {}
        for field, value in fields.items():
            attribute = names.EVENT_FIELDS.get(field)
            if attribute is not None:
                kept[attribute] = clean(value) if isinstance(value, str) else value
        self.root.events.append((f"weir.{code(name)}", self.now(), kept))

    def follow(self, name: str) -> "ExchangeTrace":
        """A trace of what is done after the answer: its root is an internal span under this one's."""
        later = ExchangeTrace(
            self._recording, Parent(self.parent.trace, self.root.id, self.parent.state), method="", route=""
        )
        later.root.name, later.root.kind, later.root.attributes = name, SpanKind.INTERNAL, {}
        later._identity = self._identity
        return later

    def evaluated(self, values: Mapping[str, float | None]) -> None:
        """The scores of an evaluation on the root, by attribute; those that are in the table and are not None."""
        for attribute, value in values.items():
            if attribute in names.ATTRIBUTES:
                self.root.set(attribute, value)

    def end(self, status: int | None, error_type: str | None = None) -> None:
        """End the exchange, and what is still open in it, and hand the spans on; only the first call counts.

        A status from 500 is an error, one from 400 is not (it is the client's); without a status,
        ``error_type`` decides.
        """
        root = self.root
        if root.ended:
            return
        root.set(names.HTTP_STATUS, status)
        if error_type is not None:
            root.fail(error_type)
            root.error = root.error and (status is None or status >= 500)
        elif status is not None and status >= 500:
            root.fail(str(status))
        root.close()
        for child in self._children:
            child.close(root.ended)
        self._recording.emit(self._build())

    def _call(self, of: type[S], model: str, provider: str, parent: OpenSpan) -> S:
        model = clean(model)
        span = self.child(of, f"{names.OPERATION} {model}", SpanKind.CLIENT, self.now(), parent)
        span.attributes[names.OPERATION_NAME] = names.OPERATION
        span.attributes[names.PROVIDER_NAME] = clean(provider)
        span.attributes[names.REQUEST_MODEL] = model
        return span

    def _build(self) -> list[ReadableSpan]:
        """The spans, each child after its parent."""
        trace, identity, shared = self.parent.trace, self._identity, self._recording
        state = TraceState.from_header([self.parent.state.decode("latin-1")]) if self.parent.state else None
        remote = SpanContext(trace, self.parent.span, True, _SAMPLED, state) if self.parent.span else None  # noqa: FBT003 - the SDK's order
        built: list[ReadableSpan] = []
        contexts: dict[int, SpanContext] = {}
        for span in (self.root, *self._children):
            context = SpanContext(trace, span.id, False, _SAMPLED, state)  # noqa: FBT003 - the SDK's order
            contexts[span.id] = context
            built.append(
                ReadableSpan(
                    span.name,
                    context,
                    remote if span.parent is None else contexts.get(span.parent.id, contexts[self.root.id]),
                    shared.resource,
                    {**span.attributes, **identity},
                    tuple(Event(name, fields, at) for name, at, fields in span.events),
                    kind=span.kind,
                    status=_ERROR if span.error else _UNSET,
                    start_time=span.started,
                    end_time=span.ended,
                    instrumentation_scope=shared.scope,
                )
            )
        return built


class NullSpan:
    """A span that is not recorded; it takes what any span takes."""

    __slots__ = ()

    def _ignore(self, *_: object, **__: object) -> None:
        return None

    layer = decide = usage = told = fail = first_chunk = answered = failed = close = _ignore

    def traceparent(self) -> Header | None:
        """None: the client's own context is forwarded as it came."""
        return None

    def propagation(self) -> tuple[Header, ...]:
        """Nothing to replace the client's own context with."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class NullTrace:
    """A trace that is not recorded: telemetry is off, or the trace is not sampled (then it still has its id)."""

    __slots__ = ("trace_id",)

    def __init__(self, trace_id: str | None = None) -> None:
        self.trace_id = trace_id

    def _ignore(self, *_: object, **__: object) -> None:
        return None

    def _null(self, *_: object, **__: object) -> NullSpan:
        return NULL_SPAN

    def follow(self, name: str) -> "NullTrace":
        """Nothing is recorded of what comes after, either."""
        del name
        return self

    identify = event = cache = end = ending = evaluated = _ignore
    plan = summarizer = attempt = _null


NULL_SPAN: Final = NullSpan()
NULL_TRACE: Final = NullTrace()
Trace = ExchangeTrace | NullTrace
Attempt = AttemptSpan | NullSpan
Plan = PlanSpan | NullSpan


def _request_params(request: Mapping[str, object]) -> dict[str, Value]:
    """The attributes of those request fields that are in the table and have a scalar value."""
    found: dict[str, Value] = {}
    for field, attribute in names.REQUEST_PARAMS.items():
        value = request.get(field)
        if value is None or (field == "stream" and value is not True) or (field == "n" and value == 1):
            continue
        if isinstance(value, str):
            value = clean(value)
            found[attribute] = (value,) if field == "stop" else value
        elif isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
            found[attribute] = value
        elif field == "stop" and isinstance(value, Sequence):
            found[attribute] = tuple(clean(v) for v in value[:LONGEST_LIST] if isinstance(v, str))
    return found
