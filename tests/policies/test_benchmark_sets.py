import hashlib
import json
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sets
from benchmarks.retention import O200k

PLANNED = {
    "rules": (60, 12_000, 16_000),
    "rules_in_english": (60, 11_000, 16_000),
    "rules_many": (1, 46_000, 52_000),
    "facts300": (2, 128_000, 144_000),
}
NOWHERE = Path("/nonexistent")


@cache
def rows(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(sets.load(name))


@cache
def vocabulary() -> O200k:
    return O200k()


def tokens(row: dict[str, Any]) -> int:
    return sum(vocabulary().count(m["content"] or "") + 4 for m in row["messages"])


def holds(message: dict[str, Any], needles: list[str]) -> bool:
    return all(needle in (message["content"] or "") for needle in needles)


@pytest.mark.parametrize("name", sets.SETS)
def test_every_set_has_its_rows_of_the_planned_size_with_ids_of_their_own(name: str) -> None:
    count, least, most = PLANNED[name]
    assert len(rows(name)) == count
    assert len({row["meta"]["id"] for row in rows(name)}) == count
    sizes = [tokens(row) for row in rows(name)]
    assert least <= min(sizes)
    assert max(sizes) <= most


@pytest.mark.parametrize("name", sets.SETS)
def test_a_fact_stands_in_one_message_of_the_one_who_said_it_and_later_words_stand_later(name: str) -> None:
    for row in rows(name):
        messages = row["messages"]
        for fact in row["meta"]["facts"]:
            first = fact.get("superseded") or fact["needles"]
            assert [n for n, m in enumerate(messages) if holds(m, first)] == [fact["message"]], row["meta"]["id"]
            assert messages[fact["message"]]["role"] == fact["said_by"]
            assert fact["question"] or name == "rules_many"
            if "superseded" in fact:
                assert fact["needles"] == fact["later"]
                assert [n for n, m in enumerate(messages) if holds(m, fact["later"])] == [fact["later_message"]]
                assert fact["later_message"] > fact["message"]
                assert messages[fact["later_message"]]["role"] == fact["said_by"]
            if fact["kind"] == "laundering":
                assert fact["said_by"] != "user"


@pytest.mark.parametrize("name", sets.SETS)
def test_every_row_is_a_request_a_provider_would_take(name: str) -> None:
    for row in rows(name):
        messages = row["messages"]
        assert messages[-1]["role"] in {"user", "tool"}
        asked: set[str] = set()
        for before, message in zip(messages, messages[1:], strict=False):
            if message["role"] == "tool":
                assert before["role"] in {"assistant", "tool"}
                assert message["tool_call_id"] in asked
            else:
                assert before["role"] != message["role"]
            asked = {call["id"] for call in message.get("tool_calls", ())} or asked


@pytest.mark.parametrize("name", sets.SETS)
def test_the_same_seed_gives_the_same_bytes_with_and_without_the_shared_chats(name: str) -> None:
    def digest(rows: Any) -> str:
        return hashlib.sha256(json.dumps(list(rows), ensure_ascii=False).encode()).hexdigest()

    assert digest(sets.load(name)) == digest(rows(name))
    assert digest(islice(sets.load(name, NOWHERE), 4)) == digest(islice(sets.load(name, NOWHERE), 4))


@pytest.mark.parametrize("language", sets.LANGUAGES)
def test_a_carrier_says_no_sentence_twice_and_many_of_them(language: str) -> None:
    carriers = [row for row in rows("rules") if row["meta"]["language"] == language]
    for row in carriers:
        own = [m["content"] for m in row["messages"] if m["content"] and "tool_call_id" not in m]
        said = Counter(s for text in own for s in sets.sentences(text) if text not in sets.texts("acks")[language])
        assert max(said.values()) == 1
        assert len(said) >= 300


def test_rules_cover_the_places_and_languages_and_facts_cover_300_turns() -> None:
    places = Counter((row["meta"]["language"], row["meta"]["facts"][0]["place"]) for row in rows("rules"))
    assert {place for _, place in places} == {"own", "attached", "passing", "revised", "revoked", "tool"}
    assert all((language, place) in places for language in sets.LANGUAGES for _, place in places)
    (many,) = rows("rules_many")
    assert len(many["meta"]["facts"]) == 45
    assert len({fact["language"] for fact in many["meta"]["facts"]}) == 6
    for row in rows("facts300"):
        facts = row["meta"]["facts"]
        assert len(facts) == 60
        assert sum("superseded" in fact for fact in facts) == 10
        assert Counter(m["role"] for m in row["messages"])["user"] == 300
        assert {fact["said_by"] for fact in facts} == {"user", "assistant", "tool"}


def test_a_question_does_not_repeat_the_words_that_answer_it() -> None:
    for row in rows("facts300"):
        for fact in row["meta"]["facts"]:
            assert not any(needle.lower() in fact["question"].lower() for needle in fact["needles"])


def test_the_texts_stay_small() -> None:
    assert sum(path.stat().st_size for path in sets.TEXTS.rglob("*") if path.is_file()) <= 700_000
