"""The upstream's edge, against raw upstreams that answer, misbehave, or do not answer at all."""

import asyncio
import functools
import gzip
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from pydantic import SecretStr

from proxy.config.values import PASS, Timeouts, UpstreamSettings
from proxy.errors import InvalidRequest, ProxyError, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.client import Client
from proxy.upstream.connection import HTTPAnswer

KEY = "sk-test-canary"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs the test on the loop that the product runs on."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(**fixtures), 20))

    return run


class Upstream:
    """A raw server; keeps what each connection sent and when its peer left."""

    def __init__(self, script: Callable[["Wire"], Awaitable[None]]) -> None:
        self._script = script
        self.wires: list[Wire] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, len(self.wires))
        self.wires.append(wire)
        try:
            await self._script(wire)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @property
    def requests(self) -> list[bytes]:
        return [request for wire in self.wires for request in wire.requests]


class Wire:
    """One connection of an upstream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number
        self.requests: list[bytes] = []
        self.left: float | None = None

    async def request(self) -> bytes:
        """One whole request, head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        body = b""
        if b"content-length: " in lower:
            body = await self.reader.readexactly(int(lower.split(b"content-length: ")[1].split(b"\r\n")[0]))
        elif b"transfer-encoding: chunked" in lower:
            body = await self.reader.readuntil(b"0\r\n\r\n")
        self.requests.append(head + body)
        return head + body

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        with suppress(OSError):
            await self.reader.read()
        self.left = time.monotonic()


def to(base_url: str, *, api_key: str = PASS, **timeouts: Any) -> UpstreamSettings:
    return UpstreamSettings(name="up", base_url=base_url, api_key=SecretStr(api_key), timeout=Timeouts(**timeouts))


@asynccontextmanager
async def upstream(
    script: Callable[[Wire], Awaitable[None]], *, tls: ssl.SSLContext | None = None, **timeouts: Any
) -> AsyncIterator[tuple[Upstream, UpstreamSettings, Client]]:
    served = Upstream(script)
    server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    scheme = "https" if tls is not None else "http"
    client = Client(instance="here")
    target = to(f"{scheme}://127.0.0.1:{port}/v1", api_key=KEY, **timeouts)
    try:
        yield served, target, client
    finally:
        await client.close()
        server.close()
        for wire in served.wires:
            wire.writer.transport.abort()
        await asyncio.sleep(0.01)


def once(answer: bytes) -> Callable[[Wire], Awaitable[None]]:
    """Gives the same answer to every request."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            wire.write(answer)

    return script


async def post(client: Client, target: UpstreamSettings, body: Any = b"{}", **changes: Any) -> HTTPAnswer:
    arguments: dict[str, Any] = {
        "method": "POST",
        "path": "/chat/completions",
        "headers": [(b"content-type", b"application/json")],
        "tenant": "t",
        "body": body,
    }
    return await client.send(target, **{**arguments, **changes})


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.005)


def fields(request: bytes) -> list[tuple[str, str]]:
    lines = request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
    return [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]


# What goes upstream


@pytest.mark.requirement("P4", "S.12")
@on_uvloop
async def test_the_upstream_sees_the_clients_headers_and_nothing_that_belongs_to_one_hop() -> None:
    sent = [
        (b"host", b"weir"),
        (b"connection", b"keep-alive, X-Named"),
        (b"x-named", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"proxy-authorization", b"Basic abc"),
        (b"proxy-connection", b"close"),
        (b"te", b"trailers"),
        (b"trailer", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"content-length", b"999"),
        (b"expect", b"100-continue"),
        (b"x-weir-conversation", b"c"),
        (b"accept-encoding", b"gzip"),
        (b"openai-organization", b"org"),
        (b"x-stainless-lang", b"python"),
        (b"x-twice", b"a"),
        (b"x-twice", b"b"),
        (b"x-utf8", "grün".encode()),
        (b"via", b"1.1 other"),
    ]
    async with upstream(once(OK)) as (served, target, client):
        answer = await post(client, target, headers=sent, query=b"a=1&b=%2F", drop=frozenset({b"accept-encoding"}))
        assert await answer.read() == b"ok"
        request = served.requests[0]
    assert request.startswith(b"POST /v1/chat/completions?a=1&b=%2F HTTP/1.1\r\n")
    assert request.endswith(b"\r\n\r\n{}")
    host = target.base_url.split("/")[2]
    assert sorted(fields(request)) == sorted(
        [
            ("host", host),
            ("openai-organization", "org"),
            ("x-stainless-lang", "python"),
            ("x-twice", "a"),
            ("x-twice", "b"),
            ("x-utf8", "grün".encode().decode("latin-1")),
            ("via", "1.1 other"),
            ("via", "1.1 weir-here"),
            ("authorization", f"Bearer {KEY}"),
            ("content-length", "2"),
        ]
    )


@pytest.mark.requirement("S.7", "S.8", "P4")
@pytest.mark.parametrize("name", [b"authorization", b"api-key", b"x-api-key"])
@on_uvloop
async def test_the_clients_credential_goes_upstream_only_where_the_target_has_none(name: bytes) -> None:
    async with upstream(once(OK)) as (served, target, client):
        headers = [(name, b"mine")]
        await (await post(client, target, headers=headers)).read()
        await (await post(client, replace(target, api_key=SecretStr(PASS)), headers=headers)).read()
        ours, theirs = served.requests
    assert b"mine" not in ours
    assert KEY.encode() in ours
    assert (name.decode(), "mine") in fields(theirs)
    assert KEY.encode() not in theirs


@pytest.mark.requirement("S.17")
def test_a_target_does_not_show_its_key_and_takes_no_key_that_no_header_can_hold() -> None:
    assert KEY not in repr(to("http://a", api_key=KEY))
    with pytest.raises(ValueError, match="api_key") as caught:
        _ = to("http://a", api_key=KEY + "\n").own_key
    assert KEY not in str(caught.value)


@pytest.mark.requirement("P4")
@on_uvloop
async def test_a_large_body_and_a_streamed_one_arrive_whole() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"part"
            await asyncio.sleep(0)
        yield b""

    async with upstream(once(OK)) as (served, target, client):
        large = b"x" * 3_000_000
        await (await post(client, target, large)).read()
        await (await post(client, target, parts())).read()
        await (await post(client, target, parts(), length=12)).read()
        first, second, third = served.requests
    assert first.endswith(large)
    assert ("transfer-encoding", "chunked") in fields(second)
    assert second.endswith(b"\r\n\r\n4\r\npart\r\n4\r\npart\r\n4\r\npart\r\n0\r\n\r\n")
    assert ("content-length", "12") in fields(third)
    assert third.endswith(b"\r\n\r\npartpartpart")


@pytest.mark.requirement("S.7", "S.8")
@pytest.mark.parametrize("path", ["/../admin", "/a/..", "/%2e%2E/admin", "/.%2e/x", "//..", "x", "@evil.example/", ""])
@on_uvloop
async def test_a_path_cannot_leave_the_targets_address(path: str) -> None:
    async with upstream(once(OK)) as (served, target, client):
        with pytest.raises(InvalidRequest):
            await post(client, target, path=path)
        assert served.wires == []


@pytest.mark.requirement("S.9")
@on_uvloop
async def test_a_proxy_in_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream(once(OK)) as (proxy, proxied, _), upstream(once(OK)) as (served, target, client):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxied.base_url.removesuffix("/v1"))
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        await (await post(client, target)).read()
        assert len(served.requests) == 1
        assert proxy.wires == []


# What comes back


@pytest.mark.requirement("R.44", "S.12", "P4")
@on_uvloop
async def test_an_answers_headers_come_back_raw_without_those_of_one_hop() -> None:
    head = (
        b"HTTP/1.1 201 Fine\r\nContent-Type: application/json\r\nX-Request-ID: r\r\nSet-Cookie: a=1\r\n"
        b"Set-Cookie: b=2\r\nConnection: keep-alive, X-Named\r\nX-Named: 1\r\nKeep-Alive: timeout=5\r\n"
        b"Proxy-Authenticate: Basic\r\nTrailer: x\r\nX-Latin: \xfc\r\nContent-Length: 2\r\n\r\nok"
    )
    async with upstream(once(head)) as (served, target, client):
        named = replace(target, base_url=target.base_url.replace("127.0.0.1", "localhost"))
        for _ in range(2):
            answer = await post(client, named)
            assert answer.status == 201
            assert answer.headers == (
                (b"content-type", b"application/json"),
                (b"x-request-id", b"r"),
                (b"set-cookie", b"a=1"),
                (b"set-cookie", b"b=2"),
                (b"x-latin", b"\xfc"),
                (b"content-length", b"2"),
            )
            assert await answer.read() == b"ok"
            assert answer.ended
        assert len(served.wires) == 1
        assert b"cookie" not in served.requests[1].lower()


@pytest.mark.requirement("R.43", "P4")
@on_uvloop
async def test_a_compressed_answer_passes_undecoded() -> None:
    packed = gzip.compress(b"a" * 1_000_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with upstream(once(head + packed)) as (_, target, client):
        answer = await post(client, target)
        assert (b"content-encoding", b"gzip") in answer.headers
        assert await answer.read() == packed


@pytest.mark.requirement("R.41")
@on_uvloop
async def test_interim_answers_are_skipped() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    async with upstream(once(early + OK)) as (_, target, client):
        answer = await post(client, target)
        assert (answer.status, await answer.read()) == (200, b"ok")


@pytest.mark.requirement("R.4", "P5")
@on_uvloop
async def test_an_upstream_is_held_back_while_nobody_reads() -> None:
    sent = 0

    async def script(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        wire.write(CHUNKED)
        block = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        while sent < 200 << 20:
            wire.write(block)
            await wire.writer.drain()
            sent += len(block)

    async with upstream(script, idle=0.2) as (_, target, client):
        answer = await post(client, target)
        chunks = answer.chunks()
        await anext(chunks)
        await asyncio.sleep(0.5)
        assert sent < 16 << 20
        # Silence that this side has caused is not the upstream's.
        assert await anext(chunks)
        answer.close()


# Faults before an answer


@pytest.mark.requirement("R.29")
@on_uvloop
async def test_an_unknown_host_is_an_unreachable_upstream() -> None:
    client = Client(instance="here")
    with pytest.raises(UpstreamUnreachable, match="could not be"):
        await post(client, to("http://no-such-host.invalid/v1", connect=3))
    await client.close()


@pytest.mark.requirement("R.29")
@on_uvloop
async def test_a_connection_that_is_never_accepted_ends_at_the_connect_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        crowd = [socket.socket() for _ in range(4)]
        for sock in crowd:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        client = Client(instance="here")
        target = to(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", connect=0.3)
        with pytest.raises(UpstreamUnreachable, match=r"within 0\.3 seconds"):
            await post(client, target)
        await client.close()
        for sock in crowd:
            sock.close()


@pytest.mark.requirement("R.32")
@on_uvloop
async def test_an_upstream_that_never_answers_ends_at_the_first_byte_timeout_and_is_left() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.gone()

    async with upstream(script, first_byte=0.3) as (served, target, client):
        with pytest.raises(UpstreamTimeout, match=r"0\.3 seconds"):
            await post(client, target)
        await until(lambda: served.wires[0].left is not None)
        assert len(served.requests) == 1


@pytest.mark.requirement("R.8", "P5")
@on_uvloop
async def test_a_cancelled_request_closes_its_connection_at_once() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.gone()

    async with upstream(script) as (served, target, client):
        task = asyncio.create_task(post(client, target))
        await until(lambda: bool(served.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: served.wires[0].left is not None)


BROKEN_HEADS = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a control character in a value": b"HTTP/1.1 200 OK\r\nX-A: a\x01b\r\nContent-Length: 0\r\n\r\n",
    "a carriage return in a value": b"HTTP/1.1 200 OK\r\nX-A: a\rSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
    "a NUL in a value": b"HTTP/1.1 200 OK\r\nX-A: a\0b\r\nContent-Length: 0\r\n\r\n",
    "an illegal name": b"HTTP/1.1 200 OK\r\nX(A): a\r\nContent-Length: 0\r\n\r\n",
    "a giant value": b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 2_000_000 + b"\r\n\r\n",
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"X-A: a\r\n" * 5000 + b"\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nX-A: ",
    "nothing": b"",
}


@pytest.mark.requirement("R.31", "R.44", "S.13")
@pytest.mark.parametrize("case", BROKEN_HEADS)
@on_uvloop
async def test_an_answer_with_a_broken_head_is_an_unreachable_upstream(case: str) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.write(BROKEN_HEADS[case])

    async with upstream(script) as (served, target, client):
        with pytest.raises(UpstreamUnreachable) as caught:
            await post(client, target, query=b"key=secret")
        assert len(served.requests) == 1
        assert not any(word in caught.value.message for word in ("secret", KEY, "127.0.0.1", "X-A"))


@pytest.mark.requirement("R.45", "S.8")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@on_uvloop
async def test_a_redirect_is_not_followed_and_the_key_stays(status: int) -> None:
    async with upstream(once(OK)) as (other, elsewhere, _):
        location = elsewhere.base_url.encode()
        head = b"HTTP/1.1 %d Moved\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % (status, location)
        async with upstream(once(head)) as (_, target, client):
            with pytest.raises(UpstreamUnreachable, match=str(status)) as caught:
                await post(client, target)
        assert other.wires == []
        assert elsewhere.base_url not in caught.value.message


@pytest.mark.requirement("R.49")
@on_uvloop
async def test_a_certificate_that_nobody_signed_is_an_unreachable_upstream() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(__file__).with_name("self_signed.pem"))
    async with upstream(once(OK), tls=context) as (served, target, client):
        with pytest.raises(UpstreamUnreachable, match="TLS failed"):
            await post(client, target)
        assert served.requests == []


# The connection that was idle


@pytest.mark.requirement("R.30")
@pytest.mark.parametrize("how", ["fin", "reset"])
@on_uvloop
async def test_a_connection_that_was_closed_while_idle_costs_the_client_nothing(how: str) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.write(OK)
        if wire.number == 0:
            await wire.request()
            if how == "reset":
                wire.reset()
            return
        await wire.gone()

    async with upstream(script) as (served, target, client):
        for _ in range(2):
            assert await (await post(client, target)).read() == b"ok"
        assert [len(wire.requests) for wire in served.wires] == [2, 1]


@pytest.mark.requirement("R.30", "R.31")
@pytest.mark.parametrize(
    "how", ["new connection", "half a head, closed", "half a head, reset", "late", "streamed body"]
)
@on_uvloop
async def test_a_request_is_sent_once_wherever_the_upstream_may_have_begun_to_work(how: str) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"part"

    async def script(wire: Wire) -> None:
        await wire.request()
        if how != "new connection":
            wire.write(OK)
            await wire.request()
        if how.startswith("half"):
            wire.write(b"HTTP/1.1 200 OK\r\nX-A")
            await asyncio.sleep(0.05)
        if how == "late":
            await asyncio.sleep(1.2)
        if how.endswith("reset"):
            wire.reset()

    async with upstream(script) as (served, target, client):
        expected = 1
        if how != "new connection":
            await (await post(client, target)).read()
            expected = 2
        with pytest.raises(UpstreamUnreachable):
            await post(client, target, parts() if how == "streamed body" else b"{}")
        assert len(served.requests) == expected
        assert len(served.wires) == 1


# Bytes that belong to nobody


AFTER_THE_END = {
    "after a length": OK,
    "after a 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "after the last chunk": CHUNKED + b"2\r\nok\r\n0\r\n\r\n",
}
SECRET = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nSECRET"


@pytest.mark.requirement("R.42", "S.4", "S.5")
@pytest.mark.parametrize("case", AFTER_THE_END)
@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["same packet", "later"])
@pytest.mark.parametrize("tenant", ["t", "other"], ids=["same tenant", "other tenant"])
@on_uvloop
async def test_bytes_after_the_end_of_an_answer_reach_nobody(case: str, pause: float, tenant: str) -> None:
    left = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        wire.write(AFTER_THE_END[case])
        if wire.number == 0:
            await asyncio.sleep(pause)
            wire.write(SECRET)
        await wire.gone()
        left.set()

    async with upstream(script) as (served, target, client):
        first = await (await post(client, target)).read()
        await asyncio.wait_for(left.wait(), 20)  # bytes behind the next request would be its answer to anybody
        answer = await post(client, target, tenant=tenant)
        assert b"SECRET" not in await answer.read()
        assert first in (b"ok", b"")
        assert [len(wire.requests) for wire in served.wires] == [1, 1]


@on_uvloop
async def test_pools_are_bounded_and_those_in_use_stay() -> None:
    async def script(wire: Wire) -> None:
        while b"/hold" not in await wire.request():
            wire.write(OK)
        wire.write(CHUNKED)
        await wire.gone()

    async with upstream(script) as (served, target, client):
        held = await post(client, target, path="/hold", tenant="held")
        for number in range(300):
            await (await post(client, target, tenant=f"tenant-{number}")).read()
        await until(lambda: sum(not wire.reader.at_eof() for wire in served.wires) <= 256)
        assert not served.wires[0].reader.at_eof()
        held.close()


# Faults within an answer


@pytest.mark.requirement("R.33")
@on_uvloop
async def test_an_answer_that_falls_silent_times_out_and_the_upstream_is_left() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.write(CHUNKED)
        for _ in range(4):
            await asyncio.sleep(0.2)
            wire.write(b"5\r\nhello\r\n")
        await wire.gone()

    async with upstream(script, idle=0.6) as (served, target, client):
        answer = await post(client, target)
        chunks = answer.chunks()
        assert [await anext(chunks) for _ in range(4)] == [b"hello"] * 4
        with pytest.raises(UpstreamTimeout, match=r"0\.6 seconds") as caught:
            await anext(chunks)
        assert isinstance(caught.value, ProxyError)
        await until(lambda: served.wires[0].left is not None)


@pytest.mark.requirement("R.6", "P5")
@on_uvloop
async def test_closing_an_answer_closes_the_upstream_at_once() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.write(CHUNKED + b"5\r\nhello\r\n")
        await wire.gone()

    async with upstream(script) as (served, target, client):
        answer = await post(client, target)
        assert await anext(answer.chunks()) == b"hello"
        answer.close()
        answer.close()
        await until(lambda: served.wires[0].left is not None)
