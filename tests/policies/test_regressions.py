"""Mistakes of the sources that this product must not repeat, each pinned with the presets that ship."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import policies
from policies.draft import ConversationState
from policies.effects import Done, Reply, Summarize, Summary
from policies.ledger import Action, Decision
from policies.limits import BUCKETS, BudgetUnreachable, TokenBudget, divide, first_trigger, limits_for
from policies.messages import ToolCall, ToolDefinition, Tools, Transcript, units
from policies.planner import plan
from policies.settings import ContextSettings, Layer
from policies.tokens import CHARS4
from proxy.config.file import ConfigError
from proxy.config.loading import load_config
from proxy.config.presets import policy_amounts, preset_policies
from proxy.config.values import Flags
from tests.policies.play import Said, assistant, decide, remember, result, system, talk, user, window, words

PRESETS = preset_policies()
OURS = ("balanced", "advised", "off")
SEEDS = sorted(name for name, preset in PRESETS.items() if name not in OURS and preset.when_full == "manage")


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


def told(decision: Decision, kind: str, component: str) -> bool:
    """Whether an event of that kind was reported of a bucket."""
    return any(e.kind == kind and e.facts.get("component") == component for e in decision.events)


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


@pytest.mark.requirement("D4")
@pytest.mark.parametrize(
    ("name", "tokens", "requested", "reserve"),
    [
        ("balanced", 200_000, 32_000, 32_000),
        ("balanced", 8_192, None, 2_048),
        ("balanced", 15_999, None, 3_999),
        ("balanced", 16_000, None, 4_000),
        ("article-128k", 128_000, None, 6_400),
        ("article-128k", 128_000, 32_000, 32_000),
        ("baseagent-200k", 200_000, None, 32_000),
        ("interceptor", 200_000, None, 0),
    ],
)
def test_the_reserve_is_the_clients_or_the_policys_and_never_half_of_a_small_window(
    name: str, tokens: int, requested: int | None, reserve: int
) -> None:
    assert preset(name, tokens, requested=requested)[1].reserve == reserve


@pytest.mark.requirement("A0.89", "A0.99")
def test_less_than_4000_tokens_left_for_the_answer_force_the_layers_in_a_window_of_60k() -> None:
    settings, budget = preset("article-128k", 60_000)
    assert budget.reserve == 4_000, "5 % of the window would be 3,000"
    late = replace(settings, layers=(Layer(strategy="drop_oldest", at=0.99),))
    for used, action in ((56_000, Action.PASS), (56_001, Action.EDIT)):
        transcript = exactly(used, *chat(50, 1_100), user("now?"))
        assert decide(transcript, budget=budget, settings=late).action is action


@pytest.mark.requirement("A0.99", "D3")
def test_shares_that_use_up_the_window_are_no_margin_and_the_margin_is_a_term_of_its_own() -> None:
    article, budget = preset("article-128k")
    shares = [article.buckets[n].cap for n in ("system", "tools", "memory", "history", "tool_outputs", "working")]
    assert sum(int(share * 128_000) for share in shares if share is not None) == 128_000
    assert (budget.margin, budget.headroom, budget.reserved_limit) == (0.0, 0, 121_600)
    assert budget.soft_limit == 0.95 * 128_000, "the emergency line of 95 % is where it no longer fits"
    assert all(PRESETS[name].margin == 0 for name in SEEDS)


@pytest.mark.requirement("A0.93")
def test_uncalibrated_a_request_fits_up_to_952_thousandths_of_what_is_usable() -> None:
    _, budget = preset("balanced", 128_000, requested=8_000)
    assert (budget.margin, budget.usable) == (0.05, 128_000 - 8_000 - 6_400)
    most = int(budget.usable / 1.05)
    assert most / budget.usable == pytest.approx(0.952, abs=0.0005)
    assert budget.fits(most)
    assert not budget.fits(most + 1)
    sure = replace(budget, margin=0.0)
    assert sure.fits(budget.usable)
    assert not sure.fits(budget.usable + 1)


@pytest.mark.requirement("A2.3", "A2.4", "A2.6")
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_doubled_max_tokens_leaves_the_window_as_it_is(name: str) -> None:
    once, twice = (preset(name, requested=n)[1] for n in (8_000, 16_000))
    assert once.window == twice.window
    assert once.reserve <= twice.reserve
    assert once.usable >= twice.usable


@pytest.mark.requirement("A2.4", "A2.2", "A2.12")
def test_whole_turns_go_neither_far_too_early_nor_never() -> None:
    """The source took the output limit for the window: it acted at 32K, or not at all where 64K were asked for."""
    settings, budget = preset("turn-atomic")
    assert (budget.window, budget.reserve, budget.soft_limit) == (128_000, 32_000, 96_000)
    assert budget.soft_limit - sum({"system": 5_000, "tools": 3_000, "summary": 1_000}.values()) == 87_000
    assert decided("turn-atomic", talk(*chat(40, 1_000), user("now?"))).action is Action.PASS
    for requested in (None, 32_000, 64_000):
        asked = preset("turn-atomic", requested=requested)[1]
        long = talk(*chat(100, 1_000), user("now?"))
        assert decide(long, budget=asked, settings=settings).action is Action.EDIT


@pytest.mark.requirement("A2.26", "A0.151")
@pytest.mark.parametrize("name", SEEDS)
def test_used_is_the_sum_of_all_buckets_of_the_array_that_is_forwarded(name: str) -> None:
    settings, budget = preset(name)
    said = (system(words(500)), user("task"), *steps(30, budget.window // 40), *chat(20, budget.window // 90))
    transcript = talk(*said, user("now?"), tools=300)
    decision = decide(transcript, budget=budget, settings=settings)
    assert set(decision.buckets) == set(BUCKETS)
    assert sum(decision.buckets.values()) == decision.after
    assert decision.after <= decision.limit
    pieces = decision.pieces
    assert pieces is not None
    assert decision.raw_after == 300 + transcript.priming + sum(p.tokens for p in pieces)


@pytest.mark.requirement("A0.141", "A0.142")
def test_a_layers_work_is_applied_and_the_next_one_measures_what_is_left() -> None:
    settings = replace(PRESETS["article-128k"], layers=PRESETS["article-128k"].layers[:1])
    two = replace(settings, layers=(*settings.layers, Layer(strategy="compact", at=0.70)))
    budget = divide(settings, window=16_000)
    transcript = talk(user("task"), *chat(14, 750), *steps(10, 300), user("now?"))
    decision = decide(transcript, budget=budget, settings=two)
    first, second = decision.trail
    assert (first.layer, second.layer) == ("evict", "compact")
    assert first.before == transcript.tokens > first.after == second.before > second.after == decision.raw_after
    assert decision.pieces is not None
    assert sum(p.tokens for p in decision.pieces) + transcript.priming == decision.raw_after < transcript.tokens

    results = talk(user("task"), *chat(3, 750), *steps(36, 300), user("now?"))
    enough = decide(results, budget=budget, settings=two)
    assert [report.layer for report in enough.trail] == ["evict"], "what was enough leaves nothing to the next layer"
    assert enough.raw_after < 0.70 * 16_000


@pytest.mark.requirement("A0.144", "D3")
def test_every_bucket_is_tracked_and_none_is_named_twice_or_in_another_case(tmp_path: Path) -> None:
    memory = user("<memory>likes tea</memory>", keep=True)
    said = (system(words(300)), user(words(100)), memory, *steps(30, 150), *chat(20, 300), user("now?"))
    settings = replace(
        ContextSettings(),
        memory=replace(ContextSettings().memory, tags=("<memory>",)),
        layers=(Layer(strategy="compact"),),
    )
    budget = window(8_000)
    transcript = talk(*said, tools=200)
    known = remember(ConversationState(), decide(transcript, budget=budget, settings=settings), transcript)
    after = decide(talk(*said, *steps(2, 100), tools=200), budget=budget, settings=settings, known=known)
    assert {name for name, tokens in after.buckets.items() if tokens} == set(BUCKETS)
    for wrong in ("TOOL_RESULTS", "Tools", "tool_results"):
        path = tmp_path / "weir.yaml"
        path.write_text(f"policies: {{p: {{buckets: {{{wrong}: {{cap: 0.1}}}}}}}}\n")
        with pytest.raises(ConfigError, match=wrong):
            load_config(path, env={"OPENAI_API_KEY": "sk-test-0123456789"}, flags=Flags())


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


@pytest.mark.requirement("A0.144")
@pytest.mark.parametrize("name", [*SEEDS, "balanced"])
def test_the_room_for_the_answer_is_checked_with_a_number_and_obeyed(name: str) -> None:
    settings, budget = preset(name)
    room = min(budget.window - budget.reserve, budget.max_input or budget.window)
    assert budget.reserved_limit == int(room / (budget.ratio * (1 + budget.margin)))
    assert first_trigger(settings, budget) <= budget.soft_limit <= budget.reserved_limit
    alone = replace(settings, enforce="global")
    for policy, limit in (
        (replace(alone, when_full="reject"), budget.reserved_limit),
        (replace(alone, when_full="manage"), budget.send_limit),
    ):
        most = limit - talk(system(""), user(words(1))).tokens
        fits, over = (talk(system(words(most + more)), user(words(1))) for more in (0, 1))
        assert (fits.tokens, over.tokens) == (limit, limit + 1)
        assert decide(fits, budget=budget, settings=policy).raw_after == limit
        with pytest.raises(BudgetUnreachable):
            decide(over, budget=budget, settings=policy)


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
    assert [*there] == [0, 1, *range(last - 4, last)], "nothing but rules, task, summary and what is being done"
    assert set(there.values()) == {None}, "word for word"


@pytest.mark.requirement("A3.24", "P12")
@pytest.mark.parametrize("name", ["baseagent-200k", "balanced", "article-128k", "interceptor-summarize"])
def test_a_system_prompt_that_leaves_no_room_is_refused_after_one_compaction(name: str) -> None:
    settings, budget = preset(name, 20_000)
    said = (*chat(12, 400), *steps(4, 100), user("now?"))
    with pytest.raises(BudgetUnreachable) as refused:
        with_model(talk(system(words(budget.send_limit)), *said), settings=settings, budget=budget, most=1)
    assert refused.value.buckets["system"] > budget.send_limit


@pytest.mark.requirement("A3.24")
def test_a_system_prompt_above_the_trigger_does_not_compact_over_and_over() -> None:
    settings, budget = preset("baseagent-200k", 20_000)
    head, said, known = system(words(13_700)), [user("task"), *chat(4, 400)], ConversationState()
    asks: list[int] = []
    for number in range(6):
        said += [user(f"and now? {number}"), *steps(1, 60)]
        transcript = talk(head, *said)
        decision, count = with_model(transcript, settings=settings, budget=budget, known=known)
        assert [report.layer for report in decision.trail].count("compact") <= 1
        assert decision.raw_after <= budget.hard_limit
        again, none = with_model(
            transcript, settings=settings, budget=budget, known=remember(known, decision, transcript)
        )
        assert (again.is_new, none) == (False, 0), "the same request once more is only replayed"
        known, asks = remember(known, decision, transcript), [*asks, count]
    assert max(asks) <= 1


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


@pytest.mark.requirement("D16", "A0.88")
def test_the_same_full_bucket_is_warned_of_where_the_whole_counts_and_cut_where_buckets_count() -> None:
    transcript = talk(user("task"), *steps(50, 1_024), *chat(10, 1_000), user("now?"))
    share = decided("off", transcript).buckets["tool_outputs"] / 128_000
    assert share == pytest.approx(0.40, abs=0.005)
    warned, cut = decided("article-128k", transcript), decided("five-bucket-128k", transcript)
    assert (warned.action, warned.pieces) == (Action.PASS, None)
    assert told(warned, "hard_violation", "tool_outputs")
    assert cut.action is Action.EDIT
    assert cut.buckets["tool_outputs"] <= 0.80 * 32_000
    assert cut.buckets["history"] == warned.buckets["history"]


@pytest.mark.requirement("D18", "A0.123")
@pytest.mark.parametrize(
    ("name", "share", "alarms"),
    [
        ("article-128k", 0.31, True),
        ("article-128k", 0.29, False),
        ("fb-research-256k", 0.45, False),
        ("fb-research-256k", 0.60, True),
    ],
)
def test_tool_results_alarm_above_30_percent_or_a_quarter_more_than_their_own_cap(
    name: str, share: float, alarms: bool
) -> None:
    settings, budget = preset(name)
    used = int(0.82 * budget.usable)
    results = steps(int(share * used / 500), 500)
    transcript = exactly(used, *chat(20, 1_000), *results, user("now?"))
    decision = decide(transcript, budget=budget, settings=replace(settings, layers=(), enforce="global"))
    assert decision.buckets["tool_outputs"] / decision.after == pytest.approx(share, abs=0.005)
    assert ("tool_bloat" in {e.kind for e in decision.events}) is alarms
    assert limits_for(settings, budget).bloat == pytest.approx(0.30 if name == "article-128k" else 1.25 * 120 / 256)


@pytest.mark.requirement("A4.21")
def test_tool_definitions_do_not_crowd_out_the_history() -> None:
    definitions = tuple(ToolDefinition(f"tool_{n:03}", 200, f"Does thing {n}.") for n in range(200))
    transcript = talk(user("task"), *chat(20, 1_000), user("now?"), tools=40_012)
    transcript = replace(transcript, read_tools=lambda: Tools(definitions, frozenset()))
    decision = decided("five-bucket-128k", transcript)
    assert 0 < decision.buckets["tools"] <= 16_000
    assert decision.buckets["history"] == transcript.tokens - transcript.tools
    assert set(texts(decision, transcript)) == set(range(len(transcript.messages)))


@pytest.mark.requirement("A4.21", "A4.20")
def test_one_output_larger_than_the_limit_costs_no_other_message() -> None:
    transcript = talk(user("task"), *steps(6, 500), *chat(6, 400), *steps(1, 60_000), assistant("Read."), user("now?"))
    decision = decided("five-bucket-128k", transcript)
    there = texts(decision, transcript)
    changed = [index for index, text in there.items() if text is not None]
    assert set(there) == set(range(len(transcript.messages)))
    assert [transcript.messages[i].tokens for i in changed] == [60_000]
    assert decision.buckets["tool_outputs"] <= 25_000 + 6 * 500


@pytest.mark.requirement("A4.21")
def test_recent_reasoning_stays_where_the_history_is_over_its_cap() -> None:
    newest = assistant("I rule out the cache because the first request fails too. " + words(900))
    transcript = talk(user("task"), *chat(60, 1_000), user("And the cache?"), newest, user("Go on."))
    decision = decided("five-bucket-128k", transcript)
    there = texts(decision, transcript)
    last = len(transcript.messages)
    assert decision.buckets["history"] + decision.buckets["summary"] <= 48_000
    assert len(there) < last - 40
    assert {there[index] for index in range(last - 3, last)} == {None}


@pytest.mark.requirement("A2.27")
def test_what_the_source_left_open_is_in_the_printed_policy() -> None:
    settings = PRESETS["turn-atomic"]
    shown = policy_amounts(settings, 128_000)
    dropping = {"layer": "drop_oldest", "scope": "total", "acts_at": 96_001}
    assert shown["cascade"] == [{"layer": "compact", "scope": "total", "acts_at": 0}, dropping]
    assert (settings.layers[1].params["fraction"], settings.image_tokens) == (0.5, 1_000)
    assert (settings.summaries.prepare_messages, settings.summaries.prepare_at) == (20, 0.75)
    turns = talk(user("task"), *chat(101, 1_000), user("now?"))
    decision = decided("turn-atomic", turns)
    gone = set(range(len(turns.messages))) - set(texts(decision, turns))
    assert len(units(turns.messages, 0)) > 200
    assert sum(turns.messages[i].role == "user" for i in gone) == 51, "half of 103 turns, rounded up, less the task"
