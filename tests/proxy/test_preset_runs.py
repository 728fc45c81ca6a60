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
from tests.policies.play import Said, remember, step, system, talk, user, words
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


# -- the threshold of a preset ---------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.75", "A0.78", "R.50")
@pytest.mark.parametrize("name", ["fb-code-200k"])
def test_with_a_model_that_fails_requests_get_as_small_as_without_one(name: str) -> None:
    window = PRESETS[name].designed_for or 128_000

    def tokens(summarizer: str | None) -> list[int]:
        run = Run(name, window, results(2_000, 5_000), summarizer=summarizer, fails=True).go(24)
        assert run.batches
        return [decision.after for decision in run.decisions]

    assert tokens("model") == tokens(None)
