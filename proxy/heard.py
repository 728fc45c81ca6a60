"""What a streamed answer said, put together again for the trace: only where message text may be captured."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from proxy.sse import DONE, Decoder
from proxy.telemetry import Attempt

MOST_HEARD = 256 * 1024
MOST_CHOICES = 16


async def heard(chunks: AsyncGenerator[bytes, None], span: Attempt) -> AsyncGenerator[bytes, None]:
    """The same chunks; ``span`` is told what the first 256 KiB of them said, however they end."""
    held = bytearray()
    try:
        async with aclosing(chunks) as going:
            async for chunk in going:
                if len(held) < MOST_HEARD:
                    held += chunk
                yield chunk
    finally:
        span.said(choices_of(bytes(held)))


def choices_of(stream: bytes) -> list[dict[str, Any]]:
    """The choices of a streamed completion as a whole one has them; what cannot be read is left out."""
    choices: dict[int, dict[str, Any]] = {}
    for event in Decoder().feed(stream):
        if event.data == DONE:
            continue
        try:
            value = msgspec.json.decode(event.data)
        except (ValueError, RecursionError):
            continue
        given = value.get("choices") if isinstance(value, dict) else None
        for choice in given if isinstance(given, list) else ():
            index = choice.get("index", 0) if isinstance(choice, dict) else None
            if isinstance(index, int) and (index in choices or len(choices) < MOST_CHOICES):
                _add(choices.setdefault(index, {"message": {"role": "assistant"}}), choice)
    return [choices[index] for index in sorted(choices)]


def _add(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    if choice.get("finish_reason"):
        whole["finish_reason"] = choice["finish_reason"]
    delta, message = choice.get("delta"), whole["message"]
    for name, value in delta.items() if isinstance(delta, dict) else ():
        if name == "tool_calls" and isinstance(value, list):
            for call in value:
                _add_call(message.setdefault("tool_calls", []), call)
        elif isinstance(value, str) and name != "role":
            message[name] = message.get(name, "") + value


def _add_call(calls: list[dict[str, Any]], part: object) -> None:
    index = part.get("index", len(calls)) if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(index, int) or not 0 <= index <= len(calls):
        return
    if index == len(calls):
        calls.append({"function": {"name": "", "arguments": ""}})
    call, said = calls[index], part.get("function")
    if isinstance(part.get("id"), str):
        call["id"] = part["id"]
    for name in ("name", "arguments"):
        if isinstance(said, dict) and isinstance(said.get(name), str):
            call["function"][name] += said[name]
