"""The openai SDK, Weir, litellm, and a server that speaks Anthropic's protocol: one behind the other."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.app import create_app
from proxy.config.loading import load_config
from proxy.config.values import Flags
from proxy.server import serve
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.upstream.client import providers_for
from tests.functional.harness import COUNTER, TOKENIZER, TOOLS, opening, prose, tool_step
from tests.upstream import Dialect, SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

MODEL = "claude-sim"
KEY = "sk-ant-of-the-operator"
STEPS = 30
CONFIG = """
upstreams:
  claude:
    kind: litellm
    provider: anthropic
    api_base: {origin}
    api_key: {key}
    timeout: {{connect: 5, first_byte: 20, idle: 10}}
models:
  - {{match: "claude-*", upstream: claude, window: {window}, max_output: 2048, tokenizer: o200k_base}}
"""

pytestmark = [
    pytest.mark.requirement("P16", "P5"),
    pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier"),
    pytest.mark.slow,
]


@dataclass(frozen=True, slots=True)
class Chain:
    """A client of Weir, and the simulator behind it."""

    client: openai.AsyncOpenAI
    simulator: RunningSimulator

    async def ask(self, messages: list[dict[str, Any]], **options: Any) -> tuple[Any, dict[str, str]]:
        """The parsed answer and its headers."""
        given = {"model": MODEL, "max_tokens": 512, **options}
        raw = await self.client.chat.completions.with_raw_response.create(messages=messages, **given)
        return raw.parse(), dict(raw.headers)


@contextlib.asynccontextmanager
async def chain(
    folder: Path,
    *,
    believed: int = 8192,
    window: int = 8192,
    answers: tuple[SimulatedAnswer | str, ...] = (),
    **more: Any,
) -> AsyncIterator[Chain]:
    """Weir that believes in a window of ``believed`` tokens, in front of one of ``window``."""
    settings = SimulatorSettings(
        dialect=Dialect.ANTHROPIC, window=window, answers=answers, api_keys=(KEY,), models=(MODEL,), **more
    )
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        path = folder / "weir.yaml"
        path.write_text(CONFIG.format(origin=simulator.origin, key=KEY, window=believed))
        config = load_config(path, env={}, flags=Flags(store="sqlite+aiosqlite:///:memory:"))
        app = create_app(
            config,
            telemetry=Telemetry.create(OtelSettings()),
            tokenizer=TOKENIZER,
            providers=providers_for(config.upstreams.values()),
        )
        async with serve(app) as server:
            base = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=base, api_key="sk-client", max_retries=0) as client:
                yield Chain(client, simulator)


async def test_a_call_and_its_result_go_through_and_come_back(tmp_path):
    spoken = (SimulatedAnswer(calls=(SimulatedCall("read_file", '{"path": "a.py"}', id="toolu_7"),)), "It prints one.")
    async with chain(tmp_path, answers=spoken) as there:
        messages = opening()
        first, headers = await there.ask(messages, tools=TOOLS)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert json.loads(message.tool_calls[0].function.arguments) == {"path": "a.py"}
        assert first.usage.prompt_tokens == there.simulator.ledger[-1].prompt_tokens
        assert headers["x-weir-actions"] == "none"
        assert headers["request-id"]

        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": "toolu_7", "content": "print(1)"}]
        second, _ = await there.ask(messages, tools=TOOLS)
        assert second.choices[0].message.content == "It prints one."
        sent = there.simulator.ledger[-1].json()
    assert sent["system"][0]["text"].startswith("You are a careful coding agent.")
    [result] = sent["messages"][-1]["content"]
    assert (result["type"], result["tool_use_id"]) == ("tool_result", "toolu_7")


async def test_a_stream_reaches_the_client_in_pieces_with_its_usage(tmp_path):
    spoken = SimulatedAnswer(text=prose(40, seed=4), calls=(SimulatedCall("read_file", '{"path": "b.py"}'),))
    async with chain(tmp_path, answers=(spoken,)) as there:
        stream = await there.client.chat.completions.create(
            model=MODEL,
            messages=opening(),
            max_tokens=512,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        tokens = there.simulator.ledger[-1].prompt_tokens
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == spoken.text
    pieces = [call.function.arguments or "" for delta in deltas for call in delta.tool_calls or ()]
    assert json.loads("".join(pieces)) == {"path": "b.py"}
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage.prompt_tokens == tokens
    assert len(chunks) > 10


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_far_larger_than_the_window_is_answered_at_every_step(tmp_path, stream):
    async with chain(tmp_path) as there:
        messages, acted = opening(), []
        for step in range(STEPS):
            if stream:
                raw = await there.client.chat.completions.with_raw_response.create(
                    model=MODEL, messages=messages, max_tokens=512, tools=TOOLS, stream=True
                )
                parts = [chunk.choices[0].delta.content or "" async for chunk in raw.parse() if chunk.choices]
                assert "".join(parts)
                headers = dict(raw.headers)
            else:
                answer, headers = await there.ask(messages, tools=TOOLS)
                assert answer.choices[0].message.content
            acted.append(headers["x-weir-actions"])
            messages += tool_step(step)
        seen = there.simulator.ledger
    whole = sum(COUNTER.count(json.dumps(message)) for message in messages)
    assert whole > 1.5 * 8192, "without Weir it would not have fitted"
    assert [entry.status for entry in seen] == [200] * STEPS, "and no request was refused on the way"
    assert acted[0] == "none"
    assert any(actions != "none" for actions in acted)
    assert not any("retry" in actions for actions in acted)
