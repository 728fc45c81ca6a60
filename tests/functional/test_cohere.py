"""Cohere's own interface through litellm, which reads its answers and not its streams (docs/configuration.md: another way to Cohere)."""

import json
from pathlib import Path

import openai
import pytest

from proxy.app import create_app
from proxy.config.loading import load_config
from proxy.config.values import Flags
from proxy.server import serve
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.upstream.client import providers_for
from tests.functional.harness import TOKENIZER, opening
from tests.functional.scripted import Asked, Reply, scripted, whole

USAGE = {"tokens": {"input_tokens": 5, "output_tokens": 2}}
TEXT = {"type": "text", "text": "Hello."}
ANSWER = {"id": "i", "finish_reason": "COMPLETE", "message": {"role": "assistant", "content": [TEXT]}, "usage": USAGE}
EVENTS = (
    {"type": "message-start", "id": "i", "delta": {"message": {"role": "assistant", "content": []}}},
    {"type": "content-start", "index": 0, "delta": {"message": {"content": {"type": "text", "text": ""}}}},
    {"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": "Hello."}}}},
    {"type": "content-end", "index": 0},
    {"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": USAGE}},
)
CONFIG = """
upstreams: {{cohere: {{kind: litellm, provider: cohere_chat, api_base: "{base}/v2/chat", api_key: k}}}}
models: [{{match: "*", upstream: cohere, window: 8192}}]
"""


def say(asked: Asked) -> Reply:
    """What Cohere's v2 interface answers."""
    if not asked.json.get("stream"):
        return whole(ANSWER)
    named = tuple(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in EVENTS)
    return Reply(kind="text/event-stream", chunks=named)


@pytest.mark.requirement("P16")
@pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier")
async def test_an_answer_of_coheres_goes_through_litellm_and_a_stream_is_a_clear_502(tmp_path: Path) -> None:
    async with scripted(say) as upstream:
        path = tmp_path / "weir.yaml"
        path.write_text(CONFIG.format(base=upstream.base_url.removesuffix("/v1")))
        config = load_config(path, env={}, flags=Flags(store="sqlite+aiosqlite:///:memory:"))
        app = create_app(
            config,
            telemetry=Telemetry.create(OtelSettings()),
            tokenizer=TOKENIZER,
            providers=providers_for(config.upstreams.values()),
        )
        async with serve(app) as server:
            base = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=base, api_key="sk-client", max_retries=0) as client:
                answer = await client.chat.completions.create(model="command-a", messages=opening())  # type: ignore[arg-type]
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.chat.completions.create(model="command-a", messages=opening(), stream=True)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "Hello."
    assert (caught.value.status_code, caught.value.code) == (502, "upstream_unreachable")
    assert [asked.target for asked in upstream.asked] == ["/v2/chat"] * 2
