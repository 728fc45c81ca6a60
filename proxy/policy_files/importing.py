"""Other tools' settings as a policy of Weir's: what each of their keys is called here, and what has no counterpart.

Two sets of keys are read. One divides the window into shares and has sections (``pressure``, ``eviction``,
``compression``, ``budget``, ``cross_window``, ``health``); the other is flat (``model_context_limit``,
``prune_protect``). Each becomes its preset with what differs written over it. A key of neither is an error.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from proxy.config_file import ConfigError, Document, KeyPath, dotted
from proxy.policy_files.presets import preset_documents

BY_SHARES, BY_PRUNING = "article-128k", "baseagent-200k"

_SET: Mapping[str, KeyPath] = MappingProxyType(
    {
        "max_context_tokens": ("window",),
        "model_context_limit": ("window",),
        "output_token_max": ("reserve",),
        "max_output_tokens": ("ingest", "cap"),
        # zones called by where they start
        "pressure.yellow": ("zones", "yellow_at"),
        "pressure.orange": ("zones", "orange_at"),
        "pressure.red": ("zones", "red_at"),
        "pressure.critical": ("zones", "critical_at"),
        # zones called by where they end, which is where the next one starts
        "green_threshold": ("zones", "yellow_at"),
        "yellow_threshold": ("zones", "orange_at"),
        "orange_threshold": ("zones", "red_at"),
        "red_threshold": ("zones", "critical_at"),
        "velocity_window": ("trend", "window"),
        "spike_multiplier": ("trend", "spike_multiplier"),
        "ema_alpha": ("trend", "ema_alpha"),
        "burn_history": ("trend", "burn_window"),
        "burn_window": ("trend", "burn_window"),
        "placeholder_max_tokens": ("placeholder_tokens",),
        "max_placeholder_tokens": ("placeholder_tokens",),
        "min_output_reserve": ("reserve_floor",),
        "sub_agent_cap": ("ingest", "sub_agent_cap"),
    }
)
"""Legacy key, with its section where it needs one, to the key of a policy that holds the same value."""

_BUCKETS: Mapping[str, str] = MappingProxyType(
    {
        "system_prompt": "system",
        "tool_definitions": "tools",
        "message_history": "history",
        "tool_results": "tool_outputs",
        "memory_injection": "memory",
        "output_reserved": "working",
        "output_reserve": "working",
    }
)
_OF_LAYERS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "auto_compact_threshold": (("prune", "at"), ("compact", "at")),
        "prune_protect": (("prune", "protect"),),
        "prune_minimum": (("prune", "minimum"),),
        "eviction_target": (("evict", "stop_at"),),
        "target_utilization": (("evict", "stop_at"),),
        "summarization_token_threshold": (("summarize_tool_result", "over"),),
        "summarization_threshold": (("summarize_tool_result", "over"),),
        "compaction_utilization_threshold": (("compact", "at"),),
        "compaction_threshold": (("compact", "at"),),
        "rollover_recheck": (("rollover", "at"),),
    }
)
"""Legacy key to the layers' values that it sets: ``at`` and ``stop_at``, any other name is a parameter."""

_STEPS: Mapping[str, str] = MappingProxyType(
    {
        "tool_result_summarization": "summarize_tool_result",
        "tool_summarization": "summarize_tool_result",
        "tool_summary": "summarize_tool_result",
        "summarization": "summarize_tool_result",
        "eviction": "evict",
        "evict": "evict",
        "progressive": "progressive",
        "progressive_summarization": "progressive",
        "compaction": "compact",
        "delegation": "delegate",
        "sub_agent_delegation": "delegate",
        "delegate": "delegate",
    }
)
_SIGNALS: Mapping[str, str] = MappingProxyType({"fifo": "recency", "type": "type_ttl", "type_based": "type_ttl"})
_TYPES: Mapping[str, str] = MappingProxyType(
    {"tool_results": "tool_result", "others": "other", "default": "other", "memory_injection": "memory"}
)
_STARTS, _NAMED = (
    ("at", "threshold", "utilization", "trigger"),
    ("strategy", "layer", "level", "action", "name", "step"),
)
_PRUNING = frozenset(
    {
        "model_context_limit",
        "output_token_max",
        "auto_compact_threshold",
        "prune_protect",
        "prune_minimum",
        "max_output_tokens",
    }
)
_NO_COUNTERPART: Mapping[str, str] = MappingProxyType(
    {
        "notes_file": "notes are kept in the database, by conversation",
        "notes_max_tokens": "notes are kept in the database, by conversation",
        "auto_save": "a checkpoint is stored with every batch, before the request goes up",
        "auto_save_threshold": "a checkpoint is stored with every batch, before the request goes up",
        "checkpoint_file": "checkpoints are kept in the database",
        "checkpoint_path": "checkpoints are kept in the database",
        "state_file": "checkpoints are kept in the database",
        "progressive_age_threshold": "levels are derived from the age in steps, with fixed borders",
        "estimated_response_tokens": "the reserve stands for the answer",
        "hard_limit": "a cap is exceeded above it, an exact fit is not",
        "generate_placeholders": "what is removed always leaves a trace, see placeholder",
        "enabled": "a policy is chosen by name",
        "history_size": "the newest readings are kept in the database",
    }
)
_ALERTS: Mapping[str, str] = MappingProxyType(
    {
        "utilization": "utilization",
        "eviction_rate": "eviction_rate",
        "fidelity": "fidelity",
        "fidelity_score": "fidelity",
        "compression_ratio": "compression_ratio",
        "tool_result_bloat": "tool_bloat",
    }
)
"""Name of a metric whose alert has a threshold, to the key of ``health`` that holds it."""
_AS_PERCENT = frozenset({"utilization", "fidelity", "tool_bloat"})
_NO_ALERT = "what is watched of health has other thresholds, see health"
_SECTIONS = ("pressure", "eviction", "compression", "budget", "cross_window", "health")
_PASSED_OVER = frozenset({"thresholds", "zones", "limits", "settings"})
_CLOSE = 0.8
_SPECIAL = (
    "policy",
    "eviction_policy",
    "weights",
    "ttl",
    "ttl_turns",
    "cascade",
    "alerts",
    "soft_limit",
    "soft_limit_pct",
    "similarity_threshold",
)
"""Keys of the first set whose values are taken apart one by one."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A policy's data in Weir's words, and a line for everything that could not be said in them."""

    policy: dict[str, object]
    notes: tuple[str, ...]


def legacy_names() -> Iterator[str]:
    """Every key that the importer knows, without its section."""
    for name in (*_SET, *_BUCKETS, *_OF_LAYERS, *_NO_COUNTERPART):
        yield name.rpartition(".")[2]


def known_keys() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The two sets of keys: the one that divides the window into shares, with its sections, and the flat one."""
    shares = (*_SECTIONS, *_SPECIAL, *(name for name in legacy_names() if name not in _PRUNING))
    return tuple(dict.fromkeys(shares)), tuple(sorted(_PRUNING))


def imported(document: Document) -> Imported:
    """The policy that other tools' settings describe; ConfigError with everything that neither of them has."""
    return _Import(_unwrapped(document)).run()


def _unwrapped(document: Document) -> Document:
    """The document without a section that only wraps it all."""
    if len(document.data) != 1:
        return document
    (name, body), known = next(iter(document.data.items())), {*_SECTIONS, *legacy_names()}
    if name in known or not isinstance(body, Mapping):
        return document
    places = {path[1:]: place for path, place in document.places.items() if path[0] == name and len(path) > 1}
    return Document(name=document.name, data=body, places=places)


@dataclass(slots=True)
class _Import:
    """Takes the settings apart, key by key."""

    document: Document
    policy: dict[str, object] = field(default_factory=dict)
    layers: dict[tuple[str, str], object] = field(default_factory=dict)
    params: dict[str, object] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    merges: bool = False
    threshold: object = 0.85
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: int = 0

    def run(self) -> Imported:
        leaves = [(path, value) for path, value in _leaves(self.document.data, ()) if path]
        pruning = {path[-1] for path, _ in leaves} & _PRUNING
        if pruning and set(self.document.data) & set(_SECTIONS):
            self.problems.append(
                f"{self.document.name}: keys of both sets: {', '.join(sorted(map(str, pruning)))} do not go with "
                f"{', '.join(name for name in _SECTIONS if name in self.document.data)}"
            )
        for path, value in leaves:
            self._take(path, value)
        if self.unknown == len(leaves):
            text = "nothing was recognised: none of its keys is one that weir policy import --help names"
            raise ConfigError(f"{self.document.name}: {text}", *self.problems)
        if self.problems:
            raise ConfigError(*self.problems)
        preset = BY_PRUNING if pruning else BY_SHARES
        policy: dict[str, object] = {"preset": preset, **self.policy}
        cascade = self._cascade(preset)
        if cascade is not None:
            policy["cascade"] = cascade
        return Imported(policy=policy, notes=tuple(self.notes))

    def _take(self, path: KeyPath, value: object) -> None:
        words = [str(step) for step in path if step not in _PASSED_OVER] or [str(path[-1])]
        key = words[-1]
        if "alerts" in words or words[0] == "health":
            self._alert(path, key, value)
        elif "weights" in words and len(words) > 1 and words[-1] != "weights":
            self.params[f"weight_{_SIGNALS.get(key, key)}"] = value
        elif len(words) > 1 and words[-2] in {"ttl", "ttl_turns"}:
            self.params[f"ttl_{_TYPES.get(key, key)}"] = value
        elif "cascade" in words:
            self._start(path, words, value)
        elif key in _BUCKETS:
            self._bucket(_BUCKETS[key], value)
        elif key in _OF_LAYERS:
            self.layers.update(dict.fromkeys(_OF_LAYERS[key], value))
        elif (target := _SET.get(f"{words[0]}.{key}", _SET.get(key))) is not None:
            self._put(target, value)
        elif not self._take_special(path, words, value):
            self.unknown += 1
            known = (*_SPECIAL, *legacy_names())
            self.problems.append(self.document.problem(path, f"unknown key{_close_to(key, known)}"))

    def _take_special(self, path: KeyPath, words: list[str], value: object) -> bool:
        key = words[-1]
        if (key == "policy" and "eviction" in words) or key == "eviction_policy":
            self._scorer(str(value).lower())
        elif key in {"soft_limit", "soft_limit_pct"}:
            for bucket in dict.fromkeys(_BUCKETS.values()):
                self._put(("buckets", bucket, "soft"), value)
        elif key == "similarity_threshold":
            self.threshold = value
        elif key in _NO_COUNTERPART:
            self._note(path, f"{value}: {_NO_COUNTERPART[key]}")
        else:
            return False
        return True

    def _alert(self, path: KeyPath, key: str, value: object) -> None:
        """The threshold of an alert; shares may be written as percentages."""
        name = _ALERTS.get(key.removesuffix("_alert").removesuffix("_threshold").removesuffix("_pct"))
        if name is None or isinstance(value, bool) or not isinstance(value, int | float):
            self._note(path, f"{value}: {_NO_ALERT}")
            return
        self._put(("health", name), value / 100 if name in _AS_PERCENT and value > 1 else value)

    def _bucket(self, name: str, value: object) -> None:
        self._put(("buckets", name, "cap"), value)
        if name == "working":
            self._put(("reserve",), value)

    def _scorer(self, name: str) -> None:
        self.merges = name == "semantic_merge"
        self.params["scorer"] = "priority" if self.merges else name

    def _start(self, path: KeyPath, words: list[str], value: object) -> None:
        """One value of a cascade: ``step: 0.75``, ``step: {at: 0.75}`` or ``{strategy: step, at: 0.75}`` in a list."""
        if isinstance(value, str):
            return
        at, key = path[:-1], words[-1].removesuffix("_at")
        step = _STEPS.get(key)
        if step is None and key in _STARTS:
            held = _found(self.document.data, at)
            named = (
                next((held[name] for name in _NAMED if name in held), at[-1]) if isinstance(held, Mapping) else at[-1]
            )
            step = _STEPS.get(str(named))
        if step is None or not isinstance(value, int | float):
            self.problems.append(self.document.problem(path, f"no step of a cascade{_close_to(key, tuple(_STEPS))}"))
        else:
            self.starts[step] = value

    def _put(self, path: KeyPath, value: object) -> None:
        inner = self.policy
        for key in path[:-1]:
            inner = inner.setdefault(str(key), {})  # type: ignore[assignment] # only sections stand above a value
        inner[str(path[-1])] = value

    def _note(self, path: KeyPath, text: str) -> None:
        self.notes.append(f"{self.document.place(path)}: {dotted(path)}: {text}")

    def _cascade(self, preset: str) -> list[dict[str, object]] | None:
        """The preset's layers with what was said about them; None if nothing was."""
        if not (self.layers or self.params or self.starts):
            return None
        preset_layers = preset_documents()[preset].data["cascade"]
        made = [dict(layer) for layer in preset_layers] if isinstance(preset_layers, list) else []
        if self.starts and ("compact", "at") in self.layers and "compact" in self.starts:
            self.notes.append(
                f"compact starts at {self.starts['compact']}, as the cascade says, not at another threshold"
            )
        for layer in made:
            self._rewrite(layer)
        merge = {"layer": "semantic_merge", "at": 0.75, "params": {"threshold": self.threshold}}
        return [merge, *made] if self.merges else made

    def _rewrite(self, layer: dict[str, object]) -> None:
        name, held = str(layer["layer"]), layer.get("params")
        params: dict[str, object] = dict(held) if isinstance(held, Mapping) else {}
        for (strategy, key), value in self.layers.items():
            if strategy == name:
                (layer if key in {"at", "stop_at"} else params)[key] = value
        if name in self.starts:
            layer["at"] = self.starts[name]
        if name == "evict":
            params = _scored({**params, **self.params})
        if params:
            layer["params"] = params


def _scored(params: dict[str, object]) -> dict[str, object]:
    """A scorer's parameters without those that another scorer has; weights of its own stand for a named set."""
    scorer = params.get("scorer")
    if scorer != "hybrid" or any(name.startswith("weight_") for name in params):
        params.pop("weights", None)
    takes = {"hybrid": ("weight_", "ttl_"), "priority": ("weight_",), "type_based": ("ttl_",)}.get(str(scorer), ())
    return {
        name: value
        for name, value in params.items()
        if not name.startswith(("weight_", "ttl_")) or name.startswith(takes)
    }


def _close_to(word: str, known: Sequence[str]) -> str:
    """``; did you mean X?`` for a name that is nearly the same, else nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]}?" if close else ""


def _leaves(data: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(data, Mapping) and (data or not path):
        for key, value in data.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(data, list):
        for at, value in enumerate(data):
            yield from _leaves(value, (*path, at))
    else:
        yield path, data


def _found(data: object, path: KeyPath) -> object:
    for key in path:
        if isinstance(data, Mapping):
            data = data.get(str(key))
        elif isinstance(data, list) and isinstance(key, int):
            data = data[key]
    return data
