"""Policies by name: the presets that ship as YAML files, and a file's own policies made from them.

A policy in YAML has the keys of ``ContextSettings``; ``preset`` names what the rest overrides,
``about`` says in a line what it is for. Sections (``zones``) merge key by key, lists (``cascade``,
``shapes``) replace. Policies that are set while Weir runs are made in the same way.
"""

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from policies.limits import divide, limit_for
from policies.settings import ContextSettings, Mode
from proxy.config.file import (
    MAX_DEPTH,
    ConfigError,
    Document,
    KeyPath,
    nearest,
    parse_document,
    read_document,
    typed,
)
from proxy.config.lint import cautions, faults, grave
from proxy.config.values import Config, public
from proxy.wire.raw import nests_beyond

log = logging.getLogger("weir.reload")

DEFAULT_PRESET = "balanced"
_DISABLED: Mapping[str, Mapping[str, object]] = {
    "health": {"enabled": False},
    "checkpoints": {"save_at": None},
}
"""What ``off`` means."""


def preset_directory() -> Path:
    """Where the preset files are: in the package, as a link to ``config/`` in a checkout."""
    return Path(str(files("proxy") / "defaults" / "presets"))


def preset_paths() -> list[Path]:
    return sorted(preset_directory().glob("*.yaml"))


def preset_documents() -> Mapping[str, Document]:
    """Every preset's file by name, each whole; ConfigError if one is broken or the directory holds
    no ``balanced``.
    """
    return _read_presets(stamped(preset_paths()))


def preset_policies() -> Mapping[str, ContextSettings]:
    return _made_presets(stamped(preset_paths()))


Stamps = tuple[tuple[Path, int, int, int], ...]
"""What shows that files were rewritten: for each its time, identity and size."""


def stamped(paths: Iterable[Path]) -> Stamps:
    found: list[tuple[Path, int, int, int]] = []
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((path, stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return tuple(found)


@functools.lru_cache(maxsize=4)
def _read_presets(stamps: Stamps) -> Mapping[str, Document]:
    files = {path.stem: read_document(path, env={}) for path, *_ in stamps}
    if DEFAULT_PRESET not in files:
        raise ConfigError(
            f"{preset_directory()}: no preset {DEFAULT_PRESET}; the installation is not complete"
        )
    return MappingProxyType({name: _whole(name, files) for name in files})


def _whole(name: str, files: Mapping[str, Document]) -> Document:
    """A preset's file with what it is made from below it."""
    document = files[name]
    base = document.data.get("preset")
    rest = {each: file for each, file in files.items() if each != name}
    if base is not None and base not in rest:
        raise ConfigError(
            document.problem(("preset",), f"there is no preset {base} that this could be made from")
        )
    return _over(_whole(str(base), rest) if base is not None else Document(name=""), document)


@functools.lru_cache(maxsize=4)
def _made_presets(stamps: Stamps) -> Mapping[str, ContextSettings]:
    documents = _read_presets(stamps)
    return MappingProxyType(
        {name: policy_from(name, Document(name=""), presets=documents) for name in documents}
    )


def _over(base: Document, own: Document, at: KeyPath = ()) -> Document:
    """A policy over what it is made from; ``at`` is its path in its file."""
    places = {(*at, *path): place for path, place in base.places.items() if path[0] not in own.data}
    data = _merged(base.data, _settled(own.data))
    return Document(name=own.name, data=data, places={**places, **own.places})


def about(document: Document) -> str:
    return " ".join(str(document.data.get("about") or "").split())


def policy_from(
    name: str, own: Document, *, presets: Mapping[str, Document], at: KeyPath = ()
) -> ContextSettings:
    """The policy ``name``: its preset (its namesake, else ``balanced``) with ``own`` over it;
    ConfigError.

    ``at`` is where ``own`` is in the file, for messages.
    """
    whole = _over(_base(name, own, presets, at), own, at)
    data = {key: value for key, value in whole.data.items() if key != "about"}
    made = typed(ContextSettings, dataclasses.replace(whole, data=data), at=at)
    settings = dataclasses.replace(made, name=name)
    if problems := [whole.problem((*at, *path), text) for path, text in faults(settings)]:
        raise ConfigError(*problems)
    return settings


def policy_cautions(
    settings: ContextSettings, own: Document, *, at: KeyPath = ()
) -> tuple[str, ...]:
    whole = _over(_base(settings.name, own, preset_documents(), at), own, at)
    return tuple(whole.problem((*at, *path), text) for path, text in cautions(settings))


def _base(name: str, own: Document, presets: Mapping[str, Document], at: KeyPath) -> Document:
    preset = own.data.get("preset")
    if preset is None:
        preset = name if name in presets else DEFAULT_PRESET
    if preset not in presets:
        raise ConfigError(
            own.problem(
                (*at, "preset"), f"no preset {preset}{nearest(str(preset), sorted(presets))}"
            )
        )
    return presets[str(preset)]


def policy_warnings(settings: ContextSettings) -> tuple[str, ...]:
    return tuple(text for _, text in grave(settings))


def policy_values(settings: ContextSettings) -> dict[str, object]:
    """The policy as plain data, with the keys of the YAML file."""
    return public(settings)


def policy_section(settings: ContextSettings, purpose: str = "") -> dict[str, object]:
    """The policy as ``policies:`` of a YAML file, which loads to the same settings whatever its
    name.
    """
    values = policy_values(settings)
    del values["name"]
    about_it = {"about": purpose} if purpose else {}
    return {"policies": {settings.name: {**about_it, "preset": DEFAULT_PRESET, **values}}}


def _settled(data: Mapping[str, object]) -> dict[str, object]:
    """The data with ``summarizer: {model: M}`` as ``summarizer: M``, and subsystems that are
    ``off``.
    """
    settled = {key: value for key, value in data.items() if key != "preset"}
    summarizer = settled.get("summarizer")
    if isinstance(summarizer, Mapping) and set(summarizer) == {"model"}:
        settled["summarizer"] = summarizer["model"]
    for name, disabled in _DISABLED.items():
        if name in settled and settled[name] in (None, False, "off"):
            settled[name] = disabled
    return settled


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    merged = {**base, **over}
    for key in base.keys() & over.keys():
        held = base[key]
        value = over[key]
        if isinstance(held, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(held, value)
    return merged


def uses_shapes(settings: ContextSettings) -> bool:
    if settings.mode is Mode.OFF or not settings.manages:
        return False
    summarizes = settings.enforce == "bucket" and any(
        bucket.cap is not None and bucket.on_overflow == "summarize"
        for bucket in settings.buckets.values()
    )
    return summarizes or any(
        layer.strategy == "compact" or (layer.scope == "total" and layer.at is None)
        for layer in settings.layers
    )


def policy_amounts(settings: ContextSettings, window: int) -> dict[str, object]:
    """The policy's shares as tokens in a window: tokens reserved, usable, by bucket, and where each
    layer acts.

    ``trigger`` is the most that a request may have before any layer about the whole of it is due; a
    layer is due from ``acts_at`` tokens in its scope on, 0 for one that always is. Both are
    estimates less the policy's margin.
    """
    budget = divide(settings, window=window)
    total = [layer for layer in settings.layers if layer.scope == "total" and layer.at != 0]
    working = {"working": budget.reserve} if "working" in settings.buckets else {}
    caps = {**budget.caps, **working}
    return {
        "window": window,
        "reserve": budget.reserve,
        "headroom": budget.headroom,
        "usable": budget.usable,
        "trigger": min(
            [budget.soft_limit, *(limit_for(layer, settings, budget) for layer in total)]
        ),
        **({"caps": caps} if caps else {}),
        "cascade": [
            {
                "layer": layer.strategy,
                "scope": layer.scope,
                "acts_at": limit_for(layer, settings, budget) + 1,
            }
            for layer in settings.layers
        ],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class SetPolicy:
    """A policy that was set while Weir ran: the text as it was given, when, and what it says.

    ``body`` is None for one that cannot be read, and for one that was removed again.
    """

    name: str
    text: str
    at: float
    body: Mapping[str, object] | None


def read_policy(name: str, text: str) -> Mapping[str, object]:
    """The keys of a policy written as JSON or YAML; ConfigError. Variables of the environment are
    not read.
    """
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ConfigError(f"{name}: should be a mapping of keys to values")
        if not nests_beyond(text.encode(), MAX_DEPTH):
            return data
    return parse_document(text, name=name, env={}).data


def policies_in(document: Document) -> dict[str, Document]:
    """The entries under ``policies`` of a file, each as a document of its own; empty where it is no
    mapping.
    """
    given = document.data.get("policies")
    bodies = given.items() if isinstance(given, Mapping) else ()
    return {
        n: dataclasses.replace(document, data=b if isinstance(b, Mapping) else {})
        for n, b in bodies
    }


def with_policy(config: Config, name: str, body: Mapping[str, object]) -> Config:
    """The configuration with one policy made anew from ``body`` (the keys of the file's
    ``policies``); ConfigError.
    """
    document = Document(name="", data=body)
    made = policy_from(name, document, presets=preset_documents(), at=("policies", name))
    return dataclasses.replace(config, policies={**config.policies, name: made})


def with_set_policies(config: Config, policies: Iterable[SetPolicy]) -> Config:
    for policy in policies:
        if policy.body is None:
            continue
        try:
            config = with_policy(config, policy.name, policy.body)
        except ConfigError as error:
            log.error("the policy %s that was set over HTTP is not used: %s", policy.name, error)
    return config
