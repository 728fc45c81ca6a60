"""The usage that a client sees is that of the request that went up, whole or streamed, and adds up.

Clients compact their own history by it: a number that is too high destroys work, one that changes with the way of
asking makes them thrash.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import COUNTER, EVICTING, TOOLS, RunningWeir, Talk, answered, opening, prose, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted, whole
from tests.profile import soak
from tests.upstream import SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

pytestmark = pytest.mark.slow

WINDOW = 8_192


@dataclass(frozen=True, slots=True)
class Used:
    """A usage object's sums."""

    prompt: int
    completion: int
    total: int


def used(found: Any) -> Used:
    """The sums of the SDK's usage object."""
    assert found is not None
    return Used(found.prompt_tokens, found.completion_tokens, found.total_tokens)


async def ask(target: RunningWeir, body: dict[str, Any], *, stream: bool, key: str = "sk-test") -> Used:
    """The usage of one answer, as the real client reads it."""
    chat = target.client(key).chat.completions
    if not stream:
        return used((await chat.create(**body)).usage)
    found = await chat.create(stream=True, stream_options={"include_usage": True}, **body)
    said = [chunk.usage async for chunk in found if chunk.usage is not None]
    assert len(said) == 1
    return used(said[0])


def counted(simulator: RunningSimulator) -> int:
    """What the upstream counted in the last request that it answered."""
    seen = [s for s in answered(simulator) if s.status == 200][-1]
    body = json.loads(seen.body)
    return int(httpx.post(f"{simulator.base_url}/chat/completions/input_tokens", json=body).json()["input_tokens"])


@pytest.fixture
async def simulator() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as running:
        yield running


def history(turns: int, *, kind: str = "agent", seed: int = 0) -> list[dict[str, Any]]:
    """The messages of a conversation that Weir has not seen."""
    talk = Talk(None, opening(seed=100 + seed), seed=seed)
    talk.grow(turns, kind=kind)
    if kind == "chat":
        talk.add_question()
    return talk.messages


CASES = {
    "pass": (history(2), 32_768, {}),
    "evicted": (history(26), WINDOW, {}),
    "compacted": (history(40, kind="chat"), WINDOW, {}),
    "overflow": (history(22), 32_768, {}),
    "clamped": (history(9), 32_768, {"max_tokens": 6_000}),
}


@pytest.mark.requirement("A1.12", "A4.16", "P5")
@pytest.mark.parametrize("case", CASES)
async def test_whole_and_streamed_usage_are_the_same_and_those_of_the_managed_request(
    case: str, simulator: RunningSimulator, tmp_path: Path
) -> None:
    messages, believed, options = CASES[case]
    body: dict[str, Any] = {"model": "sim", "messages": messages, "max_tokens": 256, **options}
    if case != "compacted":
        body["tools"] = TOOLS
    found = []
    acted = {"pass": "none", "evicted": "evict=", "compacted": "compact=", "overflow": "retry=", "clamped": "clamp="}
    summarizer = "same" if case == "compacted" else None
    for stream in (False, True):
        # A summary holds a fence of its own in every Weir: there the second way of asking is the first one's replay.
        key, store = ("sk-one", tmp_path / "one.db") if case == "compacted" else ("sk-other", None)
        rules = {} if case == "compacted" else EVICTING
        async with weir(simulator.base_url, store, window=believed, balanced=rules, summarizer=summarizer) as target:
            raw = await target.client().chat.completions.with_raw_response.create(**body)
            assert acted[case] in raw.headers["x-weir-actions"] or (stream and store)
            found.append(await ask(target, body, stream=stream, key=key))
            assert found[-1].prompt == await asyncio.to_thread(counted, simulator)
    assert found[0] == found[1]
    assert found[0].total == found[0].prompt + found[0].completion
    assert found[0].total <= WINDOW


@pytest.mark.requirement("A4.16", "P5")
@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}])
async def test_a_client_that_asks_for_no_usage_gets_none_and_the_upstream_is_not_asked_either(
    asked: dict[str, Any] | None, simulator: RunningSimulator
) -> None:
    """With a managed request, too: nothing is added that would have to be taken out again."""
    for messages, acts in ((history(2), False), (history(26), True)):
        body = {"model": "sim", "messages": messages, "max_tokens": 64, "stream": True, "tools": TOOLS}
        if asked is not None:
            body["stream_options"] = asked
        async with weir(simulator.base_url, window=WINDOW) as target, httpx.AsyncClient() as http:
            headers = {"authorization": "Bearer sk-test"}
            answer = await http.post(f"{target.base_url}/chat/completions", json=body, headers=headers)
            assert (answer.headers["x-weir-actions"] != "none") is acts
            assert b'"usage"' not in answer.content
            sent = answered(simulator)[-1].body
            assert json.loads(sent).get("stream_options") == asked
            direct = await http.post(f"{simulator.base_url}/chat/completions", content=sent, headers=headers)
        assert shown(answer.content) == shown(direct.content)


def shown(stream: bytes) -> list[Any]:
    """The events without what differs from one answer to the next."""
    data = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line]
    return [
        d if d == b"[DONE]" else {k: v for k, v in json.loads(d).items() if k not in {"id", "created"}} for d in data
    ]


@pytest.mark.requirement("A4.16", "P5")
@pytest.mark.parametrize("usage", [False, True])
async def test_a_managed_stream_reaches_the_client_byte_for_byte(usage: bool) -> None:
    """Odd spacing, comments and fields that nobody knows included."""
    parts = (
        b": hello\n\n",
        b'data: {"id":"x", "choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}],"new":1e3}\r\n\r\n',
        b'data:{"id":"x","choices":[{"index":0,"delta":{},"finish_reason" : "stop"}]}\n\n',
        b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":7000,"completion_tokens":1,"total_tokens":7001,"cost":0.10}}\n\n',
        b"data: [DONE]\n\n",
    )
    said = parts if usage else (*parts[:3], parts[4])
    body = {"model": "m", "messages": history(26), "stream": True, "stream_options": {"include_usage": usage}}
    async with (
        scripted(lambda _: Reply(kind="text/event-stream", chunks=said, between=0.002)) as upstream,
        weir(upstream.base_url, window=WINDOW) as target,
        httpx.AsyncClient() as http,
    ):
        answer = await http.post(
            f"{target.base_url}/chat/completions", json=body, headers={"authorization": "Bearer sk-a"}
        )
    assert "compact=" in answer.headers["x-weir-actions"]
    assert answer.content == b"".join(said)


@pytest.mark.requirement("A4.25", "A4.16")
async def test_rounds_of_recall_report_one_prompt_and_all_words_whole_and_streamed(simulator: RunningSimulator) -> None:
    """The prompt of the last round alone: a sum would be more than the client's window."""
    found: list[tuple[Used, list[int]]] = []
    for stream in (False, True):
        prompts: list[int] = []

        def say(request: Any, prompts: list[int] = prompts) -> SimulatedAnswer:
            names = [t["function"]["name"] for t in request.get("tools") or ()]
            if "recall" in " ".join(names) and not any(
                "recall" in str(m.get("tool_calls")) for m in request["messages"]
            ):
                name = next(n for n in names if "recall" in n)
                return SimulatedAnswer(calls=(SimulatedCall(name, json.dumps({"query": "module"})),))
            return SimulatedAnswer(text="Done.")

        settings = SimulatorSettings(window=WINDOW, answer=say)
        async with (
            serve_simulator(settings, counter=COUNTER) as upstream,
            weir(upstream.base_url, window=WINDOW, balanced=EVICTING | {"recall": {"tool": True}}) as target,
        ):
            body = {"model": "sim", "messages": history(26), "max_tokens": 256, "tools": TOOLS}
            found.append((await ask(target, body, stream=stream), prompts))
            rounds = [s for s in answered(upstream) if s.status == 200]
            assert len(rounds) == 2
            sizes = [COUNTER.count(s.body.decode()) for s in rounds]
            assert found[-1][0].prompt < sum(sizes)
            assert found[-1][0].total <= WINDOW
    assert found[0][0] == found[1][0]


def recalling_first(asked: Asked, given: dict[str, Any]) -> Reply:
    """An answer, which before that searches what was removed."""
    (choice,) = given["choices"]
    if asked.json["messages"][-1].get("tool_call_id") != "call_0":
        call = {"name": "recall", "arguments": json.dumps({"query": "deployment"})}
        choice["message"]["tool_calls"] = [{"id": "call_0", "type": "function", "function": call}]
        choice["finish_reason"] = "tool_calls"
    return whole(given)


@pytest.mark.requirement("A4.25", "P7")
async def test_an_answer_with_half_a_character_is_read_like_any_other() -> None:
    """Servers written in JavaScript cut an emoji in two where the answer's limit falls into it."""

    def say(asked: Asked) -> Reply:
        return recalling_first(asked, completion("So far \ud83d"))

    settings = EVICTING | {"recall": {"tool": True}}
    async with scripted(say) as upstream, weir(upstream.base_url, window=WINDOW, balanced=settings) as target:
        body = {"model": "sim", "messages": history(26), "max_tokens": 256, "tools": TOOLS}
        async with httpx.AsyncClient(base_url=target.root, headers={"authorization": "Bearer sk-test"}) as http:
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            told = {"requests": 0}
            while not told["requests"]:
                await asyncio.sleep(0.05)
                told = (await http.get("/weir/usage")).json()["total"]
    said = "\n\n".join(["So far \ud83d"] * 2)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}, "no call of Weir's own"
    assert (told["prompt"], told["completion"]) == (20, 10)


@pytest.mark.requirement("A0.2", "P7")
async def test_a_long_prompts_price_is_that_of_a_round_and_not_of_what_all_rounds_take() -> None:
    """Above 200,000 tokens every token of a prompt costs twice as much; each round was billed by itself."""

    def say(asked: Asked) -> Reply:
        return recalling_first(asked, completion("Done.", prompt=150_000, completed=1_000))

    settings = EVICTING | {"recall": {"tool": True}}
    async with scripted(say) as upstream, weir(upstream.base_url, window=WINDOW, balanced=settings) as target:
        body = {"model": "gemini-2.5-pro", "messages": history(26), "max_tokens": 256, "tools": TOOLS}
        async with httpx.AsyncClient(base_url=target.root, headers={"authorization": "Bearer sk-test"}) as http:
            before, after = (
                int(part.partition("=")[2])
                for part in (await http.post("/v1/chat/completions", json=body)).headers["x-weir-tokens"].split(";")[:2]
            )
            await target.stored()
            told = (await http.get("/weir/usage")).json()["total"]
    assert (told["prompt"], told["completion"]) == (300_000, 2_000)
    assert told["cost"] == pytest.approx(2 * (150_000 * 1.25e-6 + 1_000 * 1e-5))
    unmanaged = (150_000 + before - after) * 1.25e-6 + 1_000 * 1e-5
    assert told["cost_saved"] == pytest.approx(unmanaged - told["cost"], abs=1e-6), "a round more is no saving"


@pytest.mark.requirement("A1.12", "A4.16", "P16")
@pytest.mark.parametrize("stream", [pytest.param(False, marks=soak), True])
async def test_a_client_that_compacts_at_nine_tenths_of_its_window_never_does_in_sixty_turns(
    stream: bool, simulator: RunningSimulator
) -> None:
    """And no answer looks to it as if its window had been overflown in silence."""
    window, compactions, overflows, totals = WINDOW, 0, 0, []
    async with weir(simulator.base_url, window=window) as target:
        talk = Talk(target.client(), opening(seed=7), seed=7)
        for _ in range(60):
            body = {"model": "sim", "messages": talk.messages, "max_tokens": 256, "tools": TOOLS}
            found = await ask(target, body, stream=stream)
            totals.append(found.total)
            compactions += found.total > 0.9 * window
            overflows += found.prompt > window or found.completion == 0
            talk.add_step()
    assert (compactions, overflows) == (0, 0)
    assert COUNTER.count(json.dumps(talk.messages)) > 2.5 * window
    assert max(totals) > 0.5 * window, "the window was used"


@pytest.mark.requirement("A4.16")
async def test_cached_tokens_are_part_of_the_prompt_and_are_passed_on() -> None:
    given = completion("yes", prompt=4_000, completed=9)
    given["usage"]["prompt_tokens_details"] = {"cached_tokens": 3_500, "audio_tokens": 0}
    given["usage"]["new_field"] = {"x": [1]}

    def say(asked: Asked) -> Reply:
        return as_asked(asked, given)

    async with scripted(say) as upstream, weir(upstream.base_url, window=WINDOW) as target:
        chat = target.client().chat.completions
        body: dict[str, Any] = {"model": "m", "messages": opening()}
        one = (await chat.create(**body)).usage.model_dump(exclude_unset=True)
        stream = await chat.create(stream=True, stream_options={"include_usage": True}, **body)
        (two,) = [c.usage.model_dump(exclude_unset=True) async for c in stream if c.usage]
    assert one == two == given["usage"]


OLLAMAS = 4_096
Reading = Callable[[list[dict[str, Any]]], tuple[int, dict[str, Any]]]


def size(messages: list[dict[str, Any]]) -> int:
    return sum(4 + COUNTER.count(message["content"]) for message in messages)


def as_ollama(messages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """The system and as many of the newest messages as there is room for, as Ollama's ``chatPrompt`` has it."""
    system, rest = messages[:1], messages[1:]
    while len(rest) > 1 and size(system) + size(rest) > OLLAMAS:
        rest = rest[1:]
    return min(OLLAMAS, size(system) + size(rest)), {}


def only_uncached(messages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """What the cache did not give, as old servers of llama.cpp report it."""
    return size(messages[-2:]), {}


def uncached_beside_cached(messages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """The same of a cache that is behind by some turns, and how much that gave."""
    return size(messages[-12:]), {"prompt_tokens_details": {"cached_tokens": size(messages[:-12])}}


async def talk_with(reading: Reading, target_window: int, *, first: int, words: int, turns: int) -> tuple[Any, ...]:
    """A conversation whose turns have so many words: the requests, and Weir's window, ratio and estimates after it."""
    asked: list[list[dict[str, Any]]] = []

    def say(request: Asked) -> Reply:
        asked.append(request.json["messages"])
        given = completion("Going on. " + prose(words // 2, seed=len(asked)))
        prompt, more = reading(asked[-1])
        given["usage"] = {**more, "prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}
        return as_asked(request, given)

    messages = [{"role": "system", "content": "You are careful."}]
    told = []
    async with scripted(say) as upstream, weir(upstream.base_url, window=target_window) as target:
        client = target.client()
        for turn in range(turns):
            messages.append({"role": "user", "content": prose(words if turn else first, seed=1_000 + turn)})
            raw = await client.chat.completions.with_raw_response.create(
                model="llama", messages=messages, max_tokens=64
            )
            messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
            told.append(raw.headers["x-weir-tokens"])
        learned = [row.limit for row in target.runtime.limits_resolver.learned()]
        counts = list(target.runtime.limits_resolver._calibrations.values())
    return asked, learned, counts, told


@pytest.mark.requirement("P4", "P16")
async def test_a_server_that_cuts_in_silence_teaches_its_window(caplog: pytest.LogCaptureFixture) -> None:
    asked, learned, counts, told = await talk_with(as_ollama, 32_768, first=260, words=260, turns=24)
    assert learned == [OLLAMAS]
    assert [r.levelname for r in caplog.records if "said nothing" in r.getMessage()] == ["WARNING"]
    cut = [n for n, messages in enumerate(asked) if size(messages) > OLLAMAS]
    assert len(cut) > 0
    assert max(cut) < len(asked) - 6  # from then on nothing is cut any more
    assert 0.9 < counts[-1].ratio < 1.1
    assert all(int(each.rpartition("limit=")[2]) < OLLAMAS for each in told[-6:])


@pytest.mark.requirement("P16")
@pytest.mark.parametrize(
    ("reading", "first", "words"), [(only_uncached, 1_450, 795), (uncached_beside_cached, 1_400, 125)]
)
async def test_a_server_that_counts_otherwise_is_not_taken_for_one_that_cuts(
    reading: Reading, first: int, words: int
) -> None:
    """Though what it counts stays the same, nearly a power of two and less than it has counted before."""
    asked, learned, _, _ = await talk_with(reading, 131_072, first=first, words=words, turns=16)
    assert learned == []
    counts = [reading(messages)[0] for messages in asked]
    assert all(1_792 < count <= max(counts[:8]) for count in counts[8:])
