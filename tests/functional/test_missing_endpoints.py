"""What becomes of requests to an endpoint that the upstream does not have."""

import json
from typing import Any

import anthropic
import pytest

from proxy.upstream.client import has_no_route
from tests.functional.harness import COUNTER, weir
from tests.upstream import Dialect, SimulatorSettings, run_simulator

MESSAGES, RESPONSES = "/messages", "/responses"

SOMETHING_ELSE = {
    "a model, OpenAI": (404, b'{"error":{"message":"The model `gpt-9` does not exist","code":"model_not_found"}}'),
    "a model, Anthropic": (404, b'{"type":"error","error":{"type":"not_found_error","message":"model: claude-9"}}'),
    "a model, Ollama": (404, b'{"error":{"message":"model \\"x\\" not found, try pulling it first"}}'),
    "a model, in plain words": (404, b"No such model: /v1/responses is for others"),
    "an item": (404, b'{"error":{"message":"Item with id \'rs_1\' not found. Items are not persisted"}}'),
    "a thread": (
        404,
        b'{"type":"error","error":{"type":"not_found_error","message":"No usable Thread state was found"}}',
    ),
    "a deployment": (404, b'{"error":{"code":"DeploymentNotFound","message":"The API deployment does not exist."}}'),
    "a wrong request": (400, b'{"detail":"Not Found"}'),
    "an answer": (200, b"{}"),
    "trouble": (503, b"404 page not found"),
}


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("case", SOMETHING_ELSE)
def test_what_is_about_a_model_or_something_stored_says_nothing_about_the_address(case: str) -> None:
    assert not has_no_route(*SOMETHING_ELSE[case], RESPONSES)


def long_messages() -> dict[str, Any]:
    words = " ".join(f"line {n}: value {n}," for n in range(200))
    messages: list[Any] = []
    for step in range(12):
        messages += [{"role": "user", "content": f"{step} {words}"}, {"role": "assistant", "content": "Yes."}]
    return {"model": "m", "max_tokens": 100, "messages": [*messages, {"role": "user", "content": "Go on."}]}


@pytest.mark.requirement("P7")
async def test_the_client_is_told_what_can_be_set_and_its_next_request_is_not_planned_for_nothing() -> None:
    with run_simulator(SimulatorSettings(dialect=Dialect.OPENAI, window=100_000), counter=COUNTER) as simulator:
        async with weir(simulator.base_url) as proxy:
            async with anthropic.AsyncAnthropic(base_url=proxy.root, api_key="k", max_retries=0) as client:
                for each in range(2):
                    with pytest.raises(anthropic.NotFoundError) as refused:
                        await client.messages.create(**long_messages())
                    said = refused.value.response
                    assert "has no POST /v1/messages: it answered 404" in said.json()["error"]["message"]
                    assert "upstreams.default.speaks" in said.json()["error"]["message"]
                    assert said.json()["error"]["weir"]["code"] == "endpoint_missing"
                    assert ("x-weir-conversation" in said.headers) is (each == 0)
            sent = [json.loads(each.body) for each in simulator.ledger if each.path == "/v1/messages"]
            assert len(sent[0]["messages"]) < len(long_messages()["messages"]) == len(sent[1]["messages"])
            answer = await proxy.client().responses.create(model="m", input="Hello")
            assert answer.status == "completed"
