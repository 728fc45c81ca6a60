"""The real clients of Responses and Messages through Weir, before a model with a small window and strict rules."""

import asyncio
from pathlib import Path

import pytest

from tests.real.clients import Client, Setting, before, reported
from tests.real.environments import Unavailable
from tests.real.scripted import DONE, HELLO, TASK, Script

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


AGENTS = [
    Client(
        "Codex", "responses", "codex", npm="codex", program=".bin/codex", steps=70, window=32_768, streams=True,
        ask=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        again=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "resume", "--last"),
    ),
    Client(
        "Claude Code", "messages", "claude-code", npm="claude-code", program="@anthropic-ai/claude-code-linux-x64/claude",
        steps=70, window=49_152, streams=True,
        ask=("--allowedTools", "Bash", "-p"),
        again=("--allowedTools", "Bash", "-c", "-p"),
    ),
]

async def drive(setting: Setting) -> dict:
    client, place = setting.place.client, setting.place
    if client.driver:
        return reported(await place.run())
    greeting = await place.run(*client.ask, "Say hello. [[say]]")
    said = await place.run(*client.ask, TASK, timeout=500)
    again = await place.run(*client.again, "And now say hello once more. [[say]]")
    return {"greeting": greeting.strip(), "said": said.strip(), "again": again.strip()}


@pytest.mark.parametrize("client", [*SDKS, *AGENTS], ids=lambda c: f"{c.name}-{'-'.join(c.arguments)}")
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
                for a in script.asked:
                    if not a.main: print("SIDE", a.path, a.status, a.tokens, list(a.body), a.body.get("tool_choice"), str(a.elements[-1])[-300:])
                print("refused", script.refused, "overflows", script.overflowed, "asked", len(script.asked), "main", len(script.main))
        print(told)
        assert (told["greeting"], told["said"], told["again"]) == (HELLO, DONE, HELLO)
        assert sorted(setting.place.steps) == sorted(["1b", *map(str, range(1, client.steps + 1))])
        assert script.refused == []
        assert script.overflowed == 0
        assert setting.restarts == 1
    except Unavailable as reason:
        pytest.skip(str(reason))
