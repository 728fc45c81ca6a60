"""How much a block is worth keeping: scorers by name, with their parameters.

==============  ============================================================================================
``fifo``        exp(-age / ``decay``): for linear chat, too blunt for agents
``lru``         2^(-idle / ``half_life``): what nobody has referred to for longest goes first
``priority``    five signals weighed against one another (``weight_<signal>``, all five or none; ``source_<type>``)
``type_based``  1 - age / time to live (``ttl_<type>``, ``ttl_other``), 0 from then on
``hybrid``      everything that is known, by one of three sets of ``weights`` or ``weight_<signal>``; ``decay``,
                ``half_life``, ``source_<type>``, ``ttl_<type>`` for the scorers behind it
``largest``     1 / (1 + age times tokens): the oldest and largest first, whatever else is known
==============  ============================================================================================

Times are in steps. Every one also takes ``band``, the difference within which two scores count as equal.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from policies.messages import PolicyError
from policies.scoring.blocks import Block, ContentType, decided, unit

Params = Mapping[str, object]
"""Values of parameters as a policy states them: numbers, strings, booleans."""

BAND = 0.02
"""Default width within which scores count as equal (ours)."""
DEFAULT_SCORER = "hybrid"
FIFO_DECAY, HALF_LIFE, RECENCY_DECAY = 10.0, 5.0, 15.0
REUSE_FULL = 5
NEUTRAL = OTHER_SOURCE = 0.5
UNRELATED = 0.1
OTHER_TTL = 50.0
TTL: Mapping[ContentType, float] = MappingProxyType(
    {
        ContentType.TOOL_RESULT: 8.0,
        ContentType.THINKING: 2.0,
        ContentType.MEMORY: 20.0,
        ContentType.ASSISTANT: 30.0,
    }
)
SOURCES: Mapping[ContentType, float] = MappingProxyType(
    {
        ContentType.USER: 1.0,
        ContentType.SYSTEM: 1.0,
        ContentType.TOOLS: 0.9,
        ContentType.MEMORY: 0.7,
        ContentType.ASSISTANT: 0.5,
        ContentType.TOOL_RESULT: 0.3,
    }
)
PRIORITY_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"recency": 0.30, "semantic": 0.25, "source": 0.20, "reuse": 0.15, "explicit": 0.10}
)
SIGNALS = ("recency", "lru", "priority", "type_ttl", "reference_freq", "semantic_duplication")
_YAML, _CODE, _EQUAL = (0.30, 0.0, 0.25, 0.20, 0.15, 0.10), (0.15, 0.15, 0.40, 0.30, 0.0, 0.0), (0.2, 0.0, *[0.2] * 4)
HYBRID_WEIGHTS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        name: MappingProxyType({signal: weight for signal, weight in zip(SIGNALS, weights, strict=True) if weight})
        for name, weights in {"article-yaml": _YAML, "article-code": _CODE, "equal": _EQUAL}.items()
    }
)
DEFAULT_WEIGHTS = "article-yaml"


class Scorer(Protocol):
    """How much a block is worth keeping. Implementations are frozen values and never raise."""

    @property
    def name(self) -> str:
        """What policies call it."""
        ...

    @property
    def band(self) -> float:
        """Scores that differ by no more than this say the same; for :func:`policies.scoring.select`."""
        ...

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1: 1 keep, 0 evict first."""
        ...


@dataclass(frozen=True, slots=True)
class Formula:
    """A scorer that lets marks and supersession decide first."""

    name: str
    band: float
    formula: Callable[[Block], float]

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1."""
        fixed = decided(block)
        return self.formula(block) if fixed is None else fixed


def scorer(name: str, params: Params = MappingProxyType({})) -> Scorer:
    """The scorer of that name; PolicyError for an unknown name, parameter or value, with the nearest known name."""
    known = parameters(name)
    for key in params:
        if key not in known:
            raise PolicyError(f"{name}: no parameter {key}{_nearest(key, known)}")
    if name == "largest":
        return Largest(_number(name, params, "band", 0.0))
    formula = _FORMULAS[name](_Stated(name, params))
    return Formula(name, _number(name, params, "band", BAND), formula)


def parameters(name: str) -> tuple[str, ...]:
    """The parameters that the scorer of that name takes; PolicyError for an unknown name."""
    if name not in _PARAMETERS:
        raise PolicyError(f"no scorer {name}{_nearest(name, SCORERS)}")
    return (*_PARAMETERS[name], "band")


@dataclass(frozen=True, slots=True)
class Largest:
    """Age counts messages (``behind``) where they are known, else steps. Scores only rank: none are equal in a band."""

    band: float = 0.0
    name: str = "largest"

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1."""
        age = block.age + 1 if block.behind is None else block.behind
        return 1.0 / (1.0 + max(0, age) * max(0, block.tokens))


@dataclass(frozen=True, slots=True)
class _Stated:
    """What a policy states for one scorer."""

    name: str
    params: Params = field(default_factory=dict)

    def steps(self, key: str, default: float) -> float:
        value = _number(self.name, self.params, key, default)
        if not value > 0:
            raise PolicyError(f"{self.name}: {key} must be above 0 steps, not {value}")
        return value

    def by_type(self, prefix: str, default: Mapping[ContentType, float]) -> Mapping[ContentType, float]:
        given = {t: _number(self.name, self.params, prefix + t, 0.0) for t in ContentType if prefix + t in self.params}
        return {**default, **given}

    def weights(self, signals: Iterable[str], default: Mapping[str, float]) -> Mapping[str, float]:
        keys = {signal: f"weight_{signal}" for signal in signals}
        given = {s: _number(self.name, self.params, key, 0.0) for s, key in keys.items() if key in self.params}
        for signal, weight in given.items():
            if not weight <= 1.0:
                raise PolicyError(f"{self.name}: the weight of {signal} must be within 0 to 1, not {weight}")
        total = math.fsum((given or default).values())
        if abs(total - 1.0) > 1e-6:
            raise PolicyError(f"{self.name}: the weights must sum to 1, not {total:.6g}")
        return given or default

    def part(self, name: str) -> Callable[[Block], float]:
        """The formula of a scorer behind this one, with its parameters among these."""
        own = {key: value for key, value in self.params.items() if key in _PARAMETERS[name] and key[:7] != "weight_"}
        return Formula(name, BAND, _FORMULAS[name](_Stated(name, own))).score


def _fifo(stated: _Stated) -> Callable[[Block], float]:
    decay = stated.steps("decay", FIFO_DECAY)
    return lambda block: math.exp(-block.age / decay)


def _lru(stated: _Stated) -> Callable[[Block], float]:
    half_life = stated.steps("half_life", HALF_LIFE)  # what was never referred to is as idle as it is old
    return lambda block: float(2.0 ** (-(block.idle if block.references > 0 else block.age) / half_life))


def _type_based(stated: _Stated) -> Callable[[Block], float]:
    ttl, other = stated.by_type("ttl_", TTL), _number(stated.name, stated.params, "ttl_other", OTHER_TTL)
    for kind, steps in (*ttl.items(), ("other", other)):
        if not steps > 0:
            raise PolicyError(f"type_based: the time to live of {kind} must be above 0 steps, not {steps}")
    return lambda block: unit(1.0 - block.age / ttl.get(block.kind, other))


def _priority(stated: _Stated) -> Callable[[Block], float]:
    """Recency exp(-age / 15), relevance, source, reuse, and what was said outright (.5 without it; ours)."""
    weights, sources = stated.weights(PRIORITY_WEIGHTS, PRIORITY_WEIGHTS), stated.by_type("source_", SOURCES)
    for kind, source in sources.items():
        if not 0.0 <= source <= 1.0:
            raise PolicyError(f"priority: the source score of {kind} must be within 0 to 1, not {source}")

    def value(block: Block) -> float:
        signals = {
            "recency": math.exp(-block.age / RECENCY_DECAY),
            "semantic": NEUTRAL if block.semantic is None else unit(block.semantic),
            "source": sources.get(block.kind, OTHER_SOURCE),
            "reuse": _reuse(block),
            "explicit": 1.0 if block.important else NEUTRAL,
        }
        return unit(math.fsum(weight * signals[signal] for signal, weight in weights.items()))

    return value


def _hybrid(stated: _Stated) -> Callable[[Block], float]:
    """The weighted sum of :data:`SIGNALS`, each 0 to 1.

    Recency weighs much in all sets of weights, so that a result which is new and worthless would outlive an old
    finding. One of no known use (:func:`_is_of_no_use`) therefore scores 0 (ours).
    """
    named = stated.params.get("weights", DEFAULT_WEIGHTS)
    if not isinstance(named, str) or named not in HYBRID_WEIGHTS:
        raise PolicyError(f"hybrid: no weights {named}{_nearest(str(named), HYBRID_WEIGHTS)}")
    weights = stated.weights(SIGNALS, HYBRID_WEIGHTS[named])
    signals: Mapping[str, Callable[[Block], float]] = {
        "recency": stated.part("fifo"),
        "lru": stated.part("lru"),
        "priority": stated.part("priority"),
        "type_ttl": stated.part("type_based"),
        "reference_freq": _reuse,
        "semantic_duplication": lambda block: 1.0 - unit(block.duplicate),
    }

    def value(block: Block) -> float:
        if _is_of_no_use(block):
            return 0.0
        return unit(math.fsum(weight * signals[signal](block) for signal, weight in weights.items()))

    return value


def _reuse(block: Block) -> float:
    """How often a block was referred to, 0 to 1; full from 5 references on."""
    return min(max(0, block.references) / REUSE_FULL, 1.0)


def _is_of_no_use(block: Block) -> bool:
    """Whether it is a result that is unused after a step, and known to be unrelated to the newest user message."""
    return (
        block.kind is ContentType.TOOL_RESULT
        and not block.important
        and block.references == 0
        and block.age >= 1
        and block.semantic is not None
        and block.semantic <= UNRELATED
    )


def _number(scorer_name: str, params: Params, key: str, default: float) -> float:
    value = params.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise PolicyError(f"{scorer_name}: {key} must be a number from 0 on, not {value!r}")
    return float(value)


def _nearest(word: str, known: Iterable[str]) -> str:
    names = tuple(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


_FORMULAS: Mapping[str, Callable[[_Stated], Callable[[Block], float]]] = MappingProxyType(
    {"fifo": _fifo, "lru": _lru, "priority": _priority, "type_based": _type_based, "hybrid": _hybrid}
)
SCORERS: tuple[str, ...] = (*_FORMULAS, "largest")
_TTLS, _SOURCES = (*(f"ttl_{t}" for t in ContentType), "ttl_other"), tuple(f"source_{t}" for t in ContentType)
_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fifo": ("decay",),
        "lru": ("half_life",),
        "priority": (*(f"weight_{s}" for s in PRIORITY_WEIGHTS), *_SOURCES),
        "type_based": _TTLS,
        "hybrid": ("weights", *(f"weight_{s}" for s in SIGNALS), "decay", "half_life", *_SOURCES, *_TTLS),
        "largest": (),
    }
)
