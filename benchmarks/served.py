"""Recorded conversations played through a served Weir; what went up is kept as the upstream received it."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from policies import ContextSettings, divide
from proxy.app import create_app
from proxy.config import Flags, load_config
from proxy.server import serve
from proxy.telemetry import Telemetry, TelemetrySettings
from proxy.tokenizer import Tokenizer

Chat = list[dict[str, Any]]
Override = Mapping[str, object]
TOKENIZER = Tokenizer()
PER_MESSAGE = 4
MAX_TOKENS = 64
BALANCED = ContextSettings()
AT_ONCE = 8
ANSWER = {"role": "assistant", "content": "Done."}


class Tokens:
    """Tokens of texts by o200k_base, each text counted once."""

    def __init__(self) -> None:
        self._counter = TOKENIZER.counter("o200k_base")
        self._known: dict[str, int] = {}

    def of(self, texts: Sequence[str]) -> int:
        """Tokens of messages with these texts, 4 more for each."""
        for text in texts:
            if text not in self._known:
                self._known[text] = self._counter.count(text)
        return sum(self._known[text] + PER_MESSAGE for text in texts)


TOKENS = Tokens()


def written(message: Mapping[str, Any]) -> str:
    """Everything of a message that a model reads."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return str(content) + "".join(f" {call['name']} {call['arguments']}" for call in calls)


def window_for(budget: int) -> int:
    """The smallest window whose soft limit is ``budget`` under ``balanced`` before the upstream has reported usage.

    That is (W - R - H) / (1 + M), where R is :data:`MAX_TOKENS`, or a quarter of W if that is less. The margin M is .05,
    and .02 once three answers agree: a growing conversation may then have 3 % more.
    """
    window = budget
    while divide(BALANCED, window=window, requested=MAX_TOKENS).soft_limit < budget:
        window += 1
    return window


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a conversation: its first ``upto`` messages, and a question behind them if there is one."""

    upto: int
    question: str | None = None

    def messages(self, history: Chat) -> Chat:
        """What the client sends."""
        return [*history[: self.upto], *([{"role": "user", "content": self.question}] if self.question else ())]


@dataclass(slots=True)
class Upstream:
    """A model that answers at once, reports exact usage and keeps what each key sent last; ``went_up`` by key."""

    went_up: dict[str, Chat] = field(default_factory=dict)

    async def answer(self, request: Request) -> JSONResponse:
        """One chat completion."""
        body = json.loads(await request.body())
        self.went_up[request.headers["authorization"]] = body["messages"]
        prompt = TOKENS.of([written(message) for message in body["messages"]])
        usage = {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}
        choice = {"index": 0, "message": ANSWER, "finish_reason": "stop"}
        answer = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": body["model"]}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})

    @property
    def app(self) -> Starlette:
        """The application that answers."""
        return Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])


@dataclass(frozen=True, slots=True)
class Weir:
    """A served Weir and its upstream."""

    url: str
    upstream: Upstream
    client: aiohttp.ClientSession

    async def send(self, key: str, messages: Chat, *, window: int) -> Chat:
        """The messages that went up for these; none where Weir refused the request."""
        bearer = f"Bearer {key}"
        self.upstream.went_up.pop(bearer, None)
        body = {"model": f"window-{window}", "max_tokens": MAX_TOKENS, "messages": messages}
        async with self.client.post(self.url, json=body, headers={"authorization": bearer}) as response:
            await response.read()
        return self.upstream.went_up.pop(bearer, [])


@asynccontextmanager
async def serving(windows: Sequence[int], override: Override) -> AsyncIterator[Weir]:
    """Weir with default settings, but for what of ``balanced`` is overridden; a model for each window."""
    upstream = Upstream()
    with tempfile.TemporaryDirectory() as folder:
        async with serve(upstream.app, lifespan="off") as behind:
            path = Path(folder) / "weir.yaml"
            values = {
                "upstreams": {"recording": {"base_url": f"http://127.0.0.1:{behind.port}/v1"}},
                "models": [{"match": f"window-{window}", "window": window} for window in sorted(set(windows))],
                "policies": {"measured": {"preset": "balanced", **override}},
                "default_policy": "measured",
            }
            path.write_text(json.dumps(values))
            config = load_config(path, env={}, flags=Flags(store=f"sqlite+aiosqlite:///{folder}/weir.db"))
            app = create_app(config, telemetry=Telemetry.create(TelemetrySettings()), tokenizer=TOKENIZER)
            async with serve(app) as server, aiohttp.ClientSession() as client:
                yield Weir(f"http://127.0.0.1:{server.port}/v1/chat/completions", upstream, client)


Told = Callable[[int], None]


async def play(
    histories: Sequence[tuple[Chat, Sequence[Ask]]],
    windows: Sequence[int],
    *,
    growing: bool,
    override: Override,
    told: Told = lambda _: None,
) -> list[dict[Ask, Chat]]:
    """What went up for each request of each conversation, in the order of sending.

    ``growing``: all of a conversation under one key, one after another; else each request under a key of its own.
    """
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(weir: Weir, number: int) -> dict[Ask, Chat]:
        history, asks = histories[number]
        found = {}
        async with limit:
            for place, ask in enumerate(asks):
                key = f"sk-{number}" if growing else f"sk-{number}-{place}"
                found[ask] = await weir.send(key, ask.messages(history), window=windows[number])
                told(1)
        return found

    async with serving(windows, override) as weir:
        return await asyncio.gather(*(one(weir, number) for number in range(len(histories))))
