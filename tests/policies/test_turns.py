import pytest

from policies.draft import bounds_for, untouched
from policies.ledger import ConversationState
from policies.messages import (
    ToolCall,
    Unit,
    answered_calls,
    first_user,
    last_user,
    parse_turn_boundaries,
    units,
)
from policies.settings import ContextSettings
from policies.strategies.compact import Compact
from policies.tokens import CHARS4
from tests.policies.play import assistant, result, step, system, talk, user, window

CONVERSATION = talk(
    system("be kind"),  # 0
    user("first"),  # 1
    assistant("", ToolCall("call_0", "look", "{}"), ToolCall("call_1", "list", "{}")),  # 2
    result("b", "call_1"),  # 3
    result("a", "call_0"),  # 4
    assistant("done"),  # 5
    user("second"),  # 6
    *step("c"),  # 7 8
)


@pytest.mark.requirement("A2.8", "D6")
def test_a_turn_starts_at_every_user_message() -> None:
    assert parse_turn_boundaries(CONVERSATION.messages) == (1, 6)
    assert parse_turn_boundaries(()) == ()
    assert (first_user(CONVERSATION), last_user(CONVERSATION.messages)) == (1, 6)


@pytest.mark.requirement("A2.9")
def test_a_step_whose_results_are_not_all_there_is_open() -> None:
    messages = talk(
        user("go"), assistant("", ToolCall("a", "f", ""), ToolCall("b", "f", "")), result("1", "b")
    ).messages
    assert units(messages)[-1] == Unit(1, 3, open=True)


@pytest.mark.requirement("A2.10")
@pytest.mark.parametrize(
    ("keep", "start"), [(0, 7), (1, 7), (2, 7), (3, 6), (4, 5), (5, 2), (6, 2), (7, 2), (8, 1), (9, 1), (99, 1)]
)
def test_what_a_summary_leaves_begins_where_a_unit_does(keep: int, start: int) -> None:
    bounds = bounds_for(CONVERSATION, ContextSettings(), window(8_000), ConversationState(), CHARS4)
    assert Compact(keep_messages=keep).tail_start(untouched(CONVERSATION), bounds) == start


def test_servers_that_call_every_call_call_0_are_paired_by_position() -> None:
    transcript = talk(user("go"), step("1", tool="first"), step("2", tool="second"))
    assert {i: c.name for i, c in answered_calls(transcript, units(transcript.messages)).items()} == {
        2: "first",
        4: "second",
    }


@pytest.mark.requirement("P3")
def test_a_result_that_comes_late_holds_what_stands_between_together() -> None:
    """On Responses an output need not follow its call at once, and has to have it before it."""
    messages = talk(
        [
            user("task"),
            assistant("", ToolCall("a", "look", "{}"), ToolCall("b", "look", "{}")),
            result("1", "a"),
            user("meanwhile"),
            assistant("", ToolCall("c", "look", "{}")),
            result("3", "c"),
            result("2", "b"),
            assistant("", ToolCall("d", "look", "{}")),
            result("4", "d"),
        ]
    ).messages
    assert units(messages) == (Unit(0, 1), Unit(1, 7), Unit(7, 9))
    assert [unit.open for unit in units(messages[:6])] == [False, True, False, False]
