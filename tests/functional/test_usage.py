"""Which key burns what, by model, policy, day and conversation."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.store.records import DAY
from tests.functional.api import ADMIN, Api
from tests.functional.harness import COUNTER, Deployment, Talk, opening
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

ONE, TWO = "sk-one-01234567", "sk-two-01234567"
YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
models:
  - {{match: priced, upstream: main, window: 4096, prices: {{input: 2.0, output: 8.0, cache_read: 0.2}}}}
  - {{match: "*", upstream: main, window: 4096}}
auth: {{admin_token: {admin}, mode: keys}}
keys:
  - {{name: support-bot, secret: {one}, allow: [policy]}}
  - {{name: coder, secret: {two}}}
policies:
  looking: {{mode: observe}}
store: {{url: "sqlite+aiosqlite:///{folder}/w.db"}}
"""


@pytest.fixture
async def api(tmp_path: Path, deployment: Deployment) -> AsyncIterator[Api]:
    async with serve_simulator(SimulatorSettings(window=8_192), counter=COUNTER) as simulator:
        yaml = YAML.format(upstream=simulator.base_url, admin=ADMIN, one=ONE, two=TWO, folder=tmp_path)
        async with (
            deployment.serving("", yaml=yaml, folder=tmp_path, window=None) as target,
            httpx.AsyncClient() as http,
        ):
            yield Api(target.weirs[0], simulator, http, tmp_path, target)


async def used(api: Api) -> None:
    """Two conversations of one key, one of another; one model has a price, and one request is refused."""
    first = Talk(api.turns.client(ONE, default_headers={"x-weir-conversation": "a"}), model="priced")
    await first.agent(10)
    observed = {"x-weir-conversation": "b", "x-weir-policy": "looking"}
    await Talk(api.turns.client(ONE, default_headers=observed), seed=2).agent(9)
    await Talk(api.turns.client(TWO, default_headers={"x-weir-conversation": "a"}), seed=3).agent(2)
    huge = [*opening(), {"role": "user", "content": "x " * 1}, *[{"role": "system", "content": "rule " * 6_000}]]
    with pytest.raises(openai.BadRequestError):
        await Talk(api.turns.client(TWO, default_headers={"x-weir-conversation": "refused"})).ask(huge)
    await api.turns.settled()


async def rows_of(api: Api, name: str, key: str) -> list[dict[str, Any]]:
    found = await api.get(f"conversations/{name}/timeline", key=key)
    return list(found["data"])


@pytest.mark.requirement("P7")
async def test_a_key_sees_its_own_usage_by_model_policy_day_and_conversation(api: Api) -> None:
    await used(api)
    whole = await api.get("usage", key=ONE)
    (mine,) = whole["data"]
    assert (mine["key"], mine["group"], whole["by"]) == ("support-bot", None, None)
    parts = {}
    for by in ("model", "policy", "day", "conversation"):
        found = await api.get("usage", key=ONE, by=by)
        assert found["total"] == whole["total"]
        assert {row["tenant"] for row in found["data"]} == {mine["tenant"]}
        sizes = [row["tokens_after"] for row in found["data"]]
        assert sizes == sorted(sizes, reverse=True)
        parts[by] = {row["group"]: row["requests"] for row in found["data"]}
    assert parts["model"] == {"priced": 10, "sim": 9}
    assert parts["policy"] == {"balanced": 10, "looking": 9}
    assert parts["conversation"] == {"a": 10, "b": 9}
    assert sum(parts["day"].values()) == 19
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in parts["day"])
    last = max(row["at"] for row in await rows_of(api, "b", ONE))
    assert (await api.get("usage", key=ONE, since=repr(last)))["total"]["requests"] >= 1, "its whole day"
    assert (await api.get("usage", key=ONE, since=repr(last + DAY)))["data"] == []
    assert (await api.get("usage", key=ONE, since="1h"))["total"]["requests"] == 19
    for query, param in (("by=colour", "by"), ("since=never", "since"), ("limit=0", "limit"), ("key=coder", "key")):
        assert (await api.refused(400, "GET", f"usage?{query}", key=ONE))["param"] == param
    await api.ask("DELETE", "conversations/b", key=ONE)
    assert (await api.get("usage", key=ONE))["total"]["requests"] == 19, "the bill stays"
