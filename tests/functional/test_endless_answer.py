"""An upstream whose answer to a request of Weir's own never ends takes no more memory than such an answer may have."""

import asyncio

import pytest

from proxy.errors import UpstreamUnreachable
from proxy.upstream import client
from tests.functional.harness import weir

MOST = 256 * 1024


@pytest.mark.requirement("P6", "S.10")
async def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER", MOST)
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n")
        try:
            while sent < 64 * MOST:
                writer.write(b" " * 65_536)
                await writer.drain()
                sent += 65_536
        except OSError:
            pass
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, weir(f"http://127.0.0.1:{port}/v1", window=8192) as target:
        runtime = target.runtime
        (upstream,) = runtime.config.upstreams.values()
        caller = runtime.keyring.identify({"authorization": "Bearer sk-test"})
        with pytest.raises(UpstreamUnreachable, match="over"):
            await runtime.upstreams.get(upstream, caller, f"http://127.0.0.1:{port}/v1/x", b"{}")
    assert sent < 64 * MOST
