"""Metrics as OTLP has them; imported once they are exported."""

from collections.abc import Iterable, Mapping

from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from proxy.telemetry.exposition import Family, Instrument, Labels, Series


def metrics_of(
    families: Iterable[Family], resource: Resource, scope: InstrumentationScope, *, since: int, now: int
) -> otlp.MetricsData:
    found = [_as_otlp(instrument, series, since, now) for instrument, series in families if series]
    return otlp.MetricsData([otlp.ResourceMetrics(resource, [otlp.ScopeMetrics(scope, found, "")], "")])


def _as_otlp(instrument: Instrument, found: Mapping[Labels, Series], since: int, now: int) -> otlp.Metric:
    named = [({k: v for k, v in zip(instrument.labels, key, strict=True) if v}, each) for key, each in found.items()]
    data: otlp.Gauge | otlp.Sum | otlp.Histogram
    if instrument.kind == "histogram":
        data = otlp.Histogram([_point(instrument, *each, since, now) for each in named], _CUMULATIVE)
    else:
        numbers = [otlp.NumberDataPoint(attributes, since, now, series.total) for attributes, series in named]
        is_sum = instrument.kind == "counter"
        data = otlp.Sum(numbers, _CUMULATIVE, is_monotonic=True) if is_sum else otlp.Gauge(numbers)
    return otlp.Metric(instrument.name, instrument.help, instrument.unit, data)


_CUMULATIVE = otlp.AggregationTemporality.CUMULATIVE


def _point(
    instrument: Instrument, attributes: dict[str, str], series: Series, since: int, now: int
) -> otlp.HistogramDataPoint:
    count, total, counts, bounds = sum(series.counts), series.total, series.counts, instrument.bounds
    return otlp.HistogramDataPoint(
        attributes, since, now, count, total, counts, bounds, min=series.low, max=series.high
    )
