"""What a client, an operator and the upstream see of each subsystem: served without one, told on every answer, counted."""

import re
import sqlite3
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.store.packing import Packed, unpack, unpack_message, unpack_text
from proxy.wire.counting import count_message, count_tools
from tests.functional.harness import COUNTER, EVICTING, TOOLS, RunningWeir, Talk, answered, arrays_of, prose, weir
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

WINDOW, MAX_TOKENS = 8_192, 512
TOKENS = re.compile(r"before=~?(\d+);after=~?(\d+);limit=(\d+)")
PRESSURE = re.compile(r"\d+\.\d\d;(green|yellow|orange|red|critical);(healthy|preparing|active|emergency)")


@pytest.fixture
async def upstream() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        yield simulator


def tokens_of(headers: Mapping[str, str]) -> tuple[int, int, int]:
    """Tokens before and after, and the limit, as an answer says them."""
    found = TOKENS.fullmatch(headers["x-weir-tokens"])
    assert found is not None, headers["x-weir-tokens"]
    before, after, limit = (int(n) for n in found.groups())
    return before, after, limit


def pressure_of(headers: Mapping[str, str]) -> tuple[str, str]:
    """Zone and status as an answer says them."""
    found = PRESSURE.fullmatch(headers["x-weir-pressure"])
    assert found is not None, headers["x-weir-pressure"]
    return found.group(1), found.group(2)


async def metrics_of(target: RunningWeir) -> dict[str, float]:
    """Every sample of ``/metrics`` by name and own labels."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{target.root}/metrics")).text
    found = dict[str, float]()
    for name, labels, value in re.findall(r"^(\w+)(\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        own = sorted(part for part in labels.strip("{}").split(",") if part and not part.startswith("otel_"))
        found[name + ("{" + ",".join(own) + "}" if own else "")] = float(value)
    return found


def filled(share: float, *, kind: str) -> list[dict[str, Any]]:
    """Messages that fill so much of the window, an answer or a tool result last."""
    talk = Talk(client=None)
    used = count_tools(TOOLS, None, None, COUNTER, model="sim")
    while used + sum(count_message(m, COUNTER, model="sim") for m in talk.messages) < share * WINDOW - 600:
        talk.grow(1, kind=kind)
    missing = share * WINDOW - used - sum(count_message(m, COUNTER, model="sim") for m in talk.messages)
    role = {"role": "assistant"} if kind == "chat" else {"role": "user"}
    words = prose(900, seed=77).split()
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        size = count_message({**role, "content": " ".join(words[:middle])}, COUNTER, model="sim")
        low, high = (middle, high) if size <= missing else (low, middle - 1)
    talk.messages.append({**role, "content": " ".join(words[:low])})
    if kind == "agent":
        talk.messages.append({"role": "assistant", "content": "Done."})
    return talk.messages


@pytest.mark.requirement("A1.3", "A1.1")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "agent"])
async def test_at_99_percent_of_the_window_a_new_task_is_accepted_and_succeeds(
    kind: str, stream: bool, upstream: RunningSimulator
) -> None:
    history = filled(0.99, kind=kind)
    task = "A new task: rename the module src/billing/ledger.ts to src/billing/journal.ts everywhere."
    messages = [*history, {"role": "user", "content": task}]
    direct: Any = openai.AsyncOpenAI(base_url=upstream.base_url, api_key="sk-test", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await direct.chat.completions.create(model="sim", messages=messages, max_tokens=MAX_TOKENS, tools=TOOLS)
    await direct.close()
    upstream.forget()

    async with weir(upstream.base_url) as target:
        raw = await target.client().chat.completions.with_raw_response.create(
            model="sim", messages=messages, max_tokens=MAX_TOKENS, tools=TOOLS, stream=stream
        )
        said = raw.parse()
        finish = [c.choices[0].finish_reason async for c in said][-1] if stream else said.choices[0].finish_reason
    before, after, limit = tokens_of(raw.headers)
    assert finish == "stop"
    assert 0.99 * WINDOW - 10 <= before <= WINDOW + 40
    assert pressure_of(raw.headers)[1] == "active"
    (seen,) = answered(upstream)
    assert seen.json()["messages"][-1] == messages[-1]
    assert seen.prompt_tokens + MAX_TOKENS <= WINDOW
    assert after <= limit


FIVE = ("x-weir-conversation", "x-weir-tokens", "x-weir-pressure", "x-weir-actions", "x-weir-overhead-ms")


def check_headers(headers: Mapping[str, str]) -> None:
    """Check that an answer says everything about its request."""
    assert {name for name in headers if name.startswith("x-weir-")} == set(FIVE)
    assert headers["x-request-id"]
    before, after, limit = tokens_of(headers)
    zone, _ = pressure_of(headers)
    assert after <= before
    assert limit == WINDOW - MAX_TOKENS - int(0.05 * WINDOW)
    assert (after / limit >= 0.95) == (zone == "critical")
    assert float(headers["x-weir-overhead-ms"]) > 0


@pytest.mark.requirement("A1.12", "A0.134")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["", "429:7", "500", "503"])
async def test_every_answer_says_how_full_the_window_was_and_what_was_done(
    fault: str, stream: bool, upstream: RunningSimulator
) -> None:
    found: list[Mapping[str, str]] = []
    async with weir(upstream.base_url) as target, httpx.AsyncClient(timeout=30) as http:
        talk = Talk(client=None)
        for size in (2, 18):
            talk.grow(size, kind="agent")
            body = {"model": "sim", "messages": talk.messages, "max_tokens": MAX_TOKENS, "tools": TOOLS}
            answer = await http.post(
                f"{target.base_url}/chat/completions",
                json={**body, "stream": stream},
                headers={"authorization": "Bearer sk-test", **({"x-sim-fault": fault} if fault else {})},
            )
            assert answer.status_code == (int(fault[:3]) if fault[:1].isdigit() else 200)
            found.append(answer.headers)
    for headers in found:
        check_headers(headers)
    assert found[0]["x-weir-actions"] == "none"
    assert [tokens_of(h)[0] > tokens_of(h)[1] for h in found] == [h["x-weir-actions"] != "none" for h in found]
    assert pressure_of(found[0])[1] == "healthy"
    assert pressure_of(found[-1])[1] == "active"


@pytest.mark.requirement("A0.2", "A1.14", "A0.141", "A4.16")
async def test_the_tokens_saved_in_fifty_steps_are_those_that_the_upstream_was_not_sent(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    async with weir(upstream.base_url, tmp_path / "w.db") as target:
        talk, raw = Talk(target.client()), 0
        own = count_tools(TOOLS, None, None, COUNTER, model="sim")
        for _ in range(50):
            raw += own + sum(count_message(m, COUNTER, model="sim") for m in talk.messages)
            await talk.agent(1)
        metrics, rows = await metrics_of(target), await timeline_of(target, talk.headers[-1]["x-weir-conversation"])
    told = [tokens_of(h) for h in talk.headers]
    saved = sum(before - after for before, after, _ in told)
    assert saved == metrics['weir_tokens_total{weir_kind="saved"}'] > 0
    assert saved == sum(row["tokens_before"] - row["tokens_after"] for row in rows)
    sent = sum(seen.prompt_tokens for seen in answered(upstream))
    assert len(rows) == len(answered(upstream)) == 50
    assert saved == pytest.approx(raw - sent, rel=0.02)
    assert saved > 0.5 * raw
    for (_, after, _), seen in zip(told, answered(upstream), strict=True):
        assert after == pytest.approx(seen.prompt_tokens, rel=0.02, abs=16), (
            "what is told is what was in the forwarded body"
        )


async def timeline_of(target: RunningWeir, conversation: str) -> list[dict[str, Any]]:
    """The rows of a conversation, one a request."""
    await target.stored()
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
        found = await http.get(f"{target.root}/weir/conversations/{conversation}/timeline")
    return list(found.json()["data"])


@pytest.mark.requirement("A2.14", "A2.12", "A2.13")
@pytest.mark.parametrize(("believed", "refusals"), [(WINDOW, 0), (4 * WINDOW, 1)])
async def test_what_is_done_before_sending_and_what_is_done_after_a_refusal_are_counted_apart(
    believed: int, refusals: int, upstream: RunningSimulator
) -> None:
    async with weir(upstream.base_url, window=believed, balanced=EVICTING) as target:
        talk = Talk(target.client())
        talk.grow(14, kind="agent")
        await talk.agent(12)
        metrics = await metrics_of(target)
    refused = [s.status for s in answered(upstream)].count(400)
    assert refused == refusals
    assert metrics.get("weir_overflows_total", 0) == refusals
    assert metrics.get('weir_retries_total{weir_reason="overflow"}', 0) == refusals
    assert sum("retry=1" in action for action in talk.actions()) == refusals
    assert metrics['weir_actions_total{weir_layer="evict"}'] > 0
    batches = [a for a, b in zip(talk.actions()[1:], talk.actions(), strict=False) if a != b and "retry" not in b]
    assert batches, "later batches came before the upstream had to say anything"


@pytest.mark.requirement("A2.1", "A2.7")
async def test_a_summary_is_stored_apart_and_the_system_prompt_not_at_all(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    file, secret = tmp_path / "w.db", "The phrase of the system prompt is heliotrope-4417."
    async with weir(upstream.base_url, file, balanced={"inspect": {"requests": 0}}) as target:
        talk = Talk(target.client(), [{"role": "system", "content": secret}])
        await talk.chat(26)
    (*_, forwarded) = arrays_of(answered(upstream))
    assert forwarded[0] == talk.messages[0]
    (summary,) = [m["content"] for m in forwarded if "Written by Weir" in m["content"]]
    with sqlite3.connect(file) as database:
        texts = [unpack_text(row[0]) for row in database.execute("SELECT text FROM cuts ORDER BY version")]
        edits = [unpack_text(row[0]) for row in database.execute("SELECT text FROM edits")]
        roles = {row[0] for row in database.execute("SELECT DISTINCT role FROM originals")}
        frames = [row[0] for row in database.execute("SELECT body FROM frames")]
    database.close()
    packed = [each for frame in frames for each in unpack(frame, dict[str, Packed]).values()]
    bodies = b"".join(unpack_message(each)[0] for each in packed)
    assert texts[-1] == summary
    assert not [text for text in edits if "Written by Weir" in text]
    assert roles == {"user", "assistant"}
    assert talk.messages[1]["content"].encode() not in bodies, "the task never left the window"
    assert talk.messages[3]["content"].encode() in bodies
    assert b"heliotrope-4417" not in bodies
    assert b"heliotrope-4417" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.requirement("A3.4", "D10", "A2.18")
async def test_a_request_is_counted_by_characters_where_the_policy_says_so() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.ts"}'}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2_000_000}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s" * 400},
        {"role": "user", "content": [{"type": "text", "text": "u" * 403}, picture]},
        {"role": "assistant", "content": "a" * 40, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "r" * 9_999},
    ]
    calls = 10 + len("read_file") // 4 + len('{"path": "a.ts"}') // 4 + 4
    system, user, result, framing_of_call, priming = 100 + 4, 100 + 1_000 + 4, 2_499 + 4, 8, 3
    told = []
    async with (
        serve_simulator(SimulatorSettings(window=200_000), counter=COUNTER) as simulator,
        weir(simulator.base_url, window=200_000, policy="baseagent-200k") as target,
    ):
        for length in (1, 2, 4):
            talk = Talk(target.client(f"sk-{length}"), messages[:length])
            await talk.ask()
            told.append(tokens_of(talk.headers[0])[0])
    assert told[0] == system + priming
    assert told[1] == system + user + priming
    assert told[2] == system + user + calls + framing_of_call + result + priming
