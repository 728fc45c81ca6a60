"""Agents whose own prompt nearly fills the window: real requests, grown by steps, directly and through Weir.

The requests of clients that are not in this repository are played where the captures are at hand.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.captures import ALL, everything, sample
from tests.functional.harness import COUNTER, Talk, prose, weir
from tests.profile import each_once
from tests.properties.clients import texts_of
from tests.upstream import Dialect, RunningSimulator, SimulatorSettings, serve_simulator

TIMES = (1.1, 1.2, 1.4, 1.7, 2.5)
STEPS = 24
SHARE = 0.06
"""Words of a result, for each token that the client's own prompt leaves."""
LARGE = 32_000
"""``max_tokens`` that a client sends whatever the window is."""
Body = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """A client's first request with tools, and how it adds a step."""

    name: str
    path: str
    body: Body
    array: str
    step: Callable[[int, str], list[Body]]

    def grown(self, steps: int, size: int) -> Body:
        said = list(self.body[self.array])
        for number in range(steps):
            said += self.step(number, result_of(number, size))
        return {**self.body, self.array: said, "stream": False}


def result_of(number: int, size: int) -> str:
    return prose(size, seed=number)


def chat_step(number: int, text: str) -> list[Body]:
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "read", "arguments": f'{{"n": {number}}}'}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": text},
    ]


def responses_step(number: int, text: str) -> list[Body]:
    named = {"call_id": f"call_{number}"}
    return [
        {"type": "function_call", **named, "name": "exec_command", "arguments": f'{{"cmd": "cat {number}"}}'},
        {"type": "function_call_output", **named, "output": text},
    ]


def messages_step(number: int, text: str) -> list[Body]:
    named = f"toolu_{number}"
    call = {"type": "tool_use", "id": named, "name": "Read", "input": {"n": number}}
    return [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": named, "content": text}]},
    ]


def codex() -> Client:
    body = next(each.body for each in sample() if each.name.startswith("codex exec"))
    asked = [item for item in body["input"] if item.get("type") == "message" and item["role"] != "assistant"]
    kept = {key: value for key, value in body.items() if key not in ("include", "reasoning")}
    return Client("codex", "/v1/responses", {**kept, "input": asked}, "input", responses_step)


def claude_code() -> Client:
    body = next(each.body for each in everything() if each.name.startswith("claude-code print 2"))
    kept = {key: body[key] for key in ("model", "system", "tools")}
    asked = [message for message in body["messages"] if message["role"] == "user"][:1]
    return Client(
        "claude-code", "/v1/messages", {**kept, "messages": asked, "max_tokens": LARGE}, "messages", messages_step
    )


def opencode(most: int) -> Client:
    lines = (ALL.parent / "clients" / "opencode.jsonl").read_text(encoding="utf-8").splitlines()
    bodies = (json.loads(line)["body"] for line in lines)
    body = next(each for each in bodies if isinstance(each, dict) and isinstance(each.get("tools"), list))
    kept = {key: body[key] for key in ("model", "messages", "tools")}
    return Client("opencode", "/v1/chat/completions", {**kept, "max_tokens": most}, "messages", chat_step)


CLIENTS: Mapping[str, Callable[[], Client]] = {
    "codex": codex,
    "claude-code": claude_code,
    "opencode": lambda: opencode(8_192),
    "qwen-code": lambda: opencode(LARGE),
}
AT_HAND = [name for name in CLIENTS if name == "codex" or ALL.exists()]


async def send(root: str, client: Client, body: Body) -> httpx.Response:
    headers = {"authorization": "Bearer sk-test", "x-api-key": "sk-test", "anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(base_url=root, headers=headers, timeout=60) as http:
        return await http.post(client.path, json=body)


async def prompt_of(client: Client) -> int:
    """Tokens of the client's own prompt as the upstream counts them."""
    async with serve_simulator(SimulatorSettings(window=1_000_000, dialect=Dialect.VLLM), counter=COUNTER) as upstream:
        answer = await send(root_of(upstream), client, client.grown(0, 0))
        assert answer.status_code == 200, answer.text
        [seen] = upstream.answered()
        return seen.prompt_tokens


def root_of(upstream: RunningSimulator) -> str:
    return upstream.base_url.removesuffix("/v1")


@pytest.mark.requirement("P12", "A0.3")
@each_once
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", AT_HAND)
async def test_what_is_answered_directly_is_answered_through_weir_and_the_newest_is_whole(
    name: str, times: float, tmp_path: Path
) -> None:
    client = CLIENTS[name]()
    window = int(times * await prompt_of(client))
    size = int(SHARE * (1 - 1 / times) * window)
    task = list(texts_of(client.body[client.array][-1]))
    settings = SimulatorSettings(window=window, dialect=Dialect.VLLM, stops_at_window=True, stateful=False)
    async with (
        serve_simulator(settings, counter=COUNTER) as alone,
        serve_simulator(settings, counter=COUNTER) as upstream,
        weir(upstream.base_url, tmp_path / "w.db", window=window) as target,
    ):
        answered = dict.fromkeys(("directly", "through"), 0)
        for steps in range(STEPS):
            body = client.grown(steps, size)
            directly, through = await send(root_of(alone), client, body), await send(target.root, client, body)
            answered["directly"] += directly.status_code == 200
            answered["through"] += through.status_code == 200
            assert through.status_code == 200, (steps, answered, through.text[:300])
            said = "\n".join(texts_of(upstream.answered()[-1].json()[client.array]))
            shown = (steps, {name: value for name, value in through.headers.items() if name.startswith("x-weir")})
            assert all(text in said for text in task), shown
            assert not steps or result_of(steps - 1, size) in said, shown
        assert answered["directly"] < STEPS or times > 1.4


@dataclass(frozen=True)
class Told:
    """What is said of a conversation: a header of each answer, its status, its rows, its alerts."""

    pressures: list[str]
    status: Body
    rows: list[Body]
    alerts: list[Body]


async def told_of(first: list[Body], steps: int, folder: Path) -> Told:
    """What is said of an agent in a window of 8,192 that always allows 4,000 tokens of answer."""
    async with (
        serve_simulator(SimulatorSettings(window=1_000_000), counter=COUNTER) as upstream,
        weir(upstream.base_url, folder / "w.db") as target,
        httpx.AsyncClient(base_url=target.root, headers={"authorization": "Bearer sk-test"}, timeout=60) as http,
    ):
        talk = Talk(target.client(), first)
        for _ in range(steps):
            await talk.ask(max_tokens=4_000)
            talk.add_step(words=60)
        await target.stored()
        at = f"/weir/conversations/{talk.headers[-1]['x-weir-conversation']}"
        return Told(
            pressures=[headers["x-weir-pressure"] for headers in talk.headers],
            status=(await http.get(at)).json(),
            rows=(await http.get(f"{at}/timeline")).json()["data"],
            alerts=(await http.get(f"{at}/health")).json()["alerts"],
        )


@pytest.mark.requirement("A0.134", "A0.118")
async def test_what_only_takes_of_the_reserve_is_no_emergency(tmp_path: Path) -> None:
    first = [{"role": "system", "content": prose(3_700, seed=5)}, {"role": "user", "content": "Go on."}]
    told = await told_of(first, 6, tmp_path)
    assert {each.partition(";")[2] for each in told.pressures} == {"critical;active"}
    assert told.status["window_status"] == "active"
    assert {row["action"] for row in told.rows} <= {"evaluate", "evict_and_compress"}
    assert {alert["kind"] for alert in told.alerts} <= {"utilization"}


@pytest.mark.requirement("A0.134", "A0.118")
async def test_what_needed_a_rung_is_an_emergency_wherever_it_is_said(tmp_path: Path) -> None:
    told = await told_of([{"role": "user", "content": prose(9_000, seed=5)}], 1, tmp_path)
    assert told.pressures[0].endswith(";emergency")
    assert told.status["window_status"] == "emergency"
    assert [row["action"] for row in told.rows] == ["emergency_compaction"]
    assert "overflow" in {alert["kind"] for alert in told.alerts}
