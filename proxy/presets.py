"""Policies by name: the presets that ship as YAML files, and a file's own policies made from them.

A policy in YAML has the keys of ``ContextSettings``, except that ``layers`` are called ``cascade`` and a
layer's ``strategy`` is its ``layer``; ``preset`` names what the rest overrides. Sections (``zones``) merge key
by key, lists (``cascade``, ``shapes``) replace.
"""

import dataclasses
import functools
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from policies.settings import ContextSettings, Layer, Shape
from proxy.config_file import ConfigError, Document, KeyPath, nearest, read_document, typed

DEFAULT_PRESET = "balanced"

LAYERS = ("ingest_cap", "dedupe", "evict", "compact")
"""Strategies that a cascade may name, cheapest first."""

_WITHOUT_EFFECT = ("at", "scope", "params")
_NAMES: Mapping[str, str] = MappingProxyType({"layers": "cascade", "strategy": "layer"})

LEGACY: Mapping[str, str] = MappingProxyType(
    {
        # names of a zone's end, which is the next zone's start
        "green_threshold": "zones.yellow_at",
        "yellow_threshold": "zones.orange_at",
        "orange_threshold": "zones.red_at",
        "red_threshold": "zones.critical_at",
        # names of a zone's start
        "yellow": "yellow_at",
        "orange": "orange_at",
        "red": "red_at",
        "critical": "critical_at",
        "pressure": "zones",
        # other tools' names of the same things
        "max_context_tokens": "window",
        "context_window": "window",
        "model_context_limit": "window",
        "total_window": "window",
        "max_input_tokens": "window",
        "output_reserved": "reserve",
        "output_token_max": "reserve",
        "working": "reserve",
        "headroom_tokens": "headroom",
        "max_token_ratio": "cascade[].at",
        "auto_compact_threshold": "cascade[].at",
        "at_pct": "cascade[].at",
        "trigger_at": "cascade[].at",
        "layers": "cascade",
        "strategy": "layer",
        "max_tool_output": "ingest_cap",
    }
)
"""Names that other tools and older descriptions use, and what to write here."""


def preset_directory() -> Path:
    """Where the preset files are: beside the code in a checkout, else where an installation put them."""
    checkout = Path(__file__).resolve().parent.parent / "config" / "presets"
    if checkout.is_dir():
        return checkout
    return Path(sysconfig.get_path("data")) / "share" / "weir" / "presets"


@functools.cache
def preset_documents() -> Mapping[str, Document]:
    """Every preset's file by name; ConfigError if the directory is missing or holds no ``balanced``."""
    directory = preset_directory()
    found = {path.stem: read_document(path, env={}) for path in sorted(directory.glob("*.yaml"))}
    if DEFAULT_PRESET not in found:
        raise ConfigError(f"{directory}: no preset {DEFAULT_PRESET}; the installation is not complete")
    return MappingProxyType(found)


def policy_from(name: str, own: Document, *, presets: Mapping[str, Document], at: KeyPath = ()) -> ContextSettings:
    """The policy ``name``: its preset (its namesake, else ``balanced``) with ``own`` over it; ConfigError.

    ``at`` is where ``own`` stands in the file, for messages.
    """
    preset = own.data.get("preset")
    if preset is None:
        preset = name if name in presets else DEFAULT_PRESET
    if preset not in presets:
        raise ConfigError(own.problem((*at, "preset"), f"no preset {preset}{nearest(str(preset), sorted(presets))}"))
    if "name" in own.data:
        raise ConfigError(own.problem((*at, "name"), "unknown key: a policy's name is the key it stands under"))
    base = presets[str(preset)]
    overrides = dataclasses.replace(own, data=_settled(own.data))
    typed(ContextSettings, _named(overrides, name), at=at, names=_NAMES, legacy=LEGACY)
    merged = dataclasses.replace(own, data=_merged(_settled(base.data), overrides.data))
    settings = typed(ContextSettings, _named(merged, name), at=at, names=_NAMES, legacy=LEGACY)
    if faults := [own.problem((*at, *path), text) for path, text in _faults(settings)]:
        raise ConfigError(*faults)
    return settings


def policy_warnings(settings: ContextSettings) -> tuple[str, ...]:
    """What is allowed but probably not meant."""
    found = []
    if settings.headroom < 0.05:
        found.append(f"headroom {settings.headroom:.1%} < 5%: an estimate that is off by more overflows")
    for at, layer in enumerate(settings.layers):
        unset = Layer(strategy=layer.strategy)
        idle = [name for name in _WITHOUT_EFFECT if getattr(layer, name) != getattr(unset, name)]
        found.extend(f"cascade[{at}].{name} has no effect in this version" for name in idle)
    return tuple(found)


def policy_values(settings: ContextSettings) -> dict[str, object]:
    """The policy as plain data in the words of the YAML file, every default included."""
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    del values["layers"]
    return {
        **values,
        "mode": str(settings.mode),
        "zones": dataclasses.asdict(settings.zones),
        "trend": dataclasses.asdict(settings.trend),
        "buckets": {name: dataclasses.asdict(bucket) for name, bucket in settings.buckets.items()},
        "ingest": dataclasses.asdict(settings.ingest),
        "memory": dataclasses.asdict(settings.memory),
        "shapes": [dataclasses.asdict(shape) for shape in settings.shapes],
        "cascade": [_layer_values(layer) for layer in settings.layers],
    }


def _layer_values(layer: Layer) -> dict[str, object]:
    values = dataclasses.asdict(layer)
    return {"layer": values.pop("strategy"), **values, "params": dict(layer.params)}


def _named(document: Document, name: str) -> Document:
    return dataclasses.replace(document, data={**document.data, "name": name})


def _settled(data: Mapping[str, object]) -> dict[str, object]:
    """The data without ``preset``, and ``summarizer: {model: M}`` as ``summarizer: M``."""
    settled = {key: value for key, value in data.items() if key != "preset"}
    summarizer = settled.get("summarizer")
    if isinstance(summarizer, Mapping) and set(summarizer) == {"model"}:
        settled["summarizer"] = summarizer["model"]
    return settled


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    merged = dict(base)
    for key, value in over.items():
        held = merged.get(key)
        if isinstance(held, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(held, value)
        else:
            merged[key] = value
    return merged


def _faults(settings: ContextSettings) -> Iterator[tuple[KeyPath, str]]:
    """Values that are of the right type and still make no policy."""
    for name in ("margin",):
        if not 0 <= getattr(settings, name) < 1:
            yield (name,), "should be a share from 0 to under 1"
    for name in ("reserve", "reserve_floor", "note_min", "note_max", "placeholder_tokens"):
        if getattr(settings, name) < 0:
            yield (name,), "should not be negative"
    for name in ("window",):
        if (value := getattr(settings, name)) is not None and value <= 0:
            yield (name,), "should be above 0"
    zones = settings.zones
    starts = (zones.yellow_at, zones.orange_at, zones.red_at, zones.critical_at)
    if not (starts[0] > 0 and list(starts) == sorted(starts)):
        yield ("zones",), "each zone should start no lower than the one before: yellow, orange, red, critical"
    yield from _shape_faults(settings.shapes)
    for at, layer in enumerate(settings.layers):
        if layer.strategy not in LAYERS:
            yield ("cascade", at, "layer"), f"no layer {layer.strategy}{nearest(layer.strategy, LAYERS)}"
        for name in ("at", "stop_at", "must_reach"):
            if (share := getattr(layer, name)) is not None and not 0 <= share <= 1:
                yield ("cascade", at, name), "should be a share from 0 to 1"


def _shape_faults(shapes: tuple[Shape, ...]) -> Iterator[tuple[KeyPath, str]]:
    if not shapes or shapes[-1].window is not None:
        yield ("shapes",), "the last one should have window: null, for every larger window"
    windows = [shape.window for shape in shapes[:-1]]
    known = [window for window in windows if window is not None]
    if len(known) < len(windows) or known != sorted(set(known)):
        yield ("shapes",), "windows should rise from one to the next"
    for at, shape in enumerate(shapes):
        for name in ("trigger", "low_water", "extract", "tail", "note"):
            if not 0 <= getattr(shape, name) <= 1:
                yield ("shapes", at, name), "should be a share from 0 to 1"
