"""The endpoints that answer without a model: lists, properties, token counts, embeddings."""

import base64
import json
import math
import re
import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from proxy.simulator.settings import Dialect, Request, SimulatorSettings
from proxy.simulator.window import Count

DIMENSIONS = 32
TRAINED_WINDOW = 131_072
_WORD = re.compile(r"\w+")


def model_card(name: str, settings: SimulatorSettings) -> Mapping[str, Any]:
    """One entry of ``GET /v1/models`` with what the dialect says about the window."""
    window = settings.window_of(name)
    if settings.dialect is Dialect.ANTHROPIC:
        return {"type": "model", "id": name, "display_name": name, "created_at": "2025-01-01T00:00:00Z"}
    card: dict[str, Any] = {"id": name, "object": "model", "created": 1_735_689_600, "owned_by": "simulator"}
    if settings.dialect is Dialect.VLLM:
        card |= {"root": name, "parent": None, "max_model_len": window, "permission": []}
    if settings.dialect is Dialect.LLAMACPP:
        trained = max(window, TRAINED_WINDOW)
        card["meta"] = {"n_ctx": window, "n_ctx_train": trained, "n_vocab": 32_000, "n_params": 1, "size": 1}
    return card


def list_models(settings: SimulatorSettings) -> Mapping[str, Any]:
    """The body of ``GET /v1/models``."""
    names = tuple(dict.fromkeys((*settings.models, *settings.windows)))
    cards = [model_card(name, settings) for name in names]
    if settings.dialect is Dialect.ANTHROPIC:
        return {"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": cards}


def server_properties(settings: SimulatorSettings) -> Mapping[str, Any]:
    """The body of llama.cpp's ``GET /props``, as far as clients read it."""
    return {
        "default_generation_settings": {"n_ctx": settings.window, "id": 0, "is_processing": False},
        "total_slots": 1,
        "model_path": settings.models[0],
        "chat_template": "",
    }


def tokenize(request: Request, settings: SimulatorSettings, count: Count) -> Mapping[str, Any]:
    """The body of ``POST /tokenize``: vLLM's fields and llama.cpp's; the ids are running numbers."""
    text = request.get("content") or request.get("prompt") or ""
    size = count(str(text)) if text else 0
    return {"count": size, "max_model_len": settings.window, "tokens": list(range(size))}


def embed(request: Request, count: Count) -> Mapping[str, Any]:
    """The body of ``POST /v1/embeddings``: words hashed into unit vectors, so that texts sharing words are near."""
    given = request.get("input")
    texts = [str(item) for item in given] if isinstance(given, list) else [str(given or "")]
    size = request.get("dimensions")
    size = size if isinstance(size, int) and size > 0 else DIMENSIONS
    packed = request.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if packed else vector}
        for index, vector in enumerate(embedding(text, size) for text in texts)
    ]
    tokens = sum(count(text) for text in texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.get("model"), "usage": usage}


def embedding(text: str, size: int = DIMENSIONS) -> list[float]:
    """A unit vector of ``size`` numbers that depends on the words of ``text`` alone."""
    vector = [0.0] * size
    for word in _WORD.findall(text.lower()) or [text]:
        digest = blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        vector[int.from_bytes(digest[:4], "big") % size] += 1.0 if digest[4] & 1 else -1.0
    norm = math.sqrt(sum(value * value for value in vector))
    return [value / norm for value in vector] if norm else [1.0, *vector[1:]]


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def encoded(value: Any) -> bytes:
    """JSON as these endpoints send it."""
    return json.dumps(value).encode()
