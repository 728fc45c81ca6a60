"""Observing: the plan is made from step to step as if it were carried out, and nothing of it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.store.records import ExchangeRow
from tests.functional.harness import COUNTER, RunningWeir, Talk, weir
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

ROOMY = 200_000
OBSERVING = """
upstreams:
  sim: {{kind: openai, base_url: "{base}"}}
models:
  - {{match: "*", upstream: sim, window: 4096}}
auth: {{mode: keys}}
keys:
  - {{name: watched, secret: sk-watched-1, policy: watched}}
  - {{name: free, secret: sk-free-1, policy: watched, allow: [mode]}}
  - {{name: plain, secret: sk-plain-1, allow: [mode]}}
policies:
  watched: {{preset: balanced, mode: observe}}
"""
STEPS = 15
TOKENS_OF_A_REFERENCE = 8
"""The most by which two of twelve hexadecimal digits differ."""


async def rows_of(target: RunningWeir, name: str) -> list[ExchangeRow]:
    await target.stored()
    store = target.runtime.store
    assert store is not None
    row = await store.conversation(None, name)
    assert row is not None
    return await store.timeline(row)


def sent_bodies(simulator: RunningSimulator) -> list[bytes]:
    return [seen.body for seen in simulator.answered()]


async def session(talk: Talk) -> None:
    """Tool steps without definitions of tools: only those are counted otherwise upstream.

    Where both counts are the same, plans do not depend on what was learned from which request, and when.
    """
    for _ in range(STEPS):
        await talk.ask()
        talk.add_step()


class Recorder:
    """A client that keeps the bytes of what it sends."""

    def __init__(self, client: Any) -> None:
        self.bodies: list[bytes] = []
        client._client.event_hooks["request"].append(self.keep)
        self.client = client

    async def keep(self, request: Any) -> None:
        self.bodies.append(await request.aread())


@pytest.mark.requirement("A0.95", "P14", "P4")
async def test_an_observed_session_is_forwarded_byte_for_byte_and_planned_from_step_to_step(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(window=ROOMY), counter=COUNTER) as simulator:
        yaml = OBSERVING.format(base=simulator.base_url)
        async with weir(simulator.base_url, tmp_path / "o.db", yaml=yaml, folder=tmp_path, window=None) as target:
            client = Recorder(target.client("sk-watched-1"))
            talk = Talk(client.client)
            await session(talk)
            observed = await rows_of(target, talk.headers[-1]["x-weir-conversation"])
            simulated = sent_bodies(simulator)
            store = target.runtime.store
            assert store is not None
            branch = await store.branch(observed[-1].tenant, observed[-1].branch)
            evicted = await store.evictions(None)
            simulator.forget()
            enforced = Talk(target.client("sk-plain-1"))
            await session(enforced)
            really = await rows_of(target, enforced.headers[-1]["x-weir-conversation"])
            await target.runtime.limits_resolver.save()
            learned = await store.calibrations()
    assert [row.ratio for row in learned] == [1.0, 1.0], "plans depend on when each was learned"
    assert simulated == client.bodies
    assert {h["x-weir-actions"] for h in talk.headers} == {"observe=1"}
    for header, row in zip(talk.headers, observed, strict=True):
        assert header["x-weir-tokens"].startswith(f"before={row.tokens_before};after={row.tokens_before};")
    assert all(row.observed for row in observed)
    assert not any(row.observed for row in really)
    plans = [(r.tokens_before, r.actions, r.action, r.zone, r.evicted) for r in observed]
    assert plans == [
        (
            r.tokens_before,
            "observe=1" + ("" if r.actions == "none" else f",{r.actions}"),
            r.action,
            r.zone,
            r.evicted,
        )
        for r in really
    ]
    for plan, done in zip(observed, really, strict=True):  # the reference of a summary is the tenant's own
        assert plan.tokens_after == pytest.approx(
            done.tokens_after, abs=TOKENS_OF_A_REFERENCE * ("compact" in done.actions)
        )
    assert sum(r.evicted > 0 for r in observed) >= 2, "there were not two batches"
    assert branch is not None
    assert (branch.version, branch.views, evicted) == (0, {}, [])


@pytest.mark.requirement("A0.95")
async def test_what_would_be_refused_is_forwarded_and_said(tmp_path: Path) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=ROOMY), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "o.db", window=1024) as target,
    ):
        talk = Talk(target.client(default_headers={"x-weir-mode": "observe"}))
        talk.messages = [{"role": "system", "content": "rule " * 4000}, {"role": "user", "content": "go"}]
        await talk.ask()
        [row] = await rows_of(target, talk.headers[-1]["x-weir-conversation"])
    assert row.actions == "observe=1,refused=context_length_exceeded"
    assert talk.headers[-1]["x-weir-actions"] == "observe=1"
    assert talk.headers[-1]["x-weir-pressure"].endswith(";critical;emergency")
    assert json.loads(simulator.ledger[-1].body)["messages"] == talk.messages
