"""Definitions of tools that nobody uses leave the request, everything else stays byte for byte, and they can be had."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.messages import ToolDefinition, Tools
from proxy.wire.codec import parse_chat
from proxy.wire.counting import count_tools
from proxy.wire.raw import split_object
from proxy.wire.transcripts import Transcripts
from tests.functional.harness import ALONE, COUNTER, Deployment, answered, prose, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

CAP = 2_000
POLICY = """
upstreams: {{sim: {{kind: openai, base_url: "{upstream}", api_key: sk-upstream}}}}
models: [{{match: "*", upstream: sim, window: 8192}}]
policies:
  tight:
    enforce: bucket
    buckets: {{tools: {{cap: 2000, on_overflow: prune-unused}}}}
default_policy: tight
"""


def tool(number: int, *, words: int = 30) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": "Where."}}}
    about = f"Does job {number}: {prose(words, seed=number)}."
    return {
        "type": "function",
        "function": {"name": f"job_{number:02}", "description": about, "parameters": parameters},
    }


TOOLS = [tool(n) for n in range(60)]


def names(tools: list[dict[str, Any]]) -> list[str]:
    return [t["function"]["name"] for t in tools]


def called(name: str, number: int) -> list[dict[str, Any]]:
    """A step that calls one of the tools."""
    call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": '{"path": "a"}'}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": f"done {number}"},
    ]


@ALONE
@pytest.mark.requirement("D17", "A4.9", "A0.150", "A4.15", "P2")
async def test_unused_tools_are_left_out_once_and_the_array_stays_the_same_even_after_a_restart(
    tmp_path: Path, deployment: Deployment
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do job 17 and job 23, please."}]
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        yaml = POLICY.format(upstream=simulator.base_url)
        actions = []
        for start in (0, 3):
            async with deployment.serving(simulator.base_url, yaml=yaml, folder=tmp_path) as target:
                client = target.client()
                for number in range(start, start + 3):
                    answer = await client.chat.completions.with_raw_response.create(
                        model="sim", messages=messages, max_tokens=256, tools=TOOLS
                    )
                    actions.append(answer.headers["x-weir-actions"])
                    messages += called("job_17", number)
        arrays = [bytes(split_object(s.body)["tools"]) for s in answered(simulator)]
    assert len(arrays) == 6
    assert len(set(arrays)) == 1
    kept = json.loads(arrays[0])
    assert 10 < len(kept) < 40
    assert kept == [t for t in TOOLS if t in kept]
    assert {"job_17", "job_23"} <= set(names(kept))
    assert count_tools(kept, None, None, COUNTER, model="sim") <= 0.8 * CAP
    assert actions == [f"prune_tools={60 - len(kept)}"] * 6


@pytest.mark.requirement("D17", "A4.9")
async def test_a_pruned_tool_comes_back_where_it_is_asked_for_and_its_original_can_be_read(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url, yaml=POLICY.format(upstream=simulator.base_url), folder=tmp_path) as target,
        httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http,
    ):
        client = target.client()
        await client.chat.completions.create(model="sim", messages=messages, max_tokens=64, tools=TOOLS)
        first = json.loads(answered(simulator)[-1].body)["tools"]
        (lost, other), still = [n for n in names(TOOLS) if n not in names(first)][:2], names(first)
        messages += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "now"}]
        one = {"type": "function", "function": {"name": lost}}
        both = {"mode": "auto", "tools": [one, {"type": "function", "function": {"name": other}}]}
        for choice in (one, {"type": "allowed_tools", "allowed_tools": both}, "auto"):
            await client.chat.completions.create(
                model="sim", messages=messages, max_tokens=64, tools=TOOLS, tool_choice=choice
            )
        forwarded = [json.loads(s.body) for s in answered(simulator)[1:]]
        original = await http.get(f"{target.root}/weir/blobs/{ToolDefinition(lost, 0).digest.hex()[:12]}")
    assert set(names(forwarded[0]["tools"])) == {*still, lost}
    assert set(names(forwarded[1]["tools"])) == {*still, lost, other}
    assert names(forwarded[2]["tools"]) == still
    assert names(forwarded[1]["tools"]) == [n for n in names(TOOLS) if n in {*still, lost, other}]
    assert forwarded[0]["tool_choice"] == one
    assert original.json() == next(t for t in TOOLS if t["function"]["name"] == lost)


def request_with(**fields: Any) -> bytes:
    return json.dumps({"model": "sim", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


async def tools_of(body: bytes, *, model: str = "sim", transcripts: Transcripts | None = None) -> tuple[Tools, int]:
    """The definitions of a request one by one, and the tokens of all together."""
    reading = await (transcripts or Transcripts()).read(parse_chat(body), tenant="t", model=model, counter=COUNTER)
    return reading.transcript.read_tools(), reading.transcript.tools


async def test_what_has_no_name_is_not_ours_to_prune_and_a_name_defined_twice_is_one() -> None:
    search = {"type": "web_search"}
    tools, together = await tools_of(request_with(tools=[search, TOOLS[0], TOOLS[1], TOOLS[0], "odd", None]))
    assert [d.name for d in tools.definitions] == ["job_00", "job_01"]
    assert tools.definitions[0].tokens == 2 * (await tools_of(request_with(tools=[TOOLS[0]])))[1]
    assert together > sum(d.tokens for d in tools.definitions)
    assert (await tools_of(request_with(tools="none")))[0].definitions == ()
    assert (await tools_of(request_with()))[0] == Tools()
