"""A key's rate and concurrency where two processes share a PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.store import key_use
from proxy.store.records import Refusal, StoreUnavailable
from tests.functional.harness import Deployment, InTurns
from tests.functional.scripted import Asked, Reply, completion, scripted, whole

pytestmark = pytest.mark.slow

TWO = pytest.mark.parametrize("deployment", [2], indirect=True)
CONFIG = """
upstreams: {{main: {{base_url: "{url}", api_key: sk-operator}}}}
window: 8192
teams:
  busy: {{requests_per_minute: 5}}
  wordy: {{tokens_per_minute: 300}}
keys:
  - {{name: ann, secret: secret-ann, team: busy}}
  - {{name: bob, secret: secret-bob, team: busy, requests_per_minute: 3}}
  - {{name: cy, secret: secret-cy, team: wordy}}
  - {{name: dee, secret: secret-dee, tokens_per_minute: 250}}
  - {{name: often, secret: secret-often, requests_per_minute: 6}}
  - {{name: many, secret: secret-many, concurrency: 2}}
  - {{name: free, secret: secret-free}}
  - {{name: few, secret: secret-few, requests_per_minute: 2, models: [m]}}
"""
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def two(folder: Path, deployment: Deployment) -> AsyncIterator[tuple[InTurns, httpx.AsyncClient]]:
    def say(asked: Asked) -> Reply:
        return Reply(silent=True) if asked.json["model"] == "slow" else whole(completion("ok"))

    async with (
        scripted(say) as upstream,
        deployment.serving("", yaml=CONFIG.format(url=upstream.base_url), folder=folder, window=None) as target,
        httpx.AsyncClient(timeout=60) as http,
    ):
        yield target, http


async def ask(http: httpx.AsyncClient, root: str, name: str, path: str = "chat/completions", **more: Any) -> Any:
    headers = {"authorization": f"Bearer secret-{name}"}
    return await http.post(f"{root}/v1/{path}", json={**BODY, **more}, headers=headers)


@TWO
async def test_a_rate_holds_in_all_processes_together(tmp_path: Path, deployment: Deployment) -> None:
    async with two(tmp_path, deployment) as (target, http):
        answers = [await ask(http, target.root(), "often") for _ in range(5)]
        answers += [await ask(http, target.root(), "often", "moderations") for _ in range(5)]
        assert [each.status_code for each in answers] == [200] * 6 + [429] * 4
        for each in answers[6:]:
            assert 30 < int(each.headers["retry-after"]) <= 61
            assert "requests_per_minute" in each.json()["error"]["message"]
        assert {(await ask(http, target.root(), "free")).status_code for _ in range(10)} == {200}


@TWO
async def test_a_teams_rates_hold_for_all_its_keys_in_all_processes(tmp_path: Path, deployment: Deployment) -> None:
    async with two(tmp_path, deployment) as (target, http):
        answers = [await ask(http, target.root(), name) for name in ("ann", "bob", "bob", "bob", "bob", "ann", "ann")]
        assert [each.status_code for each in answers] == [200, 200, 200, 200, 429, 200, 429]
        assert "This key has begun 3 requests" in answers[4].text
        assert "The team busy has begun 5 requests within a minute" in answers[6].text
        answers = [await ask(http, target.root(), "cy", max_tokens=100) for _ in range(5)]
        assert [each.status_code for each in answers] == [200] * 3 + [429] * 2
        assert "The team wordy has taken 300 tokens within a minute" in answers[4].text
        answers = [await ask(http, target.root(), "dee", max_tokens=100) for _ in range(4)]
        assert [each.status_code for each in answers] == [200] * 3 + [429]
        assert 1 <= int(answers[3].headers["retry-after"]) <= 61


@TWO
async def test_a_request_that_is_not_allowed_counts_in_no_process(tmp_path: Path, deployment: Deployment) -> None:
    async with two(tmp_path, deployment) as (target, http):
        answers = [await ask(http, target.root(), "few", model="another") for _ in range(6)]
        answers += [await ask(http, target.root(), "few") for _ in range(3)]
        assert [each.status_code for each in answers] == [403] * 6 + [200, 200, 429]


@TWO
async def test_requests_at_once_hold_in_all_processes_together(tmp_path: Path, deployment: Deployment) -> None:
    async with two(tmp_path, deployment) as (target, http):
        roots = [each.root for each in target.weirs]
        slow = [asyncio.create_task(ask(http, root, "many", model="slow")) for root in roots]
        async with asyncio.timeout(30):
            while not all(each.runtime.admission.open_of("many") for each in target.weirs):
                await asyncio.sleep(0.01)
            while (refused := await ask(http, roots[0], "many")).status_code == 200:
                await asyncio.sleep(0.01)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "in all processes" in refused.text
        for each in slow:
            each.cancel()
        await asyncio.wait(slow)
        for root in roots * 5:  # one after another, wherever they come
            assert (await ask(http, root, "many")).status_code == 200


@TWO
async def test_what_a_process_that_died_had_open_is_forgotten(
    tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_use, "OPEN_FOR", 3)
    async with two(tmp_path, deployment) as (target, http):
        await target.store.enter_key("many", process="died", here=2, rate=0, most=2)
        assert (await ask(http, target.root(), "many")).status_code == 429
        async with asyncio.timeout(30):
            while (await ask(http, target.root(), "many")).status_code == 429:
                await asyncio.sleep(0.05)


@TWO
async def test_where_the_database_does_not_answer_each_process_keeps_the_limit_alone(
    tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object, **__: object) -> None:
        raise StoreUnavailable("away", reason="unreachable")

    async with two(tmp_path, deployment) as (target, http):
        for each in target.weirs:
            monkeypatch.setattr(each.runtime.store, "enter_key", unavailable)
        for each in target.weirs:
            answers = [(await ask(http, each.root, "often")).status_code for _ in range(8)]
            assert answers == [200] * 6 + [429] * 2


@TWO
async def test_a_request_costs_one_statement_and_none_where_its_key_has_no_limit(
    tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    async with two(tmp_path, deployment) as (target, http):
        store = target.store
        real = store.enter_key

        async def counted(key: str, **given: Any) -> Any:
            seen.append(key)
            return await real(key, **given)

        monkeypatch.setattr(store, "enter_key", counted)
        root = target.weirs[0].root
        for name in ("free", "often", "many", "free"):
            assert (await ask(http, root, name)).status_code == 200
    assert seen == ["often", "many"]


@TWO
async def test_what_two_processes_forget_at_once_is_forgotten_twice(tmp_path: Path, deployment: Deployment) -> None:
    async with two(tmp_path, deployment) as (target, _):
        stores = [each.runtime.store for each in target.weirs]
        for _ in range(20):
            await asyncio.gather(*(each.enter_key("k", process="p", here=1, rate=9, most=0) for each in stores))
            await asyncio.gather(*(each.keep_key_use({}, process="p", forgotten={"k": 1}) for each in stores))
        uses = [await target.store.enter_key("k", process="p", here=1, rate=9, most=0) for _ in range(10)]
    assert [use.refused for use in uses] == [Refusal.NONE] * 9 + [Refusal.RATE]
