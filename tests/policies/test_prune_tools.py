"""Definitions that nobody uses are left out while the bucket of tools is over its cap, once and for all."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, replay, untouched
from policies.ledger import Decision, EditKind
from policies.messages import ToolDefinition, Tools, Transcript
from policies.settings import Bucket, ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, decide, remember, step, strategy, talk, user, window, words

prune_tools = strategy("prune_tools")

NONE: Mapping[str, Param] = {}
TOOLS = [ToolDefinition(f"tool_{n:03}", 100, f"Does thing number {n}.") for n in range(200)]
CAP = 16_000
RULES = replace(
    ContextSettings(),
    enforce="bucket",
    layers=(),
    buckets={"tools": Bucket(cap=CAP, on_overflow="prune-unused")},
)
BUDGET = replace(window(100_000), caps={"tools": CAP})


def offered(
    *said: Said | Sequence[Said], tools: Sequence[ToolDefinition] = TOOLS, chosen: Sequence[str] = (), other: int = 12
) -> Transcript:
    """A request with these definitions; ``other`` is what a request with tools costs beside them."""
    transcript = talk(*said, tools=sum(d.tokens for d in tools) + other)
    return replace(transcript, read_tools=lambda: Tools(tuple(tools), frozenset(chosen)))


def bounds(transcript: Transcript, aim: int, params: Mapping[str, Param] = NONE) -> Bounds:
    limits = bounds_for(
        transcript, settings=ContextSettings(), budget=window(200_000), known=ConversationState(), counter=CHARS4
    )
    return replace(limits, layer=Layer(strategy="prune_tools", scope="tools", at=1.0, params=params), aim=aim)


def left_out(transcript: Transcript, less: int, params: Mapping[str, Param] = NONE) -> list[str]:
    """Names that go so that the request gets ``less`` tokens smaller."""
    draft = prune_tools(untouched(transcript), bounds(transcript, transcript.tokens - less, params))
    return [d.name for d in draft.pruned]


def kept(decision: Decision) -> list[str]:
    return [d.name for d in TOOLS if d.name not in decision.pruned]


@pytest.mark.requirement("A4.9", "A0.150", "D17")
def test_as_few_definitions_go_as_the_target_takes() -> None:
    transcript = offered(user("hello"))
    assert left_out(transcript, 100) == ["tool_199"]
    assert left_out(transcript, 101) == ["tool_198", "tool_199"]
    assert left_out(transcript, 0) == []


@pytest.mark.requirement("A4.9")
def test_an_edit_of_a_definition_is_found_by_its_name_and_archives_the_original() -> None:
    transcript = offered(user("hello"))
    draft = prune_tools(untouched(transcript), bounds(transcript, transcript.tokens - 100))
    (edit,) = draft.tool_edits
    assert edit.digest == TOOLS[199].digest
    assert (edit.occurrence, edit.kind, edit.text, edit.tokens) == (0, EditKind.PRUNE_TOOLS, "", 0)
    assert edit.ref == edit.digest.hex()[:12]
    assert draft.tools == transcript.tools - 100
    assert draft.tokens == transcript.tokens - 100
    assert draft.applied == {"prune_tools": 1}


@pytest.mark.requirement("A4.9", "D17")
def test_a_tool_that_the_request_asks_for_or_that_is_called_in_the_history_stays() -> None:
    transcript = offered(
        user("hello"),
        *[step("x", tool="tool_003") for _ in range(1)],
        *[step("x", tool="tool_004") for _ in range(20)],
        tools=TOOLS[:6],
        chosen=["tool_005", "auto"],
    )
    assert left_out(transcript, 10_000) == ["tool_000", "tool_001", "tool_002"]


@pytest.mark.requirement("A4.9")
@pytest.mark.parametrize(
    ("params", "gone"),
    [
        ({}, ["a", "b"]),
        ({"steps": 9}, ["a", "b", "c"]),
        ({"steps": 10}, ["a", "b"]),
        ({"steps": 11}, ["a"]),
        ({"steps": 12}, []),
        ({"steps": 0}, ["a", "b", "c", "e"]),
    ],
)
def test_a_call_that_left_the_window_counts_as_use_for_so_many_steps(params: dict[str, Param], gone: list[str]) -> None:
    """All but the newest step were compacted away; they called a, b, c and eight times e, the newest calls d."""
    names = ["a", "b", "c", *["e"] * 8, "d"]
    tools = [ToolDefinition(name, 100) for name in "edcba"]
    transcript = offered(user("task"), *[step("x", tool=name) for name in names], tools=tools)
    limits = bounds(transcript, 1, params)
    draft = untouched(transcript)
    seen = replace(draft, pieces=tuple(p for p in draft.pieces if p.index in (0, 23, 24)))
    assert sorted(d.name for d in prune_tools(seen, limits).pruned) == gone
    assert prune_tools(draft, limits) is draft


@pytest.mark.requirement("A4.9")
def test_what_was_never_used_goes_before_what_was_used_longest_ago() -> None:
    names = ["a", "b", "c", *["d"] * 10]
    tools = [ToolDefinition(name, 100) for name in "abcde"]
    transcript = offered(user("task"), *[step("x", tool=name) for name in names], tools=tools)
    draft = untouched(transcript)
    draft = replace(draft, pieces=draft.pieces[:1])
    gone = []
    for less in (100, 200, 300, 400):
        pruned = {d.name for d in prune_tools(draft, bounds(transcript, draft.tokens - less)).pruned}
        gone.append("".join(sorted(pruned)))
    assert gone == ["e", "ae", "abe", "abce"]


@pytest.mark.requirement("A0.150")
def test_what_the_newest_question_speaks_of_stays_longest() -> None:
    tools = [
        ToolDefinition("list_orders", 100, "All orders of a customer."),
        ToolDefinition("get_weather", 100, "The weather of a city."),
        ToolDefinition("send_mail", 100, "Send a message to a customer."),
        ToolDefinition("searchFlights", 100, "Find a connection between two cities."),
    ]
    transcript = offered(user("What is the weather?"), assistant("Rain."), user("Any flights, then?"), tools=tools)
    assert left_out(transcript, 300) == ["list_orders", "get_weather", "send_mail"]
    assert left_out(transcript, 200) == ["get_weather", "send_mail"]
    asked = offered(user("Mail the customer, please, about the orders"), tools=tools)
    assert left_out(asked, 200) == ["get_weather", "searchFlights"]


@pytest.mark.requirement("A0.150")
def test_a_word_that_many_definitions_have_says_little() -> None:
    alike = [ToolDefinition(name, 100, "Of a customer's account.") for name in "abc"]
    transcript = offered(
        user("Does the customer get a refund on the account?"), tools=[*alike, ToolDefinition("d", 100, "A refund.")]
    )
    assert left_out(transcript, 300) == ["a", "b", "c"]


@pytest.mark.requirement("A0.150")
@pytest.mark.parametrize(("top", "count"), [(199, 1), (50, 150), (0, 199)])
def test_with_top_k_only_the_most_relevant_stay_beside_those_in_use(top: int, count: int) -> None:
    transcript = offered(user("I need thing number 7"))
    gone = left_out(transcript, 1, {"top_k": top})
    assert len(gone) == count
    assert "tool_007" not in gone


@pytest.mark.requirement("A0.150")
def test_with_top_k_the_bucket_still_has_to_fit() -> None:
    assert len(left_out(offered(user("thing")), 10_000, {"top_k": 150})) == 100


@pytest.mark.requirement("A4.9", "P3")
def test_one_definition_always_stays_because_an_empty_list_is_refused() -> None:
    assert len(left_out(offered(user("x")), 100_000)) == 199
    assert left_out(offered(user("x"), tools=TOOLS[:1]), 100_000) == []
    assert left_out(offered(user("x"), tools=[]), 100_000) == []


@pytest.mark.requirement("D17", "A4.37")
@pytest.mark.parametrize(("over", "acts"), [(0, False), (1, True)])
def test_definitions_are_pruned_only_above_the_cap(over: int, acts: bool) -> None:
    """At the cap it is an exact fit. Above it the work ends at 80 % of the cap, 12,800."""
    tools = [*TOOLS[:159], ToolDefinition("last", 88 + over)]
    transcript = offered(user("hello"), tools=tools)
    assert transcript.tools == CAP + over
    layer = Layer(strategy="prune_tools", scope="tools", at=1.0, min_savings=0)
    rules = replace(RULES, layers=(layer,))
    decision = decide(transcript, budget=BUDGET, settings=rules)
    assert bool(decision.pruned) is acts
    if acts:
        assert 12_700 < decision.buckets["tools"] <= 12_800


@pytest.mark.requirement("D17")
def test_a_request_that_does_not_fit_loses_no_tools_while_they_are_within_their_cap() -> None:
    said = [m for n in range(40) for m in (user(f"{words(60)} {n}"), assistant(f"{words(60)} {n}"))]
    transcript = offered(*said, tools=TOOLS[:10])
    decision = decide(transcript, budget=replace(window(5_000), caps={"tools": 1_100}), settings=RULES)
    assert decision.pruned == ()
    assert decision.applied == {"compact": 1}
    for cap, acts in ((transcript.tools, False), (transcript.tools - 1, True)):
        limits = bounds(transcript, 1)
        limits = replace(limits, budget=replace(limits.budget, caps={"tools": cap}))
        assert bool(prune_tools(untouched(transcript), limits).pruned) is acts


@pytest.mark.requirement("A0.150", "D17", "A4.9", "P2")
def test_of_200_tools_over_a_cap_of_16_000_the_same_set_is_kept_for_five_requests() -> None:
    said: list[Said] = [user("Start with thing number 5.")]
    known, sets, actions = ConversationState(), [], []
    for n in range(5):
        transcript = offered(*said)
        decision = decide(transcript, budget=BUDGET, settings=RULES, known=known)
        sets.append(kept(decision))
        actions.append(bool(decision.edits))
        known = remember(known, decision, transcript)
        said += [*step("done", tool=sets[-1][n]), assistant("ok"), user(f"Now thing number {190 + n}.")]
    assert sets[1:] == sets[:1] * 4
    assert actions == [True, False, False, False, False]
    assert sum(d.tokens for d in TOOLS if d.name in sets[0]) <= 12_800
    assert "tool_005" in sets[0]


@pytest.mark.requirement("D17", "A4.9")
def test_a_pruned_tool_that_is_asked_for_by_name_comes_back_for_that_request() -> None:
    transcript = offered(user("hello"))
    first = decide(transcript, budget=BUDGET, settings=RULES)
    known = remember(ConversationState(), first, transcript)
    assert "tool_199" in first.pruned
    longer = (user("hello"), assistant("hi"), user("use it"))
    asked = decide(offered(*longer, chosen=["tool_199"]), budget=BUDGET, settings=RULES, known=known)
    assert [name for name in first.pruned if name not in asked.pruned] == ["tool_199"]
    assert asked.buckets["tools"] == first.buckets["tools"] + 100
    assert asked.edits == ()
    after = decide(offered(*longer, assistant("ok"), user("go")), budget=BUDGET, settings=RULES, known=known)
    assert after.pruned == first.pruned


@pytest.mark.requirement("P2", "A4.15")
def test_new_definitions_are_pruned_on_top_of_what_is_left_out_already() -> None:
    transcript = offered(user("hello"))
    first = decide(transcript, budget=BUDGET, settings=RULES)
    known = remember(ConversationState(), first, transcript)
    more = [*TOOLS, *[ToolDefinition(f"extra_{n}", 100) for n in range(100)]]
    later = offered(user("hello"), assistant("hi"), user("x"), tools=more)
    second = decide(later, budget=BUDGET, settings=RULES, known=known)
    assert set(first.pruned) < set(second.pruned)
    assert len(second.pruned) == len(set(second.pruned))
    assert {e.digest for e in second.edits}.isdisjoint(e.digest for e in first.edits)
    assert second.buckets["tools"] <= 12_800


@pytest.mark.requirement("A4.9")
def test_a_second_run_changes_nothing_even_where_the_target_is_out_of_reach() -> None:
    transcript = offered(user("hello"), *step("x", tool="tool_001"))
    for aim in (1, transcript.tokens - 5_000):
        limits = bounds(transcript, aim)
        draft: Draft = prune_tools(untouched(transcript), limits)
        assert draft.pruned
        assert prune_tools(draft, limits) is draft
        known = ConversationState(edits={e.key: e for e in draft.tool_edits})
        assert replay(limits.transcript, known, limits.protection).tokens == draft.tokens
