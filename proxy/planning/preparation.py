"""After an answer, off the way of any request: the summary that the next batch will need, states
worth saving, notes.

One task a conversation, and a few in all; of the requests answered meanwhile, the newest is
examined when the task is done. Nothing here changes what is sent. What was prepared is used if the
history that it covers is still there, and a shutdown leaves a whole row or none.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from policies.effects import Embed, Save, Vectors, step
from policies.ledger import ConversationState, Decision, Note, Prepared
from policies.memory.checkpoint import Checkpoint
from policies.memory.state import milestone_of, notes_of, state_of, wants_notes, write_notes
from policies.planner import is_soft, prepare
from proxy.conversation.thread import Thread
from proxy.effects.perform import Ask, SharedReadings, drive
from proxy.planning.values import CLAIMED, Plan, PlanRequest, Recognized, readable
from proxy.planning.workers import BACKGROUND, Workers
from proxy.store import Store, WriteBehindQueue
from proxy.store.records import NoteRow, StoreError
from proxy.telemetry import names
from proxy.telemetry.logs import LOG_CONTEXT, RequestContext
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace

log = logging.getLogger("weir.preparation")

AT_ONCE = 2
MAX_WAITING = 64
WARM_AT = 0.9
GROWN = 1.2
MAX_EMBEDDED = 256
NEARLY_FULL = frozenset({"orange", "red", "critical"})
"""Zones in which a conversation without a name is read for its state: before them a batch is far,
and reading costs.
"""


class Work(msgspec.Struct, frozen=True):
    plan_request: PlanRequest
    ask: Ask
    recognized: Recognized
    prepare: bool
    save: str | None
    read: bool
    warm: bool
    cuts: int
    embed: bool = False
    about: RequestContext | None = None
    trace: ExchangeTrace = NULL_TRACE

    @property
    def thread(self) -> Thread:
        return self.recognized.thread


class Background:
    def __init__(self, name: str, *, most: int, at_once: int) -> None:
        self._name = name
        self._most = most
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(at_once)
        self.is_closing = False

    def __contains__(self, key: object) -> bool:
        return key in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def has_room(self) -> bool:
        return not self.is_closing and len(self._tasks) < self._most

    def start(
        self,
        key: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        *,
        then: Callable[[str], None] | None = None,
    ) -> None:
        task = asyncio.create_task(self._do(work), name=self._name)
        self._tasks[key] = task

        def ended(_: "asyncio.Task[None]") -> None:
            del self._tasks[key]
            if then is not None:
                then(key)

        task.add_done_callback(ended)

    async def close(self) -> None:
        self.is_closing = True
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settled(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await asyncio.sleep(0)

    async def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with self._turns:
            await work()


@dataclass(slots=True, kw_only=True)
class Preparation:
    """What one process does after its answers.

    ``save`` stores a state, ``happened`` is called with what became of each prepared summary.
    """

    store: Store
    write_queue: WriteBehindQueue
    workers: Workers
    readings: SharedReadings
    save: Callable[..., Awaitable[int | None]]
    happened: Callable[[str], None]
    clock: Callable[[], float]
    _background: Background = field(
        default_factory=lambda: Background("weir-prepare", most=MAX_WAITING, at_once=AT_ONCE)
    )
    _waiting: dict[str, Work] = field(default_factory=dict)

    def after(
        self,
        plan_request: PlanRequest,
        plan: Plan,
        *,
        save: str | None = None,
        trace: ExchangeTrace = NULL_TRACE,
    ) -> None:
        """Examine a request that was answered; this is cheap where there is nothing to do.

        ``save`` is a reason to save the state whatever the policy says of its marks; what is done
        has a trace under ``trace``, the request's.
        """
        work = self._work(plan_request, plan, save, trace)
        if work is None or self._background.is_closing:
            return
        branch = work.thread.branch.branch
        if branch in self._background:
            if branch in self._waiting or len(self._waiting) < MAX_WAITING:
                self._waiting[branch] = work
            return
        if self._background.has_room:
            self._start(branch, work)

    def _work(
        self, plan_request: PlanRequest, plan: Plan, reason: str | None, trace: ExchangeTrace
    ) -> Work | None:
        decision = plan.decision
        recognized = plan.recognized
        settings = plan_request.settings
        if decision is None or recognized is None or settings.observes:
            return None
        thread = recognized.thread
        length = len(recognized.transcript.chain)
        budget = recognized.limits.budget
        known = recognized.known()
        is_new = decision.is_new
        compacts = recognized.policy_limits.compacts
        soft = (
            not is_new
            and settings.summarizer is not None
            and is_soft(
                decision.raw_after,
                length,
                settings=settings,
                budget=budget,
                known=known,
                buckets=decision.buckets,
                trend=decision.trend,
            )
        )
        at = settings.checkpoints.save_at
        level = decision.pressure.level
        above = at is not None and level > at
        save = reason or ("safety" if above and not thread.above else None)
        thread.above = above
        grown = length > thread.read * GROWN
        if save is None and _lacks_state(decision, recognized, is_new=is_new, grown=grown):
            save = "batch"
        if at is None:
            save = None
        named = thread.branch.name != thread.branch.conversation
        near_batch = decision.pressure.zone in NEARLY_FULL or known.triggered
        read = (named and length > 1) or (recognized.length > 0 and near_batch)
        warm = (
            not is_new
            and grown
            and compacts is not None
            and decision.raw_after > WARM_AT * compacts
        )
        embed = is_new and settings.embeddings is not None
        if not (soft or save or read or warm or embed):
            return None
        return Work(
            plan_request,
            plan_request.ask,
            recognized,
            soft,
            save,
            read,
            warm,
            len(known.cuts),
            embed,
            LOG_CONTEXT.get(),
            trace,
        )

    @property
    def waiting(self) -> int:
        return len(self._background) + len(self._waiting)

    async def close(self) -> None:
        self._waiting.clear()
        await self._background.close()

    async def settled(self) -> None:
        await self._background.settled()

    def _start(self, branch: str, work: Work) -> None:
        self._background.start(branch, partial(self._do, work), then=self._next)

    def _next(self, branch: str) -> None:
        waiting = self._waiting.pop(branch, None)
        if waiting is not None and not self._background.is_closing:
            self._start(branch, waiting)

    async def _do(self, work: Work) -> None:
        LOG_CONTEXT.set(work.about)
        trace = work.trace.follow(names.PREPARE_SPAN)
        failed = None
        if work.plan_request.ask_later is not None:
            work = msgspec.structs.replace(work, ask=work.plan_request.ask_later(trace=trace))
        try:
            failed = await self._do_all(work)
        finally:
            if work.prepare or work.save is not None or trace.has_children or failed is not None:
                trace.end(None, failed)

    async def _do_all(self, work: Work) -> str | None:
        failed: str | None = None
        for do in (self._prepare, self._read, self._save, self._warm, self._embed):
            try:
                await do(work)
            except StoreError as error:
                failed = "store"
                log.warning("what was prepared after an answer could not be stored: %s", error)
            except Exception as error:
                # the answer is already sent: no failure here may end the process's other work
                failed = type(error).__name__
                log.exception("preparing after an answer failed")
        return failed

    async def _read(self, work: Work) -> None:
        if not work.read:
            return
        thread = work.thread
        settings = work.plan_request.settings
        known = work.recognized.known()
        transcript = work.recognized.transcript
        found: tuple[Note, ...] = await self._run(work, notes_of, new=True, known=known)
        if wants_notes(transcript, settings=settings, known=known):
            reads = work.plan_request.summarizer_input or work.recognized.limits.budget.soft_limit
            flow = write_notes(
                transcript, known=known, counter=work.plan_request.counter, max_input=reads
            )
            found += await drive(flow, await asyncio.to_thread(step, flow), work.ask)
        await self._keep_notes(thread, found)
        if settings.checkpoints.save_at is not None and work.save is None:
            milestone = await self._run(work, milestone_of, new=True, known=known)
            if milestone is not None:
                await self._save_state(work, "milestone")

    async def _keep_notes(self, thread: Thread, notes: tuple[Note, ...]) -> None:
        if not notes:
            return
        at = self.clock()
        branch = thread.branch
        rows = [NoteRow.of(note, at=at) for note in notes]
        # notes belong to a conversation, which may not be stored yet
        await self.write_queue.flush()
        if await self.store.add_notes(branch.tenant, branch.conversation, rows):
            thread.known = replace(thread.known, notes=())
            thread.has_notes = False

    async def _save(self, work: Work) -> None:
        if work.save is not None:
            await self._save_state(work, work.save)

    async def _save_state(self, work: Work, reason: str) -> None:
        thread = work.thread
        transcript = work.recognized.transcript
        known = work.recognized.known()
        # the state of a longer run, restarted since, does not belong to this one
        here = known.at(len(transcript.chain))
        if here.checkpoint is not None and here.checkpoint_length >= len(transcript.chain):
            return
        thread.read = len(transcript.chain)
        state = await self._read_state(work, known)
        if not state.validate().valid:
            return
        async with thread.lock:
            if thread.known.checkpoint is not known.checkpoint:
                return
            save = Save(state.to_json(), reason)
            await self.save(work.recognized, save)

    async def _warm(self, work: Work) -> None:
        if not work.warm:
            return
        work.thread.read = len(work.recognized.transcript.chain)
        await self._read_state(work, work.recognized.known())

    async def _read_state(self, work: Work, known: ConversationState) -> Checkpoint:
        readings = self.readings
        counter = work.plan_request.counter
        state: Checkpoint = await self._run(
            work, state_of, known=known, counter=counter, readings=readings
        )
        return state

    async def _run(
        self, work: Work, does: Callable[..., Any], *, new: bool = False, **named: Any
    ) -> Any:
        bound = partial(does, readable(work.recognized), **named)
        if new and work.recognized.length:
            return await asyncio.to_thread(bound)
        branch = work.thread.branch.branch
        return await self.workers.run(bound, key=BACKGROUND, branch=branch, ask=work.ask)

    async def _embed(self, work: Work) -> None:
        model = work.plan_request.settings.embeddings
        branch = work.thread.branch
        if model is None or not work.embed:
            return
        texts = await self.store.lacking_vectors(
            branch.tenant, branch.conversation, model, limit=MAX_EMBEDDED
        )
        if not texts:
            return
        reply = await work.ask(Embed(tuple(texts.values()), model))
        if isinstance(reply, Vectors):
            await self.store.add_vectors(
                branch.tenant, model, dict(zip(texts, reply.rows, strict=True))
            )

    async def _prepare(self, work: Work) -> None:
        thread = work.thread
        if (
            not work.prepare
            or thread.lock.locked()
            or len(work.recognized.view.ledger.cuts) != work.cuts
        ):
            return  # the batch is being made, or was: it waits for no call that has not begun
        branch = thread.branch
        length = len(work.recognized.transcript.chain)
        if length < thread.failed * GROWN:
            return  # the model's note on nearly the same history was of no use
        if not self.store.shared:
            await self._prepare_now(work)
        elif await self.store.claim(
            branch.tenant, branch.branch, CLAIMED, longest_failed=length / GROWN
        ):
            try:
                await self._prepare_now(work)
            finally:
                await self.store.release(branch.tenant, branch.branch, failed=thread.failed)

    async def _prepare_now(self, work: Work) -> None:
        thread = work.thread
        plan_request = work.plan_request
        length = len(work.recognized.transcript.chain)
        thread.preparing = asyncio.Event()
        try:
            prepared: Prepared | None = await self._run(
                work,
                prepare,
                settings=plan_request.settings,
                budget=work.recognized.limits.budget,
                known=work.recognized.known(),
                counter=plan_request.counter,
                summarizer_input=plan_request.summarizer_input,
                readings=self.readings,
            )
            thread.failed = length if prepared is not None and not prepared.text else 0
            self._use(work.recognized, prepared)
        finally:
            thread.preparing.set()
            thread.preparing = None
        if prepared is not None and thread.known.prepared is prepared:
            await self.write_queue.flush()  # what waits for a branch needs the branch to be stored
            await self.store.prepare(thread.branch.tenant, thread.branch.branch, prepared)

    def _use(self, recognized: Recognized, prepared: Prepared | None) -> None:
        if prepared is None:
            return
        is_needed = bool(prepared.text) and all(
            cut.noted < prepared.covers for cut in recognized.view.ledger.cuts if cut.narrative
        )
        if is_needed:
            recognized.thread.known = replace(recognized.thread.known, prepared=prepared)
        self.happened("prepared" if is_needed else "wasted")


def _lacks_state(decision: Decision, recognized: Recognized, *, is_new: bool, grown: bool) -> bool:
    if is_new and decision.checkpoint is None:
        return bool(decision.removed)
    return (
        grown and recognized.thread.known.checkpoint is None and not recognized.view.ledger.is_empty
    )
