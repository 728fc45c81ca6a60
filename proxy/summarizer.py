"""Asking a model for notes: bounded in time, shared when identical, backing off when it keeps failing.

A failure is a reply with a short code, never an exception: the ladder below it goes on without a model.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from policies import Failed, Reply, Summarize, Summary
from proxy.errors import ProxyError

PATIENCE = 20.0
BACK_OFF_AFTER = 3
BACK_OFF_FIRST = 15.0
BACK_OFF_MOST = 600.0
MOST_KEPT = 256
MOST_ANSWER = 4 * 1024 * 1024

Send = Callable[[bytes], Awaitable[tuple[int, bytes]]]


@dataclass(slots=True)
class _Trouble:
    failures: int = 0
    until: float = 0.0


class Summarizer:
    """One per process. What identical requests ask for at the same time is asked once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, patience: float = PATIENCE) -> None:
        self._clock = clock
        self._patience = patience
        self._flying: dict[bytes, asyncio.Task[Reply]] = {}
        self._trouble: OrderedDict[str, _Trouble] = OrderedDict()

    async def ask(self, effect: Summarize, *, model: str, scope: str, send: Send) -> Reply:
        """The model's reply. ``scope`` separates tenants and upstreams; ``send`` posts a chat request body."""
        trouble = self._trouble.get(f"{scope} {model}")
        if trouble is not None and trouble.until > self._clock():
            return Failed("backing_off")
        body = _request(effect, model)
        key = blake2b(scope.encode() + b"\0" + body, digest_size=16).digest()
        task = self._flying.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(body, send), name="weir-summarise")
            self._flying[key] = task
            task.add_done_callback(lambda _: self._flying.pop(key, None))
        reply = await asyncio.shield(task)
        self._note(f"{scope} {model}", failed=isinstance(reply, Failed))
        return reply

    async def _ask(self, body: bytes, send: Send) -> Reply:
        try:
            status, content = await asyncio.wait_for(send(body), self._patience)
        except TimeoutError:
            return Failed("timeout")
        except ProxyError as error:
            return Failed(error.code)
        except Exception as error:  # noqa: BLE001 - whatever a summariser does, the request goes on without it
            return Failed(f"error_{type(error).__name__}")
        return _reply(content) if status == 200 else Failed(f"status_{status}")

    def _note(self, key: str, *, failed: bool) -> None:
        if not failed:
            self._trouble.pop(key, None)
            return
        trouble = self._trouble.setdefault(key, _Trouble())
        trouble.failures += 1
        if trouble.failures >= BACK_OFF_AFTER:
            pause = BACK_OFF_FIRST * 2 ** (trouble.failures - BACK_OFF_AFTER)
            trouble.until = self._clock() + min(pause, BACK_OFF_MOST)
        if len(self._trouble) > MOST_KEPT:
            self._trouble.popitem(last=False)

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._flying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _request(effect: Summarize, model: str) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "messages": [
                {"role": "system", "content": effect.system},
                {"role": "user", "content": effect.prompt},
            ],
            "max_tokens": effect.max_tokens,
            "temperature": 0,
            "stream": False,
        }
    )


def _reply(content: bytes) -> Reply:
    try:
        answer = msgspec.json.decode(content[:MOST_ANSWER])
        choice = answer["choices"][0]
        message = choice["message"]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError):
        return Failed("not_an_answer")
    if not isinstance(message, dict):
        return Failed("not_an_answer")
    text = message.get("content")
    return Summary(
        text=text if isinstance(text, str) else "",
        finish_reason=str(choice.get("finish_reason") or ""),
        tool_calls=len(message.get("tool_calls") or ()),
        model=str(answer.get("model") or ""),
    )
