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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from proxy.telemetry import names
from proxy.telemetry.context import Context, Parent
from proxy.telemetry.spans import NULL_SPAN, AttemptSpan, CallSpan, NullSpan, OpenSpan, PlanSpan, SummarizerSpan
from proxy.telemetry.values import LONGEST_LIST, Value, clean, code, session_id

MOST_CHILDREN: Final = 64
MOST_EVENTS: Final = 32

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)
_ERROR: Final = Status(StatusCode.ERROR)
S = TypeVar("S", bound=OpenSpan)
C = TypeVar("C", bound=CallSpan)


@dataclass(frozen=True, slots=True)
class Recording:
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

    def __init__(
        self,
        recording: Recording,
        context: Context,
        *,
        method: str,
        route: str,
        path: str | None = None,
        scheme: str = "http",
        server: tuple[str, int | None] | None = None,
        client: str | None = None,
        request_id: str | None = None,
    ) -> None:
        self._recording = recording
        self._identity: dict[str, Value] = dict(context.baggage)
        self._children: list[OpenSpan] = []
        self._last: AttemptSpan | None = None
        self.captures = recording.content
        self.newest = recording.newest
        self.now = recording.clock
        self.parent = context.parent
        self.plan_open: PlanSpan | None = None
        root = OpenSpan(self, f"{method} {route}", kind=SpanKind.SERVER, parent=None, started=self.now())
        root.attributes = {
            names.HTTP_METHOD: method,
            names.HTTP_ROUTE: route,
            names.URL_PATH: route if path is None else clean(path),
            names.URL_SCHEME: scheme,
        }
        if server is not None:
            root.attributes[names.SERVER_ADDRESS] = clean(server[0])
            root.set(names.SERVER_PORT, server[1])
        if client:
            root.attributes[names.CLIENT_ADDRESS] = clean(client)
        if context.user_agent:
            root.attributes[names.USER_AGENT] = clean(context.user_agent.decode("latin-1"))
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

    @property
    def has_children(self) -> bool:
        """Whether anything was done under the root."""
        return bool(self._children)

    def identify(
        self,
        *,
        conversation: str | None,
        tenant: str | None,
        policy: str,
        model: str,
        derived: bool = False,
        preset: str | None = None,
    ) -> None:
        """Who this is, None where that is not known: on every span the conversation, on the root the rest.

        The conversation is ``session.id`` too, unless the client's baggage named another and may be read. ``tenant``
        is the hash, never the key; ``derived`` marks a conversation that no client named.
        """
        if conversation is not None:
            name = session_id(conversation)
            self._identity = {names.CONVERSATION_ID: name, names.SESSION_ID: name, **self._identity}
        if derived:
            self._identity[names.DERIVED] = True
        note = self.root.set
        note(names.TENANT, tenant and clean(tenant))
        note(names.POLICY, clean(policy))
        note(names.PRESET, preset and clean(preset))
        note(names.MODEL, clean(model) or None)  # a span with gen_ai.request.model is a generation to viewers

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

    def summarizer(self, model: str, provider: str, server: str = "", port: int | None = None) -> SummarizerSpan:
        """The span of a summariser call, under the plan that is open."""
        span = self._call(SummarizerSpan, model, provider, self.plan_open or self.root, server=server, port=port)
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
    ) -> AttemptSpan:
        """The span of one more attempt; ``request`` are fields of the body, only known ones are kept.

        After one that failed it counts as sent again, and is linked to that one.
        """
        span = self._call(AttemptSpan, model, provider, self.root, server=server, port=port, operation=operation)
        last = self._last
        if last is not None and last.error:
            span.after = last
            before = last.attributes.get(names.HTTP_RESENDS, 0)
            span.attributes[names.HTTP_RESENDS] = 1 + before if isinstance(before, int) else 1
        self._last = span
        if compacted:
            span.attributes[names.CONVERSATION_COMPACTED] = True
        if request:
            span.attributes.update(_request_params(request, content=self.captures))
        return span

    def relayed(self, method: str, server: str = "", port: int | None = None) -> AttemptSpan:
        """The span of a request that is relayed and is none to a model."""
        span = self.child(AttemptSpan, method, SpanKind.CLIENT, self.now(), self.root)
        span.attributes[names.HTTP_METHOD] = method
        span.set(names.SERVER_ADDRESS, clean(server) or None)
        span.set(names.SERVER_PORT, port)
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
        here = Context(Parent(self.parent.trace, self.root.id, self.parent.state))
        later = ExchangeTrace(self._recording, here, method="", route="")
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
            root.error = root.error and not 400 <= (status or 500) < 500
        elif status is not None and status >= 500:
            root.fail(str(status))
        root.close()
        for child in self._children:
            child.close(root.ended)
        self._recording.emit(self._build())

    def _call(
        self,
        of: type[C],
        model: str,
        provider: str,
        parent: OpenSpan,
        *,
        server: str,
        port: int | None,
        operation: str = names.OPERATION,
    ) -> C:
        model = clean(model)
        span = self.child(of, f"{operation} {model}".rstrip(), SpanKind.CLIENT, self.now(), parent)
        span.attributes[names.OPERATION_NAME] = operation
        span.attributes[names.PROVIDER_NAME] = clean(provider)
        span.set(names.REQUEST_MODEL, model or None)
        span.set(names.SERVER_ADDRESS, clean(server) or None)
        span.set(names.SERVER_PORT, port)
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
            if self.newest:
                for name in names.ONLY_OLDER:
                    span.attributes.pop(name, None)
            built.append(
                ReadableSpan(
                    span.name,
                    context,
                    remote if span.parent is None else contexts.get(span.parent.id, contexts[self.root.id]),
                    shared.resource,
                    {**span.attributes, **identity},
                    tuple(Event(name, fields, at) for name, at, fields in span.events),
                    _links(span, contexts),
                    kind=span.kind,
                    status=_ERROR if span.error else _UNSET,
                    start_time=span.started,
                    end_time=span.ended,
                    instrumentation_scope=shared.scope,
                )
            )
        return built


def _links(span: OpenSpan, contexts: Mapping[int, SpanContext]) -> tuple[Link, ...]:
    """A link to the attempt that failed before this one."""
    if span.after is None or span.after.id not in contexts:
        return ()
    reason = span.after.attributes.get(names.ERROR_TYPE)
    return (Link(contexts[span.after.id], {names.REASON: reason} if isinstance(reason, str) else None),)


class NullTrace:
    """A trace that is not recorded: telemetry is off, or the trace is not sampled (then it still has its id)."""

    __slots__ = ("trace_id",)
    recorded: Final = False
    captures: Final = False
    has_children: Final = False

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
    plan = summarizer = attempt = relayed = _null


NULL_TRACE: Final = NullTrace()
Trace = ExchangeTrace | NullTrace


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
            found[attribute] = tuple(clean(v) for v in value[:LONGEST_LIST] if isinstance(v, str))
    return found
