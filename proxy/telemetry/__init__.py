"""Traces, metrics and the operator's log; the only place that knows OpenTelemetry."""
