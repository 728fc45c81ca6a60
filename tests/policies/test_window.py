"""The newest messages or turns stay, whole units of them, and nothing that is protected goes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, bounds_for, broken_rules, replay, untouched
from policies.ledger import Cut
from policies.messages import ToolCall, Transcript, units
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, decide, remember, result, strategy, system, talk, user, words
from tests.policies.play import window as budget_of
from tests.profile import tried

window = strategy("window")

EMPTY = ConversationState()
SUMMARY = (
    "<weir-123456>\nWritten by Weir from 6 earlier messages (v1, archived as 0123456789ab).\nfacts\n</weir-123456>"
)


def bounds(
    transcript: Transcript,
    params: Mapping[str, Param],
    *,
    known: ConversationState = EMPTY,
    scope: str = "total",
) -> Bounds:
    limits = bounds_for(transcript, settings=ContextSettings(), budget=budget_of(200_000), known=known, counter=CHARS4)
    return replace(limits, layer=Layer(strategy="window", scope=scope, params=params), aim=0)


def exchanges(count: int, size: int = 60) -> list[Said]:
    return [said for n in range(count) for said in (user(f"{words(size)} {n}"), assistant(f"{words(size)} so {n}"))]


def summarised(transcript: Transcript, covers: int, *, text: str = SUMMARY, origin: str = "extract") -> Cut:
    prefix = transcript.chain[covers - 1]
    return Cut(
        covers=covers,
        prefix=prefix,
        text=text,
        tokens=4 + CHARS4.count(text),
        version=1,
        ref=prefix.hex()[:12],
        before=(0,),
        origin=origin,
        narrative="what happened",
    )


@pytest.mark.requirement("A4.38")
def test_the_checkpoint_of_a_summary_made_for_the_same_request_is_kept_with_it() -> None:
    transcript = talk(*exchanges(30))
    fresh = untouched(transcript).with_cut(summarised(transcript, 10), checkpoint='{"goal": "g"}')
    draft = window(fresh, bounds(transcript, {"messages": 10}))
    assert draft.checkpoint == '{"goal": "g"}'
    assert draft.cut is not fresh.cut


@pytest.mark.requirement("A1.18", "P2")
def test_the_action_names_the_window_and_the_next_request_begins_with_the_same_messages() -> None:
    rules = replace(ContextSettings(), layers=(Layer(strategy="window", at=0.85, params={"messages": 20}),))
    transcript = talk(system("s"), *exchanges(51, size=100))
    budget = budget_of(11_000)
    decision = decide(transcript, budget=budget, settings=rules)
    assert decision.applied == {"sliding_window": 1}
    assert [r.layer for r in decision.trail] == ["window"]
    longer = talk(system("s"), *exchanges(52, size=100))
    later = decide(longer, budget=budget, settings=rules, known=remember(ConversationState(), decision, transcript))
    assert decision.pieces is not None
    assert later.pieces is not None
    assert later.pieces[: len(decision.pieces)] == decision.pieces
    assert not later.is_new


@st.composite
def histories(draw: st.DrawFn) -> list[Said]:
    """Arrays that an upstream accepts: steps with one call or more, calls that share an id, pins, late rules."""
    said = [system("s")] * draw(st.integers(0, 2)) + [user("task")]
    for n in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(["user", "assistant", "step", "wide", "system"]))
        keep = True if draw(st.integers(0, 11)) == 0 else None
        if kind == "user":
            said.append(user(f"{words(20)}{n}", keep=keep))
        elif kind == "assistant":
            said.append(assistant(f"{words(20)}{n}", keep=keep))
        elif kind == "system":
            said.append(system(f"rule {n}"))
        else:
            calls = [ToolCall(f"call_{i}", "look", f'{{"n": {n}}}') for i in range(1 if kind == "step" else 3)]
            said += [assistant("", *calls), *[result(f"{words(30)}{n}{c.id}", c.id, keep=keep) for c in calls]]
    return said


@settings(max_examples=tried(25, 150), deadline=None)
@given(
    said=histories(),
    params=st.one_of(
        st.fixed_dictionaries({"messages": st.integers(0, 30), "note": st.booleans()}),
        st.fixed_dictionaries({"turns": st.integers(1, 6)}),
    ),
    scope=st.sampled_from(["total", "history", "tool_outputs"]),
)
@pytest.mark.requirement("A1.8", "A1.17", "P3", "A2.9")
def test_whatever_the_array_no_result_loses_its_call_and_a_second_run_changes_nothing(
    said: list[Said], params: dict[str, Param], scope: str
) -> None:
    transcript = talk(*said)
    limits = bounds(transcript, params, scope=scope)
    draft = window(untouched(transcript), limits)
    assert broken_rules(draft) == ()
    present = {p.index for p in draft.pieces if p.index is not None}
    assert limits.protection.all <= present
    assert set(range(transcript.head)) <= present
    assert all(set(u.indices) <= present or not set(u.indices) & present for u in units(transcript.messages))
    newest = params.get("messages")
    if isinstance(newest, int) and scope == "total":
        assert set(range(max(0, len(said) - newest), len(said))) <= present
    assert window(draft, limits) is draft
    assert draft.tokens <= transcript.tokens
    if draft.cut is not None:
        known = ConversationState(cuts=(draft.cut,))
        assert replay(limits.transcript, known, limits.protection).pieces == draft.pieces
