"""The growth of a conversation, request by request, against the numbers of the requirement rows."""

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.ledger import TokenSource, Trend
from policies.limits import Limits, TokenBudget, limits_for, tokens_at
from policies.pressure import PressureReading, advance, read_on, read_pressure, should_preempt, velocity_class, zone_of
from policies.settings import ContextSettings, Zones
from tests.profile import tried

WINDOW = 128_000
RED_AT = 0.90
COUNTS = (5_000, 8_000, 12_000, 18_000, 28_000, 45_000, 68_000, 90_000, 105_000, 118_000)
FEW = settings(max_examples=tried(25, 100), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def grow(before: Trend, raw: int, *, length: int | None = None, zone: str = "green", at: float = 0.0) -> Trend:
    """One more request of ``raw`` tokens, two messages longer than the last unless said otherwise."""
    longer = before.length + 2 if length is None else length
    return advance(before, raw=raw, length=longer, buckets={"history": raw}, zone=zone, at=at)


def after(counts: Iterable[int]) -> Trend:
    trend = Trend()
    for raw in counts:
        trend = grow(trend, raw)
    return trend


def limits(
    base: int = WINDOW, *, soft: int | None = 64_000, source: TokenSource | None = None, ratio: float = 1.0
) -> Limits:
    """The limits of a policy whose pressure is a share of ``base``."""
    settings = replace(ContextSettings(), rot_soft_tokens=soft)
    budget = TokenBudget(window=WINDOW, reserve=0, headroom=0, ratio=ratio, reported=source == "model_reported")
    red = tokens_at(min(max(base, 0), 10**9), RED_AT)
    return replace(limits_for(settings, budget), base=base, red=red)


def read(trend: Trend, tokens: int, base: int = WINDOW) -> PressureReading:
    return read_on(limits(base), trend, tokens)


# -- velocity --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.19")
def test_the_first_request_of_a_conversation_has_no_velocity() -> None:
    reading = read(after([5_000]), 5_000)
    assert reading.velocity_tokens_per_turn is None
    assert (reading.last_delta, reading.velocity_class, reading.turns_until_red) == (None, None, None)


@pytest.mark.requirement("A0.23")
@pytest.mark.parametrize(("raw", "length"), [(30_000, 20), (30_000, 4), (90_000, 4)])
def test_a_rewound_array_is_no_growth_but_the_start_of_the_next(raw: int, length: int) -> None:
    trend = grow(after([60_000, 70_000]), 80_000, length=10)
    rewound = grow(trend, raw, length=length)
    assert (rewound.raw, rewound.length) == (raw, length)
    assert (rewound.deltas, rewound.baseline) == (trend.deltas, trend.baseline)
    assert [(burn.tokens, burn.deltas) for burn in rewound.burn] == [(raw, trend.burn[0].deltas)]
    assert grow(rewound, raw + 500).deltas == (*trend.deltas, 500)


@pytest.mark.requirement("A0.12")
@pytest.mark.parametrize(
    ("growth", "expected"),
    [
        (0, "low"),
        (200, "low"),
        (500, "low"),
        (749, "low"),
        (750, "medium"),
        (1_000, "medium"),
        (3_000, "medium"),
        (3_999, "medium"),
        (4_000, "high"),
        (5_000, "high"),
        (20_000, "high"),
        (90_000, "high"),
    ],
)
def test_a_conversation_is_classified_by_its_velocity(growth: int, expected: str) -> None:
    trend = after([1_000 + growth * n for n in range(6)]) if growth else grow(after([1_000]), 1_000)
    assert velocity_class(trend.velocity) == expected
    assert read(trend, 1_000).velocity_class == expected


# -- spikes ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.13", "A0.21")
def test_the_baseline_is_an_exponential_mean_that_starts_with_the_first_growth() -> None:
    assert after([1_000, 3_000]).baseline == 2_000
    assert after([1_000, 3_000, 4_000]).baseline == pytest.approx(0.3 * 1_000 + 0.7 * 2_000)


# -- the reading -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.20", "A0.15", "A0.21")
def test_the_demo_goes_through_the_zones_and_never_spikes() -> None:
    trend, readings = Trend(), []
    for tokens in COUNTS:
        trend = grow(trend, tokens, zone=zone_of(tokens / WINDOW, Zones()))
        readings.append(read_on(limits(soft=None), trend, tokens))
    assert "".join(reading.zone[0] for reading in readings) == "ggggggyyor"
    assert [reading.utilization_pct for reading in readings] == [
        3.9, 6.2, 9.4, 14.1, 21.9, 35.2, 53.1, 70.3, 82.0, 92.2
    ]  # fmt: skip
    assert readings[6].velocity_tokens_per_turn == 12_000.0
    assert readings[6].turns_until_red == 3.9
    assert readings[-1].turns_until_red == 0.0
    assert not any(reading.spike for reading in readings)


@pytest.mark.requirement("A1.15", "A3.14", "A3.15")
@pytest.mark.parametrize(
    ("tokens", "base", "expected"),
    [
        (35_200, 40_000, 88.0),
        (35_000, 40_000, 87.5),
        (45_000, 168_000, 26.8),
        (125_000, 168_000, 74.4),
        (148_000, 168_000, 88.1),
        (0, 168_000, 0.0),
        (336_000, 168_000, 200.0),
        (1, 0, 100.0),
    ],
)
def test_percent_has_one_decimal(tokens: int, base: int, expected: float) -> None:
    assert read(Trend(), tokens, base).utilization_pct == expected


# -- zones -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.1")
def test_70000_tokens_of_200000_are_yellow_because_models_read_them_badly() -> None:
    pressure = read_pressure(70_000, 200_000, Zones(), fits=True, soft=64_000)
    reading = read(grow(Trend(), 70_000, zone=pressure.zone), 70_000, 200_000)
    assert (pressure.zone, pressure.status, reading.utilization_pct) == ("yellow", "preparing", 35.0)
    assert reading.rot_guard


# -- acting early ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.14")
def test_steady_growth_never_calls_for_action_before_its_time() -> None:
    reading = read(after([2_400, 14_400, 26_400]), 23_900, 32_000)
    assert not should_preempt(reading, orange_at=0.75, fits=28_000)


# -- the stored state ------------------------------------------------------------------------------------------------


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
@FEW
def test_any_text_is_read_as_a_state(text: str) -> None:
    assert isinstance(Trend.from_json(text), Trend)
