"""Policies change while Weir runs: by its files, and over HTTP."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.store import Store
from proxy.store.chain import AuditType
from tests.functional.harness import COUNTER, RunningWeir, WeirProcess, free_port, opening, weir
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

ADMIN = "admin-0123456789"
YAML = """
upstreams: {{main: {{base_url: "{upstream}"}}}}
window: 8192
auth: {{admin_token: {admin}}}
default_policy: {policy}
{more}
"""


def written(path: Path, simulator: RunningSimulator, *, policy: str = "balanced", more: str = "") -> None:
    path.write_text(YAML.format(upstream=simulator.base_url, admin=ADMIN, policy=policy, more=more))


@asynccontextmanager
async def running(tmp_path: Path, *, store: str | None = None) -> AsyncIterator[RunningWeir]:
    """Weir in this loop, with an operator."""
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        text = YAML.format(upstream=simulator.base_url, admin=ADMIN, policy="balanced", more="")
        path = None if store is None else tmp_path / store
        async with weir("", path, yaml=text, folder=tmp_path) as running:
            yield running


async def call(
    weir: RunningWeir | WeirProcess, method: str, path: str, body: str | None = None, *, key: str | None = ADMIN
) -> tuple[int, dict[str, Any]]:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{weir.root}/weir/{path}", data=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def policy_of_a_request(weir: RunningWeir | WeirProcess, *, asked: str | None = None) -> str | None:
    """The policy that the record of one real request names; None where it was relayed."""
    headers = {"x-weir-policy": asked} if asked is not None else {}
    raw = await weir.client().chat.completions.with_raw_response.create(
        model="sim", messages=opening(seed=time.monotonic_ns()), extra_headers=headers
    )
    assert raw.parse().choices[0].message.content
    name = raw.headers.get("x-weir-conversation")
    if name is None:
        return None
    for _ in range(100):
        status, timeline = await call(weir, "GET", f"conversations/{name}/timeline")
        if status == 200 and timeline["data"]:
            return str(timeline["data"][-1]["policy"])
        await asyncio.sleep(0.05)
    raise AssertionError("the request was not recorded")


async def logged(weir: WeirProcess, words: str) -> list[str]:
    """The lines that say so, as soon as there is one."""
    for _ in range(160):
        if found := [line for line in weir.log if words in line]:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"nothing about {words!r} in {weir.log}")


@pytest.mark.requirement("A0.45", "A1.4", "R.79")
async def test_a_changed_file_holds_from_the_next_request_on_and_a_broken_one_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "weir.yaml"
    store = f"store: {{url: 'sqlite+aiosqlite:///{tmp_path / 'w.db'}'}}\n"
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        written(path, simulator, more=store)
        async with WeirProcess(["--config", str(path)], free_port()) as process:
            assert await policy_of_a_request(process) == "balanced"

            written(path, simulator, policy="team", more=f"{store}policies: {{team: {{headroom: 0.08}}}}\n")
            await logged(process, "the configuration was read anew")
            assert await policy_of_a_request(process) == "team"

            written(path, simulator, policy="team", more=f"{store}policies:\n  team: {{headrom: 0.08}}\n")
            said = await logged(process, "the old one stays in force")
            assert "weir.yaml:8: policies.team.headrom: unknown key; did you mean headroom?" in said[0]
            assert await policy_of_a_request(process) == "team"

            moved = f"{store}telemetry: {{service_name: other}}\nlimits: {{depth: 50}}\n"
            written(path, simulator, policy="fb-code-200k", more=moved)
            assert await logged(process, "telemetry changed in the configuration: that needs a restart")
            assert await logged(process, "limits changed in the configuration: that needs a restart")
            assert await policy_of_a_request(process) == "fb-code-200k"
            assert len([line for line in process.log if "the old one stays in force" in line]) == 1
            assert len(await logged(process, "headroom 3.0% < 5%")) == 1
    opened = await Store.open(f"sqlite+aiosqlite:///{tmp_path / 'w.db'}", read_only=True)
    rows = (await opened.audit("", kind=AuditType.POLICY_CHANGE))[::-1]
    assert (await opened.verify())[0].broken is None
    await opened.close()
    told = [dict(json.loads(row.facts)) for row in rows]
    assert [(each["change"], each["policy"], each.get("default"), each["source"]) for each in told] == [
        ("read", "team", None, "file"),
        ("default", "", "team", "file"),
        ("removed", "team", None, "file"),
        ("default", "", "fb-code-200k", "file"),
    ]
    assert re.fullmatch("[0-9a-f]{64}", told[0]["document"])


@pytest.mark.requirement("A0.45")
async def test_a_policy_that_is_put_holds_from_the_next_request_on(tmp_path: Path) -> None:
    async with running(tmp_path, store="w.db") as weir:
        assert await policy_of_a_request(weir) == "balanced"

        made = await call(weir, "PUT", "policies/team", json.dumps({"preset": "fb-code-200k", "about": "for the team"}))
        replaced = await call(weir, "PUT", "policies/team", "preset: article-128k\nzones:\n  yellow_at: 0.4\n")

        assert (made[0], made[1]["kept"], made[1]["for"], made[1]["from"]) == (201, "database", "for the team", "api")
        assert made[1]["warnings"][0].startswith("headroom 3.0% < 5%")
        assert (replaced[0], replaced[1]["policy"]["zones"]["yellow_at"]) == (200, 0.4)
        assert await policy_of_a_request(weir, asked="team") == "team"

        assert (await call(weir, "PUT", "policies/balanced", "mode: off\n"))[0] == 200
        assert await policy_of_a_request(weir) is None


@pytest.mark.requirement("A0.45", "A1.4")
async def test_only_the_operator_sets_a_policy_and_only_a_valid_one(tmp_path: Path) -> None:
    async with running(tmp_path) as weir:
        assert (await call(weir, "PUT", "policies/team", "{}", key="sk-anybody"))[0] == 403
        assert (await call(weir, "PUT", "policies/team", "{}", key=None))[0] == 403
        assert (await call(weir, "PUT", "policies/a%20b", "{}"))[0] == 400
        assert (await call(weir, "PUT", "policies/team", "x" * 300_000))[0] == 413
        assert (await call(weir, "DELETE", "policies/team"))[0] == 404
        assert (await call(weir, "GET", "policies/team"))[0] == 404

        status, refused = await call(weir, "PUT", "policies/team", "headroom: 0.1\ncascade:\n  - {layer: evct}\n")
        assert status == 400
        assert refused["error"]["code"] == "invalid_request"
        assert refused["error"]["weir"]["problems"][0].startswith("policies.team.cascade[0].layer: no layer evct")
        for text in ("[1]", "preset: nothing\n", "a: ${HOME}\n", "a: [1\n"):
            assert (await call(weir, "PUT", "policies/team", text))[0] == 400
        assert (await call(weir, "GET", "policies/team"))[0] == 404


@pytest.mark.requirement("A0.45")
async def test_a_policy_that_was_put_is_deleted_and_what_it_stood_above_holds_again(tmp_path: Path) -> None:
    more = "policies: {team: {headroom: 0.08, about: of the file}}\n"
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        text = YAML.format(upstream=simulator.base_url, admin=ADMIN, policy="balanced", more=more)
        async with weir("", tmp_path / "w.db", yaml=text, folder=tmp_path) as running:
            for name in ("team", "balanced", "fresh"):
                assert (await call(running, "PUT", f"policies/{name}", "headroom: 0.09\n"))[0] in {200, 201}
                assert (await call(running, "GET", f"policies/{name}"))[1]["from"] == "api"

            assert (await call(running, "DELETE", "policies/team", key="sk-anybody"))[0] == 403
            assert (await call(running, "DELETE", "policies/audit"))[0] == 404
            deleted = [await call(running, "DELETE", f"policies/{name}") for name in ("team", "balanced", "fresh")]

            assert [(status, body["from"]) for status, body in deleted] == [(200, "file"), (200, "preset"), (200, None)]
            team = (await call(running, "GET", "policies/team"))[1]
            assert (team["from"], team["policy"]["headroom"]) == ("file", 0.08)
            assert (await call(running, "GET", "policies/balanced"))[1]["policy"]["headroom"] == 0.05
            assert (await call(running, "GET", "policies/fresh"))[0] == 404
            assert (await call(running, "DELETE", "policies/team"))[0] == 404
            assert await policy_of_a_request(running, asked="team") == "team"
            assert (await call(running, "PUT", "policies/team", "headroom: 0.07\n"))[1]["policy"]["headroom"] == 0.07
            assert (await call(running, "DELETE", "policies/team"))[0] == 200

        async with weir("", tmp_path / "w.db", yaml=text, folder=tmp_path) as running:
            assert (await call(running, "GET", "policies/team"))[1]["from"] == "file"
            assert (await call(running, "GET", "policies/fresh"))[0] == 404
