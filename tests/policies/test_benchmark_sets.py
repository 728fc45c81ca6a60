import hashlib
import json
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sets
from proxy.wire.counting import Vocabulary, vocabulary_directories
from tests.profile import soak

pytestmark = soak

PLANNED = {
    "rules": (60, 12_000, 16_000),
    "rules_in_english": (60, 11_000, 16_000),
    "rules_many": (1, 46_000, 52_000),
    "facts300": (2, 128_000, 144_000),
    "facts300_plain": (2, 128_000, 144_000),
    "questions": (40, 17_000, 30_000),
    "laundering": (26, 9_000, 16_000),
    "grounding": (80, 8_500, 12_500),
    "revised_values": (20, 9_000, 16_000),
}


@cache
def rows(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(sets.load(name))


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary("o200k_base", vocabulary_directories())


def tokens(row: dict[str, Any]) -> int:
    return sum(vocabulary().count(m["content"] or "") + 4 for m in row["messages"])


def where(messages: list[dict[str, Any]], needles: list[str]) -> list[int]:
    """The messages that hold all of them, in any case of letters; there the case must be right."""
    found = [n for n, m in enumerate(messages) if all(s.lower() in (m["content"] or "").lower() for s in needles)]
    assert all(needle in messages[n]["content"] for n in found for needle in needles)
    return found


@pytest.mark.parametrize("name", sets.SETS)
def test_every_set_has_its_rows_of_the_planned_size_with_ids_of_their_own(name: str) -> None:
    count, least, most = PLANNED[name]
    assert len(rows(name)) == count
    assert len({row["meta"]["id"] for row in rows(name)}) == count
    sizes = [tokens(row) for row in rows(name)[::2]]
    assert least <= min(sizes)
    assert max(sizes) <= most


@pytest.mark.parametrize("name", sets.SETS)
def test_a_fact_stands_in_one_message_of_the_one_who_said_it_and_later_words_stand_later(name: str) -> None:
    for row in rows(name):
        messages = row["messages"]
        for fact in row["meta"]["facts"]:
            first = fact.get("superseded") or fact["needles"]
            assert where(messages, first) == [fact["message"]], row["meta"]["id"]
            assert messages[fact["message"]]["role"] == fact["said_by"]
            assert fact["question"] or name in {"rules_many", "laundering", "grounding"}
            if "superseded" in fact:
                assert fact["needles"] == fact["later"]
                assert where(messages, fact["later"]) == [fact["later_message"]]
                assert fact["later_message"] > fact["message"]
                assert messages[fact["later_message"]]["role"] == fact["said_by"]
            if fact["kind"] == "laundering":
                assert fact["said_by"] != "user"


@pytest.mark.parametrize("name", sets.SETS)
def test_every_row_is_a_request_a_provider_would_take(name: str) -> None:
    for row in rows(name):
        messages = row["messages"]
        assert messages[-1]["role"] == ("assistant" if name == "questions" else "user")
        named = [call["id"] for message in messages for call in message.get("tool_calls", ())]
        assert len(named) == len(set(named))
        asked: set[str] = set()
        for before, message in zip(messages, messages[1:], strict=False):
            if message["role"] == "tool":
                assert before["role"] in {"assistant", "tool"}
                assert message["tool_call_id"] in asked
            else:
                assert before["role"] != message["role"] or before["role"] == "system"
            asked = {call["id"] for call in message.get("tool_calls", ())} or asked


@pytest.mark.parametrize("name", sets.SETS)
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    def digest(rows: Any) -> str:
        return hashlib.sha256(json.dumps(list(rows), ensure_ascii=False).encode()).hexdigest()

    assert digest(islice(sets.load(name), 3)) == digest(rows(name)[:3])


@pytest.mark.parametrize("name", ["rules_in_english", "rules_many", "facts300"])
def test_written_chats_stand_in_for_the_shared_ones_where_these_are_not_there(name: str) -> None:
    row = next(sets.load(name, Path("/nonexistent")))
    assert row["meta"]["carrier"] == "written"
    assert len(row["meta"]["facts"]) == len(rows(name)[0]["meta"]["facts"])


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


def test_what_the_other_sets_are_made_of() -> None:
    carriers = Counter(row["meta"]["carrier"] for row in rows("questions"))
    assert carriers == {"written": 20, "loops": 20}
    said_by = {fact["said_by"] for row in rows("questions") for fact in row["meta"]["facts"]}
    assert said_by == {"user", "assistant", "tool"}
    for row in rows("laundering"):
        (fact,) = row["meta"]["facts"]
        assert fact["kind"] == "laundering"
        assert all(claim in row["meta"]["note"] for claim in fact["claims"])
    for row in rows("revised_values"):
        assert all("superseded" in fact for fact in row["meta"]["facts"])
        assert any(m["role"] == "tool" for m in row["messages"])
    lies = [row for row in rows("grounding") if row["meta"]["lie"]]
    assert len(lies) == 40
    assert sum(row["meta"]["language"] == "en" for row in lies) == 20
    sentences = [row["meta"]["sentence"] for row in rows("grounding")]
    assert len(sentences) == len(set(sentences))
    for row in rows("grounding"):
        first, last = row["meta"]["source"]
        assert first <= row["meta"]["facts"][0]["message"] <= last
        assert row["meta"]["sentence"] not in "".join(m["content"] or "" for m in row["messages"])


def test_a_question_does_not_repeat_the_words_that_answer_it() -> None:
    for row in (*rows("facts300"), *rows("facts300_plain"), *rows("questions"), *rows("revised_values")):
        for fact in row["meta"]["facts"]:
            assert not any(needle.lower() in fact["question"].lower() for needle in fact["needles"])


def test_the_texts_stay_small() -> None:
    assert sum(path.stat().st_size for path in sets.TEXTS.rglob("*") if path.is_file()) <= 700_000
