"""What is wrong with a policy, what is probably not meant, and where that stands."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from policies.settings import ContextSettings
from proxy.cli import main
from proxy.config.lint import cautions, faults, shares_of
from proxy.config.loading import load_config
from proxy.config.presets import preset_policies


def lint(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["policy", "lint", *map(str, arguments)], catch_exceptions=False)


def linted(tmp_path: Path, text: str, *options: str) -> tuple[int, list[str]]:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    ran = lint(path, *options)
    return ran.exit_code, [line.replace(f"{tmp_path}/", "") for line in ran.stderr.splitlines()]


def warned(name: str) -> list[str]:
    return [text for _, text in cautions(preset_policies()[name])]


@pytest.mark.requirement("A4.31")
def test_balanced_and_advised_have_nothing_to_warn_of() -> None:
    assert warned("balanced") == warned("advised") == warned("off") == warned("audit") == []
    assert lint("balanced").exit_code == 0
    assert lint("balanced", "--strict").stdout == "balanced: ok\n"


@pytest.mark.requirement("A4.35", "A4.36")
@pytest.mark.parametrize("name", sorted(preset_policies()))
def test_every_preset_loads_whatever_is_to_be_said_of_it(name: str) -> None:
    assert list(faults(preset_policies()[name])) == []
    assert lint(name).exit_code == 0


@pytest.mark.requirement("D5", "A4.23", "A4.35")
def test_the_headroom_of_fb_code_warns_and_still_is_6000(tmp_path: Path) -> None:
    path = tmp_path / "weir.yaml"
    path.write_text("default_policy: fb-code-200k\n")

    config = load_config(path, env={})

    assert config.policy().headroom == 6_000
    said = "policies.fb-code-200k: headroom 3.0% < 5%: an estimate that is off by more overflows"
    assert said in config.warnings
    assert load_config(env={}).warnings == ()


@pytest.mark.requirement("A4.3", "A4.35")
def test_more_than_nine_tenths_planned_is_a_warning() -> None:
    text = "buckets take {} of the window, usually at most 90%: the rest is headroom"

    assert text.format("93.75%") in warned("five-bucket-128k")
    assert text.format("96.88%") in warned("fb-support-128k")
    assert text.format("97.00%") in warned("fb-code-200k")


@pytest.mark.requirement("A4.2", "A4.36")
@pytest.mark.parametrize(
    ("name", "outside"),
    [
        ("five-bucket-128k", []),
        ("fb-code-200k", []),
        ("fb-voice-32k", []),
        ("fb-support-128k", ["tools takes 9.38%", "history takes 43.75%"]),
        (
            "fb-research-256k",
            ["system takes 4.69%", "tools takes 6.25%", "history takes 25.00%", "tool_outputs takes 46.88%"],
        ),
        ("fb-longrun-128k", ["tools takes 9.38%", "tool_outputs takes 37.50%"]),
    ],
)
def test_shares_outside_their_usual_ranges_are_warnings(name: str, outside: list[str]) -> None:
    found = [text.partition(" of the window")[0] for text in warned(name) if " takes " in text]

    assert found == outside


FIVE = """
buckets: {system: {cap: 0.06}, tools: {cap: 0.12}, history: {cap: 0.40}, tool_outputs: {cap: 0.25}}
cascade: [{layer: prune}, {layer: compact}]
"""


@pytest.mark.requirement("A4.31")
@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        (FIVE.replace("tools: {cap: 0.12}, ", ""), "mine.yaml:2: buckets:", "tools have no cap"),
        ("cascade:\n  - {layer: window}\n", "mine.yaml:1: cascade:", "window is the only way to get smaller"),
        (
            "buckets:\n  tools: {cap: 0.1}\n  memory: {charge_to: system}\n",
            "mine.yaml:3: buckets.memory:",
            "no prefix is shared between users",
        ),
        ("\ningest:\n  cap: 200000\n", "mine.yaml:3: ingest.cap:", "a single result may have 200,000 tokens"),
        ("estimator: chars4\n", "mine.yaml:1: estimator:", "counts characters"),
    ],
)
def test_the_five_mistakes_are_warnings_with_their_place(tmp_path: Path, text: str, place: str, said: str) -> None:
    code, lines = linted(tmp_path, text)

    assert code == 0
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"warning: {place}")
    assert said in lines[0]
    assert linted(tmp_path, text, "--strict")[0] == 1
    assert linted(tmp_path, FIVE) == (0, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "cascade:\n  - {layer: dedupe}\n  - {layer: compact}\n  - {layer: evict}\n  - {layer: prune}\n",
            "mine.yaml:3: cascade[1].layer: compact may ask a model: evict, prune cost nothing and should go first",
        ),
        ("summaries: {role: system}\n", "mine.yaml:1: summaries.role: system: what stands in a summary may be taken"),
        ("when_full: reject\n", "cascade: no layer ever runs where when_full is reject"),
        ("buckets:\n  tools: {cap: 0.1, on_overflow: reject}\n", "mine.yaml:2: buckets.tools.on_overflow: reject only"),
        ("buckets:\n  tools: {cap: 0.1}\n  memory: {on_overflow: warn}\n", "mine.yaml:3: buckets.memory.on_overflow"),
        (
            "reserve: 0.1\nbuckets:\n  tools: {cap: 0.1}\n  working: {cap: 0.2}\n",
            "mine.yaml:4: buckets.working.cap: is 0.2, but reserve is 0.1",
        ),
        ("headroom: 0.02\n", "mine.yaml:1: headroom: headroom 2.0% < 5%"),
    ],
)
def test_what_is_probably_not_meant_is_a_warning_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    code, lines = linted(tmp_path, text)

    assert code == 0
    assert any(said in line for line in lines), lines


def layers(*lines: str, buckets: str = "") -> str:
    return f"buckets: {{{buckets}}}\ncascade:\n" + "".join(f"  - {{{line}}}\n" for line in lines)


CAPPED = "tool_outputs: {cap: 0.3}"


@pytest.mark.requirement("A0.98", "A4.34", "A0.49", "A0.152")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (layers("layer: evict", "layer: evct"), "mine.yaml:4: cascade[1].layer: no layer evct"),
        (layers("layer: evict, at: 0.6, stop_at: 0.7"), "mine.yaml:3: cascade[0].stop_at: is above at (0.6)"),
        (layers("layer: evict, at: 75"), "mine.yaml:3: cascade[0].at: should be a share from 0 to 1"),
        (layers("layer: prune, scope: tool_outputs"), "mine.yaml:3: cascade[0].scope: tool_outputs has no cap"),
        (layers("layer: prune, scope: results"), "mine.yaml:3: cascade[0].scope: no bucket results"),
        (
            layers("layer: prune, scope: memory", buckets=f"{CAPPED}, memory: {{charge_to: tool_outputs}}"),
            "mine.yaml:3: cascade[0].scope: nothing counts against memory",
        ),
        (layers("layer: evict, params: {scorer: fifoo}"), "cascade[0].params.scorer: no fifoo; did you mean fifo?"),
        (layers("layer: prune, params: {protct: 4}"), "cascade[0].params.protct: prune has no parameter protct; did"),
        (layers("layer: dedupe, params: {n: 4}"), "mine.yaml:3: cascade[0].params.n: dedupe has no parameters"),
        (layers("layer: evict, params: {weights: equal}"), "params.weights: evict has no parameter weights"),
        (layers("layer: evict, params: {scorer: fifo, ttl_memory: 3}"), "evict has no parameter ttl_memory"),
        (
            layers("layer: evict, params: {scorer: hybrid, weights: equally}"),
            "params.weights: no equally; did you mean equal?",
        ),
        (layers("layer: compact, params: {evict_pct: 170}"), "params.evict_pct: should be from 0 to 100"),
        (layers("layer: window, params: {turns: 0}"), "cascade[0].params.turns: should be from 1 on"),
        (layers("layer: window, params: {turns: 1.5}"), "cascade[0].params.turns: should be a whole number"),
        (layers("layer: window, params: {turns: lots}"), "cascade[0].params.turns: should be a number"),
        (layers("layer: prune, params: {straddle: cut}"), "cascade[0].params.straddle: no cut; known: keep, clear"),
        (layers("layer: custom, params: {path: no_such_module:f}"), "cascade[0].params.path: no_such_module:f: "),
        (layers("layer: custom, params: {path: json}"), "mine.yaml:3: cascade[0].params.path: json: "),
        ("estimator: words\n", "mine.yaml:1: estimator: no estimator words; there are: "),
        (layers("layer: custom"), "mine.yaml:3: cascade[0]: custom needs params: {path: module:function}"),
        ("buckets:\n  systm: {cap: 0.1}\n", "mine.yaml:2: buckets.systm: no bucket systm; did you mean system?"),
        ("buckets:\n  tools: {cap: 0}\n", "mine.yaml:2: buckets.tools.cap: should be above 0"),
        ("buckets:\n  tools: {cap: 12}\n", "mine.yaml:2: buckets.tools.cap: 12 are tokens; a share is written as 0.12"),
        ("buckets:\n  tools: {charge_to: tool}\n", "mine.yaml:2: buckets.tools.charge_to: no bucket tool; did"),
        ("buckets:\n  tools: {charge_to: tools}\n", "buckets.tools.charge_to: a bucket cannot be charged to itself"),
        (
            "buckets:\n  tools: {charge_to: memory}\n  memory: {charge_to: tools}\n",
            "buckets.tools.charge_to: memory is itself charged to tools: take charge_to from one of them",
        ),
        (
            "buckets:\n  tools: {on_overflow: reject}\n",
            "buckets.tools.on_overflow: reject never happens: the bucket has",
        ),
        ("buckets:\n  tools: {cap: 0.1, on_overflow: drop}\n", "mine.yaml:2: buckets.tools.on_overflow: should be"),
        (
            "buckets:\n  history: {cap: 0.5, on_overflow: prune-unused}\n",
            "mine.yaml:2: buckets.history.on_overflow: history cannot be made smaller by prune-unused",
        ),
        (
            "headroom: 0.1\nbuckets:\n  tools: {cap: 0.4}\n  history: {cap: 0.6}\n",
            "mine.yaml:2: buckets: tools 40.0%, history 60.0% and the headroom are 110.0% of the window",
        ),
        (
            "preset: five-bucket-256k\n",
            "mine.yaml:1: preset: no preset five-bucket-256k; did you mean five-bucket-128k?",
        ),
        (
            "buckets:\n  tools: {charge_to: memory}\n  memory: {charge_to: summary}\n  summary: {charge_to: history}\n",
            "buckets.tools.charge_to: memory is itself charged to summary: name history, or nothing",
        ),
        ("cold_at: 2\n", "mine.yaml:1: cold_at: should be a share above 0 to 1"),
        ("ingest: {share: 0}\n", "mine.yaml:1: ingest.share: should be a share above 0 to 1"),
        ("designed_for: 0\n", "mine.yaml:1: designed_for: should be above 0"),
    ],
)
def test_what_contradicts_itself_is_an_error_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    code, lines = linted(tmp_path, text)

    assert code == 2
    assert any(said in line for line in lines), lines
    assert all(line.startswith("error: ") for line in lines)


@pytest.mark.requirement("A4.22", "A4.34")
def test_what_was_inherited_is_blamed_on_the_presets_file(tmp_path: Path) -> None:
    code, lines = linted(tmp_path, "policies:\n  mine:\n    preset: fb-code-200k\n    headroom: 4000\n")
    assert code == 0
    assert (
        "warning: mine.yaml:4: policies.mine.headroom: headroom 2.0% < 5%: an estimate that is off by more overflows"
        in lines
    )
    assert any("fb-code-200k.yaml:" in line and "cascade[1].layer" in line for line in lines)


def test_a_configuration_is_linted_policy_by_policy(tmp_path: Path) -> None:
    text = "policies:\n  a: {headroom: 0.01}\n  b:\n    cascade: [{layer: evct}]\n  c:\n"

    code, lines = linted(tmp_path, text)

    assert code == 2
    assert next(line.partition(": no layer")[0] for line in lines) == "error: mine.yaml:4: policies.b.cascade[0].layer"
    assert "mine.yaml:2: policies.a.headroom" in lines[1]
    report = json.loads(lint(tmp_path / "mine.yaml", "--json").stdout)
    assert (report["ok"], len(report["errors"]), len(report["warnings"])) == (False, 1, 1)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert linted(tmp_path, "a: [1\n")[0] == 2
    assert lint(tmp_path / "missing.yaml").exit_code == 2


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "policies:\n", "policies: {}\n", "default_policy: audit\nwindow: 8192\n"]
)
def test_a_file_without_a_policy_says_that_nothing_was_found(tmp_path: Path, text: str) -> None:
    code, lines = linted(tmp_path, text)

    assert (code, linted(tmp_path, text, "--strict")[0]) == (0, 1)
    assert lines == ["warning: mine.yaml: nothing was found to lint: neither keys of a policy nor policies:"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("headroom: 1.5x\n", "mine.yaml:1: headroom: should be a number"),
        ("cascade: [{layer: evict, cap: 3}]\n", "mine.yaml:1: cascade[0].cap: unknown key"),
        ("colour: red\n", "mine.yaml:1: colour: unknown key; docs/policies.md and weir policy show name every key"),
        ("headrom: 0.1\n", "mine.yaml:1: headrom: unknown key; did you mean headroom?"),
    ],
)
def test_one_fault_is_one_short_line(tmp_path: Path, text: str, said: str) -> None:
    code, lines = linted(tmp_path, text)

    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].startswith(f"error: {said}")
    assert len(lines[0]) < 140


def test_what_a_circle_of_charges_is_told_leads_to_no_other_error(tmp_path: Path) -> None:
    circle = "buckets:\n  tools: {cap: 0.1, charge_to: memory}\n  memory: {charge_to: tools}\n"

    assert linted(tmp_path, circle)[0] == 2
    assert linted(tmp_path, circle.replace("memory: {charge_to: tools}", "memory: {cap: 0.1}"))[0] == 0


@pytest.mark.parametrize(
    ("cascade", "asks_first"),
    [
        ("[{layer: compact, at: 0.8}, {layer: evict, at: 0.9}]", True),
        ("[{layer: evict, at: 0.8}, {layer: compact, at: 0.9}]", False),
        ("[{layer: compact}, {layer: rollover}]", False),
        ("[{layer: compact, scope: history}, {layer: evict, scope: tool_outputs}]", False),
    ],
)
def test_a_layer_that_asks_a_model_before_a_free_one_is_a_warning(
    tmp_path: Path, cascade: str, *, asks_first: bool
) -> None:
    buckets = "buckets: {tools: {cap: 0.1}, history: {cap: 0.4}, tool_outputs: {cap: 0.3}}\n"

    _, lines = linted(tmp_path, f"{buckets}cascade: {cascade}\n")

    assert any("should go first" in line for line in lines) is asks_first, lines


def test_shares_of_amounts_in_tokens_need_a_window() -> None:
    five = preset_policies()["five-bucket-128k"]

    assert shares_of(five)["history"] == 0.375
    assert shares_of(ContextSettings(buckets=five.buckets, reserve=16_000)) == {}
