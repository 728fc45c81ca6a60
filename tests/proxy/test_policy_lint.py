"""What is wrong with a policy, what is probably not meant, and where that stands."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.config.lint import cautions
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


@pytest.mark.requirement("A4.22", "A4.34")
def test_what_was_inherited_is_blamed_on_the_presets_file(tmp_path: Path) -> None:
    code, lines = linted(tmp_path, "policies:\n  mine:\n    preset: fb-code-200k\n    headroom: 4000\n")
    assert code == 0
    assert (
        "warning: mine.yaml:4: policies.mine.headroom: headroom 2.0% < 5%: an estimate that is off by more overflows"
        in lines
    )
    assert any("fb-code-200k.yaml:" in line and "cascade[1].layer" in line for line in lines)


def test_what_a_circle_of_charges_is_told_leads_to_no_other_error(tmp_path: Path) -> None:
    circle = "buckets:\n  tools: {cap: 0.1, charge_to: memory}\n  memory: {charge_to: tools}\n"

    assert linted(tmp_path, circle)[0] == 2
    assert linted(tmp_path, circle.replace("memory: {charge_to: tools}", "memory: {cap: 0.1}"))[0] == 0
