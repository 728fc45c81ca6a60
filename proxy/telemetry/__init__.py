"""Traces, metrics and the operator's log; the only place that knows OpenTelemetry."""

from proxy.errors import redact
from proxy.telemetry.logs import (
    CONTEXT_HEADERS,
    LOG_CONTEXT,
    AlertLine,
    ExchangeLine,
    QueuedLog,
    RequestContext,
    log_alert,
    log_exchange,
)
from proxy.telemetry.metrics import Metrics, ModelCall
from proxy.telemetry.setup import OtelSettings, Telemetry, TelemetryError
from proxy.telemetry.trace import NULL_SPAN, NULL_TRACE, AnySpan, Trace

__all__ = [
    "CONTEXT_HEADERS",
    "LOG_CONTEXT",
    "NULL_SPAN",
    "NULL_TRACE",
    "AlertLine",
    "AnySpan",
    "ExchangeLine",
    "Metrics",
    "ModelCall",
    "OtelSettings",
    "QueuedLog",
    "RequestContext",
    "Telemetry",
    "TelemetryError",
    "Trace",
    "log_alert",
    "log_exchange",
    "redact",
]
