"""What a request would take: counted as it would be sent, and nothing is changed by it."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.functional.harness import ALONE, COUNTER, Deployment, InTurns, weir
from tests.profile import each_once
from tests.upstream import Dialect, SimulatorSettings, run_simulator

HEADERS = {"authorization": "Bearer k", "anthropic-version": "2023-06-01"}
STEPS = 24


def said(number: int) -> str:
    return " ".join(f"line {n}: value {number * 1000 + n}," for n in range(60))


async def long_messages(proxy: InTurns) -> dict[str, Any]:
    """A conversation of Messages that has been through its window, and the request that would come next."""
    tools = [{"name": "read", "description": "Read", "input_schema": {"type": "object", "properties": {}}}]
    body: dict[str, Any] = {"model": "claude", "system": "Be brief.", "tools": tools}
    body["messages"] = [{"role": "user", "content": "Audit the files."}]
    async with anthropic.AsyncAnthropic(base_url=proxy.root(), api_key="k", max_retries=0) as client:
        for step in range(STEPS):
            client.base_url = proxy.root()
            await client.messages.create(**body, max_tokens=300)
            call = {"type": "tool_use", "id": f"toolu_{step}", "name": "read", "input": {"path": f"{step}.txt"}}
            result = {"type": "tool_result", "tool_use_id": f"toolu_{step}", "content": said(step)}
            body["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return body


async def long_responses(proxy: InTurns) -> dict[str, Any]:
    """The same of Responses."""
    tools = [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False}]
    body: dict[str, Any] = {"model": "gpt", "instructions": "Be brief.", "tools": tools, "store": False}
    body["input"] = [{"role": "user", "content": "Audit the files."}]
    async with openai.AsyncOpenAI(base_url=f"{proxy.root()}/v1", api_key="k", max_retries=0) as client:
        for step in range(STEPS):
            client.base_url = f"{proxy.root()}/v1"
            await client.responses.create(**body, max_output_tokens=300)
            call = {"type": "function_call", "call_id": f"call_{step}", "name": "read", "arguments": f'{{"n": {step}}}'}
            result = {"type": "function_call_output", "call_id": f"call_{step}", "output": said(step)}
            body["input"] += [call, result]
    return {name: value for name, value in body.items() if name != "store"}


@each_once
@ALONE
@pytest.mark.parametrize(
    ("dialect", "path", "talk"),
    [
        (Dialect.ANTHROPIC, "/messages/count_tokens", long_messages),
        (Dialect.OPENAI, "/responses/input_tokens", long_responses),
    ],
)
async def test_a_request_is_counted_as_it_would_be_sent(
    dialect: Dialect, path: str, talk: Any, deployment: Deployment
) -> None:
    with run_simulator(SimulatorSettings(dialect=dialect, window=8192), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url) as proxy, httpx.AsyncClient(headers=HEADERS) as client:
            body = await talk(proxy)
            await proxy.settled()
            stored = (await client.get(f"{proxy.root()}/weir/conversations")).json()
            answer = await client.post(f"{proxy.root()}/v1{path}", json=body)
            assert answer.status_code == 200, answer.text
            counted = answer.json()["input_tokens"]
            await proxy.settled()
            assert (await client.get(f"{proxy.root()}/weir/conversations")).json() == stored
            whole = await client.post(f"{simulator.base_url}{path}", json=body)
            asked = {"max_tokens": 300} if dialect is Dialect.ANTHROPIC else {"max_output_tokens": 300, "store": False}
            sent = await client.post(f"{proxy.root()}/v1{path.rsplit('/', 1)[0]}", json=body | asked)
        assert sent.status_code == 200, sent.text
        assert simulator.ledger[-1].prompt_tokens == pytest.approx(counted, rel=0.03)
    assert whole.json()["input_tokens"] > 8192 > counted


@each_once
@ALONE
@pytest.mark.parametrize("way", ["trigger", "codex"])
async def test_a_compaction_that_is_none_of_weirs_has_the_known_edits_and_no_others(
    way: str, deployment: Deployment
) -> None:
    with run_simulator(SimulatorSettings(dialect=Dialect.OPENAI, window=8192), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url) as proxy, httpx.AsyncClient(headers=HEADERS) as client:
            body = await long_responses(proxy) | {"store": False, "max_output_tokens": 300}
            asked: dict[str, Any] = {"type": "compaction_trigger"}
            headers = {}
            if way == "codex":
                asked = {"role": "user", "content": "CONTEXT CHECKPOINT COMPACTION: write a handoff summary."}
                headers = {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
            aside = body | {"input": [*body["input"], asked]}
            answer = await client.post(f"{proxy.root()}/v1/responses", json=aside, headers=headers)
            assert answer.status_code == 200, answer.text
            forwarded = json.loads(simulator.ledger[-1].body)["input"]
            later = await client.post(f"{proxy.root()}/v1/responses", json=body)
        assert later.status_code == 200
    assert forwarded[-1] == asked
    assert len(forwarded) < len(aside["input"])
    assert later.headers["x-weir-actions"].startswith("compact=1")  # what the conversation knows is as it was


async def test_an_upstream_that_does_not_count_leaves_it_to_weir(tmp_path: Path) -> None:
    settings = SimulatorSettings(dialect=Dialect.OPENAI, window=8192)  # it has no route of Anthropic's
    with run_simulator(settings, counter=COUNTER) as simulator:
        async with weir(simulator.base_url, tmp_path / "w.db") as proxy, httpx.AsyncClient(headers=HEADERS) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": said(1)}]}
            answer = await client.post(f"{proxy.base_url}/messages/count_tokens", json=body)
    assert answer.status_code == 200
    assert answer.json()["input_tokens"] == pytest.approx(COUNTER.count(said(1)), rel=0.1)
    assert answer.headers["x-weir-tokens"].startswith("~")


async def test_a_client_that_looks_whether_anybody_is_there_is_answered(tmp_path: Path) -> None:
    with run_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        async with weir(simulator.base_url, tmp_path / "w.db") as proxy, httpx.AsyncClient() as client:
            assert (await client.head(f"{proxy.root}/")).status_code == 200
        assert simulator.ledger == []


ASKED = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
CLEARS = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1000}}]}


@pytest.mark.parametrize(
    ("provider", "asked", "goes_up"),
    [(None, ASKED, True), (None, CLEARS, False), ("anthropic", CLEARS, True), ("anthropic", ASKED, True)],
)
async def test_a_clients_own_edits_are_the_providers_where_it_makes_them(
    provider: str | None, asked: dict[str, Any], goes_up: bool, tmp_path: Path
) -> None:
    dialect = SimulatorSettings(dialect=Dialect.ANTHROPIC, window=100_000)
    with run_simulator(dialect, counter=COUNTER) as simulator:
        named = f"\n    provider: {provider}" if provider else ""
        yaml = f"upstreams:\n  up:\n    base_url: {simulator.base_url}{named}\n"
        async with (
            weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path) as proxy,
            httpx.AsyncClient(headers=HEADERS) as client,
        ):
            messages: list[Any] = [{"role": "user", "content": "Audit."}]
            for step in range(6):
                call = {"type": "tool_use", "id": f"toolu_{step}", "name": "read", "input": {}}
                result = {"type": "tool_result", "tool_use_id": f"toolu_{step}", "content": said(step)}
                messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
            tools = [{"name": "read", "input_schema": {"type": "object"}}]
            thinking = {"type": "adaptive"}
            body = {"model": "claude", "max_tokens": 100, "messages": messages, "tools": tools, "thinking": thinking}
            sent = json.dumps(body | {"context_management": asked}).encode()
            beta = {"anthropic-beta": "context-management-2025-06-27", "content-type": "application/json"}
            answer = await client.post(f"{proxy.base_url}/messages", content=sent, headers=beta)
        assert answer.status_code == 200, answer.text
        up = simulator.ledger[-1].body
    assert (up == sent) is goes_up
    assert ("context_management" in json.loads(up)) is goes_up
    if not goes_up:
        texts = [str(m["content"]) for m in json.loads(up)["messages"] if m["role"] == "user"]
        assert sum("line 30" in text for text in texts) == 3  # the newest three stay
