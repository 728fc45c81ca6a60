"""Hidden rounds in their parts: where they go back in what a client sends back, and when the tool is offered."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.settings import ContextSettings, Recall
from proxy.exchange.send import is_linked
from proxy.recall.elements import ListView, MessagesRecall, ResponsesRecall
from proxy.recall.tool import offer_for
from proxy.wire.anthropic import MESSAGES
from proxy.wire.chat import digest_of
from proxy.wire.codec import HiddenRound, write_rounds
from proxy.wire.counting import Tokenizer
from proxy.wire.responses import RESPONSES

COUNTER = Tokenizer().counter("o200k_base")
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
USE = {"type": "tool_use", "id": "toolu_r", "name": "recall", "input": {"query": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_r", "content": "found"}
ROUND = HiddenRound(2, 1, [USE], [RESULT])


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def reply(content: object, **more: Any) -> bytes:
    return json.dumps({"role": "assistant", "content": content, **more}).encode()


def sent_up(raw: bytes, rounds: Sequence[HiddenRound], shown: int) -> list[tuple[str, list[str]]]:
    """The messages that an assistant's becomes: their roles, and the types of their blocks."""
    written = MESSAGES.with_rounds(raw, write_rounds(rounds, shown))
    messages = json.loads(b"[" + bytes(written) + b"]")
    return [(m["role"], [b["type"] for b in m["content"]]) for m in messages]


@pytest.mark.requirement("A4.25")
def test_an_answer_is_cut_where_its_round_was() -> None:
    raw = reply([THOUGHT, text("a"), THOUGHT, text("b")])
    assert sent_up(raw, [ROUND], 4) == [
        ("assistant", ["thinking", "text", "tool_use"]),
        ("user", ["tool_result"]),
        ("assistant", ["thinking", "text"]),
    ]
    again = HiddenRound(2, 1, [USE], [RESULT])
    assert len(sent_up(raw, [ROUND, again], 4)) == 5
    assert [role for role, _ in sent_up(raw, [HiddenRound(4, 2, [USE], [RESULT])], 4)] == ["assistant", "user"]


@pytest.mark.requirement("A4.25")
def test_an_answer_without_its_thinking_is_cut_by_what_else_it_says() -> None:
    """Some clients leave thinking out, and Weir does where it is not valid any more."""
    raw = reply([text("a"), text("b")])
    assert sent_up(raw, [ROUND], 4) == [
        ("assistant", ["text", "tool_use"]),
        ("user", ["tool_result"]),
        ("assistant", ["text"]),
    ]
    assert sent_up(reply("a"), [ROUND], 3)[0] == ("assistant", ["text", "tool_use"])
    half = reply([THOUGHT, text("a"), text("b")])
    assert MESSAGES.with_rounds(half, write_rounds([ROUND], 4)) == half


@pytest.mark.requirement("A4.25")
def test_what_belongs_to_an_answer_that_was_given_up_does_not_go_up() -> None:
    raw = reply([THOUGHT, text("a"), THOUGHT, text("b")])
    skips = write_rounds([], 4, 2)
    assert json.loads(MESSAGES.with_rounds(raw, skips))["content"] == [THOUGHT, text("b")]
    assert RESPONSES.with_rounds(b'{"a":1},{"b":2},{"c":3},{"d":4}', skips) == b'{"c":3},{"d":4}'
    fewer = reply([text("a"), text("b")])
    assert MESSAGES.with_rounds(fewer, skips) == fewer


@pytest.mark.requirement("A4.25", "P4")
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("kind", ["reasoning", "item_reference"])
def test_the_same_words_of_another_run_are_another_answer(kind: str, skipped: int) -> None:
    """What was thought for them has another id: behind that OpenAI refuses the hidden call, and they without it."""
    call = {"type": "function_call", "call_id": "c", "id": "fc_1"}
    kept = write_rounds([HiddenRound(1, 0, [call], [])], 2, skipped, ["rs_1", "msg_1"])
    other = json.dumps({"type": kind, "id": "rs_2"}).encode() + b',{"type":"item_reference","id":"msg_2"}'
    assert RESPONSES.with_rounds(other, kept) == other
    own = other.replace(b"_2", b"_1")
    assert RESPONSES.with_rounds(own, kept) != own


@pytest.mark.requirement("P1", "A4.25")
def test_the_bytes_of_what_the_client_sends_stay() -> None:
    raw = b'{"role": "assistant", "content": [ {"a":1.0 , "type":"text"}, {"type": "x", "b": 1e5}], "more": true}'
    written = bytes(MESSAGES.with_rounds(raw, write_rounds([HiddenRound(1, 1, [USE], [RESULT])], 2)))
    assert written.startswith(b'{"role":"assistant","content":[{"a":1.0 , "type":"text"},')
    assert written.endswith(b'{"role": "assistant", "content": [{"type": "x", "b": 1e5}], "more": true}')
    items = b'{"type":"reasoning","id":"rs_1"},{"type": "message" , "id":"msg_1"}'
    call, output = {"type": "function_call", "call_id": "c"}, {"type": "function_call_output", "call_id": "c"}
    run = bytes(RESPONSES.with_rounds(items, write_rounds([HiddenRound(1, 0, [call], [output])], 2)))
    assert run.startswith(b'{"type":"reasoning","id":"rs_1"},{"type":"function_call"')
    assert run.endswith(b',{"type": "message" , "id":"msg_1"}')


@pytest.mark.requirement("A4.25")
def test_an_answer_is_known_again_however_an_sdk_writes_it() -> None:
    given = [THOUGHT, {**text("a"), "citations": None}, {**USE, "caller": {"type": "direct"}, "name": "own"}]
    back = [{"text": "a", "type": "text"}, {"name": "own", "input": {"query": "x"}, "type": "tool_use", "id": "t"}]
    several = [*given[:2], {"citations": None, **text("b")}]
    assert digest_of(MESSAGES.view(reply(given))) == digest_of(MESSAGES.view(reply(back)))
    assert digest_of(MESSAGES.view(reply(several))) == digest_of(MESSAGES.view(reply([text("a"), text("b")])))


def offered(codec: Any, **fields: Any) -> bool:
    body = json.dumps({"model": "m", codec.array: [{"role": "user", "content": "x"}], **fields}).encode()
    return offer_for(codec.parse(body), ContextSettings(recall=Recall(tool=True)), COUNTER) is not None


@pytest.mark.requirement("A4.25")
def test_when_a_request_may_carry_the_tool() -> None:
    mine = {"name": "own", "input_schema": {"type": "object"}}
    assert offered(MESSAGES)
    assert offered(MESSAGES, tool_choice={"type": "auto"})
    assert not offered(MESSAGES, tool_choice={"type": "none"})
    assert not offered(MESSAGES, tool_choice={"type": "any"})
    assert offered(MESSAGES, tools=[mine], tool_choice={"type": "none"})
    assert not offered(MESSAGES, tools=[{**mine, "name": "recall"}])
    assert offered(RESPONSES, tools=[{"type": "function", "name": "own"}, {"type": "web_search"}])
    assert not offered(RESPONSES, tools=[{"type": "function", "name": "recall"}])
    assert not offered(RESPONSES, tool_choice="none")
    assert is_linked(MESSAGES.parse(b'{"thread":{"type":"create"},"messages":[]}'))
    assert is_linked(RESPONSES.parse(b'{"previous_response_id":"resp_1","input":[]}'))
    assert not is_linked(RESPONSES.parse(b'{"previous_response_id":null,"input":[]}'))


@pytest.mark.requirement("A4.25")
def test_reasoning_that_nobody_keeps_does_not_go_back() -> None:
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "recall", "arguments": '{"query": "x"}'},
    ]
    answer = {"output": items}
    kept, lost = (ResponsesRecall(stateless=each) for each in (False, True))
    turn = lost.turn(answer, "recall")
    assert turn is not None
    assert turn.calls[0].query == "x"
    assert [item["type"] for item in kept.sent(turn, ["t"])] == ["reasoning", "function_call", "function_call_output"]
    sent = lost.sent(turn, ["t"])
    assert [(item["type"], item.get("id")) for item in sent] == [
        ("function_call", None),
        ("function_call_output", None),
    ]
    sealed = {"output": [{**items[0], "encrypted_content": "gAAA"}, items[1]]}
    again = lost.turn(sealed, "recall")
    assert again is not None
    assert lost.sent(again, ["t"])[0]["id"] == "rs_1"


@pytest.mark.requirement("A4.25")
def test_where_the_answer_has_to_be_json_nothing_is_put_before_it() -> None:
    first = {"id": "msg_1", "content": [THOUGHT, text("Let me look."), USE], "usage": {"output_tokens": 4}}
    last = {"id": "msg_2", "content": [text("{}")], "stop_reason": "end_turn", "usage": {"output_tokens": 2}}
    surface = MessagesRecall(joins=False)
    turn = surface.turn(first, "recall")
    assert turn is not None
    assert [block["type"] for block in turn.hidden] == ["thinking", "text", "tool_use"]
    final = surface.final([first, last], [turn], "recall")
    assert (final["id"], final["content"]) == ("msg_1", [text("{}")])
    assert final["usage"] == {"output_tokens": 6}


def stream_of(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events)


def block(index: int, opened: Mapping[str, Any], *deltas: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": opened},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


ROUND_ONE = stream_of(
    [
        {"type": "message_start", "message": {"id": "msg_1", "content": [], "usage": {"input_tokens": 9}}},
        *block(0, {"type": "thinking", "thinking": ""}, {"type": "thinking_delta", "thinking": "h\u00e4"}),
        {"type": "ping"},
        *block(1, text(""), {"type": "text_delta", "text": "Let "}, {"type": "text_delta", "text": "me."}),
        *block(
            2,
            {**USE, "input": {}},
            {"type": "input_json_delta", "partial_json": '{"que'},
            {"type": "input_json_delta", "partial_json": 'ry": "x"}'},
        ),
        *block(3, {**USE, "id": "toolu_o", "name": "own", "input": {}}),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ]
)
SHOWN = ROUND_ONE[: ROUND_ONE.index(b'event: content_block_start\ndata: {"type": "content_block_start", "index": 2')]


def view_of(may_recall: bool = True) -> ListView:
    return MessagesRecall().view("recall", None, may_recall=may_recall)


@pytest.mark.requirement("P5")
@given(st.lists(st.integers(0, len(ROUND_ONE)), max_size=12))
def test_any_chunking_shows_the_same_bytes(cuts: list[int]) -> None:
    places = sorted({0, *cuts, len(ROUND_ONE)})
    view = view_of()
    shown = b"".join(view.feed(ROUND_ONE[a:b]) for a, b in zip(places, places[1:], strict=False)) + view.end()
    assert shown == SHOWN
    assert view.recalling
    turn = view.turn()
    assert turn is not None
    assert [call.query for call in turn.calls] == ["x"]
    assert [*turn.shown, *turn.hidden] == [{"type": "thinking", "thinking": "h\u00e4"}, text("Let me."), USE]
    assert view.leaves().usages == ({"input_tokens": 9, "output_tokens": 7},)


@pytest.mark.requirement("P5")
def test_a_call_that_is_not_answered_any_more_vanishes_with_its_stop_reason() -> None:
    without_own = ROUND_ONE.replace(b'"own"', b'"recall"')
    view = view_of(may_recall=False)
    shown = view.feed(without_own) + view.end()
    assert b'"tool_use"' not in shown
    assert b'"stop_reason":"end_turn"' in shown
    assert view.complete


@pytest.mark.requirement("P5")
@pytest.mark.parametrize(
    "arguments",
    [b'{\\"que', b"[1]", b"", b'{\\"query\\": \\"x\\"}}'],
)
def test_a_call_that_the_model_did_not_write_to_its_end_is_answered_in_words(arguments: bytes) -> None:
    events = block(0, {**USE, "input": {}}, {"type": "input_json_delta", "partial_json": "ARGS"})
    view = view_of()
    view.feed(stream_of(events).replace(b"ARGS", arguments))
    turn = view.turn()
    assert turn is not None
    assert turn.calls[0].problem
    assert isinstance(turn.hidden[0]["input"], dict)
