"""What a web page of another origin may have a Weir do that needs no key, on managed and relayed routes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.functional.harness import RunningWeir, opening, weir

CONFIG = """
upstreams: {{main: {{base_url: "{upstream}", api_key: {key}}}}}
auth: {{mode: {mode}}}
keys: [{{name: app, secret: key-of-the-app}}]
window: 8192
"""
BODY = json.dumps({"model": "sim", "messages": opening(), "max_tokens": 20}).encode()
CHAT, MODELS, EMBEDDINGS, SLASHED = "/v1/chat/completions", "/v1/models", "/v1/embeddings", "/v1//chat/completions"
FOREIGN: list[dict[str, str]] = [
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"},
    {"origin": "https://evil.example", "content-type": "application/x-www-form-urlencoded"},
    {"origin": "null", "content-type": "text/plain"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site"},
]


@asynccontextmanager
async def weir_that_pays(
    folder: Path, *, key: str = "sk-operator", mode: str = "open"
) -> AsyncIterator[tuple[RunningWeir, list[bytes]]]:
    """A Weir that spends the operator's key, and what went up."""
    async with _granting_upstream() as (address, seen):
        yaml = CONFIG.format(upstream=address, key=key, mode=mode)
        async with weir("", yaml=yaml, folder=folder, window=None) as target:
            yield target, seen


@asynccontextmanager
async def _granting_upstream() -> AsyncIterator[tuple[str, list[bytes]]]:
    """An upstream that lets every page read everything, as many servers on a developer's machine do."""
    seen: list[bytes] = []
    answer = json.dumps(
        {"id": "a", "object": "chat.completion", "model": "sim", "created": 1, "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "spent"}}]}
    ).encode()  # fmt: skip
    grants = b"access-control-allow-origin: *\r\naccess-control-allow-headers: *\r\naccess-control-allow-private-network: true\r\n"

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        seen.append(head + await reader.readexactly(size[0] if size else 0))
        framing = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(answer)
        writer.write(b"HTTP/1.1 200 OK\r\n" + grants + framing + answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", seen


async def sent(
    target: RunningWeir, path: str, headers: dict[str, str], *, method: str = "POST", body: bytes = BODY
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a request whose headers are those alone, ``host`` included if it is there."""
    where = urlsplit(target.root)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    lines = {"host": where.netloc, "connection": "close", "content-length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    top, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = top.decode("latin-1").split("\r\n")
    return int(first.split(" ")[1]), {n.lower(): v for n, _, v in (line.partition(": ") for line in rest)}, body


def grants(headers: dict[str, str]) -> list[str]:
    return [name for name in headers if name.startswith("access-control-")]


@pytest.mark.requirement("P7", "S.10")
async def test_a_foreign_page_spends_no_key_of_the_operator(tmp_path: Path) -> None:
    async with weir_that_pays(tmp_path) as (target, seen):
        for path in (CHAT, EMBEDDINGS, SLASHED, "/v1/responses"):
            for page in FOREIGN:
                for credential in ({}, {"authorization": "Bearer anything"}):
                    status, headers, body = await sent(target, path, {**page, **credential})
                    assert (status, json.loads(body)["error"]["code"]) == (403, "invalid_request"), (path, page)
                    assert "weir keys create" in json.loads(body)["error"]["message"]
                    assert not grants(headers)
        status, _, _ = await sent(target, MODELS, {"sec-fetch-site": "cross-site"}, method="GET", body=b"")
        assert status == 403, "an image or a script of a page"
        assert not seen


@pytest.mark.requirement("P7", "S.10")
async def test_where_clients_pay_a_page_needs_the_clients_key(tmp_path: Path) -> None:
    page = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
    asking = {**page, "access-control-request-method": "POST"}
    async with weir_that_pays(tmp_path, key="pass") as (target, seen):
        for path in (CHAT, EMBEDDINGS):
            mine = await sent(target, path, {**page, "authorization": "Bearer sk-mine"})
            assert (mine[0], bool(grants(mine[1]))) == (200, True)
            assert (await sent(target, path, page))[0] == 403
            told = {"access-control-request-headers": "authorization, content-type"}
            preflight = await sent(target, path, {**asking, **told}, method="OPTIONS", body=b"")
            assert (preflight[0], bool(grants(preflight[1]))) == (200, True)
            simple = {"access-control-request-headers": "content-type"}
            refused = await sent(target, path, {**asking, **simple}, method="OPTIONS", body=b"")
            assert (refused[0], grants(refused[1])) == (403, [])
            bound = await sent(target, path, {"host": "evil.example", "content-type": "text/plain"})
            assert bound[0] == 403
        assert sum(b"sk-mine" in each for each in seen) == 2
        assert len(seen) == 4
