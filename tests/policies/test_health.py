"""Alerts are due at the request that the requirement names, and not before; one for each episode."""

import json
from collections.abc import Iterable

import pytest

from policies.health import (
    LATE,
    RULES,
    STABLE,
    Checkup,
    Episode,
    Health,
    HealthAlert,
    HealthRules,
    Sample,
    Snapshot,
    check,
    trend_of,
)

RULES_OF = HealthRules()


def sample(**given: object) -> Sample:
    return Sample(**{"at": 0.0, "utilization": 0.5, **given})  # type: ignore[arg-type]


def run(samples: Iterable[Sample], health: Health | None = None, rules: HealthRules = RULES_OF) -> list[Checkup]:
    """What each of several requests makes of a conversation, a second apart."""
    found: list[Checkup] = []
    start = 0 if health is None else health.requests
    for number, each in enumerate(samples, start=start + 1):
        moved = Sample(**{name: getattr(each, name) for name in Sample._fields if name != "at"}, at=float(number))
        found.append(check(health, moved, rules))
        health = found[-1].health
    return found


def opened(found: Iterable[Checkup]) -> list[tuple[int, str]]:
    """At which request which alert began."""
    return [(c.health.requests, alert.kind) for c in found for alert in c.opened]


def closed(found: Iterable[Checkup]) -> list[tuple[int, str]]:
    return [(c.health.requests, episode.kind) for c in found for episode in c.closed]


@pytest.mark.requirement("A0.118", "A0.130")
def test_utilization_alerts_on_the_third_request_above_90_percent_and_not_on_the_first() -> None:
    found = run(sample(utilization=u) for u in (0.91, 0.95, 0.90, 0.91, 0.92, 0.93, 0.99, 0.82, 0.81, 0.91))

    assert opened(found) == [(6, "utilization")]
    assert closed(found) == [(9, "utilization")]
    [alert] = found[5].opened
    assert (alert.level, alert.category, alert.at, alert.value, alert.limit) == ("critical", "overflow", 6.0, 0.93, 0.9)
    assert found[5].is_critical
    assert alert.said == "above 90% for several requests: 93%"


@pytest.mark.requirement("A0.118")
@pytest.mark.parametrize(("level", "due"), [(0.90, False), (0.9001, True)])
def test_ninety_percent_itself_is_not_above_it(level: float, due: bool) -> None:
    assert bool(opened(run([sample(utilization=level)] * 3))) is due


@pytest.mark.requirement("A0.124")
@pytest.mark.parametrize(("left", "due"), [(None, False), (2.1, False), (2.0, True), (0.0, True)])
def test_an_overflow_within_two_requests_is_critical_at_once(left: float | None, due: bool) -> None:
    found = run([sample(requests_left=left)])
    assert [(a.kind, a.level) for a in found[0].opened] == ([("overflow", "critical")] if due else [])


@pytest.mark.requirement("A0.119", "A0.130")
def test_a_burst_of_one_eviction_does_not_alert() -> None:
    assert not opened(run(sample(evicted=n) for n in (0, 0, 0, 0, 400, 0, 0, 0, 0, 0)))
    assert not opened(run(sample(evicted=n) for n in (40, 1, 0, 0, 1, 0, 0)))


@pytest.mark.requirement("A0.119", "A0.129")
def test_a_rate_above_five_over_five_requests_alerts_on_the_fifth() -> None:
    found = run(sample(evicted=n) for n in (6, 6, 6, 6, 6, 6, 0, 0, 0))

    assert opened(found)[0] == (5, "eviction_rate")
    assert found[4].snapshot.eviction_rate == 6.0
    assert [c.snapshot.eviction_rate for c in found[5:]] == [6.0, 4.8, 3.6, 2.4]
    assert (8, "eviction_rate") in closed(found)


@pytest.mark.requirement("A0.119")
@pytest.mark.parametrize(
    ("evicted", "expected"),
    [
        ((5, 5, 5, 5, 5), "eviction_raised"),
        ((5, 5, 5, 5, 6), "eviction_rate"),
        ((2, 2, 2, 2, 2), None),
        ((2, 2, 2, 2, 3), "eviction_raised"),
        ((50, 5, 0, 0, 0), "eviction_raised"),
        ((50, 6, 0, 0, 0), "eviction_rate"),
    ],
)
def test_the_rates_borders_are_the_mean_and_what_is_left_without_the_largest_batch(
    evicted: tuple[int, ...], expected: str | None
) -> None:
    found = run(sample(evicted=n) for n in evicted)
    assert opened(found) == ([] if expected is None else [(5, expected)])


@pytest.mark.requirement("A0.120", "A0.130")
def test_a_ratio_of_point_nine_alerts_with_the_third_condensing_and_not_with_the_first() -> None:
    found = run([sample(ratios=(0.9,)), sample(), sample(ratios=(0.9,)), sample(ratios=(0.9,)), sample(ratios=(4.0,))])

    assert opened(found) == [(4, "compression_ratio")]
    assert closed(found) == [(5, "compression_ratio")]
    assert found[3].snapshot.compression_ratio == pytest.approx(0.9)


@pytest.mark.requirement("A0.120")
@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((1.9, 1.9, 1.9), ["compression_ratio"]),
        ((1.9, 1.9, 2.0), []),
        ((1.9, 1.9), []),
        ((15.0, 20.0, 20.0), []),
        ((15.1, 20.0, 20.0), ["compression_deep"]),
    ],
)
def test_only_the_newest_three_ratios_together_say_something(ratios: tuple[float, ...], expected: list[str]) -> None:
    assert [kind for _, kind in opened(run([sample(ratios=ratios)]))] == expected


@pytest.mark.requirement("A0.121", "A0.130")
def test_a_spike_is_an_anomaly_for_as_long_as_it_lasts_and_not_again_within_twenty_requests() -> None:
    quiet = [sample()] * 18
    found = run(
        [sample(), sample(spike=3.4), sample(spike=5.0), sample(), sample(spike=4.0), *quiet, sample(spike=4.0)]
    )

    assert opened(found) == [(2, "burn_rate"), (24, "burn_rate")]
    assert closed(found) == [(4, "burn_rate")]
    assert found[1].opened[0].category == "anomaly"


@pytest.mark.requirement("A0.121")
def test_the_same_call_three_times_in_a_row_is_a_loop() -> None:
    found = run(sample(repeats=n) for n in (1, 2, 3, 4, 1))
    assert opened(found) == [(3, "loop")]
    assert closed(found) == [(5, "loop")]


@pytest.mark.requirement("A0.123", "D18")
@pytest.mark.parametrize(
    ("share", "limit", "due"),
    [(0.45, 1.25 * 0.469, False), (0.31, 0.30, True), (0.30, 0.30, False), (0.9, None, False)],
)
def test_tool_bloat_is_held_against_the_policys_own_share(share: float, limit: float | None, due: bool) -> None:
    assert bool(opened(run([sample(bloat=share, bloat_limit=limit)]))) is due


@pytest.mark.requirement("A3.16")
def test_three_compactions_within_twenty_requests_are_thrashing() -> None:
    def session(*compacted: int) -> list[Checkup]:
        return run(sample(compacted=n in compacted) for n in range(1, 45))

    assert opened(session(1, 10, 20)) == [(20, "thrash")]
    assert closed(session(1, 10, 20)) == [(21, "thrash")]
    assert not opened(session(1, 10, 21))
    assert not opened(session(1, 20))


@pytest.mark.requirement("A0.124", "A0.130")
def test_every_level_is_used_and_every_kind_stands_once() -> None:
    assert {rule.level for rule in RULES} == {"critical", "warning", "info"}
    assert {rule.category for rule in RULES} == {"overflow", "degradation", "anomaly", "notice"}
    assert len({rule.kind for rule in RULES}) == len(RULES)
    assert [r.level for r in RULES] == sorted((r.level for r in RULES), key=["critical", "warning", "info"].index)


@pytest.mark.requirement("A0.124", "A0.130")
def test_thresholds_are_the_policys_own() -> None:
    rules = HealthRules(utilization=0.5, utilization_requests=2, eviction_rate=1)
    found = run([sample(utilization=0.6, evicted=2)] * 5, rules=rules)
    assert opened(found) == [(2, "utilization"), (5, "eviction_rate")]


@pytest.mark.requirement("A0.124", "A0.129")
@pytest.mark.parametrize(("at", "kinds"), [(9.0, ["overflow"]), (10.0 - LATE, [])])
def test_what_is_written_out_of_turn_neither_ends_an_episode_nor_begins_another(at: float, kinds: list[str]) -> None:
    """Beyond a minute it is a clock that was set back, and judges as any other."""
    first = check(None, sample(at=10.0, requests_left=1.5), RULES_OF)
    late = check(first.health, sample(at=at, requests_left=4.0), RULES_OF)
    assert [episode.kind for episode in late.health.episodes] == kinds
    assert [episode.kind for episode in late.closed] == ([] if kinds else ["overflow"])
    assert late.health.requests == 2
    after = check(late.health, sample(at=11.0, requests_left=0.5), RULES_OF)
    assert [alert.kind for alert in after.opened] == ([] if kinds else ["overflow"])


@pytest.mark.requirement("A0.124")
def test_an_open_episode_outlives_being_stored_and_is_not_raised_again() -> None:
    before = run([sample(utilization=0.95, evicted=7, ratios=(1.5, 0.5), compacted=True)] * 4)[-1].health
    stored = before.to_json()

    assert Health.from_json(stored) == before
    assert Episode("utilization", 3.0) in before.episodes
    again = run([sample(utilization=0.95)] * 3 + [sample(utilization=0.1)], Health.from_json(stored))
    assert "utilization" not in [kind for _, kind in opened(again)]
    assert [e for c in again for e in c.closed if e.kind == "utilization"] == [Episode("utilization", 3.0)]


@pytest.mark.parametrize("text", ["", "null", "[]", "[9]", "[1,1,1,1,[],[],[],null,1,[[1]]]", '{"v":1}', "[" * 9999])
def test_a_state_that_cannot_be_read_is_none(text: str) -> None:
    assert Health.from_json(text) is None


def test_a_state_with_numbers_that_are_none_is_none() -> None:
    good = json.loads(Health(requests=3, at=1.0).to_json())
    assert Health.from_json(json.dumps(good)) is not None
    for at in (2, 8):
        assert Health.from_json(json.dumps([*good[:at], "x", *good[at + 1 :]])) is None
    assert Health.from_json(json.dumps(good).replace("1.0", "NaN")) is None


@pytest.mark.requirement("A0.127", "A0.129")
def test_a_snapshot_has_its_own_requests_values() -> None:
    found = run(
        [
            sample(utilization=0.2, burn_rate=None),
            sample(utilization=0.4, evicted=4, ratios=(4.0, 8.0), burn_rate=120.5, bloat=0.2),
            sample(utilization=0.3, burn_rate=80.0, window_id=2),
        ]
    )
    assert found[0].snapshot == Snapshot(1.0, 0.2, 0.0, None, None, None, 0.0, 1)
    assert found[1].snapshot == Snapshot(2.0, 0.4, 2.0, 6.0, 120.5, None, 0.2, 1)
    assert found[2].snapshot == Snapshot(3.0, 0.3, 4 / 3, 6.0, 80.0, None, 0.0, 2)
    assert [c.is_first for c in found] == [True, False, False]


def shots(*utilization: float, fidelity: float | None = None, burn: float | None = None) -> list[Snapshot]:
    return [
        Snapshot(float(i), u, 0.0, None, None if burn is None else burn * i, fidelity, 0.0, 1)
        for i, u in enumerate(utilization)
    ]


@pytest.mark.requirement("A0.128")
def test_a_trend_needs_five_samples() -> None:
    four = trend_of(shots(0.1, 0.2, 0.3, 0.4))
    assert (four.trend, four.samples, four.utilization_delta, four.avg_fidelity) == ("insufficient_data", 4, None, None)
    assert trend_of(shots(0.1, 0.2, 0.3, 0.4, 0.5)).trend == "rising"


@pytest.mark.requirement("A0.128")
def test_a_trend_is_of_the_newest_ten_with_the_decimals_of_the_requirement() -> None:
    found = trend_of(shots(9.0, 9.0, 0.2, *[0.5] * 8, 0.65432, fidelity=0.8, burn=10.26))

    assert (found.samples, found.utilization_delta, found.burn_rate_delta) == (10, 0.454, 92.3)
    assert (found.trend, found.avg_fidelity) == ("rising", 0.8)
    assert trend_of(shots(0.9, 0.5, 0.5, 0.5, 0.5)).trend == "falling"
    assert trend_of(shots(0.5, 0.9, 0.1, 0.9, 0.5 + STABLE - 0.001)).trend == "stable"
    assert trend_of(shots(0.5, 0.9, 0.1, 0.9, 0.5 + STABLE)).trend == "rising"
    assert trend_of(shots(0.5, 0.5, 0.5, 0.5, 0.5)).burn_rate_delta is None


def test_several_rules_can_hold_at_once_the_gravest_first() -> None:
    found = run([sample(utilization=0.95, spike=4.0, bloat=0.5, bloat_limit=0.3)] * 3)
    assert [k for _, k in opened(found)] == ["tool_bloat", "burn_rate", "utilization"]
    assert [e.kind for e in found[2].health.episodes] == ["utilization", "tool_bloat", "burn_rate"]
    assert all(isinstance(a, HealthAlert) for c in found for a in c.opened)
