"""What is known of an exchange while it runs, and the headers that tell the client.

An observed request is forwarded as it came: the headers say what went up.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from policies import ContextSettings, WindowPressure
from policies.ledger import DROPPING
from policies.limits import lift, zones_for
from policies.pressure import read_pressure
from proxy.access.destination import CHAT, Caller, Route
from proxy.custom.functions import Turn
from proxy.effects.evictions import CUT
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.exchange.request import Request
from proxy.exchange.send import Attempts
from proxy.planning.values import NO_PLAN, Plan
from proxy.recall.rounds import Recalled
from proxy.stream.relay import Listener
from proxy.tap import NO_USAGE, ReportedUsage, Tap
from proxy.telemetry import Trace
from proxy.upstream.overflow import Ending, ending_of, is_cut_short
from proxy.wire.anthropic import DROPS_UNBOUND
from proxy.wire.codec import ClientRequest

CLIENT_CLOSED = 499


class TokenUsage(NamedTuple):
    """Calibrated tokens of a request as it came and as it went up, what W - R - H leaves, and the pressure of that."""

    before: int
    after: int
    limit: int
    pressure: WindowPressure


class ExchangeProgress(msgspec.Struct):
    """One exchange as far as it has come; None is what it has not come to, or never did.

    ``chat`` is the body, once it was read; ``recalls`` are the calls of the recall tool that were answered in it;
    ``seen`` is what the client was told, all rounds together. ``degraded`` is what went wrong behind the plan;
    ``since`` is when a body that waited for room would have been there without (``time.monotonic``);
    ``compacted`` says that the answer is a compaction of Weir's, ``observed`` that the policy only plans.
    """

    id: str
    started: float
    trace: Trace
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    route: Route = CHAT
    caller: Caller | None = None
    settings: ContextSettings | None = None
    observed: bool = False
    chat: ClientRequest | None = None
    request: Request | None = None
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

    def billed(self) -> ReportedUsage | None:
        return self.seen.usage if self.attempts is None else self.attempts.billed(self.seen.usage)

    def reported(self) -> ReportedUsage:
        usage = self.seen.usage if self.attempts is None else self.attempts.reported(self.seen.usage)
        return usage or NO_USAGE

    def begin_stream(self) -> None:
        if self.attempts is not None:
            self.attempts.begin_stream()

    def ending(self) -> Ending | None:
        """What stopped the answer before its own end; a prompt that nobody reported counts as estimated."""
        reasons, limits = self.seen.finish_reasons, self.plan.limits
        if self.chat is None or not is_cut_short(reasons):
            return None
        usage, budget = self.reported(), None if limits is None else limits.budget
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
        self.status, self.error = error.status, error.code
        if isinstance(error, ContextLengthExceeded):
            self.refusal = error.weir or {}

    def gone(self) -> None:
        self.error = "client_disconnect"
        self.status = self.status or CLIENT_CLOSED

    def tokens(self) -> TokenUsage | None:
        decision, recognized = self.plan.decision, self.plan.recognized
        if decision is not None and not self.observed:
            return TokenUsage(decision.before, decision.after, decision.limit, decision.pressure)
        if recognized is None:
            return None
        budget, settings = recognized.limits.budget, self.policy
        tokens = recognized.transcript.tokens
        used, zones = budget.estimate(tokens), zones_for(settings, budget.window)
        pressure = read_pressure(used, budget.base(settings), zones, fits=budget.fits(tokens))
        zone, _ = lift(pressure.zone, used, settings.rot_soft_tokens)
        return TokenUsage(used, used, budget.usable, pressure._replace(zone=zone))

    def all_degraded(self) -> tuple[str, ...]:
        return (*self.plan.degraded, *self.degraded)

    def actions(self, *, planned: bool = False) -> str:
        """The value of ``x-weir-actions``: what was done to this request, ``none`` if nothing was.

        With ``planned`` it is what was decided, whether it was done or not.
        """
        decision, parts = self.plan.decision, []
        if self.observed:
            parts.append("observe=1")
        if decision is not None and decision.applied and (planned or not self.observed):
            parts += [f"{name}={count}" for name, count in sorted(decision.applied.items())]
        if self.attempts is not None and self.attempts.room is not None:
            parts.append("clamp=1")
        if DROPS_UNBOUND in self.plan.betas:
            parts.append("drop_block=1")
        if self.plan.native:
            parts.append("native_compaction=1")
        if self.compacted:
            parts.append("compaction=1")
        if self.plan.restarted:
            parts.append("restart=1")
        if self.retries:
            parts.append(f"retry={self.retries}")
        if self.recalls:
            parts.append(f"recall={len(self.recalls)}")
        if planned and self.plan.refused is not None:
            parts.append(f"refused={self.plan.refused}")
        if degraded := self.all_degraded():
            parts += [f"degraded={reason}" for reason in dict.fromkeys(degraded)]
        return ",".join(parts) or "none"

    def own_headers(self) -> list[tuple[bytes, bytes]]:
        sent, branch = self.tokens(), self.plan.branch
        headers = [
            (b"x-request-id", self.id.encode()),
            (b"x-weir-actions", self.actions().encode("latin-1", "replace")),
        ]
        if branch is not None:
            headers.append((b"x-weir-conversation", branch.name.encode("latin-1", "replace")))
        if sent is not None:
            about = b"~" if self.plan.sampled else b""
            told = (about, sent.before, about, sent.after, sent.limit)
            headers.append((b"x-weir-tokens", b"before=%b%d;after=%b%d;limit=%d" % told))
            headers.append((b"x-weir-pressure", str(sent.pressure).encode()))
        headers.append((b"x-weir-overhead-ms", b"%.2f" % self.overhead_ms))
        return headers


def evicted_count(plan: Plan) -> int:
    return len([row for row in plan.evictions if row.kind != CUT or row.tool]) if plan.evictions else 0


def evictions_alone(plan: Plan) -> int:
    """The same without what a summary took the place of: that is a compaction, and no sign of too small a window."""
    return len([row for row in plan.evictions if row.kind != CUT or row.layer in DROPPING]) if plan.evictions else 0
