"""Cache markers stay where the client put them, on whatever takes the place of their block, and nowhere else."""

import json
from typing import Any

import pytest

from policies.ledger import EditKind, PlannedMessage
from proxy.wire.chat import content_with, marker_for_summary, marker_within
from proxy.wire.raw import write_value
from proxy.wire.render import render

SHORT = {"cache_control": {"type": "ephemeral"}}
LONG = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
OPENAI = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def text(words: str, **markers: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **markers}


def message(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def rendered(pieces: list[PlannedMessage], messages: list[dict[str, Any]]) -> list[Any]:
    return [json.loads(bytes(raw)) for raw in render(pieces, [write_value(m) for m in messages], frozenset())]


def piece(index: int | None, words: str | None = None, kind: EditKind | None = None) -> PlannedMessage:
    return PlannedMessage(index, 10, words, kind)


@pytest.mark.requirement("A4.13")
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("all of it", "gone"),
        ([text("all of it")], "gone"),
        ([text("all of it", cache_control=None)], "gone"),
        ([text("all of it", **SHORT)], [text("gone", **SHORT)]),
        ([text("one", **LONG), text("two", **SHORT), text("three")], [text("gone", **SHORT)]),
        ([text("all of it", **OPENAI)], [text("gone", **OPENAI)]),
        ([text("all of it", **OPENAI, **LONG)], [text("gone", **LONG, **OPENAI)]),
        ([text("one", **LONG), "a bare string"], [text("gone", **LONG)]),
    ],
)
def test_a_replaced_message_keeps_the_last_marker_of_its_content(content: Any, expected: Any) -> None:
    given = message("tool", content, tool_call_id="c1")
    (found,) = rendered([piece(0, "gone", EditKind.EVICT)], [given])
    assert found == message("tool", expected, tool_call_id="c1")


@pytest.mark.requirement("A4.13")
def test_a_marker_on_the_message_itself_stays_there() -> None:
    given = message("tool", "all of it", tool_call_id="c1", **SHORT)
    assert rendered([piece(0, "gone", EditKind.EVICT)], [given]) == [given | {"content": "gone"}]


@pytest.mark.requirement("A4.13")
def test_empty_text_carries_no_marker() -> None:
    assert content_with("", SHORT) == ""
    assert content_with("said", {}) == "said"
    assert marker_within(None) == {}


@pytest.mark.requirement("A4.13")
def test_the_text_that_stands_for_a_picture_keeps_the_pictures_marker() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}, **OPENAI}
    given = message("user", [text("look"), image, text("well?", **SHORT)])
    (found,) = rendered([piece(0, "[image a.png]", EditKind.MEDIA)], [given])
    assert found["content"] == [text("look"), text("[image a.png]", **OPENAI), text("well?", **SHORT)]


@pytest.mark.requirement("A4.13")
def test_a_message_that_stays_keeps_its_bytes_whatever_its_marker() -> None:
    raw = b'{"content": [ {"cache_control" : {"ttl":"1h", "type":"ephemeral"},"text":"x","type":"text"}],"role":"user"}'
    assert [bytes(r) for r in render([piece(0)], [raw], frozenset())] == [raw]


HISTORY = [
    message("system", [text("rules", **LONG)]),
    message("user", "the task"),
    message("assistant", "one"),
    message("user", [text("a document", **SHORT)]),
    message("assistant", "two"),
    message("user", "the end"),
]
SUMMARIZED = [piece(0), piece(1), piece(None, "what was said"), piece(5)]


@pytest.mark.requirement("A4.13")
def test_a_summary_takes_over_the_last_marker_of_what_it_stands_for() -> None:
    assert rendered(SUMMARIZED, HISTORY)[2] == message("user", [text("what was said", **SHORT)])
    twice = [*HISTORY[:2], message("assistant", [text("one", **LONG)]), *HISTORY[3:]]
    assert rendered(SUMMARIZED, twice)[2] == message("user", [text("what was said", **SHORT)])


@pytest.mark.requirement("A4.13")
def test_a_summary_of_unmarked_messages_is_a_string() -> None:
    plain = [*HISTORY[:3], message("user", 'it says "cache_control"'), *HISTORY[4:]]
    assert rendered(SUMMARIZED, plain)[2] == message("user", "what was said")


@pytest.mark.requirement("A4.13")
def test_messages_that_are_dropped_without_a_summary_take_their_markers_with_them() -> None:
    assert rendered([piece(0), piece(1), piece(5)], HISTORY) == [HISTORY[0], HISTORY[1], HISTORY[5]]


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
