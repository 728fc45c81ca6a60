"""Upstreams of kind litellm, against a server that speaks Anthropic's protocol."""

import contextlib
import importlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr

from proxy.config.values import UpstreamSettings
from proxy.errors import InvalidRequest
from proxy.upstream.client import LitellmProvider, providers_for
from proxy.upstream.connection import Answer as UpstreamAnswer
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
