"""Traces, metrics and the operator's log; the only place that knows OpenTelemetry."""

from proxy.redaction import redact
from proxy.telemetry.logs import ABOUT, About, AlertLine, ExchangeLine, QueuedLog, log_alert, log_exchange
from proxy.telemetry.metrics import CONTENT_TYPE, Metrics
from proxy.telemetry.setup import Telemetry, TelemetrySettings
from proxy.telemetry.spans import CONTEXT_HEADERS, Attempt, Plan, Trace, is_baggage

__all__ = [
    "ABOUT",
    "CONTENT_TYPE",
    "CONTEXT_HEADERS",
    "About",
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
