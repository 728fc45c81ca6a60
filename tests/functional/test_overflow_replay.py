"""Weir believes in 32K, the upstream has 8K: the request is made smaller and sent again, unseen by the client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.functional.harness import COUNTER, TOOLS, Deployment, Talk, answered, arrays_of, batches, opening, weir
from tests.misbehaving import ALL_FAULTS
from tests.profile import each_once
from tests.upstream import Dialect, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.wordings import WORDINGS

pytestmark = pytest.mark.slow

BELIEVED, REAL = 32_768, 8_192
NUMBERLESS = ("openai-no-numbers", "groq", "bedrock", "vllm-0.15")  # the last one states wrong numbers in some builds
PROMPT_ONLY = ("openai-gpt5", "llamacpp", "mistral", "gemini", "xai")  # these servers count no answer in advance
WITH_LIMIT = tuple(name for name in (*Dialect, *WORDINGS) if name not in NUMBERLESS and name != "anthropic")


def limits(talk: Talk) -> list[int]:
    """``limit`` of ``x-weir-tokens`` of every answer, in order."""
    return [int(h["x-weir-tokens"].rpartition("limit=")[2]) for h in talk.headers]


def attempts(simulator: RunningSimulator, model: str) -> list[int]:
    """How many upstream calls it took to answer each request, in order."""
    counts, calls = [], 0
    for seen in answered(simulator, model):
        calls += 1
        if seen.status == 200:
            counts.append(calls)
            calls = 0
    return counts


@pytest.fixture
async def upstream() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(
        SimulatorSettings(window=REAL, faults=ALL_FAULTS, wordings=WORDINGS), counter=COUNTER
    ) as simulator:
        yield simulator


@each_once
@pytest.mark.requirement("P16", "A0.3", "D15", "R.46", "R.48")
@pytest.mark.parametrize(
    ("dialect", "deployment"),
    [(Dialect.OPENAI, 1), (Dialect.VLLM, 1), (Dialect.LLAMACPP, 1), (Dialect.OPENAI, 2)],
    indirect=["deployment"],
)
async def test_twenty_of_twenty_requests_are_answered_in_a_window_four_times_smaller_than_believed(
    dialect: Dialect, deployment: Deployment
) -> None:
    async with (
        serve_simulator(
            SimulatorSettings(window=REAL, faults=ALL_FAULTS, wordings=WORDINGS, dialect=dialect), counter=COUNTER
        ) as simulator,
        deployment.serving(simulator.base_url, window=BELIEVED) as target,
    ):
        talk = Talk(target.client())
        talk.grow(6, kind="agent")
        await talk.agent(20)
    counts = attempts(simulator, "sim")
    assert len(counts) == 20
    assert max(counts) == 2
    assert 1 <= counts.count(2) <= deployment.count, "at most one replay each, and none overflew the window again"
    assert limits(talk)[0] > 20_000
    assert limits(talk)[-1] < REAL
    assert batches(arrays_of([s for s in answered(simulator) if s.status == 200])) <= 3


@pytest.mark.requirement("P16", "R.46", "R.48")
async def test_the_real_window_is_learned_from_the_first_refusal_in_every_providers_words(
    upstream: RunningSimulator,
) -> None:
    """Every wording has a model of its own, because a window is learned per model."""
    found: dict[str, tuple[list[int], bool, bool]] = {}
    async with weir(upstream.base_url, window=BELIEVED) as target:
        client = target.client()
        for seed, wording in enumerate(WITH_LIMIT):
            talk = Talk(client, opening(seed=1000 + 2 * seed), model=wording, seed=seed)
            talk.grow(15 + (wording in PROMPT_ONLY), kind="agent")
            size = 16 if wording in PROMPT_ONLY else 512
            await talk.agent(4, extra_headers={"x-sim-fault": f"wording:{wording}"}, max_tokens=size)
            found[wording] = (sorted(attempts(upstream, wording)), limits(talk)[0] > 20_000, limits(talk)[-1] < REAL)
    assert found == dict.fromkeys(WITH_LIMIT, ([1, 1, 1, 2], True, True))


@pytest.mark.requirement("P16", "R.46", "R.48")
@pytest.mark.parametrize("dialect", [Dialect.OPENAI, Dialect.VLLM, Dialect.LLAMACPP])
async def test_a_streaming_session_survives_the_refusal_as_status_and_as_first_event(dialect: Dialect) -> None:
    async with (
        serve_simulator(
            SimulatorSettings(window=REAL, faults=ALL_FAULTS, wordings=WORDINGS, dialect=dialect), counter=COUNTER
        ) as simulator,
        weir(simulator.base_url, window=BELIEVED) as target,
    ):
        for seed, (fault, model) in enumerate((("", "by-status"), ("overflow_in_stream", "by-event"))):
            talk = Talk(target.client(), opening(seed=10 * seed), model=model, seed=seed)
            talk.grow(14, kind="agent")
            for _ in range(7):
                text = await streamed(talk, headers={"x-sim-fault": fault} if fault else {})
                assert text.startswith("Understood.")
                talk.add_step()
            calls = answered(simulator, model)
            assert len(calls) == 8, "one replay, and no second overflow"
            assert {s.status for s in calls} == ({200} if fault else {200, 400})


async def streamed(talk: Talk, headers: dict[str, str]) -> str:
    """The text of a streamed answer to the talk's messages."""
    stream = await talk.client.chat.completions.create(
        model=talk.model, messages=talk.messages, max_tokens=512, stream=True, tools=TOOLS, extra_headers=headers
    )
    return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


async def read_into(text: list[str], stream: Any) -> None:
    """Read a stream to its end."""
    async for chunk in stream:
        text.append(chunk.choices[0].delta.content or "")


@pytest.mark.requirement("P5", "R.46")
async def test_an_error_event_after_content_is_relayed_and_not_retried(upstream: RunningSimulator) -> None:
    async with weir(upstream.base_url, window=BELIEVED) as target:
        talk = Talk(target.client())
        talk.grow(4, kind="agent")
        stream = await talk.client.chat.completions.create(
            model="sim",
            messages=talk.messages,
            stream=True,
            tools=TOOLS,
            extra_headers={"x-sim-fault": "error_in_stream_after_content:3"},
        )
        text: list[str] = []
        with pytest.raises(openai.APIError, match="maximum context length"):
            await read_into(text, stream)
        assert any(text)
    assert len(answered(upstream)) == 1


@pytest.mark.requirement("P16", "R.46")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_rate_limit_that_speaks_of_tokens_is_relayed_untouched_and_not_retried(
    stream: bool, upstream: RunningSimulator
) -> None:
    fault = {"x-sim-fault": "429:7"}
    async with weir(upstream.base_url, window=BELIEVED) as target:
        direct: Any = openai.AsyncOpenAI(base_url=upstream.base_url, api_key="sk-test", max_retries=0)
        bodies, waits = [], []
        for client in (direct, target.client()):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(
                    model="sim", messages=opening(), stream=stream, extra_headers=fault
                )
            bodies.append(caught.value.response.content)
            waits.append(caught.value.response.headers["retry-after"])
        await direct.close()
    assert bodies[0] == bodies[1]
    assert waits == ["7", "7"]
    assert len(answered(upstream)) == 2


@pytest.mark.requirement("P16", "D15", "R.48", "R.46")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wording", ["openai-no-numbers", "vllm"])
async def test_an_upstream_that_always_refuses_is_asked_three_times_at_most(wording: str, stream: bool) -> None:
    settings = SimulatorSettings(window=64, wording=wording, wordings=WORDINGS)
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir(simulator.base_url, window=BELIEVED) as target,
    ):
        talk = Talk(target.client())
        talk.grow(40, kind="agent")
        with pytest.raises(openai.BadRequestError) as caught:
            await talk.client.chat.completions.create(model="sim", messages=talk.messages, stream=stream)
        calls = answered(simulator)
    assert len(calls) == 3, "a fourth could have been smaller still"
    sizes = [len(s.body) for s in calls]
    assert sizes == sorted(sizes, reverse=True)
    said = json.dumps(caught.value.body)
    assert "context" in said
