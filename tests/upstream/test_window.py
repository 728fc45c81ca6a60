"""The window of the simulator and what each dialect says when a request does not fit it."""

import base64
import json
import struct
from dataclasses import dataclass

import httpx
import openai
import pytest

from proxy.wire.counting import Tokenizer
from tests.upstream import Dialect, SimulatorSettings, run_simulator
from tests.upstream.window import PromptCounter, PromptPart, image_tokens
from tests.wordings import WORDINGS

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Words:
    def count(self, text: str) -> int:
        return len(text.split())


def user(words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "w " * words}]


def post(settings: SimulatorSettings, body: dict[str, object], **options: object) -> httpx.Response:
    with run_simulator(settings, counter=Words()) as running:
        path = "/messages" if settings.dialect == "anthropic" else "/chat/completions"
        return httpx.post(running.base_url + path, json={"model": "sim", **body}, **options)


def test_prompt_and_answer_fill_the_window_to_the_last_token_and_not_one_more():
    with run_simulator(SimulatorSettings(window=100), counter=Words()) as running:
        client = openai.OpenAI(base_url=running.base_url, api_key="k", max_retries=0)
        with client:
            fits = client.chat.completions.create(model="sim", messages=user(73), max_tokens=20)
            assert fits.usage.prompt_tokens == 80
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="sim", messages=user(74), max_tokens=20)
            client.chat.completions.create(model="sim", messages=user(92))
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model="sim", messages=user(93))
    error = refused.value
    assert (error.code, error.param, error.type) == ("context_length_exceeded", "messages", "invalid_request_error")
    assert error.body["message"] == (
        "This model's maximum context length is 100 tokens. However, you requested 101 tokens (81 in the messages, 20 "
        "in the completion). Please reduce the length of the messages or completion."
    )


def test_openai_names_the_tokens_of_functions_and_of_a_prompt_that_is_too_long_alone():
    tools = [{"type": "function", "function": {"name": "f", "description": "a b c", "parameters": {}}}]
    alone = post(SimulatorSettings(window=50), {"messages": user(60), "max_tokens": 5}).json()["error"]["message"]
    assert alone == (
        "This model's maximum context length is 50 tokens. However, your messages resulted in 67 tokens. "
        "Please reduce the length of the messages."
    )
    both = post(SimulatorSettings(window=50), {"messages": user(30), "max_tokens": 20, "tools": tools})
    assert "(37 in the messages, 3 in the functions, and 20 in the completion)" in both.json()["error"]["message"]


def test_vllm_speaks_of_input_and_output_tokens():
    answer = post(SimulatorSettings(window=50, dialect=Dialect.VLLM), {"messages": user(40), "max_tokens": 10})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"], error["param"]) == (
        400,
        "BadRequestError",
        400,
        "input_tokens",
    )
    assert (
        "you requested 10 output tokens and your prompt contains 47 input tokens, for a total of 57" in error["message"]
    )
    least = post(
        SimulatorSettings(window=50, dialect=Dialect.VLLM, wording="vllm-at-least", wordings=WORDINGS),
        {"messages": user(60), "max_tokens": 10},
    )
    assert "contains at least 41 input tokens, for a total of at least 51 tokens" in least.json()["error"]["message"]


def test_llamacpp_gives_both_numbers_as_fields_and_no_param():
    settings = SimulatorSettings(window=50, dialect=Dialect.LLAMACPP)
    for stream in (False, True):
        answer = post(settings, {"messages": user(60), "stream": stream})
        assert answer.status_code == 400
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.json() == {
            "error": {
                "code": 400,
                "message": "request (67 tokens) exceeds the available context size (50 tokens), try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 67,
                "n_ctx": 50,
            }
        }


def test_llamacpp_stops_in_silence_where_the_window_ends():
    answer = post(SimulatorSettings(window=50, dialect=Dialect.LLAMACPP), {"messages": user(38), "max_tokens": 500})
    body = answer.json()
    assert answer.status_code == 200
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"] == 50


def test_each_dialect_tells_its_window_in_its_own_place():
    def card(dialect: Dialect) -> dict[str, object]:
        with run_simulator(SimulatorSettings(window=777, dialect=dialect), counter=Words()) as running:
            if dialect is Dialect.LLAMACPP:
                props = httpx.get(f"{running.origin}/props").json()
                assert props["default_generation_settings"]["n_ctx"] == 777
            return httpx.get(f"{running.base_url}/models").json()["data"][0]

    assert card(Dialect.VLLM)["max_model_len"] == 777
    assert card(Dialect.LLAMACPP)["meta"]["n_ctx"] == 777
    assert card(Dialect.ANTHROPIC)["type"] == "model"
    assert set(card(Dialect.OPENAI)) == {"id", "object", "created", "owned_by"}


def test_another_model_may_have_another_window():
    settings = SimulatorSettings(window=1000, windows={"small": 50})
    body = {"messages": user(60)}
    assert post(settings, body).status_code == 200
    assert "is 50 tokens" in post(settings, {**body, "model": "small"}).json()["error"]["message"]


def test_an_output_cap_is_not_an_overflow():
    answer = post(SimulatorSettings(max_output=64), {"messages": user(3), "max_tokens": 65})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("max_tokens is too large: 65. This model supports at most 64")
    assert answer.json()["error"]["code"] != "context_length_exceeded"


@pytest.mark.parametrize("wording", sorted([*Dialect, *WORDINGS]))
def test_every_wording_is_json_and_hides_no_number_it_is_known_to_give(wording):
    refused = post(
        SimulatorSettings(window=4096, wording=wording, wordings=WORDINGS), {"messages": user(5000), "max_tokens": 256}
    )
    assert refused.status_code in {400, 413, 422}
    assert json.loads(refused.content)
    if wording not in {"openai-no-numbers", "groq", "bedrock"}:
        assert b"4096" in refused.content


def test_wordings_agree_with_bodies_that_were_seen_in_the_wild():
    cases = {
        "openai": "This model's maximum context length is 4096 tokens. However, your messages resulted in 4777 tokens. "
        "Please reduce the length of the messages.",
        "anthropic": "prompt is too long: 4777 tokens > 4096 maximum",
        "llamacpp": "request (4777 tokens) exceeds the available context size (4096 tokens), try increasing it",
        "gemini": "The input token count (4777) exceeds the maximum number of tokens allowed (4096).",
        "mistral": "Prompt contains 4777 tokens and 0 draft tokens, too large for model with 4096 maximum",
    }
    for wording, expected in cases.items():
        settings = SimulatorSettings(window=4096, wording=wording, wordings=WORDINGS)
        assert expected in post(settings, {"messages": user(4770)}).text


def png(width: int, height: int) -> str:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return "data:image/png;base64," + base64.b64encode(head + b"\x00" * 30_000).decode()


def test_an_image_costs_by_size_and_detail_and_its_base64_text_nothing():
    assert image_tokens({"url": png(1024, 1024), "detail": "low"}) == 85
    assert image_tokens({"url": png(1024, 1024), "detail": "high"}) == 765
    assert image_tokens({"url": png(2048, 4096)}) == 1105
    assert image_tokens({"url": png(10, 10)}) == 255
    assert image_tokens({"url": "https://example.com/a.png"}) == 765
    assert image_tokens({"url": "https://example.com/a.png", "detail": "high"}) == 1105
    part = {"type": "image_url", "image_url": {"url": png(1024, 1024)}}
    message = {"role": "user", "content": [{"type": "text", "text": "see"}, part]}
    assert PromptCounter(Words().count).measure([PromptPart("message", message)]).total == 3 + 4 + 1 + 765


def test_calls_names_and_results_are_counted():
    count = PromptCounter(Words().count)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert count.measure(
        [PromptPart("message", {"role": "assistant", "content": None, "tool_calls": [call]})]
    ).total == (3 + 4 + 1 + 2 + 8)
    assert (
        count.measure([PromptPart("message", {"role": "user", "name": "ann", "content": "a b"})]).total == 3 + 4 + 2 + 1
    )
    assert (
        count.measure([PromptPart("message", {"role": "tool", "tool_call_id": "c", "content": "x"})]).total == 3 + 4 + 1
    )


def test_the_real_tokenizer_counts_for_it():
    tokenizer = Tokenizer()
    with run_simulator(SimulatorSettings(window=60), counter=tokenizer.counter("o200k_base")) as running:
        body = {"model": "sim", "messages": [{"role": "user", "content": "Hello, world! " * 20}]}
        refused = httpx.post(f"{running.base_url}/chat/completions", json=body)
    tokenizer.close()
    assert "your messages resulted in 88 tokens" in refused.json()["error"]["message"]
