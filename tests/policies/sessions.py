"""Recorded conversations as the messages that a state is read from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from policies.messages import ToolCall
from policies.text.segments import Source

HERE = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[3] / "shared" / "data"


def queue_session() -> list[Source]:
    """A short session of work with lists, errors, decisions and values that change."""
    return sources_in(json.loads((HERE / "queue_session.json").read_text(encoding="utf-8")))


def sources_in(messages: Sequence[Mapping[str, Any]]) -> list[Source]:
    """Messages in short form: calls are ``[id, name, arguments]``, results name the id that they answer."""
    made: dict[str, ToolCall] = {}
    found: list[Source] = []
    for position, message in enumerate(messages, 1):
        calls = tuple(ToolCall(i, name, json.dumps(arguments)) for i, name, arguments in message.get("calls", ()))
        made.update((c.id, c) for c in calls)
        answered = made.get(message.get("answers", ""))
        name, arguments = (answered.name, answered.arguments) if answered else ("", "")
        found.append(Source(position, message["role"], message["text"], name, arguments, calls=calls))
    return found


def shared_conversations(name: str) -> Iterator[tuple[list[Source], Mapping[str, Any]]]:
    """The conversations of a data set with what is known of them; skips where the set is absent."""
    path = SHARED / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{name} is not present")
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        made: dict[str, ToolCall] = {}
        yield [_source(i, m, made) for i, m in enumerate(row["messages"]) if m["role"] != "system"], row["meta"]


def _source(position: int, message: Mapping[str, Any], made: dict[str, ToolCall]) -> Source:
    """A message; ``made`` are the calls so far, of which a result names the one that it answers."""
    calls = tuple(
        ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()
    )
    made.update((c.id, c) for c in calls)
    call = made.get(message.get("tool_call_id") or "", ToolCall("", "", ""))
    return Source(position, message["role"], message.get("content") or "", call.name, call.arguments, calls=calls)
