"""Everything that Weir counts, as plain numbers: recorded in a microsecond, read as Prometheus text or as OTLP.

The aggregates are Weir's own, because ``GET /metrics`` must work without any exporter and OpenTelemetry has no
histogram that can be observed from outside. Recording and reading are safe from any thread.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from proxy.telemetry import instruments, names
from proxy.telemetry.exposition import Family, as_otlp, as_text
from proxy.telemetry.instruments import Instrument
from proxy.telemetry.series import Counter, Histogram, Labels
from proxy.telemetry.sharing import SharedReadings

SCHEME = "http"
"""Weir itself serves no other; TLS ends in front of it."""

_BEFORE, _AFTER, _SAVED = ("before",), ("after",), ("saved",)
_PROMPT, _READ, _WRITTEN = ("prompt",), ("read",), ("written",)


class FirstCalls:
    """Calls upstream under the names of the GenAI conventions 1.37 to 1.41."""

    def __init__(self) -> None:
        self._duration = Histogram(instruments.OPERATION_DURATION)
        self._first_chunk = Histogram(instruments.TIME_TO_FIRST_CHUNK)
        self._usage = Histogram(instruments.TOKEN_USAGE)
        self.parts: tuple[Counter | Histogram, ...] = (self._usage, self._duration, self._first_chunk)

    def ended(self, call: Labels, *, seconds: float, error_type: str, first_chunk: float | None) -> None:
        """A call took so long; times are in seconds."""
        self._duration.record(seconds, (*call, error_type))
        if first_chunk is not None:
            self._first_chunk.record(first_chunk, call)

    def used(self, call: Labels, *, input_tokens: int | None, output_tokens: int | None, **_: int | None) -> None:
        """Tokens that the upstream reported of a call; these conventions count no others."""
        if input_tokens is not None:
            self._usage.record(input_tokens, (*call, "input"))
        if output_tokens is not None:
            self._usage.record(output_tokens, (*call, "output"))


class NewestCalls:
    """Calls upstream under the names of the newest GenAI conventions."""

    def __init__(self) -> None:
        self._duration = Histogram(instruments.INFERENCE_DURATION)
        self._first_chunk = Histogram(instruments.INFERENCE_FIRST_CHUNK)
        self._sizes = {
            "input_tokens": Histogram(instruments.INPUT_TOKENS),
            "output_tokens": Histogram(instruments.OUTPUT_TOKENS),
        }
        self._sums = {
            "input_tokens": Counter(instruments.INPUT_USAGE),
            "output_tokens": Counter(instruments.OUTPUT_USAGE),
            "cache_read": Counter(instruments.CACHE_READ_USAGE),
            "cache_write": Counter(instruments.CACHE_WRITE_USAGE),
            "reasoning": Counter(instruments.REASONING_USAGE),
        }
        self.parts: tuple[Counter | Histogram, ...] = (
            self._duration,
            self._first_chunk,
            *self._sizes.values(),
            *self._sums.values(),
        )

    def ended(self, call: Labels, *, seconds: float, error_type: str, first_chunk: float | None) -> None:
        """A call took so long; times are in seconds."""
        self._duration.record(seconds, (*call, error_type))
        if first_chunk is not None:
            self._first_chunk.record(first_chunk, call)

    def used(self, call: Labels, **tokens: int | None) -> None:
        """Tokens that the upstream reported of a call, by what they were."""
        for name, count in tokens.items():
            if count is not None:
                self._sums[name].add(count, call)
                if name in self._sizes:
                    self._sizes[name].record(count, call)


class Metrics:
    """Everything that Weir counts, with one method per thing that happens.

    ``active`` and ``streams`` are the requests that are being answered and the answers that are being streamed; the
    event loop alone changes them. With ``newest`` the calls upstream have the names of the newest GenAI conventions.
    """

    def __init__(self, *, newest: bool = False) -> None:
        self.active = 0
        self.streams = 0
        self._shared: SharedReadings | None = None
        self._calls: FirstCalls | NewestCalls = NewestCalls() if newest else FirstCalls()
        self._server = Histogram(instruments.SERVER_DURATION)
        self._requests = Counter(instruments.REQUESTS)
        self._tokens = Counter(instruments.TOKENS_SEEN)
        self._key_tokens = Counter(instruments.KEY_TOKENS)
        self._cost = Counter(instruments.COST)
        self._cache_tokens = Counter(instruments.CACHE_TOKENS)
        self._cache_requests = Counter(instruments.CACHE_REQUESTS)
        self._actions = Counter(instruments.ACTIONS)
        self._events = Counter(instruments.EVENTS)
        self._pressure = Histogram(instruments.PRESSURE)
        self._overflows = Counter(instruments.OVERFLOWS)
        self._retries = Counter(instruments.RETRIES)
        self._summarizer = Counter(instruments.SUMMARIZER_CALLS)
        self._summarizer_tokens = Counter(instruments.SUMMARIZER_TOKENS)
        self._summarizer_cost = Counter(instruments.SUMMARIZER_COST)
        self._preparations = Counter(instruments.PREPARATIONS)
        self._checkpoints = Counter(instruments.CHECKPOINTS)
        self._degraded = Counter(instruments.DEGRADED)
        self._compression = Histogram(instruments.COMPRESSION)
        self._alerts = Counter(instruments.ALERTS)
        self._undelivered = Counter(instruments.ALERTS_UNDELIVERED)
        self._store = Histogram(instruments.STORE_LATENCY)
        self._overhead = Histogram(instruments.OVERHEAD)
        self._settlement = Histogram(instruments.SETTLEMENT)
        own = (i for i in vars(self).values() if isinstance(i, Counter | Histogram))
        self._all: tuple[Counter | Histogram, ...] = (*self._calls.parts, *own)
        self._watched: dict[Instrument, list[Callable[[], Mapping[Labels, float]]]] = {}
        self.watch(instruments.ACTIVE_REQUESTS, lambda: {(): self.active})
        self.watch(instruments.ACTIVE_STREAMS, lambda: {(): self.streams})

    def served(self, *, method: str, route: str, status: int | None, error: str, seconds: float) -> None:
        """A client's request ended; ``status`` None where no answer was begun, ``error`` a code or empty."""
        self._server.record(seconds, (method, route, "" if status is None else str(status), error, SCHEME))

    def request(self, *, outcome: str, policy: str) -> None:
        """One request ended."""
        self._requests.add(1, (outcome, policy))

    def tokens(self, *, before: int, after: int) -> None:
        """Tokens of one request as the client sent it and as it was forwarded."""
        saved = before - after if before > after else 0
        self._tokens.add_all(((before, _BEFORE), (after, _AFTER), (saved, _SAVED)))

    def burned(
        self, *, tenant: str, key: str, forwarded: int, saved: int, cached: int | None, answered: int | None
    ) -> None:
        """Tokens of one request for its key: ``tenant`` is the hash, ``key`` the name, empty where it has none."""
        found = [(forwarded, ("forwarded", tenant, key)), (max(0, saved), ("saved", tenant, key))]
        if cached is not None:
            found.append((cached, ("cached", tenant, key)))
        if answered is not None:
            found.append((answered, ("answered", tenant, key)))
        self._key_tokens.add_all(found)

    def cost(self, *, forwarded: float, unmanaged: float, tenant: str, key: str = "") -> None:
        """US dollars that one request cost, and that the client's own array would have cost; of whom as above."""
        self._cost.add_all(((forwarded, ("forwarded", tenant, key)), (unmanaged, ("unmanaged", tenant, key))))

    def cache(self, *, changed: str, is_cold: bool) -> None:
        """Who changed the beginning of a request that went up, ``none`` if nobody; whether a cache was cold by then."""
        self._cache_requests.add(1, (changed, "true" if is_cold else "false"))

    def cached(self, *, prompt: int, read: int, written: int) -> None:
        """Tokens of a prompt, and of these what the provider's cache gave and took."""
        self._cache_tokens.add_all(((prompt, _PROMPT), (read, _READ), (written, _WRITTEN)))

    def action(self, layer: str, *, count: int = 1) -> None:
        """A layer changed or removed ``count`` units."""
        self._actions.add(count, (layer,))

    def event(self, kind: str) -> None:
        """The planner reported something of a request, such as a change of zone."""
        self._events.add(1, (kind,))

    def pressure(self, value: float, *, zone: str) -> None:
        """Forwarded tokens over the base of the policy, and the zone."""
        self._pressure.record(value, (zone,))

    def overflow(self) -> None:
        """The upstream said that the prompt does not fit."""
        self._overflows.add(1)

    def retry(self, reason: str) -> None:
        """A further attempt, and why."""
        self._retries.add(1, (reason,))

    def summarizer(self, result: str) -> None:
        """A call of the summariser: ``ok`` or why it was of no use; ``kept`` or ``shared`` where none was made."""
        self._summarizer.add(1, (result,))

    def summarized(self, *, asked: int, answered: int, cached: int, dollars: float | None, tenant: str) -> None:
        """What one call of the summariser took; ``dollars`` None for a model without a price."""
        self._summarizer_tokens.add(asked, ("asked",))
        self._summarizer_tokens.add(cached, ("cached",))
        self._summarizer_tokens.add(answered, ("answered",))
        if dollars is not None:
            self._summarizer_cost.add(dollars, (tenant,))

    def preparation(self, result: str) -> None:
        """A summary for a batch to come was ``prepared``, ``used`` by one, or ``wasted``."""
        self._preparations.add(1, (result,))

    def checkpoint(self, reason: str) -> None:
        """The state of a conversation was saved, and why."""
        self._checkpoints.add(1, (reason,))

    def compression(self, ratio: float) -> None:
        """Something was condensed to a ``ratio``-th of its tokens."""
        self._compression.record(ratio)

    def alert(self, *, level: str, category: str, kind: str = "") -> None:
        """An alert opened."""
        self._alerts.add(1, (level, category, kind))

    def undelivered(self, reason: str) -> None:
        """The webhook did not get an alert: it ``failed``, or too many waited (``dropped``)."""
        self._undelivered.add(1, (reason,))

    def degraded(self, reason: str) -> None:
        """A request was managed with a part missing."""
        self._degraded.add(1, (reason,))

    def store(self, operation: str, seconds: float) -> None:
        """Time of a store operation."""
        self._store.record(seconds, (operation,))

    def overhead(self, seconds: float, *, summarizer: bool = False) -> None:
        """Time that Weir itself added to one request; ``summarizer`` if it waited for one."""
        self._overhead.record(seconds, ("true" if summarizer else "",))

    def settlement(self, seconds: float) -> None:
        """Time that it took to remember and count one request."""
        self._settlement.record(seconds)

    def answered(
        self,
        *,
        provider: str,
        model: str,
        seconds: float,
        operation: str = names.OPERATION,
        response_model: str = "",
        address: str = "",
        port: int | None = None,
        error_type: str = "",
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cache_read: int | None = None,
        cache_write: int | None = None,
        reasoning: int | None = None,
        first_chunk: float | None = None,
    ) -> None:
        """One call to an upstream ended: its duration, usage where reported, time to first chunk if streamed."""
        call = (operation, provider, model, response_model, address, "" if port is None else str(port))
        self._calls.ended(call, seconds=seconds, error_type=error_type, first_chunk=first_chunk)
        self._calls.used(
            call,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cache_read=cache_read,
            cache_write=cache_write,
            reasoning=reasoning,
        )

    def watch(self, instrument: Instrument, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Read a counter or gauge that someone else keeps, whenever the metrics are read."""
        self._watched.setdefault(instrument, []).append(read)

    def read(self) -> list[Family]:
        """Everything at this moment; what two watched ones say of the same labels is added up."""
        found: list[Family] = [(part.instrument, part.read()) for part in self._all]
        for instrument, reads in self._watched.items():
            series: dict[Labels, float] = {}
            for read in reads:
                for labels, value in read().items():
                    series[labels] = series.get(labels, 0) + value
            found.append((instrument, series))
        return found

    def share(self, folder: Path) -> None:
        """Have this process be one of several that leave their readings in ``folder``."""
        self._shared = SharedReadings(folder)

    def leave(self) -> None:
        """Leave the readings for the other processes, if there are any; blocks."""
        if self._shared is not None:
            self._shared.leave(self.read())

    def render(self) -> bytes:
        """Prometheus text format 0.0.4, of all processes that share; blocks for milliseconds."""
        found = self.read()
        return as_text(found if self._shared is None else self._shared.together(found))

    def collect(self, resource: Resource, scope: InstrumentationScope, *, since: int, now: int) -> otlp.MetricsData:
        """The same as cumulative OTLP data points from ``since`` to ``now``, ns since the epoch."""
        found = [as_otlp(instrument, series, since, now) for instrument, series in self.read() if series]
        return otlp.MetricsData([otlp.ResourceMetrics(resource, [otlp.ScopeMetrics(scope, found, "")], "")])
