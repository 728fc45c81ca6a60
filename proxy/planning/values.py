"""What a request is to be planned with, what was recognised in it, and the plan: each complete when it exists."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from policies import (
    BucketExceeded,
    BudgetUnreachable,
    ClientEdits,
    ContextSettings,
    ConversationState,
    Decision,
    Effect,
    Reply,
    Transcript,
)
from policies.pressure import Trend
from proxy.conversation.thread import Thread
from proxy.effects.allowance import Patience, Spent
from proxy.effects.perform import Ask
from proxy.errors import ContextLengthExceeded
from proxy.models.limits import ModelLimits
from proxy.store.records import Branch, EvictionRow
from proxy.telemetry import NULL_SPAN, AnySpan, Trace
from proxy.wire.codec import ClientRequest
from proxy.wire.counting import TextCounter
from proxy.wire.raw import Raw

ResolveLimits = Callable[[], Awaitable[ModelLimits]]


class Traced(Protocol):
    """Answers, and shows in a trace that it did."""

    trace: Trace

    async def __call__(self, effect: Effect) -> Reply:
        """The reply to one effect."""
        ...


class Paid(Traced, Protocol):
    """Answers, and says what the answers took and what those who answer can read."""

    spent: Spent

    def reads(self, purpose: str) -> int | None:
        """The tokens that the model for a purpose can read at once, None where its window is not known."""
        ...


@dataclass(slots=True, kw_only=True)
class PlanRequest:
    """One request that is to be planned: what was asked, by whom, and what it may cost.

    ``ask`` answers while the request waits, ``ask_later`` after it was answered, ``ask_about`` where a summary of it is
    evaluated; ``patience`` is how long it may wait for models; ``pruned`` are the tools that the conversation's
    requests go without, for questions in place; ``edits`` is what the client asks to have taken out of it, ``id`` the
    request's, ``span`` that of the plan that is being made. ``binds`` says that the model signs what it thinks for what
    stands before it, ``unbinds`` that no such thinking is valid any more.
    """

    request: ClientRequest
    tenant: str
    name: str | None
    settings: ContextSettings
    counter: TextCounter
    limits: ResolveLimits
    ask: Ask
    patience: Patience
    ask_later: Traced | None = None
    ask_about: Paid | None = None
    pruned: set[str] = field(default_factory=set)
    summarizer_input: int | None = None
    resume: str | None = None
    parent: str | None = None
    edits: ClientEdits | None = None
    binds: bool = False
    unbinds: bool = False
    id: str = ""
    span: AnySpan = NULL_SPAN

    @property
    def drops_unbound(self) -> bool:
        """Whether the provider itself has to leave out thinking that is not valid any more.

        Where thinking is ``enabled`` an open loop of tools has to begin with it, so that it cannot be taken out here.
        """
        thinking = self.request.value("thinking") if self.binds or self.unbinds else None
        return isinstance(thinking, dict) and thinking.get("type") == "enabled"

    @property
    def resumes(self) -> str | None:
        """The conversation whose checkpoint a new one goes on from: the one named, or its namesake where that is so."""
        if self.settings.resume == "off" or self.settings.observes:
            return None
        return self.resume or (self.name if self.settings.resume == "auto" else None)

    def is_refused_state(self, thread: Thread, transcript: Transcript) -> bool:
        """Whether a conversation that begins was to go on from another one, and does not."""
        begins = all(m.role != "assistant" for m in transcript.messages)
        return self.resume is not None and self.resumes is not None and thread.known.resumed is None and begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognized:
    """A request's messages, the conversation that they belong to, and what fits.

    ``thread`` is the conversation's branch while the process lives, ``length`` how many messages behind the head an
    earlier request has sent; ``marked`` are the messages that carry Weir's own mark, ``has_media`` says that there are
    images or the like, whose price says nothing about that of text. ``trend`` is the conversation's growth before this
    request; ``asked_again`` are the calls in it whose results are out of the window, as (branch, hash); ``listens``
    says whether the answer will tell the conversation from others; ``new`` are the raw messages at its end whose array
    was not seen before.
    """

    transcript: Transcript
    thread: Thread
    length: int
    limits: ModelLimits
    trend: Trend
    marked: frozenset[int] = frozenset()
    has_media: bool = False
    asked_again: tuple[tuple[str, bytes], ...] = ()
    listens: bool = False
    degraded: tuple[str, ...] = ()
    new: Sequence[Raw] = ()

    @property
    def branch(self) -> Branch:
        """The conversation's branch."""
        return self.thread.branch

    def known(self, *, observed: bool = False) -> ConversationState:
        """What to replay on this request; for an observed one what would be replayed."""
        return self.thread.known_at(self.length, observed=observed)

    @property
    def is_window_known(self) -> bool:
        """Whether the window is known well enough to refuse a request without asking the upstream."""
        return self.limits.facts.source not in ("last_resort", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes up, and how it came about.

    Attributes:
        recognized: whose request it is, None for one that is not managed, or could not be read.
        decision: what was decided, None where nothing was.
        sent: the uncalibrated tokens of what goes up, 0 where they were not counted.
        prepared: whether a summary lay ready for it.
        evictions: what was newly taken out, or for an observed request would have been.
        refused: why an observed request would have been refused.
        degraded: what was done with less than there should be, and why.
        betas: features of Anthropic's that the body needs beyond those that the client names.
        restarted: whether it begins anew what the provider holds.
    """

    body: bytes
    recognized: Recognized | None = None
    decision: Decision | None = None
    sent: int = 0
    prepared: bool = False
    evictions: tuple[EvictionRow, ...] = ()
    refused: str | None = None
    degraded: Sequence[str] = ()
    betas: tuple[bytes, ...] = ()
    restarted: bool = False

    @property
    def branch(self) -> Branch | None:
        """The conversation's branch, None where it was not recognised."""
        return None if self.recognized is None else self.recognized.branch

    @property
    def limits(self) -> ModelLimits | None:
        """What fits, None where nobody asked."""
        return None if self.recognized is None else self.recognized.limits

    @property
    def has_media(self) -> bool:
        """Whether there are images or the like in it, whose price says nothing about that of text."""
        return self.recognized is not None and self.recognized.has_media


def too_long(error: BudgetUnreachable) -> ContextLengthExceeded:
    """What the client is told of a request that no plan makes small enough."""
    if isinstance(error, BucketExceeded):
        return ContextLengthExceeded.in_bucket(
            error.bucket,
            used=error.used,
            cap=error.cap,
            window=error.window,
            reserve=error.reserve,
            buckets=error.buckets,
            protected=error.protected,
        )
    return ContextLengthExceeded.of(
        window=error.window, reserve=error.reserve, buckets=error.buckets, protected=error.protected
    )
