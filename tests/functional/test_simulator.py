"""The simulated model, asked by real SDKs: answers, streams, usage, its window, and its three faults."""

from collections.abc import AsyncIterator

import anthropic
import openai
import pytest

from proxy.simulator import RunningSimulator, SimulatorSettings, serve_simulator
from tests.functional.harness import COUNTER

LONG = "word " * 4_000


@pytest.fixture
async def simulator() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=2_048), counter=COUNTER) as running:
        yield running


@pytest.fixture
async def of_openai(simulator: RunningSimulator) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=simulator.base_url, api_key="sk-any", max_retries=0) as client:
        yield client


@pytest.fixture
async def of_anthropic(simulator: RunningSimulator) -> AsyncIterator[anthropic.AsyncAnthropic]:
    root = simulator.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key="sk-any", max_retries=0) as client:
        yield client


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_chat_completions_are_answered_whole_and_streamed(of_openai: openai.AsyncOpenAI) -> None:
    whole = await of_openai.chat.completions.create(model="sim", messages=said("Hello"))
    assert whole.choices[0].message.content
    assert whole.usage is not None
    assert 0 < whole.usage.prompt_tokens < 20
    stream = await of_openai.chat.completions.create(
        model="sim", messages=said("Hello"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_responses_are_answered_whole_and_streamed(of_openai: openai.AsyncOpenAI) -> None:
    whole = await of_openai.responses.create(model="sim", input="Hello")
    assert whole.output_text
    async with of_openai.responses.stream(model="sim", input="Hello") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text
    assert final.usage is not None
    assert final.usage.input_tokens == whole.usage.input_tokens  # type: ignore[union-attr]


async def test_messages_are_answered_whole_and_streamed_and_counted(of_anthropic: anthropic.AsyncAnthropic) -> None:
    whole = await of_anthropic.messages.create(model="sim", max_tokens=50, messages=said("Hello"))
    assert whole.content[0].type == "text"
    async with of_anthropic.messages.stream(model="sim", max_tokens=50, messages=said("Hello")) as stream:
        final = await stream.get_final_message()
    assert final.stop_reason == "end_turn"
    counted = await of_anthropic.messages.count_tokens(model="sim", messages=said("Hello"))
    assert counted.input_tokens == whole.usage.input_tokens


async def test_what_does_not_fit_is_refused_in_the_words_of_the_provider(
    of_openai: openai.AsyncOpenAI, of_anthropic: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(openai.BadRequestError) as chat:
        await of_openai.chat.completions.create(model="sim", messages=said(LONG))
    assert chat.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in chat.value.message
    with pytest.raises(openai.BadRequestError) as responses:
        await of_openai.responses.create(model="sim", input=LONG)
    assert responses.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 400[0-9] tokens > 2048 maximum"):
        await of_anthropic.messages.create(model="sim", max_tokens=50, messages=said(LONG))
    with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: \d+ \+ 2048 > 2048"):
        await of_anthropic.messages.create(model="sim", max_tokens=2_048, messages=said("Hello"))


async def test_what_was_sent_before_is_reported_as_cached(of_openai: openai.AsyncOpenAI) -> None:
    history = said("word " * 1_200)
    await of_openai.chat.completions.create(model="sim", messages=history)
    again = await of_openai.chat.completions.create(model="sim", messages=[*history, *said("And now?")])
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert 1_200 <= (again.usage.prompt_tokens_details.cached_tokens or 0) < again.usage.prompt_tokens


async def test_each_fault_is_what_its_model_is_called(
    of_openai: openai.AsyncOpenAI, of_anthropic: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(openai.RateLimitError):
        await of_openai.chat.completions.create(model="fault:429", messages=said("Hello"))
    with pytest.raises(anthropic.InternalServerError):
        await of_anthropic.messages.create(model="fault:500", max_tokens=50, messages=said("Hello"))
    stream = await of_openai.chat.completions.create(model="fault:cut", messages=said("Hello"), stream=True)
    with pytest.raises(Exception, match=r"incomplete|closed|peer"):
        [chunk async for chunk in stream]
