"""Every metric that leaves the process: its name, unit, labels and bounds (those of the conventions), in one table.

The GenAI metrics have two sets of names: :data:`FIRST_NAMES` of the conventions 1.37 to 1.41, which dashboards read
today, and :data:`NEWEST_NAMES`, which the operator has to opt in to. No process reports both. A histogram of times that
are Weir's own has bounds of its own; 25 ms and 5 ms are among them because they are promised.
"""

from dataclasses import dataclass
from typing import Final, Literal

from proxy.telemetry import names

SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKENS: Final = tuple(float(4**power) for power in range(14))
SHORT_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
WAITS: Final = (*SHORT_SECONDS, 2.5, 10.0, 40.0)
REQUEST_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 300.0)
SHARES: Final = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.25)
RATIOS: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 15.0, 30.0, 100.0)

Merge = Literal["sum", "max", "mean"]


@dataclass(frozen=True, slots=True, eq=False)
class Instrument:
    """One metric: OpenTelemetry name, unit, what it says, attribute names in order, upper bounds of buckets.

    ``merge`` is what several worker processes' values of a gauge are put together by.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    merge: Merge = "sum"

    @property
    def prometheus(self) -> str:
        """The Prometheus name: underscores, ``_seconds`` for s, ``_total`` for a counter."""
        seconds = "_seconds" if self.unit == "s" else ""
        return self.name.replace(".", "_") + seconds + ("_total" if self.kind == "counter" else "")


def _counter(name: str, unit: str, said: str, *labels: str) -> Instrument:
    return Instrument(name, "counter", unit, said, labels)


def _gauge(name: str, unit: str, said: str, *labels: str, merge: Merge = "sum") -> Instrument:
    return Instrument(name, "gauge", unit, said, labels, merge=merge)


def _histogram(name: str, unit: str, said: str, *labels: str, bounds: tuple[float, ...]) -> Instrument:
    return Instrument(name, "histogram", unit, said, labels, bounds)


_CALL = (
    *(names.OPERATION_NAME, names.PROVIDER_NAME, names.REQUEST_MODEL, names.RESPONSE_MODEL),
    *(names.SERVER_ADDRESS, names.SERVER_PORT),
)

# fmt: off
TOKEN_USAGE = _histogram(
    "gen_ai.client.token.usage", "{token}", "Tokens that the upstream reported, per call",
    *_CALL, names.TOKEN_TYPE, bounds=TOKENS,
)
OPERATION_DURATION = _histogram(
    "gen_ai.client.operation.duration", "s", "Duration of a call to the upstream, to its last byte",
    *_CALL, names.ERROR_TYPE, bounds=SECONDS,
)
TIME_TO_FIRST_CHUNK = _histogram(
    "gen_ai.client.operation.time_to_first_chunk", "s", "Time to the first chunk of a streamed answer",
    *_CALL, bounds=SECONDS,
)

INFERENCE_DURATION = _histogram(
    "gen_ai.client.inference.duration", "s", "Duration of a call to the upstream, to its last byte",
    *_CALL, names.ERROR_TYPE, bounds=SECONDS,
)
INFERENCE_FIRST_CHUNK = _histogram(
    "gen_ai.client.inference.time_to_first_chunk", "s", "Time to the first chunk of a streamed answer",
    *_CALL, bounds=SECONDS,
)
INPUT_TOKENS = _histogram(
    "gen_ai.client.inference.operation.input_tokens", "{token}",
    "Tokens of the prompt that the upstream reported, cached ones included, per call",
    *_CALL, bounds=TOKENS,
)
OUTPUT_TOKENS = _histogram(
    "gen_ai.client.inference.operation.output_tokens", "{token}",
    "Tokens of the answer that the upstream reported, per call",
    *_CALL, bounds=TOKENS,
)
INPUT_USAGE = _counter(
    "gen_ai.client.inference.usage.input_tokens", "{token}",
    "Tokens of prompts that the upstream reported, cached ones included",
    *_CALL,
)
OUTPUT_USAGE = _counter(
    "gen_ai.client.inference.usage.output_tokens", "{token}", "Tokens of answers that the upstream reported",
    *_CALL,
)
CACHE_READ_USAGE = _counter(
    "gen_ai.client.inference.usage.cache_read.input_tokens", "{token}",
    "Tokens of prompts that were read from the provider's cache",
    *_CALL,
)
CACHE_WRITE_USAGE = _counter(
    "gen_ai.client.inference.usage.cache_write.input_tokens", "{token}",
    "Tokens of prompts that were written to the provider's cache",
    *_CALL,
)
REASONING_USAGE = _counter(
    "gen_ai.client.inference.usage.reasoning.output_tokens", "{token}", "Tokens of answers that were reasoning",
    *_CALL,
)

SERVER_DURATION = _histogram(
    "http.server.request.duration", "s",
    "Duration of a client's request, from its head to the end of its answer; probes and scrapes are left out",
    names.HTTP_METHOD, names.HTTP_ROUTE, names.HTTP_STATUS, names.ERROR_TYPE, names.URL_SCHEME, bounds=REQUEST_SECONDS,
)
REQUESTS = _counter("weir.requests", "{request}", "Requests by outcome", names.OUTCOME, names.POLICY)
TOKENS_SEEN = _counter("weir.tokens", "{token}", "Tokens as sent by clients, as forwarded, and saved", names.KIND)
KEY_TOKENS = _counter(
    "weir.key.tokens", "{token}",
    "Which key takes what: tokens forwarded and saved by Weir's count; read from a cache and answered, as reported",
    names.KIND, names.TENANT, names.KEY_NAME,
)
COST = _counter(
    "weir.cost", "USD",
    "List price of prompts and answers: forwarded, and what the clients' own arrays would have cost (unmanaged)",
    names.KIND, names.TENANT, names.KEY_NAME,
)
CACHE_TOKENS = _counter(
    "weir.cache.tokens", "{token}",
    "Prompts of requests whose upstream says what its cache gave: all of the prompt, and what was read and written",
    names.KIND,
)
CACHE_REQUESTS = _counter(
    "weir.cache.requests", "{request}",
    "Requests by who changed the beginning that a cache could have held, and whether it had had time to go cold",
    names.PREFIX_CHANGED, names.CACHE_COLD,
)
ACTIONS = _counter("weir.actions", "{action}", "Units changed or removed, by layer", names.LAYER)
EVENTS = _counter("weir.events", "{event}", "What the planner reported of requests, by kind", names.KIND)
PRESSURE = _histogram("weir.pressure", "1", "Forwarded tokens over the base of the policy", names.ZONE, bounds=SHARES)
OVERFLOWS = _counter("weir.overflows", "{overflow}", "Upstream said that the prompt does not fit")
RETRIES = _counter("weir.retries", "{attempt}", "Attempts after the first one, by reason", names.REASON)
SUMMARIZER_CALLS = _counter("weir.summarizer.calls", "{call}", "Calls of the summariser", names.RESULT)
SUMMARIZER_TOKENS = _counter(
    "weir.summarizer.tokens", "{token}", "Tokens of the summariser's calls: asked, cached of these, and answered",
    names.KIND,
)
SUMMARIZER_COST = _counter(
    "weir.summarizer.cost", "USD", "List price of the summariser's calls, which no other cost holds",
    names.TENANT,
)
PREPARATIONS = _counter(
    "weir.preparations", "{summary}",
    "Summaries written after an answer for a batch to come: prepared, used by one, or wasted",
    names.RESULT,
)
CHECKPOINTS = _counter(
    "weir.checkpoints", "{checkpoint}", "States of conversations that were saved, by reason",
    names.REASON,
)
DEGRADED = _counter("weir.degraded", "{request}", "Requests managed with a part missing", names.REASON)
COMPRESSION = _histogram(
    "weir.compression.ratio", "1", "Tokens before over tokens after, of each message or history that was condensed",
    bounds=RATIOS,
)
ALERTS = _counter(
    "weir.alerts", "{alert}", "Alerts that opened, by level, class and kind",
    names.ALERT_LEVEL, names.ALERT_CLASS, names.ALERT_KIND,
)
ALERTS_UNDELIVERED = _counter(
    "weir.alerts.undelivered", "{alert}", "Alerts that the webhook did not get, by reason",
    names.REASON,
)
STORE_LATENCY = _histogram(
    "weir.store.latency", "s", "Time of a store operation",
    names.STORE_OPERATION, bounds=SHORT_SECONDS,
)
OVERHEAD = _histogram(
    "weir.overhead", "s",
    "Time that Weir itself added to a request; those that waited for a summariser are labelled as such",
    names.SUMMARIZER, bounds=WAITS,
)
SETTLEMENT = _histogram(
    "weir.settlement", "s",
    "Time that watching a request took after its answer: health, metrics, trace, log, and its row",
    bounds=SHORT_SECONDS,
)

ACTIVE_REQUESTS = _gauge(
    "http.server.active_requests", "{request}", "Requests on the managed route that are being answered",
)
ACTIVE_STREAMS = _gauge("weir.streams.active", "{stream}", "Answers on the managed route that are being streamed")
BUILD = _gauge("weir.build.info", "1", "Always 1; the version is a label", names.VERSION, merge="max")
HEALTH = _gauge(
    "weir.health", "1",
    "Mean of each health metric over the conversations served last; one that was not measured is absent",
    names.HEALTH_METRIC, merge="mean",
)
UNAUTHORISED = _counter(
    "weir.unauthorised", "{request}",
    "Requests without a right key: it was missing, unknown, or one of too many (held_off)",
    names.REASON,
)
FIDELITY = _gauge(
    "weir.fidelity", "1",
    "Consistent answers over those judged, of the newest summary that was evaluated, by policy and dimension",
    names.POLICY, names.KIND, merge="mean",
)
STORE_WAITING = _gauge(
    "weir.store.waiting", "{row}",
    "What waits in memory to be stored: exchanges' rows, and changes that the store refused",
    names.KIND,
)
TASKS = _gauge("weir.tasks", "{task}", "Asynchronous tasks that are under way; it rises with what is in flight")
WINDOWS_LEARNED = _gauge(
    "weir.windows.learned", "{window}", "Windows that hold because of an upstream's errors",
    merge="max",
)
DROPPED = _counter("weir.telemetry.dropped", "{record}", "Spans and log lines that were not delivered", names.KIND)
# fmt: on

FIRST_NAMES: Final = (TOKEN_USAGE, OPERATION_DURATION, TIME_TO_FIRST_CHUNK)
NEWEST_NAMES: Final = (
    *(INFERENCE_DURATION, INFERENCE_FIRST_CHUNK, INPUT_TOKENS, OUTPUT_TOKENS),
    *(INPUT_USAGE, OUTPUT_USAGE, CACHE_READ_USAGE, CACHE_WRITE_USAGE, REASONING_USAGE),
)
OWN: Final = tuple(
    found
    for found in tuple(globals().values())
    if isinstance(found, Instrument) and found not in FIRST_NAMES and found not in NEWEST_NAMES
)
"""What is reported under either set of names."""
