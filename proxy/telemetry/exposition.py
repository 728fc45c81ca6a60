"""Readings of metrics in the two forms that leave the process: Prometheus text and OTLP data points."""

from collections.abc import Iterable, Iterator, Mapping

from opentelemetry.sdk.metrics import export as otlp

from proxy.telemetry.instruments import Instrument
from proxy.telemetry.series import Distribution, Labels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Series = Mapping[Labels, float] | Mapping[Labels, Distribution]
Family = tuple[Instrument, Series]


def as_text(families: Iterable[Family]) -> bytes:
    """Prometheus text format 0.0.4; what has no samples yet is left out."""
    lines: list[str] = []
    for instrument, series in families:
        if not series:
            continue
        lines.extend(_head(instrument))
        for labels, value in series.items():
            lines.extend(_lines(instrument, _pairs(instrument, labels), value))
    return "".join(line + "\n" for line in lines).encode()


def as_otlp(instrument: Instrument, series: Series, since: int, now: int) -> otlp.Metric:
    """One metric as cumulative data points from ``since`` to ``now``, ns since the epoch."""
    numbers: list[otlp.NumberDataPoint] = []
    histograms: list[otlp.HistogramDataPoint] = []
    for labels, value in series.items():
        attributes = {name: label for name, label in zip(instrument.labels, labels, strict=True) if label}
        if isinstance(value, Distribution):
            histograms.append(_point(instrument, attributes, value, since, now))
        else:
            numbers.append(otlp.NumberDataPoint(attributes, since, now, value))
    data: otlp.Gauge | otlp.Sum | otlp.Histogram = otlp.Gauge(numbers)
    if instrument.kind == "counter":
        data = otlp.Sum(numbers, otlp.AggregationTemporality.CUMULATIVE, is_monotonic=True)
    elif instrument.kind == "histogram":
        data = otlp.Histogram(histograms, otlp.AggregationTemporality.CUMULATIVE)
    return otlp.Metric(instrument.name, instrument.help, instrument.unit, data)


def _point(
    instrument: Instrument, attributes: Mapping[str, str], found: Distribution, since: int, now: int
) -> otlp.HistogramDataPoint:
    return otlp.HistogramDataPoint(
        dict(attributes),
        since,
        now,
        sum(found.counts),
        found.total,
        found.counts,
        instrument.bounds,
        min=found.low,
        max=found.high,
    )


def _head(instrument: Instrument) -> tuple[str, str]:
    said = instrument.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {instrument.prometheus} {said}", f"# TYPE {instrument.prometheus} {instrument.kind}"


def _pairs(instrument: Instrument, labels: Labels) -> str:
    """``a="1",b="2"`` with backslash, quote and line feed escaped; empty labels are left out."""
    return ",".join(
        f'{name.replace(".", "_")}="{_escape(value)}"'
        for name, value in zip(instrument.labels, labels, strict=True)
        if value
    )


def _escape(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return escaped.encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _lines(instrument: Instrument, pairs: str, value: float | Distribution) -> Iterator[str]:
    name, braced = instrument.prometheus, f"{{{pairs}}}" if pairs else ""
    if not isinstance(value, Distribution):
        yield f"{name}{braced} {_number(value)}"
        return
    before, running = pairs + "," if pairs else "", 0
    for bound, count in zip((*map(_number, instrument.bounds), "+Inf"), value.counts, strict=True):
        running += count
        yield f'{name}_bucket{{{before}le="{bound}"}} {running}'
    yield f"{name}_sum{braced} {_number(value.total)}"
    yield f"{name}_count{braced} {running}"
