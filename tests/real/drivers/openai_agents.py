"""``openai-agents`` on Responses: ``session``, ``stream`` (a session, streamed), ``sealed`` (nothing stored), ``chain``."""

import asyncio
import sys
from importlib.metadata import version
from typing import Any

from agents import Agent, ModelSettings, Runner, SQLiteSession, function_tool
from common import AGAIN, GREETING, SYSTEM, TASK, report
from step import run


@function_tool
def run_step(step: str) -> str:
    """Run one step."""
    return run(step)


SEALED: Any = ModelSettings(store=False, response_include=["reasoning.encrypted_content"])


async def main(how: str) -> None:
    """Greet, run the loop, and say one thing more."""
    settings = SEALED if how == "sealed" else ModelSettings()
    agent = Agent(name="Runner", instructions=SYSTEM, tools=[run_step], model="gpt-5", model_settings=settings)
    given: Any = {"auto_previous_response_id": True} if how == "chain" else {"session": SQLiteSession("one")}
    deltas = 0

    async def ask(text: str, **more: Any) -> Any:
        nonlocal deltas
        if how == "stream":
            streamed = Runner.run_streamed(agent, text, max_turns=90, **given)
            async for event in streamed.stream_events():
                deltas += event.type == "raw_response_event" and event.data.type.endswith(".delta")
            return streamed
        return await Runner.run(agent, text, max_turns=90, **{**given, **more})

    greeting = (await ask(GREETING)).final_output
    result = await ask(TASK)
    more = {"previous_response_id": result.last_response_id} if how == "chain" else {}
    again = (await ask(AGAIN, **more)).final_output
    told = {"greeting": greeting, "said": result.final_output, "again": again, "deltas": deltas}
    report(**told, version=version("openai-agents"))


asyncio.run(main(sys.argv[1]))
