"""One page of metrics for several worker processes: each leaves its readings in a folder, who is asked adds them up.

A scrape reaches any one of the workers. What another one says is as old as its last reading, two seconds or so. The
sums of a worker that has died stay, because a counter must not go back; what it said of the moment does not.
"""

import contextlib
import time
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Literal
from uuid import uuid4

import msgspec

from proxy.telemetry.exposition import Family, Series
from proxy.telemetry.instruments import FIRST_NAMES, NEWEST_NAMES, OWN, Instrument
from proxy.telemetry.series import Distribution, Labels

SILENT_AFTER = 15.0
SUFFIX = ".readings"
_BY_NAME = {instrument.name: instrument for instrument in (*FIRST_NAMES, *NEWEST_NAMES, *OWN)}


class _Read(msgspec.Struct, array_like=True):
    """One family as it is written down: a name, and by labels a number or counts with total, least and most."""

    name: str
    numbers: list[tuple[Labels, float]]
    counts: list[tuple[Labels, list[int], float, float, float]]


class SharedReadings:
    """The folder, and this process's file in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine = folder / f"{uuid4().hex}{SUFFIX}"

    def leave(self, families: Iterable[Family]) -> None:
        """Write this process's readings where the others find them; blocks. Nothing happens if the folder is gone."""
        unfinished = self._mine.with_suffix(".unfinished")
        with contextlib.suppress(OSError):
            unfinished.write_bytes(msgspec.json.encode([_written(*family) for family in families]))
            unfinished.replace(self._mine)

    def together(self, families: Sequence[Family]) -> list[Family]:
        """This process's readings and what the others left, added up; blocks."""
        every: dict[str, list[Family]] = {instrument.name: [(instrument, s)] for instrument, s in families}
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path == self._mine:
                continue
            with contextlib.suppress(OSError, msgspec.DecodeError, KeyError):
                speaks = time.time() - path.stat().st_mtime < SILENT_AFTER
                for read in msgspec.json.decode(path.read_bytes(), type=list[_Read]):
                    instrument = _BY_NAME[read.name]
                    if speaks or instrument.kind != "gauge":
                        every.setdefault(read.name, []).append(_family(instrument, read))
        return [_merged(found) for found in every.values()]


def _written(instrument: Instrument, series: Series) -> _Read:
    read = _Read(instrument.name, [], [])
    for labels, value in series.items():
        if isinstance(value, Distribution):
            read.counts.append((labels, value.counts, value.total, value.low, value.high))
        else:
            read.numbers.append((labels, value))
    return read


def _family(instrument: Instrument, read: _Read) -> Family:
    if instrument.kind == "histogram":
        return instrument, {k: Distribution(counts, total, low, high) for k, counts, total, low, high in read.counts}
    return instrument, dict(read.numbers)


def _merged(families: Sequence[Family]) -> Family:
    """One family of several processes: sums, and of gauges what they are merged by."""
    instrument = families[0][0]
    if instrument.kind == "histogram":
        return instrument, _distributions(families)
    numbers: dict[Labels, list[float]] = {}
    for _, series in families:
        for labels, value in series.items():
            if not isinstance(value, Distribution):
                numbers.setdefault(labels, []).append(value)
    return instrument, {labels: _put_together(values, instrument.merge) for labels, values in numbers.items()}


def _distributions(families: Sequence[Family]) -> dict[Labels, Distribution]:
    found: dict[Labels, Distribution] = {}
    for instrument, series in families:
        for labels, value in series.items():
            if isinstance(value, Distribution) and len(value.counts) == len(instrument.bounds) + 1:
                of = found.setdefault(labels, Distribution([0] * len(value.counts), low=inf))
                of.counts = [a + b for a, b in zip(of.counts, value.counts, strict=True)]
                of.total += value.total
                of.low, of.high = min(of.low, value.low), max(of.high, value.high)
    return found


def _put_together(values: Sequence[float], how: Literal["sum", "max", "mean"]) -> float:
    return max(values) if how == "max" else sum(values) / (len(values) if how == "mean" else 1)
