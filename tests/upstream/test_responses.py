"""``/v1/responses`` of the simulator, spoken to with the real SDK."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.upstream import Dialect, RunningSimulator, SimulatedAnswer, SimulatedCall, SimulatorSettings, run_simulator

pytestmark = pytest.mark.slow

SEARCH = {
    "type": "function",
    "name": "search",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
PATCH = {"type": "custom", "name": "patch"}
STEPS = (
    SimulatedAnswer(
        reasoning="I look in two places.",
        text="Looking now.",
        calls=(SimulatedCall("search", '{"q": "a"}'), SimulatedCall("patch", "*** Begin")),
    ),
    SimulatedAnswer(reasoning="One more.", calls=(SimulatedCall("search", '{"q": "b"}'),)),
    SimulatedAnswer(reasoning="Enough.", text="It is 42."),
)


class Words:
    def count(self, text: str) -> int:
        return len(text.split())


def client_of(running: RunningSimulator, key: str = "sk-test") -> openai.OpenAI:
    return openai.OpenAI(base_url=running.base_url, api_key=key, max_retries=0)


@pytest.fixture
def agent() -> Iterator[tuple[RunningSimulator, openai.OpenAI]]:
    with run_simulator(SimulatorSettings(answers=STEPS), counter=Words()) as running, client_of(running) as client:
        yield running, client


def outputs(response: Any) -> list[dict[str, Any]]:
    return [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "found it"}
        for item in response.output
        if item.type in {"function_call", "custom_tool_call"}
    ]


STATELESS = {"model": "m", "tools": [SEARCH, PATCH], "store": False, "include": ["reasoning.encrypted_content"]}
ASK = {"role": "user", "content": "Where is it?"}


def test_a_run_without_state_is_answered_step_by_step(agent):
    _, client = agent
    history: list[Any] = [ASK]
    for _ in range(2):
        response = client.responses.create(input=history, **STATELESS)
        history += [item.model_dump(exclude_none=True) for item in response.output] + outputs(response)
    last = client.responses.create(input=history, **STATELESS)
    assert [item["type"] for item in history if item.get("type")] == [
        *[
            "reasoning",
            "message",
            "function_call",
            "custom_tool_call",
            "function_call_output",
            "custom_tool_call_output",
        ],
        *["reasoning", "function_call", "function_call_output"],
    ]
    assert last.output_text == "It is 42."
    assert last.status == "completed"
    assert history[4]["input"] == "*** Begin"


def test_a_tool_that_an_item_declares_in_a_namespace_is_called_there(agent):
    _, client = agent
    space = {"type": "namespace", "name": "functions", "tools": [SEARCH, PATCH]}
    declared = {"type": "additional_tools", "role": "developer", "tools": [space]}
    response = client.responses.create(input=[declared, ASK], model="m", store=False)
    calls = [item.model_dump() for item in response.output[2:]]
    assert [(each["type"], each["namespace"]) for each in calls] == [
        ("function_call", "functions"),
        ("custom_tool_call", "functions"),
    ]
    assert calls[1]["input"] == "*** Begin"


def test_a_stream_is_the_whole_answer_in_the_grammar_of_the_api(agent):
    _, client = agent
    with client.responses.stream(input=[ASK], **STATELESS) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    whole = client.responses.create(input=[ASK], **STATELESS)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert events[-1].type == "response.completed"
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == list(range(4))
    kept = ("type", "summary", "name", "arguments", "input", "status", "phase")
    assert [{key: getattr(item, key, None) for key in kept} for item in streamed.output] == [
        {key: getattr(item, key, None) for key in kept} for item in whole.output
    ]
    kinds = {event.type for event in events}
    for kind in ("reasoning_summary_text", "output_text", "function_call_arguments", "custom_tool_call_input"):
        assert {f"response.{kind}.delta", f"response.{kind}.done"} <= kinds
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == "Looking now."
    assert streamed.usage == whole.usage.model_copy(
        update={"input_tokens_details": streamed.usage.input_tokens_details}
    )


def test_usage_counts_the_cached_prefix_and_the_reasoning(agent):
    _, client = agent
    first = client.responses.create(input=[ASK], **STATELESS).usage
    again = client.responses.create(input=[ASK], **STATELESS).usage
    assert first.input_tokens_details.cached_tokens == 0
    assert again.input_tokens_details.cached_tokens == again.input_tokens - 3  # but for the priming of the answer
    assert first.output_tokens_details.reasoning_tokens == len(STEPS[0].reasoning.split())
    assert first.total_tokens == first.input_tokens + first.output_tokens


def test_an_answer_that_is_cut_says_so(agent):
    with run_simulator(SimulatorSettings(), counter=Words()) as running, client_of(running) as client:
        cut = client.responses.create(model="m", input="go", max_output_tokens=16)
        whole = client.responses.create(model="m", input="go")
    assert whole.status == "completed"
    assert cut.status in {"completed", "incomplete"}
    short = SimulatedAnswer(text="w " * 40)
    with run_simulator(SimulatorSettings(answers=(short,)), counter=Words()) as running, client_of(running) as client:
        cut = client.responses.create(model="m", input="go", max_output_tokens=16)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage.output_tokens == 16


LONG = [{"role": "user", "content": "w " * 120}]


def test_what_is_too_long_is_refused_with_and_without_a_number():
    for wording, words in ((None, "Your input exceeds the context window of this model."), ("openai", "is 100 tokens")):
        settings = SimulatorSettings(window=100, wording=wording)
        with run_simulator(settings, counter=Words()) as running, client_of(running) as client:
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                client.responses.create(model="m", input=LONG)
            assert refused.value.code == "context_length_exceeded"
            assert refused.value.param == "input"


@pytest.mark.parametrize("how", ["error", "failed"])
def test_what_is_too_long_may_be_told_inside_the_stream(how):
    settings = SimulatorSettings(window=100, overflow_in_stream=how)
    with run_simulator(settings, counter=Words()) as running, client_of(running) as client:
        events = list(client.responses.create(model="m", input=LONG, stream=True))
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="m", input=LONG)
    assert [event.sequence_number for event in events] == [0, 1, 2]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    if how == "error":
        assert (events[2].type, events[2].code) == ("error", "context_length_exceeded")
    else:
        assert (events[2].type, events[2].response.error.code) == ("response.failed", "context_length_exceeded")


def test_truncation_drops_the_first_items_in_silence():
    settings = SimulatorSettings(window=150)
    history = [*LONG, {"role": "assistant", "content": "w " * 30}, ASK]
    with run_simulator(settings, counter=Words()) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="m", input=history)
        usage = client.responses.create(model="m", input=history, truncation="auto").usage
    assert usage.input_tokens < 60


def test_a_fault_cuts_stalls_or_errs_behind_events(agent):
    running, client = agent
    body = {"input": "go", "stream": True}
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{running.base_url}/responses", json={"model": "fault:cut_stream:3", **body})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{running.base_url}/responses", json={"model": "fault:stall_mid_stream:3", **body}, timeout=0.3)
    events = list(client.responses.create(model="fault:error_in_stream:4", **body))
    assert [event.sequence_number for event in events] == [0, 1, 2, 3, 4]
    assert events[-1].type == "error"
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="fault:429", input="go")


def test_the_window_counts_what_is_asked_for_too():
    with run_simulator(SimulatorSettings(window=150), counter=Words()) as running, client_of(running) as client:
        counted = client.responses.input_tokens.count(model="m", input=LONG)
        with pytest.raises(openai.BadRequestError, match="exceeds the context window"):
            client.responses.create(model="m", input=LONG, max_output_tokens=40)
    assert counted.input_tokens == 3 + 4 + 120


def test_vllm_reasons_in_the_open_and_says_overflow_in_its_own_words():
    settings = SimulatorSettings(window=100, dialect=Dialect.VLLM, answers=STEPS)
    with run_simulator(settings, counter=Words()) as running, client_of(running) as client:
        said = client.responses.create(model="m", input="go")
        assert said.output[0].content[0].text == STEPS[0].reasoning
        with pytest.raises(openai.BadRequestError, match="your prompt contains 127 input tokens"):
            client.responses.create(model="m", input=LONG)
        body = {"model": "m", "max_tokens": 16, "messages": LONG}
        refused = httpx.post(f"{running.base_url}/messages", json=body).json()
    assert refused["type"] == "error"
    assert "your prompt contains 127 input tokens" in refused["error"]["message"]


def test_a_script_sees_the_history_as_chat_and_a_schema_is_followed(agent):
    seen: list[Any] = []

    def script(request: Any) -> str:
        seen.append(request["messages"])
        return "fine"

    items = [
        ASK,
        {"role": "assistant", "content": "ok"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    items += [{"type": "function_call_output", "call_id": "c", "output": "x"}]
    schema = {
        "type": "json_schema",
        "name": "s",
        "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}},
    }
    with run_simulator(SimulatorSettings(answer=script), counter=Words()) as running, client_of(running) as client:
        client.responses.create(model="m", input=items, instructions="be brief")
    assert [message["role"] for message in seen[0]] == ["system", "user", "assistant", "tool"]
    assert seen[0][2]["tool_calls"][0]["id"] == "c"
    with run_simulator(SimulatorSettings(), counter=Words()) as running, client_of(running) as client:
        text = client.responses.create(model="m", input="go", text={"format": schema}).output_text
    assert json.loads(text) == {"a": True}
