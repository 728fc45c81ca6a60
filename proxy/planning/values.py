"""What a request is to be planned with, what was recognised in it, the plan, and what it changes in the store."""

import datetime as dt
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from policies.decision import Decision
from policies.effects import Effect, Reply
from policies.ledger import ConversationState, EditKind
from policies.limits import BucketExceeded, BudgetUnreachable, Limits
from policies.memory.checkpoint import Checkpoint
from policies.messages import ToolDefinition, Transcript
from policies.pressure import Trend
from policies.settings import ClientEdits, ContextSettings
from proxy.conversation.thread import Thread
from proxy.effects.evictions import evicted_calls, figures_of
from proxy.effects.perform import Ask, Patience, Spent
from proxy.errors import ContextLengthExceeded
from proxy.models.limits import ModelLimits
from proxy.store.records import Change, EvictionRow, Original
from proxy.telemetry import NULL_SPAN, AnySpan, Trace
from proxy.wire.codec import ClientRequest, tool_definitions, tool_description
from proxy.wire.counting import MAX_ERROR, TextCounter
from proxy.wire.raw import Raw, read_value
from proxy.wire.transcripts import skimmed

ResolveLimits = Callable[[], Awaitable[ModelLimits]]

CLAIMED = 60.0
"""Seconds after which a process that began to have a summary written, and never ended, is waited for no longer."""


class Paid(Protocol):
    """Answers, and says what the answers took and what those who answer can read."""

    trace: Trace
    spent: Spent

    async def __call__(self, effect: Effect) -> Reply: ...

    def reads(self, purpose: str) -> int | None:
        """The tokens that the model for a purpose can read at once, None where its window is not known."""


class PlanRequest(msgspec.Struct, kw_only=True):
    """One request that is to be planned: what was asked, by whom, and what it may cost.

    ``resume`` is the conversation that the client wants to go on from, ``resumes`` the one that it may;
    ``ask`` answers while the request waits, ``ask_later`` makes who does so afterwards, ``ask_about`` does where a
    summary of it is evaluated; ``patience`` is how long it may wait for models; ``pruned`` are the tools that the
    conversation's requests go without, for questions in place; ``edits`` is what the client asks to have taken out;
    ``since`` is when one that waited for room could have begun (``time.monotonic``). ``binds`` says that the model
    signs what it thinks for what stands before it, ``unbinds`` that no such thinking is valid any more.
    """

    request: ClientRequest
    tenant: str
    name: str | None
    settings: ContextSettings
    counter: TextCounter
    limits: ResolveLimits
    ask: Ask
    patience: Patience
    ask_later: Callable[..., Ask] | None = None
    ask_about: Paid | None = None
    pruned: set[str] = msgspec.field(default_factory=set)
    summarizer_input: int | None = None
    resume: str | None = None
    resumes: str | None = None
    parent: str | None = None
    edits: ClientEdits | None = None
    binds: bool = False
    unbinds: bool = False
    id: str = ""
    since: float | None = None
    span: AnySpan = NULL_SPAN

    @property
    def drops_unbound(self) -> bool:
        """Whether the provider itself has to leave out thinking that is not valid any more.

        Where thinking is ``enabled`` an open loop of tools has to begin with it, so that it cannot be taken out here.
        """
        thinking = self.request.value("thinking") if self.binds or self.unbinds else None
        return isinstance(thinking, dict) and thinking.get("type") == "enabled"

    def is_refused_state(self, thread: Thread, transcript: Transcript) -> bool:
        if self.resumes is None or thread.known.resumed is not None:
            return False
        return all(m.role != "assistant" for m in transcript.messages)

    def needs_exactly(self, known: ConversationState, tokens: int, limits: Limits) -> bool:
        is_told = known.triggered or known.wanted is not None or known.resumed is not None or self.edits is not None
        counts_parts = self.settings.preempt or self.settings.ingest.from_start or limits.scoped or limits.refused
        return bool(is_told or counts_parts) or tokens * (1 + MAX_ERROR) > limits.trigger


class Recognized(msgspec.Struct, frozen=True, kw_only=True):
    """A request's messages, the conversation that they belong to, and what fits.

    ``limits`` are the model's, ``policy_limits`` what the policy makes of them. An earlier request has sent ``length``
    messages behind the head; ``marked`` ones carry Weir's own mark; ``trend`` is the growth before this request;
    ``asked_again`` are calls in it whose results are out of the window, as (branch, hash); ``listens`` says that the
    answer will tell the conversation from others; ``new`` are the raw messages at its end that were not seen before;
    ``sampled``: its tokens are right within ``MAX_ERROR``.
    """

    transcript: Transcript
    thread: Thread
    length: int
    limits: ModelLimits
    policy_limits: Limits
    trend: Trend
    marked: frozenset[int] = frozenset()
    has_media: bool = False
    asked_again: tuple[tuple[str, bytes], ...] = ()
    listens: bool = False
    degraded: tuple[str, ...] = ()
    new: Sequence[Raw] = ()
    sampled: bool = False


def readable(recognized: Recognized) -> Transcript:
    return skimmed(recognized.transcript, window=recognized.limits.budget.window)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What goes up, and how it came about.

    ``recognized`` is None for a request that is not managed, or could not be read; ``sent`` the uncalibrated tokens of
    what goes up, 0 where they were not counted; ``evictions`` what was newly taken out, or would have been; ``refused``
    why an observed request would have been refused; ``betas`` features of Anthropic's that the body needs beyond the
    client's; ``restarted`` that it begins anew what the provider holds; ``native`` that the provider is to compact.
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
    native: bool = False


NO_PLAN = Plan(body=b"")


def too_long(error: BudgetUnreachable) -> ContextLengthExceeded:
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


def empty_change(recognized: Recognized, now: float) -> Change:
    transcript, branch = recognized.transcript, recognized.thread.branch
    ends = recognized.thread.ends(transcript)
    return Change(
        tenant=branch.tenant,
        conversation=branch.conversation,
        name=branch.name,
        branch=branch.branch,
        expected=branch.version,
        at=now,
        chain_end=ends[0] if ends else b"",
        length=len(transcript.chain),
    )


def change_of(
    asked: PlanRequest, recognized: Recognized, decision: Decision, evictions: tuple[EvictionRow, ...], now: float
) -> Change:
    nothing, cut, thread = empty_change(recognized, now), decision.cut, recognized.thread
    rules, messages = asked.settings.checkpoints, recognized.transcript.messages
    state = decision.checkpoint if rules.enabled else None
    base = max(1, recognized.limits.budget.base(asked.settings))
    thread.evicted |= evicted_calls(evictions, thread.branch.branch)
    return replace(
        nothing,
        edits=decision.edits,
        cut=cut,
        originals=(*(_original(asked, recognized, i) for i in decision.removed), *_definitions(asked, decision)),
        covered=tuple(messages[i].ref for i in decision.covered),
        checkpoint=None if state is None else stamped(state, now, version=nothing.expected + 1),
        reason=cut.origin if cut is not None and decision.window_id is not None else "compaction",
        window_id=1 if decision.checkpoint is None else Checkpoint.from_json(decision.checkpoint).window_id,
        keep=rules.keep,
        resumed=thread.known.resumed if cut is not None and cut.origin == "resume" else None,
        evictions=evictions,
        request=asked.id,
        figures=figures_of(decision, asked.settings, base=base),
    )


def stamped(checkpoint: str, at: float, *, version: int) -> str:
    moment = dt.datetime.fromtimestamp(at, tz=dt.UTC).isoformat(timespec="seconds")
    return replace(Checkpoint.from_json(checkpoint), version=version, saved_at=moment).to_json()


def pruned_tools(asked: PlanRequest, thread: Thread) -> Iterator[str]:
    edits = thread.known.edits
    if asked.settings.summarizer == "same" and any(e.kind is EditKind.PRUNE_TOOLS for e in edits.values()):
        yield from (name for name in tool_definitions(asked.request) if (ToolDefinition(name, 0).digest, 0) in edits)


def _definitions(asked: PlanRequest, decision: Decision) -> Iterator[Original]:
    new = {edit.ref for edit in decision.edits if edit.kind is EditKind.PRUNE_TOOLS}
    if not new:
        return
    for name, raws in tool_definitions(asked.request).items():
        ref = ToolDefinition(name, 0).digest.hex()[:12]
        if ref in new:
            body = bytes(raws[0]) if len(raws) == 1 else b"[" + b",".join(raws) + b"]"
            said = " ".join((name, *(tool_description(read_value(raw)) for raw in raws)))
            yield Original(ref=ref, role="tool_definition", tokens=asked.counter.count(said), body=body, text=said)


def _original(asked: PlanRequest, recognized: Recognized, index: int) -> Original:
    message = recognized.transcript.messages[index]
    raw = (asked.request.messages or ())[index]
    body = recognized.transcript.read(index)
    said = [body.text, *(f"{call.name} {call.arguments}" for call in body.calls)]
    return Original(
        ref=message.ref,
        role=message.role,
        tokens=message.tokens,
        body=asked.request.codec.stored(raw),
        text="\n".join(part for part in said if part),
    )
