"""Presets over long conversations: when they act, how often, and how many questions a model is asked for it."""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from policies.effects import Answers, Done, Failed, Flow, Offload, Reply, Save, Summarize, Summary, Together
from policies.ledger import ConversationState, Decision, Trend
from policies.limits import divide
from policies.planner import is_soft, plan, prepare
from policies.text.segments import Readings
from policies.tokens import CHARS4
from proxy.config.presets import preset_policies
from tests.functional.harness import prose
from tests.policies.play import Said, assistant, remember, step, system, talk, user, words
from tests.upstream.delivery import summarize

pytestmark = pytest.mark.slow

T = TypeVar("T")
PRESETS = preset_policies()
Grow = Callable[[random.Random, int], Iterable[Said]]


@dataclass
class Model:
    """A summariser that answers every question once, or none; ``kept`` are the answers, as the product keeps them."""

    fails: bool = False
    kept: dict[tuple[str, str], Summary] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    known: int = 0

    def drive(self, flow: Flow[T]) -> T:
        reply: Reply | None = None
        while True:
            try:
                asked = next(flow) if reply is None else flow.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            match asked:
                case Summarize():
                    reply = self._answer(asked)
                case Together():
                    reply = Answers(tuple(map(self._answer, asked.effects)))
                case Save():
                    reply = Failed("store")
                case _:
                    assert isinstance(asked, Offload)
                    reply = Done()

    def _answer(self, asked: Summarize) -> Summary | Failed:
        found = self.kept.get((asked.key, asked.prompt))
        if found is not None:
            self.known += 1
            return found
        self.asked.append(asked.purpose)
        if self.fails:
            return Failed("status_500")
        text = summarize(asked.prompt, limit=asked.max_tokens, count=CHARS4.count)
        return self.kept.setdefault((asked.key, asked.prompt), Summary(text))


@dataclass
class Run:
    """A conversation that grows, planned request by request; after each answer what is worth it is prepared."""

    name: str
    window: int
    grow: Grow
    summarizer: str | None = None
    fails: bool = False
    batches: list[Decision] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    prepared: int = 0
    used: int = 0

    def __post_init__(self) -> None:
        self.within = Model(self.fails)
        self.after = Model(self.fails, self.within.kept)
        self.settings = replace(PRESETS[self.name], summarizer=self.summarizer)
        self.budget = divide(self.settings, window=self.window)
        self.said: list[Said] = [system(words(200, "sys")), user(words(60, "task"))]
        self.known, self.trend, self.readings, self.random = ConversationState(), Trend(), Readings(), random.Random(7)

    def go(self, requests: int) -> "Run":
        for number in range(requests):
            self.ask(float(number))
            self.said += self.grow(self.random, number)
        return self

    def ask(self, at: float) -> None:
        transcript, settings, budget = talk(*self.said), self.settings, self.budget
        flow = plan(
            transcript,
            settings=settings,
            budget=budget,
            known=self.known,
            counter=CHARS4,
            trend=self.trend,
            at=at,
            readings=self.readings,
        )
        decision = self.within.drive(flow)
        self.decisions.append(decision)
        self.batches += [decision] if decision.is_new else []
        self.used += decision.cut is not None and decision.cut.origin.startswith("prepared")
        self.known, self.trend = remember(self.known, decision, transcript), decision.trend
        length, known = len(transcript.chain), self.known
        if decision.is_new or not is_soft(
            decision.raw_after,
            length,
            settings=settings,
            budget=budget,
            known=known,
            buckets=decision.buckets,
            trend=decision.trend,
        ):
            return
        ready = self.after.drive(
            prepare(transcript, settings=settings, budget=budget, known=known, counter=CHARS4, readings=self.readings)
        )
        if ready is not None and ready.text:
            self.prepared += 1
            self.known = replace(known, prepared=ready)


def results(*tokens: int) -> Grow:
    """A tool step each time, its result of one of these sizes."""
    return lambda rng, n: step(words(rng.choice(tokens), f"w{n}x"), arguments=json.dumps({"n": n}))


def turns(asked: int, answered: int) -> Grow:
    """A turn of a chat each time, in words that can be summed up."""
    return lambda _, n: (assistant(prose(answered * 4 // 7, seed=2 * n)), user(prose(asked * 4 // 7, seed=2 * n + 1)))


# -- the threshold of a preset ---------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.10", "D2", "D16", "A0.90", "A0.141")
@pytest.mark.parametrize("sizes", [(4_000, 8_000, 12_000), (300, 500, 800, 1_500, 9_000)], ids=["large", "mixed"])
def test_large_results_are_evicted_at_the_seeds_threshold_and_not_before(sizes: tuple[int, ...]) -> None:
    run = Run("article-128k", 128_000, results(*sizes)).go(40 if min(sizes) > 1_000 else 90)
    start = 0
    for decision in run.decisions:
        grown = decision.before - start  # what management left, and what came since
        if decision.is_new:
            assert grown >= 0.75 * 128_000
            start = decision.before - decision.after
        else:
            assert grown < 0.75 * 128_000
    assert len(run.batches) >= 5
    assert all(decision.after <= 0.60 * 128_000 for decision in run.batches)


@pytest.mark.requirement("D16", "A0.88", "A0.90")
def test_a_full_bucket_only_warns_where_the_whole_is_enforced() -> None:
    run = Run("article-128k", 128_000, results(4_000)).go(16)
    told = {event.kind for decision in run.decisions for event in decision.events}
    assert {"hard_violation", "burn_rate"} <= told
    assert run.batches == []


@pytest.mark.requirement("A0.10", "A0.134", "A1.12")
def test_yellow_lists_what_eviction_would_begin_with_and_changes_nothing() -> None:
    run = Run("article-128k", 128_000, results(8_000)).go(10)
    yellow = next(decision for decision in run.decisions if decision.pressure.zone == "yellow")
    events = {event.kind: event.facts for event in yellow.events}
    assert yellow.pieces is None
    assert yellow.pressure.status == "preparing"
    assert int(events["eviction_candidates"]["count"]) > 4
    assert str(events["eviction_candidates"]["largest"]).count(":") == 5
    assert events["context.status"]["limit"] == 128_000
    assert events["context.status"]["percent"] == round(100 * yellow.before / 128_000, 1) >= 50


@pytest.mark.requirement("A0.10")
def test_candidates_are_listed_again_when_a_managed_conversation_comes_back_to_yellow() -> None:
    run = Run("balanced", 32_768, results(450)).go(110)
    first = next(number for number, decision in enumerate(run.decisions) if decision.is_new)
    later = [d for d in run.decisions[first + 1 :] if not d.is_new and any(e.kind == "zone_change" for e in d.events)]
    assert later
    for decision in later:
        [listed] = [event.facts for event in decision.events if event.kind == "eviction_candidates"]
        assert int(listed["tokens"]) <= decision.after


@pytest.mark.requirement("A4.29", "D21")
def test_the_window_of_four_turns_slides_from_the_fifth_on() -> None:
    run = Run("fb-voice-32k", 32_000, turns(60, 90)).go(12)
    for number, decision in enumerate(run.decisions):
        assert decision.before < 0.70 * 12_000
        assert decision.is_new == (number >= 4)
        if decision.is_new:  # the head, the task, three whole turns and the newest question
            messages = 2 + 2 * number
            kept = [piece.index for piece in decision.pieces or () if piece.index is not None]
            assert kept == [0, 1, *range(messages - 7, messages)]
    assert {report.layer for decision in run.batches for report in decision.trail if report.kept} == {"window"}


@pytest.mark.requirement("A0.75", "A0.78", "R.50")
@pytest.mark.parametrize("name", ["fb-code-200k"])
def test_with_a_model_that_fails_requests_get_as_small_as_without_one(name: str) -> None:
    window = PRESETS[name].designed_for or 128_000

    def tokens(summarizer: str | None) -> list[int]:
        run = Run(name, window, results(2_000, 5_000), summarizer=summarizer, fails=True).go(24)
        assert run.batches
        return [decision.after for decision in run.decisions]

    assert tokens("model") == tokens(None)


# -- what a model is asked -------------------------------------------------------------------------------------------


@pytest.mark.requirement("D7", "D14", "A0.140")
@pytest.mark.parametrize(
    ("name", "window", "grow", "requests"),
    [
        ("article-128k", 128_000, results(4_000, 8_000, 12_000), 32),
        ("baseagent-200k", 200_000, results(2_000, 5_000), 60),
    ],
)
def test_where_batches_only_evict_no_model_is_asked_at_any_time(
    name: str, window: int, grow: Grow, requests: int
) -> None:
    run = Run(name, window, grow, summarizer="model").go(requests)
    assert len(run.batches) >= 2
    assert (run.within.asked, run.after.asked) == ([], [])


@pytest.mark.requirement("D14", "A2.11", "A2.27")
@pytest.mark.parametrize(
    ("name", "window", "requests"),
    [("balanced", 16_384, 70), ("interceptor-summarize", 16_384, 70), ("turn-atomic", 32_768, 24)],
)
def test_what_is_prepared_is_used_and_no_request_waits_for_a_model(name: str, window: int, requests: int) -> None:
    run = Run(name, window, turns(150, 250), summarizer="model").go(requests)
    assert run.used >= 2
    assert run.prepared - run.used <= 1, "the last one may be for a batch that has not come yet"
    assert run.within.asked == []


@pytest.mark.requirement("D14", "A0.66")
def test_messages_that_a_batch_will_put_in_shorter_words_are_asked_about_after_the_answer_before() -> None:
    run = Run("article-128k", 32_000, turns(400, 900), summarizer="model").go(36)
    assert any(report.layer == "progressive" and report.kept for d in run.batches for report in d.trail)
    assert run.within.known >= 0.8 * len(run.after.asked) > 0, "what was asked after an answer is used"
    assert len(run.within.asked) <= 0.25 * len(run.after.asked)
