"""Where a batch of edits starts and ends for one request, in uncalibrated tokens.

``fixed`` is what no layer may shrink: head, tools, the task, pinned messages, the newest user message.
``room`` = trigger - fixed; a batch shrinks the request to ``low_water`` = fixed + L * room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.draft import ConversationState, Draft, tokens_kept_verbatim
from policies.ledger import PlannedMessage
from policies.limits import TokenBudget, first_trigger, ingest_cap_for
from policies.messages import ToolCall, Transcript, count_occurrences
from policies.settings import ContextSettings, ExtractShape, Layer
from policies.text.segments import Readings
from policies.tokens import TokenCounter
from policies.turns import Protection, Unit, answered_calls, protect, units

NO_LAYER = Layer(strategy="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Everything that a strategy needs beside the draft.

    ``ceiling`` is set when an upstream refused what the budget allowed: the result must stay under it.
    ``summarizer_input`` is what the summariser can read at once, None for the request's own limit. ``layer`` is the
    one at work and ``aim`` the total tokens that it should end at. ``early`` is the share of its trigger from which
    on a layer is due on this request; ``free_only`` leaves out layers that may ask a model. ``readings`` keep what was
    read in single messages from one compaction to the next. ``standing`` is the array as known edits
    leave it, which the provider has cached if the conversation is ``warm``.
    """

    transcript: Transcript
    settings: ContextSettings
    budget: TokenBudget
    shape: ExtractShape
    known: ConversationState
    counter: TokenCounter
    steps: tuple[Unit, ...]
    protection: Protection
    trigger: int
    fixed: int
    ceiling: int | None = None
    summarizer_input: int | None = None
    layer: Layer = NO_LAYER
    aim: int | None = None
    early: float = 1.0
    free_only: bool = False
    readings: Readings | None = None
    warm: bool = False
    standing: tuple[PlannedMessage, ...] = ()

    @property
    def target(self) -> int:
        """The total tokens that the layer at work should end at: its own aim, else low water."""
        return self.low_water if self.aim is None else self.aim

    def in_scope(self, draft: Draft, piece: PlannedMessage) -> bool:
        """Whether a piece counts against the bucket that the layer at work is about."""
        scope = self.layer.scope
        if scope == "total":
            return True
        name = draft.bucket(piece)
        rule = self.settings.buckets.get(name)
        return (rule.charge_to if rule is not None and rule.charge_to else name) == scope

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
        return ingest_cap_for(self.settings, self.budget)

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


def bounds_for(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState,
    counter: TokenCounter,
    ceiling: int | None = None,
    summarizer_input: int | None = None,
    readings: Readings | None = None,
) -> Bounds:
    """The bounds of one request."""
    transcript = replace(transcript, occurrences=count_occurrences(transcript.messages))
    messages = transcript.messages
    steps = units(messages, transcript.head)
    protection = protect(messages, steps, known.pins)
    trigger = first_trigger(settings, budget)
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
        readings=readings,
    )
