"""Presets as a client meets them: real SDK, real proxy, strict upstream."""

from contextlib import AsyncExitStack

import openai
import pytest

from tests.functional.harness import COUNTER, RunningWeir, Talk, answered, arrays_of, prose, weir
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 8192


async def started(stack: AsyncExitStack, policy: str, *, window: int = WINDOW) -> tuple[RunningSimulator, RunningWeir]:
    simulator = await stack.enter_async_context(serve_simulator(SimulatorSettings(window=window), counter=COUNTER))
    proxy = await stack.enter_async_context(weir(simulator.base_url, window=window, policy=policy))
    return simulator, proxy


@pytest.mark.requirement("A1.4")
async def test_audit_refuses_what_does_not_fit_and_removes_nothing() -> None:
    async with AsyncExitStack() as stack:
        simulator, proxy = await started(stack, "audit")
        talk = Talk(proxy.client())
        while sum(COUNTER.count(m["content"] or "") for m in talk.messages) < 6_000:
            talk.grow(1)
        talk.add_question()
        await talk.ask(max_tokens=256)
        assert arrays_of(answered(simulator)) == [talk.messages]
        assert talk.actions() == ["none"]

        talk.grow(8)
        talk.add_question()
        with pytest.raises(openai.BadRequestError) as refused:
            await talk.ask(max_tokens=256)

        assert refused.value.code == "context_length_exceeded"
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["weir"]["buckets"]["history"] > 6_000
        assert len(answered(simulator)) == 1


@pytest.mark.requirement("A1.13", "A1.8", "A1.17")
async def test_turn_51_of_a_support_chat_is_trimmed_and_goes_on() -> None:
    async with AsyncExitStack() as stack:
        simulator, proxy = await started(stack, "interceptor-support", window=40_000)
        talk = Talk(proxy.client())
        talk.messages = talk.messages[:1]
        for number in range(51):
            asked = {"role": "user", "content": prose(200, seed=2 * number)}
            said = {"role": "assistant", "content": prose(200, seed=2 * number + 1)}
            talk.messages += [asked, said] if number < 50 else [asked]

        await talk.ask(max_tokens=256)

        [sent] = arrays_of(answered(simulator))
        before = int(talk.headers[0]["x-weir-tokens"].partition(";")[0].removeprefix("before="))
        assert 32_000 < before < 40_000
        assert sent[0] == talk.messages[0]
        assert sent[-30:] == talk.messages[-30:]
        assert len(sent) < 40


@pytest.mark.requirement("A1.5")
async def test_off_sends_the_clients_bytes() -> None:
    async with AsyncExitStack() as stack:
        simulator, proxy = await started(stack, "off", window=64_000)
        talk = Talk(proxy.client())
        talk.grow(30, kind="tools")
        await talk.ask()

        assert arrays_of(answered(simulator)) == [talk.messages]
        assert "x-weir-tokens" not in talk.headers[0]
