"""The numbers of one metric: sums and distributions by labels, bounded, safe from any thread.

What a label may hold is bounded, because some of it comes from outside, model names above all: a text has at most 128
characters and nothing in it that looks like a credential, a label 200 values, an instrument 2,000 series (a histogram
500). What goes beyond that is counted under ``other``, so that sums stay right.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from proxy.redaction import redact
from proxy.telemetry.instruments import Instrument

MOST_SERIES = 2_000
MOST_DISTRIBUTIONS = 500
MOST_VALUES = 200
LONGEST_LABEL = 128
OTHER = "other"
Labels = tuple[str, ...]


@dataclass(slots=True)
class Distribution:
    """One series of a histogram: counts per bucket (not cumulative, the last one is +Inf), sum and extremes."""

    counts: list[int]
    total: float = 0.0
    low: float = inf
    high: float = 0.0


class Admission:
    """Which labels get a series of their own: 200 values a label, ``most`` series in all."""

    def __init__(self, instrument: Instrument, *, most: int) -> None:
        self._most = most
        self._values: tuple[set[str], ...] = tuple(set() for _ in instrument.labels)

    def key(self, labels: Labels, series: Mapping[Labels, object]) -> Labels:
        """The labels to count under; values that are too many, or all of them, are ``other``."""
        key = tuple(map(_admitted, labels, self._values))
        if key in series:
            return key
        if len(series) >= self._most - 1:
            return (OTHER,) * len(labels)
        for each, seen in zip(key, self._values, strict=True):
            seen.add(each)
        return key


def _admitted(label: str, seen: set[str]) -> str:
    """The label as it may be shown: itself if known, made harmless if it is new, ``other`` if there is no room."""
    label = label[:LONGEST_LABEL]
    if label in seen:
        return label
    harmless = redact(label).encode("utf-8", "replace").decode()  # a client's JSON may hold half a character
    return harmless if harmless in seen or len(seen) < MOST_VALUES else OTHER


class Counter:
    """Sums by labels, as many as :class:`Admission` admits."""

    def __init__(self, instrument: Instrument, *, most: int = MOST_SERIES) -> None:
        self.instrument = instrument
        self._admission = Admission(instrument, most=most)
        self._series: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, value: float, labels: Labels = ()) -> None:
        """Add ``value``; negative values, NaN and infinity are ignored."""
        self.add_all(((value, labels),))

    def add_all(self, values: Iterable[tuple[float, Labels]]) -> None:
        """Add several values, each with its labels."""
        series = self._series
        with self._lock:
            for value, labels in values:
                if not 0 <= value < inf:
                    continue
                key = labels if labels in series else self._admission.key(labels, series)
                series[key] = series.get(key, 0) + value

    def read(self) -> dict[Labels, float]:
        """The sums at this moment."""
        with self._lock:
            return dict(self._series)


class Histogram:
    """Distributions by labels, as many as :class:`Admission` admits."""

    def __init__(self, instrument: Instrument, *, most: int = MOST_DISTRIBUTIONS) -> None:
        self.instrument = instrument
        self._bounds = instrument.bounds
        self._admission = Admission(instrument, most=most)
        self._series: dict[Labels, Distribution] = {}
        self._lock = threading.Lock()

    def record(self, value: float, labels: Labels = ()) -> None:
        """Count ``value`` in its bucket (upper bounds are inclusive); negative values, NaN and infinity are ignored."""
        if not 0 <= value < inf:
            return
        with self._lock:
            series = self._series.get(labels)
            if series is None:
                key = self._admission.key(labels, self._series)
                series = self._series.setdefault(key, Distribution([0] * (len(self._bounds) + 1)))
            series.counts[bisect_left(self._bounds, value)] += 1
            series.total += value
            if value < series.low:
                series.low = value
            if value > series.high:
                series.high = value

    def read(self) -> dict[Labels, Distribution]:
        """Copies of the distributions at this moment."""
        with self._lock:
            return {key: replace(found, counts=list(found.counts)) for key, found in self._series.items()}
