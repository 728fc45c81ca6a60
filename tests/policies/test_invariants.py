from dataclasses import replace

import pytest

from policies.draft import Draft, broken_rules, untouched
from policies.ledger import PlannedMessage
from policies.messages import ToolCall
from tests.policies.play import assistant, result, step, system, talk, user

PAIRS, EMPTY, FIRST = (
    "every tool result follows the call it answers",
    "the array is not empty",
    "the first message after the head is from the user",
)


def without(draft: Draft, *indices: int) -> Draft:
    return replace(draft, pieces=tuple(p for p in draft.pieces if p.index not in indices))


CONVERSATION = untouched(talk(system("s"), user("u"), step("1"), assistant("a"), user("v"), step("2")))


@pytest.mark.requirement("P3")
def test_an_array_as_it_came_breaks_nothing() -> None:
    assert broken_rules(CONVERSATION) == ()
    assert broken_rules(without(CONVERSATION, 2, 3)) == ()


@pytest.mark.requirement("P3", "A0.52", "A2.9")
def test_a_result_without_its_call_and_a_call_without_its_result_are_refused() -> None:
    assert broken_rules(without(CONVERSATION, 2)) == (PAIRS,)
    assert broken_rules(without(CONVERSATION, 3)) == (PAIRS,)


@pytest.mark.requirement("P3", "A0.52")
def test_a_summary_between_a_call_and_its_result_is_refused() -> None:
    pieces = CONVERSATION.pieces
    split = replace(CONVERSATION, pieces=(*pieces[:3], PlannedMessage(None, 9, "summary"), *pieces[3:]))
    assert broken_rules(split) == (PAIRS,)


@pytest.mark.requirement("P3")
def test_one_of_two_parallel_results_may_not_go_alone() -> None:
    calls = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
    draft = untouched(talk(user("u"), assistant("", *calls), result("1", "b"), result("2", "a"), assistant("done")))
    assert broken_rules(draft) == ()
    assert broken_rules(without(draft, 2)) == (PAIRS,)


@pytest.mark.requirement("P3")
def test_an_array_without_a_user_at_its_start_is_refused_unless_a_summary_stands_there() -> None:
    assert broken_rules(without(CONVERSATION, 1)) == (FIRST,)
    summary = replace(
        CONVERSATION, pieces=(PlannedMessage(0, 5), PlannedMessage(None, 9, "summary"), *CONVERSATION.pieces[2:])
    )
    assert broken_rules(summary) == ()


@pytest.mark.requirement("P3")
def test_nothing_at_all_is_refused() -> None:
    assert EMPTY in broken_rules(replace(CONVERSATION, pieces=()))


@pytest.mark.requirement("P3")
def test_what_the_client_itself_broke_is_its_own_business() -> None:
    broken = untouched(talk(assistant("hello"), result("1", "nobody"), user("u"), step("2")))
    assert broken_rules(broken) == ()
    assert broken_rules(without(broken, 2)) == ()
