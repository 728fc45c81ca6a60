"""plan() from the outside: when it acts, how far it shrinks, what it hands back."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import policies
from policies.ledger import Action
from policies.limits import BudgetUnreachable, divide
from policies.messages import ToolCall, Transcript
from policies.planner import trim
from policies.settings import ContextSettings
from policies.tokens import CHARS4
from tests.policies.play import (
    OFFLOAD,
    Said,
    assistant,
    decide,
    result,
    step,
    system,
    talk,
    user,
    window,
    words,
)

SHAPES = [
    # window, U = W - R - H, trigger in uncalibrated tokens with M = .05
    (4_096, 2_868, 2_649),
    (8_192, 5_735, 5_298),
    (32_768, 27_130, 23_771),
    (128_000, 117_600, 89_600),
]


def agent_loop(total_tokens: int) -> Transcript:
    """A session of exactly so many tokens: a rule, a task, steps of an agent with results of all kinds."""
    said: list[Said] = [system("You are careful."), user("Move the shop. Never touch the payments table.")]
    size = max(60, total_tokens // 40)
    n = 0
    while talk(*said).tokens + 2 * size + 40 < total_tokens:
        said += step(f'{{"file": "src/part_{n}.py", "log": "{words(size)}"}}', arguments=f'{{"n": {n}}}')
        n += 1
    said += step("")
    said[-1] = replace(said[-1], text=words(total_tokens - talk(*said).tokens, f"end{n}"))
    transcript = talk(*said)
    assert transcript.tokens == total_tokens
    return transcript


# -- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D2", "D21")
@pytest.mark.parametrize(("tokens", "usable", "trigger"), SHAPES)
def test_nothing_happens_up_to_the_trigger_and_a_batch_one_token_later(tokens: int, usable: int, trigger: int) -> None:
    budget = divide(ContextSettings(), window=tokens)
    assert budget.usable == usable
    for below in (trigger - 1, trigger):
        passed = decide(agent_loop(below), budget=budget, script=())
        assert (passed.action, passed.pieces, passed.trail) == (Action.PASS, None, ())
        assert passed.before == passed.after == below
        assert passed.limit == usable
    acted = decide(agent_loop(trigger + 1), budget=budget, script=[OFFLOAD])
    assert acted.action is Action.EDIT
    assert acted.is_new
    assert acted.pressure.status == "active"


@pytest.mark.requirement("A2.21", "A2.26")
def test_tool_definitions_and_system_prompt_count_towards_the_trigger() -> None:
    budget = window(10_000)
    said = [system("s"), user("task"), *[m for n in range(8) for m in step(f"{words(900)} {n}")]]
    assert decide(talk(*said), budget=budget).action is Action.PASS
    assert decide(talk(*said, tools=2_500), budget=budget).action is Action.EDIT
    assert decide(talk(system(words(2_500)), *said[1:]), budget=budget).action is Action.EDIT


# -- what ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P12")
def test_what_cannot_fit_is_refused_with_the_tokens_of_every_bucket() -> None:
    transcript = talk(system(words(6_500)), user("task"), *step(words(50)), assistant("done"), user("now"), tools=1_500)
    with pytest.raises(BudgetUnreachable) as caught:
        decide(transcript, budget=window(8_000, reserve=1_000))
    error = caught.value
    assert (error.window, error.reserve) == (8_000, 1_000)
    assert (error.buckets["system"], error.buckets["tools"]) == (6_504, 1_500)
    assert set(error.buckets) == {"system", "tools", "memory", "summary", "history", "tool_outputs"}
    assert sum(error.buckets.values()) > 8_000
    assert 8_000 <= error.protected <= sum(error.buckets.values())
    assert "protected content" in str(error)


# -- what is handed back ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("P6")
def test_when_planning_failed_the_oldest_units_are_dropped() -> None:
    transcript, budget = agent_loop(9_000), divide(ContextSettings(), window=8_192)
    decision = trim(transcript, settings=ContextSettings(), budget=budget, counter=CHARS4)
    assert budget.fits(decision.raw_after)
    assert decision.cut is not None
    assert decision.cut.origin == "drop_oldest"
    calls = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
    small = talk(user("task"), assistant("", *calls), result("1", "a"))
    assert trim(small, settings=ContextSettings(), budget=budget, counter=CHARS4).action is Action.PASS


@pytest.mark.requirement("A2.19", "A0.55")
def test_arrays_are_put_together_in_one_module_and_strategies_hand_back_edits() -> None:
    package = Path(policies.__file__).parent
    builders = [p.relative_to(package).as_posix() for p in package.rglob("*.py") if "PlannedMessage" in _called(p)]
    assert builders == ["draft.py"]


def _called(path: Path) -> Sequence[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
