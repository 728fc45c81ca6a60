"""Bad input gets a clear error or an untouched relay; never a 500, never a lost message."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.functional.harness import COUNTER, opening, prose, weir
from tests.misbehaving import ALL_FAULTS
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

KEYS = """
upstreams: {{main: {{base_url: "{upstream}", api_key: sk-operator}}}}
auth: {{mode: keys, admin_token: admin-token-0001}}
keys:
  - {{name: bot, secret: secret-of-the-bot, models: ["sim"]}}
  - {{name: pure, secret: secret-of-pure, policy: "off"}}
"""

DEEP = b"[" * 100_000 + b"]" * 100_000
REFUSED = {
    "truncated": (b'{"model":"sim","messages":[', "invalid_json"),
    "no json": (b"hello", "invalid_json"),
    "empty": (b"", "invalid_json"),
    "byte order mark": (b"\xef\xbb\xbf{}", "invalid_json"),
    "an array": (b"[]", "invalid_request"),
    "a number": (b"1", "invalid_request"),
    "model is a list": (b'{"model":["sim"],"messages":[]}', "invalid_request"),
    "100,000 deep": (b'{"model":"sim","messages":[{"role":"user","content":' + DEEP + b"}]}", "invalid_json"),
    "data after the end": (b'{"model":"sim"} {"model":"sim"}', "invalid_json"),
}


@pytest.mark.requirement("R.18", "R.19")
async def test_what_is_no_request_is_refused_in_openais_shape_and_goes_nowhere() -> None:
    async with (
        serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator,
        weir(simulator.base_url) as target,
        aiohttp.ClientSession() as session,
    ):
        for name, (body, code) in REFUSED.items():
            async with session.post(f"{target.base_url}/chat/completions", data=body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (400, code), name
                assert set(error) >= {"message", "type", "param", "code"}
                assert answer.headers["x-request-id"].startswith("req_")
        assert simulator.ledger == []


MISSHAPEN = (
    ("chat/completions", "messages", {"role": {}, "content": "x"}, "messages[1].role"),
    ("messages", "messages", {"role": ["user"], "content": "x"}, "messages[1].role"),
    ("responses", "input", {"role": {}, "content": "x"}, "input[1].role"),
    ("responses", "input", {"type": {}, "role": "user", "content": "x"}, "input[1].type"),
    ("responses", "input", {"role": "user", "content": [{"type": {}, "text": "x"}]}, "input[1].content[0].type"),
)


async def test_a_role_or_a_type_that_is_no_word_is_named_and_goes_nowhere() -> None:
    async with (
        serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator,
        weir(simulator.base_url) as target,
        aiohttp.ClientSession() as session,
    ):
        for path, array, odd, field in MISSHAPEN:
            body = {"model": "sim", "max_tokens": 9, array: [{"role": "user", "content": "hello"}, odd]}
            async with session.post(f"{target.base_url}/{path}", json=body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["message"]) == (400, f"{field} must be a string.")
                assert error.get("param", field) == field
        assert simulator.ledger == []


@pytest.mark.requirement("R.20", "R.21")
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": None},
        {"messages": {"role": "user"}},
        {"messages": [1, "two", None]},
        {"messages": [{"role": 7, "content": 7}]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": "what"}]},
        {"messages": [{"role": "tool", "tool_call_id": "nobody", "content": "orphan"}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a"}, 5, {"function": {"name": 3, "arguments": {}}}]}
            ]
        },
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": "12"},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": True},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2**63},
        {"messages": [{"role": "user", "content": "x"}], "tools": "none", "functions": 4, "metadata": []},
        {"messages": [{"role": "user", "content": "x"}], "stream": "yes", "n": None, "plugins": 3, "transforms": {}},
    ],
)
async def test_odd_values_are_relayed_untouched(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "sim", **fields}).encode()
    async with (
        serve_simulator(SimulatorSettings(window=100_000, strict=False), counter=COUNTER) as simulator,
        weir(simulator.base_url, window=100_000) as target,
        aiohttp.ClientSession() as session,
    ):
        async with session.post(f"{target.base_url}/chat/completions", data=body) as answer:
            assert answer.status in (200, 400)
            await answer.read()
        assert [s.body for s in simulator.ledger] == [body]


@pytest.mark.requirement("R.16")
async def test_a_body_of_70_mb_is_refused_before_it_is_read_and_told_what_to_do() -> None:
    settings = SimulatorSettings(faults=ALL_FAULTS)
    async with serve_simulator(settings, counter=COUNTER) as simulator, weir(simulator.base_url) as target:
        port = int(target.root.rpartition(":")[2])
        for address in ("chat/completions", "embeddings"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST /v1/{address} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 70000000\r\n\r\n".encode())
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.startswith(b"HTTP/1.1 413 ")
            error = json.loads(await asyncio.wait_for(reader.readuntil(b"}}"), 60))["error"]
            writer.close()
            assert error["code"] == "request_too_large"
            for words in ("larger than 64 MiB", "limits.body", "images"):
                assert words in error["message"]
        assert simulator.ledger == []


@pytest.mark.requirement("R.22", "R.23", "S.26")
async def test_hostile_texts_are_counted_and_answered() -> None:
    texts = [" " * 1_000_000, "<|endoftext|>" * 50, "\ud800 lone", "\u4e2d\u6587" * 60_000, "a" * 300_000]
    async with (
        serve_simulator(SimulatorSettings(window=3_000_000, strict=False), counter=COUNTER) as simulator,
        weir(simulator.base_url, window=3_000_000) as target,
        aiohttp.ClientSession() as session,
    ):
        for text in texts:
            body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": text}]}).encode()
            async with session.post(f"{target.base_url}/chat/completions", data=body) as answer:
                assert answer.status == 200
                await answer.read()
                assert "x-weir-tokens" in answer.headers
                assert "degraded" not in answer.headers["x-weir-actions"]
        assert len(simulator.ledger) == len(texts)


@pytest.mark.requirement("P7", "S.29")
async def test_keys_are_asked_for_and_say_what_they_allow(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(models=("sim", "other")), counter=COUNTER) as simulator:
        yaml = KEYS.format(upstream=simulator.base_url)
        async with weir(simulator.base_url, yaml=yaml, folder=tmp_path) as target:
            with pytest.raises(openai.AuthenticationError) as wrong:
                await target.client("sk-wrong").chat.completions.create(model="sim", messages=opening())
            assert wrong.value.code == "invalid_api_key"
            client = target.client("secret-of-the-bot")
            with pytest.raises(openai.PermissionDeniedError) as denied:
                await client.chat.completions.create(model="other", messages=opening())
            assert denied.value.code == "model_not_allowed"
            assert simulator.ledger == []
            answer = await client.chat.completions.create(model="sim", messages=opening())
            assert answer.choices[0].message.content
            seen = simulator.ledger[-1]
            assert seen.header("authorization") == "Bearer sk-operator"
            assert b"secret-of-the-bot" not in seen.body


@pytest.mark.requirement("P12", "A0.38")
async def test_what_cannot_fit_gets_one_clear_400_and_nothing_is_sent() -> None:
    messages = [{"role": "system", "content": prose(9_000, seed=5)}, {"role": "user", "content": "hello"}]
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url) as target,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await target.client().chat.completions.create(model="sim", messages=messages, max_tokens=512)
        assert refused.value.code == "context_length_exceeded"
        assert "maximum context length is 8192 tokens" in str(refused.value)
        weir_part = refused.value.body["weir"]  # type: ignore[index]
        assert weir_part["window"] == 8192
        assert weir_part["reserve"] == 512
        assert weir_part["buckets"]["system"] > 8192
        assert simulator.ledger == []


@pytest.mark.requirement("S.28")
async def test_a_loop_through_weir_itself_is_refused() -> None:
    settings = SimulatorSettings(faults=ALL_FAULTS)
    async with serve_simulator(settings, counter=COUNTER) as simulator, weir(simulator.base_url) as target:
        await target.client().chat.completions.create(model="sim", messages=opening())
        via = simulator.ledger[-1].header("via")
        with pytest.raises(openai.BadRequestError) as refused:
            await target.client(default_headers={"via": via or ""}).chat.completions.create(
                model="sim", messages=opening()
            )
        assert refused.value.code == "loop_detected"


@pytest.mark.requirement("R.29")
async def test_an_upstream_that_is_not_there_is_said_so() -> None:
    async with weir("http://127.0.0.1:9/v1") as target:
        with pytest.raises(openai.APIStatusError) as failed:
            await target.client().chat.completions.create(model="sim", messages=opening())
        assert failed.value.status_code == 502
        assert failed.value.code == "upstream_unreachable"
        async with aiohttp.ClientSession() as session, session.get(f"{target.root}/readyz") as ready:
            assert ready.status == 503


@pytest.mark.requirement("R.40")
async def test_an_empty_200_is_an_error() -> None:
    settings = SimulatorSettings(faults=ALL_FAULTS)
    async with serve_simulator(settings, counter=COUNTER) as simulator, weir(simulator.base_url) as target:
        with pytest.raises(openai.APIStatusError) as failed:
            await target.client().chat.completions.create(model="fault:empty_200", messages=opening())
        assert (failed.value.status_code, failed.value.code) == (502, "upstream_empty")


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.requirement("R.18", "S.14")
async def test_what_is_nested_too_deeply_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    texts = json.dumps("{[" * 5_000 + '\\"' + nested(500))
    call = '{{"role":"assistant","content":null,"tool_calls":[{}]}}'
    places = {
        "messages": '{{"model":"sim","messages":[{{"role":"user","content":"x","more":{}}}]}}',
        "tools": '{{"model":"sim","messages":[{{"role":"user","content":"x"}}],"tools":{}}}',
        "metadata": '{{"model":"sim","messages":[{{"role":"user","content":"x"}}],"metadata":{}}}',
    }
    around = {"messages": 3, "tools": 1, "metadata": 1}
    async with serve_simulator(SimulatorSettings(window=100_000, strict=False), counter=COUNTER) as simulator:
        yaml = f'upstreams: {{main: {{base_url: "{simulator.base_url}"}}}}\nlimits: {{depth: 40}}\n'
        async with (
            weir("", yaml=yaml, folder=tmp_path, window=100_000) as target,
            aiohttp.ClientSession() as session,
        ):

            async def send(body: str) -> tuple[int, Any]:
                async with session.post(f"{target.base_url}/chat/completions", data=body.encode()) as answer:
                    return answer.status, await answer.json()

            for field, body in places.items():
                for _ in range(2):  # refused again: it is not remembered as good
                    status, told = await send(body.format(nested(41 - around[field])))
                    assert (status, told["error"]["code"], told["error"]["param"]) == (400, "invalid_json", field)
                    assert "limits.depth" in told["error"]["message"]
                assert simulator.ledger == [], field
            assert "nested" in (await send(places["messages"].format(nested(700))))[1]["error"]["message"]
            for number, (field, body) in enumerate(places.items()):
                status, told = await send(body.format(nested(40 - around[field])))
                assert "nested" not in json.dumps(told), (field, told)
                assert len(simulator.ledger) == number + 1
            long = f'{{"model":"sim","messages":[{{"role":"user","content":{texts}}},{call.format("{}")}]}}'
            await send(long)
            assert simulator.ledger[-1].body == long.encode(), "brackets in texts are no levels"
