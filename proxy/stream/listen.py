"""What an answer said, put together again: for the trace, only where message text may be captured, and to know the
conversation by that answer where its opening does not tell.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.telemetry import AnySpan
from proxy.wire.raw import DONE, Decoder

MAX_CAPTURED = 256 * 1024
MAX_CHOICES = 16
MAX_LISTENED = 4 * 1024 * 1024
LAST_EVENT = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)


async def capture_stream(chunks: AsyncGenerator[bytes, None], span: AnySpan) -> AsyncGenerator[bytes, None]:
    """The same chunks; ``span`` is told what the first 256 KiB of them said, however they end."""
    held = bytearray()
    try:
        async with aclosing(chunks) as going:
            async for chunk in going:
                if len(held) < MAX_CAPTURED:
                    held += chunk
                yield chunk
    finally:
        span.said(choices_of(bytes(held)))


@dataclass(slots=True)
class Listener:
    """Sends an answer on and keeps what went to the client of it, at most 4 MiB.

    ``ended`` is waited for before the client gets the piece by which it knows that the answer is whole.
    """

    send: Callable[[MutableMapping[str, Any]], Awaitable[None]]
    ended: Callable[[], Awaitable[None]] | None = None
    held: bytearray = field(default_factory=bytearray)

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Send one piece on."""
        if len(self.held) < MAX_LISTENED:
            self.held += message.get("body", b"")
        if self.ended is not None and message["type"] == "http.response.body" and self._ends_with(message):
            ended, self.ended = self.ended, None
            await ended()
        await self.send(message)

    def _ends_with(self, message: MutableMapping[str, Any]) -> bool:
        body: bytes = message.get("body", b"")
        if not message.get("more_body") or LAST_EVENT.search(body):
            return True
        return body.rstrip().endswith(b"}") and self.held.lstrip().startswith(b"{") and bool(self.messages())

    def messages(self) -> list[dict[str, Any]]:
        """What the answer's choices said, as a client that has a message of it sends it back."""
        body = bytes(self.held)
        found = _choices_in(body) if body.lstrip().startswith(b"{") else choices_of(body)
        given = [choice["message"] for choice in found if isinstance(choice.get("message"), dict)]
        return [{name: m[name] for name in ("role", "content", "tool_calls") if name in m} for m in given]


def _choices_in(body: bytes) -> list[dict[str, Any]]:
    """The choices of a whole completion, none where it cannot be read."""
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return []
    given = value.get("choices") if isinstance(value, dict) else None
    return [c for c in given if isinstance(c, dict)][:MAX_CHOICES] if isinstance(given, list) else []


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
            if isinstance(index, int) and (index in choices or len(choices) < MAX_CHOICES):
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
