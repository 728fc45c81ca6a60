"""Traces, metrics and the operator's log; the only place that knows OpenTelemetry."""

from proxy.telemetry.exposition import CONTENT_TYPE
from proxy.telemetry.logs import AlertLine, ExchangeLine, QueuedLog, log_alert, log_exchange, redact
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.setup import Telemetry, TelemetrySettings
from proxy.telemetry.spans import CONTEXT_HEADERS, Attempt, Plan, Trace, is_baggage

__all__ = [
    "CONTENT_TYPE",
    "CONTEXT_HEADERS",
    "AlertLine",
    "Attempt",
    "ExchangeLine",
    "Metrics",
    "Plan",
    "QueuedLog",
    "Telemetry",
    "TelemetrySettings",
    "Trace",
    "is_baggage",
    "log_alert",
    "log_exchange",
    "redact",
]
