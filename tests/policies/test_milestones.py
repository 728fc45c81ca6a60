import pytest

from policies.memory.state import milestone
from policies.messages import ToolCall
from policies.text.segments import Source


def answer(text: str, *calls: ToolCall) -> list[Source]:
    return [Source(0, "user", "Go on."), Source(1, "assistant", text, calls=calls)]


def failed(position: int = 2, result: str = "PermissionError: no access to canary") -> list[Source]:
    return [Source(position, "tool", result, "deploy", '{"stage": "canary"}')]


@pytest.mark.requirement("A0.111", "D23")
def test_a_decision_that_is_noted_and_a_call_that_fails_are_milestones_in_any_language() -> None:
    noted = answer("", ToolCall("c1", "save_note", '{"category": "decision", "text": "我们使用租约"}'))
    assert milestone(noted, state=None) == "decision"
    fenced = answer("Weiter.\n```decision\nLeases statt Sperren\n```")
    assert milestone(fenced, state=None) == "decision"
    assert milestone(failed(), state=None) == "blocker"


@pytest.mark.parametrize(
    "text", ["", "I have fixed the leak and all tests pass.", "I decided to wait.", "I am blocked.", "Fertig."]
)
def test_what_an_answer_only_says_is_no_milestone(text: str) -> None:
    assert milestone(answer(text), state=None) is None
