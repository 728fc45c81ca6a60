"""When a layer is due, and where its work ends: the table behind ``at`` and ``stop_at``.

=========  ==================================  ==========================================================
scope      ``at``                              the layer is due
=========  ==================================  ==========================================================
total      None                                with the whole batch: above the trigger of the window's shape
total      0                                   on every request
total      a share under 1                     at that share of the policy's base, or where the request does not fit
total      1                                   above the base
a bucket   0                                   on every request
a bucket   a share under 1                     at that share of the bucket's cap, or where the request does not fit
a bucket   1                                   above the cap: an exact fit is one
=========  ==================================  ==========================================================

Limits are uncalibrated tokens: the most at which a layer is *not* due.
"""

import math
from collections.abc import Iterator, Mapping

from policies.budget import Budget
from policies.settings import ContextSettings, Layer, Param

WATERMARK = 0.80
NEVER = -1


def layers_of(settings: ContextSettings) -> tuple[Layer, ...]:
    """The policy's layers, and behind them those that its buckets ask for where buckets are enforced."""
    if settings.enforce != "bucket":
        return settings.layers
    return (*settings.layers, *_bucket_layers(settings))


def _bucket_layers(settings: ContextSettings) -> Iterator[Layer]:
    for action in ("prune-unused", "truncate", "summarize"):
        for name, bucket in settings.buckets.items():
            if bucket.cap is not None and bucket.on_overflow == action:
                strategy, params = _acting(action, name)
                yield Layer(strategy=strategy, scope=name, at=1.0, stop_at=bucket.watermark, params=params)


def _acting(action: str, bucket: str) -> tuple[str, Mapping[str, Param]]:
    """The layer that does what a bucket's ``on_overflow`` asks for; what was decided in words is never truncated."""
    if action == "prune-unused":
        return "prune_tools", {}
    if action == "summarize":
        return "compact", {}
    return ("drop_oldest", {}) if bucket == "history" else ("evict", {"scorer": "fifo"})


def first_trigger(settings: ContextSettings, budget: Budget) -> int:
    """The most tokens of a request at which no layer about the whole of it is due, those that always are aside."""
    limit = budget.soft_limit
    for layer in settings.layers:
        if layer.scope == "total" and layer.at != 0:
            limit = min(limit, limit_for(layer, settings, budget))
    return limit


def limit_for(layer: Layer, settings: ContextSettings, budget: Budget) -> int:
    """The most tokens in the layer's scope at which it is not due; -1 for one that always is."""
    if layer.at == 0:
        return NEVER
    if layer.scope != "total":
        cap = budget.caps.get(layer.scope)
        return budget.room_for(budget.window) if cap is None else _below(layer.at, cap, budget)
    if layer.at is None:
        return shape_trigger(settings, budget)
    return min(budget.soft_limit, _below(layer.at, budget.base(settings), budget))


def shape_trigger(settings: ContextSettings, budget: Budget) -> int:
    """Where a batch starts: the shape's share of U, or of the provider's input limit where that is smaller."""
    usable = budget.usable if budget.max_input is None else min(budget.usable, budget.max_input)
    return min(budget.room_for(settings.shape_for(budget.window).trigger * usable), budget.soft_limit)


def target_for(layer: Layer, settings: ContextSettings, budget: Budget, *, low_water: int) -> int:
    """The tokens in the layer's scope at which its work ends."""
    if layer.scope == "total":
        if layer.stop_at is not None:
            return budget.room_for(layer.stop_at * budget.base(settings))
        if layer.at is None or layer.at == 0:
            return low_water
        return min(limit_for(layer, settings, budget), budget.room_for(WATERMARK * layer.at * budget.base(settings)))
    cap = budget.caps.get(layer.scope)
    if cap is None:
        return budget.room_for(budget.window)
    share = layer.stop_at if layer.stop_at is not None else WATERMARK * (1.0 if layer.at is None else layer.at)
    return budget.room_for(share * cap)


def _below(at: float | None, base: int, budget: Budget) -> int:
    """The most uncalibrated tokens under the share ``at`` of ``base``; under or at it for 1 and for None."""
    if at is None or at >= 1:
        return budget.room_for(base)
    return budget.room_for(math.ceil(round(at * base, 6)) - 1)
