"""The window that a request says its model has, in what Weir answers."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.functional.harness import weir
from tests.functional.scripted import Asked, Reply, completion, scripted, whole

BETA = {"anthropic-beta": "interleaved-thinking-2025-05-14,context-1m-2025-08-07"}
OTHER_BETA = {"anthropic-beta": "interleaved-thinking-2025-05-14"}


def answer(asked: Asked) -> Reply:
    if asked.target.endswith("/chat/completions"):
        return whole(completion("ok"))
    if not asked.target.endswith("/messages"):
        return whole({}, status=404)
    usage = {"input_tokens": 10, "output_tokens": 5}
    content = [{"type": "text", "text": "ok"}]
    return whole({"id": "m", "type": "message", "role": "assistant", "content": content, "usage": usage})


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        scripted(answer) as upstream,
        weir(upstream.base_url, window=None) as target,
        httpx.AsyncClient(base_url=target.base_url, headers={"x-api-key": "sk-test"}) as http,
    ):
        yield http


async def limit(client: httpx.AsyncClient, model: str, path: str = "messages", **headers: str) -> int:
    asked = {"model": model, "max_tokens": 8_000, "messages": [{"role": "user", "content": "Read all the parts."}]}
    given = await client.post(f"/{path}", json=asked, headers=headers)
    assert given.status_code == 200, given.text
    said = dict(part.split("=") for part in given.headers["x-weir-tokens"].split(";"))
    return int(said["limit"])


@pytest.mark.parametrize(
    ("model", "headers", "window"),
    [
        ("claude-sonnet-4-5", {}, 200_000),
        ("claude-sonnet-4-5", OTHER_BETA, 200_000),
        ("claude-sonnet-4-5", BETA, 1_000_000),
        ("claude-sonnet-4-20250514", BETA, 1_000_000),
        ("claude-sonnet-4-5[1m]", {}, 1_000_000),
        ("claude-opus-4-8[1M]", OTHER_BETA, 1_000_000),
        ("sonnet[1m]", {}, 1_000_000),
        ("claude-opus-latest", {}, 1_000_000),
        ("~anthropic/claude-opus-latest", {}, 1_000_000),
        ("claude-3-5-sonnet-latest", {}, 200_000),
    ],
    ids=str,
)
async def test_a_model_has_the_window_that_the_request_says(
    client: httpx.AsyncClient, model: str, headers: dict[str, str], window: int
) -> None:
    assert 0.90 * window < await limit(client, model, **headers) < window
