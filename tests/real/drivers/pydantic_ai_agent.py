"""pydantic-ai: ``responses`` or ``messages``; a word behind it, ``stream``, has it stream."""

import asyncio
import sys
from importlib.metadata import version
from typing import Any

from common import AGAIN, GREETING, SYSTEM, TASK, report
from pydantic_ai import Agent
from pydantic_ai.usage import UsageLimits
from step import run

MODELS = {"responses": "openai-responses:gpt-5", "messages": "anthropic:claude-sonnet-4-5"}
THINKING: Any = {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1536}
SETTINGS: Any = {"responses": {"max_tokens": 512}, "messages": THINKING}


def run_step(step: str) -> str:
    """Run one step."""
    return run(step)


async def main(endpoint: str, *how: str) -> None:
    """Greet, run the loop, and say one thing more."""
    agent = Agent(MODELS[endpoint], instructions=SYSTEM, tools=[run_step], model_settings=SETTINGS[endpoint])
    deltas = 0

    async def ask(text: str, history: Any = None) -> Any:
        given: Any = {"message_history": history, "usage_limits": UsageLimits(request_limit=None)}

        async def count(_: Any, events: Any) -> None:
            nonlocal deltas
            async for event in events:
                deltas += event.event_kind == "part_delta"

        result = await agent.run(text, **given, event_stream_handler=count if how else None)
        return result.output, result.all_messages()

    greeting, _ = await ask(GREETING)
    said, history = await ask(TASK)
    again, _ = await ask(AGAIN, history)
    report(greeting=greeting, said=said, again=again, deltas=deltas, version=version("pydantic-ai-slim"))


asyncio.run(main(*sys.argv[1:]))
