"""``openai`` on Responses, with the history in the request: ``whole``, ``stream`` or ``async``."""

import asyncio
import json
import sys
from typing import Any

import openai
from common import AGAIN, DESCRIPTION, GREETING, PARAMETERS, SYSTEM, TASK, report
from step import run

TOOL: Any = {
    "type": "function",
    "name": "run_step",
    "description": DESCRIPTION,
    "parameters": PARAMETERS,
    "strict": False,
}
SEALED: Any = {"store": False, "include": ["reasoning.encrypted_content"]}
GIVEN: Any = {"model": "gpt-5", "instructions": SYSTEM, "tools": [TOOL], "max_output_tokens": 512}
KINDS = {"whole": SEALED, "stream": SEALED, "async": {}}


def outputs(response: Any) -> list[Any]:
    """The results of the calls in an answer."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": run(str(json.loads(call.arguments)["step"])),
        }
        for call in calls
    ]


async def loop(ask: Any) -> Any:
    """Ask and run what is called until nothing is."""
    history: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        response = await ask(history)
        history += [item.model_dump(exclude_none=True) for item in response.output]
        if not (results := outputs(response)):
            return response.output_text, history
        history += results


async def main(how: str) -> None:
    """Greet, run the loop, and say one thing more."""
    client, asynchronous, deltas = openai.OpenAI(), openai.AsyncOpenAI(), 0

    async def ask(history: Any) -> Any:
        nonlocal deltas
        given = {**GIVEN, **KINDS[how], "input": history}
        if how == "whole":
            return client.responses.create(**given)
        if how == "async":
            return await asynchronous.responses.create(**given)
        with client.responses.stream(**given) as stream:
            deltas += sum(event.type.endswith(".delta") for event in stream)
            return stream.get_final_response()

    greeting = (await ask(GREETING)).output_text
    said, history = await loop(ask)
    again = (await ask([*history, {"role": "user", "content": AGAIN}])).output_text
    report(greeting=greeting, said=said, again=again, deltas=deltas, version=openai.__version__)


asyncio.run(main(sys.argv[1]))
