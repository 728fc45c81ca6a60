"""What of a stream is shown to a client while the model recalls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.features.recall.tool import (
    RoundView,
    turn_of,
)
from tests.profile import tried

HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def event(delta: Mapping[str, Any] | None = None, *, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({**HEAD, "choices": choices, **more}).encode() + b"\n\n"


def call(name: str, arguments: str, *, index: int | None = 0, identity: str = "call_1") -> dict[str, Any]:
    place = {} if index is None else {"index": index}
    return {**place, "id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


DONE = b"data: [DONE]\n\n"
ROUND = [
    event({"role": "assistant", "content": ""}),
    event({"content": "Let me look, caf\u00e9. "}),
    b": keep-alive\n\n",
    event({"tool_calls": [call("recall", "")]}),
    event({"tool_calls": [{"index": 0, "function": {"arguments": '{"query": "x"}'}}]}),
    event({"tool_calls": [call("own", "{}", index=1, identity="call_2")]}),
    event({}, finish="tool_calls"),
    event(usage={"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}),
    DONE,
]


def shown(events: Sequence[bytes], view: RoundView) -> bytes:
    return b"".join(map(view.feed, events)) + view.end()


def payloads(stream: bytes) -> list[Any]:
    found = [line[6:] for line in stream.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(data) for data in found]


@pytest.mark.requirement("P5")
@given(st.lists(st.integers(0, len(b"".join(ROUND))), max_size=12))
@settings(max_examples=tried(25, 100), deadline=None)
def test_any_chunking_shows_the_same_bytes(cuts: list[int]) -> None:
    stream, places = b"".join(ROUND), sorted({0, *cuts, len(b"".join(ROUND))})
    chunks = [stream[a:b] for a, b in zip(places, places[1:], strict=False)]
    view = RoundView("recall", None, may_recall=True)
    assert shown(chunks, view) == b"".join(ROUND[:3])
    assert view.recalling
    turn = view.turn()
    assert turn is not None
    assert turn.message["content"] == "Let me look, caf\u00e9. "
    assert [c["function"] for c in turn.message["tool_calls"]] == [{"name": "recall", "arguments": '{"query": "x"}'}]
    assert view.usage == {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}


@pytest.mark.requirement("P5")
@pytest.mark.parametrize(
    "events",
    [
        [
            event(
                {"role": "assistant", "tool_calls": [call("recall", '{"query": "x"}', index=None)]}, finish="tool_calls"
            )
        ],
        [
            event({"tool_calls": [call("recall", '{"que', index=None)]}),
            event({"tool_calls": [{"id": "call_1", "function": {"arguments": 'ry": "x"}'}}]}),
            event({"tool_calls": [], "content": None}, finish="stop"),
        ],
        [
            event({"tool_calls": [call("recall", '{"que'), call("own", "{", index=1, identity="call_2")]}),
            event({"tool_calls": [{"index": 1, "function": {"arguments": "}"}}, {"index": 0, "id": None}]}),
            event({"tool_calls": [{"index": 0, "function": {"arguments": 'ry": "x"}'}}]}),
            event({"content": ""}, finish="tool_calls", usage={"prompt_tokens": 1, "completion_tokens": 1}),
        ],
    ],
    ids=["all in one chunk", "no index", "interleaved"],
)
def test_calls_are_withheld_however_a_provider_spells_them(events: list[bytes]) -> None:
    view = RoundView("recall", None, may_recall=True)
    deltas = [chunk["choices"][0] for chunk in payloads(shown([*events, DONE], view))]
    assert all(each["delta"] == {"role": "assistant"} and each["finish_reason"] is None for each in deltas)
    turn = view.turn()
    assert turn is not None
    assert [(c.query, c.problem) for c in turn.calls] == [("x", "")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"query": " x "}', ("x", "", 0, "")),
        ('{"ref": "0123456789ab.txt", "cursor": "42"}', ("", "0123456789ab", 42, "")),
        ('{"ref": "0123456789ab", "query": "", "cursor": -1}', ("", "0123456789ab", 0, "")),
        ('{"ref": null, "query": null}', ("", "", 0, "Give query or ref.")),
        ('{"query": ', ("", "", 0, "The arguments are not JSON.")),
        ("[1]", ("", "", 0, "The arguments are not an object.")),
    ],
)
def test_arguments_as_models_write_them(arguments: str, expected: tuple[str, str, int, str]) -> None:
    message = {"content": None, "tool_calls": [{"id": "c", "function": {"name": "recall", "arguments": arguments}}]}
    turn = turn_of(message, "recall")
    assert turn is not None
    [one] = turn.calls
    assert (one.query, one.ref, one.cursor, one.problem) == expected
