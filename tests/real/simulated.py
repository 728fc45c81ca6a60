"""The same script before ``weir simulate``, whose rules were written apart from those of :mod:`tests.real.scripted`."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.functional.harness import COUNTER
from tests.real.scripted import NOTES, SIDE, STEP, Asked, Script, Turn
from tests.upstream import RecordedRequest, Request, SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import serve_simulator
from tests.upstream.window import Dialect

DIALECTS = {"responses": Dialect.OPENAI, "messages": Dialect.ANTHROPIC}
TOO_LONG = ("context_length_exceeded", "prompt is too long")
NO_ROOM = "`max_tokens` exceed context limit"
"""Said of a request that asks for a longer answer than fits: Weir asks again for a shorter one."""


@asynccontextmanager
async def simulated(script: Script, endpoint: str, *, bound: bool = False) -> AsyncIterator[str]:
    """A simulator that follows the script; what it was asked is the script's once it has ended."""

    def answer(request: Request) -> SimulatedAnswer:
        said = texts_of(request["messages"])
        notes = bool(tools_of(request)) and bool(said) and SIDE.search(said[-1]) is not None
        turn = Turn(text=NOTES) if notes else script.turn(said, tools_of(request), called=True)
        thinks = "input" in request or (request.get("thinking") or {}).get("type") in ("enabled", "adaptive")
        given = [(each.name, each.arguments) for each in turn.calls]
        calls = tuple(SimulatedCall(name, said if isinstance(said, str) else json.dumps(said)) for name, said in given)
        return SimulatedAnswer(text=turn.text, calls=calls, reasoning=turn.thought if thinks else "")

    settings = SimulatorSettings(window=script.window, answer=answer, dialect=DIALECTS[endpoint], bound=bound)
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        try:
            yield simulator.base_url
        finally:
            seen = [each for each in simulator.ledger if each.method == "POST"]
            async with httpx.AsyncClient(base_url=simulator.origin) as client:
                script.asked = [await _asked(client, each) for each in seen]


async def _asked(client: httpx.AsyncClient, seen: RecordedRequest) -> Asked:
    """An entry of the simulator's as the script has it; why it was refused is asked once more."""
    body = seen.json()
    said = texts_of(body["messages"]) if "messages" in body else outputs_of(body.get("input"))
    main = bool(tools_of(body)) and bool(said) and SIDE.search(said[-1]) is None
    found = Asked(seen.path, dict(seen.headers), body, seen.body, main, seen.prompt_tokens, seen.status)
    found.step = max([int(match[1] or 0) for text in said for match in STEP.finditer(text)], default=0)
    if seen.status >= 400:
        headers = {name: value for name, value in seen.headers if name not in ("content-length", "host")}
        told = (await client.post(seen.path, content=seen.body, headers=headers)).text
        found.overflow = any(words in told for words in TOO_LONG)
        found.refused = "" if found.overflow or NO_ROOM in told else told
    return found


def tools_of(body: Mapping[str, Any]) -> list[Any]:
    """The tools that a request declares, in its field or in items."""
    given = body.get("input")
    items = [each for each in given if each.get("type") == "additional_tools"] if isinstance(given, list) else []
    return [tool for each in (body, *items) for tool in each.get("tools") or ()]


def outputs_of(items: Any) -> list[str]:
    """What users and tools said, as items of Responses."""
    if isinstance(items, str):
        return [items]
    return [
        "\n".join(_texts(item.get("output", item.get("content"))))
        for item in items
        if item.get("role") == "user" or str(item.get("type")).endswith("_output")
    ]


def texts_of(messages: Sequence[Any]) -> list[str]:
    """What users and tools said, in order."""
    return [
        text
        for message in messages
        if message.get("role") in ("user", "tool")
        for text in _texts(message.get("content"))
    ]


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    found: list[str] = []
    for part in content or ():
        found += (
            ["\n".join(_texts(part.get("content")))] if part.get("type") == "tool_result" else [part.get("text") or ""]
        )
    return found
