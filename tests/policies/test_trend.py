"""The growth of a conversation, request by request, against the numbers of the requirement rows."""

import json
from collections.abc import Iterable
from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.ledger import Event, TokenSource, Trend
from policies.limits import Limits, TokenBudget, limits_for, tokens_at, zones_for
from policies.pressure import (
    PressureReading,
    advance,
    changes,
    lift,
    read_on,
    should_preempt,
    turns_remaining,
    velocity_class,
    zone_of,
)
from policies.settings import ContextSettings, TrendRules, Zones
from tests.profile import tried

RULES = TrendRules()
WINDOW = 128_000
RED_AT = 0.90
COUNTS = (5_000, 8_000, 12_000, 18_000, 28_000, 45_000, 68_000, 90_000, 105_000, 118_000)
FEW = settings(max_examples=tried(25, 100), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def grow(before: Trend, raw: int, *, length: int | None = None, zone: str = "green", at: float = 0.0) -> Trend:
    """One more request of ``raw`` tokens, two messages longer than the last unless said otherwise."""
    longer = before.length + 2 if length is None else length
    return advance(before, raw=raw, length=longer, buckets={"history": raw}, zone=zone, at=at, rules=RULES)


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


def told(before: Trend, reading: PressureReading, *, ratio: float = 1.0) -> list[Event]:
    return [*changes(before, reading, ratio=ratio)]


# -- velocity --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.19")
def test_the_first_request_of_a_conversation_has_no_velocity() -> None:
    reading = read(after([5_000]), 5_000)
    assert reading.velocity_tokens_per_turn is None
    assert (reading.last_delta, reading.velocity_class, reading.turns_until_red) == (None, None, None)


@pytest.mark.requirement("A0.22")
def test_the_second_request_has_the_single_growth_as_velocity() -> None:
    assert after([5_000, 8_000]).velocity == 3_000
    assert read(after([5_000, 8_000]), 8_000).turns_until_red == 35.7


@pytest.mark.requirement("A0.9", "A0.13")
def test_velocity_is_the_mean_of_the_newest_five_growths() -> None:
    trend = after([100_000, 100_000 + 90_000, *(190_000 + 1_000 * n for n in range(1, 6))])
    assert trend.deltas == (1_000,) * 5
    assert trend.velocity == 1_000


@pytest.mark.requirement("A0.9")
def test_a_single_result_of_20000_tokens_raises_velocity_by_a_fifth_of_it() -> None:
    steady = after([1_000 * n for n in range(1, 7)])
    jumped = grow(steady, 6_000 + 1_000 + 20_000)
    assert [steady.velocity, jumped.velocity] == [1_000, 1_000 + 20_000 / 5]
    assert grow(steady, 6_000 + 20_000).deltas[-1] == 20_000


@pytest.mark.requirement("A0.23")
def test_what_management_removes_does_not_slow_the_velocity_down() -> None:
    trend = after([60_000, 70_000, 80_000])
    reading = read(grow(trend, 90_000), tokens=30_000)
    assert reading.velocity_tokens_per_turn == 10_000.0
    assert reading.turns_until_red == 8.5


@pytest.mark.requirement("A0.23")
@pytest.mark.parametrize(("raw", "length"), [(30_000, 20), (30_000, 4), (90_000, 4)])
def test_a_rewound_array_is_no_growth_but_the_start_of_the_next(raw: int, length: int) -> None:
    trend = grow(after([60_000, 70_000]), 80_000, length=10)
    rewound = grow(trend, raw, length=length)
    assert (rewound.raw, rewound.length) == (raw, length)
    assert (rewound.deltas, rewound.baseline) == (trend.deltas, trend.baseline)
    assert [(burn.tokens, burn.deltas) for burn in rewound.burn] == [(raw, trend.burn[0].deltas)]
    assert grow(rewound, raw + 500).deltas == (*trend.deltas, 500)


def test_the_same_array_again_changes_nothing_but_the_time() -> None:
    trend = grow(after([1_000, 3_000]), 5_000, at=7.0)
    again = grow(trend, 5_000, length=trend.length, at=9.0)
    assert again.at == 9.0
    assert again == Trend(trend.raw, trend.length, trend.deltas, trend.baseline, trend.zone, 9.0, trend.burn)


def test_a_longer_array_of_the_same_tokens_grew_by_nothing() -> None:
    trend = grow(after([1_000]), 1_000)
    assert trend.deltas == (0,)
    assert read(trend, 1_000).turns_until_red is None


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


@pytest.mark.requirement("A0.21")
def test_a_jump_of_15000_over_growth_of_2000_is_one_spike() -> None:
    counts = [2_000 * n for n in range(1, 8)]
    counts += [counts[-1] + 15_000, counts[-1] + 17_000, counts[-1] + 19_000]
    trend, fired = Trend(), []
    for raw in counts:
        before, trend = trend, grow(trend, raw)
        fired += [e for e in told(before, read(trend, raw)) if e.kind == "velocity_spike"]
    spike = Event("velocity_spike", {"velocity": 4_600.0, "baseline": 2_000.0, "last_delta": 15_000})
    assert fired == [spike]


@pytest.mark.requirement("A0.21")
@pytest.mark.parametrize(("growth", "spike"), [(6_000, False), (6_001, True)])
def test_a_spike_is_more_than_three_times_the_baseline(growth: int, spike: bool) -> None:
    trend = grow(after([1_000, 3_000]), 3_000 + growth)
    assert trend.deltas[-1] == growth
    assert trend.spike is spike


@pytest.mark.requirement("A0.13", "A0.21")
def test_the_baseline_is_an_exponential_mean_that_starts_with_the_first_growth() -> None:
    assert after([1_000, 3_000]).baseline == 2_000
    assert after([1_000, 3_000, 4_000]).baseline == pytest.approx(0.3 * 1_000 + 0.7 * 2_000)


@pytest.mark.requirement("A0.13")
def test_a_policy_has_its_own_window_and_multiplier() -> None:
    rules = TrendRules(window=2, spike_multiplier=1.2)
    trend = Trend()
    for n, raw in enumerate([1_000, 2_000, 3_000, 4_600]):
        trend = advance(trend, raw=raw, length=n, buckets={"history": raw}, zone="green", at=0.0, rules=rules)
    assert (trend.deltas, trend.baseline, trend.spike) == ((1_000, 1_600), pytest.approx(1_180), True)


def test_the_numbers_of_a_policy_are_those_of_the_table() -> None:
    numbers = [getattr(RULES, field.name) for field in fields(RULES)]
    assert numbers == [5, 3.0]


@pytest.mark.requirement("A0.18", "A0.21")
def test_a_spike_is_reported_with_the_baseline_that_it_was_compared_with() -> None:
    before = after([1_000, 3_000, 4_000])
    [event] = told(before, read(grow(before, 34_000), 34_000))
    assert event.facts == {"velocity": 11_000.0, "baseline": 1_700.0, "last_delta": 30_000}


def test_the_first_growth_is_no_spike_because_nothing_went_before_it() -> None:
    assert not after([100, 90_000]).spike


def test_a_retry_of_a_request_that_spiked_does_not_spike_again() -> None:
    spiked = after([1_000, 3_000, 40_000])
    again = grow(spiked, 40_000, length=spiked.length)
    assert spiked.spike
    assert told(spiked, read(again, 40_000)) == []


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


@pytest.mark.requirement("A0.15")
@pytest.mark.parametrize(
    ("tokens", "speed", "expected"),
    [
        (68_000, 12_000.0, 3.9),
        (68_000, None, None),
        (68_000, 0.0, None),
        (68_000, -5_000.0, None),
        (115_199, 1.0, 1.0),
        (115_200, 1.0, 0.0),
        (118_000, 12_000.0, 0.0),
        (118_000, 0.0, None),
    ],
)
def test_turns_until_red_are_what_is_left_over_the_velocity(
    tokens: int, speed: float | None, expected: float | None
) -> None:
    left = turns_remaining(tokens, tokens_at(WINDOW, RED_AT), speed)
    assert (None if left is None else round(left, 1)) == expected


@pytest.mark.requirement("A0.10")
@pytest.mark.parametrize(
    ("tokens", "zone"),
    [
        (4_999, "green"),
        (5_000, "yellow"),
        (7_499, "yellow"),
        (7_500, "orange"),
        (8_999, "orange"),
        (9_000, "red"),
        (9_499, "red"),
        (9_500, "critical"),
    ],
)
def test_the_reading_has_the_zone_whose_start_is_reached(tokens: int, zone: str) -> None:
    trend = grow(Trend(), tokens, zone=zone_of(tokens / 10_000, Zones()))
    reading = read(trend, tokens, 10_000)
    assert (reading.zone, reading.utilization_pct) == (zone, round(tokens / 100, 1))


@pytest.mark.requirement("A3.2")
@pytest.mark.parametrize(
    ("tokens", "zone"), [(142_799, "green"), (142_800, "red"), (167_999, "red"), (168_000, "critical")]
)
def test_a_preset_of_three_zones_warns_at_85_percent_of_usable_and_overflows_above_it(tokens: int, zone: str) -> None:
    zones = Zones(yellow_at=0.85, orange_at=0.85, red_at=0.85, critical_at=1.0)
    assert zone_of(tokens / 168_000, zones) == zone


@pytest.mark.requirement("A3.26")
def test_85_percent_of_168000_is_142800() -> None:
    assert f"{tokens_at(168_000, 0.85):,}" == "142,800"
    assert tokens_at(100, 0.29) == 29  # where 0.29 * 100 is 28.999999999999996


@pytest.mark.requirement("A0.17")
@pytest.mark.parametrize("source", ["model_reported", "client_estimated"])
def test_the_reading_has_the_seven_fields_and_says_whose_count_it_is(source: TokenSource) -> None:
    reading = read_on(limits(source=source), after([60_001, 68_000]), 68_000)
    assert [*reading._fields[:7]] == [
        "current_tokens",
        "max_tokens",
        "utilization_pct",
        "zone",
        "velocity_tokens_per_turn",
        "turns_until_red",
        "source",
    ]
    assert (reading.current_tokens, reading.max_tokens, reading.utilization_pct) == (68_000, 128_000, 53.1)
    assert (reading.velocity_tokens_per_turn, reading.turns_until_red, reading.source) == (7_999.0, 5.9, source)


def test_growth_is_reported_in_the_calibrated_tokens_of_the_reading() -> None:
    before = after([1_000, 3_000])
    reading = read_on(limits(100_000, ratio=1.2), grow(before, 13_000), 15_600)
    assert (reading.velocity_tokens_per_turn, reading.last_delta) == (7_200.0, 12_000)
    assert reading.turns_until_red == 10.3
    [spike] = told(before, reading, ratio=1.2)
    assert spike.facts == {"velocity": 7_200.0, "baseline": 2_400.0, "last_delta": 12_000}


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
    zone = zone_of(70_000 / 200_000, Zones())
    reading = read(grow(Trend(), 70_000, zone=zone), 70_000, 200_000)
    assert (zone, reading.utilization_pct) == ("green", 35.0)
    assert (reading.zone, reading.rot_guard) == ("yellow", True)


@pytest.mark.requirement("A0.1")
@pytest.mark.parametrize(
    ("zone", "tokens", "soft", "expected"),
    [
        ("green", 64_000, 64_000, ("green", False)),
        ("green", 64_001, 64_000, ("yellow", True)),
        ("yellow", 64_001, 64_000, ("yellow", True)),
        ("red", 64_001, 64_000, ("red", True)),
        ("critical", 1, 64_000, ("critical", False)),
        ("green", 11, 10, ("yellow", True)),
        ("green", 900_000, None, ("green", False)),
    ],
)
def test_the_rot_guard_lifts_green_and_leaves_the_rest(
    zone: str, tokens: int, soft: int | None, expected: tuple[str, bool]
) -> None:
    assert lift(zone, tokens, soft) == expected


@pytest.mark.requirement("D22")
@pytest.mark.parametrize(("level", "zone"), [(0.6499, "yellow"), (0.65, "orange")])
def test_a_window_of_32000_is_orange_from_65_percent(level: float, zone: str) -> None:
    assert zone_of(level, zones_for(replace(ContextSettings(), auto_scale=True), 32_000)) == zone


@pytest.mark.requirement("D22", "A0.11")
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (4_096, (0.40, 0.65, 0.85, 0.92)),
        (32_000, (0.40, 0.65, 0.85, 0.92)),
        (32_768, (0.40, 0.65, 0.85, 0.92)),
        (32_769, None),
        (128_000, None),
        (199_999, None),
        (200_000, (0.60, 0.80, 0.90, 0.95)),
        (1_000_000, (0.60, 0.80, 0.90, 0.95)),
    ],
)
def test_zones_start_earlier_in_small_windows_and_later_in_large_ones(
    window: int, expected: tuple[float, ...] | None
) -> None:
    own = Zones(yellow_at=0.1, orange_at=0.2, red_at=0.3, critical_at=0.4)
    found = zones_for(replace(ContextSettings(), auto_scale=True, zones=own), window)
    starts = (found.yellow_at, found.orange_at, found.red_at, found.critical_at)
    assert (None if found == own else starts) == expected


@pytest.mark.requirement("A0.11")
def test_a_large_window_does_not_loosen_red() -> None:
    large = zones_for(replace(ContextSettings(), auto_scale=True), 200_000)
    assert (large.red_at, large.critical_at) == (Zones().red_at, Zones().critical_at)


# -- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.18")
def test_a_change_of_zone_is_one_event_and_the_same_zone_is_none() -> None:
    trend, found = Trend(), []
    for tokens in (40, 60, 70, 76, 74, 60, 96, 97):
        before = trend
        trend = grow(trend, tokens, zone=zone_of(tokens / 100, Zones()))
        found.append(
            [
                (e.facts["old"], e.facts["new"])
                for e in told(before, read(trend, tokens, 100))
                if e.kind == "zone_change"
            ]
        )
    assert found == [
        [],
        [("green", "yellow")],
        [],
        [("yellow", "orange")],
        [("orange", "yellow")],
        [],
        [("yellow", "critical")],
        [],
    ]


@pytest.mark.requirement("A0.18", "A0.1")
def test_a_zone_lifted_by_the_rot_guard_changes_once() -> None:
    found: list[Event] = []
    trend = Trend()
    for tokens in (60_000, 70_000, 75_000, 76_000):
        before = trend
        trend = grow(trend, tokens)._replace(zone=lift("green", tokens, 64_000)[0])
        found += told(before, read(trend, tokens, 1_000_000))
    assert found == [Event("zone_change", {"old": "green", "new": "yellow"})]


def test_a_zone_that_is_known_only_after_management_replaces_the_first_one() -> None:
    trend = after([1_000, 3_000, 40_000])
    assert trend._replace(zone="red") == grow(after([1_000, 3_000]), 40_000, zone="red")


def test_a_retry_that_lands_in_another_zone_is_a_transition_too() -> None:
    trend = after([1_000, 3_000])
    again = grow(trend, 3_000, length=trend.length, zone="orange")
    third = grow(again, 3_000, length=trend.length, zone="orange")
    assert [e.kind for e in told(trend, read(again, 3_000))] == ["zone_change"]
    assert told(again, read(third, 3_000)) == []


# -- acting early ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.14")
def test_a_spike_of_12000_at_45_percent_of_32000_calls_for_action_at_once() -> None:
    reading = read(after([400, 2_400, 14_400]), 14_400, 32_000)
    assert (reading.utilization_pct, reading.last_delta, reading.spike) == (45.0, 12_000, True)
    assert should_preempt(reading, orange_at=0.75, fits=28_000)


@pytest.mark.requirement("A0.14")
@pytest.mark.parametrize(("tokens", "early"), [(11_999, False), (12_000, True)])
def test_a_spike_calls_for_action_only_if_as_much_again_reaches_orange(tokens: int, early: bool) -> None:
    reading = read(after([400, 2_400, 14_400]), tokens, 32_000)
    assert should_preempt(reading, orange_at=0.75, fits=28_000) is early


@pytest.mark.requirement("A0.14")
@pytest.mark.parametrize(("fits", "early"), [(38_399, True), (38_400, False)])
def test_a_spike_after_which_two_more_would_fit_waits_for_its_time(fits: int, early: bool) -> None:
    reading = read(after([400, 2_400, 14_400]), 14_400, 32_000)
    assert should_preempt(reading, orange_at=0.75, fits=fits) is early


@pytest.mark.requirement("A0.14")
def test_steady_growth_never_calls_for_action_before_its_time() -> None:
    reading = read(after([2_400, 14_400, 26_400]), 23_900, 32_000)
    assert not should_preempt(reading, orange_at=0.75, fits=28_000)


# -- the stored state ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.25")
def test_a_restart_between_requests_keeps_velocity_baseline_and_zone() -> None:
    before = grow(after(COUNTS[:6]), COUNTS[6], zone="yellow", at=1_700_000_000.25)
    restored = Trend.from_json(before.to_json())
    assert restored == before
    assert grow(restored, COUNTS[7]) == grow(before, COUNTS[7])
    assert restored.velocity == 12_000


@pytest.mark.requirement("A0.25")
def test_the_stored_state_stays_small_however_long_the_conversation() -> None:
    trend = Trend()
    names = ("system", "tools", "memory", "summary", "history", "tool_outputs")
    for n in range(500):
        buckets = dict.fromkeys(names, 17_000 * n)
        trend = advance(
            trend, raw=102_000 * n, length=n, buckets=buckets, zone="critical", at=1_700_000_000.123456 + n, rules=RULES
        )
    text = trend.to_json()
    assert text.isascii()
    assert len(text) <= 1_500
    assert all(len(burn.deltas) == 20 for burn in trend.burn)
    assert len(trend.deltas) == 5


STATE = json.loads(after([1_000, 3_000]).to_json())


@pytest.mark.requirement("A0.25")
@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "null",
        "[]",
        "{}",
        "not json",
        "[" * 100_000,
        "9" * 10_000,
        json.dumps(STATE | {"v": 2}),
        json.dumps(STATE | {"raw": "1000"}),
        json.dumps(STATE | {"raw": -1}),
        json.dumps(STATE | {"raw": True}),
        json.dumps(STATE | {"length": None}),
        json.dumps(STATE | {"length": 10**400}),
        json.dumps(STATE | {"deltas": [1.5]}),
        json.dumps(STATE | {"deltas": None}),
        json.dumps(STATE | {"baseline": float("nan")}),
        json.dumps(STATE | {"baseline": 10**400}),
        json.dumps(STATE | {"at": "now"}),
        json.dumps(STATE | {"zone": 1}),
        json.dumps(STATE | {"burn": []}),
        json.dumps(STATE | {"burn": {"history": []}}),
        json.dumps(STATE | {"burn": {"history": [1, "2"]}}),
        json.dumps({key: value for key, value in STATE.items() if key != "spike"}),
    ],
)
def test_a_state_that_makes_no_sense_is_a_fresh_one(text: str | None) -> None:
    assert Trend.from_json(text) == Trend()
    assert Trend.from_json(json.dumps(STATE)) != Trend()


def test_counts_outside_of_any_window_are_taken_as_the_nearest_possible_one() -> None:
    trend = advance(Trend(), raw=-5, length=-1, buckets={"history": -5}, zone="green", at=0.0, rules=RULES)
    assert (trend.raw, trend.length, trend.burn[0].tokens) == (0, 0, 0)
    huge = grow(trend, 10**400)
    assert (huge.raw, huge.deltas) == (1_000_000_000, (1_000_000_000,))


ANY = st.one_of(st.integers(), st.integers(-5, 300_000), st.integers(10**300, 10**320))
REQUESTS = st.lists(
    st.tuples(ANY, st.one_of(ANY, st.integers(0, 9)), st.dictionaries(st.text(max_size=4), ANY, max_size=4)),
    max_size=30,
)


@given(REQUESTS, st.floats(allow_nan=False, allow_infinity=False), st.integers(-1, 30), ANY, ANY)
@FEW
def test_any_counts_give_a_state_that_survives_a_restart_and_can_be_read(
    requests: list[tuple[int, int, dict[str, int]]], at: float, window: int, tokens: int, base: int
) -> None:
    rules = TrendRules(window=window)
    stays = restored = Trend()
    for raw, length, buckets in requests:
        before = stays
        stays = advance(stays, raw=raw, length=length, buckets=buckets, zone="green", at=at, rules=rules)
        restored = advance(
            Trend.from_json(restored.to_json()),
            raw=raw,
            length=length,
            buckets=dict(buckets),
            zone="green",
            at=at,
            rules=rules,
        )
        reading = read(stays, tokens, base)
        assert reading == read(restored, tokens, base)
        assert reading.spike == any(e.kind == "velocity_spike" for e in told(before, reading))
        assert should_preempt(reading, orange_at=0.75, fits=base) in (True, False)
    assert restored == stays
    assert Trend.from_json(stays.to_json()) == stays
    assert len(stays.deltas) <= max(1, window)
    assert all(delta >= 0 for delta in stays.deltas)


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
@FEW
def test_any_text_is_read_as_a_state(text: str) -> None:
    assert isinstance(Trend.from_json(text), Trend)
