"""When layers are due and where their work ends, and what growth does to that."""

from dataclasses import replace

import pytest

from policies.draft import ConversationState
from policies.ledger import Action, Decision, LayerReport, Trend
from policies.limits import TokenBudget, divide, first_trigger, layers_of, limit_for, target_for
from policies.pressure import advance
from policies.settings import Bucket, ContextSettings, Layer, Zones
from tests.policies.play import Said, assistant, decide, remember, step, talk, user, words

PLAIN = ContextSettings(margin=0.0, headroom=0, reserve_floor=0, rot_soft_tokens=None, cold_at=None)
HUNDRED = TokenBudget(window=100_000, reserve=0, headroom=0)
EVICT = Layer(strategy="evict", at=0.75, stop_at=0.60, params={"scorer": "fifo"})


def at(tokens: int, *, results: int = 40) -> list[Said]:
    """A conversation of exactly so many tokens, most of them in old results, the newest message short."""
    task, end = user("task"), [assistant("done"), user("go on")]
    each = (tokens - 400) // results
    said: list[Said] = [task]
    for n in range(results):
        said += step(f"{n} {words(each - 20)}", arguments=f'{{"n": {n}}}')
    missing = tokens - talk(*said, *end, user("")).tokens
    return [*said, *end[:1], user(words(missing + 4 + talk(end[1]).tokens - talk().tokens - 4) if missing else "")]


def sized(tokens: int) -> list[Said]:
    said = at(tokens)
    for spare in range(-40, 41):
        tried = [*said[:-1], user(words(max(0, len(said[-1].text) // 4 + spare)))]
        if talk(*tried).tokens == tokens:
            return tried
    raise AssertionError(f"cannot make {tokens}")


def chat(tokens: int) -> list[Said]:
    """A conversation of about so many tokens without tools."""
    said = [user("task")]
    for n in range(tokens // 1_000):
        said += [assistant(f"{n} {words(490)}"), user(f"{n} {words(490)}")]
    return said


def kept(trail: tuple[LayerReport, ...]) -> list[str]:
    return [r.layer for r in trail if r.kept]


@pytest.mark.requirement("D2", "A0.10")
def test_a_layer_is_due_at_its_share_and_not_a_token_before() -> None:
    settings = replace(PLAIN, layers=(EVICT,))
    for tokens, action in ((74_999, Action.PASS), (75_000, Action.EDIT)):
        decision = decide(talk(*sized(tokens)), settings=settings, budget=HUNDRED)
        assert decision.before == tokens
        assert decision.action is action
    assert decision.after <= 60_000


@pytest.mark.requirement("A2.12")
def test_a_layer_at_the_whole_base_is_due_above_it_only() -> None:
    settings = replace(PLAIN, layers=(replace(EVICT, at=1.0),))
    assert decide(talk(*sized(100_000)), settings=settings, budget=HUNDRED).action is Action.PASS
    assert decide(talk(*sized(100_001)), settings=settings, budget=HUNDRED).action is Action.EDIT


@pytest.mark.requirement("D1")
def test_the_base_is_what_a_share_is_a_share_of() -> None:
    budget = TokenBudget(window=200_000, reserve=32_000, headroom=0, max_input=200_000)
    transcript = talk(*sized(145_000))
    acts = {}
    for name, base, share in (
        ("baseagent-200k", "usable", 0.85),
        ("article", "window", 0.75),
        ("interceptor", "max_input", 0.85),
    ):
        layer = replace(EVICT, at=share, stop_at=None)
        settings = replace(PLAIN, base=base, layers=(layer,))  # type: ignore[arg-type]
        acts[name] = decide(transcript, settings=settings, budget=budget).action
    assert acts == {"baseagent-200k": Action.EDIT, "article": Action.PASS, "interceptor": Action.PASS}


@pytest.mark.requirement("A0.44", "A0.135")
def test_a_layer_that_cannot_reach_its_target_does_what_it_can() -> None:
    settings = replace(PLAIN, layers=(EVICT,))
    said = [*chat(70_000), *step(words(9_000)), assistant("done"), user("go on")]
    decision = decide(talk(*said), settings=settings, budget=HUNDRED)
    assert kept(decision.trail) == ["evict"]
    assert 69_000 < decision.after < 70_000


@pytest.mark.requirement("D21", "D25")
def test_without_a_target_a_layer_leaves_a_fifth_of_its_trigger_free_so_that_the_next_requests_are_quiet() -> None:
    settings = replace(PLAIN, layers=(replace(EVICT, stop_at=None),))
    said, known, batches = sized(76_000), ConversationState(), 0
    for n in range(12):
        transcript = talk(*said)
        decision = decide(transcript, settings=settings, budget=HUNDRED, known=known)
        batches += decision.is_new
        known = remember(known, decision, transcript)
        said = [*said, *step(f"more {n} {words(900)}", arguments=f'{{"more": {n}}}')]
    assert batches == 1


@pytest.mark.requirement("A0.76", "D7", "A0.140")
def test_later_layers_do_not_run_where_an_earlier_one_sufficed() -> None:
    layers = (EVICT, Layer(strategy="compact", at=0.92))
    decision = decide(talk(*sized(80_000)), settings=replace(PLAIN, layers=layers), budget=HUNDRED)
    assert [r.layer for r in decision.trail] == ["evict"]


@pytest.mark.requirement("A0.142")
def test_a_later_layer_runs_where_an_earlier_one_fell_short() -> None:
    said = [*step(words(10_000)), *chat(80_000)]
    layers = (EVICT, Layer(strategy="compact", at=0.75))
    decision = decide(talk(user("task"), *said, user("go on")), settings=replace(PLAIN, layers=layers), budget=HUNDRED)
    assert kept(decision.trail) == ["evict", "compact"]


@pytest.mark.requirement("A0.75")
def test_a_layer_that_is_not_there_is_reported_and_the_next_one_runs() -> None:
    layers = (Layer(strategy="distil", at=0.5), EVICT)
    decision = decide(talk(*sized(80_000)), settings=replace(PLAIN, layers=layers), budget=HUNDRED)
    assert [(r.layer, r.reason, r.kept) for r in decision.trail] == [
        ("distil", "unavailable", False),
        ("evict", "", True),
    ]


def test_an_edit_that_saves_next_to_nothing_is_not_made_while_the_request_fits() -> None:
    said = [*chat(74_500), *step(words(2_000)), assistant("done"), user("go on")]
    lazy = replace(PLAIN, layers=(EVICT,))
    assert decide(talk(*said), settings=lazy, budget=HUNDRED).action is Action.PASS
    eager = replace(PLAIN, layers=(replace(EVICT, min_savings=0),))
    assert decide(talk(*said), settings=eager, budget=HUNDRED).action is Action.EDIT


def test_limits_and_targets_of_every_kind_of_layer() -> None:
    settings = replace(PLAIN, buckets={"tools": Bucket(cap=1_000)})
    budget = divide(settings, window=100_000)
    table = [
        (Layer(strategy="evict", at=0), -1, 0),
        (Layer(strategy="evict", at=0.5), 49_999, 40_000),
        (Layer(strategy="evict", at=1.0, stop_at=0.3), 100_000, 30_000),
        (Layer(strategy="evict", at=0.8, scope="tools"), 799, 640),
        (Layer(strategy="evict", at=1.0, scope="tools", stop_at=0.5), 1_000, 500),
    ]
    for layer, limit, target in table:
        assert limit_for(layer, settings, budget) == limit
        assert target_for(layer, settings, budget, low_water=50) == target
    assert first_trigger(replace(settings, layers=tuple(row[0] for row in table)), budget) == 49_999


@pytest.mark.requirement("A4.34")
def test_what_a_bucket_asks_for_above_its_cap_is_a_layer_where_buckets_are_enforced() -> None:
    buckets = {
        "tool_outputs": Bucket(cap=10, on_overflow="truncate"),
        "history": Bucket(cap=10, on_overflow="summarize"),
        "tools": Bucket(cap=10, on_overflow="prune-unused"),
        "memory": Bucket(cap=10, on_overflow="warn"),
        "system": Bucket(cap=10, on_overflow="reject"),
    }
    settings = replace(PLAIN, layers=(), buckets=buckets)
    assert layers_of(settings) == ()
    asked = [(layer.strategy, layer.scope) for layer in layers_of(replace(settings, enforce="bucket"))]
    assert asked == [("prune_tools", "tools"), ("evict", "tool_outputs"), ("compact", "history")]


# -- growth ---------------------------------------------------------------------------------------------------------

SMALL = TokenBudget(window=32_768, reserve=0, headroom=0)


def grown(*tokens: int) -> Trend:
    """The trend of a conversation whose requests took so many tokens."""
    trend = Trend()
    for n, raw in enumerate(tokens, start=1):
        trend = advance(trend, raw=raw, length=n, buckets={}, zone="green", at=float(n), rules=PLAIN.trend)
    return trend


@pytest.mark.requirement("A0.14")
def test_a_spike_that_would_reach_orange_next_time_runs_free_layers_now() -> None:
    base = sized(14_700)
    transcript = talk(*base)
    before = grown(500, 1_000, 1_500, transcript.tokens - 12_000)
    settings = replace(PLAIN, layers=(EVICT, Layer(strategy="compact", at=0.8)), preempt=True)
    decision = decide(transcript, settings=settings, budget=SMALL, trend=before)
    assert 0.44 < decision.before / 32_768 < 0.46
    assert decision.reading is not None
    assert (decision.reading.spike, decision.reading.last_delta) == (True, 12_000)
    assert kept(decision.trail) == []  # it is under where evicting ends: there is nothing to gain
    deeper = replace(settings, layers=(replace(EVICT, stop_at=0.2), *settings.layers[1:]))
    assert kept(decide(transcript, settings=deeper, budget=SMALL, trend=before).trail) == ["evict"]
    calm = replace(deeper, preempt=False)
    assert decide(transcript, settings=calm, budget=SMALL, trend=before).action is Action.PASS


@pytest.mark.requirement("A0.90")
def test_a_bucket_with_two_and_a_half_requests_left_is_critical_and_acted_upon() -> None:
    settings = replace(
        PLAIN,
        buckets={"tool_outputs": Bucket(cap=20_000, on_overflow="truncate")},
        enforce="bucket",
        layers=(Layer(strategy="evict", scope="tool_outputs", at=0.95, stop_at=0.4, params={"scorer": "fifo"}),),
        preempt=True,
    )
    budget = divide(settings, window=128_000)
    said: list[Said] = [user("task")]
    trend = Trend()
    decision: Decision | None = None
    for n in range(6):
        said += step(f"{n} {words(2_495)}", arguments=f'{{"n": {n}}}')
        transcript = talk(*said)
        decision = decide(transcript, settings=settings, budget=budget, trend=trend)
        trend = decision.trend
        if n < 4:
            assert decision.action is Action.PASS
    assert decision is not None
    burning = [e.facts for e in decision.events if e.kind == "burn_rate"]
    assert [(f["component"], f["urgency"]) for f in burning] == [("tool_outputs", "critical")]
    assert 1.9 < float(burning[0]["turns_remaining"]) < 2.6
    assert kept(decision.trail) == ["evict"]


@pytest.mark.requirement("A0.23")
def test_what_management_took_out_is_no_negative_growth() -> None:
    settings = replace(PLAIN, layers=(EVICT,))
    said, known, trend = sized(80_000), ConversationState(), Trend()
    for n in range(4):
        transcript = talk(*said)
        decision = decide(transcript, settings=settings, budget=HUNDRED, known=known, trend=trend, at=float(n))
        known, trend = remember(known, decision, transcript), decision.trend
        said = [*said, *step(f"{n} {words(1_000)}", arguments=f'{{"next": {n}}}')]
    assert decision.after < 65_000 < decision.before
    assert decision.reading is not None
    assert decision.reading.velocity_tokens_per_turn is not None
    assert 1_000 < decision.reading.velocity_tokens_per_turn < 1_100


@pytest.mark.requirement("A0.1")
def test_above_what_models_read_reliably_the_zone_is_at_least_yellow() -> None:
    budget = TokenBudget(window=200_000, reserve=0, headroom=0)
    settings = replace(PLAIN, layers=(), rot_soft_tokens=64_000)
    decision = decide(talk(*sized(70_000)), settings=settings, budget=budget)
    assert (decision.pressure.zone, round(decision.pressure.level, 2)) == ("yellow", 0.35)
    assert decision.reading is not None
    assert decision.reading.rot_guard
    assert decision.trend.zone == "yellow"
    calm = decide(talk(*sized(64_000)), settings=settings, budget=budget)
    assert calm.pressure.zone == "green"


@pytest.mark.requirement("A0.18", "A0.10")
def test_a_change_of_zone_is_told_once() -> None:
    settings = replace(PLAIN, layers=())
    first = decide(talk(*sized(60_000)), settings=settings, budget=HUNDRED, trend=grown(30_000))
    status, change, bloat, candidates = first.events
    assert (status.kind, status.facts["percent"]) == ("context.status", pytest.approx(60, abs=1))
    assert bloat.kind == "tool_bloat"
    assert dict(change.facts) == {"old": "green", "new": "yellow"}
    assert (candidates.kind, candidates.facts["count"]) == ("eviction_candidates", 40)
    assert first.action is Action.PASS
    again = decide(talk(*sized(61_000)), settings=settings, budget=HUNDRED, trend=first.trend)
    assert [e.kind for e in again.events] == ["context.status", "tool_bloat"]


@pytest.mark.requirement("D22", "A0.11", "A4.32")
def test_zones_scale_with_the_window_only_where_the_policy_says_so() -> None:
    transcript, budget = talk(*sized(21_500)), TokenBudget(window=32_768, reserve=0, headroom=0)
    own = replace(PLAIN, layers=(), zones=Zones())
    assert decide(transcript, settings=own, budget=budget).pressure.zone == "yellow"
    assert decide(transcript, settings=replace(own, auto_scale=True), budget=budget).pressure.zone == "orange"


@pytest.mark.requirement("D25")
def test_a_batch_that_would_come_soon_runs_early_where_the_provider_has_forgotten_the_prefix() -> None:
    settings = replace(PLAIN, layers=(replace(EVICT, stop_at=0.5),), cold_at=0.8)
    said = sized(76_000)
    first = decide(talk(*said), settings=settings, budget=HUNDRED, at=1.0)
    assert first.is_new
    known = remember(ConversationState(), first, talk(*said))
    for n in range(14):
        said += step(f"later {n} {words(800)}", arguments=f'{{"later": {n}}}')
    transcript = talk(*said)

    def at(second: float, policy: ContextSettings = settings, ledger: ConversationState = known) -> Action:
        return decide(transcript, settings=policy, budget=HUNDRED, known=ledger, trend=first.trend, at=second).action

    assert 60_000 < decide(transcript, settings=settings, budget=HUNDRED, known=known).raw_after < 75_000
    assert at(301.0) is Action.REPLAY
    assert at(302.0) is Action.EDIT
    assert at(302.0, replace(settings, cold_at=None)) is Action.REPLAY
    calm = talk(*sized(65_000))  # a conversation that was never managed is left alone until its trigger
    assert decide(calm, settings=settings, budget=HUNDRED, trend=first.trend, at=999.0).action is Action.PASS
