"""What is known of an exchange while it runs, and the headers that tell the client.

An observed request is forwarded as it came: the headers say what went up.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from urllib.parse import urlsplit

from policies import ContextSettings, Decision, Mode, WindowPressure
from policies.ledger import DROPPING
from policies.limits import lift, zones_for
from policies.pressure import read_pressure
from proxy.access.destination import Caller, Destination
from proxy.config.values import UpstreamSettings
from proxy.effects.allowance import Spent
from proxy.effects.evictions import CUT
from proxy.effects.hooks import Turn
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.heard import Listener
from proxy.planning import PlannedRequest, PlanRequest
from proxy.recall.rounds import Recalled
from proxy.tap import NO_USAGE, ReportedUsage, Tap, together
from proxy.telemetry import AnySpan, ModelCall, Trace, provider_name
from proxy.upstream.overflow import Ending, ending_of, is_cut_short
from proxy.wire.messages import ChatRequest

CLIENT_CLOSED = 499


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Calibrated tokens of a request as it came and as it went up, what W - R - H leaves, and the pressure of that."""

    before: int
    after: int
    limit: int
    pressure: WindowPressure


@dataclass(slots=True)
class Outcome:
    """One exchange as it unfolds; the routes and the line write it, :func:`record_exchange` reads it.

    ``recalls`` are the calls of the recall tool that were answered in it, ``rounds`` what the upstream reported of
    the answers before the last one; ``seen`` is what the client was told, all rounds together. ``sent_with`` are the
    client's headers. ``called`` is when the call upstream began that is not counted yet (``time.perf_counter``),
    ``received`` when the whole of its answer was there if that was before it was relayed, ``first_chunk`` the seconds
    until its stream began, None where there is none.
    """

    id: str
    started: float
    trace: Trace
    query: bytes = b""
    sent_with: Sequence[tuple[bytes, bytes]] = ()
    request: ChatRequest | None = None
    caller: Caller | None = None
    settings: ContextSettings | None = None
    destination: Destination | None = None
    planned: PlannedRequest = field(default_factory=lambda: PlannedRequest(b""))
    attempt: AnySpan | None = None
    seen: Tap = field(default_factory=Tap)
    status: int | None = None
    error: str | None = None
    ready: float | None = None
    called: float | None = None
    received: float | None = None
    first_chunk: float | None = None
    retries: int = 0
    overflows: int = 0
    clamped: bool = False
    turn: Turn | None = None
    job: PlanRequest | None = None
    spent: Callable[[], Spent] | None = None
    recalls: list[Recalled] = field(default_factory=list)
    rounds: list[ReportedUsage] = field(default_factory=list)
    refusal: Mapping[str, object] = field(default_factory=dict)
    listener: Listener | None = None

    @property
    def observed(self) -> bool:
        """Whether the policy only plans."""
        return self.settings is not None and self.settings.observes and self.settings.mode is not Mode.OFF

    @property
    def decision(self) -> Decision | None:
        """The plan that was carried out, if there is one."""
        return self.planned.decision

    @property
    def label(self) -> str:
        """The outcome's label for metrics and rows."""
        if self.error is not None:
            return self.error
        if self.status is None or self.status >= 400:
            return f"upstream_{self.status}"
        return "ok" if self.seen.error is None else "error_in_stream"

    @property
    def overhead_ms(self) -> float:
        """Milliseconds from the request's arrival to its first departure upstream."""
        return 1000 * ((self.ready or time.perf_counter()) - self.started)

    def billed(self) -> ReportedUsage | None:
        """What the upstream's answers took together, every round's prompt counted."""
        usage = self.seen.usage
        if usage is None or not self.rounds:
            return usage
        return replace(together((*self.rounds, usage)), completion=usage.completion, reasoning=usage.reasoning)

    def reported(self) -> ReportedUsage | None:
        """What the upstream reported of the last round's answer alone."""
        usage = self.seen.usage
        if usage is None or usage.completion is None or not self.rounds:
            return usage
        before = together(self.rounds)
        thought = None if usage.reasoning is None else usage.reasoning - (before.reasoning or 0)
        return replace(usage, completion=usage.completion - (before.completion or 0), reasoning=thought)

    def begin_call(self) -> None:
        """A call to the upstream begins."""
        self.called, self.received, self.first_chunk = time.perf_counter(), None, None

    def end_call(self, usage: ReportedUsage, seen: Tap | None, error: str) -> ModelCall | None:
        """The call that ends now, None where none is under way; an answer's model is the one that it names."""
        begun, self.called = self.called, None
        if begun is None or self.destination is None:
            return None
        upstream = self.destination.upstream
        address, port = address_of(upstream)
        return ModelCall(
            provider=provider_of(upstream),
            model=self.request.model if self.request is not None else "",
            seconds=(self.received or time.perf_counter()) - begun,
            response_model=(seen.model if seen is not None else None) or "",
            address=address,
            port=port,
            error=error,
            usage=usage,
            first_chunk=self.first_chunk,
        )

    def begin_stream(self) -> None:
        """The first piece of the last attempt's streamed answer has come."""
        if self.first_chunk is None and self.called is not None:
            self.first_chunk = time.perf_counter() - self.called
            if self.attempt is not None:
                self.attempt.first_chunk()

    def read_ending(self) -> Ending | None:
        """What stopped the answer before its own end; a prompt that nobody reported counts as estimated."""
        reasons, planned, request = self.seen.finish_reasons, self.planned, self.request
        if request is None or not is_cut_short(reasons):
            return None
        usage = self.reported() or NO_USAGE
        budget = planned.belief.budget if planned.belief is not None else None
        prompt = usage.prompt
        if prompt is None and budget is not None and planned.sent is not None:
            prompt = budget.estimate(planned.sent)
        return ending_of(
            reasons,
            prompt=prompt,
            completion=usage.completion,
            max_tokens=request.max_tokens,
            window=budget.window if budget is not None else None,
            clamped=self.clamped,
        )

    def settings_or_default(self) -> ContextSettings:
        """The policy's settings, the default ones before a policy was found."""
        return self.settings or ContextSettings()

    def refused(self, error: ProxyError) -> None:
        """Weir answered instead of an upstream."""
        self.status, self.error = error.status, error.code
        if isinstance(error, ContextLengthExceeded):
            self.refusal = error.weir or {}

    def gone(self) -> None:
        """The client left."""
        self.error = "client_disconnect"
        self.status = self.status or CLIENT_CLOSED

    def sent(self) -> TokenUsage | None:
        """What went up, None where the request was not counted."""
        decision, planned = self.decision, self.planned
        if decision is not None and not self.observed:
            return TokenUsage(decision.before, decision.after, decision.limit, decision.pressure)
        if planned.reading is None or planned.belief is None:
            return None
        budget, settings = planned.belief.budget, self.settings_or_default()
        tokens = planned.reading.transcript.tokens
        used, zones = budget.estimate(tokens), zones_for(settings, budget.window)
        pressure = read_pressure(used, budget.base(settings), zones, fits=budget.fits(tokens))
        zone, _ = lift(pressure.zone, used, settings.rot_soft_tokens)
        return TokenUsage(used, used, budget.usable, replace(pressure, zone=zone))

    def actions(self, *, planned: bool = False) -> str:
        """The value of ``x-weir-actions``: what was done to this request, ``none`` if nothing was.

        With ``planned`` it is what was decided, whether it was done or not.
        """
        decision, parts = self.decision, []
        if self.observed:
            parts.append("observe=1")
        if decision is not None and (planned or not self.observed):
            parts += [f"{name}={count}" for name, count in sorted(decision.applied.items())]
        if self.clamped:
            parts.append("clamp=1")
        if self.retries:
            parts.append(f"retry={self.retries}")
        if self.recalls:
            parts.append(f"recall={len(self.recalls)}")
        if planned and self.planned.refused is not None:
            parts.append(f"refused={self.planned.refused}")
        parts += [f"degraded={reason}" for reason in dict.fromkeys(self.planned.degraded)]
        return ",".join(parts) or "none"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Weir's response headers, as far as the exchange has come."""
        sent, planned = self.sent(), self.planned
        pairs = [(b"x-request-id", self.id), (b"x-weir-actions", self.actions())]
        if planned.branch is not None:
            pairs.append((b"x-weir-conversation", planned.branch.name))
        if sent is not None:
            pairs.append((b"x-weir-tokens", f"before={sent.before};after={sent.after};limit={sent.limit}"))
            pairs.append((b"x-weir-pressure", str(sent.pressure)))
        pairs.append((b"x-weir-overhead-ms", f"{self.overhead_ms:.2f}"))
        return [(name, value.encode("latin-1", "replace")) for name, value in pairs]


def provider_of(upstream: UpstreamSettings) -> str:
    """The provider behind an upstream as the GenAI conventions call it, else the upstream's name."""
    return provider_name(upstream.name, host=address_of(upstream)[0], provider=upstream.provider)


def address_of(upstream: UpstreamSettings) -> tuple[str, int | None]:
    """Host and port of an upstream; empty for a provider's usual one."""
    return _host_and_port(upstream.base_url or upstream.api_base or "")


@lru_cache(maxsize=256)
def _host_and_port(base: str) -> tuple[str, int | None]:
    parts = urlsplit(base)
    return parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def evicted_count(planned: PlannedRequest) -> int:
    """How many messages and definitions were newly taken out or shortened, summaries not counted."""
    return sum(1 for row in planned.evictions if row.kind != CUT or row.tool)


def evictions_alone(planned: PlannedRequest) -> int:
    """The same without what a summary took the place of: that is a compaction, and no sign of too small a window."""
    return sum(1 for row in planned.evictions if row.kind != CUT or row.layer in DROPPING)
