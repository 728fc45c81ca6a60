"""What a cascade may name: every layer, and what each of its parameters may be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from policies import STRATEGIES, scoring
from policies.scoring import HYBRID_WEIGHTS
from proxy.config.file import nearest

ASKING = frozenset(name for name, strategy in STRATEGIES.items() if strategy.asks_model)
"""Layers that may ask a model; all others cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What one parameter may be; ``least`` and ``most`` bound a number, ``words`` are the only words allowed."""

    kind: Literal["whole", "number", "flag", "word", "words"]
    least: float = 0
    most: float = math.inf
    words: tuple[str, ...] = ()

    def fault(self, value: object) -> str | None:
        """What is wrong with the value, None if nothing is."""
        if self.kind == "flag":
            return None if isinstance(value, bool) else "should be true or false"
        if self.kind in {"whole", "number"}:
            return self._fault_of_number(value)
        given = value if isinstance(value, tuple) and self.kind == "words" else (value,)
        for word in given:
            if not isinstance(word, str) or not word:
                return "should be text"
            if self.words and word not in self.words:
                return f"no {word}{nearest(word, self.words)}"
        return None

    def _fault_of_number(self, value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return "should be a number"
        if self.kind == "whole" and value != int(value):
            return "should be a whole number"
        if self.least <= value <= self.most:
            return None
        upper = "on" if self.most == math.inf else f"to {self.most:g}"
        return f"should be from {self.least:g} {upper}"


Parameters = Mapping[str, Parameter]

SCORERS: Mapping[str, Parameters] = MappingProxyType(
    {
        name: {
            key: Parameter(kind="word", words=tuple(HYBRID_WEIGHTS)) if key == "weights" else Parameter(kind="number")
            for key in scoring.parameters(name)
        }
        for name in scoring.SCORERS
    }
)
"""Ways to say what of a conversation is worth least, and the parameters of each."""

LAYERS: Mapping[str, Parameters] = MappingProxyType(
    {
        name: {key: Parameter(**values) for key, values in strategy.parameters().items()}
        for name, strategy in STRATEGIES.items()
    }
)
"""Every layer by its name, cheapest first, with its parameters."""


def parameters_of(layer: str, given: Mapping[str, object]) -> Parameters:
    """The parameters that a layer takes; those of the scorer that ``given`` names are among them."""
    scorer = given.get("scorer")
    own = LAYERS[layer]
    return {**own, **SCORERS[str(scorer)]} if "scorer" in own and scorer in SCORERS else own
