"""How much a block is worth keeping: scorers by name, with their parameters.

==============  ============================================================================================
``fifo``        ``decay`` steps (10)
``lru``         ``half_life`` steps (5)
``priority``    ``weight_<signal>`` (all five or none), ``source_<type>``
``type_based``  ``ttl_<type>`` and ``ttl_other`` steps
``hybrid``      ``weights``: article-yaml, article-code or equal; or ``weight_<signal>``; ``decay``, ``half_life``,
                ``source_<type>``, ``ttl_<type>`` for the scorers behind it
``largest``     none
==============  ============================================================================================

Every one also takes ``band``, the difference within which two scores count as equal.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from policies.errors import PolicyError
from policies.scoring.blocks import BAND, Block, ContentType, Scorer, step_numbers
from policies.scoring.fifo import FIFO_DECAY, Fifo, Largest
from policies.scoring.hybrid import DEFAULT_WEIGHTS, HYBRID_WEIGHTS, SIGNALS, Hybrid
from policies.scoring.lru import HALF_LIFE, Lru
from policies.scoring.priority import PRIORITY_WEIGHTS, SOURCES, Priority
from policies.scoring.type_based import OTHER_TTL, TTL, TypeBased

Params = Mapping[str, object]
"""Values of parameters as a policy states them: numbers, strings, booleans."""

DEFAULT_SCORER = "hybrid"
_NONE: Params = MappingProxyType({})


def scorer(name: str, params: Params = _NONE) -> Scorer:
    """The scorer of that name; PolicyError for an unknown name, parameter or value, with the nearest known name."""
    build = _BUILD.get(name)
    if build is None:
        raise PolicyError(f"no scorer {name}{_nearest(name, SCORERS)}")
    known = parameters(name)
    for key in params:
        if key not in known:
            raise PolicyError(f"{name}: no parameter {key}{_nearest(key, known)}")
    return build(params)


def parameters(name: str) -> tuple[str, ...]:
    """The parameters that the scorer of that name takes; PolicyError for an unknown name."""
    if name not in _PARAMETERS:
        raise PolicyError(f"no scorer {name}{_nearest(name, SCORERS)}")
    return (*_PARAMETERS[name], "band")


def _fifo(params: Params) -> Fifo:
    return Fifo(decay=_number("fifo", params, "decay", FIFO_DECAY), band=_band("fifo", params))


def _lru(params: Params) -> Lru:
    return Lru(half_life=_number("lru", params, "half_life", HALF_LIFE), band=_band("lru", params))


def _priority(params: Params) -> Priority:
    return Priority(
        weights=_weights("priority", params, PRIORITY_WEIGHTS, default=PRIORITY_WEIGHTS),
        sources=_by_type("priority", params, "source_", SOURCES),
        band=_band("priority", params),
    )


def _type_based(params: Params) -> TypeBased:
    return TypeBased(
        ttl=_by_type("type_based", params, "ttl_", TTL),
        other=_number("type_based", params, "ttl_other", OTHER_TTL),
        band=_band("type_based", params),
    )


def _hybrid(params: Params) -> Hybrid:
    name = params.get("weights", DEFAULT_WEIGHTS)
    if not isinstance(name, str) or name not in HYBRID_WEIGHTS:
        raise PolicyError(f"hybrid: no weights {name}{_nearest(str(name), HYBRID_WEIGHTS)}")
    inner = {k: v for k, v in params.items() if k.startswith(("source_", "ttl_", "decay", "half_life"))}
    return Hybrid(
        weights=_weights("hybrid", params, SIGNALS, default=HYBRID_WEIGHTS[name]),
        fifo=_fifo(inner),
        lru=_lru(inner),
        priority=_priority(inner),
        type_based=_type_based(inner),
        band=_band("hybrid", params),
    )


def _largest(params: Params) -> Largest:
    return Largest(band=_number("largest", params, "band", 0.0))


def _weights(
    scorer_name: str, params: Params, signals: Iterable[str], *, default: Mapping[str, float]
) -> Mapping[str, float]:
    stated = {s: _number(scorer_name, params, f"weight_{s}", 0.0) for s in signals if f"weight_{s}" in params}
    return stated or default


def _by_type(
    scorer_name: str, params: Params, prefix: str, default: Mapping[ContentType, float]
) -> Mapping[ContentType, float]:
    stated = {t: _number(scorer_name, params, prefix + t, 0.0) for t in ContentType if prefix + t in params}
    return MappingProxyType({**default, **stated}) if stated else default


def _band(scorer_name: str, params: Params) -> float:
    return _number(scorer_name, params, "band", BAND)


def _number(scorer_name: str, params: Params, key: str, default: float) -> float:
    value = params.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise PolicyError(f"{scorer_name}: {key} must be a number from 0 on, not {value!r}")
    return float(value)


def _nearest(word: str, known: Iterable[str]) -> str:
    names = tuple(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


_BUILD: Mapping[str, Callable[[Params], Scorer]] = MappingProxyType(
    {
        "fifo": _fifo,
        "lru": _lru,
        "priority": _priority,
        "type_based": _type_based,
        "hybrid": _hybrid,
        "largest": _largest,
    }
)
SCORERS: tuple[str, ...] = tuple(_BUILD)
_TTL_NAMES = (*(f"ttl_{t}" for t in ContentType), "ttl_other")
_SOURCE_NAMES = tuple(f"source_{t}" for t in ContentType)
_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fifo": ("decay",),
        "lru": ("half_life",),
        "priority": (*(f"weight_{s}" for s in PRIORITY_WEIGHTS), *_SOURCE_NAMES),
        "type_based": _TTL_NAMES,
        "hybrid": (
            "weights",
            *(f"weight_{s}" for s in SIGNALS),
            "decay",
            "half_life",
            *_SOURCE_NAMES,
            *_TTL_NAMES,
        ),
        "largest": (),
    }
)

__all__ = [
    "DEFAULT_SCORER",
    "SCORERS",
    "Block",
    "ContentType",
    "Params",
    "Scorer",
    "parameters",
    "scorer",
    "step_numbers",
]
