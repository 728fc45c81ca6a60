"""Recall in its parts: what of a stream is shown, how texts rank, what is brought back unasked."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.ledger import Cut
from policies.summary.material import defang
from proxy.features.recall.archive import (
    Past,
    format_page,
    passages,
    rank,
    terms_of,
)
from proxy.features.recall.tool import (
    RoundView,
    turn_of,
)
from proxy.store import Store
from proxy.store.records import Change, Original
from proxy.wire.chat import message_of
from proxy.wire.counting import Tokenizer
from proxy.wire.raw import Frames
from tests.profile import tried

COUNTER = Tokenizer().counter("o200k_base")
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
@given(st.binary(max_size=200))
@settings(max_examples=tried(25, 100), deadline=None)
def test_frames_are_the_bytes_that_came(stream: bytes) -> None:
    frames = Frames()
    found = [frame for at in range(0, len(stream), 3) for frame in frames.feed(stream[at : at + 3])]
    assert b"".join(frame.raw for frame in (*found, frames.rest())) == stream


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


@pytest.mark.requirement("A4.25")
@given(st.text(min_size=1, max_size=3_000), st.integers(20, 200))
@settings(max_examples=tried(20, 60), deadline=None)
def test_passages_are_of_the_text_and_within_their_room(text: str, most: int) -> None:
    found = passages(text, terms_of(text[:20]), most=most, count=COUNTER.count)
    assert found.whole == (COUNTER.count(text) <= most)
    assert found.whole or COUNTER.count(found.text) <= most + 8


@pytest.mark.requirement("A4.18")
@given(st.text(max_size=1_500), st.integers(250, 400))
@settings(max_examples=tried(20, 60), deadline=None)
def test_pages_make_up_the_text_and_none_can_pass_for_markup(text: str, room: int) -> None:
    past, cursor, rebuilt = Past("0123456789ab", "a tool's result", 1, text), 0, ""
    for _ in range(60):
        told = format_page(past, cursor, room=room, counter=COUNTER)
        head, _, rest = told.text.partition("\n")
        more = json.loads(head)["next_cursor"] if head.startswith("{") else None
        lines = (rest if more else told.text).split("\n", 2)
        page = lines[2].rpartition("\n")[0]
        assert defang(page) == page
        rebuilt += json.loads(page) if "as a JSON string" in lines[1] else page
        if more is None:
            break
        assert more > cursor
        cursor = more
    assert rebuilt == text


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    opened = await Store.open("sqlite+aiosqlite:///:memory:")
    yield opened
    await opened.close()


async def remove(store: Store, conversation: str, *texts: str, role: str = "tool") -> list[str]:
    """Archive texts as removed from a conversation; their refs."""
    messages = [{"role": role, "tool_call_id": "c", "content": text} for text in texts]
    refs = [message_of(m, 5).ref for m in messages]
    originals = tuple(
        Original(ref=ref, role=role, tokens=5, body=json.dumps(m).encode(), text=text)
        for ref, m, text in zip(refs, messages, texts, strict=True)
    )
    cut = Cut(covers=1, prefix=conversation.encode(), text="s", tokens=1, version=1, ref=f"{len(conversation):012x}")
    change = Change(
        tenant="t",
        conversation=conversation,
        name=conversation,
        branch=f"b-{conversation}",
        expected=0,
        at=1.0,
        cut=cut,
        originals=originals,
        covered=tuple(refs),
    )
    await store.commit(change)
    return refs


TERSE = {
    "option b": "Option B costs 512 EUR",
    "option c": "Option C costs 313 EUR",
    "\u732b": "\u9ed1\u732b 77",
    "\U0001f389": "Party \U0001f389 at 8",
    "order 4821": "Order 4821: red",
    "order 48213": "Order 48213: blue",
}


@pytest.mark.parametrize(("query", "said"), TERSE.items())
def test_what_one_character_tells_apart_is_found_alone_or_first(query: str, said: str) -> None:
    texts = [*TERSE.values()]
    hits = rank(terms_of(query), texts)
    assert texts[hits[0].index] == said
    assert len(hits[0].found) > max((len(hit.found) for hit in hits[1:]), default=0)
