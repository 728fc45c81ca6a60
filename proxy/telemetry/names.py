"""Every name that leaves the process in a span, an event or a metric, and its allowed values; no
other name does.

GenAI names follow the OpenTelemetry conventions 1.37 to 1.41, which today's viewers read, with the
additions of the newer GenAI repository that do not clash (``conversation.compacted``,
``cache_write``, ``reasoning.level``). Weir's own are under ``weir.`` and ``ctx.pressure.``. The
bucket bounds are those of the conventions.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Final
from urllib.parse import urlsplit

from proxy.errors import redact

# Spans
PLAN_SPAN: Final = "weir context.plan"
LAYER_SPAN: Final = "weir context.layer"
PART_SPAN: Final = "weir context."
PREPARE_SPAN: Final = "weir context.prepare"
OPERATION: Final = "chat"
OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/embeddings": "embeddings",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
}
"""Routes that are relayed, and what the conventions call what they do; all others are plain HTTP.
"""
PROVIDERS: Final[Mapping[str, str]] = {
    "api.openai.com": "openai",
    "openai.azure.com": "azure.ai.openai",
    "services.ai.azure.com": "azure.ai.inference",
    "api.anthropic.com": "anthropic",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.deepseek.com": "deepseek",
    "api.cohere.com": "cohere",
    "api.x.ai": "x_ai",
    "api.perplexity.ai": "perplexity",
    # as litellm spells them
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "vertex_ai": "gcp.vertex_ai",
    "mistral": "mistral_ai",
    "xai": "x_ai",
    "watsonx": "ibm.watsonx.ai",
}
"""Host of an upstream (or the end of it), or litellm's name of a provider, to the conventions'
name.
"""

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
USER_ID: Final = "user.id"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
CONVERSATION_COMPACTED: Final = "gen_ai.conversation.compacted"
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
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
RESPONSE_TIER: Final = "openai.response.service_tier"
FINGERPRINT: Final = "openai.response.system_fingerprint"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
SPAN_KIND: Final = "openinference.span.kind"
INPUT_VALUE: Final = "input.value"
OUTPUT_VALUE: Final = "output.value"
TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105 - a kind of token that is no password

# Attributes: Weir's own
REQUEST_ID: Final = "weir.request.id"
MODEL: Final = "weir.model"
CONTENT_DROPPED: Final = "weir.content.dropped"
DERIVED: Final = "weir.conversation.derived"
TENANT: Final = "weir.tenant"
KEY_NAME: Final = "weir.key"
TEAM: Final = "weir.team"
UNIT: Final = "weir.unit"
VERSION: Final = "weir.version"
POLICY: Final = "weir.policy"
ACTION: Final = "weir.action"
STAGE: Final = "weir.decision.action"
STRATEGY: Final = "weir.decision.strategy"
EVICTED: Final = "weir.decision.evicted"
BEFORE_PERCENT: Final = "weir.decision.utilization_before_pct"
PREFIX_CHANGED: Final = "weir.prefix_changed"
CACHE_COLD: Final = "weir.cache.cold"
CACHE_HIT_RATIO: Final = "weir.cache.hit_ratio"
LAYER: Final = "weir.layer"
LAYER_TRIGGER: Final = "weir.layer.trigger"
LAYER_SCORER: Final = "weir.layer.scorer"
LAYER_RUNG: Final = "weir.layer.rung"
BUCKET: Final = "weir.bucket"
BUCKET_CAP: Final = "weir.bucket.cap"
BUCKET_USED: Final = "weir.bucket.used"
UNITS: Final = "weir.units"
REF: Final = "weir.ref"
BEFORE: Final = "weir.tokens.before"
AFTER: Final = "weir.tokens.after"
LIMIT: Final = "weir.tokens.limit"
BUCKETS: Final = "weir.tokens.buckets"
CLAMPED_FROM: Final = "weir.max_tokens.before"
CLAMPED_TO: Final = "weir.max_tokens.after"
SUMMARIZER: Final = "weir.summarizer"
SUMMARY_PURPOSE: Final = "weir.summary.purpose"
SUMMARY_SOURCE: Final = "weir.summary.source"
SUMMARY_DOLLARS: Final = "weir.summary.cost"
REASON: Final = "weir.reason"
ENDING: Final = "weir.answer.ending"
OUTCOME: Final = "weir.outcome"
ZONE: Final = "weir.zone"
KIND: Final = "weir.kind"
RESULT: Final = "weir.result"
PERIOD: Final = "weir.period"
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


def _below(prefix: str, *fields: str) -> dict[str, str]:
    """Fields whose attribute is called as they are, below a prefix."""
    return {field: f"{prefix}.{field}" for field in fields}


REQUEST_PARAMS: Final[Mapping[str, str]] = {
    **_below("gen_ai.request", "max_tokens", "temperature", "top_p", "top_k", "seed"),
    **_below("gen_ai.request", "frequency_penalty", "presence_penalty", "stream"),
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "reasoning_effort": "gen_ai.request.reasoning.level",
    "previous_response_id": "gen_ai.request.previous_response.id",
    "output_type": "gen_ai.output.type",
    "stop": "gen_ai.request.stop_sequences",
    "n": "gen_ai.request.choice.count",
    "service_tier": "openai.request.service_tier",
}
"""Request field (as OpenAI's body spells it) to attribute; what is not here is not recorded."""

EVENT_FIELDS: Final[Mapping[str, str]] = {
    **_below("weir", "tokens", "velocity", "ratio", "count", "actions", "percent", "placeholders"),
    **_below("weir.zone", "old", "new"),
    **_below(
        "weir.tokens", "estimated", "reported", "last_delta", "asked", "used", "freed", "remaining"
    ),
    **_below("weir.bucket", "current", "excess", "utilization_after", "turns_remaining", "urgency"),
    **_below("weir.alert", "value", "threshold"),
    "zone": ZONE,
    "model": REQUEST_MODEL,
    "reason": REASON,
    "layer": LAYER,
    "action": ACTION,
    "limit": LIMIT,
    "baseline": "weir.velocity.baseline",
    "version": "weir.checkpoint.version",
    "component": BUCKET,
    "soft": "weir.tokens.soft_limit",
    "policy": POLICY,
    "old_window": "weir.window.old",
    "new_window": "weir.window.new",
    "alert": ALERT_KIND,
    "level": ALERT_LEVEL,
    "category": ALERT_CLASS,
}
"""Field of an event (as the caller spells it) to attribute; what is not here is not recorded."""

DEPLOYMENT: Final = "deployment.environment.name"
CHAIN: Final = "CHAIN"
"""OpenInference's span kind for a span that calls others: without it Phoenix shows "unknown"."""

ATTRIBUTES: Final = frozenset(
    value
    for name, value in globals().items()
    if name.isupper() and isinstance(value, str) and "." in value
) | {*REQUEST_PARAMS.values(), *EVENT_FIELDS.values()}
"""The allow-list: no span or event carries an attribute that is not here."""

Value = str | int | float | bool | tuple[str, ...]

MAX_VALUE_LEN: Final = 256
MAX_SESSION_LEN: Final = 200
MAX_LIST: Final = 8
_CODE: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")


@lru_cache(maxsize=1024)
def clean(text: str) -> str:
    """``text`` as an attribute value: at most 256 characters, without what looks like a
    credential.
    """
    shown = redact(text[: 2 * MAX_VALUE_LEN])[:MAX_VALUE_LEN]
    # a client's JSON may hold half a character, and protobuf no such
    return shown.encode("utf-8", "replace").decode()


@lru_cache(maxsize=1024)
def code(text: str) -> str:
    """``text`` if it is a low-cardinality code, else ``_OTHER`` (the fallback of the
    conventions).
    """
    return text if _CODE.fullmatch(text) and redact(text) == text else "_OTHER"


def session_id(conversation: str) -> str:
    """The conversation as ``session.id``, hashed where viewers would drop it: not ASCII, or over
    200 characters.
    """
    if (
        len(conversation) <= MAX_SESSION_LEN
        and conversation.isascii()
        and conversation.isprintable()
    ):
        return clean(conversation)
    return blake2b(conversation.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@lru_cache(maxsize=256)
def service_at(
    base: str, configured: str, provider: str | None = None
) -> tuple[str, str, int | None]:
    """``gen_ai.provider.name`` of an upstream at the URL ``base``, and its host and port.

    The name is the conventions' where its host or provider is known, else its own.
    """
    parts = urlsplit(base)
    host = parts.hostname or ""
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    if provider:
        return PROVIDERS.get(provider, provider), host, port
    known = (name for end, name in PROVIDERS.items() if host == end or host.endswith(f".{end}"))
    return next(known, configured), host, port
