"""What one key may take at once, so that others are served beside it, and how often an address may guess at keys."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from proxy.access.admission import FORGET, MAX_ADDRESSES, MAX_SECONDS, MAX_WRONG, MINUTE, Admission, AuthThrottle
from proxy.access.destination import Caller
from proxy.config.values import LimitSettings
from proxy.errors import Busy, InvalidAPIKey, RateLimited
from tests.functional.harness import COUNTER, RunningWeir, WeirProcess, opening, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

CONFIG = """
upstreams: {{main: {{base_url: "{upstream}", api_key: sk-operator}}}}
auth: {{mode: keys, admin_token: {admin}}}
keys: [{{name: greedy, secret: key-of-greedy}}, {{name: modest, secret: key-of-modest}}]
window: 8192
store: {{url: "sqlite+aiosqlite:///{store}"}}
limits: {{{limits}}}
"""
GREEDY, MODEST, ADMIN = "key-of-greedy", "key-of-modest", "admin-0123456789"


def configured(tmp_path: Path, upstream: str, limits: str = "") -> str:
    return CONFIG.format(upstream=upstream, admin=ADMIN, store=tmp_path / "w.db", limits=limits)


@asynccontextmanager
async def serving(tmp_path: Path, upstream: str, limits: str = "") -> AsyncIterator[RunningWeir]:
    yaml = configured(tmp_path, upstream, limits)
    async with weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target:
        yield target


@asynccontextmanager
async def held_upstream() -> AsyncIterator[tuple[str, list[bytes], asyncio.Event]]:
    """An upstream that answers once it is let, and the heads of what has reached it."""
    seen, release = list[bytes](), asyncio.Event()
    answer = json.dumps({"id": "a", "object": "chat.completion", "model": "sim", "created": 1, "data": [], "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}]}).encode()  # fmt: skip

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        await release.wait()
        framing = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(answer)
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**22)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", seen, release
    finally:
        release.set()
        server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def ask(target: RunningWeir | WeirProcess, key: str, route: str = "chat") -> Awaitable[Any]:
    client = target.client(key)
    if route == "chat":
        return client.chat.completions.create(model="sim", messages=opening())  # type: ignore[no-any-return]
    return client.embeddings.create(model="sim", input="x", encoding_format="float")  # type: ignore[no-any-return]


@pytest.mark.requirement("S.14", "R.5")
async def test_one_key_has_so_many_requests_at_once_and_the_others_are_served_beside_it(tmp_path: Path) -> None:
    async with (
        held_upstream() as (address, seen, release),
        serving(tmp_path, address, "concurrency_per_key: 2") as target,
    ):
        open_ = [asyncio.ensure_future(ask(target, GREEDY, route)) for route in ("chat", "embeddings")]
        await until(lambda: len(seen) == 2)
        for route in ("chat", "embeddings"):
            with pytest.raises(openai.RateLimitError) as refused:
                await asyncio.wait_for(ask(target, GREEDY, route), 60)
            assert refused.value.code == "rate_limit_exceeded"
            assert "limits.concurrency_per_key" in refused.value.message
            assert refused.value.response.headers["retry-after"] == "1"
        assert len(seen) == 2, "nothing of it went up"
        beside = asyncio.ensure_future(ask(target, MODEST))
        await until(lambda: len(seen) == 3)
        release.set()
        await asyncio.gather(*open_, beside)
        await ask(target, GREEDY)


@pytest.mark.requirement("S.14", "R.28")
async def test_bytes_wait_for_room_and_are_refused_where_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.access.admission.PATIENCE", 0.05)
    admission = Admission(LimitSettings(bytes_in_flight=100, bytes_in_flight_per_key=60))
    one, two, other, last = (admission.enter(Caller(tenant=t)) for t in "aabc")
    await one.hold(50)
    with pytest.raises(RateLimited) as of_key:
        await two.hold(20)
    assert (of_key.value.status, of_key.value.retry_after) == (429, 1)
    await other.hold(50)
    with pytest.raises(Busy):
        await last.hold(1)
    monkeypatch.setattr("proxy.access.admission.PATIENCE", 30.0)
    waiting = asyncio.create_task(two.hold(60))
    await asyncio.sleep(0)
    assert not waiting.done()
    admission.leave(other)
    await asyncio.sleep(0)
    assert not waiting.done(), "there is room, and none for this key"
    admission.leave(one)
    await asyncio.wait_for(waiting, 60)
    cancelled = asyncio.create_task(last.hold(90))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    admission.leave(two)
    await last.hold(1_000), "what is alone has room"
    admission.leave(last)
    assert not vars(admission)["_inside"]
    assert admission.held == 0


@pytest.mark.requirement("P7", "S.29")
async def test_who_guesses_keys_is_held_off_and_a_right_key_is_not(tmp_path: Path) -> None:
    async with (
        serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator,
        serving(tmp_path, simulator.base_url) as target,
        aiohttp.ClientSession() as session,
    ):

        async def guess(number: int, where: str) -> tuple[int, str | None, str]:
            headers = {"authorization": f"Bearer guess-{number:06}"}
            method = "POST" if where.startswith("/v1") else "GET"
            async with session.request(method, target.root + where, headers=headers, json={}) as answer:
                return answer.status, answer.headers.get("retry-after"), (await answer.json())["error"]["code"]

        routes = ("/v1/chat/completions", "/v1/embeddings", "/weir/conversations", "/weir/config")
        found = [await guess(number, routes[number % 4]) for number in range(60)]
        assert [status for status, _, _ in found[:MAX_WRONG]] == [401] * MAX_WRONG
        assert {(status, code) for status, _, code in found[MAX_WRONG:]} == {(429, "rate_limit_exceeded")}
        assert all(int(after or 0) >= 1 for _, after, _ in found[MAX_WRONG:])
        await ask(target, MODEST)
        async with session.get(f"{target.root}/weir/config", headers={"authorization": f"Bearer {ADMIN}"}) as answer:
            assert answer.status == 200
        async with session.post(f"{target.base_url}/chat/completions", json={}) as answer:
            assert answer.status == 401, "no key is no guess"
        async with session.get(f"{target.root}/metrics") as answer:
            page = await answer.text()
        assert 'weir_unauthorised_total{weir_reason="unknown"} 10' in page
        assert 'weir_unauthorised_total{weir_reason="held_off"} 50' in page
        assert 'weir_unauthorised_total{weir_reason="missing"} 1' in page


def test_an_address_waits_longer_each_time_and_is_forgotten_in_the_end() -> None:
    now = [0.0]
    auth_throttle = AuthThrottle(clock=lambda: now[0])

    def waits(address: str = "192.0.2.1") -> int:
        found = auth_throttle.answer({"client": (address, 1)}, InvalidAPIKey("wrong"))
        return found.retry_after or 0

    assert [waits() for _ in range(MAX_WRONG)] == [0] * MAX_WRONG
    told = []
    for _ in range(10):
        told.append(waits())
        assert waits() == told[-1], "it does not grow while it lasts"
        now[0] += told[-1]
    assert told[:4] == [2, 4, 8, 16]
    assert told[-1] == MAX_SECONDS
    assert waits("192.0.2.2") == 0
    now[0] += FORGET + 1
    assert waits() == 0
    for _ in range(5 * MAX_WRONG):
        now[0] += MINUTE / MAX_WRONG + 1
        assert waits("192.0.2.3") == 0, "a client that is set up wrongly and asks now and then"
    assert [waits(f"2001:db8::{n:x}") for n in range(MAX_WRONG + 1)] == [0] * MAX_WRONG + [2]
    assert [waits(f"::ffff:198.51.100.{n}") for n in range(MAX_WRONG + 1)] == [0] * (MAX_WRONG + 1)
    for number in range(2 * MAX_ADDRESSES):
        waits(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(auth_throttle._guessers) == MAX_ADDRESSES


@pytest.mark.requirement("P7")
def test_a_key_begins_no_more_than_its_requests_in_any_minute() -> None:
    now = 0.0
    admission = Admission(LimitSettings(), clock=lambda: now)
    slow, free = Caller(tenant="a", requests_per_minute=2), Caller(tenant="b")

    def begins(caller: Caller) -> bool:
        try:
            with admission.enter(caller):
                return True
        except RateLimited as error:
            waits.append(error.retry_after)
            return False

    came, waits = [], list[int]()
    for now in (0.0, 30.0, 45.0, 59.0, 60.0, 61.0, 90.0):  # noqa: B007 - the clock reads it
        came.append(begins(slow))
    assert came == [True, True, False, False, True, False, True]
    assert waits == [15, 1, 29]
    assert all(begins(free) for _ in range(100))


async def test_what_a_key_may_not_ask_for_counts_for_nothing_within_its_minute(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        yaml = (
            f"upstreams: {{main: {{base_url: '{simulator.base_url}', api_key: sk-1}}}}\nauth: {{mode: keys}}\n"
            "keys: [{name: slow, secret: sk-of-the-slow, models: [sim], requests_per_minute: 1}]\n"
        )
        headers = {"authorization": "Bearer sk-of-the-slow"}
        async with weir("", yaml=yaml, folder=tmp_path) as target, httpx.AsyncClient(headers=headers) as http:
            statuses = []
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                for model in ("gpt-5", "sim"):
                    body = {"model": model, "messages": opening(), "input": "Hello.", "max_tokens": 16}
                    statuses.append((await http.post(f"{target.root}{path}", json=body)).status_code)
    assert statuses == [403, 200, 429, 429, 429, 429]
