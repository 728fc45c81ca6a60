"""``anthropic`` on Messages: ``whole``, ``stream``, ``async``, or its ``runner`` with threads."""

import asyncio
import sys
from typing import Any

import anthropic
from common import AGAIN, DESCRIPTION, GREETING, PARAMETERS, SYSTEM, TASK, report
from step import run

TOOL: Any = {"name": "run_step", "description": DESCRIPTION, "input_schema": PARAMETERS}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
GIVEN: Any = {"model": "claude-sonnet-4-5", "system": SYSTEM, "tools": [TOOL], "max_tokens": 1536, "thinking": THINKING}


async def main(how: str) -> None:
    """Greet, run the loop, and say one thing more."""
    client, asynchronous, deltas = anthropic.Anthropic(), anthropic.AsyncAnthropic(), 0

    async def ask(history: Any) -> Any:
        nonlocal deltas
        given = {**GIVEN, "messages": history}
        if how == "async":
            return await asynchronous.messages.create(**given)
        if how == "stream":
            with client.messages.stream(**given) as stream:
                deltas += sum(event.type == "content_block_delta" for event in stream)
                return stream.get_final_message()
        return client.messages.create(**given)

    greeting = text_of(await ask([{"role": "user", "content": GREETING}]))
    history: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        message = await ask(history)
        history.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": run(str(call.input["step"]))} for call in calls
        ]
        history.append({"role": "user", "content": results})
    again = await ask([*history, {"role": "user", "content": AGAIN}])
    told = {"greeting": greeting, "said": text_of(message), "again": text_of(again), "deltas": deltas}
    report(**told, version=anthropic.__version__)


def runner() -> None:
    """The SDK's own loop."""

    @anthropic.beta_tool
    def run_step(step: str) -> str:
        """Run one step.

        Args:
            step: its number
        """
        return run(step)

    client = anthropic.Anthropic()
    given: Any = {"model": "claude-sonnet-4-5", "system": SYSTEM, "max_tokens": 1536, "tools": [run_step]}

    def ask(text: str) -> str:
        messages: Any = [{"role": "user", "content": text}]
        return text_of(client.beta.messages.tool_runner(**given, messages=messages).until_done())

    told = {"greeting": ask(GREETING), "said": ask(TASK), "again": ask(AGAIN)}
    report(**told, deltas=0, version=anthropic.__version__)


def text_of(message: Any) -> str:
    """What a message says."""
    return "".join(block.text for block in message.content if block.type == "text")


if sys.argv[1] == "runner":
    runner()
else:
    asyncio.run(main(sys.argv[1]))
