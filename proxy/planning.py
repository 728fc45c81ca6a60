"""Identify, plan, store: what becomes of one request's messages before it goes up.

Nothing in here may cost the client its request. If planning fails, the oldest turns are dropped until the rest
fits; if that fails too, the request goes up as it came. If the store fails, the edits hold in memory.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from policies import (
    BucketExceeded,
    BudgetUnreachable,
    ContextSettings,
    Decision,
    Mode,
    Reply,
    Summarize,
    Transcript,
    plan,
    trim,
)
from proxy.conversation import Conversations, Recognised, Thread
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.perform import Returned, drive, step
from proxy.settle import Settler
from proxy.store import StaleVersion, Store, StoreError
from proxy.store.records import Branch, Change, Original
from proxy.tokenizer import TextCounter
from proxy.transcripts import Reading, Transcripts
from proxy.windows import Belief
from proxy.wire.chat import ChatRequest, render, unmarked, with_messages

log = logging.getLogger("weir.planning")

MOST_REPLANS = 4
HARDER = (0.8, 0.5)

Ask = Callable[[Summarize], Awaitable[Reply]]
Believe = Callable[[], Awaitable[Belief]]


@dataclass(slots=True)
class Planned:
    """What goes up, and everything that the rest of the exchange has to know of how it came about.

    ``sent`` are the uncalibrated tokens of what goes up.
    """

    body: bytes
    decision: Decision | None = None
    reading: Reading | None = None
    recognised: Recognised | None = None
    belief: Belief | None = None
    sent: int | None = None
    degraded: list[str] = field(default_factory=list)

    @property
    def has_media(self) -> bool:
        """Whether there are images or the like in it, whose price says nothing about that of text."""
        return self.reading is not None and any(m.media for m in self.reading.transcript.messages)

    @property
    def branch(self) -> Branch | None:
        """The conversation's branch, None where it was not recognised."""
        return None if self.recognised is None else self.recognised.thread.branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans the requests of one process."""

    transcripts: Transcripts
    conversations: Conversations
    store: Store | None
    settler: Settler
    clock: Callable[[], float] = time.time

    async def first(self, job: "Job") -> Planned:
        """The plan of a request as it came. Raises ContextLengthExceeded if nothing that may be forwarded fits."""
        planned = Planned(job.request.body)
        if self.store is None or self.settler.failing:
            planned.degraded.append("store")
        try:
            await self._identify(job, planned)
            await self._decide(job, planned)
        except ProxyError:
            raise
        except BudgetUnreachable as error:
            if isinstance(error, BucketExceeded) or job.is_sure(planned):
                raise _too_long(error) from None
            planned.decision = None
        except Exception:
            log.exception("planning failed; the request goes on without it")
            planned.degraded.append("plan")
            _trim(job, planned)
        self._write_body(job, planned)
        return planned

    async def harder(self, job: "Job", before: Planned, *, attempt: int) -> Planned | None:
        """A smaller plan after the upstream refused ``before``; None if it cannot be made smaller."""
        if before.reading is None or before.recognised is None or before.belief is None:
            return None
        sent = before.sent or before.reading.transcript.tokens
        planned = replace(before, degraded=list(before.degraded), decision=None)
        try:
            planned.belief = await job.believe()
            limit = planned.belief.budget.soft_limit
            await self._decide(job, planned, ceiling=min(limit, int(sent * HARDER[min(attempt, len(HARDER)) - 1])))
        except BudgetUnreachable:
            return await self._just_smaller(job, planned, sent)
        except Exception:
            log.exception("planning a smaller request failed")
            return None
        self._write_body(job, planned)
        decision = planned.decision
        return planned if decision is not None and decision.raw_after < sent else None

    async def _just_smaller(self, job: "Job", planned: Planned, sent: int) -> Planned | None:
        """Aim for what the budget itself asks, where the harder aim cannot be reached."""
        try:
            await self._decide(job, planned, ceiling=sent - 1)
        except BudgetUnreachable as error:
            if sum(error.buckets.values()) > error.window - error.reserve:
                raise _too_long(error) from None
            return None  # by Weir's count it fits: the upstream counts what Weir cannot see, and says so itself
        self._write_body(job, planned)
        return planned

    async def _identify(self, job: "Job", planned: Planned) -> None:
        planned.reading = await self.transcripts.read(
            job.request, tenant=job.tenant, model=job.request.model, counter=job.counter
        )
        transcript = planned.reading.transcript
        try:
            planned.recognised = await self.conversations.recognise(
                job.tenant, transcript.chain, transcript.messages, name=job.name
            )
        except StoreError as error:
            log.error("the store cannot be read, the conversation starts anew in memory: %s", error)
            planned.degraded.append("store")
            planned.recognised = self.conversations.begin(job.tenant, transcript.chain, name=job.name)
        planned.belief = await job.believe()

    async def _decide(self, job: "Job", planned: Planned, *, ceiling: int | None = None) -> None:
        assert planned.reading and planned.recognised and planned.belief  # noqa: S101, PT018 - set by _identify
        thread = planned.recognised.thread
        for _ in range(MOST_REPLANS):
            known = planned.recognised.known
            flow = plan(
                planned.reading.transcript,
                settings=job.settings,
                budget=planned.belief.budget,
                known=known,
                counter=job.counter,
                ceiling=ceiling,
                summarizer_input=job.summarizer_input,
            )
            asked = step(flow)
            if isinstance(asked, Returned):
                planned.decision = asked.value
                return
            async with thread.lock:
                if thread.known.edits is not known.edits:
                    continue  # another request of this conversation has just decided: replay that
                planned.decision = await drive(flow, asked, job.ask)
                if job.settings.mode is Mode.OBSERVE or not planned.decision.is_new:
                    return
                if await self._commit(job, planned, thread):
                    return
        log.warning("a conversation kept changing under a request; its last plan was used without being stored")

    async def _commit(self, job: "Job", planned: Planned, thread: Thread) -> bool:
        """Store a batch of edits before it is forwarded; False if another process was first."""
        decision, reading = planned.decision, planned.reading
        assert decision is not None  # noqa: S101 - the caller made it
        assert reading is not None  # noqa: S101
        change = _change(job, decision, reading, thread, self.clock())
        version = change.expected + 1
        if self.store is not None and self.settler.failing:
            planned.degraded.append("store")
            self.settler.keep(change)
            thread.apply(decision.edits, decision.cut, version)
            return True
        try:
            if self.store is not None:
                version = await self.store.commit(change)
        except StaleVersion:
            await self.conversations.reload(thread)
            return False
        except StoreError as error:
            log.error("a batch of edits could not be stored, it holds in memory: %s", error)
            planned.degraded.append("store")
            self.settler.keep(change)
        thread.apply(decision.edits, decision.cut, version)
        return True

    def _write_body(self, job: "Job", planned: Planned) -> None:
        """The bytes to forward: the client's own, unless there is something to change."""
        request, reading, decision = job.request, planned.reading, planned.decision
        planned.body = request.body
        planned.sent = reading.transcript.tokens if reading is not None else None
        if reading is None or request.messages is None:
            return
        pieces = decision.pieces if decision is not None and job.settings.mode is Mode.ENFORCE else None
        if pieces is not None and decision is not None:
            planned.sent = decision.raw_after
            planned.body = with_messages(request, render(pieces, request.messages, reading.marked))
        elif reading.marked:
            raws = request.messages
            planned.body = with_messages(
                request, [unmarked(raw) if i in reading.marked else raw for i, raw in enumerate(raws)]
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request that is to be planned: what was asked, by whom, and what it may cost."""

    request: ChatRequest
    tenant: str
    name: str | None
    settings: ContextSettings
    counter: TextCounter
    believe: Believe
    ask: Ask
    summarizer_input: int | None = None

    def is_sure(self, planned: Planned) -> bool:
        """Whether the window is known well enough to refuse a request without asking the upstream."""
        return planned.belief is not None and planned.belief.facts.source not in ("last_resort", "unknown")


def _too_long(error: BudgetUnreachable) -> ContextLengthExceeded:
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


def _trim(job: Job, planned: Planned) -> None:
    planned.decision = None
    if planned.reading is None or planned.belief is None or job.settings.mode is not Mode.ENFORCE:
        return
    try:
        planned.decision = trim(
            planned.reading.transcript, settings=job.settings, budget=planned.belief.budget, counter=job.counter
        )
    except Exception:
        log.exception("trimming failed too; the request goes up as it came")


def _change(job: Job, decision: Decision, reading: Reading, thread: Thread, now: float) -> Change:
    transcript, branch = reading.transcript, thread.branch
    return Change(
        tenant=branch.tenant,
        conversation=branch.conversation,
        name=branch.name,
        branch=branch.branch,
        expected=branch.version,
        at=now,
        edits=decision.edits,
        cut=decision.cut,
        originals=tuple(_original(job, transcript, i) for i in decision.removed),
        covered=tuple(transcript.messages[i].ref for i in decision.covered),
        checkpoint=decision.checkpoint,
        chain_end=transcript.chain[-1] if transcript.chain else b"",
        length=len(transcript.chain),
    )


def _original(job: Job, transcript: Transcript, index: int) -> Original:
    message = transcript.messages[index]
    raw = (job.request.messages or ())[index]
    body = transcript.read(index)
    said = [body.text, *(f"{call.name} {call.arguments}" for call in body.calls)]
    return Original(
        ref=message.ref,
        role=message.role,
        tokens=message.tokens,
        body=bytes(raw),
        text="\n".join(part for part in said if part),
    )
