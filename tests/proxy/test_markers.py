"""Cache markers stay where the client put them, on whatever takes the place of their block, and nowhere else."""

import json
from typing import Any

import pytest

from policies.ledger import EditKind, PlannedMessage
from proxy.wire.chat import marker_for_summary
from proxy.wire.raw import write_value
from proxy.wire.render import render

SHORT = {"cache_control": {"type": "ephemeral"}}
LONG = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(words: str, **markers: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **markers}


def message(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def rendered(pieces: list[PlannedMessage], messages: list[dict[str, Any]]) -> list[Any]:
    raws = [write_value(m) for m in messages]
    roles = ["user"] * len(messages)  # several of the user's in a row stay apart
    return [json.loads(bytes(raw)) for raw in render(pieces, raws, frozenset(), roles=roles)]


def piece(index: int | None, words: str | None = None, kind: EditKind | None = None) -> PlannedMessage:
    return PlannedMessage(index, 10, words, kind)


@pytest.mark.requirement("A4.13")
@pytest.mark.parametrize(
    ("before", "gone", "after", "moved"),
    [(LONG, SHORT, SHORT, True), (LONG, LONG, SHORT, True), (SHORT, LONG, SHORT, False), (SHORT, SHORT, LONG, False)],
)
def test_a_marker_of_an_hour_never_comes_to_stand_behind_one_of_five_minutes(
    before: dict[str, Any], gone: dict[str, Any], after: dict[str, Any], moved: bool
) -> None:
    history = [
        message("user", [text("the task", **before)]),
        message("assistant", [text("said", **gone)]),
        message("user", [text("the end", **after)]),
    ]
    pieces = [piece(0), piece(None, "what was said"), piece(2)]
    assert marker_for_summary(pieces, [write_value(m) for m in history]) == (gone if moved else {})
    found = rendered(pieces, history)
    assert found[0] == history[0]
    assert found[2] == history[2]
    assert json.dumps(found).count("cache_control") <= json.dumps(history).count("cache_control")
