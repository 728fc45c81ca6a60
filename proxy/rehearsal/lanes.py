"""What becomes of each request of one conversation: unmanaged, in a sliding window, or under a policy.

A lane answers one request after another and keeps in memory what the store would keep between them. Unless it is given
somebody to ask no model is called: a policy that asks for one is told that it failed, and the asking is counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from policies import (
    BucketExceeded,
    Budget,
    BudgetUnreachable,
    ContextSettings,
    Decision,
    Done,
    Effect,
    Failed,
    Flow,
    InvalidConversation,
    Known,
    Mode,
    Offload,
    Piece,
    PolicyError,
    Reply,
    Summarize,
    Transcript,
    divide,
    plan,
)
from policies.effects import Together
from policies.tokens import Calibration
from proxy.effects.perform import Returned, step
from proxy.models import ModelFacts
from proxy.rehearsal.script import Script
from proxy.rehearsal.tally import WHOLE, Refusal
from proxy.tokenizer import TextCounter

UNMANAGED, SLIDING = "unmanaged", "sliding window"
UNKNOWN_WINDOW = 128_000
SMALLEST_SAMPLE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where the conversations are played: the model and what is known of it, and the answer's length.

    ``window`` stands above what the policy or the model says; ``max_tokens`` is what a request would ask for.
    """

    counter: TextCounter
    model: str = ""
    facts: ModelFacts = field(default_factory=ModelFacts)
    window: int | None = None
    max_tokens: int | None = None

    def window_of(self, settings: ContextSettings) -> int:
        """The window that a policy works in, tokens."""
        return self.window or settings.window or self.facts.window or UNKNOWN_WINDOW

    def budget(self, settings: ContextSettings, *, margin: float | None = None) -> Budget:
        """The budget of every request under a policy; ``margin`` is the estimator's error."""
        return divide(
            settings,
            window=self.window_of(settings),
            max_input=None if self.window else self.facts.max_input,
            max_output=self.facts.max_output,
            requested=self.max_tokens,
            margin=margin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """What a lane makes of one request.

    ``pieces`` is None for a request that was refused. ``tokens`` of it (or of what was refused) and ``limit`` are
    uncalibrated, as are ``buckets``. ``new`` says that edits were decided, ``applied`` which edits are in
    the array, ``layers`` what ran and was kept, ``removed`` the originals that went into the archive, ``asked`` how
    often a model was asked for, ``why`` what refused it.
    """

    pieces: tuple[Piece, ...] | None
    tokens: int
    limit: int
    action: str
    zone: str = ""
    new: bool = False
    applied: dict[str, int] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    removed: tuple[int, ...] = ()
    asked: int = 0
    why: Refusal | None = None


class Lane(Protocol):
    """One way of treating the requests of one conversation, in order."""

    def forward(self, script: Script, length: int) -> Forwarded:
        """What goes up for the request of the first ``length`` messages."""
        ...


Open = Callable[[], Lane]
Ask = Callable[[Effect], Reply]


@dataclass(frozen=True, slots=True)
class Unmanaged:
    """Every request as it came, whether it fits or not."""

    budget: Budget

    def forward(self, script: Script, length: int) -> Forwarded:
        """All of it."""
        tokens = script.transcript(length).tokens
        return Forwarded(pieces=script.raw_pieces(length), tokens=tokens, limit=self.budget.usable, action="pass")


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """System messages and as many of the newest messages as fit, chosen anew for every request."""

    budget: Budget

    def forward(self, script: Script, length: int) -> Forwarded:
        """The head and the newest messages; never a tool result without its call."""
        transcript, limit = script.transcript(length), self.budget.soft_limit
        pieces = script.raw_pieces(length)
        head, first = transcript.head, length
        used = sum(p.tokens for p in pieces[:head]) + transcript.tools + transcript.priming
        while first > head and (used + pieces[first - 1].tokens <= limit or first == length):
            first -= 1
            used += pieces[first].tokens
        while first < length - 1 and transcript.messages[first].is_result:
            used -= pieces[first].tokens
            first += 1
        dropped = first - head
        return Forwarded(
            pieces=(*pieces[:head], *pieces[first:]),
            tokens=used,
            limit=self.budget.usable,
            action="drop" if dropped else "pass",
            applied={"dropped": dropped} if dropped else {},
            new=dropped > 0,
        )


class Managed:
    """One policy and what it has decided so far; edits and cuts live in memory as the store would keep them."""

    def __init__(self, settings: ContextSettings, conditions: Conditions, *, ask: Ask | None = None) -> None:
        rules = settings.summaries  # what is prepared after answers is asked for at the batch: here no client waits
        self._settings = replace(settings, summaries=replace(rules, wait=rules.wait or rules.seconds))
        self._conditions = conditions
        self._ask = ask
        self._known = Known()
        self._calibration = Calibration()

    def forward(self, script: Script, length: int) -> Forwarded:
        """The planner's array. What it refuses goes nowhere; what it cannot plan goes up as it came."""
        transcript, counter = script.transcript(length), self._conditions.counter
        margin = self._calibration.margin(self._settings.margin, exact=counter.is_exact)
        budget = self._conditions.budget(self._settings, margin=margin)
        flow = plan(transcript, settings=self._settings, budget=budget, known=self._known, counter=counter)
        try:
            decision, asked = decide(flow, self._ask)
        except InvalidConversation:
            pieces = script.raw_pieces(length)
            return Forwarded(pieces=pieces, tokens=transcript.tokens, limit=budget.usable, action="failed")
        except PolicyError as error:
            why = _why(error, budget)
            return Forwarded(pieces=None, tokens=transcript.tokens, limit=budget.usable, action="refused", why=why)
        self._remember(decision, transcript)
        return Forwarded(
            pieces=decision.pieces if decision.pieces is not None else script.raw_pieces(length),
            tokens=decision.raw_after,
            limit=decision.limit,
            action=str(decision.action),
            zone=decision.pressure.zone,
            new=decision.is_new,
            applied=dict(decision.applied),
            layers=tuple(report.layer for report in decision.trail if report.kept),
            removed=decision.removed,
            asked=asked,
        )

    def _remember(self, decision: Decision, transcript: Transcript) -> None:
        """Keep what the store would, and what the upstream's count would have taught: here it is the estimate."""
        edits = {**self._known.edits, **{edit.key: edit for edit in decision.edits}}
        cuts = self._known.cuts if decision.cut is None else (*self._known.cuts, decision.cut)
        self._known = replace(
            self._known,
            edits=edits,
            cuts=cuts,
            length=len(transcript.chain),
            checkpoint=decision.checkpoint or self._known.checkpoint,
            version=self._known.version + decision.is_new,
        )
        if decision.raw_after >= SMALLEST_SAMPLE:
            self._calibration = self._calibration.observe(decision.raw_after, decision.raw_after)


def _why(error: PolicyError, budget: Budget) -> Refusal | None:
    """What refused a request."""
    if isinstance(error, BucketExceeded):
        return Refusal(error.bucket, error.used, error.cap)
    if isinstance(error, BudgetUnreachable):
        return Refusal(WHOLE, error.protected, budget.hard_limit)
    return None


def decide(flow: Flow[Decision], ask: Ask | None = None) -> tuple[Decision, int]:
    """The decision that a flow comes to, and how often it asked for a summary; without ``ask`` nobody answers."""
    asked = 0
    reply: Reply | None = None
    while True:
        now = step(flow, reply)
        if isinstance(now, Returned):
            return now.value, asked
        if isinstance(now, Offload):
            reply = Done()
        else:
            asked += len(now.effects) if isinstance(now, Together) else isinstance(now, Summarize)
            reply = ask(now) if ask is not None and isinstance(now, Summarize | Together) else Failed("rehearsal")


def opened(settings: ContextSettings, conditions: Conditions) -> Open:
    """What begins a conversation under a policy; a policy that is off manages nothing."""
    if settings.mode is Mode.OFF:
        return lambda: Unmanaged(conditions.budget(settings))
    return lambda: Managed(settings, conditions)
