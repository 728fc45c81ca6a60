"""How fast buckets fill, and the report about them, against the numbers of the requirement rows."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import pytest

from policies.ledger import Burn
from policies.pressure import BucketLine, BucketReport, bucket_report, fold, turns_remaining


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


# -- the report ------------------------------------------------------------------------------------------------------


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


@pytest.mark.requirement("A0.86")
@pytest.mark.parametrize(("used", "soft"), [(699, False), (700, True)])
def test_a_bucket_may_have_its_own_soft_limit(used: int, soft: bool) -> None:
    report = bucket_report({"history": used}, {"history": 1_000}, (), limit=2_000, soft={"history": 0.70})
    assert line(report, "history").soft_exceeded is soft
