"""Recall in its parts: what of a stream is shown, how texts rank, what is brought back unasked."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.effects import Alike, Compare, Effect, Failed, Reply
from policies.ledger import Cut, PlannedMessage
from policies.messages import Transcript, chain_of
from policies.settings import ContextSettings, Recall
from policies.summary.material import defang
from proxy.recall.archive import (
    Archive,
    Past,
    SearchResult,
    elsewhere,
    passages,
    rank,
    tell_found,
    tell_page,
    terms_of,
)
from proxy.recall.tool import (
    Earlier,
    RoundView,
    added_up,
    definition_of,
    definition_tokens,
    offer_for,
    turn_of,
    with_more,
)
from proxy.store import Store
from proxy.store.records import Change, Original
from proxy.wire.chat import body_of, message_of
from proxy.wire.codec import parse_chat
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


@pytest.mark.requirement("P5")
def test_a_later_round_goes_on_under_the_first_ones_name() -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2}}
    before = {"prompt_tokens": 9, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 1}}
    earlier = Earlier({"id": "first", "created": 7, "model": "m-1"}, spoke=True, usages=(before,))
    view = RoundView("recall", earlier, may_recall=True)
    events = [
        event({"role": "assistant", "content": ""}),
        event({"content": "Here."}),
        event({"tool_calls": [call("own", "{}", index=3)]}),
        event({}, finish="tool_calls"),
        event(usage=usage),
        DONE,
    ]
    stream = shown(events, view)
    found = payloads(stream)
    assert {(c["id"], c["created"], c["model"]) for c in found} == {("first", 7, "m-1")}
    assert found[0]["choices"][0]["delta"] == {"content": "\n\nHere."}
    assert found[1]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert found[-1]["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 7,
        "total_tokens": 27,
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert stream.endswith(DONE)


@pytest.mark.requirement("P5")
def test_a_call_that_is_not_answered_any_more_vanishes_with_its_finish_reason() -> None:
    view = RoundView("recall", None, may_recall=False)
    events = [event({"content": "So."}), event({"tool_calls": [call("recall", "{}")]}), event({}, finish="tool_calls")]
    found = payloads(shown([*events, DONE], view))
    assert [c["choices"][0]["finish_reason"] for c in found] == [None, "stop"]
    assert not view.recalling


def test_usage_of_one_round_is_its_own() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "other": "x"}
    assert added_up(usage, []) == usage


def offered(policy: Recall = Recall(tool=True), **fields: Any) -> str | None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    offer = offer_for(parse_chat(body), ContextSettings(recall=policy), COUNTER)
    return None if offer is None else offer.name


OWN = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.requirement("A4.25")
def test_when_a_request_may_carry_the_tool() -> None:
    named = {"type": "function", "function": {"name": "own"}}
    assert offered() == "recall"
    assert offered(tools=[OWN], tool_choice="auto", n=1) == "recall"
    assert offered(tools=[OWN], tool_choice="none") == "recall"
    assert offered(tools=[OWN], tool_choice=named) == "recall"
    assert offered(tools=[OWN] * 127) == "recall"
    assert offered(tools=[OWN] * 128) is None
    assert offered(tool_choice="none") is None
    assert offered(n=2) is None
    assert offered(functions=[{"name": "f"}]) is None
    assert offered(tools=[OWN | {"function": {"name": "recall"}}]) is None
    assert offered(Recall(tool=True, name="look_up"), tools=[OWN | {"function": {"name": "recall"}}]) == "look_up"
    assert offered(Recall(tool=False)) is None


@pytest.mark.parametrize("model", ["gpt-4o", "sim", "claude-sonnet-4"])
def test_the_definition_is_short(model: str) -> None:
    assert definition_tokens(definition_of("recall"), COUNTER, model=model, alone=False) < 120


def test_tool_and_messages_are_put_behind_the_clients_own_bytes() -> None:
    body = b'{"messages": [1, 2 ] , "tools":[ {"a": 1.0} ], "seed": 1e5}'
    assert (
        with_more(body, "tools", [b'{"b":2}']) == b'{"messages": [1, 2 ] , "tools":[ {"a": 1.0} ,{"b":2}], "seed": 1e5}'
    )
    assert with_more(body, "messages", [b"3", b"4"]).startswith(b'{"messages": [1, 2 ,3,4] , "tools"')
    assert with_more(b'{"messages": []}', "tools", [b"{}"]) == b'{"messages": [],"tools":[{}]}'


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


def test_what_a_provider_wants_back_goes_back_with_the_call() -> None:
    made = call("recall", "{}") | {"extra_content": {"google": {"thought_signature": "s"}}}
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "tool_calls": [made]}
    turn = turn_of(message, "recall")
    assert turn is not None
    assert turn.message["reasoning_content"] == "hm"
    assert "refusal" not in turn.message
    assert turn.message["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "s"}}
    assert "index" not in turn.message["tool_calls"][0]


@pytest.mark.requirement("A4.25")
def test_all_words_stand_before_some_and_rare_before_common() -> None:
    texts = [
        "the port of the server is 8443, the token is abc",
        "server server server port",
        "port tx-991 of another server",
        "port",
        "nothing of it",
    ]
    assert rank(terms_of("server port token"), texts)[0].index == 0
    assert rank(terms_of("what was tx-991 port"), texts)[0].index == 2
    ties = rank(terms_of("server port"), ["a server port", "b", "c server port"])
    assert [m.index for m in ties] == [2, 0]
    assert [
        m.index for m in rank(terms_of("\u53d6\u6d88\u653f\u7b56"), ["x", "\u822a\u73ed\u53d6\u6d88\u653f\u7b56"])
    ] == [1]


@pytest.mark.requirement("A4.25")
@given(st.text(min_size=1, max_size=3_000), st.integers(20, 200))
@settings(max_examples=60, deadline=None)
def test_passages_are_of_the_text_and_within_their_room(text: str, most: int) -> None:
    found = passages(text, terms_of(text[:20]), most=most, count=COUNTER.count)
    assert found.whole == (COUNTER.count(text) <= most)
    assert found.whole or COUNTER.count(found.text) <= most + 8


@pytest.mark.requirement("A4.25")
@pytest.mark.parametrize("room", [249, 250, 400, 1_500])
def test_what_is_found_stays_within_the_room_and_says_first_what_is_left_out(room: int) -> None:
    words = "\n".join(f"line {n} about the gateway" for n in range(300))
    pasts = [Past(f"{n:012x}", f"result of t{n}", 900, f"{words}\nkey gw-77 of {n}", n, 20) for n in range(12)]
    terms = terms_of("gateway gw-77")
    told = tell_found(
        SearchResult(tuple(pasts), tuple(rank(terms, [p.text for p in pasts])), tuple(terms)),
        room=room,
        counter=COUNTER,
    )
    assert told.tokens <= room
    first = told.text.partition("\n")[0]
    assert ("no room" in first) == (room < 250)
    if room >= 400:
        assert "truncated" in first
        assert "gw-77 of 11" in told.text


@pytest.mark.requirement("A4.18")
@given(st.text(max_size=1_500), st.integers(250, 400))
@settings(max_examples=60, deadline=None)
def test_pages_make_up_the_text_and_none_can_pass_for_markup(text: str, room: int) -> None:
    past, cursor, rebuilt = Past("0123456789ab", "a tool's result", 1, text), 0, ""
    for _ in range(60):
        told = tell_page(past, cursor, room=room, counter=COUNTER)
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


def transcript_of(messages: Sequence[Mapping[str, Any]]) -> Transcript:
    read = tuple(message_of(m, COUNTER.count(body_of(m).everything) + 4) for m in messages)
    chain = chain_of("t", read, 1)
    return Transcript(messages=read, read=lambda i: body_of(messages[i]), chain=chain, head=1)


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": "Look at the invoices."},
    {"role": "assistant", "content": None, "tool_calls": [call("list_invoices", '{"year": 2023}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": "invoice INV-20931 of Globex, overdue"},
    {"role": "assistant", "content": "There is one that is overdue."},
    {"role": "user", "content": "And the contracts?"},
]


def archive_of(store: Store, **more: Any) -> Archive:
    transcript = transcript_of(HISTORY)
    cut = Cut(covers=3, prefix=transcript.chain[2], text="s", tokens=1, version=1, ref="aaaaaaaaaaaa")
    pieces = [PlannedMessage(0, 5), PlannedMessage(None, 1, "s"), PlannedMessage(4, 5), PlannedMessage(5, 5)]
    given: dict[str, Any] = {"edits": (), "cuts": (cut,), "pieces": pieces, **more}
    return Archive(
        transcript=transcript,
        tenant="t",
        conversation="c",
        named=True,
        store=store,
        unstored=lambda *_: None,
        **given,
    )


@pytest.mark.requirement("A4.25", "P9")
async def test_what_the_client_sends_is_found_and_read_where_the_store_has_nothing(store: Store) -> None:
    archive = archive_of(store)
    hits = await archive.find("overdue invoice")
    assert [hits.pasts[m.index].text for m in hits.hits] == ["invoice INV-20931 of Globex, overdue"]
    past = hits.pasts[hits.hits[0].index]
    assert (past.origin, past.position, past.of) == ('result of list_invoices({"year": 2023})', 4, 6)
    assert await archive.read(past.ref) == past
    covered = await archive.read("aaaaaaaaaaaa")
    assert covered is not None
    assert covered.text.splitlines() == [
        "user: Look at the invoices.",
        'assistant: list_invoices {"year": 2023}',
        "tool: invoice INV-20931 of Globex, overdue",
    ]
    assert await archive.read("bbbbbbbbbbbb") is None


@pytest.mark.requirement("A4.25")
async def test_vectors_rank_anew_and_their_failure_changes_nothing(store: Store) -> None:
    asked: list[Compare] = []

    async def likes_the_last(effect: Effect) -> Reply:
        assert isinstance(effect, Compare)
        asked.append(effect)
        return Alike(tuple(n / 10 for n in range(1, len(effect.pairs) + 1)))

    async def fails(_: Effect) -> Reply:
        return Failed("status_500")

    plain = await archive_of(store).find("invoices")
    ranked = await archive_of(store, ask=likes_the_last, model="embed").find("invoices")
    failed = await archive_of(store, ask=fails, model="embed").find("invoices")
    assert asked[0].model == "embed"
    assert asked[0].texts[0] == "invoices"
    assert len(ranked.hits) == 3  # the newest texts fill up what the words have found
    assert ranked.hits[-1].index == plain.hits[0].index
    assert failed.hits == plain.hits


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


@pytest.mark.requirement("A4.25", "P3")
async def test_what_the_client_no_longer_sends_is_found_in_the_store_of_its_own_conversation(store: Store) -> None:
    [mine] = await remove(store, "c", "the gateway listens on port 9443")
    [theirs] = await remove(store, "other", "the gateway listens on port 1111")
    archive = archive_of(store)
    hits = await archive.find("gateway port")
    assert [hits.pasts[m.index].ref for m in hits.hits] == [mine]
    read = await archive.read(mine)
    assert read is not None
    assert read.text == "the gateway listens on port 9443"
    assert await archive.read(theirs) is None


@pytest.mark.requirement("A4.25")
async def test_what_the_client_no_longer_sends_is_handed_over_to_be_searched(store: Store) -> None:
    [sent, unsent] = await remove(store, "c", "reservation XEWRD9, flight HAT052", "reservation ZZTOP1 for James Lee")
    await remove(store, "other", "reservation OTHER1 is nobody's business")
    found = await elsewhere(store, "t", "c", "Which reservation was it?", known={sent})
    assert [(each.ref, each.role, each.text) for each in found] == [
        (unsent, "tool", "reservation ZZTOP1 for James Lee")
    ]
    assert await elsewhere(store, "t", "c", "Which reservation was it?", known={sent, unsent}) == ()
    assert await elsewhere(store, "t", "c", "Thanks!", known={sent}) == ()


@pytest.mark.requirement("A4.25")
async def test_what_is_alike_is_handed_over_though_the_client_sends_it(store: Store) -> None:
    [sent] = await remove(store, "c", "the automobile is parked at the north gate")

    async def alike(_: str) -> Sequence[tuple[Original, float]]:
        [only] = await store.search("t", "automobile")
        return [(only, 0.9)]

    found = await elsewhere(store, "t", "c", "Where is my car?", known={sent}, alike=alike)
    assert [(each.ref, each.alike) for each in found] == [(sent, True)]


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
