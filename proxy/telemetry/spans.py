"""The spans of one exchange while they are recorded: plain values, noted in a fraction of what live spans cost."""

from collections.abc import Callable, Sequence
from os import urandom
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

from opentelemetry.trace import SpanKind

from proxy.telemetry import names
from proxy.telemetry.content import asked_in, choices_in, said_in
from proxy.telemetry.context import Header, Parent
from proxy.telemetry.values import LONGEST_LIST, Value, clean, code

LAYER_APART: Final = 2_000
"""Nanoseconds: viewers that keep times as floats tell two microseconds apart, and not always one."""
_NOT_ERRORS: Final = frozenset({"client_disconnect"})
S = TypeVar("S", bound="OpenSpan")


class Whole(Protocol):
    """The trace that a span belongs to."""

    root: "OpenSpan"
    plan_open: "PlanSpan | None"
    parent: Parent
    now: Callable[[], int]
    captures: bool
    newest: bool

    def child(self, of: type[S], name: str, kind: SpanKind, started: int, parent: "OpenSpan") -> S:
        """A new span."""
        ...


class OpenSpan:
    """One span while it is recorded; it ends once, and what is set afterwards is ignored."""

    __slots__ = ("after", "attributes", "ended", "error", "events", "id", "kind", "name", "parent", "started", "trace")

    def __init__(self, trace: Whole, name: str, *, kind: SpanKind, parent: "OpenSpan | None", started: int) -> None:
        self.trace = trace
        self.name = name
        self.kind = kind
        self.parent = parent
        self.started = started
        self.ended = 0
        self.id = int.from_bytes(urandom(8), "big") or 1
        self.error = False
        self.after: OpenSpan | None = None
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

    __slots__ = ("layers",)

    def __init__(self, trace: Whole, name: str, *, kind: SpanKind, parent: OpenSpan | None, started: int) -> None:
        super().__init__(trace, name, kind=kind, parent=parent, started=started)
        self.layers = 0

    def layer(
        self,
        name: str,
        *,
        before: int,
        after: int,
        units: int,
        ref: str | None = None,
        reason: str = "",
        started_ns: int | None = None,
        ended_ns: int | None = None,
    ) -> None:
        """A layer that ran: tokens before and after, units changed, and the ``reason`` why it did less than asked.

        Without times it spans the plan until now, a little after the one before it: viewers keep the order.
        """
        self.layers += 1
        started = self.started + LAYER_APART * self.layers if started_ns is None else started_ns
        child = self.trace.child(OpenSpan, f"{names.LAYER_SPAN} {name}", SpanKind.INTERNAL, started, self)
        child.attributes.update(
            {names.LAYER: name, names.BEFORE: before, names.AFTER: after, names.UNITS: units},
        )
        child.set(names.REF, ref)
        child.set(names.REASON, clean(reason) if reason else None)
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


class CallSpan(OpenSpan):
    """A call to a model, ``chat <model>``: one request to an upstream."""

    __slots__ = ()

    @property
    def captures(self) -> bool:
        """Whether :meth:`asked` and :meth:`said` keep anything."""
        return self.trace.captures

    def asked(self, body: bytes) -> None:
        """Note the messages and the tools of the request, where the operator allows it."""
        if self.trace.captures:
            self.attributes.update(asked_in(body))

    def said(self, choices: Sequence[object]) -> None:
        """Note the messages of the answer, where the operator allows it; ``choices`` as a completion has them."""
        if self.trace.captures:
            self.attributes.update(said_in(choices))

    def said_whole(self, body: bytes) -> None:
        """Note the messages of an answer that is not streamed, where the operator allows it."""
        if self.trace.captures:
            self.said(tuple(choices_in(body)))

    def propagation(self) -> tuple[Header, ...]:
        """The headers that name this span as the upstream's parent, with the unchanged ``tracestate`` of the trace."""
        state = self.trace.parent.state
        own = (b"traceparent", b"00-%032x-%016x-01" % (self.trace.parent.trace, self.id))
        return (own, (b"tracestate", state)) if state else (own,)

    def arrived(self, status: int) -> None:
        """Note the status of the upstream's answer, which may still come to nothing."""
        self.attributes[names.HTTP_STATUS] = status

    def usage(
        self,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cache_read: int | None = None,
        cache_write: int | None = None,
        reasoning: int | None = None,
    ) -> None:
        """Tokens that the upstream reported; ``input_tokens`` is the total, cached tokens included."""
        note = self.set
        note(names.USAGE_INPUT, input_tokens)
        note(names.USAGE_OUTPUT, output_tokens)
        note(names.USAGE_CACHE_READ, cache_read)
        note(names.USAGE_CACHE_CREATION, cache_write)
        note(names.USAGE_CACHE_WRITE, cache_write)
        note(names.USAGE_REASONING, reasoning)


class SummarizerSpan(CallSpan):
    """``chat <model>`` of the summariser, a context manager; an exception that leaves it is its failure."""

    __slots__ = ()

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


class AttemptSpan(CallSpan):
    """``chat <model>``: one request to the upstream, ended by :meth:`answered` or :meth:`failed`."""

    __slots__ = ()

    def first_chunk(self) -> None:
        """Note the time to the first chunk of a streamed answer, once."""
        if names.FIRST_CHUNK not in self.attributes:
            self.attributes[names.FIRST_CHUNK] = max(0, self.trace.now() - self.started) / 1e9

    def answered(
        self,
        status: int | None = None,
        *,
        response_model: str | None = None,
        response_id: str | None = None,
        finish_reasons: Sequence[str] = (),
        tier: str | None = None,
        fingerprint: str | None = None,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cache_read: int | None = None,
        cache_write: int | None = None,
        reasoning: int | None = None,
        error_type: str | None = None,
    ) -> None:
        """End the span with what the upstream said; a status of 400 and above is an error unless named otherwise.

        ``error_type`` is ``client_disconnect`` where the client left before the end, which is no error of this call.
        """
        if self.ended:
            return
        note = self.set
        note(names.HTTP_STATUS, status)
        note(names.RESPONSE_MODEL, response_model and clean(response_model))
        note(names.RESPONSE_ID, response_id and clean(response_id))
        note(names.RESPONSE_TIER, tier and clean(tier))
        note(names.FINGERPRINT, fingerprint and clean(fingerprint))
        if finish_reasons:
            self.attributes[names.FINISH_REASONS] = tuple(code(r) for r in finish_reasons[:LONGEST_LIST])
        elif self.trace.newest and response_id:
            self.attributes[names.FINISH_REASONS] = (names.NO_FINISH,)
        self.usage(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cache_read=cache_read,
            cache_write=cache_write,
            reasoning=reasoning,
        )
        if error_type is not None or (status or 0) >= 400:
            self.fail(error_type or str(status))
        self.close()

    def failed(self, error_type: str, *, status: int | None = None) -> None:
        """End the span with an error code such as ``context_length_exceeded`` and the upstream's status, if any."""
        if not self.ended:
            self.set(names.HTTP_STATUS, status)
            self.fail(error_type)
            self.close()


class NullSpan:
    """A span that is not recorded; it takes what any span takes."""

    __slots__ = ()

    def _ignore(self, *_: object, **__: object) -> None:
        return None

    captures: Final = False
    layer = decide = usage = told = fail = first_chunk = arrived = answered = failed = close = _ignore
    asked = said = said_whole = _ignore

    def propagation(self) -> tuple[Header, ...]:
        """Nothing to replace the client's own context with."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


NULL_SPAN: Final = NullSpan()
Attempt = AttemptSpan | NullSpan
Plan = PlanSpan | NullSpan
