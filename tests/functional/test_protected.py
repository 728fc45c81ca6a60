"""What may never change: after ten compactions it still goes up byte for byte, and no array is ever malformed."""

import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from policies.strategies.layers import STRATEGIES
from proxy.wire.codec import CHAT
from proxy.wire.raw import split_array, split_object
from tests.functional.harness import (
    ALONE,
    COUNTER,
    NOTHING_RECALLED,
    TOOLS,
    Deployment,
    answered,
    opening,
    prose,
    ruled,
    weir,
)
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

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


@ALONE
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
    """The protected messages are in ``array`` as the client wrote them, in the order in which it wrote them.

    A user's may have been joined with another of his that it came to follow.
    """
    assert array[:2] == client_side[:2], "system rules and task"
    late = next(raw for raw in client_side if LATE_RULE.encode() in raw)
    assert is_in(array, late)
    for message in kept:
        raw = next(r for r in client_side if json.loads(r) == message)
        assert is_in(array, CHAT.unmarked(raw) if "weir" in message else raw)
    assert is_in(array, client_side[-4]), "the newest question"
    assert array[-3:] == client_side[-3:], "the step that nobody has read"
    known = [client_side.index(raw) for raw in array if raw in client_side]
    assert known == sorted(known)
    waiting: list[str] = []
    for message in map(json.loads, array):
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting, "an unanswered call followed by something else"
        waiting = [call["id"] for call in message.get("tool_calls") or ()]


def is_in(array: list[bytes], raw: bytes) -> bool:
    """Whether a message is there, by itself or as a part of another of the user's."""
    message = json.loads(raw)
    wanted = parts_of(message)
    for each in map(json.loads, array):
        there = parts_of(each)
        if message["role"] == each["role"] == "user" and all(part in there for part in wanted):
            return True
        both = isinstance(message["content"], str) and isinstance(each["content"], str)
        if both and message["role"] == each["role"] == "user" and message["content"] in each["content"].split("\n\n"):
            return True
    return raw in array


def parts_of(message: dict[str, Any]) -> list[Any]:
    """The parts of a message's content."""
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


LOW: Mapping[str, Any] = {"at": 0.2, "stop_at": 0.02, "min_savings": 0}
"""A layer that begins far below the window, so that no rung works beside it, and may never do enough."""
ALONE: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "ingest_cap": ("ingest_cap", LOW, {"ingest": {"cap": 200}}),
    "dedupe": ("dedupe", LOW, {}),
    "evict": ("evict", LOW, {}),
    "prune": ("prune", {**LOW, "params": {"protect": 0, "minimum": 100, "skip_turns": 0}}, {}),
    "prune_tools": ("prune_tools", LOW, {"buckets": {"tools": {"cap": 200}}}),
    "reasoning": ("reasoning", LOW, {}),
    "media": ("media", LOW, {}),
    "truncate_largest": ("truncate", {**LOW, "params": {"floor": 64}}, {}),
    "semantic_merge": ("semantic_merge", LOW, {}),
    "window": ("sliding_window", {**LOW, "params": {"messages": 2}}, {}),
    "drop_oldest": ("drop_oldest", LOW, {}),
    "custom": ("custom", {**LOW, "params": {"path": "greedy_layer:nothing", "seconds": 20}}, {}),
    "summarize_tool_result": ("summarize_tool_result", {**LOW, "params": {"over": 200}}, {}),
    "progressive": ("progressive", LOW, {}),
    "compact": ("compact", LOW, {}),
    "delegate": ("delegate", {**LOW, "params": {"least": 200}}, {}),
    "rollover": ("rollover", {"at": 0.24, "stop_at": 0.235}, {}),
}
"""For each layer what it is called among the actions, how it is configured, and what the policy says beside it."""
GREEDY = """
def nothing(messages, budget):
    return [{**m, "content": "x"} if m["role"] in ("user", "tool") else m for m in messages]
"""
UNUSED = [
    {"type": "function", "function": {"name": f"unused_{n}", "description": prose(60, seed=n), "parameters": {}}}
    for n in range(12)
]
VAULT = {"type": "function", "function": {"name": "read_vault", "description": prose(60, seed=99), "parameters": {}}}


@pytest.fixture
def greedy(tmp_path: Path) -> Iterator[None]:
    """An operator's function that leaves nothing as it was."""
    (tmp_path / "greedy_layer.py").write_text(GREEDY)
    sys.path.append(str(tmp_path))
    yield
    sys.path.remove(str(tmp_path))


def seen_with(text: str, *, seed: int, **more: Any) -> dict[str, Any]:
    """A user message with a picture."""
    url = "data:image/png;base64," + Random(seed).randbytes(3_000).hex()
    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}], **more}


def thought_step(name: str, tool: str, text: str, **more: Any) -> list[dict[str, Any]]:
    """A call that the model has thought about, and its result, which may be kept."""
    function = {
        "name": tool,
        "arguments": json.dumps({"path": "kv/staging/42"} if tool == "read_vault" else {"of": name}),
    }
    call = {"id": name, "type": "function", "function": function}
    thought = {"reasoning_content": prose(40, seed=hash_of(name)), "content": "I look.", "tool_calls": [call]}
    return [{"role": "assistant", **thought}, {"role": "tool", "tool_call_id": name, "content": text, **more}]


def tempting() -> list[dict[str, Any]]:
    """A history in which what is protected is the oldest, the largest, repeated later, thought about and illustrated."""
    secret = prose(700, seed=3)
    messages = [*opening(seed=60), *thought_step("v1", "read_vault", secret, weir={"keep": True})]
    nobody_uses = " ".join("".join(rng.choices("bdfgklmnprstz", k=9)) for rng in [Random(7)] for _ in range(80))
    messages += thought_step("v0", "read_ledger", nobody_uses, weir={"keep": True})
    messages.append({"role": "system", "content": LATE_RULE})
    messages.append(seen_with(KEPT + prose(120, seed=4), seed=1, weir={"keep": True}))
    messages.append({"role": "assistant", "content": prose(60, seed=5), "reasoning_content": prose(40, seed=6)})
    messages.append({"role": "user", "content": WORD})
    for n in range(6):
        messages += thought_step(f"c{n}", "read_file", prose(260, seed=20 + n // 2))
        messages.append(
            {"role": "assistant", "content": prose(90, seed=40 + n), "reasoning_content": prose(40, seed=n)}
        )
        messages.append(seen_with(prose(90, seed=60 + n), seed=10 + n))
    messages += thought_step("v2", "read_vault", secret)
    messages.append({"role": "assistant", "content": prose(60, seed=80), "reasoning_content": prose(40, seed=81)})
    messages.append({"role": "user", "content": prose(80, seed=82)})
    return [*messages, *parallel_step(999)]


@pytest.mark.requirement("S.22", "A0.38", "P3")
@pytest.mark.parametrize("layer", STRATEGIES)
@pytest.mark.usefixtures("greedy")
async def test_no_layer_touches_what_is_protected_however_much_it_is_to_save(layer: str, tmp_path: Path) -> None:
    action, configured, beside = ALONE[layer]
    rules = {"preset": "balanced", "cascade": [{"layer": layer, **configured}], **NOTHING_RECALLED, **beside}
    rules |= {"summarizer": "summariser", "summaries": {"prepare_at": None, "wait": 20}, "preempt": False}
    sent: list[bytes] = []

    async def note(request: httpx.Request) -> None:
        sent.append(request.content)

    settings = SimulatorSettings(window=32_768, summary_model="summariser")
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir("", yaml=ruled(simulator.base_url, rules, window=32_768), folder=tmp_path, window=None) as target,
        httpx.AsyncClient(event_hooks={"request": [note]}, timeout=60) as http,
    ):
        messages, tools = tempting(), [*UNUSED, VAULT, *TOOLS]
        client = target.client(http_client=http)
        raw = await client.chat.completions.with_raw_response.create(
            model="sim", messages=messages, max_tokens=512, tools=tools
        )
        (forwarded,) = answered(simulator)
    actions = dict(each.split("=") for each in raw.headers["x-weir-actions"].split(","))
    assert set(actions) == {action}
    array, client_side = raw_messages(forwarded.body), raw_messages(sent[0])
    assert array != client_side or layer == "prune_tools"
    check(array, client_side, [m for m in messages if "weir" in m or m["content"] == WORD])
    step = client_side.index(next(r for r in client_side if b'"v1"' in r))
    assert client_side[step] in array, "the call of a kept result, with what was thought about it"
    left = [bytes(each) for each in split_array(split_object(forwarded.body)["tools"]) or ()]
    given = [bytes(each) for each in split_array(split_object(sent[0])["tools"]) or ()]
    assert [each for each in given if each in left] == left
    assert set(given[-2:]) <= set(left), "tools whose calls are in the history"
