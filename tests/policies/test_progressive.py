"""What was said long ago in fewer words: at which level, always from the original, and never what has to stay."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import (
    Bounds,
    ConversationState,
    Draft,
    bounds_for,
    broken_rules,
    replay,
    untouched,
)
from policies.effects import Failed, Summarize, Summary
from policies.ledger import EditKind
from policies.messages import ToolCall, Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.strategies.rewrite import Progressive
from policies.tokens import CHARS4
from tests.policies.answering import Model, texts
from tests.policies.play import Said, assistant, flow, remember, result, system, talk, user, window, words

progressive = flow("progressive")

NONE: Mapping[str, Param] = {}
TALK = " ".join("".join(pair) for pair in product("bcdfghjklmnp", "aeiouy", "rstvwz"))


def bounds(
    transcript: Transcript,
    aim: int = 0,
    params: Mapping[str, Param] = NONE,
    *,
    scope: str = "total",
    summarizer: str | None = "small",
    known: ConversationState | None = None,
) -> Bounds:
    policy = replace(ContextSettings(), summarizer=summarizer)
    limits = bounds_for(
        transcript, settings=policy, budget=window(200_000), known=known or ConversationState(), counter=CHARS4
    )
    return replace(limits, layer=Layer(strategy="progressive", scope=scope, params=params), aim=aim)


def original(n: int) -> str:
    return f"Row {n} of table_{n} is wrong. " + words(1_000, f"word{n:04}")


def steps(count: int) -> list[Said]:
    """Steps with a call and a large result each; the newest has number 0."""
    said: list[Said] = []
    for n in range(count - 1, -1, -1):
        call = ToolCall("call_0", "look", f'{{"row": {n}}}')
        said += [assistant(f"Looking at {n}.", call), result(original(n))]
    return said


def titled(asked: Summarize) -> Summary:
    """What the question is about, in a sentence, and about as many words as it may have."""
    found = re.search(r"Row (\d+) of table_\d+ is wrong", asked.prompt)
    assert found is not None
    return Summary(
        f"It turned out that row {found.group(1)} of table_{found.group(1)} is wrong. {TALK[: 2 * asked.max_tokens]}"
    )


def level_in(text: str) -> int:
    found = re.search(r"\[weir: level (\d), archived as [0-9a-f]{12}\]$", text)
    return int(found.group(1)) if found else 0


def levels(draft: Draft) -> dict[int, int]:
    """The level of each step's result, by the age of the step."""
    said = {p.index: p.text for p in draft.pieces if p.index is not None}
    messages = draft.transcript.messages
    found: dict[int, int] = {}
    for index, message in enumerate(messages):
        if message.is_result:
            age = (len(messages) - 1 - index) // 2
            found[age] = level_in(said[index] or "")
    return found


@pytest.mark.requirement("A0.65", "A0.77", "A0.74")
@pytest.mark.parametrize(
    ("age", "level"), [(0, 0), (1, 1), (5, 1), (6, 2), (20, 2), (21, 3), (1000, 3), (-1, 0), (10**9, 3)]
)
def test_the_level_follows_the_age_and_every_age_has_one(age: int, level: int) -> None:
    assert Progressive().level_of(age) == level


@pytest.mark.requirement("A0.65", "A0.74", "A0.77")
def test_in_the_array_every_result_stands_at_the_level_of_its_steps_age() -> None:
    transcript = talk(user("task"), *steps(1_002))
    draft = Model(lambda _: Failed("none")).run(progressive(untouched(transcript), bounds(transcript, summarizer=None)))
    found = levels(draft)
    assert [found[age] for age in (0, 1, 5, 6, 20, 21, 1000, 1001)] == [0, 1, 1, 2, 2, 3, 3, 3]
    assert draft.applied == {"progressive": 1_001}


@pytest.mark.requirement("A0.65")
def test_what_stays_is_about_30_and_5_and_1_percent_and_never_under_ten_tokens() -> None:
    facts = "\n".join(f"check {n}: server_{n} answered in {n} ms" for n in range(2_000))
    said: list[Said] = [user("task")]
    for n in range(30):
        said += [assistant("", ToolCall("call_0", "look", f'{{"n": {n}}}')), result(f"part {n}\n{facts}")]
    transcript = talk(*said)
    draft = Model(lambda _: Failed("none")).run(progressive(untouched(transcript), bounds(transcript, summarizer=None)))
    tails = 4 + 20
    for age, share in ((3, 0.30), (10, 0.05), (25, 0.01)):
        index = len(transcript.messages) - 1 - 2 * age
        assert 10 <= draft.pieces[index].tokens <= share * transcript.messages[index].tokens + tails
    asked = Model(titled)
    short = talk(user("task"), *steps(30))
    asked.run(progressive(untouched(short), bounds(short)))
    assert min(a.max_tokens for a in asked.asked) == 16, "a model needs a few tokens more for a title"


@pytest.mark.requirement("A0.65", "A0.66")
def test_every_level_is_made_of_the_original_and_not_of_the_level_before() -> None:
    said = steps(30)
    model, known = Model(titled), ConversationState()
    result_digest = talk(user("task"), *said).messages[2].digest
    seen: list[str] = []
    for count in (2, 7, 22):
        transcript = talk(user("task"), *said[: 2 * count])
        limits = bounds(transcript, known=known)
        replayed = replay(limits.transcript, known, limits.protection)
        model.asked.clear()
        draft = model.run(progressive(replayed, limits))
        known = replace(known, edits={**known.edits, **{e.key: e for e in draft.edits.values()}})
        (question,) = [a for a in model.asked if original(29)[:60] in a.prompt]
        assert words(1_000, "word0029") in question.prompt, "all of the original is read"
        assert question.key.startswith(result_digest.hex())
        (record,) = [r for r in draft.condensed if r.key.startswith(result_digest.hex())]
        assert record.original_tokens == transcript.messages[2].tokens
        assert bytes.fromhex(record.key.partition(":")[0]) == transcript.messages[2].digest
        assert record.ref == transcript.messages[2].ref
        seen.append(record.key.partition(":")[2])
        assert level_in(draft.pieces[2].text or "") == len(seen)
    assert seen == ["1", "2", "3"]


@pytest.mark.requirement("A0.65", "A0.66")
def test_a_level_is_asked_for_once_however_often_the_layer_runs() -> None:
    transcript, model = talk(user("task"), *steps(8)), Model(titled)
    limits = bounds(transcript)
    draft = model.run(progressive(untouched(transcript), limits))
    asked = len(model.asked)
    assert asked == 7
    again = model.run(progressive(draft, limits))
    assert again is draft
    assert len(model.asked) == asked


@pytest.mark.requirement("A0.65", "P2")
def test_levels_move_only_in_a_batch_so_that_the_prefix_stays_between_two() -> None:
    layer = Layer(strategy="progressive", at=0.85)
    policy = replace(ContextSettings(), summarizer="small", layers=(layer,))
    model, known, batches = Model(titled), ConversationState(), 0
    sent: list[tuple[str | None, ...]] = []
    for count in range(1, 26):
        transcript = talk(user("task"), *steps(25)[: 2 * count])
        decision = model.decide(transcript, budget=window(12_000), settings=policy, known=known)
        known = remember(known, decision, transcript)
        pieces = decision.pieces or untouched(transcript).pieces
        if not decision.is_new and sent:
            assert [p.text for p in pieces][: len(sent[-1])] == [*sent[-1]]
        batches += decision.is_new
        sent.append(tuple(p.text for p in pieces))
    assert 0 < batches < 12


@pytest.mark.requirement("A0.65", "A0.76")
def test_the_oldest_goes_first_and_no_more_than_the_target_takes() -> None:
    transcript = talk(user("task"), *steps(10))
    model = Model(titled)
    draft = model.run(progressive(untouched(transcript), bounds(transcript, transcript.tokens - 1_500)))
    assert sorted(texts(draft)) == [2, 4]
    assert draft.tokens <= transcript.tokens - 1_500
    assert len(model.asked) == 2


ANSWER = (
    "I looked at the logs of the night. They are long and there is a lot in them that does not matter here. "
    "The root cause is that worker_7 ran out of memory at 03:12 because cache_size was 512 MB. "
    "I decided to set cache_size to 128 MB instead of removing the cache. "
    "Let me know whether there is anything else that you would like me to look at in the meantime, I am happy to. "
) + "There were many more lines, which say the same thing again and again and are not repeated here. " * 12


@pytest.mark.requirement("A0.65")
def test_an_answer_keeps_its_findings_and_decisions_and_its_calls() -> None:
    call = ToolCall("call_0", "look", '{"path": "/var/log/worker.log", "lines": 4000}')
    said = [user("task"), assistant(ANSWER, call), result("seen"), *steps(3)]
    transcript = talk(*said)
    limits = bounds(transcript, summarizer=None)
    draft = Model(titled).run(progressive(untouched(transcript), limits))
    text = draft.pieces[1].text or ""
    assert "worker_7 ran out of memory at 03:12" in text
    assert "I decided to set cache_size to 128 MB" in text
    own = transcript.messages[1].tokens - CHARS4.count(ANSWER)
    assert draft.pieces[1].tokens == own + CHARS4.count(text), "what the call takes is still counted"
    assert transcript.messages[1].call_ids == ("call_0",)
    assert not broken_rules(draft)


@pytest.mark.requirement("A0.65")
def test_a_user_is_never_put_in_other_words_and_keeps_a_third_at_any_age() -> None:
    chat = "The shop is in Lisbon and opened in 2019. " + "It was rather quiet there on most of the days. " * 20
    transcript = talk(user("task"), user(chat), *steps(40), user("go on"))
    model = Model(titled)
    draft = model.run(progressive(untouched(transcript), bounds(transcript)))
    text = draft.pieces[1].text or ""
    assert level_in(text) == 1
    body = text.rpartition("\n[weir:")[0]
    assert all(sentence in chat for sentence in body.split("\n"))
    assert "The shop is in Lisbon and opened in 2019." in body
    assert all(chat[:40] not in a.prompt for a in model.asked)


@pytest.mark.requirement("A0.65")
def test_what_a_user_said_stays_word_for_word_and_what_is_protected_whole() -> None:
    rule = "Never push to main. " + "It was rather quiet there on most of the days. " * 20
    transcript = talk(
        system("be brief " * 100),
        user(words(800)),
        user(rule),
        assistant(words(800, "pinned"), keep=True),
        *steps(30),
        user(words(800, "newest")),
    )
    draft = Model(titled).run(progressive(untouched(transcript), bounds(transcript)))
    assert [draft.pieces[i].text for i in (0, 1, 3)] == [None] * 3
    shorter = (draft.pieces[2].text or "").splitlines()
    assert shorter[0] == "Never push to main."
    assert all(line in rule for line in shorter[:-1])
    assert draft.pieces[-1].text is None
    guarded = bounds(transcript).protection.all
    assert not guarded & set(texts(draft))


@pytest.mark.requirement("A4.7")
@pytest.mark.parametrize(("scope", "roles"), [("tool_outputs", {"tool"}), ("history", {"assistant"})])
def test_only_what_is_in_the_layers_scope_changes(scope: str, roles: set[str]) -> None:
    said: list[Said] = [user("task")]
    for n in range(4):
        said += [assistant(original(n), ToolCall("call_0", "look", f'{{"n": {n}}}')), result(original(50 + n))]
    transcript = talk(*said)
    draft = Model(titled).run(progressive(untouched(transcript), bounds(transcript, scope=scope)))
    assert {transcript.messages[i].role for i in texts(draft)} == roles


def test_what_something_else_stands_for_stays_and_what_was_summarised_may_get_shorter() -> None:
    transcript = talk(user("task"), *steps(10))
    gone = bounds(transcript).edited(2, words(700), EditKind.EVICT)
    summed = bounds(transcript).edited(4, words(200), EditKind.SUMMARY)
    draft = untouched(transcript).with_edits({2: gone, 4: summed}, new=False)
    done = Model(titled).run(progressive(draft, bounds(transcript)))
    assert done.pieces[2] == draft.pieces[2]
    assert level_in(done.pieces[4].text or "") == 2


@pytest.mark.requirement("A0.74")
def test_the_ages_of_the_levels_are_the_policys() -> None:
    transcript = talk(user("task"), *steps(8))
    limits = bounds(transcript, params={"l1_until": 2, "l2_until": 4})
    found = levels(Model(titled).run(progressive(untouched(transcript), limits)))
    assert [found[age] for age in (0, 1, 2, 3, 4, 5, 7)] == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.requirement("A0.75", "A0.78")
def test_an_echo_is_not_taken_but_what_code_says_and_of_short_messages_nobody_is_asked() -> None:
    transcript = talk(user("task"), *steps(4))
    echo = Model(lambda asked: Summary(asked.prompt))
    draft = echo.run(progressive(untouched(transcript), bounds(transcript)))
    alone = Model(titled).run(progressive(untouched(transcript), bounds(transcript, summarizer=None)))
    assert draft.edits == alone.edits
    assert {each.failure for each in draft.condensed if each.calls} == {"echo"}
    short: list[Said] = [user("task")]
    for n in range(4):
        short += [assistant("", ToolCall("call_0", "look", "{}")), result(words(100, f"word{n}"))]
    quiet = Model(titled)
    shortened = quiet.run(progressive(untouched(talk(*short)), bounds(talk(*short))))
    assert shortened.edits
    assert quiet.asked == []


def test_no_more_than_32_questions_are_asked_and_code_does_the_rest() -> None:
    transcript, model = talk(user("task"), *steps(60)), Model(titled)
    draft = model.run(progressive(untouched(transcript), bounds(transcript)))
    assert len(model.asked) == 32
    assert len(draft.edits) == 59


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 800), max_size=40), aim=st.integers(0, 4_000), model=st.booleans())
@pytest.mark.requirement("A0.77", "A0.78", "P2")
def test_nothing_ever_grows_pairs_stay_and_a_second_run_changes_nothing(
    sizes: list[int], aim: int, model: bool
) -> None:
    said: list[Said] = [user("task")]
    for n, size in enumerate(sizes):
        text = f"Row {n} of table_{n} is wrong. " + words(size, f"word{n:03}")
        said += [assistant(text, ToolCall("call_0", "look", "{}")), result(text)] if n % 3 else [user(text)]
    transcript = talk(*said)
    limits = bounds(transcript, aim, summarizer="small" if model else None)
    draft = Model(titled).run(progressive(untouched(transcript), limits))
    assert not broken_rules(draft)
    assert all(p.tokens < transcript.messages[n].tokens for n, p in enumerate(draft.pieces) if p.text is not None)
    assert Model(titled).run(progressive(draft, limits)).pieces == draft.pieces
