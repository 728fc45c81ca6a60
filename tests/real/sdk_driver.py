"""Uses an address as an application does, with whatever ``openai`` it is run with; prints what it saw as JSON.

    python sdk_driver.py BASE_URL

Every check raises AssertionError; the exit code is 0 where all hold. It imports nothing but the SDK.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

MODEL = "sim"
KEY = "sk-accepted"
STEPS = 30
QUESTION: list[Any] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "How is the weather in Graz?"},
]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def blocking(client: OpenAI) -> dict[str, Any]:
    """One whole answer, the same streamed, and the list of models."""
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_tokens=64)
    answer = raw.parse()
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0
    assert raw.headers["x-weir-actions"] == "none"
    assert raw.headers["x-weir-conversation"]
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=64, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content
    assert [model.id for model in client.models.list()] == [MODEL]
    return {"stream_pieces": len(pieces)}


async def asynchronous(client: AsyncOpenAI) -> None:
    """Four whole answers at once, one streamed with usage, and one through the SDK's accumulating stream."""
    given: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 64}
    answers = await asyncio.gather(*(client.chat.completions.create(**given) for _ in range(4)))
    texts = {answer.choices[0].message.content for answer in answers}
    assert len(texts) == 1
    chunks = await client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    async for chunk in chunks:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert {text} == texts
    assert usage is not None
    async with client.chat.completions.stream(**given) as events:
        final = await events.get_final_completion()
    assert {final.choices[0].message.content} == texts


def failures(client: OpenAI, stranger: OpenAI) -> dict[str, Any]:
    """The exception that each failure becomes, streamed and not."""
    huge: list[Any] = [{"role": "system", "content": "All of this is a rule. " * 4_000}, QUESTION[1]]
    found = {}
    for stream in (False, True):
        too_long = _raised(lambda stream=stream: _ask(client, huge, stream=stream))  # type: ignore[misc]
        assert isinstance(too_long, openai.BadRequestError)
        assert too_long.code == "context_length_exceeded"
        assert too_long.type == "invalid_request_error"
        denied = _raised(lambda stream=stream: _ask(stranger, QUESTION, stream=stream))  # type: ignore[misc]
        assert isinstance(denied, openai.AuthenticationError)
        assert denied.status_code == 401
        found = {"too_long": too_long.code, "denied": denied.code, "request_id": too_long.request_id}
    assert found["request_id"]
    return found


def _ask(client: OpenAI, messages: list[Any], *, stream: bool) -> object:
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=64, stream=stream)


def _raised(call: Callable[[], object]) -> openai.APIStatusError:
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("nothing was raised")


def agent(client: OpenAI) -> dict[str, Any]:
    """A loop of steps: the model's own message goes back as the SDK gave it, then the tool's result."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": "Read them all."},
    ]
    actions = []
    for number in range(STEPS):
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, tools=[TOOL], max_tokens=256
        )
        actions.append(raw.headers["x-weir-actions"])
        message = raw.parse().choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["path"] == f"src/{number}.py"  # type: ignore[union-attr,unused-ignore]
        messages.append(message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": " ".join(_lines(number))})
    final = client.chat.completions.create(model=MODEL, messages=[*messages, QUESTION[1]], tools=[TOOL], max_tokens=256)
    assert final.choices[0].message.content
    return {"answered": len(actions), "managed": sum(action != "none" for action in actions)}


def _lines(number: int) -> Iterator[str]:
    return (f"def function_{number}_{line}(value): return value + {line}" for line in range(32))


def streamed_tools(client: OpenAI) -> None:
    """A tool call put together from its pieces."""
    messages: list[Any] = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "Read it."}]
    name = arguments = ""
    for chunk in client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], max_tokens=256, stream=True
    ):
        for piece in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            name += (piece.function.name or "") if piece.function else ""
            arguments += (piece.function.arguments or "") if piece.function else ""
    assert (name, json.loads(arguments)) == ("read_file", {"path": "src/0.py"})


async def _asynchronous(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        await asynchronous(client)


def main(base_url: str) -> None:
    """Run everything and print the findings."""
    with (
        OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client,
        OpenAI(base_url=base_url, api_key="sk-unknown", max_retries=0) as stranger,
    ):
        found: dict[str, Any] = {"version": openai.__version__, **blocking(client), **failures(client, stranger)}
        streamed_tools(client)
        found |= agent(client)
    asyncio.run(_asynchronous(base_url))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
