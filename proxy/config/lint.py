"""What a cascade may name, what is wrong with a policy, and what is allowed but probably not meant.

``faults`` stop a policy from being loaded. ``cautions`` are for ``weir policy lint``; the few of
them that otherwise show only when money is lost are also reported when a policy is loaded
(``grave``). Each has the key that it is about.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from policies.limits import BUCKETS
from policies.settings import Bucket, ContextSettings, ExtractShape, Layer, Mode
from policies.strategies.layers import STRATEGIES
from policies.strategies.scorers import SCORERS as SCORER_TYPES
from proxy.config.file import KeyPath, nearest
from proxy.features.custom import check_custom
from proxy.wire.counting import check_estimator

ASKING = frozenset(name for name, strategy in STRATEGIES.items() if strategy.asks_model)
"""Layers that may ask a model; all others cost nothing."""


Parameters = Mapping[str, Mapping[str, Any]]
"""The values that each parameter accepts: its ``kind``, and perhaps ``least``, ``most`` and
``words``.
"""

LAYERS: Mapping[str, Parameters] = {
    name: strategy.parameters() for name, strategy in STRATEGIES.items()
}
SCORERS: Mapping[str, Parameters] = {
    name: scorer.parameters() for name, scorer in SCORER_TYPES.items()
}


def _fault_of_parameter(
    value: object,
    *,
    kind: str,
    least: float = 0,
    most: float = math.inf,
    words: tuple[str, ...] = (),
) -> str | None:
    if kind == "flag":
        return None if isinstance(value, bool) else "should be true or false"
    if kind in {"whole", "number"}:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            return "should be a number"
        if kind == "whole" and value != int(value):
            return "should be a whole number"
        upper = "on" if most == math.inf else f"to {most:g}"
        return None if least <= value <= most else f"should be from {least:g} {upper}"
    given = value if isinstance(value, tuple) and kind == "words" else (value,)
    for word in given:
        if not isinstance(word, str) or not word:
            return "should be text"
        if words and word not in words:
            return f"no {word}{nearest(word, words)}"
    return None


def parameters_of(layer: str, given: Mapping[str, object]) -> Parameters:
    scorer = given.get("scorer")
    own = LAYERS[layer]
    return {**own, **SCORERS[str(scorer)]} if "scorer" in own and scorer in SCORERS else own


Found = Iterator[tuple[KeyPath, str]]
MIN_HEADROOM = 0.05
MAX_PLANNED = 0.90
USUAL_SHARES: Mapping[str, tuple[float, float]] = {
    "system": (0.05, 0.10),
    "tools": (0.10, 0.20),
    "history": (0.30, 0.40),
    "tool_outputs": (0.25, 0.35),
    "working": (0.10, 0.15),
}

MAX_RESULT = 25_000
MAX_PERCENT = 100
_RESERVED = "working"
_NAMES = (*BUCKETS, _RESERVED)
_ACTIONS: Mapping[str, frozenset[str]] = {
    "prune-unused": frozenset({"tools"}),
    "summarize": frozenset({"history", "tool_outputs", "summary"}),
    "truncate": frozenset({"history", "tool_outputs", "memory"}),
}
_BESIDE = frozenset({"ingest_cap", "dedupe"})
_ROUNDING = 1e-9


def faults(settings: ContextSettings) -> Found:
    for name in ("reserve", "headroom"):
        if (percent := _looks_like_percent(getattr(settings, name))) is not None:
            yield (name,), percent
    for tool, cap in settings.ingest.tools.items():
        if cap < 1:
            yield ("ingest", "tools", tool), "should be above 0"
    zones = settings.zones
    starts = (zones.yellow_at, zones.orange_at, zones.red_at, zones.critical_at)
    if not (starts[0] > 0 and list(starts) == sorted(starts)):
        yield (
            ("zones",),
            "each zone should start no lower than the one before: yellow, orange, red, critical",
        )
    if (unknown := check_estimator(settings.estimator)) is not None:
        yield ("estimator",), unknown
    yield from _shape_faults(settings.shapes)
    yield from _bucket_faults(settings.buckets)
    for at, layer in enumerate(settings.layers):
        for path, text in _layer_faults(layer, settings):
            yield ("cascade", at, *path), text
    shares = shares_of(settings)
    planned = sum(shares.values()) + (_headroom(settings) or 0)
    if planned > 1 + _ROUNDING:
        named = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        yield (
            ("buckets",),
            f"{named} and the headroom are {planned:.1%} of the window: more than there is",
        )


def grave(settings: ContextSettings) -> Found:
    """Cautions that are also reported when a policy is loaded."""
    if settings.mode is Mode.OFF:
        return
    headroom = _headroom(settings)
    if headroom is not None and headroom < MIN_HEADROOM:
        yield (
            ("headroom",),
            f"headroom {headroom:.1%} < 5%: an estimate that is off by more overflows",
        )


def cautions(settings: ContextSettings) -> Found:
    if settings.mode is Mode.OFF:
        return
    yield from grave(settings)
    yield from _share_cautions(settings)
    yield from _bucket_cautions(settings)
    yield from _layer_cautions(settings)
    if settings.summaries.role != "user":
        text = (
            f"{settings.summaries.role}: what stands in a summary may be taken for an instruction"
            " of yours"
        )
        yield ("summaries", "role"), text
    if settings.estimator.startswith("chars"):
        yield (
            ("estimator",),
            f"{settings.estimator} counts characters: wrong by half for code and other scripts",
        )
    memory = settings.buckets.get("memory")
    if memory is not None and memory.charge_to == "system":
        text = (
            "what is remembered of a user stands in the system prompt: no prefix is shared between"
            " users"
        )
        yield ("buckets", "memory"), text


def shares_of(settings: ContextSettings) -> dict[str, float]:
    """Each bucket's cap as a share of the window, those in tokens only where the policy names its
    window.
    """
    window = settings.designed_for or settings.window
    caps = {name: bucket.cap for name, bucket in settings.buckets.items() if bucket.cap is not None}
    if caps and settings.reserve and _RESERVED not in caps:
        caps[_RESERVED] = settings.reserve
    found = {name: _share(cap, window) for name, cap in caps.items()}
    return {name: share for name, share in found.items() if share is not None}


def _share(amount: float, window: int | None) -> float | None:
    if amount < 1:
        return amount
    return None if window is None else amount / window


def _headroom(settings: ContextSettings) -> float | None:
    return _share(settings.headroom, settings.designed_for or settings.window)


def _looks_like_percent(amount: float) -> str | None:
    return (
        f"{amount:g} are tokens; a share is written as {amount / 100:g}"
        if 1 <= amount <= MAX_PERCENT
        else None
    )


def _shape_faults(shapes: tuple[ExtractShape, ...]) -> Found:
    if not shapes or shapes[-1].window is not None:
        yield ("shapes",), "the last one should have window: null, for every larger window"
    windows = [shape.window for shape in shapes[:-1]]
    known = [window for window in windows if window is not None]
    if len(known) < len(windows) or known != sorted(set(known)):
        yield ("shapes",), "windows should rise from one to the next"


def _bucket_faults(buckets: Mapping[str, Bucket]) -> Found:
    for name, bucket in buckets.items():
        at = ("buckets", name)
        if name not in _NAMES:
            yield at, f"no bucket {name}{nearest(name, _NAMES)}"
            continue
        if bucket.cap is not None and (percent := _looks_like_percent(bucket.cap)) is not None:
            yield (*at, "cap"), percent
        if bucket.charge_to is not None:
            yield from _charge_faults(at, name, bucket.charge_to, buckets)
        action = bucket.on_overflow
        if action not in {"track", "warn"} and bucket.cap is None:
            yield (*at, "on_overflow"), f"{action} never happens: the bucket has no cap"
        elif name not in _ACTIONS.get(action, frozenset(_NAMES)):
            yield (*at, "on_overflow"), f"{name} cannot be made smaller by {action}"


def _charge_faults(at: KeyPath, name: str, target: str, buckets: Mapping[str, Bucket]) -> Found:
    if target not in BUCKETS:
        yield (*at, "charge_to"), f"no bucket {target}{nearest(target, BUCKETS)}"
    elif target == name:
        yield (*at, "charge_to"), "a bucket cannot be charged to itself"
    elif target in buckets and (further := buckets[target].charge_to) is not None:
        last = _last_charged(name, further, buckets)
        advice = (
            f"name {last}, or nothing" if last is not None else "take charge_to from one of them"
        )
        yield (*at, "charge_to"), f"{target} is itself charged to {further}: {advice}"


def _last_charged(name: str, target: str, buckets: Mapping[str, Bucket]) -> str | None:
    """The bucket at the end of a chain of charges from ``target`` on; None where that leads
    back.
    """
    seen = {name}
    while target not in seen:
        seen.add(target)
        further = buckets[target].charge_to if target in buckets else None
        if further is None:
            return target if target in BUCKETS else None
        target = further
    return None


def _layer_faults(layer: Layer, settings: ContextSettings) -> Found:
    if layer.strategy not in LAYERS:
        yield ("layer",), f"no layer {layer.strategy}{nearest(layer.strategy, tuple(LAYERS))}"
        return
    if layer.at and layer.stop_at is not None and layer.stop_at > layer.at:
        yield ("stop_at",), f"is above at ({layer.at:g}): the layer would end before it begins"
    yield from _scope_faults(layer.scope, settings.buckets)
    known = parameters_of(layer.strategy, layer.params)
    for name, value in layer.params.items():
        if name not in known:
            of = (
                "no parameters"
                if not known
                else f"no parameter {name}{nearest(name, sorted(known))}"
            )
            yield ("params", name), f"{layer.strategy} has {of}"
        elif (fault := _fault_of_parameter(value, **known[name])) is not None:
            yield ("params", name), fault
    scorer = SCORER_TYPES.get(str(layer.params.get("scorer")))
    if scorer is not None and (unbalanced := scorer.of(layer.params).fault()):
        yield ("params",), unbalanced
    if layer.strategy == "custom":
        path = layer.params.get("path")
        if not path:
            yield (), "custom needs params: {path: module:function}"
        elif (fault := check_custom(str(path))) is not None:
            yield ("params", "path"), fault


def _scope_faults(scope: str, buckets: Mapping[str, Bucket]) -> Found:
    if scope == "total":
        return
    if scope not in BUCKETS:
        yield ("scope",), f"no bucket {scope}{nearest(scope, ('total', *BUCKETS))}"
    elif scope in buckets and buckets[scope].charge_to is not None:
        yield (
            ("scope",),
            f"nothing counts against {scope}: it is charged to {buckets[scope].charge_to}",
        )
    elif scope not in buckets or buckets[scope].cap is None:
        yield ("scope",), f"{scope} has no cap: the layer would never be due"


def _share_cautions(settings: ContextSettings) -> Found:
    shares = shares_of(settings)
    total = sum(shares.values())
    if total > MAX_PLANNED + _ROUNDING:
        yield (
            ("buckets",),
            f"buckets take {total:.2%} of the window, usually at most 90%: the rest is headroom",
        )
    if settings.enforce != "bucket":
        return
    for name, (least, most) in USUAL_SHARES.items():
        share = shares.get(name)
        if share is not None and not least <= round(share, 9) <= most:
            yield (
                ("buckets", name),
                (
                    f"{name} takes {share:.2%} of the window, usually {least * 100:g} to"
                    f" {most * 100:g}%"
                ),
            )


def _bucket_cautions(settings: ContextSettings) -> Found:
    for name, bucket in settings.buckets.items():
        if bucket.cap is not None and bucket.charge_to is not None:
            yield (
                ("buckets", name, "cap"),
                f"nothing counts against it: {name} is charged to {bucket.charge_to}",
            )
        if bucket.cap is None and bucket.on_overflow == "warn":
            yield ("buckets", name, "on_overflow"), "warn never happens: the bucket has no cap"
        if bucket.on_overflow == "reject" and settings.enforce != "bucket":
            yield (
                ("buckets", name, "on_overflow"),
                f"reject only warns where enforce is {settings.enforce}",
            )
    working = settings.buckets.get(_RESERVED)
    if working is not None and working.cap is not None and working.cap != settings.reserve:
        yield (
            ("buckets", _RESERVED, "cap"),
            f"is {working.cap:g}, but reserve is {settings.reserve:g}: reserve holds",
        )
    tools = settings.buckets.get("tools")
    prunes = any(layer.strategy == "prune_tools" for layer in settings.layers)
    if (
        settings.buckets
        and not prunes
        and (tools is None or (tools.cap is None and tools.charge_to is None))
    ):
        yield ("buckets",), "tools have no cap: their definitions can crowd out the conversation"


def _layer_cautions(settings: ContextSettings) -> Found:
    if not settings.manages:
        if settings.layers:
            yield ("cascade",), "no layer ever runs where enforce is reject"
        return
    if settings.ingest.cap > MAX_RESULT:
        yield (
            ("ingest", "cap"),
            f"a single result may have {settings.ingest.cap:,} tokens: one can fill the window",
        )
    kinds = {layer.strategy for layer in settings.layers} - _BESIDE
    actions = {bucket.on_overflow for bucket in settings.buckets.values()} - {
        "track",
        "warn",
        "reject",
    }
    if settings.enforce != "bucket":
        actions = set()
    # below a compaction that fails there are the rungs
    if len(kinds | actions) == 1 and kinds != {"compact"}:
        yield (
            ("cascade",),
            (
                f"{next(iter(kinds | actions))} is the only way to get smaller: when it fails,"
                " turns are lost"
            ),
        )
    elif not kinds | actions:
        yield (
            ("cascade",),
            "no way to get smaller: the oldest turns are dropped when the window is full",
        )
    yield from _order_cautions(settings.layers)


def _order_cautions(layers: tuple[Layer, ...]) -> Found:
    for at, layer in enumerate(layers):
        if layer.strategy not in ASKING:
            continue
        free = [
            later.strategy
            for later in layers[at + 1 :]
            if later.strategy not in ASKING | {"rollover"}
            and (later.scope == layer.scope or "total" in {later.scope, layer.scope})
        ]
        if free:
            named = ", ".join(dict.fromkeys(free))
            yield (
                ("cascade", at, "layer"),
                f"{layer.strategy} may ask a model: {named} cost nothing and should go first",
            )
