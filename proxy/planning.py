"""Identify, plan, store: what becomes of one request's messages before it goes up.

Nothing in here may cost the client its request. If planning fails, the oldest turns are dropped until the rest
fits; if that fails too, the request goes up as it came. If the store fails, the edits hold in memory.
"""

import asyncio
import contextlib
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self

from policies import (
    BucketExceeded,
    BudgetUnreachable,
    ClientEdits,
    ContextSettings,
    ConversationState,
    Decision,
    EditKind,
    Effect,
    Elsewhere,
    Failed,
    Pages,
    PlannedMessage,
    Reply,
    Summarize,
    TokenBudget,
    Transcript,
    plan,
    trim,
)
from policies.effects import BEFORE_MODEL, Compare, Save, StateSaved, Together
from policies.limits import Limits, limits_for
from policies.memory import Checkpoint
from policies.messages import ToolDefinition
from policies.pressure import Trend
from policies.turns import last_user
from proxy.conversation import UNKNOWN, Conversations, Recognized, Thread
from proxy.effects.allowance import Patience, Spent
from proxy.effects.evictions import asked_again, evicted_calls, evictions_of, figures_of
from proxy.effects.perform import Ask, Returned, SharedReadings, drive, step
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.models.limits import ModelLimits
from proxy.recall.archive import by_likeness, elsewhere
from proxy.store import Store
from proxy.store.errors import StaleVersion, StoreError
from proxy.store.records import Branch, Change, EvictionRow, Original
from proxy.store.write_behind import WriteBehindQueue
from proxy.telemetry import LOG_CONTEXT, Trace
from proxy.wire.counting import TextCounter
from proxy.wire.messages import ChatRequest, breakpoint_for, rewritten, tool_definitions, tool_description, unmarked
from proxy.wire.raw import read_value
from proxy.wire.render import render
from proxy.wire.transcripts import RequestTranscript, Transcripts

log = logging.getLogger("weir.planning")

MAX_REPLANS = 4
CLAIMED = 60.0
"""Seconds after which a process that began to have a summary written, and never ended, is waited for no longer."""
OTHERS_EVERY = 0.05
MAX_LIMITS = 1_000
HARDER = (0.8, 0.5)

Believe = Callable[[], Awaitable[ModelLimits]]


@dataclass(slots=True)
class PlannedRequest:
    """What goes up, and everything that the rest of the exchange has to know of how it came about.

    ``sent`` are the uncalibrated tokens of what goes up; ``trend`` is the conversation's growth before this request.
    ``prepared`` says that a summary lay ready for it, ``evictions`` is what was newly taken out, or for an observed
    request would have been, ``asked_again`` the calls in it whose results are out of the window, as (branch, hash).
    ``refused`` says why an observed request would have been refused, ``listens`` whether the answer will tell the
    conversation from others.
    """

    body: bytes
    decision: Decision | None = None
    reading: RequestTranscript | None = None
    recognised: Recognized | None = None
    belief: ModelLimits | None = None
    sent: int | None = None
    degraded: list[str] = field(default_factory=list)
    trend: Trend = UNKNOWN
    prepared: bool = False
    evictions: tuple[EvictionRow, ...] = ()
    asked_again: tuple[tuple[str, bytes], ...] = ()
    refused: str | None = None
    listens: bool = False

    @property
    def has_media(self) -> bool:
        """Whether there are images or the like in it, whose price says nothing about that of text."""
        return self.reading is not None and self.reading.has_media

    @property
    def branch(self) -> Branch | None:
        """The conversation's branch, None where it was not recognised."""
        return None if self.recognised is None else self.recognised.thread.branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans the requests of one process; ``saved`` is told why the state of a conversation was saved."""

    transcripts: Transcripts
    conversations: Conversations
    store: Store
    settler: WriteBehindQueue
    clock: Callable[[], float] = time.time
    readings: SharedReadings = field(default_factory=SharedReadings)
    pages: Pages = field(default_factory=Pages)
    saved: Callable[[str], None] = lambda _: None
    _limits: dict[tuple[int, int], Limits] = field(default_factory=dict)

    async def first(self, job: "PlanRequest", planned: PlannedRequest) -> PlannedRequest:
        """The plan of a request as it came, which is ``planned`` filled in.

        Raises ContextLengthExceeded if nothing that may be forwarded fits; ``planned`` then says how full it was.
        """
        if self.settler.failing:
            planned.degraded.append("store")
        try:
            await self._identify(job, planned)
            await self._decide(job, planned)
        except ProxyError:
            raise
        except BudgetUnreachable as error:
            refusal = _too_long(error)
            if job.settings.observes:
                planned.refused = refusal.code
            elif isinstance(error, BucketExceeded) or job.is_sure(planned):
                raise refusal from None
            planned.decision = None
        except Exception:
            log.exception("planning failed; the request goes on without it")
            planned.degraded.append("plan")
            _trim(job, planned)
        await self.announce(planned, request=job.id, model=job.request.model)
        self._write_body(job, planned)
        return planned

    async def harder(self, job: "PlanRequest", before: PlannedRequest, *, attempt: int) -> PlannedRequest | None:
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

    async def _just_smaller(self, job: "PlanRequest", planned: PlannedRequest, sent: int) -> PlannedRequest | None:
        """Aim for what the budget itself asks, where the harder aim cannot be reached."""
        try:
            await self._decide(job, planned, ceiling=sent - 1)
        except BudgetUnreachable as error:
            if sum(error.buckets.values()) > error.window - error.reserve:
                raise _too_long(error) from None
            return None  # by Weir's count it fits: the upstream counts what Weir cannot see, and says so itself
        self._write_body(job, planned)
        return planned

    async def _identify(self, job: "PlanRequest", planned: PlannedRequest) -> None:
        planned.reading = await self.transcripts.read(
            job.request,
            tenant=job.tenant,
            model=job.request.model,
            counter=job.counter,
            image_tokens=job.settings.image_tokens,
        )
        transcript = planned.reading.transcript
        try:
            planned.recognised = await self.conversations.recognise(
                job.tenant, transcript.chain, transcript.messages, name=job.name, resumes=job.resumes
            )
        except StoreError as error:
            log.error("the store cannot be read, the conversation starts anew in memory: %s", error)
            planned.degraded.append("store")
            planned.recognised = self.conversations.begin(job.tenant, transcript.chain, name=job.name)
        thread = planned.recognised.thread
        if job.is_refused_state(thread, transcript):
            planned.degraded.append("resume")
        planned.listens = self.conversations.listens(thread, transcript)
        if (about := LOG_CONTEXT.get()) is not None:
            about.conversation = thread.branch.name
        planned.trend = thread.trend
        planned.asked_again = asked_again(thread.evicted, transcript, planned.recognised.length)
        for _, call in planned.asked_again:
            del thread.evicted[call]
        planned.belief = await job.believe()

    async def announce(
        self, planned: PlannedRequest, *, request: str, model: str, answers: Sequence[bytes] = ()
    ) -> None:
        """Have other processes know a request, or the answers to it, before its client goes on."""
        if planned.recognised is None or planned.reading is None:
            return
        transcript = planned.reading.transcript
        try:
            await self.conversations.announce(
                planned.recognised, transcript, request=request, model=model, answers=answers
            )
        except StoreError as error:
            log.error("another process may not know this conversation's next request: %s", error)
            planned.degraded.append("store")

    async def _elsewhere(self, job: "PlanRequest", planned: PlannedRequest) -> tuple[Elsewhere, ...]:
        """Texts about the newest user message that the client may not send any more, or that are like it.

        A branch addresses all that it removed by the client's own messages, so only a named conversation has more.
        """
        assert planned.reading and planned.recognised  # noqa: S101, PT018 - set by _identify
        thread, transcript = planned.recognised.thread, planned.reading.transcript
        current, model = last_user(transcript.messages), job.settings.recall.embeddings
        if not job.settings.recall.auto or not thread.known.triggered or current is None:
            return ()
        if current - transcript.head < planned.recognised.length or (job.name is None and model is None):
            return ()
        conversation, ask = thread.branch.conversation, None if job.settings.observes else job.ask
        try:
            return await elsewhere(
                self.store,
                job.tenant,
                conversation,
                transcript.read(current).text,
                known={m.ref for m in transcript.messages},
                alike=by_likeness(self.store, job.tenant, conversation, model, ask),
            )
        except StoreError as error:
            log.warning("only what the client sends is recalled, the archive cannot be read: %s", error)
            return ()

    async def _take_notes(self, thread: Thread) -> None:
        """Have the conversation's stored notes at hand, once a process."""
        if thread.has_notes:
            return
        with contextlib.suppress(StoreError):
            rows = await self.store.notes(thread.branch.tenant, thread.branch.conversation)
            thread.known = replace(thread.known, notes=tuple(row.note for row in rows))
            thread.has_notes = True

    async def _decide(self, job: "PlanRequest", planned: PlannedRequest, *, ceiling: int | None = None) -> None:
        assert planned.reading and planned.recognised and planned.belief  # noqa: S101, PT018 - set by _identify
        thread, observed = planned.recognised.thread, job.settings.observes
        limits = self.limits_of(job.settings, planned.belief.budget)
        if thread.known.triggered and not thread.has_notes:
            await self._take_notes(thread)
        beside = await self._elsewhere(job, planned) if ceiling is None else ()
        if job.settings.summarizer == "same" and any(
            e.kind is EditKind.PRUNE_TOOLS for e in thread.known.edits.values()
        ):
            job.pruned.update(_pruned_tools(job, thread))
        for _ in range(MAX_REPLANS):
            known = planned.recognised.known(observed=observed)
            flow = plan(
                planned.reading.transcript,
                settings=job.settings,
                budget=planned.belief.budget,
                known=known,
                counter=job.counter,
                trend=planned.trend,
                at=self.clock(),
                ceiling=ceiling,
                summarizer_input=job.summarizer_input,
                readings=self.readings,
                limits=limits,
                pages=self.pages,
                elsewhere=beside,
                edits=job.edits,
            )
            asked = step(flow)
            if isinstance(asked, Returned):
                planned.decision, thread.trend = asked.value, asked.value.trend
                return
            async with thread.lock, _Turn(self.store, thread) as turn:
                decided = thread.ledger(observed=observed).edits is not known.edits
                if decided or thread.branch.version != known.version:
                    continue  # another request of this conversation has just decided, or its state was saved
                ask = _unpaid(job.ask) if observed else partial(self._answer, job, planned, known, turn)
                try:
                    decision = await drive(flow, asked, ask)
                except _DoneMeanwhile:
                    continue
                planned.decision, thread.trend = decision, decision.trend
                planned.prepared = known.prepared is not None
                evictions = evictions_of(planned.reading.transcript, decision, known, settings=job.settings)
                if observed and decision.is_new:
                    thread.observe(decision.edits, decision.cut)
                elif decision.is_new and not await self._commit(job, planned, known, evictions):
                    continue
                planned.evictions += evictions
                return
        log.warning("a conversation kept changing under a request; its last plan was used without being stored")

    async def _answer(
        self, job: "PlanRequest", planned: PlannedRequest, known: ConversationState, turn: "_Turn", effect: Effect
    ) -> Reply:
        """The reply to one effect of a plan that is carried out and was begun with what was ``known``."""
        if not isinstance(effect, Save):
            return await job.ask(effect)
        assert planned.reading and planned.recognised  # noqa: S101, PT018 - set by _identify
        thread = planned.recognised.thread
        if effect.reason == BEFORE_MODEL:
            if thread.preparing is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(thread.preparing.wait(), job.patience.left())
            await turn.take(job.patience.left())
            if thread.known.prepared is not known.prepared or thread.known.edits is not known.edits:
                raise _DoneMeanwhile
        rules = job.settings.checkpoints
        if not rules.enabled:
            return Failed("off")
        version = await self.save(thread, planned.reading, effect, keep=rules.keep, request=job.id)
        return Failed("store") if version is None else StateSaved(version)

    async def save(
        self, thread: Thread, reading: RequestTranscript, effect: Save, *, keep: int, request: str = ""
    ) -> int | None:
        """The version under which a state was saved beside what is removed; None where that failed. Holds the lock."""
        transcript, at = reading.transcript, self.clock()
        nothing = _empty_change(thread, reading, at)
        change = replace(
            nothing,
            checkpoint=stamped(effect.checkpoint, at, version=nothing.expected + 1),
            reason=effect.reason,
            window_id=Checkpoint.from_json(effect.checkpoint).window_id,
            keep=keep,
            request=request,
        )
        if self.settler.failing:
            return None
        try:
            version = await self.store.commit(change)
        except StoreError as error:
            log.warning("the state of a conversation could not be saved: %s", error)
            return None
        thread.save(change.checkpoint, version, length=len(transcript.chain))
        self.saved(effect.reason)
        return version

    def limits_of(self, settings: ContextSettings, budget: TokenBudget) -> Limits:
        """The limits of a policy in a budget, worked out once for as long as both are the same objects."""
        key = (id(settings), id(budget))  # the limits hold both: no other object can have their ids meanwhile
        limits = self._limits.get(key)
        if limits is None:
            if len(self._limits) >= MAX_LIMITS:
                self._limits.clear()
            limits = self._limits[key] = limits_for(settings, budget)
        return limits

    async def _commit(
        self, job: "PlanRequest", planned: PlannedRequest, known: ConversationState, evictions: tuple[EvictionRow, ...]
    ) -> bool:
        """Store a batch of edits before it is forwarded, planned with what was ``known``; False if another process was
        first."""
        decision, reading, recognised = planned.decision, planned.reading, planned.recognised
        assert decision and reading and recognised  # noqa: S101, PT018 - the caller made them
        thread = recognised.thread
        figures = {} if planned.belief is None else _figures(decision, job, planned.belief.budget)
        change = replace(
            _change(job, decision, reading, thread, self.clock()),
            evictions=evictions,
            request=job.id,
            figures=figures,
            prepared=known.prepared,
        )
        thread.evicted |= evicted_calls(evictions, thread.branch.branch)
        version = change.expected + 1
        if self.settler.failing:
            planned.degraded.append("store")
            self.settler.keep(change)
            self._apply(thread, change)
            return True
        try:
            version = await self.store.commit(change)
        except StaleVersion as stale:
            if stale.current < change.expected:
                await self.conversations.restate(thread)
            else:
                await self.conversations.reload(thread)
            return False
        except StoreError as error:
            log.error("a batch of edits could not be stored, it holds in memory: %s", error)
            planned.degraded.append("store")
            self.settler.keep(change)
        else:
            if change.checkpoint is not None:
                self.saved("batch")
        self._apply(thread, replace(change, expected=version - 1))
        return True

    @staticmethod
    def _apply(thread: Thread, change: Change) -> None:
        """Remember what a change did."""
        thread.apply(
            change.edits,
            change.cut,
            change.expected + 1,
            checkpoint=change.checkpoint,
            length=change.length,
            prepared=change.prepared,
        )

    def _write_body(self, job: "PlanRequest", planned: PlannedRequest) -> None:
        """The bytes to forward: the client's own, unless there is something to change."""
        request, reading, decision = job.request, planned.reading, planned.decision
        planned.body = request.body
        planned.sent = reading.transcript.tokens if reading is not None else None
        if reading is None or request.messages is None:
            return
        pieces = decision.pieces if decision is not None and not job.settings.observes else None
        marker = {} if job.settings.observes else breakpoint_for(job.settings.cache_breakpoint, request.body)
        marked = partial(rewritten, request, head=reading.transcript.head, marker=marker)
        if pieces is not None and decision is not None:
            planned.sent = decision.raw_after
            same = not reading.marked and _is_as_it_came(pieces, len(reading.transcript.messages))
            messages = (
                None if same else render(pieces, request.messages, reading.marked, role=job.settings.summaries.role)
            )
            planned.body = marked(messages=messages, pruned=decision.pruned)
        elif reading.marked:
            raws = request.messages
            bare = [unmarked(raw) if i in reading.marked else raw for i, raw in enumerate(raws)]
            planned.body = marked(messages=bare, pruned=())
        elif marker:
            planned.body = marked(messages=None, pruned=())


@dataclass(slots=True)
class _Turn:
    """At its end other processes may have a summary of the thread's conversation written, if this one has taken it."""

    store: Store
    thread: Thread
    taken: bool = False

    async def take(self, seconds: float) -> None:
        """Be the only process that has one written, and take over what others have made by then.

        Nobody waits for them for more than so many seconds.
        """
        if not self.store.shared or self.taken:
            return
        branch = self.thread.branch
        with contextlib.suppress(StoreError):
            for _ in range(int(seconds / OTHERS_EVERY)):
                self.taken = await self.store.claim(branch.tenant, branch.branch, CLAIMED)
                if self.taken or not self.thread.stored:
                    break
                await asyncio.sleep(OTHERS_EVERY)
            stored = await self.store.branch(branch.tenant, branch.branch)
            if stored is not None:
                self.thread.catch_up(stored)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.taken:
            with contextlib.suppress(StoreError):  # it ends by itself
                await self.store.release(self.thread.branch.tenant, self.thread.branch.branch)


class _DoneMeanwhile(Exception):
    """The summary that was being prepared is there, or another process has made the batch."""


@dataclass(slots=True, kw_only=True)
class PlanRequest:
    """One request that is to be planned: what was asked, by whom, and what it may cost.

    ``ask`` answers while the request waits, ``ask_later`` after it was answered, ``ask_about`` where a summary of it is
    evaluated; ``patience`` is how long it may wait for models; ``pruned`` are the tools that the conversation's
    requests go without, for questions in place; ``edits`` is what the client asks to have taken out of it, ``id`` the
    request's.
    """

    request: ChatRequest
    tenant: str
    name: str | None
    settings: ContextSettings
    counter: TextCounter
    believe: Believe
    ask: Ask
    patience: Patience
    ask_later: "Traced | None" = None
    ask_about: "Paid | None" = None
    pruned: set[str] = field(default_factory=set)
    summarizer_input: int | None = None
    resume: str | None = None
    parent: str | None = None
    edits: ClientEdits | None = None
    id: str = ""

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

    def is_sure(self, planned: PlannedRequest) -> bool:
        """Whether the window is known well enough to refuse a request without asking the upstream."""
        return planned.belief is not None and planned.belief.facts.source not in ("last_resort", "unknown")


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


def _unpaid(ask: Ask) -> Ask:
    """The same without any model: for a flow that only says what would be done nobody pays, or waits."""

    async def answer(effect: Effect) -> Reply:
        if isinstance(effect, Summarize | Together | Save):
            return Failed("observed")
        return await ask(replace(effect, model=None) if isinstance(effect, Compare) else effect)

    return answer


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


def _trim(job: PlanRequest, planned: PlannedRequest) -> None:
    planned.decision = None
    if planned.reading is None or planned.belief is None or job.settings.observes:
        return
    try:
        planned.decision = trim(
            planned.reading.transcript, settings=job.settings, budget=planned.belief.budget, counter=job.counter
        )
    except Exception:
        log.exception("trimming failed too; the request goes up as it came")


def _is_as_it_came(pieces: Sequence[PlannedMessage], length: int) -> bool:
    """Whether an array is the client's own, so that only its tools are to be changed."""
    return len(pieces) == length and all(p.index == i and p.kind is None for i, p in enumerate(pieces))


def _figures(decision: Decision, job: PlanRequest, budget: TokenBudget) -> dict[str, object]:
    return figures_of(decision, job.settings, base=max(1, budget.base(job.settings)))


def _empty_change(thread: Thread, reading: RequestTranscript, now: float) -> Change:
    """A change of the thread's branch that holds nothing yet."""
    transcript, branch = reading.transcript, thread.branch
    ends = thread.ends(transcript)
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


def _change(job: PlanRequest, decision: Decision, reading: RequestTranscript, thread: Thread, now: float) -> Change:
    transcript, cut = reading.transcript, decision.cut
    nothing = _empty_change(thread, reading, now)
    state = decision.checkpoint if job.settings.checkpoints.enabled else None
    return replace(
        nothing,
        edits=decision.edits,
        cut=cut,
        originals=(*(_original(job, transcript, i) for i in decision.removed), *_definitions(job, decision)),
        covered=tuple(transcript.messages[i].ref for i in decision.covered),
        checkpoint=None if state is None else stamped(state, now, version=nothing.expected + 1),
        reason=cut.origin if cut is not None and decision.window_id is not None else "compaction",
        window_id=_window_of(decision),
        keep=job.settings.checkpoints.keep,
        resumed=thread.known.resumed if cut is not None and cut.origin == "resume" else None,
    )


def _window_of(decision: Decision) -> int:
    """The number of the window that a decision's checkpoint is of."""
    return 1 if decision.checkpoint is None else Checkpoint.from_json(decision.checkpoint).window_id


def stamped(checkpoint: str, at: float, *, version: int) -> str:
    """A checkpoint with the moment of its saving, UTC to the second, and the version that it is saved as."""
    moment = dt.datetime.fromtimestamp(at, tz=dt.UTC).isoformat(timespec="seconds")
    return replace(Checkpoint.from_json(checkpoint), version=version, saved_at=moment).to_json()


def _pruned_tools(job: PlanRequest, thread: Thread) -> Iterator[str]:
    """The names of the tools that the conversation's requests are sent without."""
    edits = thread.known.edits
    return (name for name in tool_definitions(job.request) if (ToolDefinition(name, 0).digest, 0) in edits)


def _definitions(job: PlanRequest, decision: Decision) -> Iterator[Original]:
    """The definitions of tools that this decision leaves out, as the client sent them."""
    new = {edit.ref for edit in decision.edits if edit.kind is EditKind.PRUNE_TOOLS}
    if not new:
        return
    for name, raws in tool_definitions(job.request).items():
        ref = ToolDefinition(name, 0).digest.hex()[:12]
        if ref in new:
            body = bytes(raws[0]) if len(raws) == 1 else b"[" + b",".join(raws) + b"]"
            said = " ".join((name, *(tool_description(read_value(raw)) for raw in raws)))
            yield Original(ref=ref, role="tool_definition", tokens=job.counter.count(said), body=body, text=said)


def _original(job: PlanRequest, transcript: Transcript, index: int) -> Original:
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
