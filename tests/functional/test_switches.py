"""What a policy switches off leaves no trace, and what it switches on is seen where it matters: upstream, in the store."""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest

from tests.functional.harness import COUNTER, TOOLS, Deployment, InTurns, Talk, answered, begins_with, opening, prose
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 8192
CONFIG = """
upstreams: {sim: {base_url: URL, api_key: pass}}
models: [{match: '*', upstream: sim, window: WINDOW}]
policies: {mine: POLICY}
default_policy: mine
"""
DECIDED = "I have decided to use fetch instead of axios, because axios is unmaintained."


class Served:
    """A Weir with one policy and its upstream."""

    def __init__(
        self, folder: Path, policy: str, *, window: int = WINDOW, on: Deployment | None = None, **options: Any
    ) -> None:
        self.folder, self.policy, self.window, self.options = folder, policy, window, options
        self.deployment = on or Deployment(folder / "w.db")
        self.stack = AsyncExitStack()
        self.simulator: RunningSimulator
        self.target: InTurns

    async def __aenter__(self) -> Self:
        settings = SimulatorSettings(window=self.window, **self.options)
        self.simulator = await self.stack.enter_async_context(serve_simulator(settings, counter=COUNTER))
        text = CONFIG.replace("URL", self.simulator.base_url).replace("WINDOW", str(self.window))
        options: dict[str, Any] = {"yaml": text.replace("POLICY", self.policy), "folder": self.folder, "window": None}
        running = self.deployment.serving(self.simulator.base_url, **options)
        self.target = await self.stack.enter_async_context(running)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    def talk(self, messages: list[dict[str, Any]] | None = None, **headers: str) -> Talk:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Talk(self.target.client(default_headers=named), messages or opening())

    async def timeline(self, talk: Talk) -> list[dict[str, Any]]:
        await self.target.settled()
        name = talk.headers[-1]["x-weir-conversation"]
        async with httpx.AsyncClient() as http:
            url = f"{self.target.root()}/weir/conversations/{name}/timeline?limit=100"
            rows: list[dict[str, Any]] = (await http.get(url, headers={"authorization": "Bearer sk-test"})).json()[
                "data"
            ]
        return rows

    def count(self, query: str) -> int:
        with sqlite3.connect(f"file:{self.folder / 'w.db'}?mode=ro", uri=True) as connection:
            found = connection.execute(query).fetchone()[0]
        connection.close()
        return int(found)


ROWS = {
    "health": "SELECT count(*) FROM conversations WHERE health IS NOT NULL",
    "checkpoints": "SELECT count(*) FROM checkpoints",
}


@pytest.mark.requirement("A0.7", "A0.3")
@pytest.mark.parametrize("off", [[], ["health"], ["checkpoints"], list(ROWS)], ids=" ".join)
async def test_a_subsystem_that_is_off_leaves_no_row_and_a_session_is_served_without_it(
    off: list[str], tmp_path: Path
) -> None:
    policy = "{" + ", ".join(f"{name}: off" for name in off) + "}"
    async with Served(tmp_path, policy) as served:
        start = [*opening(), {"role": "assistant", "content": f"{DECIDED}\n```note\nKeep src/legacy as it is.\n```"}]
        talk = served.talk(start, x_weir_conversation="long")
        talk.grow(14, kind="agent")
        await talk.agent(3)
        await served.timeline(talk)
        counted = {name: served.count(query) for name, query in ROWS.items()}
        alerts = served.count("SELECT count(*) FROM alerts")
        snapshots = served.count("SELECT count(*) FROM health_snapshots")
        statuses = {s.status for s in served.simulator.answered()}
    assert talk.actions()[-1] != "none"
    assert statuses == {200}
    assert {name for name, rows in counted.items() if not rows} == set(off)
    assert bool(snapshots) == ("health" not in off)
    assert not alerts or "health" not in off


@pytest.mark.requirement("A0.28")
@pytest.mark.parametrize(
    ("policy", "headers"),
    [
        ("{memory: ['<mem'], buckets: {memory: {cap: 4000}}}", {}),
        ("{memory: [notebook], buckets: {memory: {cap: 4000}}}", {}),
        ("{buckets: {memory: {cap: 4000}}}", {"x_weir_memory": "<memory"}),
    ],
    ids=["tag", "name", "header"],
)
async def test_memory_is_counted_in_its_own_bucket_by_a_tag_a_name_or_the_tag_that_the_client_declares(
    policy: str, headers: Mapping[str, str], tmp_path: Path
) -> None:
    async with Served(tmp_path, policy) as served:
        remembered = {"role": "user", "name": "notebook", "content": f"  <memory v2>\n{prose(200, seed=3)}\n</memory>"}
        talk = served.talk([*opening(), remembered, {"role": "user", "content": "What is <memory v2> for?"}], **headers)
        await talk.ask()
        row = (await served.timeline(talk))[-1]
        seen = answered(served.simulator)[-1]
    assert 200 <= row["detail"]["buckets"]["memory"] <= 500
    assert not any(name.startswith("x-weir") for name, _ in seen.headers)


@pytest.mark.requirement("A4.13")
@pytest.mark.parametrize(
    ("system", "deployment"),
    [
        pytest.param(True, 1, id="behind the system prompt"),
        pytest.param(True, 2, id="behind the system prompt, two in turns on PostgreSQL"),
        pytest.param(False, 1, id="behind the tools"),
    ],
    indirect=["deployment"],
)
async def test_a_cache_breakpoint_stands_between_tools_and_history_and_never_moves(
    system: bool, tmp_path: Path, deployment: Deployment
) -> None:
    async with Served(tmp_path, "{cache_breakpoint: 1h}", on=deployment) as served:
        talk = served.talk(opening() if system else opening()[1:])
        await talk.agent(20)
        bodies = [s.json() for s in answered(served.simulator)]
    marker = {"type": "ephemeral", "ttl": "1h"}
    assert talk.actions()[-1] != "none"
    assert all(json.dumps(body).count('"cache_control"') == 1 for body in bodies)
    if system:
        part = {"type": "text", "text": opening()[0]["content"], "cache_control": marker}
        assert all(body["messages"][0] == {"role": "system", "content": [part]} for body in bodies)
    else:
        assert all(body["tools"] == [{**TOOLS[0], "cache_control": marker}] for body in bodies)
    arrays = [body["messages"] for body in bodies]
    assert sum(not begins_with(new, old) for old, new in zip(arrays, arrays[1:], strict=False)) <= 2


@pytest.mark.requirement("A4.6")
async def test_a_bucket_that_refuses_answers_with_its_figures_and_sends_nothing_upstream(tmp_path: Path) -> None:
    policy = "{enforce: bucket, buckets: {system: {cap: 300, on_overflow: reject}}}"
    async with Served(tmp_path, policy) as served:
        small = served.talk()
        await small.ask()
        large = served.talk([{"role": "system", "content": prose(400, seed=5)}, opening()[1]])
        with pytest.raises(openai.BadRequestError) as caught:
            await large.ask()
        seen = len(served.simulator.answered())
    error: Any = caught.value.body
    figures = error["weir"]
    assert seen == 1
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert (figures["bucket"], figures["cap"]) == ("system", 300)
    assert figures["used"] > 300
    assert figures["used"] == figures["buckets"]["system"]
