"""Asking an upstream for the window of its models, once per upstream and for a while.

OpenAI's own listing says nothing about windows, but vLLM, llama.cpp, OpenRouter and LM Studio put it there,
llama.cpp says it in ``/props`` and Ollama in ``/api/show``.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from proxy.models.facts import ModelFacts, sensible_tokens

PATIENCE = 2.0
GOOD_FOR = 600.0
MAX_BODY = 4 * 1024 * 1024

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
        return json.loads(content[:MAX_BODY]) if status == 200 else None
    except Exception:  # noqa: BLE001 - whatever an unknown server does to this question must not matter
        return None


def parse_upstream_models(answer: object) -> dict[str, ModelFacts]:
    """What the entries of ``GET /v1/models`` (decoded JSON) say beyond their names, by id.

    Known: vLLM and SGLang ``max_model_len``, llama.cpp ``meta.n_ctx`` (not ``n_ctx_train``), OpenRouter
    ``context_length``, ``top_provider`` and ``pricing``, LM Studio ``loaded_context_length``, Groq
    ``context_window``, Mistral ``max_context_length``, Anthropic ``max_input_tokens``.
    """
    entries = answer.get("data", answer.get("models")) if isinstance(answer, Mapping) else answer
    found: dict[str, ModelFacts] = {}
    for entry in map(_mapping, entries if isinstance(entries, list) else ()):
        name, facts = entry.get("id"), _from_entry(entry)
        if isinstance(name, str) and facts.window is not None:
            found[name] = facts
    return found


_WINDOWS = (
    *("loaded_context_length", "max_model_len", "context_window"),
    *("context_length", "max_context_length", "max_input_tokens"),
)
_OUTPUTS = ("max_completion_tokens", "max_output_tokens")


def _from_entry(entry: Mapping[str, object]) -> ModelFacts:
    meta, top = _mapping(entry.get("meta")), _mapping(entry.get("top_provider"))
    prices = _mapping(entry.get("pricing"))
    stated = [sensible_tokens(meta.get("n_ctx")), *(sensible_tokens(entry.get(name)) for name in _WINDOWS)]
    window = next((value for value in stated if value is not None), None)
    routed = sensible_tokens(top.get("context_length"))
    longest = [sensible_tokens(part.get(name)) for part in (top, entry) for name in _OUTPUTS]
    return ModelFacts(
        window=min(window, routed) if window and routed else window or routed,
        max_output=next((value for value in longest if value is not None), None),
        input_price=_price(prices.get("prompt")),
        output_price=_price(prices.get("completion")),
        cache_read_price=_price(prices.get("input_cache_read")),
        cache_write_price=_price(prices.get("input_cache_write")),
        source="upstream",
    )


def parse_props(answer: object) -> ModelFacts | None:
    """The window of one slot from llama.cpp's ``GET /props`` (decoded JSON)."""
    slot = _mapping(_mapping(answer).get("default_generation_settings"))
    window = sensible_tokens(slot.get("n_ctx"))
    return ModelFacts(window=window, source="upstream") if window else None


_NUM_CTX = re.compile(r"^num_ctx[ \t]+(\d{1,9})[ \t]*$", re.MULTILINE)
OLLAMA_DEFAULT = 4_096
"""Tokens that Ollama allots on a small GPU where neither the model nor the operator says
(docs.ollama.com/context-length); it cuts longer prompts without an error, so the smallest default counts."""


def parse_show(answer: object) -> ModelFacts | None:
    """The window from Ollama's ``POST /api/show`` (decoded JSON): ``num_ctx``, else its default."""
    body = _mapping(answer)
    info = _mapping(body.get("model_info"))
    trained = next((sensible_tokens(value) for key, value in info.items() if key.endswith(".context_length")), None)
    parameters = body.get("parameters")
    stated = _NUM_CTX.search(parameters[:65_536]) if isinstance(parameters, str) else None
    if stated is None and trained is None:
        return None
    allotted = sensible_tokens(int(stated.group(1))) if stated else OLLAMA_DEFAULT
    window = min(each for each in (allotted, trained) if each is not None) if allotted or trained else None
    return ModelFacts(window=window, source="upstream")


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _price(value: object) -> float | None:
    """OpenRouter writes dollars per token as text; negative means that it depends."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        price = float(value)
    except ValueError:
        return None
    return price if 0 <= price < 1 else None
