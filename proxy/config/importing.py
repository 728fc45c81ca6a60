"""Two declarations of other tools as a policy of Weir's: what each of their keys is called here.

One divides the window into shares, one (``context_budget``, ``eviction.layers``) gives each bucket
its tokens. Each becomes its preset with what differs written over it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.config.file import ConfigError, Document, KeyPath, dotted, leaves_of
from proxy.config.presets import preset_documents

_PARTS = {
    "system_prompt": "system",
    "tool_definitions": "tools",
    "message_history": "history",
    "tool_results": "tool_outputs",
    "memory_injection": "memory",
}
_BUCKETS = ("system", "tools", "history", "tool_outputs", "working")
_SIGNALS = ("recency", "priority", "type_ttl", "reference_freq", "semantic_duplication")

ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_context_tokens": ("window",),
    **{
        f"pressure.thresholds.{zone}": (f"zones.{zone}_at",) for zone in ("yellow", "orange", "red")
    },
    "eviction.policy": ("cascade.evict.params.scorer",),
    **{
        f"eviction.weights.{signal}": (f"cascade.evict.params.weight_{signal}",)
        for signal in _SIGNALS
    },
    "eviction.type_ttl.tool_result": ("cascade.evict.params.ttl_tool_result",),
    "eviction.type_ttl.thinking": ("cascade.reasoning.params.ttl",),
    "eviction.type_ttl.memory_injection": ("cascade.evict.params.ttl_memory",),
    "compression.summarization_threshold_tokens": ("cascade.summarize_tool_result.params.over",),
    "compression.compaction_utilization_threshold": ("cascade.compact.at",),
    **{f"budget.allocations.{name}": (f"buckets.{own}.cap",) for name, own in _PARTS.items()},
    "budget.allocations.output_reserved": ("buckets.working.cap", "reserve"),
    "budget.soft_limit_pct": tuple(f"buckets.{own}.soft" for own in (*_PARTS.values(), "working")),
    "cross_window.auto_save_threshold": ("checkpoints.save_at",),
    "health_monitoring.alerts.utilization_critical": ("health.utilization",),
    "health_monitoring.alerts.eviction_rate_warning": ("health.eviction_rate",),
    "health_monitoring.alerts.compression_ratio_min": ("health.compression_ratio",),
    "health_monitoring.alerts.tool_bloat_warning": ("health.tool_bloat",),
    "context_budget.total_window": ("window",),
    "context_budget.headroom_tokens": ("headroom",),
    **{
        f"context_budget.buckets.{name}.max_tokens": (f"buckets.{name}.cap",)
        for name in _BUCKETS[:-1]
    },
    "context_budget.buckets.working.max_tokens": ("buckets.working.cap", "reserve"),
    **{
        f"context_budget.buckets.{name}.on_overflow": (f"buckets.{name}.on_overflow",)
        for name in _BUCKETS
    },
}
"""Each key to those of a policy that hold the same value; below ``cascade`` is the name of a layer.
"""

NO_COUNTERPART: Mapping[str, str] = {
    "pressure.velocity_window": "the velocity is the mean of the newest 5 growths",
    "eviction.protected_types": (
        "system messages and the newest exchange always stay, the rest by its score"
    ),
    "compression.notes_file": "notes are kept in the database, by conversation",
    "cross_window.state_file": "checkpoints are kept in the database",
    "cross_window.progress_file": (
        "progress is part of the checkpoints, which are kept in the database"
    ),
    "health_monitoring.alerts.fidelity_warning": (
        "what summaries still answer is measured by weir evaluate --gate"
    ),
    "health_monitoring.metrics": "each is always measured, see docs/telemetry.md",
}
_STEPS = {
    "tool_result_summarization": "summarize_tool_result",
    "progressive": "progressive",
    "conversation_compaction": "compact",
    "sub_agent": "delegate",
}
_LAYERS = {
    "truncate-largest": "truncate_largest",
    "sliding-window": "window",
    "recursive-summarize": "compact",
}
_OF_A_LAYER = {"target": "scope", "strategy": "layer", "at_pct": "at"}
_OF_A_LAYER |= {"keep_recent_turns": "params.turns", "evict_pct": "params.evict_pct"}
_TAKES = {"hybrid": ("weight_", "ttl_"), "priority": ("weight_",), "type_based": ("ttl_",)}


class Imported(msgspec.Struct, frozen=True):
    policy: dict[str, Any]
    notes: tuple[str, ...]


def imported(document: Document) -> Imported:
    """The policy that other tools' settings describe; ConfigError with every key that neither
    declaration has.
    """
    policy: dict[str, Any] = {}
    listed: dict[KeyPath, dict[str, Any]] = {}
    notes: list[str] = []
    problems: list[str] = []
    for path, value in leaves_of(document.data):
        name = dotted(path)
        owns = ALIASES.get(name, ())
        if path[:2] == ("compression", "cascade") and value in _STEPS:
            owns = (f"cascade.{_STEPS[str(value)]}.at",)
            at = str(path[-1])
            value = float(at) if at.replace(".", "", 1).isdigit() else at
        if name in NO_COUNTERPART:
            notes.append(f"{document.place(path)}: {name}: {NO_COUNTERPART[name]}")
        elif path[:2] == ("eviction", "layers") and path[-1] in _OF_A_LAYER:
            if path[-1] == "at_pct" and isinstance(value, int | float):
                value /= 100
            _put(
                listed.setdefault(path[:-1], {}),
                _OF_A_LAYER[str(path[-1])],
                _LAYERS.get(str(value), value),
            )
        elif not owns:
            problems.append(document.problem(path, "unknown key"))
        for own in owns:
            former = _put(policy, own, value)
            if former not in (None, value):
                notes.append(
                    f"{document.place(path)}: {name}: holds, and not the {former} that was said"
                    " before"
                )
    if not policy and not listed:
        problems.insert(
            0, f"{document.name}: nothing was recognised, see docs/policies.md for what is read"
        )
    if problems:
        raise ConfigError(*problems)
    preset = "five-bucket-128k" if listed or "context_budget" in document.data else "article-128k"
    layers = policy.pop("cascade", {})
    made = {"preset": preset, **policy}
    if isinstance(made.get("window"), int):
        made["designed_for"] = made["window"]  # what is said in tokens was chosen for this window
    if listed:
        made["cascade"] = [{"layer": "ingest_cap", "at": 0}, *listed.values()]
    elif layers:
        made["cascade"] = _cascade(preset, layers)
    return Imported(policy=made, notes=tuple(notes))


def _put(held: dict[str, Any], name: str, value: object) -> object:
    """Write a value below its sections; what was there before."""
    *sections, key = name.split(".")
    for section in sections:
        held = held.setdefault(section, {})
    former = held.get(key)
    held[key] = value
    return former


def _cascade(preset: str, layers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The preset's layers with the values of ``layers`` written over them.

    Thinking is no block that is scored: what is said of its age makes a layer of its own, due when
    the first is.
    """
    cascade: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = preset_documents()[preset].data["cascade"]  # type: ignore[assignment]
    if "reasoning" in layers:
        cascade.append({"layer": "reasoning", "at": given[0]["at"], **layers["reasoning"]})
    for layer in given:
        own = layers.get(layer["layer"], {})
        params = {**layer.get("params", {}), **own.get("params", {})}
        if params.get("scorer") == "semantic_merge":
            params["scorer"] = "priority"
            cascade.append({"layer": "semantic_merge", "at": layer["at"]})
        if "scorer" in params:
            params = _taken(params)
        cascade.append({**layer, **own, **({"params": params} if params else {})})
    return cascade


def _taken(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the scorer takes: its own weights replace a set's name."""
    takes = _TAKES.get(params["scorer"], ())
    weighs = any(name.startswith("weight_") for name in params)
    if params["scorer"] != "hybrid" or weighs:
        params.pop("weights", None)
    return {
        n: v
        for n, v in params.items()
        if not n.startswith(("weight_", "ttl_")) or n.startswith(takes)
    }
