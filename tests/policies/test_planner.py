"""plan() from the outside: when it acts, how far it shrinks, what it hands back."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import policies
from policies.draft import ConversationState
from policies.effects import Done, Failed, Offload, Summarize, Summary
from policies.ledger import UNKNOWN, Action, Decision, EditKind
from policies.limits import BudgetUnreachable, TokenBudget, divide, limits_for, shape_for
from policies.messages import Body, ToolCall, Transcript
from policies.planner import plan, trim
from policies.pressure import passed
from policies.settings import Bucket, ContextSettings, Layer, Summaries
from policies.tokens import CHARS4
from tests.policies.play import (
    OFFLOAD,
    Said,
    assistant,
    decide,
    play,
    remember,
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


def conversation(decisions: int, budget: TokenBudget, size: int = 300) -> list[Decision]:
    """Decisions on a session that grows by a step each time, the ledger kept."""
    known, said, made = ConversationState(), [system("s"), user("task")], []
    for n in range(decisions):
        said += step(f"{words(size)} {n}", arguments=f'{{"n": {n}}}')
        transcript = talk(*said)
        made.append(decide(transcript, budget=budget, known=known))
        known = remember(known, made[-1], transcript)
    return made


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


@pytest.mark.requirement("D2", "A2.12")
@pytest.mark.parametrize(
    "settings",
    [
        ContextSettings(),
        ContextSettings(preempt=True),
        ContextSettings(enforce="bucket", buckets={"tool_outputs": Bucket(cap=0.3)}),
        ContextSettings(enforce="observe", buckets={"tool_outputs": Bucket(cap=0.3)}),
    ],
)
def test_what_passes_at_once_is_what_the_whole_plan_says(settings: ContextSettings) -> None:
    budget = divide(settings, window=32_768, ratio=1.1)
    known, said, trend, at_once = ConversationState(), [system("s"), user("task")], UNKNOWN, 0
    for n in range(60):
        said += step(words(3_000 if n == 20 else 300), arguments=f'{{"n": {n}}}')
        transcript, at = talk(*said), float(n)
        limits = limits_for(settings, budget)
        told = passed(transcript, known=known, limits=limits, trend=trend, at=at)
        decision = decide(transcript, budget=budget, settings=settings, known=known, trend=trend, at=at)
        assert told in (None, decision)
        at_once += told is not None
        known, trend = remember(known, decision, transcript), decision.trend
    assert at_once > 10
    assert known.triggered


@pytest.mark.requirement("D21", "A0.96", "A0.51")
@pytest.mark.parametrize(("tokens", "usable", "trigger"), SHAPES)
def test_a_batch_ends_at_low_water_or_below_the_middle_of_it_and_the_trigger(
    tokens: int, usable: int, trigger: int
) -> None:
    transcript, budget = agent_loop(trigger + 1), divide(ContextSettings(), window=tokens)
    shape = shape_for(ContextSettings(), tokens)
    fixed = transcript.messages[0].tokens + transcript.messages[1].tokens + transcript.priming
    low_water = fixed + int(shape.low_water * (trigger - fixed))
    decision = decide(transcript, budget=budget)
    assert decision.raw_after <= (low_water + trigger) / 2
    if decision.cut is not None:
        assert decision.raw_after <= low_water
    pieces = decision.pieces or ()
    assert decision.raw_after == sum(p.tokens for p in pieces) + transcript.priming
    assert sum(decision.buckets.values()) == decision.after == decision.raw_after


@pytest.mark.requirement("A2.12")
def test_a_provider_limit_below_the_window_is_kept() -> None:
    budget = TokenBudget(window=200_000, reserve=4_000, headroom=0, max_input=10_000)
    transcript = agent_loop(9_500)
    assert decide(agent_loop(8_000), budget=budget).action is Action.PASS
    assert decide(transcript, budget=budget).raw_after < 8_000


@pytest.mark.requirement("A2.21", "A2.26")
def test_tool_definitions_and_system_prompt_count_towards_the_trigger() -> None:
    budget = window(10_000)
    said = [system("s"), user("task"), *[m for n in range(8) for m in step(f"{words(900)} {n}")]]
    assert decide(talk(*said), budget=budget).action is Action.PASS
    assert decide(talk(*said, tools=2_500), budget=budget).action is Action.EDIT
    assert decide(talk(system(words(2_500)), *said[1:]), budget=budget).action is Action.EDIT


@pytest.mark.requirement("A2.3", "A2.4")
def test_a_larger_max_tokens_makes_a_batch_come_earlier_in_the_same_window() -> None:
    transcript = agent_loop(5_500)
    small, large = (divide(ContextSettings(), window=8_192, requested=n) for n in (200, 2_000))
    assert decide(transcript, budget=small).action is Action.PASS
    assert decide(transcript, budget=large).action is Action.EDIT


# -- what ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A2.7")
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_any_number_of_system_messages_passes_and_survives(heads: int) -> None:
    head = [system(f"rule {n}") for n in range(heads)]
    steps = [m for n in range(20) for m in step(f"{words(300)} {n}")]
    decision = decide(talk(*head, user("task"), *steps), budget=window(5_000))
    assert [p.index for p in (decision.pieces or ())][: heads + 1] == list(range(heads + 1))


@pytest.mark.requirement("A2.7", "A0.38")
def test_a_system_message_in_the_middle_survives() -> None:
    steps = [m for n in range(20) for m in (user(f"{words(150)} {n}"), assistant(words(150)))]
    transcript = talk(user("task"), *steps[:6], system("remember this"), *steps[6:])
    decision = decide(transcript, budget=window(2_000))
    assert decision.cut is not None
    assert 7 in [p.index for p in decision.pieces or ()]


@pytest.mark.requirement("A2.25", "D6", "A2.9")
@pytest.mark.parametrize("tokens", [1_500, 3_000, 8_000])
def test_one_user_message_and_sixty_steps_fit_and_no_result_loses_its_call(tokens: int) -> None:
    transcript = talk(user("task"), *[step(f"{words(200)} {n}") for n in range(60)])
    decision = decide(transcript, budget=window(tokens))
    assert decision.raw_after <= tokens
    present = [p.index for p in decision.pieces or () if p.index is not None]
    assert present[0] == 0
    assert all(i - 1 in present for i in present if transcript.messages[i].is_result)


@pytest.mark.requirement("P12", "A2.25")
def test_a_newest_message_that_is_also_the_task_is_clipped_until_it_fits() -> None:
    transcript = talk(system("s"), user(words(20_000)))
    decision = decide(transcript, budget=window(8_000))
    assert 6_000 < decision.raw_after <= 8_000
    assert [(p.index, p.kind) for p in decision.pieces or ()] == [(0, None), (1, EditKind.CLIP)]
    assert decision.pressure.status == "emergency"
    assert decision.removed == (1,)


@pytest.mark.requirement("P12", "P2")
def test_a_conversation_goes_on_after_a_first_message_that_was_too_large() -> None:
    budget, known, said = window(8_000), ConversationState(), [user(words(20_000))]
    for n in range(12):
        transcript = talk(*said)
        decision = decide(transcript, budget=budget, known=known)
        assert decision.raw_after <= 8_000
        assert (decision.pieces or ())[-1].index == len(said) - 1
        known = remember(known, decision, transcript)
        said += [assistant(f"{words(150)} {n}"), user(f"{words(50)} {n}?")]
    clipped = [e for e in known.edits.values() if e.kind is EditKind.CLIP]
    assert len(clipped) == 1
    assert clipped[0].tokens > 500


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


@pytest.mark.requirement("A2.10", "A2.13")
def test_a_ceiling_that_an_upstream_has_set_is_kept() -> None:
    transcript = agent_loop(5_000)
    assert decide(transcript, budget=window(8_000)).action is Action.PASS
    for ceiling in (4_000, 2_000, 1_000):
        assert decide(transcript, budget=window(8_000), ceiling=ceiling).raw_after <= ceiling


@pytest.mark.requirement("A0.76", "D7")
def test_a_model_is_asked_only_where_eviction_is_not_enough() -> None:
    layers = (Layer(strategy="evict", min_savings=0.10, must_reach=0.5), Layer(strategy="compact"))
    settings = ContextSettings(summarizer="small", summaries=Summaries(wait=20), layers=layers)
    results = talk(user("task"), *[step(f"{words(700)} {n}", arguments=f"{n}") for n in range(25)])
    decision = decide(results, budget=window(16_000), settings=settings, script=[OFFLOAD])
    assert decision.applied.keys() == {"evict"}
    said = [m for n in range(80) for m in (user(f"{words(90)} {n}"), assistant(f"{words(90)} note{n} {n}"))]
    chat = talk(*said, user("so?"))
    decision = decide(
        chat,
        budget=window(16_000),
        settings=settings,
        script=[
            OFFLOAD,
            (
                Summarize,
                Summary(
                    "Next step: go on with the notes that were taken here, in that order, until all of them are there."
                ),
            ),
        ],
    )
    assert decision.applied == {"compact": 1}
    assert decision.cut is not None
    assert decision.cut.origin == "model+extract"
    assert decide(chat, budget=window(16_000), settings=settings, script=[OFFLOAD, (Summarize, Failed("x"))]).cut


# -- again -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P2", "D25")
def test_the_same_request_again_is_the_same_bytes_and_nothing_new() -> None:
    transcript, budget = agent_loop(9_000), divide(ContextSettings(), window=8_192)
    first = decide(transcript, budget=budget)
    again = decide(transcript, budget=budget, known=remember(ConversationState(), first, transcript), script=())
    assert again.action is Action.REPLAY
    assert again.pieces == first.pieces
    assert (again.edits, again.cut, again.trail, again.removed) == ((), None, (), ())
    assert again.applied == first.applied


@pytest.mark.requirement("P2")
def test_a_repeated_request_is_not_planned_anew_although_its_batch_ended_above_the_trigger() -> None:
    logs = [step(words(100, f"log{n}")) for n in range(9)]
    transcript, budget = talk(system(words(1_600)), user("task"), *logs, assistant(words(280))), window(2_000)
    first = decide(transcript, budget=budget)
    assert 1_900 < first.raw_after <= 2_000
    again = decide(transcript, budget=budget, known=remember(ConversationState(), first, transcript), script=())
    assert (again.action, again.pieces) == (Action.REPLAY, first.pieces)


@pytest.mark.requirement("D25", "P2", "A0.96")
def test_a_growing_session_acts_in_few_batches_and_sends_a_stable_prefix_between_them() -> None:
    made = conversation(60, window(8_000))
    batches = [d for d in made if d.trail]
    assert 2 <= len(batches) <= 12
    assert all(d.raw_after <= 0.97 * 8_000 for d in made)
    for before, now in zip(made, made[1:], strict=False):
        if now.action is Action.REPLAY and before.pieces:
            assert (now.pieces or ())[: len(before.pieces)] == before.pieces


@pytest.mark.requirement("D11", "D25")
def test_after_the_first_batch_a_huge_new_result_is_capped_at_once_without_a_batch() -> None:
    budget, transcript = window(16_000), agent_loop(15_400)
    first = decide(transcript, budget=budget)
    said = [
        Said(m.role, transcript.read(i).text, transcript.read(i).calls, m.answers)
        for i, m in enumerate(transcript.messages)
    ]
    grown = talk(*said, step(words(17_000)))
    decision = decide(grown, budget=budget, known=remember(ConversationState(), first, transcript), script=[OFFLOAD])
    assert [e.kind for e in decision.edits] == [EditKind.INGEST_CAP]
    assert decision.trail == ()
    assert (decision.pieces or ())[: len(first.pieces or ())] == first.pieces


@pytest.mark.requirement("D11", "D9", "D25")
@pytest.mark.parametrize(("size", "batch"), [(1_700, False), (2_050, True)])
def test_new_results_above_their_share_stay_whole_while_the_window_or_a_batch_has_room(size: int, batch: bool) -> None:
    """Their share of a window of 8,000 is 1,600 tokens; two of 1,700 fit it, two of 2,050 fit it beside a summary."""
    budget, transcript = window(8_000), agent_loop(7_900)
    first = decide(transcript, budget=budget)
    said = [
        Said(m.role, transcript.read(i).text, transcript.read(i).calls, m.answers)
        for i, m in enumerate(transcript.messages)
    ]
    calls = ToolCall("a", "f", "1"), ToolCall("b", "f", "2")
    grown = talk(*said, assistant("", *calls), result(words(size, "a"), "a"), result(words(size, "b"), "b"))
    known = remember(ConversationState(), first, transcript)
    decision = decide(grown, budget=budget, known=known)
    assert [p.text for p in (decision.pieces or ())[-2:]] == [None, None]
    assert decision.action is (Action.EDIT if batch else Action.REPLAY)
    assert decision.raw_after <= budget.soft_limit
    capped = replace(ContextSettings().ingest, cap=1_000)
    strict = decide(grown, budget=budget, known=known, settings=ContextSettings(ingest=capped))
    assert [p.kind for p in (strict.pieces or ())[-2:]] == [EditKind.INGEST_CAP] * 2, "a cap in tokens is a cap"


@pytest.mark.requirement("P10")
def test_a_smaller_window_plans_again_on_what_was_edited_before() -> None:
    transcript = agent_loop(30_000)
    large = decide(transcript, budget=window(32_000))
    known = remember(ConversationState(), large, transcript)
    small = decide(transcript, budget=window(8_000), known=known)
    assert small.raw_after <= 8_000 < large.raw_after


# -- what is handed back ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.55")
def test_removed_are_exactly_the_originals_that_are_no_longer_sent() -> None:
    transcript = talk(
        *[m for n in range(40) for m in (user(f"{words(90)} {n}"), assistant(f"{words(90)} {n}"))], user("?")
    )
    decision = decide(transcript, budget=window(6_000))
    kept = {p.index for p in decision.pieces or () if p.index is not None and p.text is None}
    assert set(decision.removed) == set(range(len(transcript.messages))) - kept
    assert set(decision.covered) <= set(decision.removed)
    assert decision.checkpoint is not None


@pytest.mark.requirement("A0.51")
def test_tokens_are_calibrated_where_people_read_them_and_not_where_edits_are_stored() -> None:
    transcript = agent_loop(9_000)
    budget = replace(window(16_000), ratio=2.0)
    decision = decide(transcript, budget=budget)
    assert decision.before == 18_000
    assert decision.after == 2 * decision.raw_after <= 16_000
    assert sum(decision.buckets.values()) == decision.after
    assert decision.pressure.level == pytest.approx(decision.after / 16_000)


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


def test_a_long_plan_asks_to_leave_the_event_loop_before_it_works() -> None:
    read: list[int] = []
    transcript = agent_loop(9_000)
    body = transcript.read

    def watch(index: int) -> Body:
        read.append(index)
        return body(index)

    watched = replace(transcript, read=watch)
    flow = plan(watched, settings=ContextSettings(), budget=window(8_000), known=ConversationState(), counter=CHARS4)
    assert isinstance(next(flow), Offload)
    assert read == []
    with pytest.raises(StopIteration):
        flow.send(Done())
    assert read


def test_a_small_request_reads_no_message() -> None:
    def read(index: int) -> Body:
        raise AssertionError(f"message {index} was read")

    transcript = replace(agent_loop(3_000), read=read)
    assert (
        play(
            plan(
                transcript, settings=ContextSettings(), budget=window(8_000), known=ConversationState(), counter=CHARS4
            )
        ).action
        is Action.PASS
    )


@pytest.mark.requirement("A2.19", "A0.55")
def test_arrays_are_put_together_in_one_module_and_strategies_hand_back_edits() -> None:
    package = Path(policies.__file__).parent
    builders = [p.relative_to(package).as_posix() for p in package.rglob("*.py") if "PlannedMessage" in _called(p)]
    assert builders == ["draft.py"]


def _called(path: Path) -> Sequence[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
