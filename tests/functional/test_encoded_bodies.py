"""Request bodies with a Content-Encoding are read, managed and sent on without it."""

import gzip
import json
import resource
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import brotli
import httpx
import pytest
import zstandard

from tests.functional.harness import weir
from tests.functional.scripted import Asked, Reply, completion, scripted, whole

KEYS = """
upstreams: {{main: {{base_url: "{upstream}", api_key: sk-operator}}}}
window: 8192
limits: {{body: 8MiB}}
keys: [{{name: bot, secret: secret-of-the-bot, models: [sim], allow: [relay]}}]
"""
MIB = 2**20


def _brotli(data: bytes) -> bytes:
    return bytes(brotli.compress(data, quality=4))


def _raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


ENCODED: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "DEFLATE": _raw_deflate,
    "zstd": zstandard.ZstdCompressor().compress,
    "br": _brotli,
    "identity": bytes,
    "gzip, br": lambda data: _brotli(gzip.compress(data)),
    "identity, deflate, gzip, zstd": lambda data: zstandard.compress(gzip.compress(zlib.compress(data))),
}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
ANSWERS = {
    "chat/completions": completion("ok"),
    "responses": {"id": "resp_1", "object": "response", "status": "completed", "model": "m", "output": [MESSAGE]},
    "messages": {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "ok"}]},
    "messages/count_tokens": {"input_tokens": 1},
    "embeddings": {"object": "list", "data": []},
}
SAID = [{"role": "user", "content": "Read all the parts."}]
BODIES: Mapping[str, dict[str, Any]] = {
    "chat/completions": {"messages": SAID},
    "responses": {"input": SAID, "store": False},
    "messages": {"messages": SAID, "max_tokens": 64},
    "messages/count_tokens": {"messages": SAID},
    "embeddings": {"input": "a"},
}


def answer(asked: Asked) -> Reply:
    return whole(ANSWERS[asked.target.removeprefix("/v1/")])


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, list[Asked]]]:
    async with (
        scripted(answer) as upstream,
        weir("", folder=tmp_path, yaml=KEYS.format(upstream=upstream.base_url)) as target,
        httpx.AsyncClient(base_url=target.base_url, headers={"authorization": "Bearer secret-of-the-bot"}) as http,
    ):
        yield http, upstream.asked


@pytest.mark.parametrize("path", BODIES)
async def test_an_encoded_body_goes_up_as_the_plain_one_does(
    client: tuple[httpx.AsyncClient, list[Asked]], path: str
) -> None:
    http, asked = client
    body = json.dumps({"model": "sim", **BODIES[path]}).encode()
    for name, encode in ENCODED.items():
        sent = await http.post(f"/{path}", content=encode(body), headers={"content-encoding": name})
        assert sent.status_code == 200, (name, sent.text)
        assert (asked[-1].body, "content-encoding" in asked[-1].headers) == (body, False), name
        assert asked[-1].headers["content-length"] == str(len(body)), name


@cache
def _of_zeros(size: int) -> Mapping[str, bytes]:
    zeros = bytes(size)
    return {name: encode(zeros) for name, encode in ENCODED.items() if name != "identity"}


@pytest.mark.requirement("R.17")
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_body_that_grows_too_much_is_refused(client: tuple[httpx.AsyncClient, list[Asked]], path: str) -> None:
    http, asked = client
    bombs = _of_zeros(32 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, bomb in bombs.items():
        refused = await http.post(f"/{path}", content=bomb, headers={"content-encoding": name})
        error = refused.json()["error"]
        assert (refused.status_code, error["message"][:18]) == (413, "The request's body"), name
        assert error["type"] == ("request_too_large" if path == "messages" else "invalid_request_error")
    assert not asked
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "embeddings"])
async def test_what_cannot_be_read_is_refused(client: tuple[httpx.AsyncClient, list[Asked]], path: str) -> None:
    http, asked = client
    body = json.dumps({"model": "sim", **BODIES[path]}).encode()
    for name, encode in ENCODED.items():
        if name == "identity":
            continue
        for broken in (encode(body)[:-3], encode(body) + b"more", b"\xff" * 40, b""):
            refused = await http.post(f"/{path}", content=broken, headers={"content-encoding": name})
            assert refused.status_code == 400, (name, broken)
            assert refused.json()["error"]["message"]
    for name in ("lzma", "aws-chunked", "gzip, gzip, gzip, gzip", "gzip;q=1"):
        refused = await http.post(f"/{path}", content=gzip.compress(body), headers={"content-encoding": name})
        assert (refused.status_code, refused.json()["error"]["message"][:12]) == (415, "The request "), name
    assert not asked
