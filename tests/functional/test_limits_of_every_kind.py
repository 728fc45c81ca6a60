"""Limits that are not tokens: a conversation goes on past them, and the next one does not meet them at all."""

import json
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from tests.functional.harness import COUNTER, RunningWeir, prose, weir
from tests.functional.scripted import Asked, Reply, completion, scripted, whole
from tests.profile import each_once

ENDPOINTS = ("chat", "responses", "messages")
PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
MOST = 8
ENTRIES = 40
BYTES = 60_000
NGINX = (
    b"<html>\r\n<head><title>413 Request Entity Too Large</title></head>\r\n<body>\r\n<center><h1>413 Request Entity "
    b"Too Large</h1></center>\r\n<hr><center>nginx/1.27</center>\r\n</body>\r\n</html>\r\n"
)
each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS)


def png(width: int, height: int, *, seed: int, size: int = 32) -> str:
    """The base64 of an image that says that it is so large, in about ``size`` bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    more = chunk(b"tEXt", b"Comment\0" + Random(seed).randbytes(size))
    return b64encode(b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IEND", b"")).decode()


def image_of(endpoint: str, data: str) -> dict[str, Any]:
    if endpoint == "chat":
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    if endpoint == "responses":
        return {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{data}"}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def answer_of(endpoint: str, *, prompt: int) -> dict[str, Any]:
    if endpoint == "chat":
        return completion("Go on.", prompt=prompt)
    if endpoint == "responses":
        said = [{"type": "output_text", "text": "Go on.", "annotations": []}]
        output = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": said}]
        used = {"input_tokens": prompt, "output_tokens": 5, "total_tokens": prompt + 5}
        return {"id": "r", "object": "response", "status": "completed", "model": "m", "output": output, "usage": used}
    text = [{"type": "text", "text": "Go on."}]
    used = {"input_tokens": prompt, "output_tokens": 5}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": text}
    return {**message, "stop_reason": "end_turn", "stop_sequence": None, "usage": used}


def refusal_of(endpoint: str, message: str, *, status: int = 400, **more: Any) -> Reply:
    error = {"type": "invalid_request_error", "message": message, **more}
    return whole({"type": "error", "error": error} if endpoint == "messages" else {"error": error}, status=status)


class Talk:
    """A client that sends all of its history, as one of the three endpoints has it."""

    def __init__(self, target: RunningWeir, endpoint: str, *, name: str | None = None, first: str = "Look.") -> None:
        self.target = target
        self.endpoint = endpoint
        self.headers = {"authorization": "Bearer k"} | ({} if name is None else {"x-weir-conversation": name})
        self.history: list[Any] = [{"role": "user", "content": first}]
        self.statuses: list[int] = []
        self.actions: list[str] = []
        self.told: list[bytes] = []

    def says(self, text: str, *images: str) -> None:
        kind = "input_text" if self.endpoint == "responses" else "text"
        parts = [{"type": kind, "text": text}, *(image_of(self.endpoint, data) for data in images)]
        reply_kind = {"type": "output_text", "annotations": []} if self.endpoint == "responses" else {"type": "text"}
        reply = [{**reply_kind, "text": f"Seen up to {text}."}]
        own = {"role": "assistant", "content": reply if self.endpoint == "responses" else reply[0]["text"]}
        self.history += [own, {"role": "user", "content": parts}]

    async def ask(self, **more: Any) -> None:
        limit = "max_output_tokens" if self.endpoint == "responses" else "max_tokens"
        array = "input" if self.endpoint == "responses" else "messages"
        body = {"model": "m", limit: 100, array: self.history, **more}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.target.base_url + PATHS[self.endpoint], json=body, headers=self.headers) as answer,
        ):
            self.statuses.append(answer.status)
            self.actions.append(answer.headers.get("x-weir-actions", ""))
            self.told.append(await answer.read())


def array_of(asked: Asked) -> list[Any]:
    array: list[Any] = asked.json.get("messages") or asked.json.get("input") or []
    return array


def images_in(asked: Asked) -> int:
    return asked.body.count(b"iVBORw0KGgo")


def tokens_in(asked: Asked) -> int:
    """About what a provider would count."""
    waiting = [array_of(asked)]
    total = 0
    while waiting:
        value: Any = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, str):
            is_image = "iVBORw0KGgo" in value[:64]
            total += 300 if is_image else COUNTER.count(value)
    return total


def batches(sent: list[list[Any]]) -> int:
    """How often an array did not begin with the one before it."""
    return sum(after[: len(before)] != before for before, after in zip(sent, sent[1:], strict=False))


class Strict:
    """An upstream that refuses by a rule; ``sent`` are the arrays that it took."""

    def __init__(self, endpoint: str, rule: Callable[[Asked], Reply | None]) -> None:
        self.endpoint = endpoint
        self.rule = rule
        self.refused = 0
        self.sent: list[Asked] = []

    def __call__(self, asked: Asked) -> Reply:
        if not asked.body:
            return whole({"object": "list", "data": []})
        refusal = self.rule(asked)
        if refusal is not None:
            self.refused += 1
            return refusal
        self.sent.append(asked)
        return whole(answer_of(self.endpoint, prompt=tokens_in(asked)))


async def shown(talk: Talk, steps: int, *, size: int = 32) -> None:
    for step in range(steps):
        talk.says(f"page {step}", png(512, 512, seed=step, size=size))
        await talk.ask()


@each_endpoint
async def test_more_images_than_are_taken_leave_references_and_are_not_met_again(endpoint: str, tmp_path: Path) -> None:
    def rule(asked: Asked) -> Reply | None:
        count = images_in(asked)
        said = f"Too many images in request: {count} images, maximum is {MOST}"
        return refusal_of(endpoint, said) if count > MOST else None

    strict = Strict(endpoint, rule)
    async with scripted(strict) as upstream:
        for number, name in enumerate((None, "named")):  # the second in a process that knows it from the store
            async with weir(upstream.base_url, tmp_path / "w.db", window=200_000) as target:
                talk = Talk(target, endpoint, name=name, first=f"Look, {number}.")
                await shown(talk, 2 * MOST)
                assert talk.statuses == [200] * 2 * MOST
                assert strict.refused == 1
                taken = strict.sent[-2 * MOST :]
                assert max(map(images_in, taken)) == MOST
                assert batches([array_of(each) for each in taken]) <= 4
                assert b"left out; archived as" in taken[-1].body


@each_endpoint
async def test_an_image_that_is_too_large_for_one_of_many_leaves_alone(endpoint: str) -> None:
    large = png(1_200, 2_400, seed=-1)
    said = "At least one of the image dimensions exceed max allowed size for many-image requests: 2000 pixels"

    def rule(asked: Asked) -> Reply | None:
        too_much = images_in(asked) > 20 and large.encode() in asked.body
        return refusal_of(endpoint, f"messages.2.content.1.image: {said}") if too_much else None

    strict = Strict(endpoint, rule)
    async with scripted(strict) as upstream, weir(upstream.base_url, window=200_000) as target:
        talk = Talk(target, endpoint)
        talk.says("the plan", large)
        await shown(talk, 24)
    assert talk.statuses == [200] * 24
    assert strict.refused == 1
    assert images_in(strict.sent[-1]) == 24


@each_endpoint
async def test_an_array_that_is_too_long_is_compacted(endpoint: str) -> None:
    array = "input" if endpoint == "responses" else "messages"

    def rule(asked: Asked) -> Reply | None:
        count = len(array_of(asked))
        said = f"Expected an array with maximum length {ENTRIES}, but got an array with length {count} instead."
        code = {} if endpoint == "messages" else {"code": "array_above_max_length"}
        return refusal_of(endpoint, f"Invalid '{array}': array too long. {said}", **code) if count > ENTRIES else None

    strict = Strict(endpoint, rule)
    async with scripted(strict) as upstream, weir(upstream.base_url, window=200_000) as target:
        talk = Talk(target, endpoint, first="Find the word PELICAN.")
        for step in range(ENTRIES):
            talk.says(f"part {step}: {prose(60, seed=step)}")
            await talk.ask()
    assert talk.statuses == [200] * ENTRIES
    assert strict.refused == 1
    assert batches([array_of(each) for each in strict.sent]) <= 6
    assert b"Find the word PELICAN." in strict.sent[-1].body
    assert len(array_of(strict.sent[-1])) > ENTRIES // 2


@each_once
@each_endpoint
@pytest.mark.parametrize("size", [0, 6_000], ids=["text", "images"])
async def test_a_body_that_a_gateway_takes_for_too_large_shrinks(endpoint: str, size: int) -> None:
    page = Reply(413, "text/html", (NGINX,))
    strict = Strict(endpoint, lambda asked: page if len(asked.body) > BYTES else None)
    async with scripted(strict) as upstream, weir(upstream.base_url, window=500_000) as target:
        talk = Talk(target, endpoint)
        for step in range(24):
            images = [png(512, 512, seed=step, size=size)] if size else []
            talk.says(f"page {step}: {'' if size else prose(300, seed=step)}", *images)
            await talk.ask()
    assert talk.statuses == [200] * 24
    assert strict.refused <= 3
    assert max(len(each.body) for each in strict.sent) > BYTES // 2
    assert batches([array_of(each) for each in strict.sent]) <= 10


@each_once
@each_endpoint
@pytest.mark.parametrize("status", [413, 502, 504])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_no_web_page_of_a_gateway_reaches_a_client(endpoint: str, status: int, stream: bool) -> None:
    page = Reply(status, "text/html", (NGINX.replace(b"413", b"%d" % status),), (("retry-after", "7"),))
    async with scripted(lambda asked: page) as upstream, weir(upstream.base_url, window=200_000) as target:
        talk = Talk(target, endpoint)
        await talk.ask(stream=stream)
    assert talk.statuses == [status]
    assert b"<" not in talk.told[0]
    error = json.loads(talk.told[0])["error"]
    assert str(status) in error["message"]
    assert "gateway" in error["message"]
    assert ("type" in json.loads(talk.told[0])) is (endpoint == "messages")
