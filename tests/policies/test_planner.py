"""plan() from the outside: when it acts, how far it shrinks, what it hands back."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

import policies
from policies.ledger import Action
from tests.policies.play import decide, step, system, talk, user, window, words

# -- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A2.21", "A2.26")
def test_tool_definitions_and_system_prompt_count_towards_the_trigger() -> None:
    budget = window(10_000)
    said = [system("s"), user("task"), *[m for n in range(8) for m in step(f"{words(900)} {n}")]]
    assert decide(talk(*said), budget=budget).action is Action.PASS
    assert decide(talk(*said, tools=2_500), budget=budget).action is Action.EDIT
    assert decide(talk(system(words(2_500)), *said[1:]), budget=budget).action is Action.EDIT


# -- what is handed back ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("A2.19", "A0.55")
def test_arrays_are_put_together_in_one_module_and_strategies_hand_back_edits() -> None:
    package = Path(policies.__file__).parent
    builders = [p.relative_to(package).as_posix() for p in package.rglob("*.py") if "PlannedMessage" in _called(p)]
    assert builders == ["draft.py"]


def _called(path: Path) -> Sequence[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
