"""What is said of configurations and policies that are wrong or doubtful, and what those that hold come to.

``python -m tests.golden.config_messages`` writes it anew.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from proxy.config.file import ConfigError, Document, parse_document
from proxy.config.importing import ALIASES, NO_COUNTERPART, imported
from proxy.config.loading import load_config
from proxy.config.presets import (
    about,
    policy_amounts,
    policy_cautions,
    policy_from,
    policy_section,
    policy_values,
    preset_directory,
    preset_documents,
    preset_policies,
    read_policy,
)
from proxy.config.values import Config, FileValues, Flags, public

MESSAGES = Path(__file__).with_name("config_messages.json")
VALUES: tuple[object, ...] = (None, True, -1, 0.5, 50, "x", {"a": 1})
FILES = (
    *(
        "listen: 8400",
        "listenn: {}",
        "a: [1",
        "- a",
        "a: *b",
        "a: &b [*b]",
        "? [a]\n: 1",
        "a: 1\na: 2",
        "models: {match: a}",
    ),
    *(
        "a: ${",
        "a: ${NO_SUCH}",
        "listen: {host: '${NO_SUCH:-}'}",
        "listen: {port: '${PORT:-8500}'}",
        "\t",
        "a: 2001-01-01",
    ),
    *("models:\n  - {window: 8192}", "models: [{match: a, upstream: b}]", "keys: [{name: a, secret: 123456789}]"),
    *("keys: [{name: a, secret: 12345678a}, {name: a, secret: 12345678a, policy: fancy}]", "default_policy: blanced"),
    *("keys: [{name: a, secret: '${S:-123}'}]", "store: {url: weir.db}", "store: {retention: 3 weeks}"),
    *("telemetry: {alerts: {webhook: nowhere}}", "listen: {host: 0.0.0.0}\nauth: {mode: open}", "upstreams: {a: }"),
    *("upstreams: {a: {base_url: 'http://h'}}", "upstreams: {a: {base_url: 'h'}}", "upstreams: {a: {kind: litellm}}"),
    "upstreams: {a: {kind: litellm, provider: p, base_url: 'http://h/v1', auth: bearer}}",
    "upstreams: {a: {base_url: 'http://u:p@h/v1?q=1', provider: p, api_base: x}}",
    *("upstreams: {a: {name: b, base_url: 'http://h/v1'}}", "upstreams: {a: {base_url: 'http://h/v1/', api_key: k}}"),
    *(
        "policies: {a: {preset: blanced}}",
        "policies: {a: {name: b}}",
        "policies: {a: 3}",
        "policies: {a: , b: {headroom: 0.01}}",
    ),
    *(
        "policies: {a: {zones: {yellow: 1}}}",
        "policies:\n  a:\n    cascade: [{layer: evct}]\n  b: {headrom: 1}",
        "window: 0",
    ),
    *("a: " + "[" * 40 + "]" * 40, "x: " + "1" * 80, "policies: {a: {preset: fb-code-200k, headroom: 4000}}"),
)
ENVIRONMENTS: tuple[Mapping[str, str], ...] = (
    {"WEIR_KEYS": "b="},
    {"WEIR_KEYS": "b=tiny"},
    {"WEIR_KEYS": "b=secret-of-b,b=secret-of-c"},
    {"WEIR_PORT": "x"},
    {"WEIR_UPSTREAM": "http://h:1"},
    {"OPENAI_API_KEY": "sk-of-openai"},
    {"WEIR_POLICY": "nothing", "WEIR_WINDOW": "-1", "WEIR_STORE": "postgresql://u:pw@h/d?sslkey=k"},
)
FLAGS = (
    Flags(upstream="h"),
    Flags(port=99999),
    Flags(policy="audit", window=5, summarizer="none", auth_mode="keys"),
    Flags(host="0.0.0.0", auth_mode="open"),
)
POLICIES = (
    *(
        "cascade: [{layer: evict}, {layer: evct}]",
        "cascade: [{layer: evict, at: 0.6, stop_at: 0.7}]",
        "cascade: [{layer: window}]",
    ),
    *(
        "cascade: [{layer: prune, scope: tool_outputs}]",
        "cascade: [{layer: prune, scope: results}]",
        "enforce: reject",
    ),
    "buckets: {tool_outputs: {cap: 0.3}, memory: {charge_to: tool_outputs}}\ncascade: [{layer: prune, scope: memory}]",
    *("cascade: [{layer: custom}]", "cascade: [{layer: custom, params: {path: json}}]", "cascade: []", "trigger: 0.8"),
    "cascade: [{layer: custom, params: {path: 'no_such_module:f', seconds: fast}}]",
    *("buckets: {systm: {cap: 0.1}}", "buckets: {tools: {charge_to: tool}}", "buckets: {tools: {charge_to: tools}}"),
    "buckets: {tools: {charge_to: memory}, memory: {charge_to: tools}}",
    "buckets: {tools: {charge_to: memory}, memory: {charge_to: summary}, summary: {charge_to: history}}",
    *("buckets: {tools: {on_overflow: reject}}", "buckets: {history: {cap: 0.5, on_overflow: prune-unused}}"),
    *(
        "buckets: {tools: {cap: 0.4}, history: {cap: 0.6}}\nheadroom: 0.1",
        "buckets: {tools: {cap: 0.1, on_overflow: reject}}",
    ),
    *(
        "buckets: {tools: {cap: 0.1}, memory: {on_overflow: warn, charge_to: system}}",
        "enforce: bucket\nbuckets: {tools: {cap: 0.5}}",
    ),
    *("reserve: 0.1\nbuckets: {tools: {cap: 0.1}, working: {cap: 0.2}}", "headroom: 0.02", "ingest: {cap: 200000}"),
    *(
        "estimator: words",
        "estimator: chars4",
        "summaries: {role: system}",
        "summarizer: {model: m}",
        "health: off",
        "notes: no",
    ),
    *(
        "evaluate: {sample: 0.5}",
        "memory: {patterns: [x]}",
        "mode: off\nheadroom: 0",
    ),
    *(
        "shapes: []",
        "shapes: [{window: null}, {window: 3}]",
        "shapes: [{window: 5}, {window: 3}, {window: null, tail: 2}]",
    ),
    *("zones: {red_at: 0.1}", "headrom: 0.1", "colour: red", "headroom: 1.5x", "cascade: [{layer: evict, cap: 3}]"),
    "cascade: [{layer: dedupe}, {layer: compact}, {layer: evict}, {layer: prune}]",
    "health: {compactions: 9}\ningest: {tools: {a: 0}}",
)
PARAMETERS = (
    "scorer",
    "types",
    "protect",
    "straddle",
    "threshold",
    "messages",
    "evict_pct",
    "prompt",
    "ttl_memory",
    "n",
)
LAYERS = ("evict", "prune", "window", "compact", "dedupe", "delegate")
OTHER_TOOLS = (
    "a: 1",
    "max_context_tokens: 1\nnonsense: 2",
    "pressure: {thresholds: {yellow: 0.5}, velocity_window: 5}\neviction: {policy: semantic_merge}",
    "compression: {cascade: {0.75: tool_result_summarization, 0.8: nothing}, notes_file: n.md}",
    "compression: {compaction_utilization_threshold: 0.8, cascade: {0.9: conversation_compaction}}",
    "context_budget: {total_window: 9000, buckets: {tools: {max_tokens: 100, on_overflow: prune-unused}}, headroom_tokens: 5}",
    "eviction: {layers: [{target: history, strategy: sliding-window, keep_recent_turns: 8, at_pct: 85}]}",
    "eviction: {layers: [{target: history, strategy: slidng}, {strategy: zzz}]}",
    "eviction: {policy: hybrid, weights: {recency: 2}, type_ttl: {thinking: 3}}",
)


def recorded(folder: Path) -> dict[str, object]:
    """All of it, by what was given; of the many values of one key the digest of what is said."""
    found: dict[str, object] = {}
    for text in FILES:
        (folder / "weir.yaml").write_text(text)
        found[f"file {text}"] = _said(folder, lambda: _loaded(load_config(folder / "weir.yaml", env={})))
    for env in ENVIRONMENTS:
        found[f"environment {dict(env)}"] = _said(folder, lambda env=env: _loaded(load_config(env=env)))
    for flags in FLAGS:
        found[f"flags {flags}"] = _said(folder, lambda flags=flags: _loaded(load_config(env={}, flags=flags)))
    for path in _paths(public(FileValues())):
        found[f"file {'.'.join(path)}"] = _each(folder, lambda value, path=path: _file(folder, path, value))
    for text in POLICIES:
        found[f"policy {text}"] = _said(folder, lambda text=text: _policy(parse_document(text, name="p.yaml", env={})))
    for path in _paths(policy_values(preset_policies()["balanced"])):
        found[f"policy {'.'.join(path)}"] = _each(folder, lambda value, path=path: _policy(_nested(path, value)))
    for layer in LAYERS:
        for name in PARAMETERS:
            given = f"policy {layer} {name}"
            found[given] = _each(folder, lambda value, layer=layer, name=name: _policy(_layer(layer, name, value)))
    for name, settings in preset_policies().items():
        found[f"preset {name}"] = [
            about(preset_documents()[name]),
            _digest(policy_values(settings)),
            _digest(policy_section(settings, "it")),
            [_digest(policy_amounts(settings, window)) for window in (4_096, 32_768, 200_000, 1_000_000)],
            _plain(policy_cautions(settings, Document(name="")), folder),
        ]
    for text in OTHER_TOOLS:
        found[f"other tool {text}"] = _said(
            folder, lambda text=text: _imported(parse_document(text, name="o.yaml", env={}))
        )
    for name in (*ALIASES, *NO_COUNTERPART):
        path = tuple(name.split("."))
        found[f"other tool's {name}"] = _each(folder, lambda value, path=path: _imported(_nested(path, value)))
    for text in ("[1]", '{"a": 1}', "a: b", "3", '{"a": ' * 40 + "1" + "}" * 40):
        found[f"set {text}"] = _said(folder, lambda text=text: read_policy("p", text))
    return found


def _loaded(config: Config) -> object:
    places = {".".join(map(str, at)): where for at, where in config.places.items()}
    return [_digest(public(replace(config, path=None))), config.simulate, config.warnings, places]


def _file(folder: Path, path: tuple[str, ...], value: object) -> object:
    (folder / "weir.yaml").write_text(json.dumps(_nested(path, value).data))
    return _loaded(load_config(folder / "weir.yaml", env={}))


def _policy(own: Document) -> object:
    settings = policy_from("mine", own, presets=preset_documents())
    return [_digest(policy_values(settings)), policy_cautions(settings, own)]


def _imported(document: Document) -> object:
    made = imported(document)
    return [made.policy, made.notes]


def _layer(layer: str, name: str, value: object) -> Document:
    return Document(name="p.yaml", data={"cascade": [{"layer": layer, "params": {name: value}}]})


def _nested(path: tuple[str, ...], value: object) -> Document:
    data: Any = value
    for key in reversed(path):
        data = {key: data}
    return Document(name="p.yaml", data=data)


def _paths(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, (*path, key))
        else:
            yield (*path, key)


def _each(folder: Path, make: Any) -> str:
    """The digest of what is said of every value."""
    return _digest([_said(folder, lambda value=value: make(value)) for value in VALUES])


def _said(folder: Path, make: Any) -> object:
    with contextlib.suppress(AttributeError):
        try:
            return _plain(make(), folder)
        except ConfigError as error:
            return _plain(["refused", *error.problems], folder)
    return "an attribute is missing"


def _plain(value: object, folder: Path) -> object:
    text = json.dumps(value, default=str)
    return json.loads(text.replace(str(folder), "FOLDER").replace(str(preset_directory()), "PRESETS"))


def _digest(value: object) -> str:
    return sha256(json.dumps(value, default=str, sort_keys=True).encode()).hexdigest()[:16]


def written(found: dict[str, object]) -> str:
    """What was found, a line for each."""
    lines = (f"{json.dumps(name)}: {json.dumps(said, ensure_ascii=False)}" for name, said in found.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Write what is said today."""
    with tempfile.TemporaryDirectory() as folder:
        MESSAGES.write_text(written(recorded(Path(folder))))


if __name__ == "__main__":
    main()
