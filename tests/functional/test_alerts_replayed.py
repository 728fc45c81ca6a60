"""Alerts over recorded conversations: each opens at the request at which it is due, once an episode, and closes."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from policies.health import COOLDOWN, RULES
from tests.functional.harness import COUNTER, weir
from tests.functional.replaying import (
    KINDS,
    SHARED,
    SHIPPED,
    Replayed,
    Session,
    due,
    eased,
    episodes_in,
    metrics_of,
    replay,
    sessions,
)
from tests.profile import soak, tried
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

pytestmark = pytest.mark.slow

CRITICAL = {rule.kind for rule in RULES if rule.level == "critical"}

YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
models: [{{match: '*', upstream: main, window: {window}, tokenizer: o200k_base}}]
default_policy: watched
policies:
  watched: {{preset: balanced, margin: 0.0, {policy}}}
"""
AMPLE = 1_000_000
PLAYED: dict[str, "Replayed"] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """A policy in a window under which some alerts are due; ``rules`` are its thresholds that are not the article's."""

    window: int
    policy: str
    rules: Mapping[str, float]
    manages: bool
    expected: tuple[str, ...]


CASES = {
    "observed in a window that it outgrows": Case(
        6_000, "mode: observe", {}, False, ("utilization", "overflow", "tool_bloat")
    ),
    "observed with lower marks": Case(
        20_000, "mode: observe, health: {utilization: 0.30, tool_bloat: 0.20}",
        {"utilization": 0.30, "bloat": 0.20}, False, ("utilization", "burn_rate"),
    ),
    "compacted again and again": Case(
        4_400, "cascade: [{layer: compact}], health: {compression_ratio: 100}", {"ratio": 100.0}, True,
        ("compression_ratio",),
    ),
    "evicted in small pieces": Case(
        6_000, "cascade: [{layer: evict, at: 0.3, stop_at: 0.28, params: {protect_steps: 0}}, {layer: compact}], "
        "health: {eviction_rate: 0.3}", {"eviction": 0.3}, True, ("thrash",),
    ),
    "balanced in a window with room": Case(128_000, "mode: enforce", {}, True, ()),
}  # fmt: skip


async def shipped(name: str, folder: Path) -> Replayed:
    """The shipped airline session under a case, played once however many tests look at it."""
    if name not in PLAYED:
        (session,) = sessions(SHIPPED["airline"])
        PLAYED[name] = await run(session, CASES[name], folder)
    return PLAYED[name]


async def run(session: Session, case: Case, folder: Path) -> Replayed:
    async with serve_simulator(SimulatorSettings(window=AMPLE), counter=COUNTER) as simulator:
        yaml = YAML.format(upstream=simulator.base_url, window=case.window, policy=case.policy)
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=None) as target:
            return await replay(session, target, simulator, name=f"replayed-{session.name}", window=case.window)


def looping(session: Session) -> Session:
    """The session with its first tool step made four times over, as a model does that has lost its way."""
    at = next(n for n, m in enumerate(session.messages) if m.get("tool_calls"))
    call = session.messages[at]["tool_calls"][0]
    (answer,) = [m for m in session.messages[at : at + 3] if m.get("tool_call_id") == call["id"]]
    steps = []
    for number in range(4):
        again = {**call, "id": f"again_{number}"}
        steps += [
            {"role": "assistant", "content": None, "tool_calls": [again]},
            {**answer, "tool_call_id": f"again_{number}"},
        ]
    return replace(session, messages=[*session.messages[:at], *steps, *session.messages[at:]])


def check(replayed: Replayed, case: Case) -> None:
    """Every alert opened where the plain computation says, as often as it says, and closed where it says."""
    rules = {"base": replayed.requests[0].limit, **case.rules}
    begins, lasts = (due(metrics_of(replayed), each, manages=case.manages) for each in (rules, eased(rules)))
    for kind in KINDS:
        again_after = 0 if kind in CRITICAL else COOLDOWN
        assert replayed.episodes(kind) == episodes_in(begins[kind], lasts[kind], again_after=again_after), kind


@pytest.mark.requirement("A0.118", "A0.119", "A0.120", "A0.121", "A0.123", "A0.124", "A0.130", "A3.16")
@pytest.mark.parametrize("name", CASES)
async def test_every_alert_opens_at_the_request_at_which_it_is_due_and_closes_when_it_is_over(
    name: str, tmp_path: Path
) -> None:
    case, replayed = CASES[name], await shipped(name, tmp_path)
    check(replayed, case)
    assert {alert.kind for alert in replayed.alerts} >= set(case.expected)
    if not case.expected:
        assert replayed.alerts == []


@pytest.mark.requirement("A0.121", "A3.17")
async def test_a_step_that_is_made_four_times_is_a_loop_from_the_third_to_the_next_other_one(tmp_path: Path) -> None:
    (session,) = sessions(SHIPPED["airline"])
    case = Case(128_000, "mode: enforce", {}, True, ("loop",))
    replayed = await run(looping(session), case, tmp_path)
    check(replayed, case)
    ((opened, closed),) = replayed.episodes("loop")
    assert closed is not None
    assert closed > opened >= 2


@pytest.mark.requirement("A0.127", "A0.129", "A0.118", "A0.119", "A0.120", "A0.121", "A0.123")
@pytest.mark.parametrize("name", ["compacted again and again", "evicted in small pieces"])
async def test_every_value_of_a_snapshot_is_what_the_requests_themselves_say(name: str, tmp_path: Path) -> None:
    replayed = await shipped(name, tmp_path)
    metrics = metrics_of(replayed)
    assert len(replayed.snapshots) == len(metrics)
    growths: list[int] = []
    ratios: list[float] = []
    for number, (snapshot, own) in enumerate(zip(replayed.snapshots, metrics, strict=True)):
        growths += [] if own.growth is None else [own.growth]
        ratios += own.ratios
        counts = [each.evicted for each in metrics[: number + 1]][-5:]
        assert snapshot.utilization == pytest.approx(own.utilization, abs=1e-6)
        assert snapshot.eviction_rate == pytest.approx(sum(counts) / len(counts))
        expected = sum(ratios[-3:]) / len(ratios[-3:]) if ratios else None
        assert snapshot.compression_ratio == (None if expected is None else pytest.approx(expected, rel=0.01))
        velocity = sum(growths[-5:]) / len(growths[-5:]) if growths else None
        assert snapshot.burn_rate == (None if velocity is None else pytest.approx(velocity, abs=0.06))
        assert snapshot.tool_result_bloat == pytest.approx(own.bloat, abs=0.002)
        assert (snapshot.fidelity_score, snapshot.window_id) == (None, 1)


@pytest.mark.requirement("A0.126", "A0.124")
async def test_a_session_on_which_nothing_is_wrong_raises_none_under_balanced(tmp_path: Path) -> None:
    """The shipped recordings in a window that they fill by half at most: not one alert."""
    for name, path in SHIPPED.items():
        for session in sessions(path, most=2):
            folder = tmp_path / f"{name}-{session.name}".replace("/", "_")
            folder.mkdir()
            replayed = await run(session, CASES["balanced in a window with room"], folder)
            assert [alert.kind for alert in replayed.alerts] == []


@pytest.mark.requirement("A0.126")
@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded data sets are not here")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "dataset", ["tau_airline", pytest.param("swe_agent", marks=soak), pytest.param("longmemeval_windows", marks=soak)]
)
async def test_over_a_data_set_every_alert_is_due_where_it_opens(dataset: str, tmp_path: Path) -> None:
    """By ``balanced`` in a window of 8K; the figures of what was raised are printed."""
    raised, requests, alerted = Counter[str](), 0, 0
    every = sessions(SHARED / f"{dataset}.jsonl", most=int(os.environ.get("WEIR_TEST_SESSIONS", tried(2, 4))))
    case = Case(int(os.environ.get("WEIR_TEST_WINDOW", "8192")), "mode: enforce", {}, True, ())
    async with serve_simulator(SimulatorSettings(window=AMPLE), counter=COUNTER) as simulator:
        yaml = YAML.format(upstream=simulator.base_url, window=case.window, policy=case.policy)
        async with weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target:
            for number, session in enumerate(every):
                replayed = await replay(session, target, simulator, name=f"{dataset}-{number}", window=case.window)
                check(replayed, case)
                raised.update(f"{alert.level} {alert.kind}" for alert in replayed.alerts)
                requests += len(replayed.requests)
                alerted += any(alert.level != "info" for alert in replayed.alerts)
    print(f"{dataset}: {len(every)} sessions, {requests} requests, {alerted} sessions alerted, {dict(raised)}")
    assert requests > 0
    assert math.isfinite(alerted)
