import pytest
from policies.quality.advise import (
    ADVISED,
    GEMINI_CLIFF,
    OBSERVED,
    OPENAI_CLIFF,
    PROVIDERS,
    BucketUse,
    TokenPrices,
    ToolUse,
    Traffic,
    advise,
    advise_budget,
    batch_cost,
    best_trigger,
    recommend,
    request_cost,
    worst_tools,
)

from policies.settings import BALANCED_SHAPES

PRICES = TokenPrices(1.0, 0.1, 1.25, 5.0)
FREE_WRITES = TokenPrices(1.0, 0.1, 1.0, 5.0)


@pytest.mark.parametrize(("prices", "batch", "gap"), [(PRICES, 23_800, 37_800), (FREE_WRITES, 20_800, 35_300)])
def test_the_cheapest_trigger_is_that_of_the_worked_example(prices: TokenPrices, batch: float, gap: int) -> None:
    cost = batch_cost(prices, target=20_000, kept=8_000, summary=2_000, summarizer=prices)

    best = best_trigger(prices, growth=3_000, target=20_000, batch=cost)

    assert cost == pytest.approx(batch)
    assert best - 20_000 == pytest.approx(gap, abs=50)


def test_the_cheapest_trigger_holds_5800_a_turn_and_a_high_one_9000() -> None:
    batch = batch_cost(PRICES, target=20_000, kept=8_000, summary=2_000, summarizer=PRICES)
    best = best_trigger(PRICES, growth=3_000, target=20_000, batch=batch)

    def held(trigger: int) -> float:
        return PRICES.cache_read * (trigger + 20_000) / 2 + 3_000 * batch / (trigger - 20_000)

    assert round(best, -3) == 58_000
    assert held(best) == pytest.approx(5_800, abs=50)
    assert held(150_000) == pytest.approx(9_000, abs=80)
    assert held(best) < min(held(best - 2_000), held(best + 2_000))


def test_where_reading_is_free_cost_gives_no_trigger() -> None:
    local = TokenPrices(1.0, 0.0, 1.0, 1.0)

    advice = advise(local, growth=1_000, fixed=2_000, window=128_000, usable=117_000)
    assert (advice.shape.trigger, advice.optimum) == (0.80, None)


@pytest.mark.parametrize(
    ("cliff", "border"), [(OPENAI_CLIFF, 272_000), (GEMINI_CLIFF, 200_000)], ids=["OpenAI", "Gemini"]
)
def test_a_token_over_a_tier_doubles_the_price_of_the_whole_prompt(cliff: object, border: int) -> None:
    prices = TokenPrices(1.0, 0.1, 1.0, 8.0, cliff=cliff)  # type: ignore[arg-type]

    assert request_cost(prices, tokens=border, cached=0) == border
    assert request_cost(prices, tokens=border + 1, cached=0) == 2 * (border + 1)


def test_a_prefix_below_the_minimum_is_neither_read_nor_written() -> None:
    prices = PROVIDERS["anthropic"]

    assert request_cost(prices, tokens=1_023, cached=1_000) == 1_023
    assert request_cost(prices, tokens=1_024, cached=1_023) == pytest.approx(1.25 * 1_024)
    assert request_cost(prices, tokens=2_000, cached=1_024) == pytest.approx(102.4 + 1.25 * 976)


def test_advice_for_a_large_window_stops_where_simulation_stopped() -> None:
    advice = advise(PRICES, growth=800, fixed=3_000, window=128_000, usable=120_000)

    assert advice.optimum is not None
    assert advice.optimum < 0.40 * 120_000
    assert (advice.shape.trigger, advice.shape.low_water) == (0.40, 0.20)
    assert (advice.shape.extract, advice.shape.tail) == (ADVISED.extract, ADVISED.tail)
    assert "cost alone" in advice.reason


def test_advice_follows_the_formula_between_the_advised_and_the_policys_own_trigger() -> None:
    advice = advise(PRICES, growth=8_000, fixed=3_000, window=128_000, usable=120_000)

    assert advice.optimum is not None
    assert 0.40 < advice.shape.trigger < 0.80
    assert advice.shape.trigger == pytest.approx(advice.optimum / 120_000, abs=0.005)


@pytest.mark.parametrize(("window", "advised"), [(127_999, False), (128_000, True)])
def test_only_windows_of_128k_and_more_are_advised_to_act_early(window: int, advised: bool) -> None:
    advice = advise(PRICES, growth=800, fixed=3_000, window=window, usable=window - 8_000)

    assert advice.shape.trigger == (0.40 if advised else BALANCED_SHAPES[-1].trigger)


def test_advice_stays_below_a_dearer_tier() -> None:
    prices = PROVIDERS["openai-5.6"]

    advice = advise(prices, growth=2_000, fixed=3_000, window=1_050_000, usable=990_000)

    assert advice.shape.trigger * 990_000 < 272_000
    assert "272,000" in advice.reason


def tool(name: str, tokens: int, *, calls: int = 1, largest: int = 100, repeated: int = 0) -> ToolUse:
    return ToolUse(name=name, calls=calls, tokens=tokens, largest=largest, repeated=repeated)


def traffic(*, results: int, history: int = 1_000, requests: int = 10, turns: int = 5, **more: int) -> Traffic:
    tools = (tool("read", results, repeated=more.pop("repeated", 0)),) if results else ()
    buckets = {"history": history, "tool_outputs": results}
    return Traffic(conversations=1, requests=requests, turns=turns, buckets=buckets, tools=tools, **more)


@pytest.mark.requirement("A0.40")
@pytest.mark.parametrize(
    ("seen", "kind", "policies"),
    [
        (traffic(results=0), "chat", ("fifo",)),
        (traffic(results=99, history=901), "chat", ("fifo",)),
        (traffic(results=1_000, history=1_000), "exploration", ("type_based", "lru")),
        (traffic(results=300, requests=20), "exploration", ("type_based", "lru")),
        (traffic(results=300), "heterogeneous", ("priority", "hybrid")),
        (traffic(results=300, repeated=60), "repeated outputs", ("type_based", "priority")),
        (traffic(results=300, repeated=59), "heterogeneous", ("priority", "hybrid")),
        (traffic(results=300, marked=1), "mission-critical", ("hybrid",)),
    ],
)
def test_a_policy_is_recommended_by_what_the_traffic_is(seen: Traffic, kind: str, policies: tuple[str, ...]) -> None:
    answer = recommend(seen)

    assert (answer.kind, answer.policies) == (kind, policies)
    assert answer.reason


def test_no_traffic_is_a_chat() -> None:
    assert recommend(Traffic(conversations=0, requests=0, turns=0)).kind == "chat"


@pytest.mark.requirement("A3.17")
def test_the_worst_tools_are_named_with_what_to_do_about_them() -> None:
    seen = Traffic(
        conversations=1,
        requests=1,
        turns=1,
        tools=(
            tool("list", 1_000, calls=90),
            tool("read", 6_000, largest=4_000),
            tool("poll", 3_000, repeated=600),
            tool("idle", 0),
        ),
    )

    worst = worst_tools(seen, most=3)

    assert [each.tool.name for each in worst] == ["read", "poll", "list"]
    assert [each.share for each in worst] == [0.6, 0.3, 0.1]
    assert ["in parts" in worst[0].advice, "what changed" in worst[1].advice, "fewer" in worst[2].advice] == [True] * 3


def use(over: int, *, requests: int = 10) -> BucketUse:
    tokens = {"tool_outputs": 900, "history": 100}
    return BucketUse(requests=requests, over={"tool_outputs": over, "system": 0}, tokens=tokens)


@pytest.mark.requirement("A0.88", "A0.94")
def test_a_budget_is_not_tuned_before_ten_conversations() -> None:
    few = advise_budget([use(10)] * (OBSERVED - 1))
    enough = advise_budget([use(10)] * OBSERVED)

    assert (few.ready, few.enlarge) == (False, ())
    assert "9 of 10" in few.reason
    assert (enough.ready, enough.enlarge) == (True, ("tool_outputs",))
    assert "tool_outputs (in 10 of 10 conversations)" in enough.reason
    assert "15 to 20 %" in enough.reason


@pytest.mark.requirement("A0.88")
def test_a_bucket_that_is_over_now_and_then_is_left_alone() -> None:
    assert advise_budget([use(4)] * 10).enlarge == ()
    assert advise_budget([use(5)] * 5 + [use(4)] * 5).enlarge == ("tool_outputs",)
    assert advise_budget([use(5)] * 4 + [use(4)] * 6).enlarge == ()


@pytest.mark.requirement("A0.94")
def test_conversations_are_told_what_history_usually_gets() -> None:
    talk = BucketUse(requests=4, over={"history": 4}, tokens={"history": 900, "tool_outputs": 10})

    assert "70 to 75 %" in advise_budget([talk] * 10).reason
