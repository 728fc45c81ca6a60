"""A trace that is not recorded: it takes what a recorded one takes, and costs next to nothing."""

from typing import Final, Self

from proxy.telemetry.logs import Header
from proxy.telemetry.trace import ExchangeTrace, Span


class NullSpan:
    __slots__ = ()

    def _ignore(self, *_: object, **__: object) -> None:
        return None

    captures: Final = False
    started: Final = 0
    layer = decide = clamp = buckets = usage = told = fail = first_chunk = arrived = answered = failed = close = _ignore
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
    """A trace that is not recorded: telemetry is off, or the trace is not sampled (then it still has its id)."""

    __slots__ = ("trace_id",)
    recorded: Final = False
    captures: Final = False
    has_children: Final = False
    root: Final = NULL_SPAN

    def __init__(self, trace_id: str | None = None) -> None:
        self.trace_id = trace_id

    def _ignore(self, *_: object, **__: object) -> None:
        return None

    def _null(self, *_: object, **__: object) -> NullSpan:
        return NULL_SPAN

    def follow(self, name: str) -> "NullTrace":
        del name
        return self

    identify = event = cache = end = ending = evaluated = _ignore
    plan = summarizer = attempt = relayed = _null


NULL_TRACE: Final = NullTrace()
Trace = ExchangeTrace | NullTrace
AnySpan = Span | NullSpan
