"""The simulator in Anthropic's dialect."""

import importlib.util
import json
from typing import Any

import httpx
import pytest

from tests.upstream import Dialect, SimulatedAnswer, SimulatedCall, SimulatorSettings, run_simulator

pytestmark = pytest.mark.slow

TOOL = {"name": "get_weather", "description": "w", "input_schema": {"type": "object", "properties": {}}}
HELLO = [{"role": "user", "content": "Hello there"}]


class Words:
    def count(self, text: str) -> int:
        return len(text.split())


def settings(**more: Any) -> SimulatorSettings:
    return SimulatorSettings(dialect=Dialect.ANTHROPIC, **more)


def post(options: SimulatorSettings, **body: Any) -> httpx.Response:
    with run_simulator(options, counter=Words()) as running:
        request = {"model": "claude", "max_tokens": 50, "messages": HELLO, **body}
        return httpx.post(f"{running.base_url}/messages", json=request, headers={"x-api-key": "k"})


def test_an_answer_has_blocks_a_stop_reason_and_usage():
    answer = post(settings(), system="be brief").json()
    assert answer["type"] == "message"
    assert answer["content"][0]["type"] == "text"
    assert answer["stop_reason"] == "end_turn"
    assert answer["usage"]["input_tokens"] == 3 + 6 + 6
    assert answer["usage"]["output_tokens"] == len(answer["content"][0]["text"].split())
    assert post(settings(), max_tokens=3).json()["stop_reason"] == "max_tokens"


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_stream_has_anthropics_events_in_order_and_adds_up():
    answer = SimulatedAnswer(
        text="Let me look.", calls=(SimulatedCall("get_weather", '{"city": "Oslo"}', id="toolu_1"),)
    )
    events = events_of(post(settings(answers=(answer,)), stream=True, tools=[TOOL]).text)
    names = [name for name, _ in events if name not in {"content_block_delta", "ping"}]
    assert names == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Let me look."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Oslo"}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert events[-2][1]["usage"]["output_tokens"] > 0


def test_both_overflows_have_anthropics_words():
    long = [{"role": "user", "content": "w " * 100}]
    alone = post(settings(window=50), messages=long)
    assert alone.status_code == 400
    assert alone.json()["type"] == "error"
    assert alone.json()["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 107 tokens > 50 maximum",
    }
    both = post(settings(window=120), messages=long).json()["error"]["message"]
    assert both == (
        "input length and `max_tokens` exceed context limit: 107 + 50 > 120, decrease input length or `max_tokens` "
        "and try again"
    )


def test_marked_prefixes_are_written_once_and_read_later():
    marked = {"type": "text", "text": "one two three", "cache_control": {"type": "ephemeral"}}
    bare = {"type": "text", "text": "one two three"}
    first = [{"role": "user", "content": [marked]}]
    second = [
        {"role": "user", "content": [bare]},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": [{**marked, "text": "five"}]},
    ]
    with run_simulator(settings(), counter=Words()) as running:

        def ask(messages: list[dict[str, Any]], **more: Any) -> tuple[int, int, int]:
            body = {"model": "claude", "max_tokens": 50, "messages": messages, **more}
            usage = httpx.post(f"{running.base_url}/messages", json=body).json()["usage"]
            return usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]

        assert ask(first) == (3, 7, 0)
        assert ask(second) == (3, 10, 7)
        assert ask(second) == (3, 0, 17)
        assert ask([{"role": "user", "content": [bare]}]) == (10, 0, 0)
        assert ask([{"role": "user", "content": [bare]}], cache_control={"type": "ephemeral"}) == (3, 0, 7)


def use(name: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": name, "name": "f", "input": {}}]}


def got(name: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": "ok"}]}


REFUSED = {
    "a call without a result": (
        [HELLO[0], use("a"), HELLO[0]],
        "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: a.",
    ),
    "a call at the end": ([HELLO[0], use("a")], "messages.1: `tool_use` ids were found without"),
    "a result without a call": (
        [got("a")],
        "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: a.",
    ),
    "an assistant first": ([{"role": "assistant", "content": "x"}, HELLO[0]], "first message must use the"),
    "a system role": ([{"role": "system", "content": "x"}], 'Unexpected role "system"'),
    "empty content": ([{"role": "user", "content": ""}], "all messages must have non-empty content"),
    "an empty text block": (
        [{"role": "user", "content": [{"type": "text", "text": ""}]}],
        "text content blocks must be non-empty",
    ),
    "a blank text block": (
        [{"role": "user", "content": [{"type": "text", "text": " "}]}],
        "text content blocks must contain non-whitespace text",
    ),
    "an unknown block": ([{"role": "user", "content": [{"type": "x"}]}], "Input tag 'x' found using 'type'"),
    "a blank at the end of a prefill": (
        [HELLO[0], {"role": "assistant", "content": "Sure "}],
        "final assistant content cannot end with trailing whitespace",
    ),
}


def test_the_array_is_judged_in_anthropics_words():
    with run_simulator(settings(), counter=Words()) as running:

        def ask(messages: Any, **more: Any) -> httpx.Response:
            body = {"model": "claude", "max_tokens": 50, "messages": messages, **more}
            return httpx.post(f"{running.base_url}/messages", json=body)

        for messages, text in REFUSED.values():
            answer = ask(messages)
            assert answer.status_code == 400
            assert text in answer.json()["error"]["message"]
        assert ask([HELLO[0], use("a"), got("a")]).status_code == 200
        assert ask([HELLO[0], {"role": "assistant", "content": "Sure"}]).status_code == 200
        assert "Field required" in ask(HELLO, max_tokens=None).json()["error"]["message"]


def test_counting_and_missing_endpoints_answer_in_shape():
    with run_simulator(settings(), counter=Words()) as running:
        counted = httpx.post(f"{running.base_url}/messages/count_tokens", json={"model": "c", "messages": HELLO})
        missing = httpx.post(f"{running.base_url}/chat/completions", json={})
    assert counted.json() == {"input_tokens": 9}
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


@pytest.mark.skipif(importlib.util.find_spec("anthropic") is None, reason="the anthropic SDK is not installed")
def test_the_anthropic_sdk_reads_answers_streams_and_errors():
    anthropic = importlib.import_module("anthropic")
    answer = SimulatedAnswer(
        text="Looking.", reasoning="Hm.", calls=(SimulatedCall("get_weather", '{"city": "Oslo"}'),)
    )
    with run_simulator(settings(answers=(answer,), window=400), counter=Words()) as running:
        client = anthropic.Anthropic(base_url=running.origin, api_key="k", max_retries=0)
        whole = client.messages.create(model="c", max_tokens=60, messages=HELLO, tools=[TOOL])
        with client.messages.stream(model="c", max_tokens=60, messages=HELLO, tools=[TOOL]) as stream:
            final = stream.get_final_message()
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(model="c", max_tokens=60, messages=[{"role": "user", "content": "w " * 500}])
        client.close()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Oslo"}
    assert final.stop_reason == "tool_use"
