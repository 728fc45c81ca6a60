"""Upstreams of kind litellm, against a server that speaks Anthropic's protocol."""

import asyncio
import contextlib
import importlib
import json
import re
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr

from proxy.config.values import Timeouts, UpstreamSettings
from proxy.errors import InvalidRequest, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.client import LitellmProvider, providers_for
from proxy.upstream.connection import Answer as UpstreamAnswer
from proxy.upstream.connection import StreamBroken
from proxy.upstream.overflow import Kind, classify
from proxy.wire.raw import Decoder
from tests.misbehaving import ALL_FAULTS
from tests.upstream import Dialect, SimulatedAnswer, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

KEY = "sk-operators-own-0123456789"
HELLO = [{"role": "user", "content": "Hello there"}]
SPOKEN = "The quick brown fox jumps over the lazy dog and goes home again."

pytestmark = [
    pytest.mark.requirement("P16"),
    pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier"),
    pytest.mark.slow,
]


class Words:
    def count(self, text: str) -> int:
        return len(text.split())


def settings(base: str, **more: Any) -> UpstreamSettings:
    values: dict[str, Any] = {"api_key": SecretStr(KEY), "provider": "anthropic", "api_base": base, **more}
    return UpstreamSettings(name="claude", kind="litellm", **values)


@contextlib.asynccontextmanager
async def upstream(options: SimulatorSettings, **more: Any) -> AsyncIterator[tuple[LitellmProvider, RunningSimulator]]:
    async with serve_simulator(options, counter=Words()) as running:
        provider = providers_for([settings(running.origin, **more)])["claude"]
        try:
            yield provider, running
        finally:
            await provider.close()


def simulated(*answers: SimulatedAnswer | str, **more: Any) -> SimulatorSettings:
    return SimulatorSettings(dialect=Dialect.ANTHROPIC, answers=answers or (SPOKEN,), faults=ALL_FAULTS, **more)


def body_of(model: str = "claude-sim", **fields: Any) -> bytes:
    return json.dumps({"model": model, "messages": HELLO, "max_tokens": 50, **fields}).encode()


async def ask(
    provider: LitellmProvider, model: str = "claude-sim", *, credential: bytes = b"", **fields: Any
) -> UpstreamAnswer:
    headers = fields.pop("given_headers", ())
    return await provider.send(body=body_of(model, **fields), credential=credential, headers=headers)


async def told(provider: LitellmProvider, model: str, **fields: Any) -> tuple[int, dict[str, Any], dict[bytes, bytes]]:
    answer = await ask(provider, model, **fields)
    return answer.status, json.loads(await answer.read())["error"], dict(answer.headers)


async def events(answer: UpstreamAnswer) -> list[bytes]:
    decoder = Decoder()
    return [event.data async for chunk in answer.chunks() for event in decoder.feed(chunk)]


def text_of(found: list[bytes]) -> str:
    parts = [choice["delta"].get("content") or "" for data in found[:-1] for choice in json.loads(data)["choices"]]
    return "".join(parts)


def run_python(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_such_an_upstream_litellm_is_not_imported():
    out = run_python(
        """
        import sys
        from proxy.config.values import UpstreamSettings
        from proxy.upstream.client import providers_for
        assert providers_for([UpstreamSettings(name="a", base_url="http://127.0.0.1:1/v1")]) == {}
        print(sorted({"litellm", "httpx", "openai"} & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"


def test_the_import_asks_no_network_reads_no_env_file_and_happens_at_the_start(tmp_path):
    (tmp_path / ".env").write_text("ANTHROPIC_API_KEY=from-a-file\n")
    out = run_python(
        f"""
        import os, sys
        os.chdir({str(tmp_path)!r})
        asked = []
        sys.addaudithook(lambda event, args: asked.append(event) if event.startswith("socket.") else None)
        from proxy.config.values import UpstreamSettings
        from proxy.upstream.client import providers_for
        found = providers_for([UpstreamSettings(name="a", kind="litellm", provider="anthropic")])
        import litellm
        reached = [event for event in asked if event in ("socket.connect", "socket.getaddrinfo")]
        print(sorted(found), reached, os.environ.get("ANTHROPIC_API_KEY"), litellm.callbacks)
        """
    )
    assert out.strip() == "['a'] [] None []"


async def test_fields_that_nobody_knows_reach_the_provider_as_they_are():
    async with upstream(simulated()) as (provider, running):
        await ask(provider, top_k=7, shape_of_2031={"deep": [1, 2.5, None]}, user="u-1", metadata={"trace": "x"})
        sent = json.loads(running.ledger[-1].body)
    assert sent["top_k"] == 7
    assert sent["shape_of_2031"] == {"deep": [1, 2.5, None]}
    assert sent["metadata"] == {"user_id": "u-1"}


@pytest.mark.requirement("S.7")
@pytest.mark.parametrize(
    "field",
    [
        *("api_base", "base_url", "api_key", "custom_llm_provider", "fallbacks", "mock_response", "mock_tool_calls"),
        *("model_list", "extra_headers", "headers", "logger_fn", "num_retries", "deployment_id", "drop_params"),
        *("aws_bedrock_runtime_endpoint", "vertex_credentials", "_skip_mcp_handler", "langfuse_host", "client"),
    ],
)
async def test_a_field_that_would_steer_litellm_is_refused_and_nothing_is_sent(field):
    async with upstream(simulated()) as (provider, running):
        with pytest.raises(InvalidRequest) as caught:
            await ask(provider, **{field: "http://127.0.0.1:9/elsewhere"})
        assert caught.value.param == field
        assert running.ledger == []


@pytest.mark.requirement("S.7")
async def test_none_of_litellms_own_names_reaches_it():
    async with upstream(simulated()) as (provider, running):
        names = set(importlib.import_module("litellm.types.utils").all_litellm_params) - {"metadata"}
        assert len(names) > 200
        for name in sorted(names):
            with pytest.raises(InvalidRequest):
                await ask(provider, **{name: "http://127.0.0.1:9/elsewhere"})
        await ask(provider, metadata={"api_base": "http://127.0.0.1:9/elsewhere", "model_group": "x"})
        assert len(running.ledger) == 1


async def test_the_callers_credential_goes_up_where_the_upstream_passes_it_and_never_one_from_the_environment(
    monkeypatch,
):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-the-process")
    async with upstream(simulated(), api_key=SecretStr("pass")) as (provider, running):
        await ask(provider, credential=b"sk-callers-own")
        await ask(provider)
        sent = [dict(seen.headers).get("x-api-key") for seen in running.ledger]
    assert sent == ["sk-callers-own", "no-key"]


@pytest.mark.requirement("S.9")
async def test_a_proxy_in_the_environment_is_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with upstream(simulated()) as (provider, running):
        for stream in (False, True):
            assert (await ask(provider, stream=stream)).status == 200
        assert len(running.ledger) == 2


async def test_only_harmless_headers_of_the_client_go_up():
    headers = [
        (b"authorization", b"Bearer client-secret"),
        (b"cookie", b"a=b"),
        (b"x-stainless-lang", b"python"),
        (b"x-weir-policy", b"off"),
        (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        (b"anthropic-beta", b"context-1m-2025-08-07"),
    ]
    async with upstream(simulated()) as (provider, running):
        await ask(provider, given_headers=headers)
        sent = dict(running.ledger[-1].headers)
    assert sent["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c")
    assert "context-1m-2025-08-07" in sent["anthropic-beta"]
    assert sent["x-api-key"] == KEY
    assert not {"authorization", "cookie", "x-stainless-lang", "x-weir-policy"} & sent.keys()


async def test_what_litellm_cannot_translate_is_a_400_that_says_what():
    async with upstream(simulated()) as (provider, running):
        status, error, _ = await told(provider, "claude-sim", frequency_penalty=1.5)
        assert running.ledger == []
    assert status == 400
    assert "frequency_penalty" in error["message"]
    assert "litellm" not in error["message"]


@contextlib.asynccontextmanager
async def raw(answer: bytes | None, name: str = "anthropic") -> AsyncIterator[tuple[LitellmProvider, list[bytes]]]:
    """A server that reads a request and sends ``answer``, or resets the connection for None."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        asked.append(head + await reader.readexactly(int(length.group(1)) if length else 0))
        if answer is None:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    provider = providers_for([settings(origin, provider=name)])["claude"]
    try:
        yield provider, asked
    finally:
        await provider.close()
        server.close()


def response(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} Status\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", [None, b""])
async def test_a_request_that_may_have_been_counted_is_not_sent_again(answer, stream):
    async with raw(answer) as (provider, asked):
        with pytest.raises(UpstreamUnreachable, match="closed the connection without an answer"):
            await ask(provider, stream=stream)
        assert len(asked) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_that_repeats_the_key_is_told_without_it(stream):
    text = f"bad key {KEY} at https://api.example/v1/m?key={KEY}&alt=sse, sorry"
    body = json.dumps({"type": "error", "error": {"type": "authentication_error", "message": text}}).encode()
    async with raw(response(401, body)) as (provider, _):
        status, error, _ = await told(provider, "claude-sim", stream=stream)
    assert status == 401
    assert error["message"] == "bad key *** at https://api.example/v1/m sorry"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_stays_silent_times_out(stream):
    async with upstream(simulated(), timeout=Timeouts(first_byte=0.8, idle=5)) as (provider, running):
        with pytest.raises(UpstreamTimeout, match=r"did not begin to answer within 0\.8 seconds"):
            await ask(provider, "fault:stall", stream=stream)
        await until(lambda: running.ledger[-1].client_gone)


async def until(happened: Any, seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not happened():
            await asyncio.sleep(0.01)


async def test_a_redirect_is_not_followed_with_the_operators_key():
    async with upstream(simulated()) as (_, other), upstream(simulated()) as (provider, _):
        with pytest.raises(UpstreamUnreachable, match="status 307, which Weir does not follow"):
            await ask(provider, f"fault:redirect:{other.origin}/v1/messages")
        assert other.ledger == []


async def test_a_stream_that_falls_silent_times_out_and_is_let_go():
    async with upstream(simulated(), timeout=Timeouts(first_byte=5, idle=0.3)) as (provider, running):
        answer = await ask(provider, "fault:stall_mid_stream:5", stream=True)
        with pytest.raises(UpstreamTimeout, match=r"sent nothing for 0\.3 seconds"):
            await events(answer)
        assert not answer.ended
        await until(lambda: running.ledger[-1].client_gone)


async def test_closing_an_answer_ends_the_providers_stream():
    async with upstream(simulated("word " * 400, chunk_delay=0.05)) as (provider, running):
        answer = await ask(provider, stream=True)
        chunks = answer.chunks()
        await anext(chunks)
        answer.close()
        await until(lambda: running.ledger[-1].client_gone)
        await chunks.aclose()


@pytest.mark.requirement("P5")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_request_ends_at_the_provider_too(stream):
    async with upstream(simulated()) as (provider, running):
        asking = asyncio.create_task(ask(provider, "fault:stall", stream=stream))
        await until(lambda: bool(running.ledger))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: running.ledger[-1].client_gone)


async def test_two_credentials_share_no_connection():
    async with upstream(simulated(), api_key=SecretStr("pass")) as (provider, _):
        for credential in (b"sk-one", b"sk-two", b"sk-one"):
            await (await ask(provider, credential=credential)).read()
        pools = provider._pools  # type: ignore[attr-defined]
        assert set(pools._pools) == {b"sk-one", b"sk-two"}
        assert pools.of(b"sk-one").transport is not pools.of(b"sk-two").transport


GEMINI = {
    "candidates": [{"content": {"parts": [{"text": SPOKEN}], "role": "model"}, "finishReason": "STOP", "index": 0}],
    "usageMetadata": {
        "promptTokenCount": 9,
        "candidatesTokenCount": 2,
        "totalTokenCount": 11,
        "cachedContentTokenCount": 4,
    },
}


async def test_another_provider_of_its_own_protocol_is_answered_in_openais_shape_too():
    body = json.dumps(GEMINI).encode()
    async with raw(response(200, body), "gemini") as (provider, asked):
        completion = json.loads(await (await ask(provider)).read())
        assert asked[0].startswith(b"POST /models/claude-sim:generateContent")
    assert completion["choices"][0]["message"]["content"] == SPOKEN
    assert completion["usage"]["prompt_tokens"] == 9
    assert completion["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    async with raw(response(200, b"data: " + body + b"\r\n\r\n", "text/event-stream"), "gemini") as (provider, _):
        assert text_of(await events(await ask(provider, stream=True))) == SPOKEN


@pytest.mark.parametrize("stream", [False, True])
async def test_its_overflow_has_the_status_of_an_error_even_for_a_stream(stream):
    text = "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576)."
    body = json.dumps({"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}}).encode()
    async with raw(response(400, body), "gemini") as (provider, _):
        answer = await ask(provider, stream=stream)
        verdict = classify(answer.status, await answer.read())
    assert (answer.status, verdict.kind) == (400, Kind.CONTEXT)
    assert (verdict.limit, verdict.prompt) == (1_048_576, 1_048_577)


async def test_a_provider_with_openais_protocol_gets_the_fields_that_litellm_does_not_know_as_they_are():
    async with serve_simulator(SimulatorSettings(answers=(SPOKEN,), faults=ALL_FAULTS), counter=Words()) as running:
        provider = providers_for([settings(running.base_url, provider="hosted_vllm")])["claude"]
        extra = {"shape_of_2031": {"deep": [1]}, "metadata": {"k": "v"}, "api_base": "http://127.0.0.1:9"}
        whole = json.loads(await (await ask(provider, **extra)).read())
        found = await events(await ask(provider, stream=True))
        sent = json.loads(running.ledger[0].body)
        refused = await ask(provider, "fault:429:7", stream=True)
        assert dict(refused.headers)[b"retry-after"] == b"7"
        with pytest.raises(StreamBroken):
            await events(await ask(provider, "fault:end_early:3", stream=True))
        await provider.close()
    assert whole["choices"][0]["message"]["content"] == text_of(found) == SPOKEN
    assert {name: sent[name] for name in extra} == extra
    assert refused.status == 429
