"""What is known of an exchange while it runs, the headers that tell the client, and what is remembered after it."""

import time
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from policies import ContextSettings, Decision, Mode, Pressure
from proxy.caller import Caller
from proxy.config import UpstreamSettings
from proxy.errors import ProxyError
from proxy.planning import Planned
from proxy.runtime import Runtime
from proxy.store.records import ExchangeRow
from proxy.tap import Tap
from proxy.telemetry import Attempt, ExchangeLine, Trace, log_exchange
from proxy.upstream.overflow import Verdict
from proxy.wire.chat import ChatRequest

CLIENT_CLOSED = 499


@dataclass(slots=True)
class Outcome:
    """One exchange as it unfolds; the routes and the line write it, :func:`settle` reads it."""

    id: str
    started: float
    trace: Trace
    query: bytes = b""
    request: ChatRequest | None = None
    caller: Caller | None = None
    settings: ContextSettings | None = None
    upstream: UpstreamSettings | None = None
    planned: Planned | None = None
    attempt: Attempt | None = None
    seen: Tap | None = None
    status: int | None = None
    error: str | None = None
    ready: float | None = None
    retries: int = 0
    overflows: int = 0
    clamped: bool = False

    @property
    def decision(self) -> Decision | None:
        """The plan that was carried out, if there is one."""
        return None if self.planned is None else self.planned.decision

    @property
    def label(self) -> str:
        """The outcome's label for metrics and rows."""
        if self.error is not None:
            return self.error
        if self.status is None or self.status >= 400:
            return f"upstream_{self.status}"
        if self.seen is not None and self.seen.error is not None:
            return "error_in_stream"
        return "ok"

    @property
    def overhead_ms(self) -> float:
        """Milliseconds from the request's arrival to its first departure upstream."""
        return 1000 * ((self.ready or time.perf_counter()) - self.started)

    def address(self) -> tuple[str, int | None]:
        """Host and port of the upstream, for the trace."""
        return _host_and_port((self.upstream.base_url or self.upstream.api_base or "") if self.upstream else "")

    def settings_or_default(self) -> ContextSettings:
        """The policy's settings, the default ones before a policy was found."""
        return self.settings or ContextSettings()

    def overflowed(self, verdict: Verdict) -> None:
        """The upstream said that the request does not fit."""
        del verdict
        self.overflows += 1

    def refused(self, error: ProxyError) -> None:
        """Weir answered instead of an upstream."""
        self.status, self.error = error.status, error.code

    def gone(self) -> None:
        """The client left."""
        self.error = "client_disconnect"
        self.status = self.status or CLIENT_CLOSED

    def cut(self, reason: str) -> None:
        """The upstream's answer broke off."""
        del reason
        self.error = "stream_broken"

    def actions(self) -> str:
        """The value of ``x-weir-actions``: what was done to this request, ``none`` if nothing was."""
        decision, parts = self.decision, []
        if self.settings is not None and self.settings.mode is Mode.OBSERVE:
            parts.append("observe=1")
        if decision is not None:
            parts += [f"{name}={count}" for name, count in sorted(decision.applied.items())]
        if self.clamped:
            parts.append("clamp=1")
        if self.retries:
            parts.append(f"retry={self.retries}")
        if self.planned is not None:
            parts += [f"degraded={reason}" for reason in dict.fromkeys(self.planned.degraded)]
        return ",".join(parts) or "none"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Weir's response headers, as far as the exchange has come."""
        decision, planned = self.decision, self.planned
        pairs = [(b"x-request-id", self.id), (b"x-weir-actions", self.actions())]
        if planned is not None and planned.branch is not None:
            pairs.append((b"x-weir-conversation", planned.branch.name))
        if decision is not None:
            pairs.append((b"x-weir-tokens", f"before={decision.before};after={decision.after};limit={decision.limit}"))
            pairs.append((b"x-weir-pressure", str(decision.pressure)))
        elif planned is not None and planned.reading is not None and planned.belief is not None:
            tokens = planned.belief.budget.estimate(planned.reading.transcript.tokens)
            limit = planned.belief.budget.usable
            pairs.append((b"x-weir-tokens", f"before={tokens};after={tokens};limit={limit}"))
        pairs.append((b"x-weir-overhead-ms", f"{self.overhead_ms:.2f}"))
        return [(name, value.encode("latin-1", "replace")) for name, value in pairs]


@lru_cache(maxsize=256)
def _host_and_port(base: str) -> tuple[str, int | None]:
    parts = urlsplit(base)
    return parts.hostname or "", parts.port


def settle(runtime: Runtime, outcome: Outcome) -> None:
    """Remember an exchange: trace, metrics, log line, and a row to be written later."""
    duration = time.perf_counter() - outcome.started
    _end_trace(outcome)
    _count(runtime, outcome, duration)
    decision, planned, caller = outcome.decision, outcome.planned, outcome.caller
    branch = planned.branch if planned is not None else None
    actions = outcome.actions()
    log_exchange(runtime.logger, _line(outcome, duration, actions))
    if branch is None or decision is None or caller is None or planned is None or planned.reading is None:
        return
    chain, seen = planned.reading.transcript.chain, outcome.seen
    usage = seen.usage if seen is not None else None
    thread = planned.recognised.thread if planned.recognised is not None else None
    runtime.settler.put(
        ExchangeRow(
            id=outcome.id,
            tenant=branch.tenant,
            conversation=branch.conversation,
            name=branch.name,
            branch=branch.branch,
            parent=thread.parent if thread is not None else None,
            at=time.time(),
            model=outcome.request.model if outcome.request is not None else "",
            policy=outcome.settings_or_default().name,
            chain_end=chain[-1] if chain else b"",
            length=len(chain),
            status=outcome.status or 0,
            outcome=outcome.label,
            tokens_before=decision.before,
            tokens_after=decision.after,
            limit=decision.limit,
            pressure=decision.pressure.level,
            zone=decision.pressure.zone,
            actions=actions,
            usage_prompt=usage.prompt if usage else None,
            usage_completion=usage.completion if usage else None,
            usage_cached=usage.cached if usage else None,
            overhead_ms=outcome.overhead_ms,
            duration_ms=1000 * duration,
            attempts=1 + outcome.retries,
        )
    )


def _end_trace(outcome: Outcome) -> None:
    trace, planned, caller = outcome.trace, outcome.planned, outcome.caller
    if planned is not None and planned.branch is not None and caller is not None:
        branch = planned.branch
        trace.identify(
            conversation=branch.name,
            tenant=branch.tenant,
            policy=outcome.settings_or_default().name,
            model=outcome.request.model if outcome.request is not None else "",
            derived=branch.name == branch.conversation,
        )
        for reason in planned.degraded:
            trace.event("degraded", reason=reason)
    seen = outcome.seen
    if outcome.attempt is not None and outcome.status is not None:
        usage = seen.usage if seen is not None else None
        outcome.attempt.answered(
            outcome.status,
            response_model=seen.model if seen is not None else None,
            response_id=seen.id if seen is not None else None,
            finish_reasons=seen.finish_reasons if seen is not None else (),
            input_tokens=usage.prompt if usage else None,
            output_tokens=usage.completion if usage else None,
            cache_read=usage.cached if usage else None,
            reasoning=usage.reasoning if usage else None,
            error_type=outcome.error,
        )
    trace.end(outcome.status, outcome.error)


def _count(runtime: Runtime, outcome: Outcome, duration: float) -> None:
    metrics, decision = runtime.telemetry.metrics, outcome.decision
    metrics.request(outcome=outcome.label, policy=outcome.settings_or_default().name)
    metrics.overhead(outcome.overhead_ms / 1000)
    for _ in range(outcome.overflows):
        metrics.overflow()
    for _ in range(outcome.retries):
        metrics.retry("overflow")
    if outcome.planned is not None:
        for reason in outcome.planned.degraded:
            metrics.degraded(reason)
    if decision is not None:
        metrics.tokens(before=decision.before, after=decision.after)
        metrics.pressure(decision.pressure.level, zone=decision.pressure.zone)
        for report in decision.trail:
            if report.kept:
                metrics.action(report.layer, count=max(1, report.units))
    usage = outcome.seen.usage if outcome.seen is not None else None
    if outcome.upstream is not None and outcome.attempt is not None:
        address, port = outcome.address()
        metrics.answered(
            provider=outcome.upstream.name,
            model=outcome.request.model if outcome.request is not None else "",
            seconds=duration,
            response_model=(outcome.seen.model or "") if outcome.seen is not None else "",
            address=address,
            port=port,
            error_type=outcome.error or "",
            input_tokens=usage.prompt if usage else None,
            output_tokens=usage.completion if usage else None,
        )


def _line(outcome: Outcome, duration: float, actions: str) -> ExchangeLine:
    decision, planned = outcome.decision, outcome.planned
    branch = planned.branch if planned is not None else None
    pressure: Pressure | None = decision.pressure if decision is not None else None
    return ExchangeLine(
        request=outcome.id,
        tokens_before=decision.before if decision is not None else 0,
        tokens_after=decision.after if decision is not None else 0,
        usable=decision.limit if decision is not None else 0,
        zone=pressure.zone if pressure is not None else "unknown",
        status=outcome.status,
        outcome=outcome.label,
        conversation=branch.name if branch is not None else None,
        trace=outcome.trace.trace_id,
        tenant=branch.tenant[:8] if branch is not None else None,
        model=outcome.request.model if outcome.request is not None else None,
        policy=outcome.settings.name if outcome.settings is not None else None,
        actions=actions,
        overflow=outcome.overflows > 0,
        removed=len(decision.removed) if decision is not None and decision.removed else None,
        attempts=1 + outcome.retries,
        overhead_ms=round(outcome.overhead_ms, 2),
        duration_ms=round(1000 * duration, 1),
        error=outcome.error,
    )
