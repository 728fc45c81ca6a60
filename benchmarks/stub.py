"""The upstream of the benchmark: answers at once, as cheaply as Python can, and checks what it was
sent.

    python -m benchmarks.stub

Prints ``{"port": N}``. A request whose body is not the one that ``x-bench-digest`` names is
answered with 400: the proxy under test must have changed nothing. With ``--any`` the body may be
any. Traces and metrics (OTLP) are swallowed.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvloop
import xxhash

CHUNKS = 100
PATHS = frozenset({"/chat/completions", "/responses", "/messages"})
PACE = 0.01
CHARS_PER_TOKEN = 4
_JSON = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding:"
    b" chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


def digest(body: bytes) -> bytes:
    """What ``x-bench-digest`` holds for a body."""
    return xxhash.xxh3_128_hexdigest(body).encode()


SAID = "The change is in place and the tests pass."


def completion(size: int, path: str = "/chat/completions") -> bytes:
    """The answer to a request of ``size`` bytes, not streamed."""
    prompt = size // CHARS_PER_TOKEN
    usage = {"input_tokens": prompt, "output_tokens": 10}
    if path == "/messages":
        message = {
            "id": "msg_bench",
            "type": "message",
            "role": "assistant",
            "model": "gpt-4o-mini",
        }
        said = {
            "content": [{"type": "text", "text": SAID}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
        }
        return json.dumps({**message, **said, "usage": usage}, separators=(",", ":")).encode()
    if path == "/responses":
        response = {
            "id": "resp_bench",
            "object": "response",
            "status": "completed",
            "model": "gpt-4o-mini",
        }
        text = {"type": "output_text", "text": SAID, "annotations": []}
        output = [{"id": "msg_bench", "type": "message", "role": "assistant", "content": [text]}]
        return json.dumps(
            {**response, "output": output, "usage": usage}, separators=(",", ":")
        ).encode()
    return json.dumps(
        {
            "id": "chatcmpl-bench",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "gpt-4o-mini",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": SAID},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": 10,
                "total_tokens": prompt + 10,
            },
        },
        separators=(",", ":"),
    ).encode()


def events(path: str = "/chat/completions") -> tuple[bytes, ...]:
    """The answer to a streamed request in CHUNKS pieces: what begins it, words, and with the last
    what ends it.
    """
    if path == "/chat/completions":
        deltas: list[tuple[dict[str, str], str | None]] = [
            ({"role": "assistant", "content": ""}, None)
        ]
        deltas += [({"content": word}, None) for word in _WORDS]
        deltas.append(({}, "stop"))
        out = [
            _event(
                id="chatcmpl-bench",
                object="chat.completion.chunk",
                created=1_700_000_000,
                model="gpt-4o-mini",
                system_fingerprint="fp_bench",
                choices=[{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
            )
            for delta, reason in deltas
        ]
        return (*out[:-1], out[-1] + b"data: [DONE]\n\n")
    whole = json.loads(completion(0, path))
    if path == "/messages":
        begun = whole | {"content": [], "stop_reason": None}
        ends = {"stop_reason": "end_turn", "stop_sequence": None}
        return (
            _event("message_start", message=begun)
            + _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            *(
                _event("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
                for word in _WORDS
            ),
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=ends, usage={"output_tokens": 10})
            + _event("message_stop"),
        )
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    [item] = whole["output"]
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    return (
        _event("response.created", response=begun)
        + _event("response.output_item.added", output_index=0, item=item | {"content": []})
        + _event("response.content_part.added", **place, part=item["content"][0] | {"text": ""}),
        *(_event("response.output_text.delta", **place, delta=word) for word in _WORDS),
        _event("response.output_item.done", output_index=0, item=item)
        + _event("response.completed", response=whole),
    )


_WORDS = tuple(f" word{i:02d}" for i in range(CHUNKS - 2))


def _event(kind: str = "", **said: Any) -> bytes:
    data = json.dumps(({"type": kind} if kind else {}) | said, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data) if kind else b"data: %b\n\n" % data


_CHUNKED = {
    path: tuple(b"%x\r\n%b\r\n" % (len(each), each) for each in events(path)) for path in PATHS
}


class Upstream(asyncio.Protocol):
    """One connection; no pipelining, as no proxy pipelines."""

    def __init__(self, *, takes_any: bool = False) -> None:
        self._takes_any = takes_any
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._parts: list[bytes] = []
        self._missing = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._parts.append(data)
            self._missing -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            rest = self._head[end + 4 :]
            self._head = self._head[:end]
            if b"transfer-encoding: chunked" in self._head.lower():
                self._answer_json(400, b'{"error":{"message":"the length was lost on the way"}}')
                return
            self._parts = [rest]
            self._missing = int(_field(self._head, b"content-length") or 0) - len(rest)
        if not self._missing:
            self._answer(self._head, b"".join(self._parts))

    def _answer(self, head: bytes, body: bytes) -> None:
        self._head = b""
        self._parts = []
        target = head.split(b" ", 2)[1]
        path = target.removeprefix(b"/v1").decode("latin-1")
        if path not in PATHS:
            known = target.endswith((b"/traces", b"/metrics"))
            self._answer_json(200 if known else 404, b"" if known else b"{}")
        elif not self._takes_any and digest(body) != _field(head, b"x-bench-digest"):
            self._answer_json(400, b'{"error":{"message":"the body was changed on the way"}}')
        elif b'"stream":true' in body[:80]:
            assert self._transport is not None
            self._transport.write(_STREAM)
            self._stream(_CHUNKED[path], 0)
        else:
            self._answer_json(200, completion(len(body), path))

    def _answer_json(self, status: int, body: bytes) -> None:
        if self._transport is not None:
            self._transport.write(
                _JSON % (status, b"OK" if status == 200 else b"Refused", len(body), body)
            )

    def _stream(self, chunks: Sequence[bytes], index: int) -> None:
        if self._transport is None:
            return
        if index == len(chunks) - 1:
            self._transport.write(chunks[index] + _END)
            return
        self._transport.write(chunks[index])
        if index:
            self._loop.call_later(PACE, self._stream, chunks, index + 1)
        else:  # the first word follows at once what begins the answer, as it does from real servers
            self._loop.call_soon(self._stream, chunks, 1)


def _field(head: bytes, name: bytes) -> bytes:
    lowered = head.lower()
    start = lowered.find(b"\r\n" + name + b":")
    if start < 0:
        return b""
    end = head.find(b"\r\n", start + 2)
    return head[start + len(name) + 3 : end if end > 0 else len(head)].strip()


async def serve(*, takes_any: bool) -> None:
    """Serve until a signal."""
    upstream = partial(Upstream, takes_any=takes_any)
    server = await asyncio.get_running_loop().create_server(upstream, "127.0.0.1", 0, backlog=512)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stub", description="The benchmark's upstream."
    )
    parser.add_argument("--any", action="store_true", help="whatever the body is")
    uvloop.run(serve(takes_any=parser.parse_args().any))
