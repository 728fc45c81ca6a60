"""Other tools' settings as a policy of Weir's: what each of their keys is called here, and what has no counterpart.

Three sets of keys are read. One divides the window into shares and has sections (``pressure``, ``eviction``,
``compression``, ``budget``, ``cross_window``, ``health``); one is flat (``model_context_limit``, ``prune_protect``);
one gives each bucket its tokens and lists layers by bucket (``context_budget``, ``eviction.layers``). Each becomes its
preset with what differs written over it. A key of none is an error.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from proxy.config.file import ConfigError, Document, KeyPath, dotted, leaves_of
from proxy.config.presets import OTHER_BUCKETS, OTHER_KEYS, OTHER_KEYS_OF_LAYERS, preset_documents

BY_SHARES, BY_PRUNING, BY_BUCKETS = "article-128k", "baseagent-200k", "five-bucket-128k"

_BUCKET_NAMES = frozenset({*OTHER_BUCKETS.values(), "summary"})
_OF_A_BUCKET = frozenset({"max_tokens", "on_overflow"})
_COMPACTION = frozenset(name for name, held in OTHER_KEYS_OF_LAYERS.items() if ("compact", "at") in held)
_STEPS: Mapping[str, str] = {
    "tool_result_summarization": "summarize_tool_result",
    "tool_summarization": "summarize_tool_result",
    "tool_summary": "summarize_tool_result",
    "summarization": "summarize_tool_result",
    "eviction": "evict",
    "evict": "evict",
    "progressive": "progressive",
    "progressive_summarization": "progressive",
    "compaction": "compact",
    "conversation_compaction": "compact",
    "sub_agent": "delegate",
    "delegation": "delegate",
    "sub_agent_delegation": "delegate",
    "delegate": "delegate",
}
_SIGNALS: Mapping[str, str] = {"fifo": "recency", "type": "type_ttl", "type_based": "type_ttl"}
_TYPES: Mapping[str, str] = {
    "tool_results": "tool_result",
    "others": "other",
    "default": "other",
    "memory_injection": "memory",
}
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
_NO_COUNTERPART: Mapping[str, str] = {
    "notes_file": "notes are kept in the database, by conversation",
    "notes_max_tokens": "notes are kept in the database, by conversation",
    "checkpoint_file": "checkpoints are kept in the database",
    "checkpoint_path": "checkpoints are kept in the database",
    "state_file": "checkpoints are kept in the database",
    "progress_file": "progress is part of the checkpoints, which are kept in the database",
    "protected_types": "system messages and the newest exchange always stay, the rest by its score",
    "metrics": "each is always measured, see docs/telemetry.md",
    "progressive_age_threshold": "levels are derived from the age in steps, with fixed borders",
    "estimated_response_tokens": "the reserve stands for the answer",
    "hard_limit": "a cap is exceeded above it, an exact fit is not",
    "generate_placeholders": "what is removed always leaves a trace, see placeholder",
    "enabled": "a policy is chosen by name",
    "history_size": "the newest readings are kept in the database",
}
_ALERTS: Mapping[str, str] = {
    "utilization": "utilization",
    "eviction_rate": "eviction_rate",
    "fidelity": "fidelity",
    "fidelity_score": "fidelity",
    "compression_ratio": "compression_ratio",
    "tool_result_bloat": "tool_bloat",
    "tool_bloat": "tool_bloat",
}
_AS_PERCENT = frozenset({"utilization", "fidelity", "tool_bloat"})
_OF_AN_ALERT = re.compile(r"(_(alert|threshold|pct|critical|warning|min|max))+\Z")
_NO_ALERT = "what is watched of health has other thresholds, see health"
_SECTIONS = ("pressure", "eviction", "compression", "budget", "cross_window", "health", "health_monitoring")
_PASSED_OVER = frozenset({"thresholds", "zones", "limits", "settings", "context_budget"})
_OF_BUCKETS = ("total_window", "headroom_tokens", "max_tokens", "on_overflow")
_OF_A_LAYER: Mapping[str, KeyPath] = {
    "target": ("scope",),
    "strategy": ("layer",),
    "at_pct": ("at",),
    "keep_recent_turns": ("params", "turns"),
    "evict_pct": ("params", "evict_pct"),
}
_LAYERS: Mapping[str, str] = {
    "truncate-largest": "truncate_largest",
    "sliding-window": "window",
    "recursive-summarize": "compact",
}
_CLOSE = 0.8
_SPECIAL = (
    "policy",
    "eviction_policy",
    "weights",
    "ttl",
    "ttl_turns",
    "type_ttl",
    "cascade",
    "alerts",
    "soft_limit",
    "soft_limit_pct",
    "similarity_threshold",
)


class Imported(msgspec.Struct, frozen=True):
    policy: dict[str, object]
    notes: tuple[str, ...]


def legacy_names() -> Iterator[str]:
    for name in (*OTHER_KEYS, *OTHER_BUCKETS, *OTHER_KEYS_OF_LAYERS, *_NO_COUNTERPART):
        yield name.rpartition(".")[2]


def known_keys() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    others = {*_PRUNING, *_OF_BUCKETS}
    shares = (*_SECTIONS, *_SPECIAL, *(name for name in legacy_names() if name not in others))
    buckets = ("context_budget", "buckets", *_OF_BUCKETS, "eviction", "layers", *_OF_A_LAYER)
    return tuple(dict.fromkeys(shares)), tuple(sorted(_PRUNING)), buckets


def imported(document: Document) -> Imported:
    """The policy that other tools' settings describe; ConfigError with everything that none of them has."""
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
    document: Document
    policy: dict[str, object] = field(default_factory=dict)
    layers: dict[tuple[str, str], object] = field(default_factory=dict)
    params: dict[str, object] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    listed: dict[KeyPath, dict[str, object]] = field(default_factory=dict)
    merges: bool = False
    threshold: object = 0.85
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: int = 0

    def run(self) -> Imported:
        leaves = [(path, value) for path, value in leaves_of(self.document.data) if path]
        preset = self._preset([path for path, _ in leaves])
        for path, value in leaves:
            self._take(path, value)
        if self.unknown == len(leaves):
            text = "nothing was recognised: none of its keys is one that weir policy import --help names"
            raise ConfigError(f"{self.document.name}: {text}", *self.problems)
        if self.problems:
            raise ConfigError(*self.problems)
        policy: dict[str, object] = {"preset": preset, **self.policy}
        if isinstance(policy.get("window"), int):
            policy["designed_for"] = policy["window"]  # what is said in tokens was chosen for this window
        cascade = self._cascade(preset)
        if cascade is not None:
            policy["cascade"] = cascade
        return Imported(policy=policy, notes=tuple(self.notes))

    def _preset(self, paths: Sequence[KeyPath]) -> str:
        flat = {str(path[-1]) for path in paths} & _PRUNING
        by_buckets = {
            str(path[-1]) for path in paths if path[-1] in _OF_BUCKETS or (path[-1] in _OF_A_LAYER and "layers" in path)
        }
        by_shares = {name for name in self.document.data if name in _SECTIONS}
        if by_buckets:
            by_shares.discard("eviction")
        found = [", ".join(sorted(keys)) for keys in (flat, by_buckets, by_shares) if keys]
        if len(found) > 1:
            text = f"keys of both sets: {found[0]} do not go with {found[1]}"
            self.problems.append(f"{self.document.name}: {text}")
        return BY_PRUNING if flat else BY_BUCKETS if by_buckets else BY_SHARES

    def _take(self, path: KeyPath, value: object) -> None:
        words = [str(step) for step in path if step not in _PASSED_OVER] or [str(path[-1])]
        key = words[-1]
        if key in _NO_COUNTERPART:
            self._note(path, f"{_shown(value)}: {_NO_COUNTERPART[key]}")
        elif "alerts" in words or words[0] in {"health", "health_monitoring"}:
            self._alert(path, key, value)
        elif "layers" in words and key in _OF_A_LAYER:
            self._of_a_layer(path, value)
        elif len(words) > 1 and words[-2] in _BUCKET_NAMES and words[-3:-2] == ["buckets"] and key in _OF_A_BUCKET:
            self._of_a_bucket(words[-2], key, value)
        elif "weights" in words and len(words) > 1 and words[-1] != "weights":
            self.params[f"weight_{_SIGNALS.get(key, key)}"] = value
        elif len(words) > 1 and words[-2] in {"ttl", "ttl_turns", "type_ttl"}:
            self.params[f"ttl_{_TYPES.get(key, key)}"] = value
        elif key == "auto_save" and isinstance(value, bool):
            self._note(path, f"{value}: a checkpoint is stored with every batch, and at checkpoints.save_at")
        elif "cascade" in words:
            self._start(path, words, value)
        elif key in OTHER_BUCKETS:
            self._bucket(OTHER_BUCKETS[key], value)
        elif key in OTHER_KEYS_OF_LAYERS:
            self.layers.update(dict.fromkeys(OTHER_KEYS_OF_LAYERS[key], value))
        elif (target := OTHER_KEYS.get(f"{words[0]}.{key}", OTHER_KEYS.get(key))) is not None:
            self._put(target, value)
        elif not self._take_special(words, value):
            self.unknown += 1
            known = (*_SPECIAL, *legacy_names())
            self.problems.append(self.document.problem(path, f"unknown key{_close_to(key, known)}"))

    def _take_special(self, words: list[str], value: object) -> bool:
        key = words[-1]
        if (key == "policy" and "eviction" in words) or key == "eviction_policy":
            self._scorer(str(value).lower())
        elif key in {"soft_limit", "soft_limit_pct"}:
            for bucket in dict.fromkeys(OTHER_BUCKETS.values()):
                self._put(("buckets", bucket, "soft"), value)
        elif key == "similarity_threshold":
            self.threshold = value
        else:
            return False
        return True

    def _of_a_bucket(self, name: str, key: str, value: object) -> None:
        if key == "max_tokens":
            self._bucket(name, value)
        else:
            self._put(("buckets", name, key), value)

    def _of_a_layer(self, path: KeyPath, value: object) -> None:
        layer, at = self.listed.setdefault(path[:-1], {"layer": ""}), _OF_A_LAYER[str(path[-1])]
        if path[-1] == "strategy":
            if str(value) not in _LAYERS:
                known = _close_to(str(value), tuple(_LAYERS)) or f"; known: {', '.join(_LAYERS)}"
                self.problems.append(self.document.problem(path, f"no layer {value}{known}"))
                return
            value = _LAYERS[str(value)]
        elif path[-1] == "at_pct" and isinstance(value, int | float):
            value = value / 100
        held = layer
        for key in at[:-1]:
            held = held.setdefault(str(key), {})  # type: ignore[assignment] # only params stand above a value
        held[str(at[-1])] = value

    def _alert(self, path: KeyPath, key: str, value: object) -> None:
        name = _ALERTS.get(_OF_AN_ALERT.sub("", key))
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
        """One value of a cascade.

        That is ``step: 0.75``, ``0.75: step``, ``step: {at: 0.75}``, or ``{strategy: step, at: 0.75}`` in a list.
        """
        if isinstance(value, str):
            try:
                words, value = [*words[:-1], value], float(words[-1])
            except ValueError:
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
        if self.listed:
            return [{"layer": "ingest_cap", "at": 0}, *self.listed.values()]
        if not (self.layers or self.params or self.starts):
            return None
        preset_layers = preset_documents()[preset].data["cascade"]
        made = [dict(layer) for layer in preset_layers] if isinstance(preset_layers, list) else []
        if self.starts and ("compact", "at") in self.layers and "compact" in self.starts:
            path = next(path for path, _ in leaves_of(self.document.data) if path[-1] in _COMPACTION)
            self._note(
                path, f"{self.layers['compact', 'at']}: compact starts at {self.starts['compact']}, as the cascade says"
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
    scorer = params.get("scorer")
    if scorer != "hybrid" or any(name.startswith("weight_") for name in params):
        params.pop("weights", None)
    takes = {"hybrid": ("weight_", "ttl_"), "priority": ("weight_",), "type_based": ("ttl_",)}.get(str(scorer), ())
    return {
        name: value
        for name, value in params.items()
        if not name.startswith(("weight_", "ttl_")) or name.startswith(takes)
    }


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _close_to(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]}?" if close else ""


def _found(data: object, path: KeyPath) -> object:
    for key in path:
        if isinstance(data, Mapping):
            data = data.get(str(key))
        elif isinstance(data, list) and isinstance(key, int):
            data = data[key]
    return data
