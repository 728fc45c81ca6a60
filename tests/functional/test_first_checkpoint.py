"""A conversation that something was taken out of has a checkpoint, whatever the way there: it can be resumed."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import (
    ALONE,
    COUNTER,
    Deployment,
    InTurns,
    Talk,
    answered,
    arrays_of,
    opening,
    tool_step,
)
from tests.profile import each_once
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

CONFIG = """
upstreams: {sim: {base_url: URL, api_key: pass}}
models: [{match: '*', upstream: sim, window: 8192}]
policies: {mine: {cascade: [{layer: evict, at: 0.5, stop_at: 0.2, params: {scorer: fifo}}]}}
default_policy: mine
"""
DECIDED = "I have decided to use fetch instead of axios, because axios is unmaintained."
PARTS = ('"I have decided to use fetch"', '"axios is unmaintained"')
NOTED = f"Noted.\n```decision\n{DECIDED}\n```"


async def checkpoint(target: InTurns, conversation: str) -> httpx.Response:
    """The conversation's newest checkpoint over the management API."""
    async with httpx.AsyncClient(timeout=10) as client:
        headers = {"authorization": "Bearer sk-test"}
        return await client.get(f"{target.root()}/weir/conversations/{conversation}/checkpoint", headers=headers)


@each_once
@ALONE
@pytest.mark.requirement("D23", "A0.111", "A0.113")
@pytest.mark.parametrize("name", [None, "migration"])
async def test_after_a_first_request_that_only_evicts_there_is_a_checkpoint_to_resume(
    name: str | None, tmp_path: Path, deployment: Deployment
) -> None:
    messages = [*opening(), {"role": "assistant", "content": NOTED}, {"role": "user", "content": "Go on, please."}]
    for number in range(24):
        messages += tool_step(number, words=150)
    headers = {} if name is None else {"x-weir-conversation": name}
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        text = CONFIG.replace("URL", simulator.base_url)
        options: dict[str, Any] = {"yaml": text, "folder": tmp_path, "window": None}
        async with deployment.serving(simulator.base_url, **options) as target:
            talk = Talk(target.client(default_headers=headers), messages)
            await talk.ask()
            await target.settled()
            called = talk.headers[0]["x-weir-conversation"]
            saved = await checkpoint(target, called)
        async with deployment.serving(simulator.base_url, **options) as target:
            resumed = {"x-weir-resume": called}
            second = Talk(target.client(default_headers=resumed), [{"role": "user", "content": "Where were we?"}])
            await second.ask()
        sent = arrays_of(answered(simulator))[-1]
    assert talk.actions()[0].startswith("evict=")
    assert saved.status_code == 200, saved.text
    assert all(part in saved.text for part in PARTS)
    assert second.actions() == ["resume=1"]
    assert "Migrate the project from axios to fetch." in sent[0]["content"]
