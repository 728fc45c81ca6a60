"""What may never change: after ten compactions it still goes up byte for byte, and no array is ever malformed."""

import json
import zlib
from typing import Any

import httpx
import pytest

from proxy.simulator.app import serve_simulator
from proxy.simulator.model import SimulatorSettings
from proxy.wire.codec import CHAT
from proxy.wire.raw import split_array, split_object
from tests.functional.harness import COUNTER, EITHER, TOOLS, Deployment, answered, opening, prose

COMPACTIONS = 10
RULE = "Never touch the directory legacy/. Answer in English. " + prose(20, seed=50)
LATE_RULE = "From now on every commit message begins with the ticket number. " + prose(10, seed=51)
KEPT = "The staging password lives in vault path kv/staging/42. " + prose(30, seed=52)
WORD = "DO_NOT_EVICT the release is on 2026-12-01. " + prose(20, seed=53)


def parallel_step(number: int) -> list[dict[str, Any]]:
    """An assistant message with two calls, and their results."""
    names = (f"call_{number}_a", f"call_{number}_b")
    calls = [
        {
            "id": i,
            "type": "function",
            "function": {"name": "read_file", "arguments": json.dumps({"path": f"src/{i}.py"})},
        }
        for i in names
    ]
    results = [{"role": "tool", "tool_call_id": i, "content": prose(60, seed=hash_of(i))} for i in names]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


def hash_of(name: str) -> int:
    return zlib.crc32(name.encode())


def raw_messages(body: bytes) -> list[bytes]:
    raws = split_array(split_object(body)["messages"])
    assert raws is not None
    return [bytes(raw) for raw in raws]


@EITHER
@pytest.mark.requirement("A0.38", "P3", "P2", "R.55", "R.57", "S.22")
async def test_what_is_protected_is_forwarded_byte_for_byte_through_ten_compactions(deployment: Deployment) -> None:
    """Each round is a question, a step of two parallel calls, a request while it is open, and the answer."""
    sent: list[bytes] = []

    async def note(request: httpx.Request) -> None:
        sent.append(request.content)

    messages = opening(seed=60)
    messages[0]["content"] = RULE
    cuts: list[str] = []
    kept: list[dict[str, Any]] = []
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url) as target,
        httpx.AsyncClient(event_hooks={"request": [note]}, timeout=60) as http,
    ):
        client = target.client(http_client=http)
        for number in range(200):
            if number == 2:
                messages.append({"role": "system", "content": LATE_RULE})
            if number in (1, 30):
                kept.append({"role": "user", "content": f"{number} {KEPT}", "weir": {"keep": True}})
                messages += [kept[-1], {"role": "assistant", "content": f"Noted {number}."}]
            if number == 3:
                kept.append({"role": "user", "content": WORD})
                messages += [kept[-1], {"role": "assistant", "content": "I shall keep it."}]
            messages.append({"role": "user", "content": prose(70, seed=5_000 + number)})
            messages += parallel_step(number)
            if number % 3 == 0 and number >= 9:
                await client.chat.completions.create(model="sim", messages=messages, max_tokens=512, tools=TOOLS)
                forwarded = answered(simulator)[-1]
                array = raw_messages(forwarded.body)
                client_side = raw_messages(sent[-1])
                assert forwarded.status == 200
                check(array, client_side, kept)
                texts = [json.loads(raw)["content"] for raw in array]
                cuts += [t for t in texts if isinstance(t, str) and "Written by Weir" in t and t not in cuts]
            messages.append({"role": "assistant", "content": prose(60, seed=9_000 + number)})
            if len(cuts) == COMPACTIONS:
                break
    assert len(cuts) == COMPACTIONS


def check(array: list[bytes], client_side: list[bytes], kept: list[dict[str, Any]]) -> None:
    """The protected messages are in ``array`` as the client wrote them, in the order in which it wrote them."""
    assert array[:2] == client_side[:2], "system rules and task"
    late = next(raw for raw in client_side if LATE_RULE.encode() in raw)
    assert late in array
    for message in kept:
        raw = next(r for r in client_side if json.loads(r) == message)
        assert (CHAT.unmarked(raw) if "weir" in message else raw) in array
    assert array[-4:] == client_side[-4:], "the newest question and the step that nobody has read"
    known = [client_side.index(raw) for raw in array if raw in client_side]
    assert known == sorted(known)
    waiting: list[str] = []
    for message in map(json.loads, array):
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting, "an unanswered call followed by something else"
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
