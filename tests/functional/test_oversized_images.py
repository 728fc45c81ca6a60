"""Long sessions with images: what the client resends grows, what goes up does not."""

import io
import json
import struct
import zlib
from base64 import b64encode
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from tests.functional.harness import COUNTER, opening, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

CONFIG = """
upstreams: {{main: {{base_url: "{upstream}"}}}}
window: 128000
default_policy: pictures
policies: {{pictures: {{cascade: [{{layer: media, at: 0.01, stop_at: 0.005, min_savings: 200, params: {{keep: 2}}}}]}}}}
"""


def png(size: int, *, seed: int) -> str:
    """An image of one pixel and ``size`` bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 512, 512, 8, 2, 0, 0, 0))
    more = chunk(b"tEXt", b"Comment\0" + Random(seed).randbytes(16).hex().encode() * (size // 32))
    return "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IEND", b"")).decode()


def shown(number: int) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": png(4_000_000, seed=number)}}
    return [
        {"role": "user", "content": [{"type": "text", "text": f"picture {number}"}, image]},
        {"role": "assistant", "content": "I see."},
    ]


@pytest.mark.requirement("A2.23", "R.16")
async def test_old_images_go_before_a_body_is_refused(tmp_path: Path) -> None:
    messages = [*opening(), {"role": "assistant", "content": "Please do."}, *(m for n in range(7) for m in shown(n))]
    messages.append({"role": "user", "content": "thanks"})
    body = json.dumps({"model": "sim", "messages": messages, "max_tokens": 20}).encode()
    assert len(body) > 32 * 2**20
    async with (
        serve_simulator(SimulatorSettings(window=128_000), counter=COUNTER) as simulator,
        weir("", yaml=CONFIG.format(upstream=simulator.base_url), folder=tmp_path, window=None) as target,
        aiohttp.ClientSession() as session,
    ):
        async with session.post(f"{target.base_url}/chat/completions", data=io.BytesIO(body)) as answer:
            assert answer.status == 200, await answer.text()
        sent = simulator.ledger[-1].body
        assert len(sent) < 12 * 2**20
        assert sent.count(b"data:image/png") == 2
        assert sent.count(b"left out; archived as") == 5
