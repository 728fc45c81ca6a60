import pytest

from policies.checkpoint import Checkpoint, Decision, Status, Subtask
from policies.extraction.readings import Source
from policies.messages import ToolCall
from policies.settings import NoteTaking
from policies.state import read_state
from policies.state.milestones import milestone
from tests.policies.sessions import queue_session, shared_conversations

TOOLS = NoteTaking()


def answer(text: str, *calls: ToolCall) -> list[Source]:
    return [Source(0, "user", "Go on."), Source(1, "assistant", text, calls=calls)]


@pytest.mark.requirement("A0.111", "D23")
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The reservation UM3OG5 has been successfully updated.", "subtask_done"),
        ("I have fixed the leak in worker.py.", "subtask_done"),
        ("The adapter is done and all tests pass.", "subtask_done"),
        ("I decided to use leases instead of locks.", "decision"),
        ("We'll go with Redis because it is there.", "decision"),
        ("I am blocked by the missing credentials for canary.", "blocker"),
        ("I cannot proceed without the user ID.", "blocker"),
        ("We are waiting for the certificate.", "blocker"),
    ],
)
def test_a_statement_of_the_assistant_is_a_milestone(text: str, kind: str) -> None:
    assert milestone(answer(text), state=None, tools=TOOLS) == kind


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Let me look at worker.py.",
        "If the tests pass, we are done.",
        "Has the reservation been successfully updated?",
        "Once it is fixed, I will deploy.",
        "It could not be completed.",
        "The file has 40 lines and defines the class Worker.",
        "Would you like to go with option 1?",
    ],
)
def test_plans_questions_and_talk_are_no_milestone(text: str) -> None:
    assert milestone(answer(text), state=None, tools=TOOLS) is None


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_only_what_the_assistant_says_counts(role: str) -> None:
    source = Source(1, role, "The deploy has been successfully completed.", "deploy" if role == "tool" else "")
    assert milestone([source], state=None, tools=TOOLS) is None


def test_an_answer_that_goes_on_with_a_call_reports_nothing_done() -> None:
    call = ToolCall("c1", "run", "{}")
    assert milestone(answer("I have fixed the leak.", call), state=None, tools=TOOLS) is None


def test_a_list_with_something_newly_done_is_a_milestone_and_the_same_list_again_is_not() -> None:
    todos = '{"todos": [{"content": "a1", "status": "completed"}, {"content": "b2", "status": "pending"}]}'
    sources = answer("", ToolCall("c1", "TodoWrite", todos))
    assert milestone(sources, state=None, tools=TOOLS) == "subtask_done"
    assert milestone(sources, state=Checkpoint(subtasks=(Subtask("a1"),)), tools=TOOLS) == "subtask_done"
    assert milestone(sources, state=Checkpoint(subtasks=(Subtask("a1", Status.DONE),)), tools=TOOLS) is None


def test_what_the_saved_state_holds_is_no_milestone_again() -> None:
    sources = answer("I decided to use leases instead of locks.")
    held = Checkpoint(decisions=(Decision("I decided to use leases.", "", ("locks",)),))
    assert milestone(sources, state=held, tools=TOOLS) is None
    blocked = answer("I am blocked by the missing credentials.")
    held = Checkpoint(open_issues=("I am blocked by the missing credentials.",))
    assert milestone(blocked, state=held, tools=TOOLS) is None


def test_a_session_has_its_milestones_where_they_happen() -> None:
    session = queue_session()
    found = {
        n: milestone([s], state=read_state(session[:n], goal="", tools=TOOLS), tools=TOOLS)
        for n, s in enumerate(session)
    }
    assert {n: kind for n, kind in found.items() if kind} == {10: "decision", 12: "subtask_done"}


@pytest.mark.requirement("D23")
@pytest.mark.parametrize("name", ["tau_airline", "swe_agent"])
def test_milestones_are_at_most_one_in_four_steps_of_recorded_conversations(name: str) -> None:
    fired = steps = 0
    for sources, _ in shared_conversations(name):
        start = 0
        for n, source in enumerate(sources, 1):
            if source.role == "assistant":
                steps += 1
                fired += milestone(sources[start:n], state=None, tools=TOOLS) is not None
                start = n
    assert 0 < fired <= steps / 4
