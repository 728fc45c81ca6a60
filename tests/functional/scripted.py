"""An upstream on a real port that says what a test tells it to, byte for byte."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body, empty where there is none."""
        value = json.loads(self.body or b"{}")
        assert isinstance(value, dict)
        return value


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent back; ``cut`` ends the connection after the chunks, ``silent`` says nothing at all.

    ``delimited`` False sends a body without length or chunks: it ends where the connection does.
    """

    status: int = 200
    kind: str = "application/json"
    chunks: tuple[bytes, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    cut: bool = False
    silent: bool = False
    between: float = 0.0
    delimited: bool = True


Script = Callable[[Asked], Reply]


@dataclass(slots=True)
class ScriptedUpstream:
    """A running one; ``say`` may be replaced at any time."""

    port: int
    say: Script
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


def whole(value: object, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Reply:
    """A JSON answer."""
    return Reply(status, chunks=(json.dumps(value).encode(),), headers=headers)


def events(*values: object, done: bool = True) -> Reply:
    """A stream of server-sent events."""
    said = tuple(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)
    return Reply(kind="text/event-stream", chunks=(*said, b"data: [DONE]\n\n") if done else said)


def completion(text: str, *, finish: str = "stop", prompt: int = 10, completed: int = 5) -> dict[str, Any]:
    """A chat completion."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def chunks_of(given: dict[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """The same completion as a stream has it."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    (choice,) = given["choices"]
    said = [{"role": "assistant", "content": ""}, {"content": choice["message"]["content"]}]
    found: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in said
    ]
    found.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    return [*found, {**head, "choices": [], "usage": given["usage"]}] if usage else found


def as_asked(asked: Asked, given: dict[str, Any]) -> Reply:
    """A completion whole or as a stream, with usage where that was asked for."""
    if not asked.json.get("stream"):
        return whole(given)
    return events(*chunks_of(given, usage=bool((asked.json.get("stream_options") or {}).get("include_usage"))))


@asynccontextmanager
async def scripted(say: Script, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedUpstream]:
    """The upstream, for as long as the block runs."""
    running = ScriptedUpstream(0, say)
    open_ones: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        running.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await _serve(running, reader, writer)
        finally:
            open_ones.discard(writer)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()
        for writer in tuple(open_ones):
            writer.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def one_by_one(given: Sequence[bytes], step: asyncio.Semaphore) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that streams an event whenever ``step`` lets it; and the bodies that it was asked."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if line)
        asked.append(await reader.readexactly(int(fields[b"content-length"])))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in given:
            await step.acquire()
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", asked
    finally:
        server.close()


async def _serve(running: ScriptedUpstream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, target, _ = line.split(" ")
        asked = Asked(method, target, headers, body)
        running.asked.append(asked)
        reply = running.say(asked)
        if reply.silent:
            await reader.read()
            return
        await _answer(reply, writer.write, writer.drain)
        if reply.cut or not reply.delimited:
            return


async def _answer(reply: Reply, write: Callable[[bytes], None], drain: Callable[[], Awaitable[None]]) -> None:
    fields = [("content-type", reply.kind), *reply.headers]
    fields += [("transfer-encoding", "chunked")] if reply.delimited else []
    write(f"HTTP/1.1 {reply.status} X\r\n".encode() + b"".join(f"{n}: {v}\r\n".encode() for n, v in fields) + b"\r\n")
    for chunk in reply.chunks:
        write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if reply.delimited else chunk)
        await drain()
        await asyncio.sleep(reply.between)
    if not reply.cut and reply.delimited:
        write(b"0\r\n\r\n")
    await drain()
