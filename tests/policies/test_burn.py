"""How fast buckets fill, and the report about them, against the numbers of the requirement rows."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.ledger import Burn
from policies.pressure import BucketLine, BucketReport, bucket_report, fold, turns_remaining, urgency
from tests.profile import tried

NAMES = ("system", "tools", "memory", "summary", "history", "tool_outputs")


def grown(requests: Sequence[Mapping[str, int]]) -> tuple[Burn, ...]:
    burns: tuple[Burn, ...] = ()
    for buckets in requests:
        burns = fold(burns, buckets)
    return burns


def line(report: BucketReport, bucket: str) -> BucketLine:
    return next(line for line in report.buckets if line.bucket == bucket)


# -- growth by bucket ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.97")
def test_each_bucket_has_its_own_rate_from_the_second_request_on() -> None:
    first = grown([{"history": 100, "tool_outputs": 0}])
    assert [burn.rate for burn in first] == [None, None]
    second = fold(first, {"history": 300, "tool_outputs": 5_000})
    assert {burn.bucket: burn.rate for burn in second} == {"history": 200, "tool_outputs": 5_000}


@pytest.mark.requirement("A0.91")
def test_the_21st_growth_drops_the_first() -> None:
    sizes = [0]
    for growth in range(1, 22):
        sizes.append(sizes[-1] + growth)
    full = grown([{"history": size} for size in sizes[:21]])
    assert full[0].deltas == tuple(range(1, 21))
    assert grown([{"history": size} for size in sizes])[0].deltas == tuple(range(2, 22))


@pytest.mark.requirement("A0.90")
def test_only_growth_is_counted_a_request_without_any_included() -> None:
    [burn] = grown([{"history": size} for size in (1_000, 2_000, 2_000, 500, 1_500)])
    assert burn == Burn("history", 1_500, (1_000, 0, 1_000))
    assert burn.rate == pytest.approx(2_000 / 3)


def test_a_request_that_does_not_continue_the_last_one_gives_its_tokens_and_no_growth() -> None:
    burns = grown([{"history": 1_000}, {"history": 1_500}])
    rewound = fold(burns, {"history": 9_000, "memory": 50}, grew=False)
    assert rewound == (Burn("history", 9_000, (500,)), Burn("memory", 50))


def test_a_bucket_that_appears_later_grew_from_nothing_and_one_that_is_missing_is_empty() -> None:
    burns = grown([{"history": 1_000}, {"history": 1_000, "memory": 700}, {"memory": 900}])
    assert burns == (Burn("history", 0, (0,)), Burn("memory", 900, (700, 200)))


# -- what is left ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.90")
@pytest.mark.parametrize(
    ("used", "cap", "rate", "expected"),
    [
        (75_700, 83_200, 3_000.0, 2.5),
        (0, 100, 10.0, 10.0),
        (100, 100, 10.0, 0.0),
        (150, 100, 10.0, 0.0),
        (50, 100, 0.0, None),
        (50, 100, None, None),
    ],
)
def test_turns_remaining_are_what_is_left_over_the_rate(
    used: int, cap: int, rate: float | None, expected: float | None
) -> None:
    assert turns_remaining(used, cap, rate) == expected


@pytest.mark.requirement("A0.90")
@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (0.0, "critical"),
        (2.5, "critical"),
        (2.999, "critical"),
        (3.0, "warning"),
        (9.999, "warning"),
        (10.0, "normal"),
        (None, "normal"),
    ],
)
def test_urgency_is_critical_under_three_turns_and_warning_under_ten(turns: float | None, expected: str) -> None:
    assert urgency(turns) == expected


# -- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.90", "A0.97")
def test_history_with_two_and_a_half_turns_left_is_critical() -> None:
    sizes = ((69_700, 60), (72_700, 80), (75_700, 100))
    burns = grown([{"history": history, "memory": memory} for history, memory in sizes])
    report = bucket_report(
        {"history": 75_700, "memory": 100}, {"history": 83_200, "memory": 10_240}, burns, limit=121_600
    )
    assert (line(report, "history").turns_remaining, line(report, "history").urgency) == (2.5, "critical")
    assert (line(report, "memory").turns_remaining, line(report, "memory").urgency) == (507.0, "normal")
    assert report.critical == ("history",)


@pytest.mark.requirement("A0.90")
def test_urgency_is_taken_before_rounding() -> None:
    report = bucket_report({"history": 10_000}, {"history": 12_999}, (Burn("history", 0, (1_000,)),), limit=20_000)
    assert (line(report, "history").turns_remaining, line(report, "history").urgency) == (3.0, "critical")


@pytest.mark.requirement("A0.92", "A0.91")
def test_the_report_has_every_field_with_its_rounding() -> None:
    burns = (Burn("history", 0, (1_000, 2_000)), Burn("tool_outputs", 0, (500, 0)), Burn("system", 0, ()))
    used = {"system": 8_000, "history": 41_600, "tool_outputs": 10_000, "summary": 400}
    caps = {"system": 7_680, "history": 83_200, "tool_outputs": 15_360}
    report = bucket_report(used, caps, burns, limit=121_600)
    assert line(report, "history") == BucketLine(
        bucket="history",
        used=41_600,
        limit=83_200,
        remaining=41_600,
        utilization=0.5,
        soft_exceeded=False,
        hard_exceeded=False,
        turns_remaining=27.7,
        urgency="normal",
    )
    assert (line(report, "tool_outputs").utilization, line(report, "tool_outputs").turns_remaining) == (0.65, 21.4)
    assert (line(report, "system").remaining, line(report, "system").utilization) == (0, 1.04)
    assert line(report, "system").hard_exceeded
    assert [line.bucket for line in report.buckets] == list(used)
    assert [field.name for field in fields(report)] == [
        "buckets",
        "total_used",
        "total_utilization",
    ]
    assert (report.total_used, report.total_utilization) == (60_000, 0.49)


@pytest.mark.requirement("A0.92")
def test_a_bucket_without_a_cap_is_only_tracked() -> None:
    report = bucket_report({"summary": 400}, {}, (Burn("summary", 0, (1,)),), limit=1_000)
    summary = line(report, "summary")
    assert (summary.limit, summary.remaining, summary.utilization, summary.turns_remaining) == (None,) * 4
    assert (summary.soft_exceeded, summary.hard_exceeded, summary.urgency) == (False, False, "normal")


@pytest.mark.requirement("A0.86", "A0.98")
@pytest.mark.parametrize(
    ("used", "soft", "hard"),
    [
        (12_287, False, False),
        (12_288, True, False),
        (15_359, True, False),
        (15_360, True, False),
        (15_361, True, True),
    ],
)
def test_a_bucket_warns_from_80_percent_and_is_exceeded_only_above_its_cap(used: int, soft: bool, hard: bool) -> None:
    found = line(bucket_report({"tool_outputs": used}, {"tool_outputs": 15_360}, (), limit=128_000), "tool_outputs")
    assert (found.soft_exceeded, found.hard_exceeded) == (soft, hard)


@pytest.mark.requirement("A0.86")
@pytest.mark.parametrize(("used", "soft"), [(699, False), (700, True)])
def test_a_bucket_may_have_its_own_soft_limit(used: int, soft: bool) -> None:
    report = bucket_report({"history": used}, {"history": 1_000}, (), limit=2_000, soft={"history": 0.70})
    assert line(report, "history").soft_exceeded is soft


@pytest.mark.requirement("A0.96")
def test_what_was_removed_is_released_in_the_next_report() -> None:
    full = bucket_report({"tool_outputs": 16_000}, {"tool_outputs": 15_360}, (), limit=128_000)
    less = bucket_report({"tool_outputs": 4_000}, {"tool_outputs": 15_360}, (), limit=128_000)
    assert (line(full, "tool_outputs").hard_exceeded, line(less, "tool_outputs").hard_exceeded) == (True, False)
    assert (less.total_used, line(less, "tool_outputs").remaining) == (4_000, 11_360)


def test_the_report_speaks_of_calibrated_tokens() -> None:
    burns = (Burn("history", 0, (1_000,)),)
    report = bucket_report({"history": 5_000}, {"history": 11_000}, burns, limit=12_000, ratio=2.0)
    assert line(report, "history").turns_remaining == 3.0


ANY = st.one_of(st.integers(), st.integers(10**300, 10**320))


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), ANY), max_size=tried(8, 25)), ANY, ANY)
@settings(max_examples=tried(15, 100), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_counts_give_a_report_whose_parts_agree(requests: list[dict[str, int]], cap: int, limit: int) -> None:
    burns = grown(requests)
    used = requests[-1] if requests else {}
    report = bucket_report(used, dict.fromkeys(used, cap), burns, limit=limit)
    assert report == bucket_report(used, dict.fromkeys(used, cap), grown(requests), limit=limit)
    assert report.total_used == sum(line.used for line in report.buckets)
    assert all(len(burn.deltas) <= 20 and min(burn.deltas, default=0) >= 0 for burn in burns)
    for found in report.buckets:
        assert found.limit is not None
        assert found.remaining == max(0, found.limit - found.used)
        assert not (found.hard_exceeded and found.remaining)
