"""The client's edge, on raw sockets: what a client may send, how long it may take, and how a connection ends."""

import asyncio
import functools
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from proxy.server import Server, ServerLimits, serve

pytestmark = pytest.mark.slow

SHORT = ServerLimits(header_timeout=0.3, body_timeout=0.5, keep_alive=0.4, stall=0.4)
HOST = b"Host: weir\r\n"


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs the test on the loop that the product runs on."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(**fixtures), 20))

    return run


class Echo:
    """An application that answers with what it got, and remembers how each request ended."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.scopes: list[Any] = []
        self.left: list[float] = []
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(time.monotonic())
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(body)
        await self.answer(scope, receive, send, body)

    async def answer(self, scope: Any, receive: Any, send: Any, body: bytes) -> None:
        match scope["path"]:
            case "/stream":
                await self.stream(receive, send, count=5, pause=0.005)
            case "/silent-stream":
                await self.stream(receive, send, count=3, pause=0.005, hang=True)
            case "/flood":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                try:
                    while True:
                        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                        if not await self.still_there(receive):
                            return
                finally:
                    self.left.append(time.monotonic())
            case "/slow":
                await self.wait(receive, send)
            case "/raises":
                raise ValueError("on purpose")
            case "/breaks-off":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
            case _:
                out = json.dumps({"path": scope["path"], "length": len(body)}).encode()
                headers = [(b"Content-Type", b"application/json"), (b"Content-Length", str(len(out)).encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": out})

    async def still_there(self, receive: Any) -> bool:
        """Whether the client has not left; costs one turn of the loop."""
        task = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            return True
        return bool(task.result()["type"] != "http.disconnect")

    async def stream(self, receive: Any, send: Any, *, count: int, pause: float, hang: bool = False) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(count):
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
            await asyncio.sleep(pause)
        if hang:
            await receive()
            self.left.append(time.monotonic())
            return
        await send({"type": "http.response.body", "body": b""})

    async def wait(self, receive: Any, send: Any) -> None:
        gone = asyncio.ensure_future(receive())
        released = asyncio.ensure_future(self.release.wait())
        await asyncio.wait([gone, released], return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, released):
            task.cancel()
        if not self.release.is_set():
            self.left.append(time.monotonic())
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"late"})


async def talk(server: Server, data: bytes, *, half_close: bool = False) -> bytes:
    """Everything the server writes until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


def request(path: str = "/", *, body: bytes = b"", headers: bytes = b"", method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\n".encode() + HOST + headers
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


CLOSE = b"Connection: close\r\n"


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.005)


# Deadlines


@pytest.mark.requirement("R.1", "S.14")
@on_uvloop
async def test_a_connection_whose_headers_trickle_in_is_closed_at_the_deadline() -> None:
    async with serve(Echo(), lifespan="off", limits=SHORT) as server:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def trickle() -> None:
            for byte in b"POST / HTTP/1.1\r\nHost: weir\r\nX-Slow: " + b"a" * 500:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        task = asyncio.create_task(trickle())
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer == b""
        assert time.monotonic() - began > 0.25
        task.cancel()
        writer.close()


@pytest.mark.requirement("R.3", "S.14")
@on_uvloop
async def test_connections_that_say_nothing_are_all_closed() -> None:
    async with serve(Echo(), lifespan="off", limits=SHORT) as server:
        answers = await asyncio.gather(*[talk(server, b"") for _ in range(50)])
        assert answers == [b""] * 50
        await until(lambda: not server.server_state.connections)


@pytest.mark.requirement("R.2", "S.14")
@on_uvloop
async def test_a_body_that_trickles_in_ends_with_408() -> None:
    app = Echo()
    async with serve(app, lifespan="off", limits=SHORT) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        began = time.monotonic()
        writer.write(b"POST / HTTP/1.1\r\nHost: weir\r\nContent-Length: 1000000\r\n\r\n")

        async def trickle() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.02)

        task = asyncio.create_task(trickle())
        answer = await asyncio.wait_for(reader.read(), 20)
        task.cancel()
        writer.close()
        assert status(answer) == 408
        assert time.monotonic() - began > 0.4
        assert app.bodies == []


@pytest.mark.requirement("R.11")
@on_uvloop
async def test_an_idle_connection_is_closed_without_a_word_and_only_after_its_own_timeout() -> None:
    async with serve(Echo(), lifespan="off", limits=SHORT) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(2):
            writer.write(request())
            head = await reader.readuntil(b"\r\n\r\n")
            assert status(head) == 200
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            await asyncio.sleep(0.25)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


# Caps


@pytest.mark.requirement("R.15", "S.14")
@pytest.mark.parametrize(
    "head",
    [b"X-Big: " + b"a" * 300_000, b"X-Big: a\r\n" * 101, (b"X-Big: " + b"a" * 2000 + b"\r\n") * 40],
    ids=["one giant field", "too many fields", "too many bytes"],
)
@on_uvloop
async def test_a_head_above_the_cap_ends_with_400(head: bytes) -> None:
    app = Echo()
    async with serve(app, lifespan="off", limits=SHORT) as server:
        answer = b"HTTP/1.1 400 "
        with suppress(ConnectionResetError):  # where more comes than was read
            answer = await talk(server, b"GET / HTTP/1.1\r\nHost: weir\r\n" + head + b"\r\n\r\n")
        assert status(answer) == 400
        assert app.scopes == []


# Framing

POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
ILLEGAL = {
    "length and chunked": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
    "two equal lengths": POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    "two different lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "a list of lengths": POST + b"Content-Length: 1, 1\r\n\r\nx",
    "a signed length": POST + b"Content-Length: +1\r\n\r\nx",
    "a negative length": POST + b"Content-Length: -1\r\n\r\nx",
    "a hexadecimal length": POST + b"Content-Length: 0x1\r\n\r\nx",
    "an empty length": POST + b"Content-Length: \r\n\r\nx",
    "a length with a gap": POST + b"Content-Length: 1 1\r\n\r\nx",
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999\r\n\r\nx",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two coding fields": CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: a\n\n",
    "a folded field": b"GET / HTTP/1.1\r\nHost: a\r\nX-Fold: a\r\n b\r\n\r\n",
    "a blank before the colon": b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    "a carriage return in a value": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: a\rb\r\n\r\n",
    "a NUL in a value": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: a\0b\r\n\r\n",
    "an empty name": b"GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
    "an illegal name": b"GET / HTTP/1.1\r\nHost: a\r\nX(A): b\r\n\r\n",
    "an unknown version": b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"G@T / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tunnel": b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n",
    "a blank in the target": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "a chunk size that is none": CHUNKED + b"\r\nzz\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"\r\n0x1\r\nx\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"\r\n-1\r\nx\r\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"\r\n1\r\nxyz\r\n0\r\n\r\n",
    "a line feed in a chunk extension": CHUNKED + b"\r\n1;a\nb\r\nx\r\n0\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.requirement("R.14", "S.10", "S.11")
@pytest.mark.parametrize("case", ILLEGAL)
@on_uvloop
async def test_illegal_framing_ends_with_400_and_reaches_nobody(case: str) -> None:
    app = Echo()
    async with serve(app, lifespan="off", limits=SHORT) as server:
        smuggled = request("/smuggled", headers=CLOSE)
        answer = await talk(server, ILLEGAL[case] + smuggled)
        assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1
        assert status(answer) == 400
        assert b"connection: close" in answer
        assert app.bodies == []


LEGAL = {
    "chunked": (
        POST + b"Transfer-Encoding: Chunked\r\n\r\n3;q=1\r\nabc\r\n0\r\nT: 1\r\n\r\n",
        3,
    ),
    "a leading blank line": (b"\r\n" + POST + b"Content-Length: 2\r\n\r\nab", 2),
    "an absolute target": (b"POST http://evil.example/ HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab", 2),
    "no body": (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 0),
    "an IPv6 host": (b"GET / HTTP/1.1\r\nHost: [::1]:8400\r\n\r\n", 0),
    "an empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 0),
}


@pytest.mark.requirement("R.14", "S.11")
@pytest.mark.parametrize("case", LEGAL)
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "byte by byte"])
@on_uvloop
async def test_legal_framing_is_answered_and_the_next_request_too(case: str, sliced: bool) -> None:
    app = Echo()
    data, length = LEGAL[case]
    data += request("/next", headers=CLOSE, body=b"abcd")
    async with serve(app, lifespan="off") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        if sliced:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in [data[at : at + 1] for at in range(len(data))] if sliced else [data]:
            writer.write(part)
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"200"]
    assert [len(body) for body in app.bodies] == [length, 4]
    assert [scope["path"] for scope in app.scopes] == ["/", "/next"]


@pytest.mark.requirement("R.11")
@on_uvloop
async def test_three_pipelined_requests_are_answered_in_order() -> None:
    async with serve(Echo(), lifespan="off") as server:
        data = request("/stream") + request("/b", body=b"bb") + request("/c", headers=CLOSE)
        answer = await talk(server, data)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert answer.index(b"data: 4") < answer.index(b'"/b"') < answer.index(b'"/c"')


@pytest.mark.requirement("R.12")
@on_uvloop
async def test_a_100_is_sent_when_the_body_is_about_to_be_read() -> None:
    async with serve(Echo(), lifespan="off") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n" + CLOSE + b"\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ab")
        assert status(await reader.read()) == 200
        writer.close()


@pytest.mark.requirement("R.13")
@on_uvloop
async def test_an_answer_of_known_length_to_http_1_0_keeps_it() -> None:
    async with serve(Echo(), lifespan="off") as server:
        head, _, body = (await talk(server, b"GET /x HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(body) in head or b"content-length: %d" % len(body) in head


# The answer's head


@pytest.mark.requirement("S.13", "S.15", "P4")
@on_uvloop
async def test_answers_carry_one_date_no_server_and_the_applications_headers() -> None:
    async def relays(scope: Any, receive: Any, send: Any) -> None:
        headers = [
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2"),
            (b"content-length", b"2"),
        ]
        await send({"type": "http.response.start", "status": 299, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serve(relays, lifespan="off") as server:
        head = (await talk(server, request(headers=CLOSE))).partition(b"\r\n\r\n")[0]
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 299 "
        assert lines[1].startswith(b"date: ")
        assert lines[2:] == [
            b"set-cookie: a=1",
            b"set-cookie: b=2",
            b"content-length: 2",
            b"connection: close",
        ]
    async with serve(Echo(), lifespan="off") as server:
        head = (await talk(server, request(headers=CLOSE))).partition(b"\r\n\r\n")[0].lower()
        assert head.count(b"\r\ndate: ") == 1
        assert b"server:" not in head


@pytest.mark.requirement("S.13")
@pytest.mark.parametrize("header", [(b"x-a", b"a\r\nset-cookie: b"), (b"x-a\r\nb", b"c"), (b"x-a", b"a\0")])
@on_uvloop
async def test_a_header_that_would_split_the_answer_is_never_written(header: tuple[bytes, bytes]) -> None:
    async def splits(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [header]})
        await send({"type": "http.response.body", "body": b""})

    async with serve(splits, lifespan="off") as server:
        answer = await talk(server, request())
        assert answer == b""


# Clients that leave, and those that only stop sending


@pytest.mark.requirement("R.6", "P5")
@on_uvloop
async def test_a_client_that_closes_in_a_silent_stream_is_noticed_within_100_ms() -> None:
    app = Echo()
    async with serve(app, lifespan="off") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("/silent-stream"))
        await reader.readuntil(b"data: 2\n\n\r\n")
        await asyncio.sleep(0.3)
        writer.close()
        await until(lambda: bool(app.left))


@pytest.mark.requirement("R.7")
@on_uvloop
async def test_a_client_that_resets_a_stream_is_noticed_at_once() -> None:
    app = Echo()
    async with serve(app, lifespan="off") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("/silent-stream"))
        await reader.readuntil(b"data: 2\n\n\r\n")
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await until(lambda: bool(app.left))


@pytest.mark.requirement("R.4", "R.5")
@on_uvloop
async def test_a_client_that_does_not_read_stops_the_stream_and_is_cut_after_the_stall_limit() -> None:
    app = Echo()
    async with serve(app, lifespan="off", limits=SHORT) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
        began = time.monotonic()
        await asyncio.get_running_loop().sock_sendall(sock, request("/flood"))
        await until(lambda: bool(app.bodies))
        await until(lambda: any(c.transport.get_write_buffer_size() for c in server.server_state.connections))
        held = max(c.transport.get_write_buffer_size() for c in server.server_state.connections)
        assert held < 1 << 20
        await until(lambda: bool(app.left))
        assert app.left[0] - began > 0.3
        sock.close()
