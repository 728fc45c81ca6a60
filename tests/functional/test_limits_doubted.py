"""A window that an upstream names and that was passed before."""

from pathlib import Path

from proxy.runtime import Runtime
from tests.functional.harness import prose, weir
from tests.functional.scripted import Asked, Reply, scripted, whole
from tests.functional.test_limits_of_every_kind import Talk, answer_of, refusal_of, tokens_in

WIDE = 32_000
SMALL = 6_000
MINUTES = 60.0


class Router:
    """Behind one model name an upstream of a wide window, and in the requests of these numbers one of a small one."""

    def __init__(self, endpoint: str, small: set[int]) -> None:
        self.endpoint = endpoint
        self.small = small
        self.count = 0
        self.sent: list[int] = []

    def __call__(self, asked: Asked) -> Reply:
        if not asked.body:
            return whole({"object": "list", "data": []})
        self.count += 1
        tokens = tokens_in(asked)
        window = SMALL if self.count in self.small else WIDE
        if tokens > window:
            said = (
                f"This model's maximum context length is {window} tokens. However, your messages resulted in {tokens}"
            )
            if self.endpoint == "messages":
                return refusal_of(self.endpoint, f"prompt is too long: {tokens} tokens > {window} maximum")
            return refusal_of(self.endpoint, f"{said} tokens.", code="context_length_exceeded")
        self.sent.append(tokens)
        return whole(answer_of(self.endpoint, prompt=tokens))


def windows_of(runtime: Runtime) -> list[int]:
    return [row.limit for row in runtime.limits_resolver.learned() if row.kind == "tokens"]


async def read_parts(talk: Talk, steps: int, *, words: int = 400) -> None:
    for _ in range(steps):
        talk.says(prose(words, seed=len(talk.history)))
        await talk.ask()


async def test_a_window_that_is_named_again_is_believed_for_ten_minutes(tmp_path: Path) -> None:
    router = Router("chat", {20, 22})
    async with scripted(router) as upstream, weir(upstream.base_url, tmp_path / "w.db", window=WIDE) as target:
        at = [1_000_000.0]
        target.runtime.limits_resolver.clock = lambda: at[0]
        for number in range(2):
            talk = Talk(target, "chat", first=f"Read all parts, {number}.")
            talk.says(prose(8_000, seed=number))
            await read_parts(talk, 1)
            router.small = {router.count + 1}
            await read_parts(talk, 1)
        assert windows_of(target.runtime) == [SMALL]
        believed = Talk(target, "chat", first="Read them once more.")
        believed.says(prose(6_500, seed=9))
        await believed.ask()
        assert router.sent[-1] < SMALL
        at[0] += 10 * MINUTES + 1
        assert windows_of(target.runtime) == []
        other = Talk(target, "chat", first="Read them a last time.")
        other.says(prose(8_000, seed=10))
        await other.ask()
        assert router.sent[-1] > SMALL
        assert {*talk.statuses, *believed.statuses, *other.statuses} == {200}
