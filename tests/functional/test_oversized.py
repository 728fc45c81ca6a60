"""One message larger than the window, and one that only looks large."""

import base64
import json
import re
import struct
import zlib
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from proxy.wire import transcripts
from proxy.wire.raw import split_array, split_object
from tests.functional.harness import (
    COUNTER,
    TOOLS,
    RunningWeir,
    Talk,
    answered,
    arrays_of,
    opening,
    prose,
    tool_step,
    weir,
)
from tests.upstream import Dialect
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 8192
NOTE = re.compile(r'(?:left out here; archived as |"ref": ")([0-9a-f]{12})')
BIG_WORDS = 12_500


@pytest.fixture
async def upstream() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        yield simulator


class Recorder:
    """What the SDK puts on the wire."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.http = httpx.AsyncClient(event_hooks={"request": [self._note]}, timeout=60)

    async def _note(self, request: httpx.Request) -> None:
        self.bodies.append(request.content)

    def message(self, index: int) -> bytes:
        """The bytes of one message of the newest request."""
        raws = split_array(split_object(self.bodies[-1])["messages"])
        assert raws is not None
        return bytes(raws[index])


async def read_blob(target: RunningWeir, ref: str, key: str = "sk-test") -> bytes:
    """An original, page by page."""
    body, cursor = b"", "0"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as http:
        while True:
            page = await http.get(f"{target.root}/weir/blobs/{ref}", params={"cursor": cursor})
            assert page.status_code == 200, page.text
            body += page.content
            if "x-weir-cursor" not in page.headers:
                assert int(page.headers["x-weir-size"]) == len(body)
                return body
            cursor = page.headers["x-weir-cursor"]


def big_step(text: str) -> list[dict[str, Any]]:
    call = {"id": "call_big", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_big", "content": text},
    ]


async def restored(target: RunningWeir, shown: str) -> str:
    """A user's message as it was sent, from what was forwarded and what the note in it names."""
    begins, ref, ends = re.split(r"\n\[weir: about \d+ tokens left out here; archived as (\w+)\]\n", shown)
    middle = await read_blob(target, f"{ref}.txt")
    return f"{begins}{middle.decode()}{ends}"


async def forwarded_and_restored(
    upstream: RunningSimulator, database: Path, *, earlier: int, added: list[dict[str, Any]]
) -> tuple[str, Any]:
    """The newest message as it was forwarded, after what was cut out of it was read back byte for byte."""
    recorder = Recorder()
    async with weir(upstream.base_url, database) as target, recorder.http:
        talk = Talk(target.client(http_client=recorder.http))
        await talk.agent(earlier)
        talk.messages += added
        answer = await talk.ask(tools=TOOLS)
        assert answer.choices[0].message.content.startswith("Understood.")
        seen = answered(upstream)[-1]
        newest = seen.json()["messages"][-1]
        if newest["content"].startswith("[weir: "):  # the user's words follow what Weir says of those before
            newest["content"] = newest["content"].partition("]\n\n")[2]
        (ref,) = NOTE.findall(newest["content"])
        if newest["role"] == "tool":
            assert await read_blob(target, ref) == recorder.message(-1)
        else:
            assert await restored(target, newest["content"]) == added[-1]["content"]
        async with httpx.AsyncClient(headers={"authorization": "Bearer sk-other"}, timeout=60) as http:
            assert (await http.get(f"{target.root}/weir/blobs/{ref}")).status_code == 404
    assert {s.status for s in answered(upstream)} == {200}
    return newest["content"], seen


@pytest.mark.requirement("A0.3", "P12", "A0.26")
@pytest.mark.parametrize("earlier", [0, 6])
@pytest.mark.parametrize("role", ["tool", "user"])
async def test_a_newest_message_of_20_000_tokens_is_clipped_and_kept_in_full(
    role: str, earlier: int, upstream: RunningSimulator, tmp_path: Path
) -> None:
    text = "BEGINNING " + prose(BIG_WORDS, seed=3) + " END"
    assert COUNTER.count(text) > 18_000
    added = big_step(text) if role == "tool" else [{"role": "user", "content": text}]
    clipped, seen = await forwarded_and_restored(upstream, tmp_path / "w.db", earlier=earlier, added=added)
    assert clipped.startswith("BEGINNING ")
    assert clipped.endswith(" END")
    assert seen.prompt_tokens + 512 <= WINDOW


@pytest.mark.requirement("A0.3", "P12", "S.26")
@pytest.mark.parametrize("earlier", [0, 6])
async def test_a_newest_result_beyond_what_is_read_of_a_history_keeps_both_ends(
    earlier: int, upstream: RunningSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcripts, "MAX_READ", 4_000)
    added = big_step("BEGINNING " + prose(BIG_WORDS, seed=3) + " END")
    clipped, seen = await forwarded_and_restored(upstream, tmp_path / "w.db", earlier=earlier, added=added)
    assert clipped.startswith("BEGINNING ")
    assert clipped.endswith(" END")
    assert COUNTER.count(clipped) > 1_000
    assert seen.prompt_tokens + 512 <= WINDOW


@pytest.mark.requirement("A0.3", "P12", "S.26")
async def test_none_of_many_newest_results_beyond_what_is_read_is_forwarded_empty(
    upstream: RunningSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcripts, "MAX_READ", 4_000)
    steps = [tool_step(n, words=4_000) for n in range(40)]
    calls = [call for called, _ in steps for call in called["tool_calls"]]
    results = [result for _, result in steps]
    async with weir(upstream.base_url, tmp_path / "w.db") as target:
        talk = Talk(target.client())
        talk.messages += [{"role": "assistant", "content": None, "tool_calls": calls}, *results]
        await talk.ask(tools=TOOLS)
    shown = [m["content"] for m in arrays_of(answered(upstream))[-1] if m["role"] == "tool"]
    assert len(shown) == len(results)
    assert all(NOTE.search(text) for text in shown)


def asked_alone(path: str, text: str) -> dict[str, Any]:
    """A request of an endpoint that is one user message."""
    if path == "/responses":
        return {"model": "sim", "input": text, "store": False, "max_output_tokens": 256}
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 256}


def shown_alone(path: str, body: dict[str, Any]) -> str:
    """What the one message of such a request says."""
    said = body["input"] if path == "/responses" else body["messages"]
    content = said if isinstance(said, str) else said[0]["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


@pytest.mark.requirement("A0.3", "P12")
@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_the_cut_of_a_message_that_grows_moves_in_batches(path: str, tmp_path: Path) -> None:
    """Until a batch moves the cut, what goes up begins with what went up before; what was left out is read back."""
    whole = "BEGINNING " + prose(4_000, seed=3)
    dialect = Dialect.ANTHROPIC if path == "/messages" else Dialect.OPENAI
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW, dialect=dialect), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db") as target,
        httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}, timeout=60) as http,
    ):
        said = list[str]()
        for step in range(24):
            whole += f"\n\nObservation {step}: {prose(150, seed=40 + step)}"
            said.append(whole)
            answer = await http.post(f"{target.base_url}{path}", json=asked_alone(path, whole))
            assert answer.status_code == 200, answer.text
        shown = [shown_alone(path, seen.json()) for seen in answered(simulator) if seen.status == 200]
        await target.stored()
        cut = [(now, text) for now, text in zip(said, shown, strict=True) if now != text]
        for now, text in (cut[0], cut[-1]):
            assert await restored(target, text) == now
    assert shown[0] == said[0]
    assert 12 <= len(cut) <= 20
    assert sum(not text.startswith(before) for (_, before), (_, text) in pairwise(cut)) <= 4
    assert all(COUNTER.count(text) > WINDOW / 2 for _, text in cut)


def png(width: int, height: int) -> str:
    """A data URL of a PNG that does not compress: noise."""
    rng = Random(7)
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    picture = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(picture).decode()


@pytest.mark.requirement("P11")
async def test_a_message_with_an_image_leaves_the_window_whole_and_comes_back_whole(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    url = png(128, 118)
    async with weir(upstream.base_url, tmp_path / "w.db") as target:
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
        talk = Talk(target.client(), opening()[:1], seed=4)
        talk.grow(1)
        talk.messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "Noise."}]
        talk.grow(14)
        await talk.chat(2)
        arrays = [json.dumps(s.json()["messages"]) for s in answered(upstream)]
        assert talk.actions()[-1] == "compact=1"
        assert url not in arrays[-1]
        assert target.runtime.store is not None
        found = await target.runtime.store.search(next(iter_tenants(target)), "What is this")
        assert any(url.encode() in original.body for original in found)


def pictured(path: str, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A request of an endpoint whose newest result has a picture beside a text, and that result's content."""
    data, call = png(128, 118), {"name": "look", "arguments": "{}"}
    if path == "/messages":
        source = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
        parts = [{"type": "text", "text": text}, {"type": "image", "source": source}]
        used = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": parts}
        newest = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        return {"messages": [{"role": "user", "content": "Look."}, *newest], "max_tokens": 512, "tools": tools}, parts
    if path == "/responses":
        parts = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": data}]
        newest = [{"type": "function_call", "call_id": "call_1", **call}]
        newest.append({"type": "function_call_output", "call_id": "call_1", "output": parts})
        tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
        return {"input": [{"role": "user", "content": "Look."}, *newest], "store": False, "tools": tools}, parts
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": data}}]
    newest = [{"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]}]
    newest.append({"role": "tool", "tool_call_id": "call_1", "content": parts})
    return {"messages": [{"role": "user", "content": "Look."}, *newest], "max_tokens": 512}, parts


@pytest.mark.requirement("A0.3", "P12")
@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_a_newest_result_that_is_too_large_is_cut_where_a_picture_stands_beside_it(
    path: str, tmp_path: Path
) -> None:
    request, parts = pictured(path, "BEGINNING " + prose(BIG_WORDS, seed=3) + " END")
    dialect = Dialect.ANTHROPIC if path == "/messages" else Dialect.OPENAI
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW, dialect=dialect), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db") as target,
        httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}, timeout=60) as http,
    ):
        answer = await http.post(f"{target.base_url}{path}", json={"model": "sim", **request})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-weir-actions"].startswith("clip=1")
        sent = simulator.ledger[-1].body.decode()
        (ref,) = set(re.findall(r"archived as ([0-9a-f]{12})", sent))
        original = json.dumps(json.loads(await read_blob(target, ref)))
    assert "[weir: image image/png left out; archived as " in sent
    assert all(each in sent for each in ("BEGINNING ", " END"))
    assert all(json.dumps(part)[1:-1] in original for part in parts)


def iter_tenants(target: RunningWeir) -> Any:
    """The tenants of the conversations that Weir holds in memory."""
    return (thread.branch.tenant for thread in target.runtime.planner.conversations._threads.values())
