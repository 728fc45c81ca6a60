"""A summariser in a test: what it is asked is written down, what it answers is a function of the question."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from policies.draft import ConversationState, Draft
from policies.effects import (
    Answers,
    Done,
    Effect,
    Failed,
    Flow,
    Offload,
    Reply,
    Save,
    StateSaved,
    Summarize,
    Summary,
    Together,
)
from policies.ledger import Decision
from policies.limits import TokenBudget
from policies.messages import Transcript
from policies.planner import plan
from policies.settings import ContextSettings
from policies.tokens import CHARS4

T = TypeVar("T")
Answer = Callable[[Summarize], Summary | Failed]


@dataclass
class Model:
    """Runs flows; ``asked`` are the questions in order, ``rounds`` how many of them were asked together each time."""

    answer: Answer
    asked: list[Summarize] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    def run(self, flow: Flow[T]) -> T:
        """What the flow returns."""
        reply: Reply | None = None
        while True:
            try:
                effect = next(flow) if reply is None else flow.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = self._reply(effect)

    def decide(
        self,
        transcript: Transcript,
        *,
        budget: TokenBudget,
        settings: ContextSettings,
        known: ConversationState | None = None,
    ) -> Decision:
        """The decision on a request."""
        flow = plan(transcript, settings=settings, budget=budget, known=known or ConversationState(), counter=CHARS4)
        return self.run(flow)

    def _reply(self, effect: Effect) -> Reply:
        if isinstance(effect, Offload):
            return Done()
        if isinstance(effect, Save):
            return StateSaved(1)
        if isinstance(effect, Together):
            return Answers(self._answers(effect.effects))
        assert isinstance(effect, Summarize), f"asks for {effect}"
        return self._answers((effect,))[0]

    def _answers(self, effects: Sequence[Summarize]) -> tuple[Summary | Failed, ...]:
        self.rounds.append(len(effects))
        self.asked.extend(effects)
        return tuple(map(self.answer, effects))


def says(text: str) -> Model:
    """A model that always answers the same."""
    return Model(lambda _: Summary(text))


def texts(draft: Draft) -> dict[int, str]:
    """The content of replaced messages, by index."""
    return {p.index: p.text for p in draft.pieces if p.index is not None and p.text is not None}
