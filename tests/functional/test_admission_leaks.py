"""However a request ends, nothing of it stays counted as inside."""

import asyncio
import contextlib
import json
import random
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy.server import ServerLimits
from tests.functional.harness import RunningWeir, weir
from tests.functional.scripted import Asked, Reply, completion, events, scripted, whole
from tests.profile import tried

ABORTS = tried(300, 1_000)
CONFIG = """
upstreams: {{main: {{base_url: "{upstream}", api_key: sk-operator, timeout: {{first_byte: 300ms}}}}}}
auth: {{mode: keys}}
keys:
  - {{name: one, secret: key-of-one}}
  - {{name: two, secret: key-of-two, models: [sim]}}
window: 8192
limits: {{body: 256KiB, bytes_in_flight: 1MiB, bytes_in_flight_per_key: 600KiB, concurrency_per_key: 30}}
"""


def answers(chance: random.Random) -> Reply:
    """An answer that is whole, streamed, broken off, or never comes."""
    chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}}]}
    return chance.choice(
        [
            whole(completion("ok")),
            whole({"error": {"message": "busy"}}, status=500),
            events(chunk, chunk),
            Reply(kind="text/event-stream", chunks=(b"data: {}\n\n",) * 3, between=0.01, cut=True),
            Reply(silent=True),
        ]
    )


def request_of(chance: random.Random) -> tuple[bytes, bytes]:
    """Head and body of a request, framed in one of the ways there are, honest or not."""
    path = chance.choice(["/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/files", "/v1/models/sim"])
    method = "GET" if "models" in path else "POST"
    key = chance.choice(["key-of-one", "key-of-two", "key-of-two", "wrong-key"])
    size = chance.choice([0, 1_000, 60_000, 200_000, 300_000])
    said = {"model": "sim", "stream": chance.random() < 0.5, "input": "x" * size}
    body = json.dumps(said | {"messages": [{"role": "user", "content": "x"}]}).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    if chance.random() < 0.5:
        parts = [body[at : at + 20_000] for at in range(0, len(body), 20_000)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), framed + b"0\r\n\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body


async def abort(target: RunningWeir, chance: random.Random) -> None:
    """One request that is left at a moment of its own."""
    where = urlsplit(target.root)
    head, body = request_of(chance)
    whole_request = head + body
    sent = chance.choice([len(head), len(head) + 1, chance.randrange(len(whole_request)), len(whole_request)])
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(whole_request[:sent])
        async with asyncio.timeout(chance.choice([0.0, 0.005, 0.05, 0.3])):
            await writer.drain()
            await reader.read(chance.choice([1, 100, 100_000]))
    if chance.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.requirement("S.14", "R.7")
async def test_requests_left_at_any_moment_leave_nothing_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.access.admission.PATIENCE", 0.1)
    chance = random.Random(7)

    def say(_: Asked) -> Reply:
        return answers(chance)

    async with scripted(say) as upstream:
        yaml = CONFIG.format(upstream=upstream.base_url)
        limits = ServerLimits(body_timeout=0.5)
        async with weir("", yaml=yaml, folder=tmp_path, window=None, limits=limits) as target:
            admission = target.runtime.admission
            value = target.runtime.telemetry.metrics.registry.get_sample_value
            most = 0
            for _ in range(ABORTS // 100):
                asking = [asyncio.create_task(abort(target, chance)) for _ in range(100)]
                while not all(each.done() for each in asking):
                    most = max(most, admission.held)
                    await asyncio.sleep(0.005)
                await asyncio.gather(*asking)
            assert most > 600 * 1024, "there was a flood"
            assert most <= 1024 * 1024
            async with asyncio.timeout(20):
                while admission._usage or value("http_server_active_requests"):
                    await asyncio.sleep(0.01)
            assert (admission.held, admission._usage, len(admission._waiting)) == (0, {}, 0)
            assert value("http_server_active_requests") == value("weir_streams_active") == 0
            upstream.say = lambda _: whole(completion("ok"))
            answer = await target.client("key-of-one").embeddings.create(
                model="sim", input="x", encoding_format="float"
            )
            assert answer
