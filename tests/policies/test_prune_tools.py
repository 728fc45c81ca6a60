"""Definitions that nobody uses are left out while the bucket of tools is over its cap, once and for all."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, bounds_for, untouched
from policies.ledger import Decision
from policies.messages import ToolDefinition, Tools, Transcript
from policies.settings import Bucket, ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, decide, remember, step, strategy, talk, user, window

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


@pytest.mark.requirement("A4.9", "P3")
def test_one_definition_always_stays_because_an_empty_list_is_refused() -> None:
    assert len(left_out(offered(user("x")), 100_000)) == 199
    assert left_out(offered(user("x"), tools=TOOLS[:1]), 100_000) == []
    assert left_out(offered(user("x"), tools=[]), 100_000) == []


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
