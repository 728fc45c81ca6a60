"""Other tools' settings become a policy; in a policy their keys are refused and say what to write."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from policies.settings import ContextSettings
from proxy.cli import main
from proxy.config.file import ConfigError, Document, parse_document
from proxy.config.importing import imported, legacy_names
from proxy.config.loading import load_config
from proxy.config.presets import LEGACY, policy_from, preset_documents, preset_policies

BY_SHARES = """
max_context_tokens: 128000
pressure:
  yellow: 0.50
  orange: 0.75
  red: 0.90
  velocity_window: 5
  spike_multiplier: 3.0
eviction:
  policy: hybrid
  target_utilization: 0.60
  similarity_threshold: 0.85
  weights: {recency: 0.30, priority: 0.25, type_ttl: 0.20, reference_freq: 0.15, semantic_duplication: 0.10}
  ttl: {tool_result: 8, thinking: 2, memory: 20, assistant: 30}
  placeholder_max_tokens: 50
compression:
  summarization_token_threshold: 500
  progressive_age_threshold: 5
  compaction_utilization_threshold: 0.85
  notes_file: agent_notes.md
  cascade:
    - {strategy: tool_result_summarization, threshold: 0.75}
    - {strategy: progressive, threshold: 0.85}
    - {strategy: compaction, threshold: 0.92}
    - {strategy: delegation, threshold: 0.95}
budget:
  allocations:
    system_prompt: 0.06
    tool_definitions: 0.04
    message_history: 0.65
    tool_results: 0.12
    memory_injection: 0.08
    output_reserved: 0.05
  soft_limit: 0.80
cross_window:
  auto_save: 0.85
health:
  alerts: {utilization: 90, eviction_rate: 5, fidelity: 0.75, compression_ratio: 2.0, tool_result_bloat: 0.30}
"""

BY_PRUNING = """
model_context_limit: 200000
output_token_max: 32000
auto_compact_threshold: 0.85
prune_protect: 40000
prune_minimum: 20000
max_output_tokens: 2500
"""


PRINTED_BY_SHARES = """
max_context_tokens: 128000
pressure:
  thresholds:
    yellow: 0.50
    orange: 0.75
    red: 0.90
  velocity_window: 5
eviction:
  policy: hybrid
  weights:
    recency: 0.30
    priority: 0.25
    type_ttl: 0.20
    reference_freq: 0.15
    semantic_duplication: 0.10
  type_ttl:
    tool_result: 8
    thinking: 2
    memory_injection: 20
  protected_types: [system_prompt]
compression:
  summarization_threshold_tokens: 500
  compaction_utilization_threshold: 0.85
  cascade:
    0.75: tool_result_summarization
    0.85: progressive
    0.92: conversation_compaction
    0.95: sub_agent
  notes_file: agent_notes.md
budget:
  allocations:
    system_prompt: 0.06
    tool_definitions: 0.04
    message_history: 0.65
    tool_results: 0.12
    memory_injection: 0.08
    output_reserved: 0.05
  soft_limit_pct: 0.80
cross_window:
  state_file: agent_state.json
  progress_file: agent_progress.md
  auto_save_threshold: 0.85
health_monitoring:
  metrics:
    - utilization
    - eviction_rate
    - compression_ratio
    - burn_rate
    - fidelity_score
    - tool_result_bloat
  alerts:
    utilization_critical: 0.90
    eviction_rate_warning: 5
    fidelity_warning: 0.75
    compression_ratio_min: 2.0
    tool_bloat_warning: 0.30
"""

PRINTED_BUCKETS = """
context_budget:
  total_window: 128000
  buckets:
    system: { max_tokens: 8000, on_overflow: "reject" }
    tools: { max_tokens: 16000, on_overflow: "prune-unused" }
    history: { max_tokens: 48000, on_overflow: "summarize" }
    tool_outputs: { max_tokens: 32000, on_overflow: "truncate" }
    working: { max_tokens: 16000, on_overflow: "reject" }
  headroom_tokens: 8000
"""

PRINTED_LAYERS = """
eviction:
  layers:
    - { target: "tool_outputs", strategy: "truncate-largest", at_pct: 80 }
    - { target: "history", strategy: "sliding-window", keep_recent_turns: 8, at_pct: 85 }
    - { target: "history", strategy: "recursive-summarize", evict_pct: 70, at_pct: 95 }
"""
SOURCES = Path(__file__).resolve().parents[3] / "shared" / "seeds"


def policy_of(text: str) -> ContextSettings:
    made = imported(parse_document(text, name="legacy.yaml", env={}))
    return policy_from("mine", Document(name="", data=made.policy), presets=preset_documents())


def run(tmp_path: Path, text: str, *options: str) -> Result:
    (tmp_path / "legacy.yaml").write_text(text)
    return CliRunner().invoke(
        main, ["policy", "import", str(tmp_path / "legacy.yaml"), *options], catch_exceptions=False
    )


@pytest.mark.requirement("A0.137", "A0.13", "A0.135")
def test_a_division_by_shares_becomes_its_preset() -> None:
    settings, preset = policy_of(BY_SHARES), preset_policies()["article-128k"]

    assert settings.window == 128_000
    assert settings.buckets == preset.buckets
    assert (settings.reserve, settings.zones, settings.trend) == (0.05, preset.zones, preset.trend)
    assert [(each.strategy, each.at, each.stop_at) for each in settings.layers] == [
        (each.strategy, each.at, each.stop_at) for each in preset.layers
    ]
    assert settings.layers[0].params["weight_type_ttl"] == 0.20
    assert settings.layers[0].params["ttl_thinking"] == 2


@pytest.mark.requirement("A0.137", "D19")
def test_the_sample_of_a_division_by_shares_is_the_preset_key_by_key() -> None:
    settings, preset = policy_of(PRINTED_BY_SHARES), preset_policies()["article-128k"]
    weighed = {
        "recency": 0.30,
        "priority": 0.25,
        "type_ttl": 0.20,
        "reference_freq": 0.15,
        "semantic_duplication": 0.10,
    }

    assert settings.layers[0].params == {
        "scorer": "hybrid",
        **{f"weight_{name}": weight for name, weight in weighed.items()},
        "ttl_tool_result": 8,
        "ttl_thinking": 2,
        "ttl_memory": 20,
    }
    assert settings.layers[1:] == preset.layers[1:]
    alike = replace(settings, name=preset.name, window=None, layers=(preset.layers[0], *settings.layers[1:]))
    assert alike == preset


@pytest.mark.requirement("A0.137")
def test_every_value_of_the_sample_arrives() -> None:
    changed = PRINTED_BY_SHARES
    for old, new in (
        ("yellow: 0.50", "yellow: 0.55"),
        ("tool_result: 8", "tool_result: 9"),
        ("summarization_threshold_tokens: 500", "summarization_threshold_tokens: 600"),
        ("0.75: tool_result_summarization", "0.76: tool_result_summarization"),
        ("0.85: progressive", "0.86: progressive"),
        ("0.92: conversation_compaction", "0.91: conversation_compaction"),
        ("0.95: sub_agent", "0.94: sub_agent"),
        ("auto_save_threshold: 0.85", "auto_save_threshold: 0.80"),
        ("utilization_critical: 0.90", "utilization_critical: 0.89"),
        ("eviction_rate_warning: 5", "eviction_rate_warning: 4"),
        ("fidelity_warning: 0.75", "fidelity_warning: 0.76"),
        ("compression_ratio_min: 2.0", "compression_ratio_min: 2.5"),
        ("tool_bloat_warning: 0.30", "tool_bloat_warning: 0.31"),
    ):
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    settings = policy_of(changed)

    assert settings.zones.yellow_at == 0.55
    assert settings.layers[0].params["ttl_tool_result"] == 9
    assert settings.layers[1].params == {"over": 600}
    assert {each.strategy: each.at for each in settings.layers} == {
        "evict": 0.75,
        "summarize_tool_result": 0.76,
        "progressive": 0.86,
        "compact": 0.91,
        "delegate": 0.94,
        "rollover": 0.93,
    }
    assert settings.checkpoints.save_at == 0.80
    health = settings.health
    assert (health.utilization, health.eviction_rate, health.fidelity) == (0.89, 4, 0.76)
    assert (health.compression_ratio, health.tool_bloat) == (2.5, 0.31)


@pytest.mark.requirement("A0.137")
def test_each_key_of_the_sample_without_a_counterpart_has_a_note() -> None:
    made = imported(parse_document(PRINTED_BY_SHARES, name="legacy.yaml", env={}))

    assert sorted(note.split(": ")[1] for note in made.notes) == [
        "compression.compaction_utilization_threshold",
        "compression.notes_file",
        "cross_window.progress_file",
        "cross_window.state_file",
        "eviction.protected_types",
        "health_monitoring.metrics",
    ]


@pytest.mark.requirement("A4.1", "A4.5", "A4.11")
@pytest.mark.parametrize(
    "text", [PRINTED_BUCKETS, PRINTED_LAYERS, PRINTED_BUCKETS + PRINTED_LAYERS], ids=["buckets", "layers", "both"]
)
def test_the_samples_of_buckets_and_of_layers_are_the_preset(text: str) -> None:
    settings, preset = policy_of(text), preset_policies()["five-bucket-128k"]

    assert preset.summaries.prompt == preset.layers[3].params["prompt"]  # the default, which need not be said
    layers = (*preset.layers[:3], replace(preset.layers[3], params={"evict_pct": 70}))
    assert settings.layers == (layers if "layers:" in text else preset.layers)
    assert replace(settings, name=preset.name, window=None, layers=preset.layers) == preset
    assert settings.window == (128_000 if "total_window" in text else None)
    assert not imported(parse_document(text, name="legacy.yaml", env={})).notes


@pytest.mark.requirement("A4.1")
def test_every_value_of_the_samples_of_buckets_and_of_layers_arrives() -> None:
    changed = PRINTED_BUCKETS + PRINTED_LAYERS
    for old, new in (
        ("total_window: 128000", "total_window: 256000"),
        ("max_tokens: 48000", "max_tokens: 50000"),
        ('"truncate"', '"warn"'),
        ("headroom_tokens: 8000", "headroom_tokens: 20000"),
        ("at_pct: 85", "at_pct: 81"),
        ("keep_recent_turns: 8", "keep_recent_turns: 5"),
        ("evict_pct: 70", "evict_pct: 60"),
    ):
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    settings = policy_of(changed)

    assert (settings.window, settings.designed_for, settings.headroom) == (256_000, 256_000, 20_000)
    assert (settings.buckets["history"].cap, settings.buckets["tool_outputs"].on_overflow) == (50_000, "warn")
    assert settings.layers[2].at == 0.81
    assert settings.layers[2].params == {"turns": 5}
    assert settings.layers[3].params["evict_pct"] == 60


@pytest.mark.requirement("A0.137", "A4.1")
@pytest.mark.skipif(not SOURCES.is_dir(), reason="the documents that the samples are printed in are not here")
def test_the_samples_have_the_keys_and_values_that_are_printed() -> None:
    printed = {line.strip() for path in SOURCES.glob("*.txt") for line in path.read_text().splitlines()}
    samples = PRINTED_BY_SHARES + PRINTED_BUCKETS + PRINTED_LAYERS

    assert [line for line in samples.splitlines() if line.strip() not in {"", *printed}] == []


@pytest.mark.requirement("A0.130", "A0.137")
def test_thresholds_of_alerts_are_taken_over_and_unknown_ones_noted() -> None:
    alerts = "{utilization: 85, eviction_rate: 4, fidelity: 0.8, compression_ratio: 2.5, tool_result_bloat: 0.35}"
    health = policy_of(BY_SHARES[: BY_SHARES.index("health:")] + f"health:\n  alerts: {alerts}\n").health

    assert policy_of(BY_SHARES).health == preset_policies()["article-128k"].health
    assert (health.utilization, health.eviction_rate, health.fidelity) == (0.85, 4, 0.8)
    assert (health.compression_ratio, health.tool_bloat) == (2.5, 0.35)
    made = imported(parse_document(BY_SHARES + "  history_size: 100\n", name="legacy.yaml", env={}))
    assert [note for note in made.notes if "health.history_size" in note]


@pytest.mark.requirement("A0.137")
def test_what_has_no_counterpart_is_a_note_with_its_place(tmp_path: Path) -> None:
    ran = run(tmp_path, BY_SHARES, "--name", "agent")
    notes = [line for line in ran.stderr.replace(f"{tmp_path}/", "").splitlines() if "legacy.yaml" in line]

    assert [note.split(": ")[2] for note in notes] == [
        "compression.progressive_age_threshold",
        "compression.notes_file",
        "compression.compaction_utilization_threshold",
    ]
    assert notes[1].startswith("note: legacy.yaml:20: compression.notes_file: agent_notes.md: ")
    assert ran.exit_code == 0


@pytest.mark.requirement("A0.137")
def test_what_is_printed_is_a_section_of_a_configuration(tmp_path: Path) -> None:
    printed = run(tmp_path, BY_SHARES, "--name", "agent").stdout
    (tmp_path / "weir.yaml").write_text(printed + "default_policy: agent\n")

    config = load_config(tmp_path / "weir.yaml", env={})

    assert config.policy().name == "agent"
    assert next(iter(yaml.safe_load(printed)["policies"]["agent"])) == "preset"


@pytest.mark.requirement("A3.3", "A3.25")
def test_a_policy_by_pruning_becomes_its_preset() -> None:
    settings, preset = policy_of(BY_PRUNING), preset_policies()["baseagent-200k"]

    assert (settings.window, settings.reserve, settings.ingest.cap) == (200_000, 32_000, 2_500)
    assert settings.layers == preset.layers
    assert settings.ingest == preset.ingest


@pytest.mark.requirement("A3.25", "A3.13")
def test_the_two_limits_on_output_are_not_confused() -> None:
    changed = BY_PRUNING.replace("32000", "16000").replace("2500", "1000").replace("0.85", "0.70")
    settings = policy_of(f"context:\n{changed}".replace("\n", "\n  "))

    assert (settings.reserve, settings.ingest.cap) == (16_000, 1_000)
    assert [each.at for each in settings.layers] == [0, 0.70, 0.70]


@pytest.mark.requirement("A0.24")
def test_zones_called_by_their_end_start_the_next_one() -> None:
    settings = policy_of("yellow_threshold: 0.70\norange_threshold: 0.85\nred_threshold: 0.96\n")

    assert (settings.zones.orange_at, settings.zones.red_at, settings.zones.critical_at) == (0.70, 0.85, 0.96)


@pytest.mark.requirement("A0.49")
@pytest.mark.parametrize("name", ["fifo", "lru", "priority", "type_based", "hybrid"])
def test_the_scorer_is_the_one_that_was_named(name: str) -> None:
    text = f"eviction: {{policy: {name}, weights: {{recency: 1.0}}, ttl: {{memory: 9}}}}\n"

    evict = policy_of(text).layers[0]

    assert evict.params["scorer"] == name
    assert ("weight_recency" in evict.params) == (name in {"priority", "hybrid"})
    assert ("ttl_memory" in evict.params) == (name in {"type_based", "hybrid"})


@pytest.mark.requirement("A0.49", "A0.35")
def test_merging_what_is_alike_is_a_layer_of_its_own_in_front_of_priority() -> None:
    settings = policy_of("eviction: {policy: semantic_merge, similarity_threshold: 0.9}\n")

    assert [each.strategy for each in settings.layers[:2]] == ["semantic_merge", "evict"]
    assert settings.layers[0].params == {"threshold": 0.9}
    assert settings.layers[1].params["scorer"] == "priority"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_contxt_tokens: 1\n", "legacy.yaml:1: max_contxt_tokens: unknown key; did you mean max_context_tokens?"),
        ("a: 1\neviction:\n  polcy: lru\n", "legacy.yaml:3: eviction.polcy: unknown key; did you mean policy?"),
        ("compression:\n  cascade: {compacton: 0.9}\n", "legacy.yaml:2: compression.cascade.compacton: no step of a"),
        (
            "eviction:\n  layers: [{strategy: sliding-windo}]\n",
            "legacy.yaml:2: eviction.layers[0].strategy: no layer sliding-windo; did you mean sliding-window?",
        ),
        ("total_window: 1\nbudget: {soft_limit: 0.8}\n", "legacy.yaml: keys of both sets: total_window do not go with"),
        ("compression:\n  cascade: {0.9: compacton}\n", "legacy.yaml:2: compression.cascade.0.9: no step of a"),
        (
            "prune_protect: 1\npressure: {red: 0.9}\n",
            "legacy.yaml: keys of both sets: prune_protect do not go with pressure",
        ),
    ],
)
def test_a_key_that_nobody_knows_is_an_error(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        imported(parse_document(text, name="legacy.yaml", env={}))

    assert any(problem.startswith(said) for problem in raised.value.problems), raised.value.problems


def test_everything_that_is_wrong_is_said_at_once_and_only_close_names_are_guessed(tmp_path: Path) -> None:
    ran = run(tmp_path, "prune_protect: 1\npressure: {red: 0.9, blue: 2}\nevicton: {polcy: lru}\ncolour: red\n")

    said = ran.stderr.replace(f"{tmp_path}/", "").splitlines()
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert said == [
        "error: legacy.yaml: keys of both sets: prune_protect do not go with pressure",
        "error: legacy.yaml:2: pressure.blue: unknown key",
        "error: legacy.yaml:3: evicton.polcy: unknown key; did you mean policy?",
        "error: legacy.yaml:4: colour: unknown key",
    ]


def test_every_value_that_makes_no_policy_is_said(tmp_path: Path) -> None:
    ran = run(tmp_path, "max_context_tokens: many\npressure: {red: 1.5x}\nyellow_threshold: no\n")

    assert ran.exit_code == 1
    assert len(ran.stderr.splitlines()) == 3, ran.stderr


@pytest.mark.parametrize(
    "text", ["", "{}\n", "# nothing\n", "upstreams: {a: {b: 1}}\nlisten: {port: 1}\n", "limits: 5\n"]
)
def test_a_file_in_which_nothing_is_known_is_an_error(tmp_path: Path, text: str) -> None:
    ran = run(tmp_path, text)

    assert (ran.exit_code, ran.stdout) == (1, "")
    assert "legacy.yaml: nothing was recognised: " in ran.stderr.splitlines()[0]


def test_what_is_printed_says_where_it_goes_and_the_example_writes_a_file_of_its_own(tmp_path: Path) -> None:
    printed = run(tmp_path, BY_PRUNING).stdout
    shown = CliRunner().invoke(main, ["policy", "import", "--help"]).stdout

    assert printed.startswith("# ")
    assert "policies: already" in printed.splitlines()[0]
    assert "> agent.yaml" in shown
    assert ">>" not in shown


@pytest.mark.parametrize(
    "cascade",
    ["{compaction: 0.9}", "{compaction: {at: 0.9}}", "[{layer: compaction, at: 0.9}]", "{compaction_at: 0.9}"],
)
def test_a_cascade_is_read_in_every_form(cascade: str) -> None:
    settings = policy_of(f"compression: {{cascade: {cascade}}}\n")

    assert {each.strategy: each.at for each in settings.layers}["compact"] == 0.9


@pytest.mark.requirement("A0.24", "A3.25")
@pytest.mark.parametrize("key", [*BY_PRUNING.split()[::2], "max_context_tokens:", "orange_threshold:", "eviction:"])
def test_a_legacy_key_in_a_policy_names_the_new_one(tmp_path: Path, key: str) -> None:
    name = key.removesuffix(":")
    path = tmp_path / "weir.yaml"
    path.write_text(f"policies:\n  mine:\n    {name}: 1\n")

    with pytest.raises(ConfigError) as raised:
        load_config(path, env={})

    assert raised.value.problems == (f"{path}:3: policies.mine.{name}: unknown key; it is {LEGACY[name]} now",)


def test_legacy_names_are_no_keys_of_a_policy() -> None:
    named = {"pressure", "eviction", "compression", "budget", "yellow", "orange", "red", "critical"}

    assert named <= set(LEGACY)
    assert {"prune_protect", "notes_file", "system_prompt"} <= set(legacy_names())
