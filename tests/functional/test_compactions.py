"""Compactions that clients ask for: the provider's where it makes them, Weir's where it makes none."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.functional.harness import COUNTER, RunningWeir, weir
from tests.upstream import Dialect, SimulatedAnswer, SimulatorSettings, run_simulator
from tests.upstream.app import RunningSimulator

WINDOW = 16_384
OWN = "weir:1:"
TASK = "Migrate the billing service. Never touch ledger_v2.sql."
BETA = {"anthropic-beta": "compact-2026-09-04,compact-2026-01-12"}


def said(step: int) -> str:
    return " ".join(f"line {n}: value {step * 1000 + n}," for n in range(60))


def items(steps: int = 10) -> list[Any]:
    """A loop on Responses whose newest step has failed."""
    found: list[Any] = [{"type": "message", "role": "user", "content": TASK}]
    for step in range(steps):
        output = said(step) if step < steps - 1 else "error: the table invoices_2031 is locked"
        found.append({"type": "function_call", "call_id": f"c{step}", "name": "read", "arguments": f'{{"n": {step}}}'})
        found.append({"type": "function_call_output", "call_id": f"c{step}", "output": output})
    return found


def messages(steps: int = 10) -> list[Any]:
    """The same on Messages."""
    found: list[Any] = [{"role": "user", "content": TASK}]
    for step in range(steps):
        output = said(step) if step < steps - 1 else "error: the table invoices_2031 is locked"
        call = {"type": "tool_use", "id": f"toolu_{step}", "name": "read", "input": {"n": step}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{step}", "content": output}
        found += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return found


TOOL = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False}
CLAUDE_TOOL = {"name": "read", "input_schema": {"type": "object", "properties": {}}}


def answer(_: Any) -> SimulatedAnswer:
    """The same to everything but a request for a summary, which the simulator writes."""
    return SimulatedAnswer(text="Going on.")


@asynccontextmanager
async def before(
    dialect: Dialect, folder: Path, *, provider: str = "", **options: Any
) -> AsyncIterator[tuple[RunningSimulator, RunningWeir]]:
    """Weir in front of a model; ``provider`` is who its configuration says it is."""
    settings = SimulatorSettings(dialect=dialect, window=WINDOW, answer=answer)
    with run_simulator(settings, counter=COUNTER) as simulator:
        named = f"\n    provider: {provider}" if provider else ""
        yaml = f"upstreams:\n  up:\n    base_url: {simulator.base_url}{named}\n"
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=WINDOW, **options) as proxy:
            yield simulator, proxy


def gone_up(simulator: RunningSimulator) -> list[bytes]:
    return [each.body for each in simulator.ledger if each.method == "POST"]


async def compact(client: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
    """By ``/responses/compact``."""
    raw = await client.responses.with_raw_response.compact(model="m", input=items())
    return [each.model_dump(exclude_none=True, warnings=False) for each in raw.parse().output], raw.headers


async def trigger(client: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
    """By an item, as Codex does."""
    given: Any = [*items(), {"type": "compaction_trigger"}]
    raw = await client.responses.with_raw_response.create(model="m", input=given, tools=[TOOL], store=False)
    answer = raw.parse()
    assert answer.status == "completed"
    return [each.model_dump(exclude_none=True, warnings=False) for each in answer.output], raw.headers


async def streamed(client: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
    """The same, streamed."""
    given: Any = [*items(), {"type": "compaction_trigger"}]
    async with client.responses.stream(model="m", input=given, tools=[TOOL], store=False) as stream:
        final = await stream.get_final_response()
        return [
            each.model_dump(exclude_none=True, warnings=False) for each in final.output
        ], stream._raw_stream.response.headers


WAYS = [compact, trigger, streamed]
Way = Callable[[openai.AsyncOpenAI], Any]


@pytest.mark.requirement("A0.57", "P7")
@pytest.mark.parametrize("way", WAYS)
async def test_a_compaction_is_made_for_an_upstream_that_makes_none_and_understood_when_it_comes_back(
    way: Way, tmp_path: Path
) -> None:
    async with before(Dialect.VLLM, tmp_path) as (simulator, proxy):
        client = proxy.client()
        output, headers = await way(client)
        assert headers["x-weir-actions"] == "compaction=1"
        assert len(gone_up(simulator)) == 1  # the upstream was asked whether it makes one
        await way(client)
        assert len(gone_up(simulator)) == 1  # and is not asked again for a while
        compaction = output[-1]
        assert compaction["type"] == "compaction"
        assert compaction["encrypted_content"].startswith(OWN)
        kept = [each for each in output if each["type"] == "message"]
        assert [part["text"] for each in kept for part in each["content"]] == ([TASK] if way is compact else [])

        later: Any = [*output, {"role": "user", "content": "What now?"}]
        answer = await client.responses.create(model="m", input=later, tools=[TOOL], store=False)
        assert answer.output_text == "Going on."
        counted = await client.responses.input_tokens.count(model="m", input=later, tools=[TOOL])
        up = gone_up(simulator)[-2]
    assert OWN.encode() not in up
    assert b'"compaction"' not in up
    text = up.decode()
    assert "Never touch ledger_v2.sql." in text
    assert "the table invoices_2031 is locked" in text
    assert counted.input_tokens == pytest.approx(COUNTER.count(text), rel=0.4)
    assert counted.input_tokens < COUNTER.count(json.dumps(items())) / 2


@pytest.mark.requirement("A0.57")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asked", ["summarize", "pause"])
async def test_messages_are_compacted_for_an_upstream_that_makes_none(asked: str, stream: bool, tmp_path: Path) -> None:
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000 if stream else 1_000}}
    edits = {"edits": [{**edit, "pause_after_compaction": True, "trigger": {"type": "input_tokens", "value": 1_000}}]}
    wants: Any = {"compaction": {"type": "summarize"}} if asked == "summarize" else {"context_management": edits}
    async with before(Dialect.VLLM, tmp_path) as (simulator, proxy):
        body: Any = {"model": "m", "max_tokens": 500, "tools": [CLAUDE_TOOL], "messages": messages()}
        async with anthropic.AsyncAnthropic(base_url=proxy.root, api_key="k", max_retries=0) as client:
            call = client.beta.messages
            if stream:
                async with call.stream(**body, extra_body=wants, extra_headers=BETA) as events:
                    made = await events.get_final_message()
            else:
                made = await call.create(**body, extra_body=wants, extra_headers=BETA)
            assert made.stop_reason == "compaction"
            assert gone_up(simulator) == []
            (block,) = [each.model_dump(exclude_none=True, warnings=False) for each in made.content]
            assert "Never touch ledger_v2.sql." in block["content"]
            given = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "What now?"}]
            later = await call.create(**body | {"messages": given}, extra_headers=BETA)
        assert later.content[0].text == "Going on."
        up = json.loads(gone_up(simulator)[-1])
    (message,) = up["messages"]
    assert message["role"] == "user"
    assert message["content"] == [{"type": "text", "text": block["content"]}, {"type": "text", "text": "What now?"}]


@pytest.mark.requirement("A0.57")
async def test_below_its_trigger_nothing_is_compacted(tmp_path: Path) -> None:
    edits = {"edits": [{"type": "compact_20260112", "pause_after_compaction": True}]}
    async with before(Dialect.VLLM, tmp_path) as (simulator, proxy), httpx.AsyncClient(headers=BETA) as client:
        body = {"model": "m", "max_tokens": 500, "messages": messages(2), "context_management": edits}
        told = await client.post(f"{proxy.base_url}/messages", json=body | {"tools": [CLAUDE_TOOL]})
    assert told.json()["stop_reason"] == "end_turn"
    assert len(gone_up(simulator)) == 1


@pytest.mark.requirement("S.1", "P7")
async def test_a_compaction_is_of_use_to_nobody_else_and_only_as_it_was_given(tmp_path: Path) -> None:
    async with before(Dialect.VLLM, tmp_path) as (simulator, proxy):
        output, _ = await compact(proxy.client())
        before_it = len(gone_up(simulator))
        sealed = output[-1]["encrypted_content"]
        broken = {**output[-1], "encrypted_content": sealed[:-9] + "AAAA" + sealed[-5:]}
        others = openai.AsyncOpenAI(base_url=proxy.base_url, api_key="another", max_retries=0)
        for client, item in ((others, output[-1]), (proxy.client(), broken)):
            given: Any = [item, {"role": "user", "content": "What now?"}]
            with pytest.raises(openai.BadRequestError, match="made for another key, or was changed since"):
                await client.responses.create(model="m", input=given)
        await others.close()
        assert len(gone_up(simulator)) == before_it


@pytest.mark.requirement("A0.57", "P13")
async def test_the_policys_summariser_writes_it_where_there_is_one(tmp_path: Path) -> None:
    async with before(Dialect.VLLM, tmp_path, summarizer="same") as (simulator, proxy):
        client = proxy.client()
        output, _ = await compact(client)
        assert len(gone_up(simulator)) > 1
        given: Any = [*output, {"role": "user", "content": "What now?"}]
        await client.responses.create(model="m", input=given)
        assert "Notes so far (a model's, not verified):" in gone_up(simulator)[-1].decode()


async def test_what_was_compacted_twice_still_has_what_the_user_forbade_and_one_summary(tmp_path: Path) -> None:
    async with before(Dialect.VLLM, tmp_path) as (simulator, proxy):
        client = proxy.client()
        first, _ = await compact(client)
        again: Any = [*first, *items()[1:]]
        second = await client.responses.compact(model="m", input=again)
        kept = [each.model_dump(exclude_none=True, warnings=False) for each in second.output]
        assert [each["type"] for each in kept] == ["message", "compaction"]
        given: Any = [*kept, {"role": "user", "content": "What now?"}]
        await client.responses.create(model="m", input=given)
        text = gone_up(simulator)[-1].decode()
    assert text.count("Written by Weir") == 1
    assert "Never touch ledger_v2.sql." in text
    assert "invoices_2031" in text


def long_body(surface: str) -> dict[str, Any]:
    if surface == "responses":
        return {"model": "m", "input": items(24), "tools": [TOOL], "store": False, "max_output_tokens": 500}
    given = {"messages": messages(24), "tools": [CLAUDE_TOOL], "max_tokens": 500}
    return {"model": "m", **given, "thinking": {"type": "adaptive"}}


NATIVE = {
    "responses": (Dialect.OPENAI, "openai"),
    "messages": (Dialect.ANTHROPIC, "anthropic"),
}


@pytest.mark.requirement("A0.59")
@pytest.mark.parametrize("surface", NATIVE)
async def test_a_policy_that_leaves_compaction_to_the_provider_has_it_compact(surface: str, tmp_path: Path) -> None:
    dialect, provider = NATIVE[surface]
    settings = SimulatorSettings(dialect=dialect, window=100_000, answer=answer)
    with run_simulator(settings, counter=COUNTER) as simulator:
        yaml = f"upstreams:\n  up:\n    base_url: {simulator.base_url}\n    provider: {provider}\n"
        options: Any = {"window": 72_000 if surface == "messages" else 12_000, "balanced": {"compaction": "provider"}}
        async with (
            weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, **options) as proxy,
            httpx.AsyncClient(headers={"authorization": "Bearer k", "anthropic-version": "2023-06-01"}) as client,
        ):
            long = long_body(surface)
            if surface == "messages":
                long["messages"] = messages(130)
            short = long | {
                "input" if surface == "responses" else "messages": (items if surface == "responses" else messages)(3)
            }
            told = [await client.post(f"{proxy.base_url}/{surface}", json=body) for body in (short, long)]
            own = [{"type": "clear_thinking_20251015", "keep": "all"}]
            mixed = long | {"context_management": {"edits": own}} if surface == "messages" else long
            beta = {"anthropic-beta": "context-management-2025-06-27"}
            told.append(await client.post(f"{proxy.base_url}/{surface}", json=mixed, headers=beta))
    assert [each.status_code for each in told] == [200, 200, 200], told[-1].text
    up = [json.loads(body) for body in gone_up(simulator)]
    assert up[0] == short
    asked = up[1].pop("context_management")
    assert up[1] == long
    assert "native_compaction=1" in told[1].headers["x-weir-actions"]
    parts = told[1].json()["output" if surface == "responses" else "content"]
    assert parts[0]["type"] == "compaction"
    if surface == "messages":
        (edit,) = asked["edits"]
        assert edit["type"] == "compact_20260112"
        assert edit["trigger"]["value"] >= 50_000
        assert [each["type"] for each in up[2]["context_management"]["edits"]] == [own[0]["type"], edit["type"]]
        betas = simulator.ledger[-1].header("anthropic-beta")
        assert betas == "context-management-2025-06-27,compact-2026-01-12"


@pytest.mark.requirement("A0.59", "P4")
@pytest.mark.parametrize("surface", ["responses", "messages"])
async def test_an_edit_that_does_not_pause_is_carried_out_on_the_way_up_and_adds_nothing_to_the_answer(
    surface: str, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"model": "m"}
    if surface == "responses":
        edits: Any = [{"type": "compaction", "compact_threshold": 2_000}]
        asked |= {"input": items(16), "tools": [TOOL], "store": False, "max_output_tokens": 512}
    else:
        trigger = {"type": "input_tokens", "value": 2_000}
        edits = {"edits": [{"type": "compact_20260112", "trigger": trigger}]}
        asked |= {"messages": messages(16), "tools": [CLAUDE_TOOL], "max_tokens": 512}
    async with (
        before(Dialect.VLLM, tmp_path) as (simulator, proxy),
        httpx.AsyncClient(headers={"authorization": "Bearer sk-test", **BETA}, timeout=60) as client,
    ):
        url = f"{proxy.base_url}/{surface}"
        edited = await client.post(url, json={**asked, "context_management": edits})
        up = json.loads(gone_up(simulator)[-1])
    assert edited.headers["x-weir-actions"].startswith("compact=1")
    assert "context_management" not in up
    assert len(json.dumps(up)) < 0.6 * len(json.dumps(asked))
    assert "compaction" not in edited.text
    assert "Going on." in edited.text
