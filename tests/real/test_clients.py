"""The real clients of Responses and Messages through Weir, before a model with a small window and strict rules."""

import asyncio
from pathlib import Path

import pytest

from tests.real.clients import Client, Setting, before, reported
from tests.real.environments import Unavailable
from tests.real.scripted import DONE, HELLO, Script

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

OPENAI, ANTHROPIC = "openai", "anthropic"
SDKS = [
    *(
        Client("openai (PyPI)", "responses", "openai", (how,), python="openai", driver="openai_responses.py", streams=how == "stream")
        for how in ("whole", "stream", "async")
    ),
    *(
        Client("anthropic (PyPI)", "messages", "anthropic", (how,), python="anthropic", driver="anthropic_messages.py", streams=how == "stream")
        for how in ("whole", "stream", "async", "runner")
    ),
    *(
        Client("openai-agents", "responses", "openai-agents", (how,), python="openai-agents", driver="openai_agents.py", streams=how == "stream")
        for how in ("session", "sealed", "stream", "chain")
    ),
    *(
        Client("pydantic-ai", endpoint, start, (endpoint, *how), python="pydantic-ai", driver="pydantic_ai_agent.py", streams=bool(how))
        for endpoint, start in (("responses", "openai"), ("messages", "anthropic")) for how in ((), ("stream",))
    ),
    *(
        Client("langchain-anthropic", "messages", "anthropic", (how,), python="langchain-anthropic", driver="langchain_messages.py", streams=how == "stream")
        for how in ("whole", "stream")
    ),
    *(
        Client("ai", endpoint, "ai-sdk", (kind, *how), npm="ai-sdk", driver="ai_sdk.mjs", streams=bool(how))
        for endpoint, kind in (("responses", "responses"), ("responses", "sealed"), ("messages", "messages")) for how in ((), ("stream",))
    ),
]


async def drive(setting: Setting) -> dict:
    return reported(await setting.place.run())


@pytest.mark.parametrize("client", SDKS, ids=lambda c: f"{c.name}-{'-'.join(c.arguments)}")
async def test_loop(client: Client, tmp_path: Path) -> None:
    script = Script(window=client.window, steps=client.steps)
    try:
        async with before(client, tmp_path, script, window=client.window) as setting:
            restart = asyncio.create_task(setting.restart_at(client.steps // 2))
            try:
                told = await drive(setting)
            finally:
                restart.cancel()
                for a in script.asked[-3:]:
                    print(a.path, a.status, a.tokens, a.overflow, a.refused, a.step, len(a.elements))
                print(setting.weir.log[-5:])
                print("refused", script.refused, "overflows", script.overflowed, "asked", len(script.asked), "main", len(script.main))
        print(told)
        assert (told["greeting"], told["said"], told["again"]) == (HELLO, DONE, HELLO)
        assert sorted(setting.place.steps) == sorted(["1b", *map(str, range(1, client.steps + 1))])
        assert script.refused == []
        assert script.overflowed == 0
        assert setting.restarts == 1
    except Unavailable as reason:
        pytest.skip(str(reason))
