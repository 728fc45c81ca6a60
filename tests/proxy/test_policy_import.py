"""Two declarations of other tools become a policy."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from policies.settings import ContextSettings
from proxy.cli import main
from proxy.config.file import Document, parse_document
from proxy.config.importing import imported
from proxy.config.loading import load_config
from proxy.config.presets import policy_from, preset_documents, preset_policies

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

    assert (settings.layers[0].strategy, settings.layers[0].at, settings.layers[0].params) == (
        "reasoning",
        0.75,
        {"ttl": 2},
    )
    assert settings.layers[1].params == {
        "scorer": "hybrid",
        **{f"weight_{name}": weight for name, weight in weighed.items()},
        "ttl_tool_result": 8,
        "ttl_memory": 20,
    }
    assert settings.layers[2:] == preset.layers[1:]
    alike = replace(settings, name=preset.name, window=None, layers=(preset.layers[0], *settings.layers[2:]))
    assert alike == preset


@pytest.mark.requirement("A0.137", "A0.24")
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
    assert settings.layers[1].params["ttl_tool_result"] == 9
    assert settings.layers[2].params == {"over": 600}
    assert {each.strategy: each.at for each in settings.layers} == {
        "reasoning": 0.75,
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
        "compression.cascade.0.92",
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


@pytest.mark.requirement("A0.137")
def test_what_is_printed_is_a_section_of_a_configuration_and_notes_have_their_places(tmp_path: Path) -> None:
    ran = run(tmp_path, PRINTED_BY_SHARES, "--name", "agent")
    (tmp_path / "weir.yaml").write_text(ran.stdout + "default_policy: agent\n")
    notes = [line for line in ran.stderr.replace(f"{tmp_path}/", "").splitlines() if "legacy.yaml" in line]

    config = load_config(tmp_path / "weir.yaml", env={})

    assert config.policy().name == "agent"
    assert next(iter(yaml.safe_load(ran.stdout)["policies"]["agent"])) == "preset"
    assert "policies: already" in ran.stdout.splitlines()[0]
    assert notes[1].startswith("note: legacy.yaml:28: compression.cascade.0.92: holds, and not the 0.85")


@pytest.mark.requirement("A0.49")
@pytest.mark.parametrize("name", ["fifo", "lru", "priority", "type_based", "hybrid"])
def test_the_scorer_is_the_one_that_was_named(name: str) -> None:
    text = f"eviction: {{policy: {name}, weights: {{recency: 1.0}}, type_ttl: {{memory_injection: 9}}}}\n"

    evict = policy_of(text).layers[0]

    assert evict.params["scorer"] == name
    assert ("weight_recency" in evict.params) == (name in {"priority", "hybrid"})
    assert ("ttl_memory" in evict.params) == (name in {"type_based", "hybrid"})


@pytest.mark.requirement("A0.49", "A0.35")
def test_merging_what_is_alike_is_a_layer_of_its_own_in_front_of_priority() -> None:
    settings = policy_of("eviction: {policy: semantic_merge}\n")

    assert [each.strategy for each in settings.layers[:2]] == ["semantic_merge", "evict"]
    assert settings.layers[1].params["scorer"] == "priority"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour: red\nmax_context_tokens: 1\n", "error: legacy.yaml:1: colour: unknown key"),
        ("max_context_tokens: many\n", "error: window: should be a number"),
        ("compression:\n  cascade: {0.9: sideways}\n", "error: legacy.yaml: nothing was recognised"),
        ("prune_protect: 40000\n", "error: legacy.yaml: nothing was recognised"),
        ("eviction:\n  layers: [{strategy: sliding-windo}]\n", "sliding-windo"),
        ("# nothing\n", "error: legacy.yaml: nothing was recognised"),
    ],
)
def test_what_is_no_key_or_makes_no_policy_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    ran = run(tmp_path, text)

    assert (ran.exit_code, ran.stdout) == (1, "")
    assert said in ran.stderr.replace(f"{tmp_path}/", "")
