"""The recorded agent run that ships with Weir: messages, tools, and which literals its tool calls needed later."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

FILE = "recorded_run.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recorded run.

    ``requests`` are the indices of its assistant messages: message ``i`` answered a request with ``messages[:i]``.
    ``literals`` are by such an index the values from earlier messages that the answer's tool call needs.
    """

    id: str
    source: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    requests: tuple[int, ...]
    literals: dict[int, tuple[str, ...]]


def load_recording() -> Recording:
    """The run of ``data/recorded_run.jsonl``; NOTICE.md beside it says where it is from."""
    raw = json.loads(files("proxy.cli").joinpath("data", FILE).read_text(encoding="utf-8"))
    literals: dict[int, tuple[str, ...]] = {}
    for fact in raw["meta"]["facts"]:
        for index in fact["needed_at"]:
            literals[index] = (*literals.get(index, ()), fact["value"])
    messages = tuple(raw["messages"])
    return Recording(
        id=raw["meta"]["id"],
        source=raw["meta"]["source"],
        messages=messages,
        tools=tuple(raw["tools"]),
        requests=tuple(i for i, message in enumerate(messages) if message["role"] == "assistant"),
        literals=literals,
    )
