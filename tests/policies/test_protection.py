import pytest

from policies.messages import Protection, ToolCall, protect
from tests.policies.play import Said, assistant, result, step, system, talk, user


def protection_of(*said: Said | tuple[Said, ...]) -> Protection:
    transcript = talk(*said)
    return protect(transcript)


@pytest.mark.requirement("A0.38", "A0.50")
def test_head_task_newest_user_message_and_newest_step_are_protected() -> None:
    found = protection_of(system("s"), user("task"), *step("old"), assistant("hm"), user("now"), *step("new"))
    assert found.head == {0}
    assert (found.task, found.current) == (1, 5)
    assert found.active == {6, 7}
    assert found.all == {0, 1, 5, 6, 7}
    assert found.verbatim == {0, 1, 5}


RULES = "# AGENTS.md instructions for /work\n\n<INSTRUCTIONS>\nAnswer in Dutch.\n</INSTRUCTIONS>"
PLACE = "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"


@pytest.mark.requirement("A0.38")
@pytest.mark.parametrize("told", [(PLACE,), (RULES + "\n" + PLACE,), (RULES, PLACE)])
def test_what_a_client_tells_in_tags_in_front_of_the_task_stays_beside_it(told: tuple[str, ...]) -> None:
    found = protection_of(system("s"), *map(user, told), user("task"), *step("old"), user("now"), *step("new"))
    assert found.task == 1 + len(told)
    assert found.verbatim == {*range(found.task + 1), found.task + 3}


@pytest.mark.requirement("A0.38")
@pytest.mark.parametrize("said", [PLACE, "Look at <b>this</b>", "<b>Look</b> at this", "x\n<b>y</b>"])
def test_tags_are_the_task_where_no_words_of_the_user_follow_or_stand_beside_them(said: str) -> None:
    assert protection_of(user(said), *([] if said == PLACE else [user("b")]), *step("c"), user("now")).task == 0


@pytest.mark.requirement("A0.38")
def test_marked_messages_are_protected_with_the_whole_step_they_are_in() -> None:
    calls = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
    found = protection_of(
        user("task"), assistant("", *calls), result("1", "a", keep=True), result("2", "b"), user("more")
    )
    assert found.pinned == {1, 2, 3}


def test_a_mark_that_says_first_to_go_pins_nothing() -> None:
    assert protection_of(user("task"), user("junk", keep=False), user("more")).pinned == frozenset()


@pytest.mark.requirement("A2.7")
def test_system_messages_in_the_middle_are_protected_like_those_at_the_head() -> None:
    assert protection_of(system("s"), user("u"), system("reminder"), Said("developer", "d"), user("v")).head == {
        0,
        2,
        3,
    }


@pytest.mark.requirement("A0.38")
def test_results_that_nobody_has_read_stay_although_a_message_follows_them() -> None:
    assert protection_of(user("task"), *step("old"), *step("unread"), user("hurry")).active == {3, 4, 5}
    assert protection_of(user("task"), *step("unread"), system("reminder")).active == {1, 2, 3}


@pytest.mark.requirement("A0.38")
def test_results_that_were_answered_are_free_to_go() -> None:
    assert protection_of(user("task"), *step("read"), assistant("I see"), user("next")).active == {4}


@pytest.mark.requirement("A0.38")
def test_open_calls_are_protected_with_the_results_they_have() -> None:
    calls = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
    assert protection_of(user("task"), assistant("", *calls), result("1", "b")).active == {1, 2}


def test_an_empty_array_and_one_without_a_user_protect_what_there_is() -> None:
    assert protection_of().all == frozenset()
    assert protection_of(system("s")).all == {0}
    assert protection_of(assistant("hello")).all == {0}
