"""An upstream that ends its answer in the middle, properly or by closing: it never looks complete to the client."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from tests.functional.harness import TOOLS, RunningWeir, Talk, opening, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted
from tests.profile import each_once

HEAD = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


CALLED = {"name": "read_file", "arguments": '{"path": "a'}


def delta(*, index: int = 0, finish: str | None = None, **given: Any) -> bytes:
    """One event of a streamed completion."""
    value = {**HEAD, "choices": [{"index": index, "delta": given, "finish_reason": finish}]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def said(text: str, **more: Any) -> bytes:
    """One event with words, or without any."""
    return delta(**({"content": text} if text else {}), **more)


def stream(*chunks: bytes, delimited: bool = True) -> Reply:
    """A stream that is properly ended, or whose end is the connection's."""
    return Reply(kind="text/event-stream", chunks=chunks, delimited=delimited)


async def read(target: RunningWeir, path: str = "/chat/completions", **more: Any) -> tuple[int, bytes, bool]:
    """Status and bytes of a streamed answer, and whether its end was a proper one."""
    got = b""
    body = {"model": "m", "messages": opening(), "stream": True, **more}
    headers = {"authorization": "Bearer sk-test"}
    async with (
        httpx.AsyncClient(timeout=30, headers=headers) as http,
        http.stream("POST", f"{target.base_url}{path}", json=body) as response,
    ):
        try:
            async for part in response.aiter_raw():
                got += part
        except httpx.RemoteProtocolError:
            return response.status_code, got, False
        return response.status_code, got, True


async def outcomes(target: RunningWeir) -> list[str]:
    """The outcomes that the metrics have counted."""
    async with httpx.AsyncClient() as http:
        lines = (await http.get(f"{target.root}/metrics", headers={"authorization": "Bearer sk-test"})).text.split("\n")
    counted = [line for line in lines if line.startswith("weir_requests_total{") and not line.endswith((" 0", " 0.0"))]
    return [line.partition('weir_outcome="')[2].partition('"')[0] for line in counted]


CUT = (  # pi looks for "connection lost", continue for "premature close", pydantic-ai for the type, qwen-code for 503
    b'\n\ndata: {"error": {"message": "Connection lost, premature close: The upstream ended its answer in the middle.", '
    b'"type": "server_error", "param": null, "code": "503", "weir": {"code": "upstream_unreachable"}}}\n\n'
)
HALVES: dict[str, Sequence[bytes]] = {
    "words": (said("Half an "), said("answer")),
    "a call": (delta(tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": CALLED}]),),
    "an event": (said("Half an "), b'data: {"id":"c","object":"chat.comple'),
    "an empty reason": (said("Half an ", finish=""),),
    "one of two choices": (said("One"), said("Two", index=1), said("", finish="stop")),
}


@pytest.mark.requirement("R.35", "R.34", "P5")
@each_once
@pytest.mark.parametrize("delimited", [True, False], ids=["ended", "closed"])
@pytest.mark.parametrize("name", HALVES)
async def test_half_an_answer_ends_with_an_error_and_a_cut(name: str, delimited: bool) -> None:
    half = b"".join(HALVES[name][:1] if name == "an event" else HALVES[name])
    async with (
        scripted(lambda _: stream(*HALVES[name], delimited=delimited)) as upstream,
        weir(upstream.base_url) as target,
    ):
        status, got, ended = await read(target, n=2 if "choices" in name else 1)
        assert await outcomes(target) == ["stream_broken"]
    assert (status, ended) == (200, False)
    assert got.startswith(half)
    assert got.removeprefix(half) == CUT


@pytest.mark.requirement("R.35", "R.40", "P5")
@each_once
@pytest.mark.parametrize("delimited", [True, False], ids=["ended", "closed"])
@pytest.mark.parametrize(
    ("chunks", "code"),
    [((), "upstream_empty"), ((b": hm\n\n",), "upstream_empty"), ((said(""),), "upstream_unreachable")],
    ids=["nothing", "a comment", "no word"],
)
async def test_a_stream_that_ends_before_it_has_said_a_word_is_a_clear_502(
    chunks: Sequence[bytes], code: str, delimited: bool
) -> None:
    async with (
        scripted(lambda _: stream(*chunks, delimited=delimited)) as upstream,
        weir(upstream.base_url) as target,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await target.client().chat.completions.create(model="m", messages=opening(), stream=True)
    assert (caught.value.status_code, caught.value.code) == (502, code)


@pytest.mark.requirement("R.35")
@pytest.mark.parametrize("path", ["/moderations", "/completions"])
async def test_nothing_is_read_into_or_added_to_a_stream_of_a_relayed_route(path: str) -> None:
    """What its end has to look like is not known here; what was cut stays cut."""
    half = (b'event: message_start\ndata: {"type":"message_start"}\n\n', b"event: content_block_del")
    for cut in (False, True):
        reply = Reply(kind="text/event-stream", chunks=half, cut=cut, between=0.05)
        async with scripted(lambda _, reply=reply: reply) as upstream, weir(upstream.base_url) as target:  # type: ignore[misc]
            assert await read(target, path) == (200, b"".join(half), not cut)


@pytest.mark.requirement("R.35", "P5")
@pytest.mark.parametrize("delimited", [True, False], ids=["ended", "closed"])
async def test_half_a_json_answer_is_a_clear_502(delimited: bool) -> None:
    whole = json.dumps(completion("A whole answer, if all of it comes.")).encode()
    reply = Reply(chunks=(whole[: len(whole) // 2],), delimited=delimited)
    async with scripted(lambda _: reply) as upstream, weir(upstream.base_url) as target:
        with pytest.raises(openai.InternalServerError) as caught:
            await target.client().chat.completions.create(model="m", messages=opening())
        assert await outcomes(target) == ["upstream_unreachable"]
        upstream.say = lambda _: Reply(chunks=(whole,), delimited=delimited)
        answer = await target.client().chat.completions.create(model="m", messages=opening())
    assert (caught.value.status_code, caught.value.code) == (502, "upstream_unreachable")
    assert answer.choices[0].message.content == "A whole answer, if all of it comes."


KEPT = "The number of tokens to keep from the initial prompt is greater than the context length"
CURE = ". Try to load the model with a larger context length, or provide a shorter input"
LM_STUDIO = f"{KEPT} (n_keep: 13055>= n_ctx: 8192){CURE}."
OVERFLOWS: dict[str, Sequence[bytes]] = {
    "an object": (b"event: error\ndata: " + json.dumps({"error": {"message": LM_STUDIO}}).encode() + b"\n\n",),
    "a string": (b"event: error\ndata: " + json.dumps({"error": LM_STUDIO}).encode() + b"\n\n",),
    "no number": (b"event: error\ndata: " + json.dumps({"error": {"message": KEPT + CURE}}).encode() + b"\n\n",),
    "a bare string": (b"event: error\ndata: " + json.dumps(LM_STUDIO).encode() + b"\n\n",),
    "plain text": (b"event: error\ndata: " + LM_STUDIO.encode() + b"\n\n",),
    "no blank line": (b"event: error\ndata: " + json.dumps({"error": LM_STUDIO}).encode() + b"\n",),
    "no line end": (b"data: " + json.dumps({"error": {"message": LM_STUDIO}}).encode(),),
    "two pieces": (b"event: error\n", b"data: " + json.dumps({"error": LM_STUDIO}).encode() + b"\n\n"),
    "no frame": (json.dumps({"error": {"message": LM_STUDIO}}).encode(),),
}


@pytest.mark.requirement("P16", "R.46", "R.38")
@pytest.mark.parametrize("name", OVERFLOWS)
async def test_an_overflow_inside_a_200_stream_is_healed_whatever_its_frame(name: str) -> None:
    """LM Studio answers 200, opens the stream, and says in a named event that the prompt does not fit."""

    def say(asked: Asked) -> Reply:
        if len(upstream.asked) == 1:
            return Reply(kind="text/event-stream", chunks=tuple(OVERFLOWS[name]), between=0.1)
        return as_asked(asked, completion("yes"))

    async with scripted(say) as upstream, weir(upstream.base_url, window=32_768) as target:
        talk = Talk(target.client())
        talk.grow(14, kind="agent")
        answer = await talk.client.chat.completions.create(
            model="m", messages=talk.messages, max_tokens=64, stream=True, tools=TOOLS
        )
        assert "".join([c.choices[0].delta.content or "" async for c in answer if c.choices]) == "yes"
        assert len(upstream.asked) == 2
        assert await outcomes(target) == ["ok"]
