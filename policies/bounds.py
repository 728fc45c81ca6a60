"""Where a batch of edits starts and ends for one request, in uncalibrated tokens.

``fixed`` is what no layer may shrink: head, tools, the task, pinned messages, the newest user message.
``room`` = trigger - fixed; a batch shrinks the request to ``low_water`` = fixed + L * room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.budget import Budget
from policies.messages import ToolCall, Transcript, count_occurrences
from policies.protection import Protection, protect
from policies.replay import Known, tokens_kept_verbatim
from policies.settings import ContextSettings, Shape
from policies.tokens import TokenCounter
from policies.turns import Unit, answered_calls, units


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Everything that a strategy needs beside the draft.

    ``ceiling`` is set when an upstream refused what the budget allows: the result must stay under it.
    ``summarizer_input`` is what the summariser can read at once, None for the request's own limit.
    """

    transcript: Transcript
    settings: ContextSettings
    budget: Budget
    shape: Shape
    known: Known
    counter: TokenCounter
    steps: tuple[Unit, ...]
    protection: Protection
    trigger: int
    fixed: int
    ceiling: int | None = None
    summarizer_input: int | None = None

    @property
    def room(self) -> int:
        """Tokens between what is fixed and the trigger, at least 0."""
        return max(0, self.trigger - self.fixed)

    @property
    def low_water(self) -> int:
        """Where a batch should end."""
        return self.fixed + int(self.shape.low_water * self.room)

    @property
    def hard_limit(self) -> int:
        """The most that may be forwarded."""
        limit = self.budget.hard_limit
        return limit if self.ceiling is None else min(limit, self.ceiling)

    def soft_fits(self, tokens: int) -> bool:
        """Whether ``tokens`` are under every limit, headroom and ceiling included."""
        return tokens <= min(self.budget.soft_limit, self.hard_limit)

    @property
    def ingest_cap(self) -> int:
        """The largest tool result, in tokens."""
        usable = self.budget.room_for(self.budget.usable)
        return max(64, min(int(self.settings.ingest_cap_share * usable), self.settings.ingest_cap))

    def sides(self, stays: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Positions of covered messages (``stays``: their indices) in front of a summary and behind it.

        The newest user message stands behind, with what follows it, so that nothing changes its order.
        """
        head, current = self.transcript.head, self.protection.current
        late = len(self.transcript.messages) if current is None or current == self.protection.task else current
        return tuple(i - head for i in stays if i < late), tuple(i - head for i in stays if i >= late)

    def calls(self) -> dict[int, ToolCall]:
        """For each tool result the call that it answers, by the result's index. Reads every step's call."""
        return answered_calls(self.transcript, self.steps)


def trigger_for(settings: ContextSettings, budget: Budget) -> int:
    """Where a batch starts: the shape's share of U, or of the provider's input limit where that is smaller."""
    usable = budget.usable if budget.max_input is None else min(budget.usable, budget.max_input)
    return min(budget.room_for(settings.shape_for(budget.window).trigger * usable), budget.soft_limit)


def bounds_for(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: Budget,
    known: Known,
    counter: TokenCounter,
    ceiling: int | None = None,
    summarizer_input: int | None = None,
) -> Bounds:
    """The bounds of one request."""
    transcript = replace(transcript, occurrences=count_occurrences(transcript.messages))
    messages = transcript.messages
    steps = units(messages, transcript.head)
    protection = protect(messages, steps)
    trigger = trigger_for(settings, budget)
    if ceiling is not None:
        trigger = min(trigger, ceiling)
    fixed = tokens_kept_verbatim(transcript, known, protection) + transcript.tools + transcript.priming
    return Bounds(
        transcript=transcript,
        settings=settings,
        budget=budget,
        shape=settings.shape_for(budget.window),
        known=known,
        counter=counter,
        steps=steps,
        protection=protection,
        trigger=trigger,
        fixed=fixed,
        ceiling=ceiling,
        summarizer_input=summarizer_input,
    )
