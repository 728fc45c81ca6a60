"""Mistakes of the sources that this product must not repeat, each pinned with the presets that ship."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import policies
from policies.draft import ConversationState
from policies.effects import Done, Reply, Summarize, Summary
from policies.ledger import Decision
from policies.limits import BudgetUnreachable, TokenBudget, divide
from policies.messages import ToolCall, ToolDefinition, Tools, Transcript
from policies.planner import plan
from policies.settings import ContextSettings
from policies.tokens import CHARS4
from proxy.config.presets import preset_policies
from tests.policies.play import Said, assistant, decide, result, system, talk, user, words

PRESETS = preset_policies()


def preset(
    name: str, tokens: int | None = None, *, requested: int | None = None
) -> tuple[ContextSettings, TokenBudget]:
    """A preset and its budget in a window of ``tokens``, by default the one that it was made for."""
    settings = PRESETS[name]
    return settings, divide(settings, window=tokens or settings.designed_for or 128_000, requested=requested)


def decided(name: str, transcript: Transcript, tokens: int | None = None) -> Decision:
    settings, budget = preset(name, tokens)
    return decide(transcript, budget=budget, settings=settings)


def exactly(total: int, *rest: Said) -> Transcript:
    """A conversation of so many tokens in all, its task as long as that takes."""
    made = talk(user(words(total - talk(user(words(1)), *rest).tokens + 1)), *rest)
    assert made.tokens == total
    return made


def chat(turns: int, tokens: int) -> list[Said]:
    """So many turns of so many tokens, half of it the question."""
    each = tokens // 2 - 4
    return [s for n in range(turns) for s in (user(words(each, f"ask{n} ")), assistant(words(each, f"say{n} ")))]


def steps(count: int, tokens: int) -> list[Said]:
    """So many tool steps with results of so many tokens."""
    found: list[Said] = []
    for n in range(count):
        call = ToolCall(f"call_{n}", "look", f'{{"n": {n}}}')
        found += [assistant("", call), result(words(tokens - 4, f"found{n} "), call.id)]
    return found


NOTES = "Goal: go on with what the user asked for in the first message.\nDone: what came before was read.\nNext step: go on."


def with_model(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState | None = None,
    most: int = 100,
) -> tuple[Decision, int]:
    """The decision where a model writes good notes, and how often it was asked, which may be ``most`` times."""
    settings = replace(settings, summarizer="small")
    flow = plan(transcript, settings=settings, budget=budget, known=known or ConversationState(), counter=CHARS4)
    reply: Reply | None = None
    asks = 0
    while True:
        try:
            effect = next(flow) if reply is None else flow.send(reply)
        except StopIteration as end:
            return end.value, asks
        asks += isinstance(effect, Summarize)
        assert asks <= most
        reply = Summary(NOTES) if isinstance(effect, Summarize) else Done()


def texts(decision: Decision, transcript: Transcript) -> dict[int, str | None]:
    """What stands for each of the client's messages that is still there; None for as it came."""
    pieces = decision.pieces
    if pieces is None:
        return dict.fromkeys(range(len(transcript.messages)))
    return {p.index: p.text if p.kind is not None else None for p in pieces if p.index is not None}


@pytest.mark.requirement("A0.144")
def test_no_policy_swallows_an_error_that_it_did_not_name() -> None:
    handlers = [
        (path.name, node)
        for path in Path(policies.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler)
    ]
    assert handlers
    for name, node in handlers:
        assert node.type is not None, f"{name}:{node.lineno} catches everything"
        caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        assert not caught & {"Exception", "BaseException"}, f"{name}:{node.lineno} catches too much"
        assert not all(isinstance(s, ast.Pass) for s in node.body), f"{name}:{node.lineno} swallows {caught}"


@pytest.mark.requirement("A3.23", "D9")
@pytest.mark.parametrize("name", ["baseagent-200k", "baseagent-long", "baseagent-complex"])
@pytest.mark.parametrize("steered", [False, True])
def test_a_handover_keeps_the_current_request_and_the_results_that_nobody_has_read(name: str, steered: bool) -> None:
    calls = tuple(ToolCall(f"call_{n}", "look", "{}") for n in range(2))
    active = (assistant("", *calls), result(words(40), "call_0"), result(words(40), "call_1"))
    request = user("Now fix the invoice page.")
    end = (*active, request) if steered else (request, *active)
    transcript = talk(system("rules"), user("task"), *chat(40, 500), *end)
    decision = decided(name, transcript, 20_000)
    assert [report.layer for report in decision.trail if report.kept] == ["compact"]
    last = len(transcript.messages)
    there = texts(decision, transcript)
    before = [n for n in range(last - 4) if transcript.messages[n].role == "user"][-1:]
    steers = before if steered else []  # what a message right after a result steers is still being done
    assert [*there] == [0, 1, *steers, *range(last - 4, last)], "nothing but rules, task, summary, what is being done"
    assert set(there.values()) == {None}, "word for word"


@pytest.mark.requirement("A3.24", "P12")
@pytest.mark.parametrize("name", ["baseagent-200k", "balanced", "article-128k", "interceptor-summarize"])
def test_a_system_prompt_that_leaves_no_room_is_refused_after_one_compaction(name: str) -> None:
    settings, budget = preset(name, 20_000)
    said = (*chat(12, 400), *steps(4, 100), user("now?"))
    with pytest.raises(BudgetUnreachable) as refused:
        with_model(talk(system(words(budget.send_limit)), *said), settings=settings, budget=budget, most=1)
    assert refused.value.buckets["system"] > budget.send_limit


@pytest.mark.requirement("A4.12", "D7")
def test_a_model_is_asked_only_past_95_percent_of_the_history_and_a_cheaper_layer_goes_before() -> None:
    settings, budget = preset("five-bucket-128k")
    cap = budget.caps["history"]
    counts = {}
    for share in (0.84, 0.86, 0.9499, 0.95):
        transcript = exactly(int(share * cap), *chat(6, 6_000), user("now?"))
        counts[share] = with_model(transcript, settings=settings, budget=budget)[1]
    assert counts == {0.84: 0, 0.86: 0, 0.9499: 0, 0.95: 1}
    many = talk(user("task"), *chat(24, 1_950), user("now?"))
    assert many.tokens > 0.95 * cap
    slid, asks = with_model(many, settings=settings, budget=budget)
    assert ([r.layer for r in slid.trail if r.kept], asks) == (["window"], 0)


@pytest.mark.requirement("A4.21")
def test_tool_definitions_do_not_crowd_out_the_history() -> None:
    definitions = tuple(ToolDefinition(f"tool_{n:03}", 200, f"Does thing {n}.") for n in range(200))
    transcript = talk(user("task"), *chat(20, 1_000), user("now?"), tools=40_012)
    transcript = replace(transcript, read_tools=lambda: Tools(definitions, frozenset()))
    decision = decided("five-bucket-128k", transcript)
    assert 0 < decision.buckets["tools"] <= 16_000
    assert decision.buckets["history"] == transcript.tokens - transcript.tools
    assert set(texts(decision, transcript)) == set(range(len(transcript.messages)))
