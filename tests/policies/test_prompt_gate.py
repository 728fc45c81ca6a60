"""No prompt changes without having been measured: the gate's file names every prompt as it is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.prompt_gate import GATE, KEPT, accepted, digests, main, measure, measure_evaluation, scores
from policies.quality.fidelity import ANSWER, JUDGE
from policies.quality.fidelity import PROMPTS as EVALUATING
from policies.summary.prompts import PROMPTS, Prompt

pytestmark = pytest.mark.slow

RENEW = "a prompt was changed: look at the scores, then run python -m benchmarks.prompt_gate --accept"


@pytest.mark.requirement("D20", "A0.125")
def test_every_prompt_is_the_one_that_was_accepted() -> None:
    assert digests() == {name: score.digest for name, score in accepted().items()}, RENEW
    assert set(digests()) == set(PROMPTS) | set(EVALUATING)


@pytest.mark.requirement("D20")
def test_the_accepted_scores_are_the_ones_that_come_out_and_are_good_enough() -> None:
    found = scores()

    assert found == accepted(), RENEW
    assert [text for name, score in found.items() for text in score.faults(name)] == []


def worse(prompt: Prompt, instruction: str) -> Prompt:
    return replace(prompt, version=prompt.version + 1, instruction=instruction)


@pytest.mark.requirement("D20")
@pytest.mark.parametrize("name", sorted(KEPT))
def test_a_prompt_that_forgets_the_exact_wording_is_below_the_gate(name: str) -> None:
    short = "Write a brief text about the material above, in at most {words} words."
    score = measure(worse(PROMPTS[name], short))

    assert score.digest != accepted()[name].digest
    assert list(score.faults(name))


@pytest.mark.requirement("D20", "A0.131")
@pytest.mark.parametrize(
    ("prompt", "forgotten"), [(JUDGE, "exactly one word: yes, no or unknown"), (ANSWER, "NOT STATED")]
)
def test_a_judge_without_strict_words_is_below_the_gate(prompt: Prompt, forgotten: str) -> None:
    changed = worse(prompt, prompt.instruction.replace(forgotten, "whatever you think"))

    assert measure_evaluation({prompt.name: changed}) < 1.0


@pytest.mark.requirement("D20")
def test_what_is_below_the_gate_is_refused_and_the_file_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate.json"
    bad = {"structured": worse(PROMPTS["structured"], "Write about it in at most {words} words.")}

    assert main(["--accept", "--gate", str(gate)], changed=bad) == 1
    assert not gate.exists()
    assert "structured: facts kept" in capsys.readouterr().err
    assert main(["--accept", "--gate", str(gate)]) == 0
    assert json.loads(gate.read_text()) == json.loads(GATE.read_text())
