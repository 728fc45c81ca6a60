import pytest

from policies.messages import Protection, ToolCall, protect
from tests.policies.play import Said, assistant, result, step, system, talk, user


def protection_of(*said: Said | tuple[Said, ...]) -> Protection:
    transcript = talk(*said)
    return protect(transcript)


@pytest.mark.requirement("A0.38")
def test_marked_messages_are_protected_with_the_whole_step_they_are_in() -> None:
    calls = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
    found = protection_of(
        user("task"), assistant("", *calls), result("1", "a", keep=True), result("2", "b"), user("more")
    )
    assert found.pinned == {1, 2, 3}


def test_a_mark_that_says_first_to_go_pins_nothing() -> None:
    assert protection_of(user("task"), user("junk", keep=False), user("more")).pinned == frozenset()


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
