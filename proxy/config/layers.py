"""What a cascade may name: every layer, and what each of its parameters may be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from policies.settings import PROMPTS
from proxy.config.file import nearest

ASKING = frozenset({"compact", "summarize_tool_result", "progressive", "delegate"})
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

_COUNT = Parameter(kind="whole")
_ONE_OR_MORE = Parameter(kind="whole", least=1)
_NUMBER = Parameter(kind="number")
_SHARE = Parameter(kind="number", most=1)
_TYPES = ("system", "tools", "user", "assistant", "tool_result", "thinking", "memory")
_TTLS: Parameters = {f"ttl_{name}": _NUMBER for name in (*_TYPES, "other")}
_SOURCES: Parameters = {f"source_{name}": _NUMBER for name in _TYPES}
_BAND: Parameters = {"band": _NUMBER}


def _weights(*signals: str) -> Parameters:
    return {f"weight_{signal}": _NUMBER for signal in signals}


SCORERS: Mapping[str, Parameters] = MappingProxyType(
    {
        "largest": _BAND,
        "fifo": {"decay": _NUMBER, **_BAND},
        "lru": {"half_life": _NUMBER, **_BAND},
        "priority": {**_weights("recency", "semantic", "source", "reuse", "explicit"), **_SOURCES, **_BAND},
        "type_based": {**_TTLS, **_BAND},
        "hybrid": {
            "weights": Parameter(kind="word", words=("article-yaml", "article-code", "equal")),
            **_weights("recency", "lru", "priority", "type_ttl", "reference_freq", "semantic_duplication"),
            "decay": _NUMBER,
            "half_life": _NUMBER,
            **_SOURCES,
            **_TTLS,
            **_BAND,
        },
    }
)
"""Ways to say what of a conversation is worth least, and the parameters of each."""

LAYERS: Mapping[str, Parameters] = MappingProxyType(
    {
        "ingest_cap": {},
        "dedupe": {},
        "evict": {
            "scorer": Parameter(kind="word", words=tuple(SCORERS)),
            "types": Parameter(kind="words", words=("tool_result", "memory", "user")),
            "protect_steps": _COUNT,
        },
        "prune": {
            "protect": _COUNT,
            "minimum": _COUNT,
            "skip_turns": _COUNT,
            "straddle": Parameter(kind="word", words=("keep", "clear")),
        },
        "prune_tools": {"steps": _COUNT, "top_k": _COUNT},
        "reasoning": {"ttl": _COUNT},
        "media": {"keep": _COUNT},
        "truncate_largest": {"floor": _ONE_OR_MORE, "truncate_after_summary": Parameter(kind="flag")},
        "semantic_merge": {"threshold": _SHARE},
        "window": {"messages": _ONE_OR_MORE, "turns": _ONE_OR_MORE, "note": Parameter(kind="flag")},
        "drop_oldest": {
            "fraction": _SHARE,
            "recent": _COUNT,
            "keep_system": Parameter(kind="flag"),
        },
        "custom": {"path": Parameter(kind="word"), "seconds": _NUMBER},
        "summarize_tool_result": {"over": _COUNT, "ratio": _SHARE, "keep_newest": _COUNT},
        "progressive": {"l1_until": _COUNT, "l2_until": _COUNT},
        "compact": {
            "keep_messages": _COUNT,
            "keep_turns": _COUNT,
            "evict_pct": Parameter(kind="number", most=100),
            "prompt": Parameter(kind="word", words=PROMPTS),
            "prepared": Parameter(kind="flag"),
        },
        "delegate": {"least": _NUMBER, "max_tokens": _ONE_OR_MORE},
        "rollover": {},
    }
)
"""Every layer by its name, cheapest first, with its parameters."""


def parameters_of(layer: str, given: Mapping[str, object]) -> Parameters:
    """The parameters that a layer takes; those of the scorer that ``given`` names are among them."""
    scorer = given.get("scorer")
    own = LAYERS[layer]
    return {**own, **SCORERS[str(scorer)]} if "scorer" in own and scorer in SCORERS else own
