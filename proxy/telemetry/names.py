"""Every name that leaves the process in a span, an event or a metric: one table, nothing else is emitted.

GenAI names follow the OpenTelemetry conventions 1.37 to 1.41, which today's viewers read, with the additions of
the newer GenAI repository that do not clash (``conversation.compacted``, ``cache_write``, ``reasoning.level``).
Weir's own are under ``weir.`` and ``ctx.pressure.``. The bucket bounds are those of the conventions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

# Spans
PLAN_SPAN: Final = "weir context.plan"
LAYER_SPAN: Final = "weir context.layer"
EVALUATE_SPAN: Final = "weir context.evaluate"
OPERATION: Final = "chat"

# Attributes: HTTP, session, GenAI
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
HTTP_RESENDS: Final = "http.request.resend_count"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
CLIENT_ADDRESS: Final = "client.address"
USER_AGENT: Final = "user_agent.original"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
SESSION_ID: Final = "session.id"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
CONVERSATION_COMPACTED: Final = "gen_ai.conversation.compacted"
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
OUTPUT_TYPE: Final = "gen_ai.output.type"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ: Final = "gen_ai.usage.cache_read.input_tokens"
USAGE_CACHE_CREATION: Final = "gen_ai.usage.cache_creation.input_tokens"
USAGE_CACHE_WRITE: Final = "gen_ai.usage.cache_write.input_tokens"
USAGE_REASONING: Final = "gen_ai.usage.reasoning.output_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105 - a kind of token that is no password

# Attributes: Weir's own
REQUEST_ID: Final = "weir.request.id"
DERIVED: Final = "weir.conversation.derived"
TENANT: Final = "weir.tenant"
POLICY: Final = "weir.policy"
PRESET: Final = "weir.preset"
ACTION: Final = "weir.action"
STAGE: Final = "weir.decision.action"
STRATEGY: Final = "weir.decision.strategy"
EVICTED: Final = "weir.decision.evicted"
BEFORE_PERCENT: Final = "weir.decision.utilization_before_pct"
PREFIX_CHANGED: Final = "weir.prefix_changed"
CACHE_COLD: Final = "weir.cache.cold"
CACHE_HIT_RATIO: Final = "weir.cache.hit_ratio"
LAYER: Final = "weir.layer"
UNITS: Final = "weir.units"
REF: Final = "weir.ref"
BEFORE: Final = "weir.tokens.before"
AFTER: Final = "weir.tokens.after"
LIMIT: Final = "weir.tokens.limit"
SUMMARIZER: Final = "weir.summarizer"
SUMMARY_PURPOSE: Final = "weir.summary.purpose"
SUMMARY_SOURCE: Final = "weir.summary.source"
SUMMARY_DOLLARS: Final = "weir.summary.cost"
FIDELITY_SCORE: Final = "weir.fidelity.score"
FIDELITY_FACTS: Final = "weir.fidelity.key_facts"
FIDELITY_STATE: Final = "weir.fidelity.state"
FIDELITY_DECISIONS: Final = "weir.fidelity.decisions"
FIDELITY_JUDGED: Final = "weir.fidelity.judged"
FIDELITY_UNKNOWN: Final = "weir.fidelity.unknown"
COVERAGE_SCORE: Final = "weir.fidelity.coverage"
FIDELITY_RATIO: Final = "weir.fidelity.compression_ratio"
REASON: Final = "weir.reason"
OUTCOME: Final = "weir.outcome"
ZONE: Final = "weir.zone"
KIND: Final = "weir.kind"
RESULT: Final = "weir.result"
STORE_OPERATION: Final = "weir.store.operation"
HEALTH_METRIC: Final = "weir.health.metric"
ALERT_KIND: Final = "weir.alert.kind"
ALERT_LEVEL: Final = "weir.alert.level"
ALERT_CLASS: Final = "weir.alert.class"

PRESSURE_CURRENT: Final = "ctx.pressure.current_tokens"
PRESSURE_MAX: Final = "ctx.pressure.max_tokens"
PRESSURE_PERCENT: Final = "ctx.pressure.utilization_pct"
PRESSURE_ZONE: Final = "ctx.pressure.zone"
PRESSURE_VELOCITY: Final = "ctx.pressure.velocity_tokens_per_turn"
PRESSURE_TURNS: Final = "ctx.pressure.turns_until_red"
PRESSURE_SOURCE: Final = "ctx.pressure.source"

REQUEST_PARAMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_tokens": "gen_ai.request.max_tokens",
        "max_completion_tokens": "gen_ai.request.max_tokens",
        "temperature": "gen_ai.request.temperature",
        "top_p": "gen_ai.request.top_p",
        "top_k": "gen_ai.request.top_k",
        "seed": "gen_ai.request.seed",
        "frequency_penalty": "gen_ai.request.frequency_penalty",
        "presence_penalty": "gen_ai.request.presence_penalty",
        "reasoning_effort": "gen_ai.request.reasoning.level",
        "previous_response_id": "gen_ai.request.previous_response.id",
        "output_type": OUTPUT_TYPE,
        "stop": REQUEST_STOP,
        "stream": REQUEST_STREAM,
        "n": REQUEST_CHOICES,
        "service_tier": "openai.request.service_tier",
    }
)
"""Request field (as OpenAI's body spells it) to attribute; what is not here is not recorded."""

EVENT_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "old": "weir.zone.old",
        "new": "weir.zone.new",
        "zone": ZONE,
        "reason": REASON,
        "layer": LAYER,
        "action": ACTION,
        "tokens": "weir.tokens",
        "limit": LIMIT,
        "velocity": "weir.velocity",
        "baseline": "weir.velocity.baseline",
        "estimated": "weir.tokens.estimated",
        "reported": "weir.tokens.reported",
        "ratio": "weir.ratio",
        "count": "weir.count",
        "version": "weir.checkpoint.version",
        "actions": "weir.actions",
        "component": "weir.bucket",
        "current": "weir.bucket.current",
        "excess": "weir.bucket.excess",
        "utilization_after": "weir.bucket.utilization_after",
        "turns_remaining": "weir.bucket.turns_remaining",
        "urgency": "weir.bucket.urgency",
        "last_delta": "weir.tokens.last_delta",
        "soft": "weir.tokens.soft_limit",
        "used": "weir.tokens.used",
        "freed": "weir.tokens.freed",
        "remaining": "weir.tokens.remaining",
        "placeholders": "weir.placeholders",
        "policy": POLICY,
        "old_window": "weir.window.old",
        "new_window": "weir.window.new",
        "alert": ALERT_KIND,
        "level": ALERT_LEVEL,
        "category": ALERT_CLASS,
        "value": "weir.alert.value",
        "threshold": "weir.alert.threshold",
    }
)
"""Field of an event (as the caller spells it) to attribute; what is not here is not recorded."""

ATTRIBUTES: Final = frozenset(
    value for name, value in globals().items() if name.isupper() and isinstance(value, str) and "." in value
) | frozenset(REQUEST_PARAMS.values()) | frozenset(EVENT_FIELDS.values())  # fmt: skip
"""The allow-list: no span or event carries an attribute that is not here."""

SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKENS: Final = tuple(float(4**power) for power in range(14))
SHORT_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
SHARES: Final = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.25)
RATIOS: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 15.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric: OpenTelemetry name, unit, what it says, attribute names in order, upper bounds of buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The Prometheus name: underscores, ``_seconds`` for s, ``_total`` for a counter."""
        seconds = "_seconds" if self.unit == "s" else ""
        return self.name.replace(".", "_") + seconds + ("_total" if self.kind == "counter" else "")


_CALL = (OPERATION_NAME, PROVIDER_NAME, REQUEST_MODEL, RESPONSE_MODEL, SERVER_ADDRESS, SERVER_PORT)

TOKEN_USAGE = Instrument(
    "gen_ai.client.token.usage",
    "histogram",
    "{token}",
    "Tokens that the upstream reported, per call",
    (*_CALL, TOKEN_TYPE),
    TOKENS,
)
OPERATION_DURATION = Instrument(
    "gen_ai.client.operation.duration",
    "histogram",
    "s",
    "Duration of a call to the upstream, to its last byte",
    (*_CALL, ERROR_TYPE),
    SECONDS,
)
TIME_TO_FIRST_CHUNK = Instrument(
    "gen_ai.client.operation.time_to_first_chunk",
    "histogram",
    "s",
    "Time to the first chunk of a streamed answer",
    _CALL,
    SECONDS,
)
REQUESTS = Instrument("weir.requests", "counter", "{request}", "Requests by outcome", (OUTCOME, POLICY))
TOKENS_SEEN = Instrument(
    "weir.tokens", "counter", "{token}", "Tokens as sent by clients, as forwarded, and saved", (KIND,)
)
ACTIONS = Instrument("weir.actions", "counter", "{action}", "Units changed or removed, by layer", (LAYER,))
EVENTS = Instrument("weir.events", "counter", "{event}", "What the planner reported of requests, by kind", (KIND,))
PRESSURE = Instrument(
    "weir.pressure", "histogram", "1", "Forwarded tokens over the base of the policy", (ZONE,), SHARES
)
OVERFLOWS = Instrument("weir.overflows", "counter", "{overflow}", "Upstream said that the prompt does not fit")
RETRIES = Instrument("weir.retries", "counter", "{attempt}", "Attempts after the first one, by reason", (REASON,))
SUMMARIZER_CALLS = Instrument("weir.summarizer.calls", "counter", "{call}", "Calls of the summariser", (RESULT,))
SUMMARIZER_TOKENS = Instrument(
    "weir.summarizer.tokens",
    "counter",
    "{token}",
    "Tokens of the summariser's calls: asked, cached of these, and answered",
    (KIND,),
)
HEALTH = Instrument(
    "weir.health",
    "gauge",
    "1",
    "Mean of each health metric over the conversations served last; one that was not measured is absent",
    (HEALTH_METRIC,),
)
COMPRESSION = Instrument(
    "weir.compression.ratio",
    "histogram",
    "1",
    "Tokens before over tokens after, of each message or history that was condensed",
    (),
    RATIOS,
)
ALERTS = Instrument(
    "weir.alerts", "counter", "{alert}", "Alerts that opened, by level and class", (ALERT_LEVEL, ALERT_CLASS)
)
ALERTS_UNDELIVERED = Instrument(
    "weir.alerts.undelivered", "counter", "{alert}", "Alerts that the webhook did not get, by reason", (REASON,)
)
SUMMARIZER_COST = Instrument(
    "weir.summarizer.cost",
    "counter",
    "USD",
    "List price of the summariser's calls, which no other cost holds",
    (TENANT,),
)
DEGRADED = Instrument("weir.degraded", "counter", "{request}", "Requests managed with a part missing", (REASON,))
COST = Instrument(
    "weir.cost",
    "counter",
    "USD",
    "List price of prompts and answers: forwarded, and what the clients' own arrays would have cost (unmanaged)",
    (KIND, TENANT),
)
STORE_LATENCY = Instrument(
    "weir.store.latency", "histogram", "s", "Time of a store operation", (STORE_OPERATION,), SHORT_SECONDS
)
FIDELITY = Instrument(
    "weir.fidelity",
    "gauge",
    "1",
    "Consistent answers over those judged, of the newest summary that was evaluated, by policy and dimension",
    (POLICY, KIND),
)
OVERHEAD = Instrument("weir.overhead", "histogram", "s", "Time that Weir itself added to a request", (), SHORT_SECONDS)
DROPPED = Instrument(
    "weir.telemetry.dropped", "counter", "{record}", "Spans and log lines that were not delivered", (KIND,)
)
