"""A client that marks its prompt for the provider's cache, as coding agents for Claude do, through a real Weir."""

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest

from proxy.wire.chat import digest_of
from proxy.wire.raw import split_array, split_object
from tests.functional.harness import COUNTER, TOOLS, Talk, answered, weir
from tests.upstream import RecordedRequest
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

MARKER = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def part(text: str, marker: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({} if marker is None else {"cache_control": marker})


def marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The array as such a client sends it: an hour for the system prompt, five minutes for the two newest messages."""
    new = deepcopy(messages)
    new[0]["content"] = [part("You are an agent."), part(new[0]["content"], HOUR)]
    with_text = [m for m in new[1:] if isinstance(m.get("content"), str) and m["content"]]
    for message in with_text[-2:]:
        message["content"] = [part(message["content"], MARKER)]
    return new


def marked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*tools[:-1], tools[-1] | {"cache_control": HOUR}]


def grown() -> Iterator[list[dict[str, Any]]]:
    """The arrays of an agent's run, made here."""
    talk = Talk(None)
    for _ in range(24):
        yield deepcopy(talk.messages)
        talk.add_step()


async def forwarded(
    arrays: list[list[dict[str, Any]]], tools: list[dict[str, Any]], window: int
) -> list[RecordedRequest]:
    async with (
        serve_simulator(SimulatorSettings(window=window), counter=COUNTER) as simulator,
        weir(simulator.base_url, window=window) as target,
    ):
        client = target.client()
        for messages in arrays:
            await client.chat.completions.create(
                model="sim", messages=marked(messages), tools=marked_tools(tools), max_tokens=256
            )
        return [seen for seen in answered(simulator) if seen.status == 200]


def surface(seen: RecordedRequest) -> tuple[bytes, bytes]:
    """The bytes of the tools and of the system prompt."""
    fields = split_object(seen.body)
    items = split_array(fields["messages"])
    assert items is not None
    return bytes(fields["tools"]), bytes(items[0])


def markers_in(value: Any) -> int:
    return json.dumps(value).count('"cache_control"')


def check(arrays: list[list[dict[str, Any]]], seen: list[RecordedRequest]) -> None:
    """What holds of every request: the cached surface is stable, and each marker is where the client put it, or on what
    stands in front of a message that is out."""
    assert len({surface(s) for s in seen}) == 1
    for messages, one in zip(arrays, seen, strict=True):
        sent, body = marked(messages), one.json()
        assert markers_in(body) <= markers_in(sent) + 1 <= 4
        theirs = [digest_of(m) for m in sent]
        there = {digest_of(m) for m in body["messages"]}
        moved = sum(markers_in(m) for m in sent if digest_of(m) not in there)
        changed = [m for m in body["messages"] if digest_of(m) in theirs and m not in sent]
        assert sum(map(markers_in, changed)) == len(changed) <= moved
    assert any(body != [digest_of(m) for m in marked(a)] for a, body in zip(arrays, digests(seen), strict=True)), (
        "no batch came: the test would show nothing"
    )


def digests(seen: list[RecordedRequest]) -> list[list[bytes]]:
    return [[digest_of(m) for m in s.json()["messages"]] for s in seen]


@pytest.mark.requirement("A4.13", "D25", "P2")
async def test_tools_and_system_prompt_keep_their_bytes_over_a_batch_and_markers_their_place() -> None:
    arrays = list(grown())
    seen = await forwarded(arrays, TOOLS, 8192)
    check(arrays, seen)
    breaks = sum(old != new[: len(old)] for old, new in pairwise(digests(seen)))
    assert 1 <= breaks <= 4, "between two batches each request begins with the one before"
