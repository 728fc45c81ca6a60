"""The simulator in OpenAI's dialect, spoken to with the real SDK."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

from tests.misbehaving import Failing, SummaryMode
from tests.upstream import (
    RunningSimulator,
    SimulatedAnswer,
    SimulatedCall,
    SimulatorSettings,
    run_simulator,
    serve_simulator,
)

pytestmark = pytest.mark.slow

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
HELLO = [{"role": "user", "content": "Hello there"}]


@dataclass(frozen=True)
class Words:
    """Counts words, so that a test can add up what it expects."""

    def count(self, text: str) -> int:
        return len(text.split())


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningSimulator]:
    with run_simulator(SimulatorSettings(window=2000), counter=Words()) as running:
        yield running


def client_of(running: RunningSimulator, **options: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.base_url, api_key="sk-test", max_retries=0, **options)


def async_client_of(running: RunningSimulator) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=running.base_url, api_key="sk-test", max_retries=0)


def test_the_sdk_reads_an_answer_with_exact_usage(plain):
    with client_of(plain) as client:
        answer = client.chat.completions.create(model="sim", messages=HELLO)
    text = answer.choices[0].message.content
    assert text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 3 + 4 + 2
    assert answer.usage.completion_tokens == len(text.split())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_same_request_gets_the_same_words_and_another_seed_other_words():
    texts = []
    for seed in (0, 0, 7):
        with (
            run_simulator(SimulatorSettings(seed=seed), counter=Words()) as running,
            client_of(running) as client,
        ):
            texts.append(client.chat.completions.create(model="sim", messages=HELLO).choices[0].message.content)
    assert texts[0] == texts[1] != texts[2]


def test_a_stream_says_the_same_as_the_whole_answer_and_ends_with_done(plain):
    with client_of(plain) as client:
        whole = client.chat.completions.create(model="sim", messages=HELLO).choices[0].message.content
        chunks = list(client.chat.completions.create(model="sim", messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    body = {"model": "sim", "messages": HELLO, "stream": True}
    raw = httpx.post(f"{plain.base_url}/chat/completions", json=body)
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in raw.text


def test_usage_in_a_stream_comes_only_when_asked_for_and_as_a_chunk_without_choices(plain):
    with client_of(plain) as client:
        stream = client.chat.completions.create(
            model="sim", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_async_sdk_streams_while_the_answer_is_still_being_made():
    settings = SimulatorSettings(chunk_delay=0.02)
    async with serve_simulator(settings, counter=Words()) as running, async_client_of(running) as client:
        stream = await client.chat.completions.create(model="sim", messages=HELLO, stream=True)
        made = [running.ledger[-1].finished async for _ in stream]
    assert len(made) > 5
    assert sum(made) <= 2


def test_max_tokens_cuts_the_answer_and_says_so(plain):
    with client_of(plain) as client:
        answer = client.chat.completions.create(model="sim", messages=HELLO, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    assert len(answer.choices[0].message.content.split()) == 4


def test_a_demanded_tool_is_called_with_arguments_that_fit_its_schema(plain):
    with client_of(plain) as client:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            answer = client.chat.completions.create(model="sim", messages=HELLO, tools=[TOOL], tool_choice=choice)
            call = answer.choices[0].message.tool_calls[0]
            assert answer.choices[0].finish_reason == "tool_calls"
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments) == {"city": "value", "days": 1}
        free = client.chat.completions.create(model="sim", messages=HELLO, tools=[TOOL])
    assert free.choices[0].message.tool_calls is None


def test_scripted_answers_follow_the_number_of_assistant_messages():
    calls = (
        SimulatedCall("get_weather", '{"city": "Oslo"}', id="call_a"),
        SimulatedCall("get_weather", '{"city": "Rome"}', id="call_b"),
    )
    settings = SimulatorSettings(answers=(SimulatedAnswer(calls=calls), "It rains in Oslo."))
    with run_simulator(settings, counter=Words()) as running, client_of(running) as client:
        first = client.chat.completions.create(model="sim", messages=HELLO, tools=[TOOL]).choices[0].message
        history = [
            *HELLO,
            first.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": "call_b", "content": "sun"},
            {"role": "tool", "tool_call_id": "call_a", "content": "rain"},
        ]
        second = client.chat.completions.create(model="sim", messages=history, tools=[TOOL]).choices[0].message
    assert [call.id for call in first.tool_calls] == ["call_a", "call_b"]
    assert second.content == "It rains in Oslo."


def test_streamed_tool_calls_add_up_to_the_scripted_ones():
    calls = (SimulatedCall("get_weather", '{"city": "Oslo"}'), SimulatedCall("get_time", '{"zone": "CET"}'))
    with (
        run_simulator(SimulatorSettings(answers=(SimulatedAnswer(calls=calls),)), counter=Words()) as running,
        client_of(running) as client,
    ):
        seen: dict[int, list[str]] = {}
        for chunk in client.chat.completions.create(model="sim", messages=HELLO, tools=[TOOL], stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                entry = seen.setdefault(part.index, ["", ""])
                entry[0] += part.function.name or ""
                entry[1] += part.function.arguments or ""
    assert [tuple(entry) for entry in seen.values()] == [(call.name, call.arguments) for call in calls]


def test_a_script_may_be_a_function_of_the_request():
    settings = SimulatorSettings(answer=lambda request: f"{len(request['messages'])} messages")
    with run_simulator(settings, counter=Words()) as running, client_of(running) as client:
        answer = client.chat.completions.create(model="sim", messages=HELLO)
    assert answer.choices[0].message.content == "1 messages"


def test_a_json_schema_is_answered_with_json_that_has_its_required_fields(plain):
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": TOOL["function"]["parameters"]}}
    with client_of(plain) as client:
        answer = client.chat.completions.create(model="sim", messages=HELLO, response_format=form)
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "days"}


def ask(client: openai.OpenAI, messages: list[dict[str, object]], **options: object) -> tuple[int, int]:
    usage = client.chat.completions.create(model="sim", messages=messages, **options).usage
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def test_cached_tokens_are_those_of_the_longest_prefix_seen_before():
    history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"}]
    longer = [*history, {"role": "assistant", "content": "four"}, {"role": "user", "content": "five"}]
    edited = [history[0], {"role": "user", "content": "changed"}, *longer[2:]]
    with run_simulator(SimulatorSettings(), counter=Words()) as running, client_of(running) as client:
        assert ask(client, history) == (6 + 7 + 3, 0)
        assert ask(client, longer) == (6 + 7 + 5 + 5 + 3, 6 + 7)
        assert ask(client, longer)[1] == 23
        assert ask(client, edited)[1] == 6
        assert ask(client, longer, tools=[TOOL])[1] == 0
        stranger = openai.OpenAI(base_url=running.base_url, api_key="sk-other", max_retries=0)
        with stranger:
            assert ask(stranger, longer)[1] == 0
        assert [seen.cached_tokens for seen in running.ledger] == [0, 13, 23, 6, 0, 0]


def test_a_refused_request_warms_no_cache():
    long = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "word " * 90}]
    with run_simulator(SimulatorSettings(window=50), counter=Words()) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="sim", messages=long)
        assert ask(client, [long[0], *HELLO])[1] == 0


SUMMARY = [
    {"role": "system", "content": "You write the working notes of a conversation."},
    {
        "role": "user",
        "content": "<transcript>\n"
        + "\n".join(f"[user] Please move booking B-{n} of flight F{n} to gate /g/{n}." for n in range(40))
        + "\n</transcript>\n\nTake notes.",
    },
]


def summarise(mode: SummaryMode, **options: object) -> openai.types.chat.ChatCompletion:
    settings = SimulatorSettings(summarizer=Failing(mode), summary_model="small")
    with run_simulator(settings, counter=Words()) as running, client_of(running, timeout=0.5) as client:
        return client.chat.completions.create(model="small", messages=SUMMARY, max_tokens=120, **options)


def test_a_summary_is_shorter_than_its_material_and_keeps_identifiers():
    answer = summarise(SummaryMode.OK)
    text = answer.choices[0].message.content
    assert 20 <= answer.usage.completion_tokens <= 120
    assert answer.choices[0].finish_reason == "stop"
    assert "B-0" in text
    assert text == summarise(SummaryMode.OK).choices[0].message.content


def test_a_useless_summariser_is_useless_in_the_way_it_was_told():
    assert summarise(SummaryMode.EMPTY).choices[0].message.content == ""
    assert "[user] Please move booking B-39" in summarise(SummaryMode.ECHO).choices[0].message.content
    assert summarise(SummaryMode.REFUSAL).choices[0].message.content.startswith("I'm sorry")
    assert summarise(SummaryMode.TOOL_CALL).choices[0].message.tool_calls[0].function.name == "read_file"
    assert summarise(SummaryMode.TOO_LONG).usage.completion_tokens > 240
    assert summarise(SummaryMode.REASONING_ONLY).choices[0].message.content.startswith("<think>")
    with pytest.raises(openai.InternalServerError):
        summarise(SummaryMode.STATUS_500)
    with pytest.raises(openai.APITimeoutError):
        summarise(SummaryMode.TIMEOUT)


def test_a_bad_summary_model_leaves_other_models_alone():
    settings = SimulatorSettings(summarizer=Failing(SummaryMode.EMPTY), summary_model="small")
    with run_simulator(settings, counter=Words()) as running, client_of(running) as client:
        assert client.chat.completions.create(model="sim", messages=HELLO).choices[0].message.content


def test_the_ledger_shows_the_bytes_in_process_and_over_http(plain):
    plain.forget()
    body = b'{"model":  "sim", "messages": [{"role":"user","content":"\xc3\xa9"}], "unknown_field": 1.50}'
    httpx.post(f"{plain.base_url}/chat/completions", content=body, headers={"authorization": "Bearer k"})
    seen = plain.ledger[0]
    assert (seen.method, seen.path, seen.body, seen.status) == ("POST", "/v1/chat/completions", body, 200)
    assert seen.header("Authorization") == "Bearer k"
    assert seen.finished
    assert not seen.client_gone
    report = httpx.get(f"{plain.origin}/sim/requests").json()
    assert report[0]["body"]["unknown_field"] == 1.5
    assert report[0]["body_bytes"] == len(body)
    assert report[0]["prompt_tokens"] == seen.prompt_tokens == 8
    assert httpx.delete(f"{plain.origin}/sim/requests").status_code == 204
    assert plain.ledger == []


async def test_a_client_that_leaves_is_noticed_in_streams_and_elsewhere():
    settings = SimulatorSettings(chunk_delay=0.05)
    async with serve_simulator(settings, counter=Words()) as running, httpx.AsyncClient() as client:
        url = f"{running.base_url}/chat/completions"
        body = {"model": "sim", "messages": HELLO, "stream": True}
        async with client.stream("POST", url, json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
        with pytest.raises(httpx.ReadTimeout):
            await client.post(url, json={"model": "fault:latency:20", "messages": HELLO}, timeout=0.2)
        whole = await client.post(url, json={"model": "sim", "messages": HELLO})
        for _ in range(200):
            if sum(seen.client_gone for seen in running.ledger) == 2:
                break
            await asyncio.sleep(0.01)
        left, silent, stayed = running.ledger
    assert whole.status_code == 200
    assert left.client_gone
    assert not left.finished
    assert left.gone_at > left.at
    assert silent.client_gone
    assert silent.status == 0
    assert 0.1 < silent.gone_at - silent.at < 1.5
    assert not stayed.client_gone
    assert stayed.finished


def test_models_embeddings_and_tokenize_answer_and_anything_else_is_a_404_in_openais_shape(plain):
    with client_of(plain) as client:
        assert [model.id for model in client.models.list()] == ["sim"]
        vectors = client.embeddings.create(model="sim", input=["red green", "red green", "blue"]).data
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="sim", prompt="x")
    assert vectors[0].embedding == vectors[1].embedding != vectors[2].embedding
    assert missing.value.body["message"] == "Invalid URL (POST /v1/completions)"
    assert httpx.post(f"{plain.origin}/tokenize", json={"content": "one two"}).json()["count"] == 2
    assert httpx.get(f"{plain.base_url}/chat/completions").json()["error"]["code"] == "method_not_supported"
    assert plain.ledger[-1].status == 405


def test_a_wrong_key_is_refused_where_keys_are_required():
    with run_simulator(SimulatorSettings(api_keys=("sk-right",)), counter=Words()) as running:
        with client_of(running) as client, pytest.raises(openai.AuthenticationError) as wrong:
            client.chat.completions.create(model="sim", messages=HELLO)
        right = openai.OpenAI(base_url=running.base_url, api_key="sk-right", max_retries=0)
        with right:
            assert right.chat.completions.create(model="sim", messages=HELLO).choices
    assert wrong.value.code == "invalid_api_key"


def test_the_ledger_drops_its_oldest_bodies_when_it_is_full():
    settings = SimulatorSettings(ledger_bytes=2000)
    with run_simulator(settings, counter=Words()) as running:
        for number in range(5):
            httpx.post(f"{running.base_url}/embeddings", json={"input": "x" * 900, "model": str(number)})
        assert [json.loads(seen.body)["model"] for seen in running.ledger] == ["3", "4"]
