"""A request leaves nothing that only the garbage collector finds: a served Weir lets it look seldom."""

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator

import openai
import pytest

from proxy.upstream.connection import PooledConnection
from tests.functional.harness import Talk, opening, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted, whole

pytestmark = pytest.mark.slow

ROUNDS = 8
HOLDS_A_REQUEST = ("proxy.", "policies.")
AIOHTTPS_OWN = (PooledConnection,)
"""A connection that breaks and its answer hold each other, in aiohttp; neither holds a body."""


@contextlib.contextmanager
def garbage() -> Iterator[list[object]]:
    """What became garbage meanwhile and did not go by itself."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    found: list[object] = []
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def left(found: list[object], *, broken: bool) -> Counter[str]:
    kinds = [type(each) for each in found if not (broken and isinstance(each, AIOHTTPS_OWN))]
    return Counter(f"{k.__module__}.{k.__qualname__}" for k in kinds if k.__module__.startswith(HOLDS_A_REQUEST))


@pytest.mark.parametrize("ends", ["whole", "streamed", "refused by the upstream", "refused by Weir", "broken off"])
async def test_a_request_leaves_no_cycle_behind(ends: str) -> None:
    def say(asked: Asked) -> Reply:
        if ends == "refused by the upstream":
            return whole({"error": {"message": "no", "type": "server_error", "code": "no"}}, status=500)
        if ends == "broken off":
            return Reply([b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"])
        return as_asked(asked, completion("Done."))

    async with scripted(say) as upstream, weir(upstream.base_url) as running:
        client = running.client()
        messages = opening() + [{"role": "user", "content": "word " * 20_000}] * (ends == "refused by Weir")

        async def ask() -> None:
            talk = Talk(client, messages=messages)
            with contextlib.suppress(openai.APIError):
                if ends == "streamed":
                    stream = await client.chat.completions.create(model="sim", messages=messages, stream=True)
                    assert [chunk async for chunk in stream]
                else:
                    await talk.ask()

        await ask()
        with garbage() as found:
            for _ in range(ROUNDS):
                await ask()
            await running.stored()
    counted = left(found, broken=ends == "broken off")
    assert {kind: count for kind, count in counted.items() if count >= ROUNDS} == {}
