"""Below the first threshold Weir is invisible: the client's bytes go up, the upstream's bytes come down."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.functional.harness import COUNTER, ROOT, apart, opening, tool_step, weir
from tests.profile import tried
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings
from tests.upstream.window import PrefixCache

SHARED = ROOT.parent / "shared" / "data" / "clients"
SPELLINGS = [
    b'{"model":"sim","messages":[{"role":"user","content":"hi"}]}',
    b'{ "model" : "sim" ,\n\t"messages" : [ { "content" : "hi" , "role" : "user" } ] , "temperature" : 1.0e0 }  ',
    b'{"messages":[{"role":"user","content":"\\u0068i \\ud83d\\ude00"}],"model":"sim","seed":1180591620717411303424}',
    b'{"model":"sim","messages":[{"role":"user","content":"lone \\ud800 surrogate"}],"x_new_field":{"b":1,"a":[null]}}',
    b'{"model":"sim","messages":[{"role":"user","content":"twice"}],"user":"a","user":"b"}',
    b'{"model":"sim","messages":[{"role":"user","content":"nan"}],"temperature":NaN}',
    b'{"model":"sim","messages":[]}',
    b'{"model":"sim","messages":"not an array"}',
    b'{"model":"sim","messages":[{"role":"wizard","content":{"type":"spell"}},17]}',
    b'{"model":"sim","messages":[{"role":"tool","tool_call_id":"x","content":"an orphan"}]}',
    b'{"model":"sim","messages":[{"role":"user","content":[{"type":"hologram","data":"?"}]}],"max_tokens":-1}',
    b'{"model":"sim","messages":[{"role":"user","content":"<|endoftext|>"}],"max_tokens":1e30}',
    b'{"model":"sim"}',
    b'{"model":"sim","messages":[{"role":"user","content":"\xff\xfe"}]}',
    b'{"model":"\xff","messages":[{"role":"user","content":"not utf-8"}]}',
]


def recorded() -> Iterator[Any]:
    """Every request of the recorded clients as (client, method, path, headers, body bytes)."""
    for path in sorted(SHARED.glob("*.jsonl")) if SHARED.is_dir() else ():
        before: dict[str, Any] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            body = row["body"]
            if isinstance(body, dict):
                for key in ("tools", "system", "instructions"):
                    if body.get(key) == {"@same": True}:
                        body[key] = before[key]
                    elif key in body:
                        before[key] = body[key]
            yield pytest.param(row, body, id=f"{path.stem}-{number}")


def headers_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    skipped = {"host", "content-length", "connection", "expect", "transfer-encoding"}
    return [(n, v) for n, v in row["headers"] if n.lower() not in skipped]


@pytest.mark.requirement("P4", "P11", "R.19", "R.21")
@pytest.mark.parametrize("body", SPELLINGS)
async def test_an_unmanaged_request_goes_up_byte_for_byte(body: bytes) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=1_000_000, strict=False), counter=COUNTER) as simulator,
        weir(simulator.base_url, window=1_000_000) as target,
        aiohttp.ClientSession() as session,
    ):
        async with session.post(f"{target.base_url}/chat/completions", data=body) as answer:
            await answer.read()
        assert [s.body for s in simulator.ledger] == [body]


@pytest.mark.requirement("P4")
@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded client requests are not on this machine")
async def test_every_recorded_client_request_goes_up_byte_for_byte() -> None:
    rows = [p.values for p in recorded()]
    async with (
        serve_simulator(SimulatorSettings(window=1_000_000, strict=False), counter=COUNTER) as simulator,
        weir(simulator.base_url, window=1_000_000) as target,
        aiohttp.ClientSession(auto_decompress=False) as session,
    ):
        for row, body in rows[:: tried(4, 1)]:
            sent = json.dumps(body).encode() if isinstance(body, dict) else (body or "").encode()
            headers = headers_of(row)
            before = len(simulator.ledger)
            address = f"{target.root}{row['path']}"
            async with session.request(
                row["method"], address, data=sent or None, headers=headers, skip_auto_headers=["User-Agent", "Accept"]
            ) as answer:
                await answer.read()
            if not row["path"].startswith("/v1"):
                continue
            seen = simulator.ledger[before:]
            assert [s.body for s in seen] == [sent], row["path"]
            assert seen[0].method == row["method"]
            arrived = {n.lower(): v for n, v in seen[0].headers}
            for name, value in headers:
                if name.lower() not in {"accept-encoding", "authorization", "baggage"}:
                    assert arrived[name.lower()] == value
    assert len(rows) > 150


@pytest.mark.requirement("P4", "P5")
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_comes_down_byte_for_byte(stream: bool) -> None:
    body = json.dumps({"model": "sim", "stream": stream, "messages": opening(), "max_tokens": 40}).encode()
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url) as target,
        aiohttp.ClientSession() as session,
    ):
        async with session.post(f"{simulator.base_url}/chat/completions", data=body) as direct:
            first, kind = await direct.read(), direct.headers["content-type"]
        simulator.forget()
        simulator.simulator.model.cache = PrefixCache(entries=100)
        async with session.post(f"{target.base_url}/chat/completions", data=body) as through:
            second = await through.read()
            assert through.headers["content-type"] == kind
            assert through.headers["x-weir-actions"] == "none"
            for name in (
                "x-weir-conversation",
                "x-weir-tokens",
                "x-weir-pressure",
                "x-weir-overhead-ms",
                "x-request-id",
            ):
                assert through.headers[name]
    assert _timeless(second) == _timeless(first)


def _timeless(body: bytes) -> list[str]:
    """The bytes without what differs between any two answers: id and time."""
    return [
        part for part in body.decode().replace("}", "},").split(",") if '"id"' not in part and '"created"' not in part
    ]


@pytest.mark.requirement("P4")
async def test_an_edited_request_differs_in_messages_alone(tmp_path: Path) -> None:
    messages = opening()
    for number in range(20):
        messages += tool_step(number)
    extras = b'"temperature": 1.50, "seed":1180591620717411303424,"x_vendor" : {"z": 1, "a": [1e3]}'
    body = b'{"model":"sim", ' + extras + b', "messages": ' + json.dumps(messages).encode() + b', "max_tokens":512}'
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db") as target,
        aiohttp.ClientSession() as session,
    ):
        async with session.post(f"{target.base_url}/chat/completions", data=body) as answer:
            assert answer.status == 200
            assert answer.headers["x-weir-actions"] != "none"
        sent = simulator.ledger[-1].body
    assert sent.startswith(b'{"model":"sim", ' + extras + b', "messages": [')
    assert sent.endswith(b'], "max_tokens":512}')
    forwarded = apart(json.loads(sent)["messages"])
    assert forwarded[:2] == messages[:2]
    assert forwarded[-2:] == messages[-2:]
