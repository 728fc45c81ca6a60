"""Presets: the values of the requirement rows, and where each one first acts."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from policies.draft import CLEARED_MARKER, ConversationState
from policies.ledger import Action, Decision
from policies.limits import divide
from policies.messages import ToolCall, Transcript
from policies.pressure import raw_buckets
from policies.settings import ContextSettings, Layer, Mode
from policies.strategies.layers import STRATEGIES
from proxy.cli import main
from proxy.config.loading import load_config
from proxy.config.presets import about, policy_amounts, preset_documents, preset_policies
from tests.policies.play import Said, assistant, decide, result, talk, user, words

PRESETS = preset_policies()
ARTICLES = ("article-128k", "article-code-review", "article-research", "article-support")
BASEAGENTS = ("baseagent-200k", "baseagent-long", "baseagent-complex")
FIVE_BUCKETS = (
    "five-bucket-128k",
    "fb-support-128k",
    "fb-code-200k",
    "fb-research-256k",
    "fb-voice-32k",
    "fb-longrun-128k",
)
INTERCEPTORS = ("interceptor", "interceptor-support", "interceptor-summarize")
SEEDS = (*ARTICLES, *INTERCEPTORS, "turn-atomic", *BASEAGENTS, *FIVE_BUCKETS)


def layers_of(name: str) -> list[tuple[str, str, float | None]]:
    return [(layer.strategy, layer.scope, layer.at) for layer in PRESETS[name].layers]


def layer(name: str, strategy: str) -> Layer:
    return next(each for each in PRESETS[name].layers if each.strategy == strategy)


def shown(*arguments: str) -> dict[str, object]:
    ran = CliRunner().invoke(main, ["policy", "show", *arguments, "--json"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    values = json.loads(ran.stdout)
    assert isinstance(values, dict)
    return values


@pytest.mark.requirement("D5")
@pytest.mark.parametrize("name", SEEDS)
def test_a_seeds_preset_adds_nothing_of_ours(name: str) -> None:
    settings = PRESETS[name]

    assert settings.margin == 0
    assert settings.auto_scale is False
    assert settings.cold_at is None
    assert settings.mode is Mode.ENFORCE
    assert settings.summarizer is None
    assert (settings.rot_soft_tokens == 64_000) == (name in ARTICLES)
    assert settings.enforce == ("bucket" if name in FIVE_BUCKETS else "global")


@pytest.mark.requirement("A0.84", "A0.152")
def test_article_divides_128k_in_six() -> None:
    amounts = policy_amounts(PRESETS["article-128k"], 128_000)

    assert amounts["caps"] == {
        "system": 7_680,
        "tools": 5_120,
        "memory": 10_240,
        "history": 83_200,
        "tool_outputs": 15_360,
        "working": 6_400,
    }
    assert amounts["reserve"] == 6_400
    assert layer("article-128k", "evict").params == {"scorer": "hybrid", "weights": "article-yaml"}


@pytest.mark.requirement("A0.85")
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("article-128k", (0.06, 0.04, 0.65, 0.12, 0.08, 0.05)),
        ("article-code-review", (0.06, 0.05, 0.60, 0.18, 0.06, 0.05)),
        ("article-research", (0.05, 0.05, 0.55, 0.15, 0.15, 0.05)),
        ("article-support", (0.08, 0.03, 0.70, 0.08, 0.06, 0.05)),
    ],
)
def test_an_articles_shares_are_its_rows_and_sum_to_one(name: str, shares: tuple[float, ...]) -> None:
    order = ("system", "tools", "history", "tool_outputs", "memory", "working")
    settings = PRESETS[name]

    assert tuple(settings.buckets[bucket].cap for bucket in order) == shares
    assert sum(shares) == pytest.approx(1.0)
    assert settings.reserve == 0.05
    assert settings.buckets["summary"].charge_to == "history"


@pytest.mark.requirement("A0.143", "A0.137", "D19")
@pytest.mark.parametrize("name", ARTICLES)
def test_an_articles_cascade_is_its_row(name: str) -> None:
    assert layers_of(name) == [
        ("evict", "total", 0.75),
        ("summarize_tool_result", "total", 0.75),
        ("progressive", "total", 0.85),
        ("compact", "total", 0.92),
        ("delegate", "total", 0.95),
        ("rollover", "total", 0.93),
    ]
    assert layer(name, "evict").stop_at == 0.60
    assert layer(name, "summarize_tool_result").params == {"over": 500}


@pytest.mark.requirement("A0.89", "A0.99")
def test_articles_reserve_never_falls_under_its_floor() -> None:
    settings = PRESETS["article-128k"]

    assert divide(settings, window=128_000).reserve == 6_400
    assert divide(settings, window=60_000).reserve == 4_000
    assert divide(settings, window=8_000).reserve == 2_000


@pytest.mark.requirement("A1.7", "A1.8", "A1.10", "A1.13")
def test_interceptors_keep_the_newest_messages() -> None:
    assert {name: PRESETS[name].base for name in INTERCEPTORS} == dict.fromkeys(INTERCEPTORS, "max_input")
    assert [PRESETS[name].reserve_floor for name in INTERCEPTORS] == [0, 0, 0]
    assert [dict(PRESETS[name].layers[0].params) for name in INTERCEPTORS] == [
        {"messages": 20},
        {"messages": 30},
        {"keep_messages": 10, "prompt": "plain"},
    ]
    assert [PRESETS[name].layers[0].at for name in INTERCEPTORS] == [0.85, 0.80, 0.85]
    assert PRESETS["interceptor-support"].designed_for == 40_000
    assert all(divide(PRESETS[name], window=40_000).usable == 40_000 for name in INTERCEPTORS)


@pytest.mark.requirement("A2.5", "A2.15", "A2.27")
def test_turn_atomic_has_a_window_of_four_times_its_output() -> None:
    settings = PRESETS["turn-atomic"]

    assert (settings.window_per_output, settings.reserve, settings.reserve_mode) == (4, 32_000, "request")
    assert (settings.estimator, settings.image_tokens, settings.headroom) == ("chars2.5", 1_000, 0)
    assert layers_of("turn-atomic") == [("compact", "total", 0.0), ("drop_oldest", "total", 1.0)]
    assert settings.layers[0].params == {"prepared": True, "evict_pct": 50}
    assert settings.layers[1].params == {"fraction": 0.5}
    assert (settings.summaries.prepare_messages, settings.summaries.prepare_at) == (20, 0.75)
    assert divide(settings, window=128_000).usable == 96_000


@pytest.mark.requirement("A3.1", "A3.2", "A3.3", "A3.25", "A3.26", "A3.7", "A3.12", "A3.21")
def test_baseagents_numbers_are_exact() -> None:
    values = shown("baseagent-200k")
    settings = PRESETS["baseagent-200k"]

    assert values["tokens"] == {
        "window": 200_000,
        "reserve": 32_000,
        "headroom": 0,
        "usable": 168_000,
        "trigger": 142_799,
        "cascade": [
            {"layer": "ingest_cap", "scope": "total", "acts_at": 0},
            {"layer": "prune", "scope": "total", "acts_at": 142_800},
            {"layer": "compact", "scope": "total", "acts_at": 142_800},
        ],
    }
    assert layer("baseagent-200k", "prune").params == {
        "protect": 40_000,
        "minimum": 20_000,
        "skip_turns": 2,
        "straddle": "clear",
    }
    assert layer("baseagent-200k", "compact").params == {"keep_messages": 0, "prompt": "handoff"}
    assert (settings.ingest.cap, settings.ingest.method, settings.ingest.from_start) == (2_500, "middle_out", True)
    assert (settings.placeholder, CLEARED_MARKER) == ("marker", "[Old tool result content cleared]")
    assert (settings.zones.yellow_at, settings.zones.critical_at) == (0.85, 1.0)
    table = CliRunner().invoke(main, ["policy", "show", "baseagent-200k"]).stdout
    assert "142,800" in table
    assert "168,000" in table
    assert "143," not in table


@pytest.mark.requirement("A3.13")
@pytest.mark.parametrize(
    ("name", "at", "protect"), [("baseagent-long", 0.70, 30_000), ("baseagent-complex", 0.90, 60_000)]
)
def test_baseagents_variants_act_and_protect_as_their_rows_say(name: str, at: float, protect: int) -> None:
    assert (layer(name, "prune").at, layer(name, "compact").at) == (at, at)
    assert layer(name, "prune").params["protect"] == protect
    assert dataclasses.replace(PRESETS[name], name="", zones=ContextSettings().zones, layers=()) == dataclasses.replace(
        PRESETS["baseagent-200k"], name="", zones=ContextSettings().zones, layers=()
    )


@pytest.mark.requirement("A4.5", "A4.26", "A4.27", "A4.28", "A4.29", "A4.30", "A4.1")
@pytest.mark.parametrize(
    ("name", "kilo"),
    [
        ("five-bucket-128k", (8, 16, 48, 32, 16, 8)),
        ("fb-support-128k", (8, 12, 56, 32, 16, 4)),
        ("fb-code-200k", (10, 20, 80, 60, 24, 6)),
        ("fb-research-256k", (12, 16, 64, 120, 32, 12)),
        ("fb-voice-32k", (2, 4, 12, 8, 4, 2)),
        ("fb-longrun-128k", (8, 12, 40, 48, 16, 4)),
    ],
)
def test_five_buckets_fill_the_window_exactly(name: str, kilo: tuple[int, ...]) -> None:
    settings = PRESETS[name]
    buckets = [settings.buckets[bucket].cap for bucket in ("system", "tools", "history", "tool_outputs", "working")]

    assert (*buckets, settings.headroom) == tuple(1_000 * each for each in kilo)
    assert settings.reserve == settings.buckets["working"].cap
    assert settings.designed_for == 1_000 * sum(kilo)
    assert {name: bucket.on_overflow for name, bucket in settings.buckets.items() if bucket.cap is not None} == {
        "system": "reject",
        "tools": "prune-unused",
        "history": "summarize",
        "tool_outputs": "truncate",
        "working": "reject",
    }


@pytest.mark.requirement("A4.11", "A4.37", "A4.10")
def test_five_buckets_layers_are_shares_of_their_own_caps() -> None:
    assert layers_of("five-bucket-128k") == [
        ("ingest_cap", "total", 0),
        ("truncate_largest", "tool_outputs", 0.80),
        ("window", "history", 0.85),
        ("compact", "history", 0.95),
    ]
    assert layer("five-bucket-128k", "window").params == {"turns": 8}
    assert layer("five-bucket-128k", "compact").params["evict_pct"] == 70


@pytest.mark.requirement("A4.26", "A4.27", "A4.28", "A4.29")
def test_five_buckets_variants_order_their_layers_as_their_rows_say() -> None:
    assert layers_of("fb-support-128k")[1:] == [
        ("truncate_largest", "tool_outputs", 0.80),
        ("compact", "history", 0.85),
    ]
    names = [each.strategy for each in PRESETS["fb-code-200k"].layers]
    assert names.index("summarize_tool_result") < names.index("truncate_largest")
    assert layer("fb-code-200k", "truncate_largest").params == {"truncate_after_summary": True}
    names = [each.strategy for each in PRESETS["fb-research-256k"].layers]
    assert names.index("truncate_largest") < names.index("compact")
    assert layer("fb-voice-32k", "window").params == {"turns": 4}
    assert layer("fb-voice-32k", "compact").at == 0.70


@pytest.mark.requirement("A4.17", "A4.37")
def test_no_result_is_larger_than_the_bucket_for_results() -> None:
    assert PRESETS["fb-voice-32k"].ingest.cap == 25_000
    assert divide(PRESETS["fb-voice-32k"], window=32_000).caps["tool_outputs"] == 8_000


@pytest.mark.requirement("A4.22", "A0.11", "A4.32", "D22")
@pytest.mark.parametrize("name", FIVE_BUCKETS)
def test_amounts_scale_with_the_window_and_shares_stay(name: str) -> None:
    settings = PRESETS[name]
    assert settings.designed_for is not None
    whole = divide(settings, window=settings.designed_for)
    half = divide(settings, window=settings.designed_for // 2)

    assert half.caps == {bucket: cap // 2 for bucket, cap in whole.caps.items()}
    assert half.headroom == whole.headroom // 2
    assert half.reserve == max(min(4_000, half.window // 4), whole.reserve // 2)


@pytest.mark.requirement("D8")
def test_compaction_starts_where_each_seed_says() -> None:
    assert layer("article-128k", "compact").at == 0.92
    assert layer("baseagent-200k", "compact").at == 0.85
    assert layer("five-bucket-128k", "compact").at == 0.95


@pytest.mark.requirement("A1.4")
def test_audit_removes_nothing() -> None:
    audit = PRESETS["audit"]

    assert (audit.enforce, audit.layers, audit.ingest.from_start) == ("reject", (), False)


CHUNK = 400


def chat(total: int) -> list[Said]:
    """Turns of a question and an answer that come to about ``total`` tokens."""
    said: list[Said] = []
    for number in range(total // (2 * CHUNK)):
        said += [user(words(CHUNK - 4, f"ask{number}")), assistant(words(CHUNK - 4, f"say{number}"))]
    return said


def steps(total: int) -> list[Said]:
    """Steps whose results come to about ``total`` tokens."""
    said: list[Said] = []
    for number in range(total // CHUNK):
        call = ToolCall(f"call_{number}", "look", f'{{"n": {number}}}')
        said += [assistant("", call), result(words(CHUNK - 4, f"found{number}"), call.id)]
    return said


def of_total(total: int) -> Transcript:
    """A conversation of exactly ``total`` tokens, most of them old tool results, some of it talk."""
    most = [*steps(total * 8 // 10), *chat(12 * CHUNK), user(words(96, "now"))]
    filler = total - talk(user(words(1)), most).tokens + 1
    made = talk(user(words(filler, "task")), most)
    assert made.tokens == total
    return made


def in_bucket(transcript: Transcript, bucket: str) -> int:
    return raw_buckets(transcript)[bucket]


def of_bucket(bucket: str, total: int) -> Transcript:
    """A conversation with exactly ``total`` tokens in one bucket."""
    if bucket == "history":
        most = [*chat(total - 4 * CHUNK), user(words(96, "now"))]
        filler = total - in_bucket(talk(user(words(1)), most), bucket) + 1
        made = talk(user(words(filler, "task")), most)
    else:
        call, most = ToolCall("call_first", "look", "{}"), [*steps(total - 2 * CHUNK), user(words(96, "now"))]
        opening = [user(words(16)), assistant("", call)]
        filler = total - in_bucket(talk(opening, result(words(1), call.id), most), bucket) + 1
        made = talk(opening, result(words(filler), call.id), most)
    assert in_bucket(made, bucket) == total
    return made


def decided(name: str, transcript: Transcript) -> Decision:
    settings = PRESETS[name]
    budget = divide(settings, window=WINDOWS.get(name) or settings.designed_for or 128_000)
    return decide(transcript, budget=budget, settings=settings, known=ConversationState())


WINDOWS = {"interceptor": 200_000, "interceptor-summarize": 200_000}

ACTS = [
    ("article-128k", "total", 96_000, "evict"),
    ("article-code-review", "total", 96_000, "evict"),
    ("article-research", "total", 96_000, "evict"),
    ("article-support", "total", 96_000, "evict"),
    ("interceptor", "total", 170_000, "window"),
    ("interceptor-support", "total", 32_000, "window"),
    ("interceptor-summarize", "total", 170_000, "compact"),
    ("turn-atomic", "total", 96_001, "drop_oldest"),
    ("baseagent-200k", "total", 142_800, "prune"),
    ("baseagent-long", "total", 117_600, "prune"),
    ("baseagent-complex", "total", 151_200, "prune"),
    ("five-bucket-128k", "tool_outputs", 25_600, "truncate_largest"),
    ("five-bucket-128k", "history", 40_800, "window"),
    ("fb-support-128k", "tool_outputs", 25_600, "truncate_largest"),
    ("fb-support-128k", "history", 47_600, "compact"),
    ("fb-code-200k", "tool_outputs", 48_000, "truncate_largest"),
    ("fb-code-200k", "history", 68_000, "window"),
    ("fb-research-256k", "tool_outputs", 96_000, "truncate_largest"),
    ("fb-research-256k", "history", 54_400, "window"),
    ("fb-voice-32k", "tool_outputs", 6_400, "truncate_largest"),
    ("fb-longrun-128k", "tool_outputs", 38_400, "truncate_largest"),
    ("fb-longrun-128k", "history", 34_000, "window"),
    ("balanced", "total", 89_601, "evict"),
    ("advised", "total", 44_801, "evict"),
]


@pytest.mark.requirement("D2", "A3.2", "A1.7", "A4.11", "A4.29", "A2.12")
@pytest.mark.parametrize(("name", "scope", "at", "strategy"), ACTS)
def test_a_preset_acts_at_its_threshold_and_not_one_token_before(name: str, scope: str, at: int, strategy: str) -> None:
    made = of_total if scope == "total" else partial(of_bucket, scope)

    before, reached = decided(name, made(at - 1)), decided(name, made(at))

    assert (before.action, before.trail) == (Action.PASS, ())
    assert (strategy, scope) in {(report.layer, report.scope) for report in reached.trail}
    there_is = strategy in STRATEGIES
    assert not there_is or (reached.action is Action.EDIT and reached.after < reached.before)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("called", [None, "mine"])
def test_a_policy_printed_as_yaml_loads_to_the_same_settings(tmp_path: Path, name: str, called: str | None) -> None:
    ran = CliRunner().invoke(main, ["policy", "show", name, "--yaml"], catch_exceptions=False)
    text = ran.stdout if called is None else re.sub(rf"(?m)^  '?{name}'?:$", f"  {called}:", ran.stdout)
    (tmp_path / "weir.yaml").write_text(text)

    loaded = load_config(tmp_path / "weir.yaml", env={}).policies[called or name]

    assert loaded == dataclasses.replace(PRESETS[name], name=called or name)
    assert about(preset_documents()[name]) in " ".join(text.split())
