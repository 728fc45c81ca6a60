"""The real clients of Responses and Messages through Weir, before models with a small window and strict rules."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.functional.harness import COUNTER
from tests.profile import soak
from tests.real.clients import Client, Failed, Model, Place, Setting, through_weir
from tests.real.drivers import step
from tests.real.environments import Unavailable
from tests.real.scripted import DONE, HELLO, Script, scripted
from tests.real.simulated import simulated

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def sdk(name: str, endpoint: str, start: str, installed: str, driver: str, *ways: str) -> list[Client]:
    """A library, used in these ways; ``arguments`` of its driver are the words of a way."""
    return [
        Client(
            name,
            endpoint,
            start,
            tuple(way.split()),
            driver=driver,
            streams="stream" in way,
            **{"npm" if driver.endswith(".mjs") else "python": installed},
        )
        for way in ways
    ]


CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
CLAUDE = ("--allowedTools", "Bash", "-p")
AGENTS = [
    Client(
        "Codex",
        "responses",
        "codex",
        npm="codex",
        program=".bin/codex",
        ask=CODEX,
        again=(*CODEX, "resume", "--last"),
        steps=70,
        window=32_768,
        streams=True,
    ),
    Client(
        "Claude Code",
        "messages",
        "claude-code",
        npm="claude-code",
        program="@anthropic-ai/claude-code-linux-x64/claude",
        ask=CLAUDE,
        again=("-c", *CLAUDE),
        steps=70,
        window=49_152,
        streams=True,
    ),
]
CLIENTS = [
    *sdk("openai", "responses", "openai", "openai", "openai_responses.py", "stream", "whole", "async"),
    *sdk("anthropic", "messages", "anthropic", "anthropic", "anthropic_messages.py", "stream", "whole", "async"),
    *sdk("anthropic", "messages", "anthropic", "anthropic", "anthropic_messages.py", "runner"),
    *sdk("openai-agents", "responses", "openai-agents", "openai-agents", "openai_agents.py", "session", "sealed"),
    *sdk("openai-agents", "responses", "openai-agents", "openai-agents", "openai_agents.py", "stream", "chain"),
    *sdk("pydantic-ai", "responses", "openai", "pydantic-ai", "pydantic_ai_agent.py", "responses", "responses stream"),
    *sdk("pydantic-ai", "messages", "anthropic", "pydantic-ai", "pydantic_ai_agent.py", "messages", "messages stream"),
    *sdk("langchain-anthropic", "messages", "anthropic", "langchain-anthropic", "langchain_messages.py", "whole"),
    *sdk("langchain-anthropic", "messages", "anthropic", "langchain-anthropic", "langchain_messages.py", "stream"),
    *sdk("ai", "responses", "ai-sdk", "ai-sdk", "ai_sdk.mjs", "responses", "responses stream", "sealed"),
    *sdk("ai", "responses", "ai-sdk", "ai-sdk", "ai_sdk.mjs", "sealed stream"),
    *sdk("ai", "messages", "ai-sdk", "ai-sdk", "ai_sdk.mjs", "messages", "messages stream"),
    *AGENTS,
]
IN_EVERY_RUN = ("openai stream", "anthropic stream")


def among(clients: list[Client], *quick: str) -> list[object]:
    """Clients as parameters; those not ``quick`` only where there is time."""
    return [pytest.param(each, id=each.id, marks=() if each.id in quick else soak) for each in clients]


@pytest.fixture(params=[pytest.param(scripted, id="scripted"), pytest.param(simulated, id="simulated", marks=soak)])
def model(request: pytest.FixtureRequest) -> Model:
    """A model to stand before."""
    found: Model = request.param
    return found


@contextmanager
def unavailable_skips() -> Iterator[None]:
    """Skip with the reason where a client cannot be installed."""
    try:
        yield
    except Unavailable as reason:
        pytest.skip(str(reason))


async def run(client: Client, folder: Path, model: Model, script: Script, *, window: int, restart: bool) -> Setting:
    """A whole run of a client, with Weir restarted in the middle of its loop."""
    with unavailable_skips():
        async with through_weir(client, folder, model, script, window=window) as setting:
            restarting = asyncio.create_task(setting.restart_at(client.steps // 2)) if restart else None
            try:
                told = await setting.place.drive()
            finally:
                if restarting is not None:
                    restarting.cancel()
    print(f"{len(script.main)} of {len(script.asked)} answered, {script.overflowed} too long, {script.refused}")
    assert (told["greeting"], told["said"], told["again"]) == (HELLO, DONE, HELLO)
    assert sorted(setting.place.steps) == sorted([step.SECOND, *map(str, range(1, client.steps + 1))])
    assert script.refused == []
    assert not client.streams or not client.driver or told["deltas"] > client.steps
    return setting


@pytest.mark.requirement("A0.3", "A0.8", "P5", "P9")
@pytest.mark.parametrize("client", among(CLIENTS, *IN_EVERY_RUN))
async def test_a_client_works_on_past_its_window_and_over_a_restart(
    client: Client, model: Model, tmp_path: Path
) -> None:
    script = Script(window=client.window, steps=client.steps)
    setting = await run(client, tmp_path, model, script, window=client.window, restart=True)
    results = sum(COUNTER.count(step.result(str(n))) for n in range(1, client.steps + 1))
    assert results > client.window
    assert script.overflowed == 0
    assert setting.restarts == 1


@soak
@pytest.mark.requirement("A0.3", "P16")
@pytest.mark.parametrize("client", among(CLIENTS))
async def test_a_client_does_not_see_that_the_window_is_half_of_what_it_was_said_to_be(
    client: Client, tmp_path: Path
) -> None:
    script = Script(window=client.window, steps=client.steps)
    await run(client, tmp_path, scripted, script, window=2 * client.window, restart=False)
    assert script.overflowed > 0


@soak
@pytest.mark.requirement("A0.3")
@pytest.mark.parametrize("client", among([each for each in CLIENTS if each.name != "Claude Code"]))
async def test_without_weir_the_same_loop_ends_at_the_window(client: Client, tmp_path: Path) -> None:
    script = Script(window=client.window, steps=client.steps)
    async with scripted(script, client.endpoint) as upstream:
        with unavailable_skips(), pytest.raises(Failed):
            await Place(tmp_path / "home", upstream.removesuffix("/v1"), client).drive()
    assert script.overflowed > 0
    assert 0 < script.done < client.steps


REFUSED = {
    "openai": "BadRequestError",
    "anthropic": "BadRequestError",
    "openai-agents": "BadRequestError",
    "pydantic-ai": "ModelContextWindowExceededError",
    "langchain-anthropic": "AnthropicContextOverflowError",
    "ai": "APICallError",
    "Codex": "ran out of room",
    "Claude Code": "Prompt is too long",
}
"""What the user of a client is told where what nothing may be taken from is longer than the window."""


@soak
@pytest.mark.requirement("A0.3")
@pytest.mark.parametrize("client", among(CLIENTS))
async def test_a_client_knows_what_weir_refuses_as_too_long(client: Client, tmp_path: Path) -> None:
    window, script = 4_096, Script(window=100_000, steps=client.steps)
    system = "This is a rule. " * window
    with unavailable_skips():
        async with through_weir(client, tmp_path, scripted, script, window=window, system=system) as setting:
            with pytest.raises(Failed, match=REFUSED[client.name]):
                await setting.place.drive()
    assert setting.place.steps == []
