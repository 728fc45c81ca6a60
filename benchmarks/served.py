"""Recorded conversations played through a served Weir; what went up is kept as the upstream
received it.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from policies.limits import divide
from policies.settings import ContextSettings
from proxy.app import create_app
from proxy.config.loading import load_config
from proxy.config.values import Flags
from proxy.server import serve
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.wire.counting import Tokenizer

Chat = list[dict[str, Any]]
Override = Mapping[str, object]
Send = Callable[[str, Chat, int], Awaitable[Chat]]
TOKENIZER = Tokenizer()
COUNTER = TOKENIZER.counter("o200k_base")
PER_MESSAGE = 4
MAX_TOKENS = 64
AT_ONCE = 8
ANSWER = {"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a conversation: its first ``upto`` messages, and a question behind them if
    there is one.
    """

    upto: int
    question: str | None = None

    def order(self) -> tuple[int, str]:
        return self.upto, self.question or ""

    def messages(self, history: Chat) -> Chat:
        """What the client sends."""
        return [
            *history[: self.upto],
            *([{"role": "user", "content": self.question}] if self.question else ()),
        ]


def written(messages: Chat) -> list[str]:
    """Of each message everything that a model reads."""
    return [_text(m.get("content")) + _calls(m.get("tool_calls")) for m in messages]


def _text(content: Any) -> str:
    return (
        "\n".join(str(p.get("text", "")) for p in content)
        if isinstance(content, list)
        else content or ""
    )


def _calls(calls: Any) -> str:
    return "".join(f" {c['function']['name']} {c['function']['arguments']}" for c in calls or ())


@cache
def tokens(text: str) -> int:
    """Tokens of a message with this text."""
    return COUNTER.count(text) + PER_MESSAGE


def size(messages: Chat) -> int:
    """Tokens of messages."""
    return sum(map(tokens, written(messages)))


def window_for(budget: int) -> int:
    """The smallest window whose soft limit is ``budget`` under ``balanced`` before the upstream has
    reported usage.

    That is (W - R - H) / (1 + M), where R is :data:`MAX_TOKENS`, or a quarter of W if that is less.
    The margin M is .05, and .02 once three answers agree: a growing conversation may then have 3 %
    more.
    """
    window = budget
    while divide(ContextSettings(), window=window, requested=MAX_TOKENS).soft_limit < budget:
        window += 1
    return window


@asynccontextmanager
async def serving(windows: Sequence[int], override: Override) -> AsyncIterator[Send]:
    """Weir as it comes, but for what of ``balanced`` is overridden, with a model for each window.

    What is given sends messages under a key to the model of a window, and says which went up; none
    if refused. The model answers at once and reports exact usage.
    """
    went_up: dict[str, Chat] = {}

    async def answer(request: Request) -> JSONResponse:
        body = json.loads(await request.body())
        went_up[request.headers["authorization"]] = body["messages"]
        prompt = size(body["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}
        head = {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
        }
        return JSONResponse({**head, "choices": [ANSWER], "usage": usage})

    async def send(key: str, messages: Chat, window: int) -> Chat:
        bearer = f"Bearer {key}"
        went_up.pop(bearer, None)
        body = {"model": f"window-{window}", "max_tokens": MAX_TOKENS, "messages": messages}
        url = f"http://127.0.0.1:{weir.port}/v1/chat/completions"
        async with client.post(url, json=body, headers={"authorization": bearer}) as response:
            await response.read()
        return went_up.pop(bearer, [])

    upstream = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    with tempfile.TemporaryDirectory() as folder:
        async with serve(upstream, lifespan="off") as behind, aiohttp.ClientSession() as client:
            values = {
                "upstreams": {"recording": {"base_url": f"http://127.0.0.1:{behind.port}/v1"}},
                "auth": {"tenant": "key"},  # whoever asks is another person
                "models": [
                    {"match": f"window-{window}", "window": window}
                    for window in sorted(set(windows))
                ],
                "policies": {"measured": {"preset": "balanced", **override}},
                "default_policy": "measured",
            }
            path = Path(folder) / "weir.yaml"
            path.write_text(json.dumps(values))
            config = load_config(
                path, env={}, flags=Flags(store=f"sqlite+aiosqlite:///{folder}/weir.db")
            )
            app = create_app(
                config, telemetry=Telemetry.create(OtelSettings()), tokenizer=TOKENIZER
            )
            async with serve(app) as weir:
                yield send


async def play(
    conversations: Sequence[tuple[Chat, Sequence[Ask], int]], *, growing: bool, override: Override
) -> list[dict[Ask, Chat]]:
    """What went up for each request of conversations (messages, requests, window), in the order of
    sending.

    ``growing``: all of a conversation under one key, one after another; else each request under a
    key of its own.
    """
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> dict[Ask, Chat]:
        history, asks, window = conversations[number]
        async with limit:
            return {
                ask: await send(
                    f"sk-{number}-{0 if growing else place}", ask.messages(history), window
                )
                for place, ask in enumerate(asks)
            }

    async with serving([window for _, _, window in conversations], override) as send:
        return await asyncio.gather(*(one(number) for number in range(len(conversations))))
