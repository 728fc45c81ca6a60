"""The six metrics of a conversation, folded over its requests, and what counts as unhealthy."""

import json
import math
from dataclasses import dataclass
from typing import NamedTuple

KEPT = 100
_VERSION = 1
_ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """What a policy takes for unhealthy.

    Attributes:
        enabled: whether it is watched at all.
        utilization: share of the base above which requests are too full, ``utilization_requests`` in a row.
        overflow_requests: requests left until the window overflows at which that is critical, where no layer is
            going to act before.
        eviction_rate: evictions a request, mean of the newest ``eviction_window``, above which the window is too small.
        compression_ratio: below it the newest ``compressions`` condensings were hardly worth it.
        fidelity: below it summaries lose too much.
        tool_bloat: share of tool results above which there are too many, 1.25 times their cap's share if that is more.
        compactions: so many within ``compaction_window`` requests are thrashing.
        loop: the same call so many times in a row is a loop.
        spike_share: share of the base below which a request's growth is no spike, whatever its multiple of the mean.
    """

    enabled: bool = True
    utilization: float = 0.90
    utilization_requests: int = 3
    overflow_requests: float = 2.0
    eviction_rate: float = 5.0
    eviction_window: int = 5
    compression_ratio: float = 2.0
    compressions: int = 3
    fidelity: float = 0.75
    tool_bloat: float = 0.30
    compactions: int = 3
    compaction_window: int = 20
    loop: int = 3
    spike_share: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one request says.

    Attributes:
        utilization: forwarded tokens over the base.
        evicted: messages that it newly evicted or shortened.
        ratios: of what it newly condensed, tokens before over tokens after.
        compacted: whether it replaced history by a summary.
        burn_rate: tokens that a request adds, None on the first.
        spike: how many times the baseline this request's growth is, None where that is no spike.
        repeats: how many times in a row its newest call was made.
        bloat: tool results' share of it, ``bloat_limit`` the share that is too much; None while there is much room.
        requests_left: requests until the window overflows, None where nothing grows or a layer acts before.
        window_id: the number of its window where it began one.
    """

    at: float
    utilization: float
    evicted: int = 0
    ratios: tuple[float, ...] = ()
    compacted: bool = False
    burn_rate: float | None = None
    spike: float | None = None
    repeats: int = 0
    bloat: float = 0.0
    bloat_limit: float | None = None
    requests_left: float | None = None
    window_id: int | None = None


class Snapshot(NamedTuple):
    """The six metrics after one request (requirement A0.127)."""

    at: float
    utilization: float
    eviction_rate: float
    compression_ratio: float | None
    burn_rate: float | None
    fidelity_score: float | None
    tool_result_bloat: float
    window_id: int


class Episode(NamedTuple):
    """An alert that is open: its kind, and since when."""

    kind: str
    at: float


class Health(NamedTuple):
    """A conversation after its last request; without arguments, one before its first.

    ``above`` counts the requests in a row above the utilization that is too much; ``evicted`` and ``ratios`` are the
    newest ones, oldest first; ``compactions`` are the numbers of the requests that compacted.
    """

    requests: int = 0
    at: float = 0.0
    above: int = 0
    evicted: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    compactions: tuple[int, ...] = ()
    fidelity: float | None = None
    window_id: int = 1
    episodes: tuple[Episode, ...] = ()

    @property
    def eviction_rate(self) -> float:
        """Mean of the newest evictions a request."""
        return sum(self.evicted) / len(self.evicted) if self.evicted else 0.0

    @property
    def compression_ratio(self) -> float | None:
        """Mean of the newest ratios, None before the first condensing."""
        return sum(self.ratios) / len(self.ratios) if self.ratios else None

    def to_json(self) -> str:
        """The state as one line of ASCII JSON, about 150 bytes."""
        return _ENCODER.encode([_VERSION, *self])

    @classmethod
    def from_json(cls, text: str) -> "Health | None":
        """The state that :meth:`to_json` wrote, None for any other text."""
        try:
            version, requests, at, above, evicted, ratios, compactions, fidelity, window_id, episodes = json.loads(text)
            if version != _VERSION:
                return None
            return cls(
                requests=int(requests),
                at=_finite(at),
                above=int(above),
                evicted=tuple(int(each) for each in evicted),
                ratios=tuple(_finite(each) for each in ratios),
                compactions=tuple(int(each) for each in compactions),
                fidelity=None if fidelity is None else _finite(fidelity),
                window_id=int(window_id),
                episodes=tuple(Episode(str(kind), _finite(since)) for kind, since in episodes),
            )
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)
