"""Thinking of earlier turns: when it goes, when it stays, and what a provider is sent instead."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import EditKind
from policies.messages import Transcript, chain_of, head_length
from policies.settings import ContextSettings, Layer
from policies.tokens import CHARS4
from proxy.wire.chat import body_of, message_of
from proxy.wire.counting import count_message
from proxy.wire.render import render
from tests.policies.play import strategy, window

reasoning = strategy("reasoning")

CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
Said = dict[str, Any]


def read(messages: Sequence[Said]) -> Transcript:
    """The transcript of messages in OpenAI's form."""
    found = tuple(message_of(m, count_message(m, CHARS4, model="sim")) for m in messages)
    head = head_length(found)
    return Transcript(
        messages=found,
        read=[body_of(m) for m in messages].__getitem__,
        chain=chain_of("tenant", found, head),
        head=head,
    )


def bounds(transcript: Transcript, **params: int) -> Bounds:
    found = bounds_for(
        transcript, settings=ContextSettings(), budget=window(100_000), known=ConversationState(), counter=CHARS4
    )
    return replace(found, layer=Layer(strategy="reasoning", params=params))


def thought(text: str = "", **extra: Any) -> Said:
    return {"role": "assistant", "content": text, "reasoning_content": "let me think " * 40, **extra}


def tool(text: str = "found it") -> Said:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


def user(text: str) -> Said:
    return {"role": "user", "content": text}


def stripped(draft: Draft) -> list[int]:
    return [p.index for p in draft.pieces if p.kind is EditKind.REASONING and p.index is not None]


def sent(draft: Draft, messages: Sequence[Said]) -> list[Said]:
    """The array that goes up."""
    raws = [json.dumps(m).encode() for m in messages]
    return [
        json.loads(bytes(raw))
        for raw in render(draft.pieces, raws, frozenset(), roles=[m.role for m in draft.transcript.messages])
    ]


def turns(count: int) -> list[Said]:
    """Turns of a tool step and an answer each, and a question that has no answer yet."""
    found: list[Said] = []
    for number in range(count):
        found += [user(f"question {number}"), thought(tool_calls=[CALL]), tool(), thought(f"answer {number}")]
    return [*found, user("and now?")]


@pytest.mark.requirement("A0.36")
def test_reasoning_is_removed_after_two_steps_and_the_key_stays_with_an_empty_string() -> None:
    messages = turns(2)
    draft = reasoning(untouched(read(messages)), bounds(read(messages)))
    assert stripped(draft) == [1, 3]  # the steps of the turn before last; the last step is 0, the one before it 1 old
    array = sent(draft, messages)
    assert array[1] == {**messages[1], "reasoning_content": ""}
    assert array[3] == {**messages[3], "reasoning_content": ""}
    assert [m for i, m in enumerate(array) if i not in (1, 3)] == [m for i, m in enumerate(messages) if i not in (1, 3)]


def test_all_reasoning_of_the_current_tool_loop_stays_however_old_it_is() -> None:
    loop = [m for _ in range(9) for m in (thought(tool_calls=[CALL]), tool())]
    transcript = read([user("do it"), *loop])
    assert reasoning(untouched(transcript), bounds(transcript)).edits == {}


def test_a_signed_thinking_part_goes_with_its_turn_and_stays_in_the_newest() -> None:
    parts = [{"type": "thinking", "thinking": "hm " * 200, "signature": "sig"}, {"type": "text", "text": "yes"}]
    sealed = {"type": "redacted_thinking", "data": "QUJD"}
    old = {"role": "assistant", "content": [*parts, sealed], "thinking_blocks": [parts[0]]}
    new = {"role": "assistant", "content": parts, "tool_calls": [CALL]}
    messages = [user("a"), old, user("b"), old, user("c"), new, tool()]
    draft = reasoning(untouched(read(messages)), bounds(read(messages)))
    array = sent(draft, messages)
    assert array[1] == {"role": "assistant", "content": [parts[1]]}
    assert array[3] == old  # one step old
    assert array[5] == new
