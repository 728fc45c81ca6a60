"""Alerts are due at the request that the requirement names, and not before; one for each episode."""

import json
from collections.abc import Iterable

import pytest

from policies.health import LATE, Checkup, Health, HealthRules, Sample, check

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


@pytest.mark.requirement("A0.123", "D18")
@pytest.mark.parametrize(
    ("share", "limit", "due"),
    [(0.45, 1.25 * 0.469, False), (0.31, 0.30, True), (0.30, 0.30, False), (0.9, None, False)],
)
def test_tool_bloat_is_held_against_the_policys_own_share(share: float, limit: float | None, due: bool) -> None:
    assert bool(opened(run([sample(bloat=share, bloat_limit=limit)]))) is due


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


@pytest.mark.parametrize("text", ["", "null", "[]", "[9]", "[1,1,1,1,[],[],[],null,1,[[1]]]", '{"v":1}', "[" * 9999])
def test_a_state_that_cannot_be_read_is_none(text: str) -> None:
    assert Health.from_json(text) is None


def test_a_state_with_numbers_that_are_none_is_none() -> None:
    good = json.loads(Health(requests=3, at=1.0).to_json())
    assert Health.from_json(json.dumps(good)) is not None
    for at in (2, 8):
        assert Health.from_json(json.dumps([*good[:at], "x", *good[at + 1 :]])) is None
    assert Health.from_json(json.dumps(good).replace("1.0", "NaN")) is None


@pytest.mark.requirement("A0.120", "A0.129")
def test_three_condensings_that_save_too_little_or_make_it_longer_are_told_with_their_mean() -> None:
    found = run(sample(ratios=(ratio,)) for ratio in (3.0, 1.9, 0.9, 1.1))
    assert opened(found) == [(4, "compression_ratio")]
    assert [c.snapshot.compression_ratio for c in found] == pytest.approx([3.0, 2.45, 5.8 / 3, 1.3])
