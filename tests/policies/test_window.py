"""The newest messages or turns stay, whole units of them, and nothing that is protected goes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, broken_rules, replay, untouched
from policies.ledger import Cut
from policies.messages import ToolCall, Transcript, units
from policies.settings import Bucket, ContextSettings, Layer, Param
from policies.strategies.drop import OUTSIDE as NOTE
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, decide, remember, result, step, strategy, system, talk, user, words
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


def slid(transcript: Transcript, **params: Param) -> Draft:
    return window(untouched(transcript), bounds(transcript, params))


def order(draft: Draft) -> list[int | None]:
    return [p.index for p in draft.pieces]


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


@pytest.mark.requirement("A1.8", "A1.13", "A1.17")
@pytest.mark.parametrize("keep", [20, 30])
def test_of_51_exchanges_the_newest_messages_stay_with_system_and_task(keep: int) -> None:
    transcript = talk(system("You are support."), *exchanges(51))
    draft = slid(transcript, messages=keep)
    assert order(draft) == [0, 1, *range(103 - keep, 103)]
    assert draft.cut is not None
    assert (draft.cut.text, draft.cut.tokens, draft.cut.origin) == ("", 0, "sliding_window")
    assert draft.cut.covers == 102 - keep
    assert draft.applied == {"sliding_window": 1}
    assert broken_rules(draft) == ()


@pytest.mark.requirement("A1.8")
@pytest.mark.parametrize(("count", "gone"), [(19, False), (20, False), (21, False), (22, True)])
def test_what_is_short_enough_is_left_alone(count: int, gone: bool) -> None:
    """Of 21 messages the oldest is the task, which stays."""
    said = [user("task"), *[assistant(f"{words(9)} {n}") for n in range(count - 1)]]
    draft = untouched(talk(system("s"), *said))
    done = window(draft, bounds(draft.transcript, {"messages": 20}))
    assert (done is not draft) is gone
    if gone:
        assert order(done) == [0, 1, *range(3, 23)]


@pytest.mark.requirement("A1.17")
def test_a_step_that_the_window_begins_in_stays_whole() -> None:
    calls = [ToolCall(f"c{n}", "look", "{}") for n in range(4)]
    wide = (assistant("", *calls), *[result(words(50), c.id) for c in calls])
    transcript = talk(user("task"), exchanges(3), wide, assistant("read"), user("now"))
    assert order(slid(transcript, messages=3)) == [0, *range(7, 14)]
    assert order(slid(transcript, messages=2)) == [0, 12, 13]


@pytest.mark.requirement("A1.17")
def test_system_messages_inside_the_window_do_not_count() -> None:
    transcript = talk(*exchanges(6), system("rule"), *exchanges(1), system("another"), user("now"))
    assert order(slid(transcript, messages=3)) == [0, *range(12, 17)]
    assert order(slid(transcript, messages=4)) == [0, *range(11, 17)]


@pytest.mark.requirement("A1.8")
@pytest.mark.parametrize("newest", [0, 1])
def test_the_newest_message_is_the_smallest_window(newest: int) -> None:
    assert order(slid(talk(*exchanges(4)), messages=newest)) == [0, 6, 7]
    assert order(slid(talk(*exchanges(4), user("now")), messages=newest)) == [0, 8]


@pytest.mark.requirement("A4.11", "A2.8", "A2.9")
@pytest.mark.parametrize(("turns", "first"), [(8, 8), (7, 12), (1, 36)])
def test_turns_are_kept_whole(turns: int, first: int) -> None:
    said = [(user(f"q{n}"), step(f"{words(90)}{n}"), assistant(f"a{n}")) for n in range(10)]
    transcript = talk(*[m for turn in said for m in turn])
    assert order(slid(transcript, turns=turns)) == [0, *range(first, 40)]


@pytest.mark.requirement("A4.11")
@pytest.mark.parametrize(("count", "gone"), [(7, False), (8, False), (9, True)])
def test_a_conversation_of_eight_turns_is_short_enough_for_a_window_of_eight(count: int, gone: bool) -> None:
    transcript = talk(*exchanges(count))
    assert slid(transcript, turns=8).changed is gone


@pytest.mark.requirement("D6", "A2.25")
def test_one_turn_of_sixty_steps_is_cut_by_steps() -> None:
    transcript = talk(user("task"), *[step(f"{words(100)}{n}") for n in range(60)])
    draft = slid(transcript, turns=8)
    assert order(draft) == [0, *range(105, 121)]
    assert broken_rules(draft) == ()


@pytest.mark.requirement("A0.38", "A1.8")
def test_system_messages_task_pinned_and_the_newest_question_stay_wherever_they_stand() -> None:
    pinned = (assistant("", ToolCall("call_0", "look", "{}")), result("pinned", keep=True))
    late = [said for n in range(9) for said in step(f"{words(50)}{n}")]
    transcript = talk(system("s"), user("task"), exchanges(2), pinned, system("rule"), exchanges(2), user("now"), late)
    assert order(slid(transcript, messages=4)) == [0, 1, 6, 7, 8, 13, *range(28, 32)]


@pytest.mark.requirement("A1.8")
def test_a_note_is_left_where_the_policy_wants_one() -> None:
    transcript = talk(*exchanges(20))
    draft = slid(transcript, messages=10, note=True)
    assert order(draft) == [0, None, *range(30, 40)]
    assert draft.cut is not None
    assert draft.cut.text == NOTE.format(count=29, ref=draft.cut.ref)
    assert draft.pieces[1].tokens == 4 + CHARS4.count(draft.cut.text)
    assert order(slid(transcript, messages=10, note=False)) == [0, *range(30, 40)]


def test_where_a_note_would_cost_more_than_what_goes_nothing_goes() -> None:
    transcript = talk(user("task"), assistant("ok"), user("go"), assistant("ok"))
    assert slid(transcript, messages=2).changed
    assert not slid(transcript, messages=2, note=True).changed


@pytest.mark.requirement("A4.38", "D13")
def test_a_summary_that_the_window_passes_over_stays_in_front_of_it() -> None:
    transcript = talk(*exchanges(30))
    known = ConversationState(cuts=(summarised(transcript, 10),))
    limits = bounds(transcript, {"messages": 10, "note": True}, known=known)
    replayed = replay(limits.transcript, known, limits.protection)
    assert order(replayed)[:3] == [0, None, 10]
    draft = window(replayed, limits)
    assert order(draft) == [0, None, *range(50, 60)]
    assert draft.pieces[1].text == SUMMARY
    assert draft.cut is not None
    assert (draft.cut.origin, draft.cut.version) == ("sliding_window", 2)
    assert draft.cut.tokens == known.cuts[0].tokens
    again = replace(known, cuts=(*known.cuts, draft.cut))
    assert replay(limits.transcript, again, limits.protection).pieces == draft.pieces


@pytest.mark.requirement("A4.38")
def test_the_checkpoint_of_a_summary_made_for_the_same_request_is_kept_with_it() -> None:
    transcript = talk(*exchanges(30))
    fresh = untouched(transcript).with_cut(summarised(transcript, 10), checkpoint='{"goal": "g"}')
    draft = window(fresh, bounds(transcript, {"messages": 10}))
    assert draft.checkpoint == '{"goal": "g"}'
    assert draft.cut is not fresh.cut


@pytest.mark.requirement("A1.8")
def test_a_summary_whose_messages_are_older_than_the_window_is_left_alone() -> None:
    transcript = talk(*exchanges(30))
    summary = untouched(transcript).with_cut(summarised(transcript, 50))
    for newest in (10, 11, 12):
        assert window(summary, bounds(transcript, {"messages": newest})) is summary
    for turns in (5, 6, 20):
        assert window(summary, bounds(transcript, {"turns": turns})) is summary
    assert order(window(summary, bounds(transcript, {"messages": 9}))) == [0, None, *range(51, 60)]


def test_what_a_summary_replaced_does_not_come_back_where_the_window_is_wider_than_what_is_left() -> None:
    transcript = talk(*exchanges(30))
    cut = replace(summarised(transcript, 50), after=(40,))
    summary = untouched(transcript).with_cut(cut)
    assert order(summary) == [0, None, 40, *range(50, 60)]
    for turns in (5, 6, 10):
        assert window(summary, bounds(transcript, {"turns": turns})) is summary
    assert order(window(summary, bounds(transcript, {"turns": 4}))) == [0, None, *range(52, 60)]


def test_a_note_is_no_summary_and_is_written_anew() -> None:
    transcript = talk(*exchanges(30))
    note = "[weir: 9 earlier messages were removed to fit the context window; archived as 0123456789ab]"
    dropped = untouched(transcript).with_cut(summarised(transcript, 10, text=note, origin="drop_oldest"))
    assert order(window(dropped, bounds(transcript, {"messages": 10}))) == [0, *range(50, 60)]
    noted = window(dropped, bounds(transcript, {"messages": 10, "note": True}))
    assert (noted.pieces[1].text or "").startswith("[weir: 49 earlier messages are outside")


@pytest.mark.requirement("A4.11", "D16")
def test_only_messages_in_the_layers_scope_are_counted_and_units_without_one_stay() -> None:
    said = [(user(f"{words(40)}q{n}"), step(f"{words(90)}{n}"), assistant(f"a{n}")) for n in range(6)]
    transcript = talk(*[m for turn in said for m in turn])
    history = window(untouched(transcript), bounds(transcript, {"messages": 6}, scope="history"))
    assert order(history) == [0, *range(16, 24)]
    outputs = window(untouched(transcript), bounds(transcript, {"messages": 2}, scope="tool_outputs"))
    assert order(outputs) == [0, *[i for n in range(4) for i in (4 * n, 4 * n + 3) if i], *range(16, 24)]
    assert broken_rules(outputs) == ()


@pytest.mark.requirement("A4.11", "A4.37")
@pytest.mark.parametrize(("spare", "acts"), [(1, False), (0, True)])
def test_the_window_of_a_bucket_slides_at_85_percent_of_its_cap(spare: int, acts: bool) -> None:
    layer = Layer(strategy="window", scope="history", at=0.85, min_savings=0, params={"turns": 8})
    rules = replace(ContextSettings(), layers=(layer,), buckets={"history": Bucket(cap=4_000)}, enforce="bucket")
    budget = replace(budget_of(100_000), caps={"history": 4_000})
    said = exchanges(12, size=100)
    transcript = talk(*said, user(words(3_400 - spare - talk(*said).tokens - 4)))
    assert untouched(transcript).buckets()["history"] == 3_400 - spare
    decision = decide(transcript, budget=budget, settings=rules)
    assert decision.applied == ({"sliding_window": 1} if acts else {})


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


@pytest.mark.requirement("A4.38")
def test_what_the_window_dropped_is_in_the_next_summary() -> None:
    rules = replace(
        ContextSettings(),
        layers=(
            Layer(strategy="window", at=0.50, params={"messages": 20}),
            Layer(strategy="compact", at=0.80),
        ),
    )
    fact = user("Never deploy on Fridays. The vault path is kv/staging/42.")
    said = [user("task"), fact, *exchanges(40, size=40)]
    budget = budget_of(6_000)
    first = talk(*said)
    dropped = decide(first, budget=budget, settings=rules)
    assert dropped.applied == {"sliding_window": 1}
    assert dropped.pieces is not None
    assert 1 not in [p.index for p in dropped.pieces]
    later = talk(*said, *exchanges(18, size=130))
    rules = replace(rules, layers=(Layer(strategy="window", at=0.50, params={"messages": 60}), rules.layers[1]))
    summed = decide(later, budget=budget, settings=rules, known=remember(ConversationState(), dropped, first))
    assert summed.applied == {"compact": 1}
    assert summed.cut is not None
    assert "kv/staging/42" in summed.cut.text


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
