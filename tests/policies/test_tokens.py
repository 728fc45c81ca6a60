import random
from statistics import median

import pytest

from policies.limits import Calibration
from policies.tokens import CHARS2_5, HEURISTICS, CharCounter


def learn(*pairs: tuple[int, int]) -> Calibration:
    calibration = Calibration()
    for estimated, reported in pairs:
        calibration = calibration.observe(estimated, reported)
    return calibration


@pytest.mark.requirement("A2.15")
@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("ab", 0), ("abc", 1), ("hello world", 4), ("你好世界你好世界", 3), ("😀" * 10, 4)],
)
def test_two_and_a_half_characters_are_a_token_and_code_points_are_the_characters(text: str, tokens: int) -> None:
    assert CHARS2_5.count(text) == tokens


@pytest.mark.requirement("D10")
def test_presets_select_a_heuristic_by_name() -> None:
    assert dict(HEURISTICS) == {"chars4": CharCounter(1, 4), "chars2.5": CharCounter(2, 5)}


@pytest.mark.requirement("D10", "A2.22")
@pytest.mark.parametrize("truth", [0.8, 1.2])
@pytest.mark.parametrize("seed", range(20))
def test_after_five_responses_the_median_error_is_below_five_percent(truth: float, seed: int) -> None:
    chance = random.Random(seed)
    calibration = Calibration()
    errors = []
    for turn in range(25):
        estimated = chance.randint(500, 60_000)
        reported = round(estimated * truth * chance.uniform(0.96, 1.04)) + 80
        if turn >= 5:
            errors.append(abs(calibration.apply(estimated) / reported - 1))
        calibration = calibration.observe(estimated, reported)
    assert median(errors) <= 0.05


@pytest.mark.requirement("A0.93", "D10")
def test_the_margin_is_the_default_until_three_samples_agree() -> None:
    two = learn((1_000, 1_200), (1_500, 1_790))
    three = two.observe(2_000, 2_410)
    assert not two.is_calibrated
    assert two.margin(0.05) == 0.05
    assert three.is_calibrated
    assert three.margin(0.05) == 0.02


def test_samples_that_disagree_do_not_calibrate() -> None:
    assert not learn((1_000, 1_000), (1_000, 1_300), (1_000, 700)).is_calibrated


def test_characters_keep_the_default_margin() -> None:
    assert learn(*[(1_000, 1_200)] * 5).margin(0.05, exact=False) == 0.05


@pytest.mark.requirement("A0.16")
def test_a_response_far_from_its_prediction_is_a_drift_and_widens_the_margin() -> None:
    steady = learn(*[(1_000, 1_200)] * 5)
    near = steady.observe(1_000, 1_370)
    far = steady.observe(1_000, 1_400)
    assert (near.is_drifting, far.is_drifting) == (False, True)
    assert far.drift == pytest.approx(1_400 / 1_200 - 1)
    assert far.margin(0.05) == 0.05
    assert far.observe(1_000, 1_200).margin(0.05) == 0.02


@pytest.mark.parametrize(("ratio", "samples"), [(float("nan"), 5), (float("inf"), 5), (0.0, 5), (-1.0, 5), (1.2, 0)])
def test_a_stored_calibration_that_makes_no_sense_is_none(ratio: float, samples: int) -> None:
    assert Calibration.restore(ratio=ratio, samples=samples) == Calibration()
