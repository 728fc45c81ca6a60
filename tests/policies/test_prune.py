"""Old results beyond a protected amount are cleared together, or not at all."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, replay, untouched
from policies.ledger import EditKind
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from proxy.wire.codec import parse_chat
from proxy.wire.counting import Tokenizer
from proxy.wire.raw import write_value
from proxy.wire.transcripts import Transcripts
from tests.policies.play import (
    Said,
    assistant,
    decide,
    remember,
    result,
    step,
    strategy,
    system,
    talk,
    user,
    window,
    words,
)

prune = strategy("prune")

MARKER = "[Old tool result content cleared]"
CLEARED = 4 + len(MARKER) // 4
"""Tokens of a message whose content is the marker."""
CLEAR: dict[str, Param] = {"straddle": "clear"}


def bounds(transcript: Transcript, **params: Param) -> Bounds:
    settings = replace(ContextSettings(), placeholder="marker")
    limits = bounds_for(
        transcript, settings=settings, budget=window(200_000), known=ConversationState(), counter=CHARS4
    )
    return replace(limits, layer=Layer(strategy="prune", params=params), aim=0)


def freeing(tokens: int, word: str = "lorem") -> str:
    """A result's text that frees exactly so many tokens when the marker takes its place."""
    return words(tokens + CLEARED - 4, word)


def pruned(transcript: Transcript, **params: Param) -> Draft:
    return prune(untouched(transcript), bounds(transcript, **params))


def changed(draft: Draft) -> list[int]:
    return [p.index for p in draft.pieces if p.index is not None and p.kind is not None]


def filled(total: int, *said: Said | tuple[Said, ...]) -> Transcript:
    """A conversation with a system message that brings it to ``total`` tokens."""
    rest = talk(system(""), *said).tokens
    transcript = talk(system(words(total - rest)), *said)
    assert transcript.tokens == total
    return transcript


VISUAL = (
    user("Find out why the build is slow."),
    step(freeing(50_000, "log")),
    step(freeing(40_000, "trace")),
    step(words(24_000 - 4, "code")),
)


@pytest.mark.requirement("A3.8", "A3.19", "A3.21", "A3.7")
def test_of_150_000_tokens_the_results_of_50_and_40_are_cleared_and_that_of_24_stays() -> None:
    transcript = filled(150_000, *VISUAL)
    draft = pruned(transcript, **CLEAR)
    assert changed(draft) == [3, 5]
    assert draft.tokens == 60_000
    assert [draft.pieces[i].text for i in (3, 5)] == [MARKER, MARKER]
    assert {draft.pieces[i].kind for i in (3, 5)} == {EditKind.PRUNE}
    assert draft.pieces[7].text is None
    assert transcript.messages[7].tokens == 24_000
    assert [p.index for p in draft.pieces] == list(range(8))
    assert transcript.messages[3].answers == "call_0"


@pytest.mark.requirement("A3.21")
def test_the_result_that_the_protected_amount_ends_in_stays_unless_the_policy_clears_it() -> None:
    transcript = filled(150_000, *VISUAL)
    assert changed(pruned(transcript, straddle="keep")) == [3]
    assert changed(pruned(transcript)) == [3]
    assert pruned(transcript).tokens == 100_000


@pytest.mark.requirement("A3.15", "A3.6")
def test_of_95_000_scanned_tokens_12_outputs_worth_55_000_are_recovered_and_148_000_become_93_000() -> None:
    sizes = [4_583] * 11 + [55_000 - 11 * 4_583]
    old = [step(freeing(size, f"old{n:02}")) for n, size in enumerate(sizes)]
    kept = [step(words(8_000 - 4, f"new{n}")) for n in range(5)]
    transcript = filled(148_000, user("task"), *old, *kept)
    draft = pruned(transcript, **CLEAR)
    scanned = untouched(transcript).buckets()["tool_outputs"]
    assert scanned - 12 * CLEARED == 95_000
    assert len(changed(draft)) == 12
    assert transcript.tokens - draft.tokens == 55_000
    assert draft.tokens == 93_000
    assert (round(100 * 148_000 / 168_000, 1), round(100 * 93_000 / 168_000, 1)) == (88.1, 55.4)


@pytest.mark.requirement("A3.6", "A3.22")
@pytest.mark.parametrize(("gain", "cleared"), [(19_999, []), (20_000, []), (20_001, [2])])
def test_the_net_gain_has_to_be_above_the_minimum(gain: int, cleared: list[int]) -> None:
    transcript = talk(user("task"), step(freeing(gain, "old")), step(words(40_000 - 4)))
    assert changed(pruned(transcript)) == cleared


@pytest.mark.requirement("A3.22")
def test_what_the_markers_cost_counts_against_the_gain() -> None:
    small = [step(freeing(500, f"w{n:03}")) for n in range(41)]
    transcript = talk(user("task"), *small, step(words(40_000 - 4)))
    assert sum(m.tokens for m in transcript.messages[:-1] if m.is_result) == 41 * (500 + CLEARED)
    assert len(changed(pruned(transcript, minimum=20_499))) == 41
    assert changed(pruned(transcript, minimum=20_500)) == []


@pytest.mark.requirement("A3.6")
@pytest.mark.parametrize(
    ("newest", "straddle", "cleared"),
    [
        (39_999, "keep", []),  # the older one begins inside the protected amount
        (40_000, "keep", [2]),
        (39_999, "clear", [2]),
        (14_999, "clear", []),  # exactly 40,000 with the older one
        (15_000, "clear", [2]),
    ],
)
def test_the_protected_amount_ends_where_it_is_said_to(newest: int, straddle: str, cleared: list[int]) -> None:
    transcript = talk(user("task"), step(words(25_001 - 4, "old")), step(words(newest - 4)))
    assert changed(pruned(transcript, straddle=straddle)) == cleared


@pytest.mark.requirement("A3.6", "A3.19")
def test_the_latest_two_turns_are_skipped_and_not_added_up_where_there_are_more() -> None:
    old = (user("first"), step(words(30_000, "a")), step(words(30_000, "b")))
    middle = (user("second"), step(words(50_000, "c")))
    newest = (user("third"), step(words(50_000, "d")), assistant("done"))
    transcript = talk(*old, *middle, *newest)
    assert changed(pruned(transcript, **CLEAR)) == [2]
    assert changed(pruned(transcript, skip_turns=1, **CLEAR)) == [2, 4, 7]
    assert changed(pruned(transcript, skip_turns=0, **CLEAR)) == [2, 4, 7, 10]


@pytest.mark.requirement("A3.19")
def test_with_two_turns_or_fewer_only_the_amount_and_the_newest_step_protect() -> None:
    transcript = talk(user("first"), step(words(30_000, "a")), user("second"), step(words(50_000, "b")))
    assert changed(pruned(transcript, **CLEAR)) == [2]
    assert changed(pruned(transcript, protect=0)) == [2]


@pytest.mark.requirement("A3.22", "P2")
def test_a_second_run_changes_nothing_and_a_later_request_replays_the_first() -> None:
    transcript = filled(150_000, *VISUAL)
    first = pruned(transcript, **CLEAR)
    assert prune(first, bounds(transcript, **CLEAR)) is first
    known = ConversationState(edits={e.key: e for e in first.edits.values()}, length=len(transcript.chain))
    later = filled(150_000 + talk(step("more")).tokens - talk().tokens, *VISUAL, step("more"))
    limits = bounds(later, **CLEAR)
    again = replay(later, known, limits.protection)
    assert again.pieces[:8] == first.pieces
    assert prune(again, limits) is again


@pytest.mark.requirement("D13", "A3.7")
def test_a_placeholder_is_a_finding_a_marker_or_nothing_and_the_call_keeps_its_answer() -> None:
    transcript = talk(user("task"), step('{"order": "W7788"} ' + words(30_000)), step(words(40_000)))
    texts, limits = {}, bounds(transcript)
    placeholders: tuple[Literal["finding", "marker", "none"], ...] = ("finding", "marker", "none")
    for placeholder in placeholders:
        settings = replace(limits.settings, placeholder=placeholder)
        draft = prune(untouched(transcript), replace(limits, settings=settings))
        assert [p.index for p in draft.pieces] == list(range(5))
        texts[placeholder] = draft.pieces[2].text or ""
        assert draft.pieces[2].tokens == 4 + CHARS4.count(texts[placeholder])
    assert texts["finding"].startswith("[weir: result of look")
    assert transcript.messages[2].ref in texts["finding"]
    assert texts["marker"] == MARKER
    assert len(texts["none"]) == 1
    assert texts["none"].strip()


@pytest.mark.requirement("A0.38")
def test_pinned_results_stay_and_use_up_the_protected_amount() -> None:
    pinned = (assistant("", *step("")[0].calls), result(words(40_000, "p"), keep=True))
    transcript = talk(user("task"), step(words(30_000, "a")), pinned, step("x"))
    assert changed(pruned(transcript)) == [2]


@pytest.mark.requirement("A3.22")
@pytest.mark.parametrize(
    ("kind", "goes"),
    [
        (EditKind.PRUNE, False),
        (EditKind.EVICT, False),
        (EditKind.DEDUPE, False),
        (EditKind.MERGE, False),
        (EditKind.INGEST_CAP, True),
        (EditKind.TRUNCATE, True),
    ],
)
def test_what_stands_in_place_of_a_result_is_left_and_what_was_shortened_may_go(kind: EditKind, goes: bool) -> None:
    transcript = talk(user("task"), step(words(30_000, "a")), step(words(40_000)))
    limits = bounds(transcript, minimum=0)
    (edit,) = prune(untouched(transcript), limits).edits.values()
    before = untouched(transcript).with_edits({2: replace(edit, kind=kind, tokens=50)}, new=False)
    assert (prune(before, limits) is not before) is goes


def test_only_results_in_the_layers_scope_count() -> None:
    transcript = filled(150_000, *VISUAL)
    limits = bounds(transcript, **CLEAR)
    outputs = replace(limits, layer=replace(limits.layer, scope="tool_outputs"))
    history = replace(limits, layer=replace(limits.layer, scope="history"))
    assert changed(prune(untouched(transcript), outputs)) == [3, 5]
    assert changed(prune(untouched(transcript), history)) == []


@pytest.mark.requirement("A3.22")
async def test_a_result_that_is_a_list_of_parts_is_counted_by_what_the_parts_say() -> None:
    """Twenty thousand and one tokens in two parts are not two tokens, and the client's list is not changed."""
    texts = [words(10_005), words(10_004)]
    parts = [{"type": "text", "text": text} for text in texts]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": words(40_000)},
    ]
    body = write_value({"model": "sim", "messages": messages})
    reading = await Transcripts().read(parse_chat(body), tenant="t", model="sim", counter=Tokenizer().counter("chars4"))
    draft = pruned(reading.transcript)
    assert reading.transcript.messages[2].tokens == 4 + 20_009
    assert changed(draft) == [2]
    assert reading.transcript.tokens - draft.tokens == 20_001
    assert changed(pruned(reading.transcript, minimum=20_001)) == []
    assert write_value({"model": "sim", "messages": messages}) == body


@pytest.mark.requirement("A3.5", "D7")
def test_where_pruning_is_enough_no_model_is_asked_and_the_next_request_is_quiet() -> None:
    settings = replace(
        ContextSettings(),
        placeholder="marker",
        summarizer="same",
        layers=(
            Layer(strategy="prune", at=0.85, params=CLEAR),
            Layer(strategy="compact", at=0.85),
        ),
    )
    transcript = filled(150_000, *VISUAL)
    budget = window(200_000, reserve=32_000)
    decision = decide(transcript, budget=budget, settings=settings)
    assert [(r.layer, r.kept) for r in decision.trail] == [("prune", True)]
    assert decision.applied == {"prune": 2}
    assert decision.after == 60_000
    again = decide(
        transcript, budget=budget, settings=settings, known=remember(ConversationState(), decision, transcript)
    )
    assert (again.edits, again.pieces) == ((), decision.pieces)
