"""What the log says of an answer that breaks off on its way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.functional.harness import WeirProcess, free_port, opening

pytestmark = pytest.mark.slow


@asynccontextmanager
async def breaking_upstream() -> AsyncIterator[str]:
    """An upstream whose streams end in the middle of one."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        await reader.readexactly(size[0] if size else 0)
        event = (
            b'data: {"id":"a","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
        )
        framing = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing % (len(event), event))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@pytest.mark.requirement("R.31")
async def test_a_cut_answer_is_one_line_of_weirs_and_none_of_the_servers(tmp_path: Path) -> None:
    async with breaking_upstream() as address, aiohttp.ClientSession() as session:
        arguments = ["--upstream", address, "--store", f"sqlite+aiosqlite:///{tmp_path / 'w.db'}"]
        async with WeirProcess(arguments, free_port()) as target:
            for route in ("chat/completions", "responses"):
                said = len(target.log)
                body = {"model": "sim", "messages": opening(), "input": "x", "stream": True}
                async with session.post(f"{target.base_url}/{route}", json=body) as answer:
                    request = answer.headers["x-request-id"]
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.read()
                async with asyncio.timeout(60):
                    while not any(request in line for line in target.log[said:]):
                        await asyncio.sleep(0.02)
                await asyncio.sleep(0.1)  # what would come behind it
                lines = [line for line in target.log[said:] if "ERROR" in line or "WARNING" in line or request in line]
                assert len([line for line in lines if request in line]) == 1, lines
                assert not [line for line in lines if "ASGI" in line or "uvicorn" in line]
                assert "stream_broken" in lines[0] or "broke off" in lines[0]
