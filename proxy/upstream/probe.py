"""Asking an upstream for the window of its models, once per upstream and for a while.

OpenAI's own listing says nothing about windows, but vLLM, llama.cpp, OpenRouter and LM Studio put it there,
llama.cpp says it in ``/props`` and Ollama in ``/api/show``.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from proxy.models import ModelFacts, parse_props, parse_show, parse_upstream_models

PATIENCE = 2.0
GOOD_FOR = 600.0
MOST_BODY = 4 * 1024 * 1024

Fetch = Callable[[str, str, bytes | None], Awaitable[tuple[int, bytes]]]


@dataclass(slots=True)
class _Answer:
    models: Mapping[str, ModelFacts] = field(default_factory=dict)
    anything: ModelFacts | None = None
    until: float = 0.0


class Probe:
    """What upstreams say of their windows. ``fetch(method, url, body)`` is given with each question."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def known(self, key: str, model: str) -> ModelFacts | None:
        """What the upstream said of ``model`` when it was asked last."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        return answer.models.get(model) or answer.anything

    def is_due(self, key: str) -> bool:
        """Whether the upstream was not asked yet, or too long ago."""
        answer = self._answers.get(key)
        return answer is None or answer.until < self._clock()

    def has_answered(self, key: str) -> bool:
        """Whether the upstream was asked before: until then a plan would not be the one of a process that did."""
        return key in self._answers

    async def ask(self, key: str, base_url: str, model: str, fetch: Fetch) -> ModelFacts | None:
        """The upstream's word on ``model``; waits for at most two seconds, requests under way are shared."""
        task = self.ask_later(key, base_url, model, fetch)
        if task is not None:
            await asyncio.wait({task}, timeout=PATIENCE)
        return self.known(key, model)

    def ask_later(self, key: str, base_url: str, model: str, fetch: Fetch) -> asyncio.Task[None] | None:
        """Ask in the background; the task, or None if the answer is fresh."""
        if not self.is_due(key):
            return None
        task = self._asking.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(key, base_url, model, fetch), name="weir-probe")
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return task

    async def _ask(self, key: str, base_url: str, model: str, fetch: Fetch) -> None:
        answer = _Answer(until=self._clock() + GOOD_FOR)
        root = f"{urlsplit(base_url).scheme}://{urlsplit(base_url).netloc}"
        answer.models = parse_upstream_models(await _json(fetch, f"{base_url}/models"))
        if model not in answer.models:
            answer.anything = parse_props(await _json(fetch, f"{root}/props"))
            if answer.anything is None:
                shown = parse_show(await _json(fetch, f"{root}/api/show", json.dumps({"model": model}).encode()))
                answer.models = {**answer.models, **({model: shown} if shown is not None else {})}
        self._answers[key] = answer


async def _json(fetch: Fetch, url: str, body: bytes | None = None) -> Any:
    """The JSON at ``url``, None for anything else: a probe that fails is no event."""
    try:
        status, content = await asyncio.wait_for(fetch("POST" if body else "GET", url, body), PATIENCE)
        return json.loads(content[:MOST_BODY]) if status == 200 else None
    except Exception:  # noqa: BLE001 - whatever an unknown server does to this question must not matter
        return None
