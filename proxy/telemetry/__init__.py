"""Traces, metrics and the operator's log; the only place that knows OpenTelemetry."""

from proxy.redaction import redact
from proxy.telemetry.context import CONTEXT_HEADERS
from proxy.telemetry.export import TelemetryError
from proxy.telemetry.exposition import CONTENT_TYPE
from proxy.telemetry.logs import ABOUT, About, AlertLine, ExchangeLine, QueuedLog, log_alert, log_exchange
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.setup import Telemetry, TelemetrySettings
from proxy.telemetry.spans import Attempt, Plan
from proxy.telemetry.trace import NULL_TRACE, Trace
from proxy.telemetry.values import provider_name

__all__ = [
    "ABOUT",
    "CONTENT_TYPE",
    "CONTEXT_HEADERS",
    "NULL_TRACE",
    "About",
    "AlertLine",
    "Attempt",
    "ExchangeLine",
    "Metrics",
    "Plan",
    "QueuedLog",
    "Telemetry",
    "TelemetryError",
    "TelemetrySettings",
    "Trace",
    "log_alert",
    "log_exchange",
    "provider_name",
    "redact",
]
