"""Recognise, plan, store: what becomes of one request's messages before it goes up.

No failure in here may cost the client its request. If planning fails, the oldest turns are dropped
until the rest fits; if that fails too, the request goes up as it came. If the store fails, the
edits hold in memory.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from cachetools import LRUCache

from policies.effects import BEFORE_MODEL, Effect, Failed, Reply, Returned, Save, StateSaved, step
from policies.ledger import ConversationState, Decision, PlannedMessage
from policies.limits import (
    CLOSE,
    BucketExceeded,
    BudgetUnreachable,
    Limits,
    TokenBudget,
    limits_for,
)
from policies.loads import Load
from policies.memory.checkpoint import Checkpoint
from policies.memory.state import notes_of
from policies.messages import Transcript, last_user
from policies.planner import is_needless, plan, standing, trim
from policies.pressure import own_trend, passed
from policies.settings import ContextSettings
from policies.strategies.recall import Elsewhere, Pages
from proxy.conversation.book import Conversations
from proxy.conversation.thread import Thread
from proxy.effects.perform import SharedReadings, unpaid
from proxy.errors import ContextLengthExceeded, InvalidRequest, ProxyError
from proxy.features.recall.archive import by_likeness, elsewhere
from proxy.models.limits import ModelLimits
from proxy.planning.loads import Scales
from proxy.planning.values import (
    CLAIMED,
    Plan,
    PlanRequest,
    Recognized,
    change_of,
    empty_change,
    evictions_of,
    readable,
    stamped,
    too_long,
)
from proxy.planning.workers import Workers
from proxy.store import Store, WriteBehindQueue
from proxy.store.records import Change, EvictionRow, StaleVersion, StoreError
from proxy.telemetry.logs import LOG_CONTEXT
from proxy.telemetry.trace import NULL_SPAN, Span
from proxy.wire.chat import breakpoint_for
from proxy.wire.codec import misshapen
from proxy.wire.render import render, rewritten, without_marks
from proxy.wire.transcripts import RequestTranscript, Transcripts

log = logging.getLogger("weir.planning")

T = TypeVar("T")

MAX_REPLANS = 4
MANY = 2_000
"""Messages above which a thread begins a plan: it looks at each."""
OTHERS_EVERY = 0.05
MAX_LIMITS = MAX_REFUSED = 1_000
HARDER = (0.8, 0.5)


class _Decided(NamedTuple):
    decision: Decision
    prepared: bool = False
    evictions: tuple[EvictionRow, ...] = ()
    degraded: tuple[str, ...] = ()


class Planner(msgspec.Struct, frozen=True, kw_only=True):
    """Plans the requests of one process; ``saved`` is called with why the state of a conversation
    was saved.
    """

    transcripts: Transcripts
    conversations: Conversations
    store: Store
    write_queue: WriteBehindQueue
    clock: Callable[[], float] = time.time
    readings: SharedReadings = msgspec.field(default_factory=SharedReadings)
    pages: Pages = msgspec.field(default_factory=Pages)
    saved: Callable[[str], None] = lambda _: None
    workers: Workers = msgspec.field(default_factory=Workers)
    scales: Scales = msgspec.field(default_factory=Scales)
    _limits: dict[tuple[int, int], Limits] = msgspec.field(default_factory=dict)
    _refused: LRUCache[tuple[object, ...], tuple[tuple[object, ...], dict[str, Any]]] = (
        msgspec.field(default_factory=lambda: LRUCache(MAX_REFUSED))
    )

    async def recognize(self, plan_request: PlanRequest) -> Recognized | None:
        degraded = ["store"] if self.write_queue.failing else []
        span = plan_request.span
        try:
            at = span.now() if span.recorded else 0
            read = await self._read(plan_request, may_sample=True)
            transcript = read.transcript
            if span.recorded:
                at = span.since(at, "read")
            try:
                match = await self.conversations.recognise(
                    plan_request.tenant,
                    transcript,
                    seed=read.seed,
                    name=plan_request.name,
                    resumes=plan_request.resumes,
                )
            except StoreError as error:
                log.error(
                    "the store cannot be read, the conversation starts anew in memory: %s", error
                )
                degraded.append("store")
                match = self.conversations.begin(
                    plan_request.tenant,
                    transcript,
                    name=plan_request.name,
                    resumes=plan_request.resumes,
                )
            thread = match.thread
            transcript = match.transcript
            if span.recorded:
                at = span.since(at, "recognise")
            if plan_request.resume is not None and plan_request.is_refused_state(
                thread, transcript
            ):
                degraded.append("resume")
            if (about := LOG_CONTEXT.get()) is not None:
                about.conversation = thread.branch.name
            limits = await plan_request.limits()
            view = await self.conversations.view(thread, limits.believed)
            policy_limits = self.limits_of(plan_request.settings, limits.budget)
            if span.recorded:
                at = span.since(at, "limits")
            loads = self._loads(plan_request, transcript, limits)
            if read.sampled and (
                loads
                or plan_request.needs_exactly(view, thread.known, transcript.tokens, policy_limits)
            ):
                read = await self._read(plan_request)
                transcript = match.like(read.transcript)
                span.since(at, "read")
            return Recognized(
                transcript=transcript,
                thread=thread,
                view=view,
                length=match.length,
                limits=limits,
                policy_limits=policy_limits,
                trend=own_trend(view.trend, transcript),
                marked=read.marked,
                has_media=read.has_media,
                degraded=tuple(degraded),
                new=read.new,
                sampled=read.sampled,
                loads=loads,
            )
        except ProxyError:
            raise
        except Exception:
            if (field := misshapen(plan_request.request)) is not None:
                raise InvalidRequest(f"{field} must be a string.", param=field) from None
            log.exception("planning failed; the request goes on without it")
            return None

    async def _read(
        self, plan_request: PlanRequest, *, may_sample: bool = False
    ) -> RequestTranscript:
        return await self.transcripts.read(
            plan_request.request,
            tenant=plan_request.tenant,
            owner=await self.conversations.owner(
                plan_request.tenant, plan_request.name, plan_request.resumes
            ),
            model=plan_request.request.model,
            counter=plan_request.counter,
            image_tokens=plan_request.settings.image_tokens,
            binds=plan_request.binds and not plan_request.drops_unbound,
            may_sample=may_sample,
        )

    async def replayed(self, plan_request: PlanRequest) -> tuple[bytes, int]:
        """The request with the edits that are known of its conversation and no others, and its
        calibrated tokens.

        Nothing is stored, and no model is called. Raises StoreError.
        """
        request = plan_request.request
        settings = plan_request.settings
        limits = await plan_request.limits()
        read = await self._read(plan_request)
        match = await self.conversations.find(
            plan_request.tenant, read.transcript, seed=read.seed, name=plan_request.name
        )
        known = ConversationState()
        transcript = read.transcript
        if match is not None and not settings.observes and settings.manages:
            view = await self.conversations.view(match.thread, limits.believed)
            known = match.thread.known_at(view, match.length)
            transcript = match.transcript
        draft = standing(transcript, known)
        same = not read.marked and not draft.changed
        roles = [message.role for message in transcript.messages]
        raws = (
            None
            if same
            else render(
                draft.pieces, request.messages or (), read.marked, roles=roles, codec=request.codec
            )
        )
        return rewritten(
            request, messages=raws, pruned=[d.name for d in draft.pruned]
        ), limits.budget.estimate(draft.tokens)

    async def first(self, plan_request: PlanRequest, recognized: Recognized | None) -> Plan:
        """The plan of a request as it came.

        Raises ContextLengthExceeded if nothing that may be forwarded fits.
        """
        if recognized is None:
            body = plan_request.request.body
            with contextlib.suppress(Exception):  # nobody may have been able to read the messages
                body = without_marks(plan_request.request)
            return Plan(
                body=body, degraded=("store", "plan") if self.write_queue.failing else ("plan",)
            )
        decided = None
        refused = None
        degraded = recognized.degraded
        try:
            decided = self._passed(plan_request, recognized) or await self._decide_or_refuse(
                plan_request, recognized
            )
        except ProxyError:
            raise
        except BudgetUnreachable as error:
            refusal = too_long(error)
            if plan_request.settings.observes:
                refused = refusal.code
            elif isinstance(error, BucketExceeded) or not recognized.limits.may_fit(
                recognized.transcript.tokens
            ):
                raise refusal from None
        except Exception:
            log.exception("planning failed; the request goes on without it")
            decided = _trimmed(plan_request, recognized)
            degraded = (*degraded, "plan")
        sent = (
            None
            if plan_request.settings.observes or decided is None
            else decided.decision.raw_after
        )
        is_close = sent is not None and sent > CLOSE * recognized.policy_limits.trigger
        if not await self.announce(
            recognized,
            plan_request.id,
            model=plan_request.request.model,
            is_close=is_close,
            span=plan_request.span,
        ):
            degraded = (*degraded, "store")
        plan = Plan(body=b"", recognized=recognized, refused=refused, degraded=degraded)
        return self._written(plan_request, recognized, plan, decided)

    async def harder(
        self, plan_request: PlanRequest, before: Plan, *, attempt: int, window: int | None = None
    ) -> Plan | None:
        """A smaller request, None where there is none; ``window`` is one that only this request has
        met.
        """
        if before.recognized is None:
            return None
        sent = before.sent or before.recognized.transcript.tokens
        try:
            recognized = await self._anew(plan_request, before.recognized, window=window)
            aim = min(
                recognized.limits.budget.soft_limit,
                int(sent * HARDER[min(attempt, len(HARDER)) - 1]),
            )
            try:
                decided = await self._decide(plan_request, recognized, ceiling=aim)
            except BudgetUnreachable:
                return await self._just_smaller(plan_request, recognized, before, sent)
        except ContextLengthExceeded:
            raise
        except Exception:
            log.exception("planning a smaller request failed")
            return None
        smaller = decided is not None and decided.decision.raw_after < sent
        return self._written(plan_request, recognized, before, decided) if smaller else None

    async def lighter(self, plan_request: PlanRequest, before: Plan) -> Plan | None:
        """The request within what its upstream is now known to take other than tokens; None where
        it is unchanged.
        """
        if before.recognized is None:
            return None
        try:
            recognized = await self._anew(plan_request, before.recognized)
            plan = self._written(
                plan_request, recognized, before, await self._decide(plan_request, recognized)
            )
        except Exception:
            log.exception("planning a lighter request failed")
            return None
        return None if plan.body == before.body else plan

    async def _anew(
        self, plan_request: PlanRequest, recognized: Recognized, *, window: int | None = None
    ) -> Recognized:
        """The same request within its limits as now known, counted exactly."""
        limits = await plan_request.limits()
        if window is not None:
            limits = limits.within(window)
        transcript = recognized.transcript
        if recognized.sampled:
            read = (await self._read(plan_request)).transcript
            transcript = replace(read, chain=transcript.chain, floating=transcript.floating)
        return msgspec.structs.replace(
            recognized,
            view=await self.conversations.view(recognized.thread, limits.believed),
            limits=limits,
            policy_limits=self.limits_of(plan_request.settings, limits.budget),
            transcript=transcript,
            sampled=False,
            loads=self._loads(plan_request, transcript, limits),
        )

    def _loads(
        self, plan_request: PlanRequest, transcript: Transcript, limits: ModelLimits
    ) -> tuple[Load, ...]:
        if plan_request.settings.observes or not limits.most:
            return ()
        loads = self.scales.loads(plan_request.request, transcript, limits.most)
        # of what the provider holds no entries and no bytes go up
        return tuple(
            load
            for load in loads
            if not plan_request.follows or load.kind not in ("entries", "bytes")
        )

    async def _just_smaller(
        self, plan_request: PlanRequest, recognized: Recognized, before: Plan, sent: int
    ) -> Plan | None:
        try:
            decided = await self._decide(plan_request, recognized, ceiling=sent - 1)
        except BudgetUnreachable as error:
            if sum(error.buckets.values()) > error.window - error.reserve:
                raise too_long(error) from None
            # by Weir's count it fits: the upstream counts what Weir cannot see, and says so itself
            return None
        return self._written(plan_request, recognized, before, decided)

    async def announce(
        self,
        recognized: Recognized,
        request: str,
        *,
        model: str,
        is_close: bool = False,
        span: Span = NULL_SPAN,
    ) -> bool:
        """Store a request before its client continues; whether it is stored.

        Where other processes use the store, or a name is new, it is stored now. One that
        ``is_close`` to its trigger must be recognised again after a crash: it is stored with the
        next batch of rows.
        """
        thread = recognized.thread
        book = self.conversations
        arrival = partial(
            book.arrival,
            thread,
            recognized.view,
            recognized.transcript,
            request=request,
            model=model,
        )
        is_new_name = not thread.stored and thread.branch.name != thread.branch.conversation
        if not book.shared and not is_new_name:
            if is_close and not self.write_queue.failing:
                self.write_queue.put(arrival())
            return True
        at = span.now()
        try:
            await book.announce(thread, arrival())
        except StoreError as error:
            log.error(
                "a request could not be stored before its answer, and another process may not know"
                " it: %s",
                error,
            )
            return False
        finally:
            span.since(at, "store")
        return True

    async def _elsewhere(
        self, plan_request: PlanRequest, recognized: Recognized
    ) -> tuple[Elsewhere, ...]:
        """Texts about the newest user message that the client may not send any more, or that are
        like it.

        A branch addresses all that it removed by the client's own messages, so only a named
        conversation has more.
        """
        thread = recognized.thread
        transcript = recognized.transcript
        current = last_user(transcript.messages)
        model = plan_request.settings.embeddings
        if not plan_request.settings.recall.is_automatic or current is None:
            return ()
        if current - transcript.head < recognized.length or (
            plan_request.name is None and model is None
        ):
            return ()
        conversation = thread.branch.conversation
        ask = None if plan_request.settings.observes else plan_request.ask
        try:
            return await elsewhere(
                self.store,
                plan_request.tenant,
                conversation,
                transcript.read(current).text,
                known={m.ref for m in transcript.messages},
                named=plan_request.name is not None,
                alike=by_likeness(self.store, plan_request.tenant, conversation, model, ask),
            )
        except StoreError as error:
            log.warning(
                "only what the client sends is recalled, the archive cannot be read: %s", error
            )
            return ()

    async def _take_notes(self, plan_request: PlanRequest, recognized: Recognized) -> None:
        thread = recognized.thread
        if thread.has_notes:
            return
        with contextlib.suppress(StoreError):
            notes = [
                row.note
                for row in await self.store.notes(thread.branch.tenant, thread.branch.conversation)
            ]
            # others may have begun alike: only its own messages are certain
            if notes and plan_request.name is None:
                read = partial(notes_of, recognized.transcript, known=ConversationState())
                own = {(note.category, note.text) for note in await asyncio.to_thread(read)}
                beside = ("api", "model") if thread.parent is None else ("api",)
                notes = [
                    note
                    for note in notes
                    if (note.category, note.text) in own or note.source in beside
                ]
            thread.known = replace(thread.known, notes=tuple(notes))
            thread.has_notes = True

    def _passed(self, plan_request: PlanRequest, recognized: Recognized) -> _Decided | None:
        view = recognized.view
        limits = recognized.policy_limits
        if (
            not view.ledger.is_empty
            or plan_request.edits is not None
            or plan_request.unbinds
            or recognized.loads
        ):
            return None
        known = recognized.known(observed=plan_request.settings.observes)
        at = self.clock()
        decision = passed(
            recognized.transcript, known=known, limits=limits, trend=recognized.trend, at=at
        )
        if decision is not None:
            view.follow(decision.trend)
        return None if decision is None else _Decided(decision)

    async def _decide_or_refuse(
        self, plan_request: PlanRequest, recognized: Recognized
    ) -> _Decided | None:
        thread = recognized.thread
        transcript = recognized.transcript
        budget = recognized.limits.budget
        trend = recognized.trend
        observed = plan_request.settings.observes
        needless = partial(is_needless, transcript, limits=recognized.policy_limits, trend=trend)
        lengths = (recognized.length, trend.length - transcript.head)
        told = await self.conversations.take_back(
            thread, recognized.view, lengths, needless, observed=observed
        )
        branch = thread.branch
        key = (
            branch.branch,
            branch.version,
            transcript.chain[-1:],
            transcript.tokens,
            transcript.tools,
        )
        case = (plan_request.settings, budget.window, budget.hard_limit, plan_request.edits)
        before, facts = self._refused.get(key, (None, {}))
        if before == case:
            raise BudgetUnreachable(**facts)
        try:
            decided = await self._decide(plan_request, recognized)
        except BudgetUnreachable as error:
            if not isinstance(error, BucketExceeded):
                self._refused[key] = (case, vars(error))
            raise
        events = (*told, *decided.decision.events) if decided else told
        return decided and decided._replace(decision=decided.decision._replace(events=events))

    async def _decide(
        self, plan_request: PlanRequest, recognized: Recognized, *, ceiling: int | None = None
    ) -> _Decided | None:
        thread = recognized.thread
        observed = plan_request.settings.observes
        budget = recognized.limits.budget
        span = plan_request.span
        beside = tuple[Elsewhere, ...]()
        view = recognized.view
        if not view.ledger.is_empty:
            at = span.now()
            await self._take_notes(plan_request, recognized)
            beside = await self._elsewhere(plan_request, recognized) if ceiling is None else ()
            span.since(at, "store")
        planning = partial(
            plan,
            readable(recognized),
            settings=plan_request.settings,
            budget=budget,
            counter=plan_request.counter,
            trend=recognized.trend,
            ceiling=ceiling,
            summarizer_input=plan_request.summarizer_input,
            readings=self.readings,
            limits=recognized.policy_limits,
            pages=self.pages,
            elsewhere=beside,
            edits=plan_request.edits,
            unbinds=plan_request.unbinds,
            loads=recognized.loads,
            announce=span.lap,
        )
        run = partial(
            self.workers.run, key=plan_request.tenant, span=span, since=plan_request.since
        )
        last: _Decided | None = None
        is_long = len(recognized.transcript.messages) > MANY
        for _ in range(MAX_REPLANS):
            known = recognized.known(observed=observed)
            work = partial(planning, known=known, at=self.clock())
            flow = work()
            if span.recorded:
                span.begin()
            if is_long:
                effect = await asyncio.to_thread(step, flow)
                if thread.branch.version != known.version:
                    continue
            else:
                effect = step(flow)
            if isinstance(effect, Returned):
                view.follow(effect.value.trend)
                return _Decided(effect.value)
            at = span.now()
            async with thread.lock, _Turn(self.store, thread) as turn:
                span.since(at, "wait", "lock")
                decided = view.decided(observed=observed).edits is not known.edits
                if decided or thread.branch.version != known.version:
                    # another request of this conversation has just decided, or its state was saved
                    continue
                ask = (
                    unpaid(plan_request.ask)
                    if observed
                    else partial(self._answer, plan_request, recognized, known, turn)
                )
                try:
                    decision = await run(
                        work, branch=thread.branch.branch, ask=ask, begun=(flow, effect)
                    )
                except _DoneMeanwhile:
                    continue
                last = _Decided(decision, prepared=known.prepared is not None)
                held = await self._hold(plan_request, recognized, known, last)
                if held is not None:
                    # not earlier: the same request, sent concurrently, needs the batch too
                    view.follow(decision.trend)
                    return held
        log.warning(
            "a conversation kept changing under a request; its last plan was used without being"
            " stored"
        )
        return last

    async def _hold(
        self,
        plan_request: PlanRequest,
        recognized: Recognized,
        known: ConversationState,
        decided: _Decided,
    ) -> _Decided | None:
        decision = decided.decision
        settings = plan_request.settings
        evicted = await asyncio.to_thread(
            evictions_of, recognized.transcript, decision, known, settings=settings
        )
        decided = decided._replace(evictions=evicted)
        if not decision.is_new:
            return decided
        if settings.observes:
            view = recognized.view
            view.shadow = view.decided(observed=True).with_batch(decision.edits, decision.cut)
            return decided
        return await self._commit(plan_request, recognized, known, decided)

    async def _answer(
        self,
        plan_request: PlanRequest,
        recognized: Recognized,
        known: ConversationState,
        turn: "_Turn",
        effect: Effect,
    ) -> Reply:
        if not isinstance(effect, Save):
            return await plan_request.ask(effect)
        thread = recognized.thread
        if effect.reason == BEFORE_MODEL:
            at = plan_request.span.now()
            if thread.preparing is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(plan_request.patience.left()):
                        await thread.preparing.wait()
            await turn.take(plan_request.patience.left())
            plan_request.span.since(at, "wait", "summary")
            if (
                thread.known.prepared is not known.prepared
                or recognized.view.ledger.edits is not known.edits
            ):
                raise _DoneMeanwhile
        if plan_request.settings.checkpoints.save_at is None:
            return Failed("off")
        at = plan_request.span.now()
        version = await self.save(recognized, effect, request=plan_request.id)
        plan_request.span.since(at, "store")
        return Failed("store") if version is None else StateSaved(version)

    async def save(self, recognized: Recognized, effect: Save, *, request: str = "") -> int | None:
        """The version under which a state was saved together with what is removed; None where that
        failed. Holds the lock.
        """
        at = self.clock()
        nothing = empty_change(recognized, at)
        change = msgspec.structs.replace(
            nothing,
            checkpoint=stamped(effect.checkpoint, at, version=nothing.expected + 1),
            reason=effect.reason,
            window_id=Checkpoint.from_json(effect.checkpoint).window_id,
            request=request,
        )
        if self.write_queue.failing:
            return None
        thread = recognized.thread

        async def commit() -> int:
            version = await self.store.commit(change)
            thread.save(change.checkpoint, version, length=change.length)
            return version

        try:
            version = await _to_its_end(commit())
        except StoreError as error:
            log.warning("the state of a conversation could not be saved: %s", error)
            return None
        self.saved(effect.reason)
        return version

    def limits_of(self, settings: ContextSettings, budget: TokenBudget) -> Limits:
        # the limits hold both: no other object can have their ids meanwhile
        key = (id(settings), id(budget))
        limits = self._limits.get(key)
        if limits is None:
            if len(self._limits) >= MAX_LIMITS:
                self._limits.clear()
            limits = self._limits[key] = limits_for(settings, budget)
        return limits

    async def _commit(
        self,
        plan_request: PlanRequest,
        recognized: Recognized,
        known: ConversationState,
        decided: _Decided,
    ) -> _Decided | None:
        at = plan_request.span.now()
        change = await asyncio.to_thread(
            change_of, plan_request, recognized, decided.decision, decided.evictions, self.clock()
        )
        change = msgspec.structs.replace(change, prepared=known.prepared)
        stored = await self._store(recognized.thread, change)
        plan_request.span.since(at, "store")
        if stored is None:
            return None
        if stored and change.checkpoint is not None:
            self.saved("batch")
        return decided if stored else decided._replace(degraded=("store",))

    async def _store(self, thread: Thread, change: Change) -> bool | None:
        """Apply a change: stored, or (False) in memory only; None if another process was first."""

        async def commit() -> None:
            thread.apply(change, await self.store.commit(change))

        if not self.write_queue.failing:
            try:
                await _to_its_end(commit())
            except StaleVersion as stale:
                if stale.current < change.expected:
                    await self.conversations.restate(thread)
                else:
                    await self.conversations.reload(thread)
                return None
            except StoreError as error:
                log.error("a batch of edits could not be stored, it holds in memory: %s", error)
            else:
                return True
        self.write_queue.keep(change)
        thread.apply(change, change.expected + 1)
        return False

    def _written(
        self,
        plan_request: PlanRequest,
        recognized: Recognized,
        before: Plan,
        decided: _Decided | None,
    ) -> Plan:
        decision = None if decided is None else decided.decision
        body, sent = self._body(plan_request, recognized, decision)
        is_changed = plan_request.unbinds or (decision is not None and decision.pieces is not None)
        drops = is_changed and not plan_request.settings.observes and plan_request.drops_unbound
        betas: tuple[bytes, ...] = ()
        if drops:
            body, betas = plan_request.request.codec.with_unbound_dropped(body)
        evictions, degraded = ((), ()) if decided is None else (decided.evictions, decided.degraded)
        return msgspec.structs.replace(
            before,
            body=body,
            betas=betas,
            drops_unbound=drops,
            sent=sent,
            recognized=recognized,
            decision=decision,
            prepared=decided.prepared if decided is not None else before.prepared,
            evictions=(*before.evictions, *evictions),
            degraded=(*before.degraded, *degraded),
        )

    @staticmethod
    def _body(
        plan_request: PlanRequest, recognized: Recognized, decision: Decision | None
    ) -> tuple[bytes, int]:
        request = plan_request.request
        transcript = recognized.transcript
        observes = plan_request.settings.observes
        sent = transcript.tokens
        by_weir = recognized.marked
        if request.messages is None:
            return request.body, sent
        pieces = decision.pieces if decision is not None and not observes else None
        where = "off" if observes else plan_request.settings.cache_breakpoint
        if pieces is None and not by_weir and where == "off":
            return request.body, sent
        marker = {} if where == "off" else breakpoint_for(where, request.body)
        marked = partial(rewritten, request, head=transcript.head, marker=marker)
        if pieces is not None and decision is not None:
            at = plan_request.span.now()
            same = not by_weir and _is_as_it_came(pieces, len(transcript.messages))
            role = plan_request.settings.summaries.role
            roles = [message.role for message in transcript.messages]
            messages = (
                None
                if same
                else render(
                    pieces, request.messages, by_weir, roles=roles, role=role, codec=request.codec
                )
            )
            body = marked(messages=messages, pruned=decision.pruned)
            plan_request.span.since(at, "render")
            return body, decision.raw_after
        if by_weir:
            bare = [
                request.codec.unmarked(raw) if i in by_weir else raw
                for i, raw in enumerate(request.messages)
            ]
            return marked(messages=bare, pruned=()), sent
        return (marked(messages=None, pruned=()) if marker else request.body), sent


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that continues after its client leaves: what is stored must be known here,
    too.

    A cancelled request waits for it, since it holds the conversation's lock.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


@dataclass(slots=True)
class _Turn:
    store: Store
    thread: Thread
    taken: bool = False

    async def take(self, seconds: float) -> None:
        """Become the only process that has a summary written, and take over what others have made
        by then.

        The wait for them is limited in seconds.
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
            with contextlib.suppress(StoreError):  # it expires by itself
                await self.store.release(self.thread.branch.tenant, self.thread.branch.branch)


class _DoneMeanwhile(Exception): ...


def _trimmed(plan_request: PlanRequest, recognized: Recognized) -> _Decided | None:
    if plan_request.settings.observes:
        return None
    try:
        settings = plan_request.settings
        budget = recognized.limits.budget
        return _Decided(
            trim(
                recognized.transcript,
                settings=settings,
                budget=budget,
                counter=plan_request.counter,
            )
        )
    except Exception:
        log.exception("trimming failed too; the request goes up as it came")
        return None


def _is_as_it_came(pieces: Sequence[PlannedMessage], length: int) -> bool:
    return len(pieces) == length and all(
        p.index == i and p.kind is None for i, p in enumerate(pieces)
    )
