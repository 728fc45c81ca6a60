"""What was said long ago in fewer words: at which level, always from the original, and never what has to stay."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest

from policies.draft import Bounds, ConversationState, bounds_for, replay, untouched
from policies.effects import Summarize, Summary
from policies.messages import ToolCall, Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.strategies.progressive import Progressive
from policies.tokens import CHARS4
from tests.policies.answering import Model, texts
from tests.policies.play import Said, assistant, flow, result, talk, user, window, words

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


@pytest.mark.requirement("A0.65", "A0.77", "A0.74")
@pytest.mark.parametrize(
    ("age", "level"), [(0, 0), (1, 1), (5, 1), (6, 2), (20, 2), (21, 3), (1000, 3), (-1, 0), (10**9, 3)]
)
def test_the_level_follows_the_age_and_every_age_has_one(age: int, level: int) -> None:
    assert Progressive().level_of(age) == level


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


@pytest.mark.requirement("A4.7")
@pytest.mark.parametrize(("scope", "roles"), [("tool_outputs", {"tool"}), ("history", {"assistant"})])
def test_only_what_is_in_the_layers_scope_changes(scope: str, roles: set[str]) -> None:
    said: list[Said] = [user("task")]
    for n in range(4):
        said += [assistant(original(n), ToolCall("call_0", "look", f'{{"n": {n}}}')), result(original(50 + n))]
    transcript = talk(*said)
    draft = Model(titled).run(progressive(untouched(transcript), bounds(transcript, scope=scope)))
    assert {transcript.messages[i].role for i in texts(draft)} == roles
