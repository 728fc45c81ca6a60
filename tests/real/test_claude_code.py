"""Claude Code where Weir refuses what it sends, and what Weir says that its requests would take."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from proxy.server import serve
from tests.profile import soak
from tests.real.clients import Model, Setting, through_weir
from tests.real.drivers import step
from tests.real.drivers.common import AGAIN, TASK
from tests.real.scripted import DONE, HELLO, NOTES, Json, Remembering, Script, scripted
from tests.real.simulated import simulated
from tests.real.test_clients import AGENTS, unavailable_skips

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CLAUDE_CODE = AGENTS[-1]
COUNTED = ("model", "messages", "system", "tools", "thinking", "tool_choice", "output_config", "context_management")
"""What the SDK counts of a request."""
PROMPT = re.compile(rb'"(?:input_tokens|cache_creation_input_tokens|cache_read_input_tokens)": ?(\d+)')


@dataclass(slots=True)
class Passed:
    """A request of the client's, what it would take by Weir's count, and what the client was told."""

    body: Json
    counted: int
    status: int = 0
    told: bytes = b""
    actions: str = ""

    @property
    def used(self) -> int:
        """The prompt's tokens as the answer has them, in the first of its usages."""
        return sum(int(number) for number in PROMPT.findall(self.told)[:3])

    @property
    def kind(self) -> str:
        """Of the client's loop: a step or its compaction, answered or refused."""
        return ("c" if self.compacts else "s") if self.status == 200 else ("C" if self.compacts else "S")

    @property
    def compacts(self) -> bool:
        """Whether it has its history summed up."""
        return "TEXT ONLY" in json.dumps(self.body["messages"][-2:])


@dataclass(slots=True)
class Between:
    """Stands between Claude Code and Weir: has each request counted by Weir, then passes it on as it came."""

    weir: str
    passed: list[Passed] = field(default_factory=list)

    @property
    def loop(self) -> list[Passed]:
        """What is asked with tools: not the titles."""
        return [each for each in self.passed if each.body.get("tools")]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while (message := await receive())["type"] == "http.request":
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"host", b"accept-encoding")]
        path = f"{self.weir}{scope['path']}?{scope['query_string'].decode()}"
        asked = None
        if scope["path"] == "/v1/messages":
            asked = Passed(json.loads(raw), await self._count(json.loads(raw), dict(headers)))
            self.passed.append(asked)
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            answer = await client.request(scope["method"], path, content=raw, headers=headers)
        if asked is not None:
            asked.status, asked.told = answer.status_code, answer.content
            asked.actions = answer.headers["x-weir-actions"]
        kind = [(b"content-type", answer.headers.get("content-type", "").encode())]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": kind})
        await send({"type": "http.response.body", "body": answer.content, "more_body": False})

    async def _count(self, body: Json, headers: dict[bytes, bytes]) -> int:
        """As Claude Code itself has requests counted: in the session that they are sent in."""
        betas = headers[b"anthropic-beta"].decode().split(",")
        session = {name.decode(): value.decode() for name, value in headers.items() if name.endswith(b"-session-id")}
        async with anthropic.AsyncAnthropic(base_url=self.weir, api_key="sk-test", max_retries=0) as client:
            given: Any = {name: body[name] for name in COUNTED if name in body}
            return (await client.beta.messages.count_tokens(**given, betas=betas, extra_headers=session)).input_tokens


@asynccontextmanager
async def watched(setting: Setting) -> AsyncIterator[Between]:
    """What passes between the client and its Weir."""
    between = Between(setting.weir.root)
    async with serve(between) as server:
        setting.place.base = f"http://127.0.0.1:{server.port}"
        yield between


async def run(setting: Setting, steps: int) -> list[Passed]:
    """The whole task, and a word after it; what passed."""
    async with watched(setting) as between:
        with unavailable_skips():
            said = await setting.place.run(*CLAUDE_CODE.ask, TASK, timeout=500)
            again = await setting.place.run(*CLAUDE_CODE.again, AGAIN)
    print("".join(each.kind for each in between.loop))
    assert (said.strip(), again.strip()) == (DONE, HELLO)
    assert sorted(setting.place.steps) == sorted([step.SECOND, *map(str, range(1, steps + 1))])
    assert (setting.script.refused, setting.script.overflowed) == ([], 0)
    return between.loop


@soak
@pytest.mark.requirement("A0.3", "A0.8")
@pytest.mark.parametrize("model", [scripted, simulated])
async def test_claude_code_compacts_when_weir_refuses_and_goes_on(model: Model, tmp_path: Path) -> None:
    client = replace(CLAUDE_CODE, steps=40)
    script = Remembering(window=100_000, steps=client.steps)
    async with through_weir(client, tmp_path, model, script, window=40_000, policy="audit") as setting:
        loop = await run(setting, client.steps)
    kinds = "".join(each.kind for each in loop)
    assert re.fullmatch(r"(s{5,}SC*c)+s+", kinds), kinds  # one compaction for each step that was refused
    for each in loop:
        if each.status != 200:
            told = json.loads(each.told)["error"]
            sizes = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", told["message"])
            assert (each.status, told["type"]) == (400, "invalid_request_error")
            assert sizes is not None
            assert int(sizes[1]) > int(sizes[2])
        assert each.actions == "none"
    behind = [after for before, after in pairwise(loop) if before.kind == "c"]
    for each in behind:  # its own summary, and the newest steps as they were
        first = json.dumps(each.body["messages"][0])
        assert NOTES[:70] in first
        assert any("tool_result" in json.dumps(message) for message in each.body["messages"][1:])
    assert len(behind) == kinds.count("c") >= 2


@soak
@pytest.mark.requirement("A0.8")
@pytest.mark.parametrize("model", [scripted, simulated])
async def test_what_weir_counts_of_claude_codes_requests_is_what_they_take(model: Model, tmp_path: Path) -> None:
    client = CLAUDE_CODE
    script = Script(window=client.window, steps=client.steps)
    async with through_weir(client, tmp_path, model, script, window=client.window) as setting:
        loop = await run(setting, client.steps)
    batches = 0
    for before, each in pairwise(loop):
        assert each.status == 200
        if each.counted != each.used:  # more goes from this one on than what was known of it when it was counted
            batches += 1
            assert each.counted > each.used
            assert each.actions != before.actions or "compact" in each.actions
    assert 2 <= batches <= client.steps / 8
