"""The real clients of Responses and Messages through Weir, before models with a small window and strict rules."""

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.functional.harness import COUNTER
from tests.profile import soak
from tests.real.clients import DOCS, QUICK_START, Client, Failed, Model, Place, Setting, quick_starts, through_weir
from tests.real.drivers import step
from tests.real.drivers.common import AGAIN, GREETING, TASK
from tests.real.environments import HERE, Unavailable
from tests.real.scripted import DONE, HELLO, Remembering, Script, scripted
from tests.real.simulated import simulated

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def sdk(name: str, endpoint: str, start: str, installed: str, driver: str, *ways: str, steps: int = 30) -> list[Client]:
    """A library, used in these ways; ``arguments`` of its driver are the words of a way."""
    return [
        Client(
            name,
            endpoint,
            start,
            tuple(way.split()),
            driver=driver,
            streams="stream" in way,
            steps=steps,
            **{"npm" if driver.endswith(".mjs") else "python": installed},
        )
        for way in ways
    ]


CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
CLAUDE = ("--allowedTools", "Bash", "-p")
AGENTS = [
    *(
        Client(
            "Codex",
            "responses",
            "codex",
            way,
            npm="codex",
            program=".bin/codex",
            ask=(*CODEX, *way),
            again=(*CODEX, *way, "resume", "--last"),
            steps=70,
            window=window,
            streams=True,
        )
        for way, window in (((), 40_960), (("-m", "gpt-5"), 32_768))
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
    *sdk(
        "openai-agents",
        "responses",
        "openai-agents",
        "openai-agents",
        "openai_agents.py",
        "session",
        "sealed",
        steps=40,
    ),
    *sdk(
        "openai-agents", "responses", "openai-agents", "openai-agents", "openai_agents.py", "stream", "chain", steps=40
    ),
    *sdk("pydantic-ai", "responses", "openai", "pydantic-ai", "pydantic_ai_agent.py", "responses", "responses stream"),
    *sdk("pydantic-ai", "messages", "anthropic", "pydantic-ai", "pydantic_ai_agent.py", "messages", "messages stream"),
    *sdk("langchain-anthropic", "messages", "anthropic", "langchain-anthropic", "langchain_messages.py", "whole"),
    *sdk("langchain-anthropic", "messages", "anthropic", "langchain-anthropic", "langchain_messages.py", "stream"),
    *sdk("ai", "responses", "ai-sdk", "ai-sdk", "ai_sdk.mjs", "responses", "responses stream", "sealed", steps=40),
    *sdk("ai", "responses", "ai-sdk", "ai-sdk", "ai_sdk.mjs", "sealed stream", steps=40),
    *sdk("ai", "messages", "ai-sdk", "ai-sdk", "ai_sdk.mjs", "messages", "messages stream"),
    *AGENTS,
]
IN_PARTS = 30
"""Deltas of a run that is streamed, at least; one that comes whole has none."""
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
    assert not client.streams or not client.driver or told["deltas"] > IN_PARTS
    return setting


@pytest.mark.requirement("A0.3", "A0.8", "P5", "P9")
@pytest.mark.parametrize("client", among(CLIENTS, *IN_EVERY_RUN))
async def test_a_client_works_on_past_its_window_and_over_a_restart(
    client: Client, model: Model, tmp_path: Path
) -> None:
    script = Script(window=client.window, steps=client.steps)
    setting = await run(client, tmp_path, model, script, window=client.window, restart=True)
    results = sum(COUNTER.count(step.result(str(n))) for n in range(1, client.steps + 1))
    assert script.main[0].tokens + results > 1.1 * client.window
    assert script.overflowed == 0
    assert setting.restarts == 1
    if client.name == "Codex":  # which compacts by the usage that it is told
        assert len(compactions(script)) <= 1
    if client.name == "Claude Code":  # all of its many tools go up with every step
        tools = [[tool["name"] for tool in each.body["tools"]] for each in script.main]
        assert len(tools[0]) > 20
        assert all(each[: len(tools[0])] == tools[0] for each in tools)


TRIGGER, CHECKPOINT = "compaction_trigger", "CONTEXT CHECKPOINT COMPACTION"
"""How Codex asks for a compaction: its provider, if that is OpenAI, or else the model."""


def compactions(script: Script, *words: str) -> list[int]:
    """The requests by which Codex has its history compacted, in any of these ways."""
    asked = [json.dumps(each.elements[-1]) for each in script.asked]
    return [n for n, last in enumerate(asked) if any(each in last for each in words or (TRIGGER, CHECKPOINT))]


@soak
@pytest.mark.requirement("A0.3", "P16")
@pytest.mark.parametrize("client", among(CLIENTS))
async def test_a_client_does_not_see_that_the_window_is_half_of_what_it_was_said_to_be(
    client: Client, tmp_path: Path
) -> None:
    said_in_stream = itertools.cycle((client.streams, not client.streams))
    script = Script(window=client.window, steps=client.steps, overflows=said_in_stream)
    await run(client, tmp_path, scripted, script, window=2 * client.window, restart=False)
    assert script.overflowed > 0


@soak
@pytest.mark.requirement("A0.3", "P9")
@pytest.mark.parametrize("ratio", [1.4, 1.7, 2.5])
@pytest.mark.parametrize("client", among(AGENTS))
async def test_an_agent_works_in_a_window_little_larger_than_its_prompt(
    client: Client, ratio: float, tmp_path: Path
) -> None:
    """The window is so many times what the agent sends first: its system prompt, its tools and the task."""
    folders = [tmp_path / name for name in ("first", "tight")]
    for folder in folders:
        folder.mkdir()
    first = Script(window=200_000, steps=2)
    await run(replace(client, steps=2), folders[0], scripted, first, window=200_000, restart=False)
    window = int(ratio * first.main[0].tokens)
    script = Script(window=window, steps=12)
    await run(replace(client, steps=12), folders[1], scripted, script, window=window, restart=False)
    bodies = [json.dumps(each.body, ensure_ascii=False) for each in script.main]
    at_work = [body for body in bodies if "[[step " in body and json.dumps(AGAIN)[1:-1] not in body]
    assert len(at_work) >= 12
    for body in at_work:
        newest = re.findall(r"\[\[step (\w+)\]\]", body)[-1]
        assert json.dumps(TASK)[1:-1] in body
        assert json.dumps(step.result(newest))[1:-1] in body


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


@soak
@pytest.mark.requirement("A0.3")
@pytest.mark.parametrize("client", among([AGENTS[0], AGENTS[-1]]))
async def test_weir_run_leads_an_agent_to_weir_without_any_configuration(client: Client, tmp_path: Path) -> None:
    script = Script(window=client.window, steps=1)
    with unavailable_skips():
        async with through_weir(client, tmp_path, scripted, script, window=client.window) as setting:
            place = setting.place
            (place.folder / ".codex" / "config.toml").unlink(missing_ok=True)
            place.led = (sys.executable, "-m", "proxy", "run", "--url", setting.weir.root, "--key", "sk-test", "--")
            said = await place.run(*client.ask, GREETING)
    assert said.strip() == HELLO
    assert [each.status for each in script.asked if each.main] == [200]


@soak
@pytest.mark.requirement("A0.3", "A0.57")
@pytest.mark.parametrize("provider", ["OpenAI", "Weir"])
async def test_codex_compacts_by_the_usage_it_is_told_and_goes_on(provider: str, tmp_path: Path) -> None:
    """A provider of OpenAI's name is asked for a compaction, which this one does not make; any other for a summary."""
    client = replace(AGENTS[0], steps=24)
    script = Remembering(window=200_000, steps=client.steps)
    with unavailable_skips():
        async with through_weir(client, tmp_path, scripted, script, window=200_000) as setting:
            config = setting.place.folder / ".codex" / "config.toml"
            said = config.read_text().replace('name = "Weir"', f'name = "{provider}"')
            config.write_text(f"model_auto_compact_token_limit = 20000\n{said}")
            told = await setting.place.run(*client.ask, TASK, timeout=400)
    assert told.strip() == DONE
    assert set(setting.place.steps) == {
        step.SECOND,
        *map(str, range(1, client.steps + 1)),
    }  # the newest one may run again
    assert script.refused == []
    triggers, summaries = compactions(script, TRIGGER), compactions(script, CHECKPOINT)
    own = [n for n, each in enumerate(script.asked) if b"Written by Weir" in each.raw]
    if provider == "OpenAI":
        assert len(triggers) == 1  # it is asked once whether it makes compactions
        assert script.asked[triggers[0]].status == 400
        assert own
        assert min(own) > triggers[0]
        assert len(script.asked[min(own)].raw) < len(script.asked[triggers[0]].raw)
    else:
        assert summaries
        assert not triggers
    assert not any(b"weir:1:" in each.raw for each in script.asked)


def rows() -> list[tuple[str, str]]:
    """Client and endpoint of each row of the table in docs/clients.md, all of whose cells say yes."""
    table = DOCS.read_text().partition("| client | endpoint | first answer |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert all(cell == "yes" for _, _, *columns in cells for cell in columns)
    return [(name, endpoint) for name, endpoint, *_ in cells]


def locked(client: Client) -> dict[str, str]:
    """What is installed for a client, with its version."""
    if client.python:
        text = (HERE / f"{client.python}.lock").read_text()
        return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))
    found = json.loads((HERE / "npm" / client.npm / "package-lock.json").read_text())["packages"]
    return {name.removeprefix("node_modules/"): each["version"] for name, each in found.items() if name}


PACKAGES = {"Codex": "@openai/codex", "Claude Code": "@anthropic-ai/claude-code", "pydantic-ai": "pydantic-ai-slim"}


def test_the_table_in_the_docs_has_the_clients_and_versions_that_are_run() -> None:
    run = {(client.name, client.endpoint): client for client in CLIENTS}
    found = {}
    for name, endpoint in rows():
        named = dict(re.findall(r"([@\w/-][\w/ -]*?) (\d[\w.]*)", name.replace("with ", "")))
        client = run[next(iter(named)), endpoint]
        found[client.name, endpoint] = client
        versions = locked(client)
        assert {PACKAGES.get(each, each): version for each, version in named.items()}.items() <= versions.items()
    assert found.keys() == run.keys()
    assert {client.start for client in CLIENTS} == {name for name, _, _ in QUICK_START.findall(quick_starts())}


@pytest.mark.requirement("S.30")
@pytest.mark.parametrize("lock", sorted((HERE / "npm").glob("*/package-lock.json")), ids=lambda lock: lock.parent.name)
def test_what_npm_installs_for_these_tests_is_pinned_by_hash_and_names_no_registry(lock: Path) -> None:
    packages = {name: each for name, each in json.loads(lock.read_text())["packages"].items() if name}
    assert packages
    assert all(each["integrity"].startswith("sha512-") for each in packages.values())
    assert not any("resolved" in each or each.get("link") for each in packages.values())
