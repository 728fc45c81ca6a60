"""How metrics are written: as Prometheus text, as OpenMetrics with exemplars, as OTLP, and for other workers.

A scrape reaches any one of several workers. Each leaves its readings in a folder, and who is asked adds them up: what
another one says is as old as its last reading, two seconds or so. The sums of a worker that has died stay, because a
counter must not go back; what it said of the moment does not.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

Merge = Literal["sum", "max", "mean"]


class Instrument(msgspec.Struct, frozen=True, eq=False):
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
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return self.name.replace(".", "_") + unit + ("_total" if self.kind == "counter" else "")


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_TYPE = b"application/openmetrics-text"
SILENT_AFTER = 15.0
SUFFIX = ".readings"

Labels = tuple[str, ...]
Exemplar = tuple[str, float, float]
"""The trace of one value in a bucket, the value, and when it was, s since the epoch."""


class Series(msgspec.Struct, array_like=True):
    """One series: a sum or a value; of a histogram also counts per bucket (the last one is +Inf), the extremes, and by
    bucket the newest value that has a trace."""

    total: float = 0
    counts: list[int] = []
    low: float = 0.0
    high: float = 0.0
    exemplars: dict[int, Exemplar] = {}

    def copy(self) -> "Series":
        return Series(self.total, list(self.counts), self.low, self.high, dict(self.exemplars))


Family = tuple[Instrument, Mapping[Labels, Series]]


def as_text(families: Iterable[Family], *, openmetrics: bool = False) -> bytes:
    lines: list[str] = []
    for instrument, found in families:
        if found:
            name, said = instrument.prometheus, instrument.help.replace("\\", r"\\").replace("\n", r"\n")
            name = name.removesuffix("_total") if openmetrics else name
            lines += (f"# HELP {name} {said}", f"# TYPE {name} {instrument.kind}")
        for labels, series in found.items():
            lines += _samples(instrument, labels, series, openmetrics=openmetrics)
    lines += ["# EOF"] if openmetrics else []
    return "".join(line + "\n" for line in lines).encode("utf-8", "replace")


def _samples(instrument: Instrument, labels: Labels, series: Series, *, openmetrics: bool) -> Iterator[str]:
    name, named = instrument.prometheus, zip(instrument.labels, labels, strict=True)
    pairs = [f'{label.replace(".", "_")}="{_escape(value)}"' for label, value in named if value]
    braced, running = f"{{{','.join(pairs)}}}" if pairs else "", 0
    if not series.counts:
        yield f"{name}{braced} {_number(series.total)}"
        return
    bounds = map(repr if openmetrics else _number, instrument.bounds)
    for place, (bound, count) in enumerate(zip((*bounds, "+Inf"), series.counts, strict=True)):
        running += count
        bucket = ",".join((*pairs, f'le="{bound}"'))
        exemplar = _exemplar(series.exemplars.get(place)) if openmetrics else ""
        yield f"{name}_bucket{{{bucket}}} {running}{exemplar}"
    yield f"{name}_sum{braced} {_number(series.total)}"
    yield f"{name}_count{braced} {running}"


def _exemplar(given: Exemplar | None) -> str:
    return "" if given is None else f' # {{trace_id="{given[0]}"}} {given[1]!r} {given[2]:.3f}'


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def as_otlp(
    families: Iterable[Family], resource: Resource, scope: InstrumentationScope, *, since: int, now: int
) -> "MetricsData":
    from opentelemetry.sdk.metrics import export as otlp  # noqa: PLC0415 - a tenth of a second, and few export metrics

    cumulative = otlp.AggregationTemporality.CUMULATIVE

    def point(attributes: dict[str, str], series: Series, bounds: Sequence[float]) -> otlp.HistogramDataPoint:
        count, counts = sum(series.counts), series.counts
        return otlp.HistogramDataPoint(
            attributes, since, now, count, series.total, counts, bounds, min=series.low, max=series.high
        )

    def metric(instrument: Instrument, found: Mapping[Labels, Series]) -> otlp.Metric:
        labels = instrument.labels
        named = [({k: v for k, v in zip(labels, key, strict=True) if v}, each) for key, each in found.items()]
        data: otlp.Gauge | otlp.Sum | otlp.Histogram
        if instrument.kind == "histogram":
            data = otlp.Histogram([point(*each, instrument.bounds) for each in named], cumulative)
        else:
            numbers = [otlp.NumberDataPoint(attributes, since, now, series.total) for attributes, series in named]
            is_sum = instrument.kind == "counter"
            data = otlp.Sum(numbers, cumulative, is_monotonic=True) if is_sum else otlp.Gauge(numbers)
        return otlp.Metric(instrument.name, instrument.help, instrument.unit, data)

    found = [metric(instrument, series) for instrument, series in families if series]
    return otlp.MetricsData([otlp.ResourceMetrics(resource, [otlp.ScopeMetrics(scope, found, "")], "")])


class WorkerReadings:
    def __init__(self, folder: Path, instruments: Mapping[str, Instrument]) -> None:
        self._folder = folder
        self._instruments = instruments
        self._mine = folder / f"{uuid4().hex}{SUFFIX}"

    def leave(self, families: Iterable[Family]) -> None:
        unfinished = self._mine.with_suffix(".unfinished")
        readings = [(instrument.name, list(found.items())) for instrument, found in families]
        with contextlib.suppress(OSError):
            unfinished.write_bytes(msgspec.json.encode(readings))
            unfinished.replace(self._mine)

    def together(self, families: Sequence[Family]) -> list[Family]:
        every: dict[str, list[Family]] = {instrument.name: [(instrument, found)] for instrument, found in families}
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path == self._mine:
                continue
            with contextlib.suppress(OSError, msgspec.DecodeError, KeyError):
                speaks = time.time() - path.stat().st_mtime < SILENT_AFTER
                read = msgspec.json.decode(path.read_bytes(), type=list[tuple[str, list[tuple[Labels, Series]]]])
                for name, found in read:
                    instrument = self._instruments[name]
                    whole = {key: series for key, series in found if len(series.counts) == _buckets(instrument)}
                    if speaks or instrument.kind != "gauge":
                        every.setdefault(name, []).append((instrument, whole))
        return [_merged(found) for found in every.values()]


def _buckets(instrument: Instrument) -> int:
    return len(instrument.bounds) + 1 if instrument.kind == "histogram" else 0


def _merged(families: Sequence[Family]) -> Family:
    instrument = families[0][0]
    every: dict[Labels, list[Series]] = {}
    for _, found in families:
        for labels, series in found.items():
            every.setdefault(labels, []).append(series)
    if instrument.kind == "histogram":
        return instrument, {labels: _added(several) for labels, several in every.items()}
    totals = {labels: [series.total for series in several] for labels, several in every.items()}
    return instrument, {labels: Series(_put_together(values, instrument.merge)) for labels, values in totals.items()}


def _added(several: Sequence[Series]) -> Series:
    counts = [sum(each) for each in zip(*(series.counts for series in several), strict=True)]
    low, high = min(series.low for series in several), max(series.high for series in several)
    exemplars = {place: each for series in several for place, each in series.exemplars.items()}
    return Series(sum(series.total for series in several), counts, low, high, exemplars)


def _put_together(values: Sequence[float], how: Merge) -> float:
    return max(values) if how == "max" else sum(values) / (len(values) if how == "mean" else 1)
