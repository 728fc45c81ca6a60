"""One exchange as far as it has come, and the headers that say so to its client."""

import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from policies.ledger import TokenUsage
from policies.pressure import read_pressure
from policies.settings import ContextSettings
from proxy.access.admission import Slot
from proxy.access.budgets import BYTES_A_TOKEN, BudgetUse
from proxy.access.destination import CHAT, Caller, Destination, Route
from proxy.conversation.thread import name_from
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.exchange.attempts import Attempts
from proxy.features.feature import Turn, emit
from proxy.features.held_history import HeldState
from proxy.features.recall.rounds import Recalled
from proxy.planning.values import CUT, NO_PLAN, Paid, Plan, PlanRequest
from proxy.stream import Listener, messages_in, texts_of
from proxy.tap import NO_USAGE, ReportedUsage, Tap, together
from proxy.telemetry.trace import ExchangeTrace
from proxy.upstream.overflow import LENGTHS, Ending, ending_of
from proxy.wire.codec import ClientRequest

CLIENT_CLOSED = 499
CLIENT_LEFT = "client_disconnect"
BROKE_OFF = "stream_broken"
CUT_OFF = frozenset({CLIENT_LEFT, BROKE_OFF})


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was read.

    Attributes:
        client: what was received, ``chat`` the whole conversation that it goes on with.
        destination: which upstream it is for.
        held: what the provider holds of the conversation.
        plan_request: what is to be planned; None for a request that is not managed.
        replies: what replies to the plan's effects, and says what that took.
        compacts: whether it only has its history compacted, which Weir may do.
    """

    client: ClientRequest
    chat: ClientRequest
    destination: Destination
    held: HeldState
    plan_request: PlanRequest | None = None
    replies: Paid | None = None
    compacts: bool = False


class Exchange(msgspec.Struct):
    """One exchange as far as it has come; None is what it has not come to, or never did.

    Attributes:
        started: when it began (``time.perf_counter``), ``ready`` when its plan could be sent.
        since: when a body that waited for room would have been there without (``time.monotonic``).
        observed: whether the policy only plans.
        ignored: headers of the client's that its key may not send.
        seen: what the client received, all rounds together.
        recalls: calls of the recall tool that were answered.
        refusal: why the request was refused as too long, in figures.
        listener: what reads the answer on its way, where later requests may name what is in it.
        degraded: what went wrong, besides what the plan says.
        compacted: whether the answer is a compaction that Weir has made.
        budget: the caller's that is used up the furthest.
        reserved: whether something of a budget may be reserved for the request.
        assumed: the tokens of its prompt as they were estimated for that.
        fallback: whether it goes to the policy's other model.
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
    request: Request | None = None
    plan: Plan = NO_PLAN
    attempts: Attempts | None = None
    seen: Tap = msgspec.field(default_factory=Tap)
    status: int | None = None
    error: str | None = None
    ready: float | None = None
    since: float | None = None
    recalls: list[Recalled] = msgspec.field(default_factory=list)
    refusal: Mapping[str, object] = msgspec.field(default_factory=dict)
    listener: Listener | None = None
    degraded: list[str] = msgspec.field(default_factory=list)
    compacted: bool = False
    slot: Slot | None = None
    budget: BudgetUse | None = None
    reserved: bool = False
    assumed: int | None = None
    fallback: bool = False

    @property
    def model(self) -> str:
        return "" if self.chat is None else self.chat.model

    @property
    def policy(self) -> ContextSettings:
        return self.settings or ContextSettings()

    def turn(self) -> Turn | None:
        """The request as features see it, None before its policy is known."""
        if self.caller is None or self.settings is None:
            return None
        recognized = self.plan.recognized
        return Turn(
            request=self.id,
            tenant=self.caller.tenant,
            model=self.model,
            policy=self.settings.name,
            conversation=None if recognized is None else recognized.thread.branch.name,
        )

    @property
    def plan_request(self) -> PlanRequest | None:
        """What is planned; None for a request that is not managed, or was not read."""
        return None if self.request is None else self.request.plan_request

    def emit(self, hooks: Sequence[Callable[..., None]], *facts: object) -> None:
        """Call hooks of features, once the request's policy is known."""
        turn = self.turn() if hooks else None
        if turn is not None:
            emit(hooks, turn, *facts)

    def identify(self) -> None:
        """Set on the trace whose request it is, as far as that is known."""
        caller = self.caller
        if caller is None or not self.trace.recorded:
            return
        recognized = self.plan.recognized
        branch = None if recognized is None else recognized.thread.branch
        fields = {} if self.chat is None else self.chat.fields
        self.trace.identify(
            conversation=name_from(self.headers, fields) if branch is None else branch.name,
            tenant=caller.tenant if branch is None else branch.tenant,
            policy=self.policy.name,
            model=self.model,
            derived=branch is not None and branch.name == branch.conversation,
            key=caller.name,
        )

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
        """The usage of each answer, of every round, also where the last failed.

        Weir's own count for one without usage, or that broke off before its usage was reported.
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
        """What a request took by Weir's own count; None where nothing was said, or it was neither
        recognised nor reserved.
        """
        request = self.request
        seen = self.seen
        prompt = self._counted_prompt()
        if request is None or prompt is None or not seen.said or (self.status or 0) >= 400:
            return None
        written = messages_in(bytes(seen.sample), request.chat.codec)
        plan_request = request.plan_request
        count = _by_size if plan_request is None else plan_request.counter.count
        counts = [count(text) for message in written for text in texts_of(message)]
        reported = seen.usage or NO_USAGE
        written_tokens = round(sum(counts) * seen.size / max(1, len(seen.sample)))
        return msgspec.structs.replace(
            reported,
            prompt=prompt if reported.prompt is None else reported.prompt,
            completion=max(written_tokens, reported.completion or 0),
            estimated=True,
        )

    def _counted_prompt(self) -> int | None:
        recognized = self.plan.recognized
        if recognized is None:
            return self.assumed
        return recognized.limits.budget.estimate(self.plan.sent)

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
            "drop_block": self.plan.drops_unbound,
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
            tokens = (about, sent.before, about, sent.after, sent.limit)
            headers.append((b"x-weir-tokens", b"before=%b%d;after=%b%d;limit=%d" % tokens))
            headers.append((b"x-weir-pressure", str(sent.pressure).encode()))
        if self.budget is not None:
            headers.append((b"x-weir-budget", str(self.budget).encode()))
        if self.fallback:
            headers.append((b"x-weir-model", self.model.encode("latin-1", "replace")))
        headers.append((b"x-weir-overhead-ms", b"%.2f" % self.overhead_ms))
        return headers


def _by_size(text: str) -> int:
    return math.ceil(len(text.encode(errors="surrogatepass")) / BYTES_A_TOKEN)


def evicted_count(plan: Plan) -> int:
    return len([row for row in plan.evictions if row.kind != CUT or row.tool])


class RequestIds:
    """Ids that no other request has: random per process, then counted; a forked process draws its
    own.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._draw()
        os.register_at_fork(after_in_child=self._draw)

    def _draw(self) -> None:
        self._process = secrets.token_hex(8)

    def new(self) -> str:
        return f"req_{self._process}{next(self._numbers):08x}"


new_request_id = RequestIds().new
