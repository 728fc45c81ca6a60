import pytest

from policies.ledger import Status, Subtask
from policies.memory.checkpoint import Checkpoint
from policies.memory.state import milestone, read_state
from policies.messages import ToolCall
from policies.settings import NoteTaking
from policies.text.segments import Source
from tests.policies.sessions import queue_session, shared_conversations

TOOLS = NoteTaking()


def answer(text: str, *calls: ToolCall) -> list[Source]:
    return [Source(0, "user", "Go on."), Source(1, "assistant", text, calls=calls)]


def failed(position: int = 2, result: str = "PermissionError: no access to canary") -> list[Source]:
    return [Source(position, "tool", result, "deploy", '{"stage": "canary"}')]


@pytest.mark.requirement("A0.111", "D23")
def test_a_decision_that_is_noted_and_a_call_that_fails_are_milestones_in_any_language() -> None:
    noted = answer("", ToolCall("c1", "save_note", '{"category": "decision", "text": "我们使用租约"}'))
    assert milestone(noted, state=None, tools=TOOLS) == "decision"
    fenced = answer("Weiter.\n```decision\nLeases statt Sperren\n```")
    assert milestone(fenced, state=None, tools=TOOLS) == "decision"
    assert milestone(failed(), state=None, tools=TOOLS) == "blocker"


@pytest.mark.parametrize(
    "text", ["", "I have fixed the leak and all tests pass.", "I decided to wait.", "I am blocked.", "Fertig."]
)
def test_what_an_answer_only_says_is_no_milestone(text: str) -> None:
    assert milestone(answer(text), state=None, tools=TOOLS) is None


def test_a_list_with_something_newly_done_is_a_milestone_and_the_same_list_again_is_not() -> None:
    todos = '{"todos": [{"content": "a1", "status": "completed"}, {"content": "b2", "status": "pending"}]}'
    sources = answer("", ToolCall("c1", "TodoWrite", todos))
    assert milestone(sources, state=None, tools=TOOLS) == "subtask_done"
    assert milestone(sources, state=Checkpoint(subtasks=(Subtask("a1"),)), tools=TOOLS) == "subtask_done"
    assert milestone(sources, state=Checkpoint(subtasks=(Subtask("a1", Status.DONE),)), tools=TOOLS) is None


def test_what_the_saved_state_holds_is_no_milestone_again() -> None:
    for sources in (answer("```decision\nuse leases\n```"), failed()):
        assert milestone(sources, state=None, tools=TOOLS)
        held = read_state(sources, goal="", tools=TOOLS)
        assert milestone(sources, state=held, tools=TOOLS) is None


def test_a_session_has_its_milestones_where_they_happen() -> None:
    session = queue_session()
    found = {
        n: milestone([s], state=read_state(session[:n], goal="", tools=TOOLS), tools=TOOLS)
        for n, s in enumerate(session)
    }
    assert {n: kind for n, kind in found.items() if kind} == {
        9: "blocker",
        10: "decision",
        12: "subtask_done",
        16: "blocker",
    }


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
    assert fired <= steps / 4
