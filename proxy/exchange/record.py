"""What is known of an exchange while it runs, the headers that tell its client, and all that
happened once it ended.

Four sinks read the record (:mod:`proxy.exchange.tell`): the trace, the metrics, the log line and
the row. An observed request is forwarded as it came: headers, metrics and log say what went up,
trace and row what would have.
"""

import logging
import time
from collections.abc import Mapping, Sequence

import msgspec

from policies.health import Checkup
from policies.ledger import DROPPING, Decision, Event, TokenUsage
from policies.pressure import read_pressure
from policies.settings import CACHE_TTL, ContextSettings
from proxy.access.admission import Stay
from proxy.access.budgets import BudgetUse
from proxy.access.destination import CHAT, Caller, Route
from proxy.conversation.thread import name_from
from proxy.custom import Turn
from proxy.effects.perform import NOTHING_SPENT, Spent
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.exchange.send import Attempts
from proxy.monitor import CacheUse, follow
from proxy.planning.values import CUT, NO_PLAN, Paid, Plan, PlanRequest
from proxy.recall.rounds import Recalled
from proxy.runtime import Runtime
from proxy.stream import Listener, messages_in, texts_of
from proxy.tap import NO_USAGE, ReportedUsage, Tap, together
from proxy.telemetry.metrics import ModelCall
from proxy.telemetry.trace import ExchangeTrace, Span
from proxy.upstream.overflow import LENGTHS, Ending, ending_of
from proxy.wire.anthropic import DROPS_UNBOUND
from proxy.wire.codec import ClientRequest

CLIENT_CLOSED = 499
CLIENT_LEFT = "client_disconnect"
BROKE_OFF = "stream_broken"
CUT_OFF = frozenset({CLIENT_LEFT, BROKE_OFF})


class ExchangeProgress(msgspec.Struct):
    """One exchange as far as it has come; None is what it has not come to, or never did.

    ``seen`` is what the client was told, all rounds together; ``degraded`` what went wrong behind
    the plan; ``since`` is when a body that waited for room would have been there without
    (``time.monotonic``); ``compacted`` says that the answer is a compaction of Weir's, ``observed``
    that the policy only plans; ``ignored`` names headers that asked for what their key may not ask
    for. ``budget`` is the caller's that is used up the furthest, ``reserved`` says that something
    of it may be reserved; ``fallback`` that the policy's other model is asked.
    """

    id: str
    started: float
    trace: ExchangeTrace
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    route: Route = CHAT
    caller: Caller | None = None
    settings: ContextSettings | None = None
    observed: bool = False
    ignored: Sequence[str] = ()
    chat: ClientRequest | None = None
    asked: PlanRequest | None = None
    replies: Paid | None = None
    plan: Plan = NO_PLAN
    attempts: Attempts | None = None
    seen: Tap = msgspec.field(default_factory=Tap)
    status: int | None = None
    error: str | None = None
    ready: float | None = None
    since: float | None = None
    turn: Turn | None = None
    recalls: list[Recalled] = msgspec.field(default_factory=list)
    refusal: Mapping[str, object] = msgspec.field(default_factory=dict)
    listener: Listener | None = None
    degraded: list[str] = msgspec.field(default_factory=list)
    compacted: bool = False
    stay: Stay | None = None
    budget: BudgetUse | None = None
    reserved: bool = False
    fallback: bool = False

    @property
    def model(self) -> str:
        return "" if self.chat is None else self.chat.model

    @property
    def policy(self) -> ContextSettings:
        return self.settings or ContextSettings()

    @property
    def label(self) -> str:
        if self.error is not None:
            return self.error
        if self.status is None or self.status >= 400:
            return f"upstream_{self.status}"
        return "ok" if self.seen.error is None else "error_in_stream"

    @property
    def overhead_ms(self) -> float:
        return 1000 * ((self.ready or time.perf_counter()) - self.started)

    @property
    def retries(self) -> int:
        return 0 if self.attempts is None else self.attempts.retries

    def billed(self) -> tuple[ReportedUsage, ...]:
        """What each answer took, every round's, also where the last failed.

        Weir's own count of one without usage, or that broke off before it was said how long it is.
        """
        rounds = () if self.attempts is None else self.attempts.rounds
        took = (*rounds, self.reported()) if rounds or self.seen.usage is not None else ()
        if took and together(took).prompt is not None and (rounds or not self._is_cut_off):
            return took
        counted = self._counted()
        return took if counted is None else (counted,)

    @property
    def _is_cut_off(self) -> bool:
        return self.error in CUT_OFF and not self.seen.finished

    def _counted(self) -> ReportedUsage | None:
        """What a request took by Weir's own count; None where it was not recognised or nothing was
        said.
        """
        recognized = self.plan.recognized
        asked = self.asked
        seen = self.seen
        if recognized is None or asked is None or not seen.said or (self.status or 0) >= 400:
            return None
        written = messages_in(bytes(seen.sample), asked.request.codec)
        counts = [asked.counter.count(text) for message in written for text in texts_of(message)]
        told = seen.usage or NO_USAGE
        written_tokens = round(sum(counts) * seen.size / max(1, len(seen.sample)))
        return msgspec.structs.replace(
            told,
            prompt=recognized.limits.budget.estimate(self.plan.sent)
            if told.prompt is None
            else told.prompt,
            completion=max(written_tokens, told.completion or 0),
            estimated=True,
        )

    def reported(self) -> ReportedUsage:
        """What the upstream reported of the last round's answer alone."""
        usage = self.seen.usage or NO_USAGE
        rounds = () if self.attempts is None else self.attempts.rounds
        if usage.completion is None or not rounds:
            return usage
        before = together(rounds)
        thought = None if usage.reasoning is None else usage.reasoning - (before.reasoning or 0)
        return msgspec.structs.replace(
            usage, completion=usage.completion - (before.completion or 0), reasoning=thought
        )

    def ending(self) -> Ending | None:
        reasons = self.seen.finish_reasons
        recognized = self.plan.recognized
        if self.chat is None or LENGTHS.isdisjoint(reasons):
            return None
        usage = self.reported()
        budget = None if recognized is None else recognized.limits.budget
        prompt = usage.prompt
        if prompt is None and budget is not None:
            prompt = budget.estimate(self.plan.sent)
        return ending_of(
            reasons,
            prompt=prompt,
            completion=usage.completion,
            max_tokens=self.chat.max_tokens,
            window=None if budget is None else budget.window,
            clamped=self.attempts is not None and self.attempts.room is not None,
        )

    def refused(self, error: ProxyError) -> None:
        self.status = error.status
        self.error = error.code
        if isinstance(error, ContextLengthExceeded):
            self.refusal = error.weir or {}

    def gone(self) -> None:
        self.error = CLIENT_LEFT
        self.status = self.status or CLIENT_CLOSED

    def tokens(self) -> TokenUsage | None:
        decision = self.plan.decision
        recognized = self.plan.recognized
        if decision is not None and not self.observed:
            return decision.usage
        if recognized is None:
            return None
        limits = recognized.policy_limits
        budget = recognized.limits.budget
        tokens = recognized.transcript.tokens
        used = budget.estimate(tokens)
        refused = bool(self.refusal) or self.plan.refused is not None
        soft = limits.settings.rot_soft_tokens
        fits = budget.fits(tokens)
        pressure = read_pressure(
            used, limits.base, limits.zones, fits=fits, soft=soft, emergency=refused
        )
        return TokenUsage(used, used, budget.usable, pressure)

    def all_degraded(self) -> tuple[str, ...]:
        return (*self.plan.degraded, *self.degraded)

    def actions(self, *, planned: bool = False) -> str:
        """The value of ``x-weir-actions``: what was done to this request, ``none`` if nothing was.

        With ``planned`` it is what was decided, whether it was done or not.
        """
        decision = self.plan.decision
        parts = []
        if self.observed:
            parts.append("observe=1")
        if decision is not None and decision.applied and (planned or not self.observed):
            parts += [f"{name}={count}" for name, count in sorted(decision.applied.items())]
        done = {
            "clamp": self.attempts is not None and self.attempts.room is not None,
            "drop_block": DROPS_UNBOUND in self.plan.betas,
            "native_compaction": self.plan.native,
            "compaction": self.compacted,
            "restart": self.plan.restarted,
            "fallback": self.fallback,
        }
        parts += [f"{name}=1" for name, is_so in done.items() if is_so]
        if self.retries:
            parts.append(f"retry={self.retries}")
        if self.recalls:
            parts.append(f"recall={len(self.recalls)}")
        if planned and self.plan.refused is not None:
            parts.append(f"refused={self.plan.refused}")
        parts += [f"ignored={header}" for header in self.ignored]
        if degraded := self.all_degraded():
            parts += [f"degraded={reason}" for reason in dict.fromkeys(degraded)]
        return ",".join(parts) or "none"

    def own_headers(self) -> list[tuple[bytes, bytes]]:
        sent = self.tokens()
        recognized = self.plan.recognized
        headers = [
            (b"x-request-id", self.id.encode()),
            (b"x-weir-actions", self.actions().encode("latin-1", "replace")),
        ]
        if recognized is not None:
            headers.append(
                (b"x-weir-conversation", recognized.thread.branch.name.encode("latin-1", "replace"))
            )
        if sent is not None:
            about = b"~" if recognized is not None and recognized.sampled else b""
            told = (about, sent.before, about, sent.after, sent.limit)
            headers.append((b"x-weir-tokens", b"before=%b%d;after=%b%d;limit=%d" % told))
            headers.append((b"x-weir-pressure", str(sent.pressure).encode()))
        if self.budget is not None:
            headers.append((b"x-weir-budget", str(self.budget).encode()))
        if self.fallback:
            headers.append((b"x-weir-model", self.model.encode("latin-1", "replace")))
        headers.append((b"x-weir-overhead-ms", b"%.2f" % self.overhead_ms))
        return headers


def evicted_count(plan: Plan) -> int:
    return len([row for row in plan.evictions if row.kind != CUT or row.tool])


def evictions_alone(plan: Plan) -> int:
    """The same without what a summary took the place of: that is a compaction, and no sign of too
    small a window.
    """
    return len([row for row in plan.evictions if row.kind != CUT or row.layer in DROPPING])


log = logging.getLogger("weir.settlement")


class ExchangeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange that has ended, and what follows from that; complete when it exists.

    It ended ``at`` (s since the epoch) after ``duration`` s. ``policy`` is the exchange's, else the
    default one; ``carried_out`` is what was decided and done; ``tokens`` is what went up,
    ``actions`` what was done. ``reported`` is the usage of the last round, ``billed`` of all of
    them together.
    """

    exchange: ExchangeProgress
    at: float
    duration: float
    label: str
    policy: ContextSettings
    carried_out: Decision | None
    attempt: Span | None
    overflows: int
    spent: Spent
    tokens: TokenUsage | None
    actions: str
    ending: Ending | None
    reported: ReportedUsage
    billed: ReportedUsage | None
    call: ModelCall | None
    cache: CacheUse | None
    events: tuple[Event, ...]
    checkup: Checkup | None


def record_of(progress: ExchangeProgress, runtime: Runtime, *, ended: float) -> ExchangeRecord:
    at = runtime.planner.clock()
    tokens = progress.tokens()
    attempts = progress.attempts
    label = progress.label
    policy = progress.policy
    ending = progress.ending()
    reported = progress.reported()
    billed = progress.billed()
    return ExchangeRecord(
        exchange=progress,
        at=at,
        duration=ended - progress.started,
        label=label,
        policy=policy,
        carried_out=None if progress.observed else progress.plan.decision,
        attempt=None if attempts is None else attempts.span,
        overflows=0 if attempts is None else attempts.overflows,
        spent=NOTHING_SPENT if progress.replies is None else progress.replies.spent,
        tokens=tokens,
        actions=progress.actions(),
        ending=ending,
        reported=reported,
        billed=together(billed) if billed else None,
        call=None
        if attempts is None
        else attempts.end_call(reported, progress.seen, "" if label == "ok" else label),
        cache=_cache_use(progress, billed, ttl=CACHE_TTL, at=at),
        events=_events(runtime, progress, ending),
        checkup=_check_up(runtime, progress, tokens, at=at),
    )


def identify(progress: ExchangeProgress) -> None:
    """Have the trace show whose request it is, as far as that is known; nothing for a caller
    without a key.
    """
    caller = progress.caller
    if caller is None or not progress.trace.recorded:
        return
    recognized = progress.plan.recognized
    branch = None if recognized is None else recognized.thread.branch
    fields = progress.chat.fields if progress.chat is not None else {}
    progress.trace.identify(
        conversation=name_from(progress.headers, fields) if branch is None else branch.name,
        tenant=caller.tenant if branch is None else branch.tenant,
        policy=progress.policy.name,
        model=progress.model,
        derived=branch is not None and branch.name == branch.conversation,
        key=caller.name,
    )


def _check_up(
    runtime: Runtime, progress: ExchangeProgress, tokens: TokenUsage | None, *, at: float
) -> Checkup | None:
    plan = progress.plan
    settings = progress.settings
    recognized = progress.plan.recognized
    if tokens is None or settings is None or recognized is None or not settings.health.enabled:
        return None
    evicted = evictions_alone(plan) if plan.evictions else 0
    try:
        return runtime.health.check_up(
            plan,
            recognized,
            settings,
            used=tokens.after,
            pressure=tokens.pressure,
            evicted=evicted,
            at=at,
        )
    except Exception:  # what is watched must not suffer from being watched
        log.exception("the health of a conversation could not be told")
        return None


def _cache_use(
    progress: ExchangeProgress, took: Sequence[ReportedUsage], *, ttl: float, at: float
) -> CacheUse | None:
    plan = progress.plan
    attempts = progress.attempts
    if (
        plan.recognized is None
        or progress.chat is None
        or attempts is None
        or attempts.span is None
    ):
        return None
    return follow(
        plan,
        plan.recognized,
        progress.chat,
        took,
        ttl=ttl,
        at=at,
        carried_out=not progress.observed,
        ok=progress.status is not None and progress.status < 400,
    )


def _events(
    runtime: Runtime, progress: ExchangeProgress, ending: Ending | None
) -> tuple[Event, ...]:
    plan = progress.plan
    events = plan.decision.events if plan.decision is not None else ()
    if ending is Ending.RESERVE_EXHAUSTED:
        events = (_exhausted(progress, ending), *events)
    drift = (
        None
        if plan.recognized is None
        else runtime.windows.take_drift(plan.recognized.limits.counted)
    )
    if drift is None:
        return events
    facts = {
        "estimated": drift.predicted,
        "reported": drift.reported,
        "ratio": round(drift.ratio, 3),
    }
    log.warning(
        "%s counted %d tokens where %d were predicted",
        progress.model[:200],
        drift.reported,
        drift.predicted,
    )
    return (Event("estimate_drift", facts), *events)


def _exhausted(progress: ExchangeProgress, ending: Ending) -> Event:
    usage = progress.reported()
    recognized = progress.plan.recognized
    found = {
        "reason": progress.seen.finish_reasons[-1],
        "limit": recognized.limits.budget.window if recognized is not None else None,
        "tokens": usage.prompt,
        "count": usage.completion,
        "asked": progress.chat.max_tokens if progress.chat is not None else None,
    }
    return Event(ending, {name: value for name, value in found.items() if value is not None})
