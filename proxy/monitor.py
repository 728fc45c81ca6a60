"""What is watched while requests go by: what the provider's cache made of each, and the health of
its conversation.

A cache is warm or cold, and the prefix changed by somebody's doing. Costs are list prices in US
dollars, of the prompt and the answer::

    cost        prompt tokens that were not cached + .1 for cached ones (Anthropic's and OpenAI's price) + the answer
    cost_saved  the same for the client's own array, less cost; negative where a batch made the cache forget

The client's own array would have been read from the cache in the share that was reported; on a
request whose prefix Weir has just changed, in the share of the request before, because the array as
the client sent it did not change.

What this process knows of health is bounded and in memory. The state of a conversation is stored
with its exchanges and taken over from there after a restart, so that an alert that is open is not
raised again.

An alert is a log line, a metric, and one POST to a webhook for each episode that begins, off the
way of any request, with the headers of the Standard Webhooks specification
(https://www.standardwebhooks.com): ``webhook-signature`` is ``v1,`` and the base64 of the
HMAC-SHA-256 over ``id.timestamp.body``. What is not taken at the second try is counted and
forgotten.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
import xxhash

from policies.health import (
    LOOP,
    SPIKE_SHARE,
    Checkup,
    Health,
    HealthAlert,
    Level,
    Sample,
    Snapshot,
    check,
)
from policies.ledger import Decision, EditKind, WindowPressure
from policies.limits import TokenBudget
from policies.messages import Run, follow_calls
from policies.pressure import raw_buckets
from policies.quality.prices import TokenPrices
from policies.settings import ContextSettings
from proxy.access.budgets import BudgetNotice, said_amount
from proxy.access.destination import TENANT_SHOWN
from proxy.config.values import AlertSettings, Timeouts, UpstreamSettings
from proxy.conversation.thread import Prefix, Thread
from proxy.errors import ProxyError
from proxy.models.facts import cost_of, prices_of, tiered
from proxy.planning.values import CUT, Plan, Recognized
from proxy.store.records import ExchangeRow
from proxy.tap import ReportedUsage, together
from proxy.telemetry.logs import LOG_CONTEXT, AlertLine, log_alert
from proxy.telemetry.metrics import Metrics
from proxy.upstream.client import Client
from proxy.upstream.connection import StreamBroken
from proxy.wire.codec import ClientRequest

Cause = Literal["none", "client", "proxy"]
DIGITS = {"hit_ratio": 4, "cost": 9, "cost_saved": 9}
WHOLE = frozenset({CUT, str(EditKind.PRUNE_TOOLS)})
"""Kinds of what a batch did that changes the beginning of every request: a summary or a note, and
the tools.
"""


class CacheUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the provider's cache saw it.

    ``hit_ratio`` is None where the upstream did not say. ``cold``: the conversation rested for
    longer than ``cache_ttl``. ``prefix_changed``: who made it begin in another way than the request
    before. Costs are US dollars, None without reported usage or a price.
    """

    hit_ratio: float | None = None
    cold: bool = False
    prefix_changed: Cause = "none"
    cost: float | None = None
    cost_saved: float | None = None

    def facts(self) -> dict[str, object]:
        said = msgspec.to_builtins(self)
        return {
            name: round(value, DIGITS[name]) if name in DIGITS else value
            for name, value in said.items()
        }


def shown(detail: Mapping[str, object]) -> dict[str, object]:
    return {
        each.name: detail.get(each.name, each.default) for each in msgspec.structs.fields(CacheUse)
    }


def follow(
    plan: Plan,
    recognized: Recognized,
    request: ClientRequest,
    billed: Sequence[ReportedUsage],
    *,
    ttl: float,
    at: float,
    carried_out: bool,
    ok: bool,
) -> CacheUse:
    """What the cache made of a request, which the next one of the conversation will be compared
    with.

    ``billed`` is what each round's answer took; ``ttl`` is seconds, ``at`` when the request was
    settled; ``carried_out``: the plan is what went up; ``ok``: the upstream accepted it.
    """
    view = recognized.view
    usage = together(billed) if billed else None
    before = view.prefix
    now = _prefix(plan, recognized, request, usage)
    touched = carried_out and _touches_what_was_sent(plan, recognized)
    changed = _cause(recognized, before, now, touched=touched)
    if ok:
        view.prefix = now
    elif before is not None and changed == "proxy":
        view.prefix = before._replace(is_stale=True)
    is_cold = _is_cold(plan, recognized, ttl=ttl, at=at)
    prices = prices_of(request.model, recognized.limits.facts)
    if not billed or prices is None:
        return CacheUse(hit_ratio=now.hit_ratio, cold=is_cold, prefix_changed=changed)
    cost = sum(cost_of(prices, each) for each in billed)
    decision = plan.decision
    removed = (
        max(0, decision.before - decision.after) if carried_out and decision is not None else 0
    )
    share = now.hit_ratio or 0.0
    if before is not None and before.hit_ratio is not None and changed == "proxy" and not is_cold:
        share = max(share, before.hit_ratio)
    return CacheUse(
        hit_ratio=now.hit_ratio,
        cold=is_cold,
        prefix_changed=changed,
        cost=cost,
        cost_saved=(
            _cost_unmanaged(prices, billed, removed=removed, share=share) - cost if removed else 0.0
        ),
    )


def _prefix(
    plan: Plan, recognized: Recognized, request: ClientRequest, usage: ReportedUsage | None
) -> Prefix:
    transcript = recognized.transcript
    fields = request.fields
    names = request.codec.counted
    chain = transcript.chain
    return Prefix(
        head=b"".join([m.digest for m in transcript.messages[: transcript.head]]),
        tools=b"".join([xxhash.xxh3_64_digest(fields[name]) for name in names if name in fields]),
        end=chain[-1] if chain else b"",
        length=len(chain),
        pruned=plan.decision.pruned if plan.decision is not None else (),
        hit_ratio=hit_ratio(usage),
    )


def hit_ratio(usage: ReportedUsage | None) -> float | None:
    if usage is None or usage.cached is None or not usage.prompt or usage.prompt < 0:
        return None
    return min(1.0, max(0, usage.cached) / usage.prompt)


def _cause(recognized: Recognized, before: Prefix | None, now: Prefix, *, touched: bool) -> Cause:
    if touched or (before is not None and before.is_stale):
        return "proxy"
    if before is None:
        return "none"
    if (now.head, now.tools, now.pruned) != (before.head, before.tools, before.pruned):
        # Weir has left out nothing new: a tool that comes back was asked for by name
        return "client"
    return "none" if _goes_on(recognized, before) else "client"


def _goes_on(recognized: Recognized, before: Prefix) -> bool:
    chain = recognized.transcript.chain
    if len(chain) < before.length:
        return recognized.length == len(chain)
    return before.length == 0 or chain[before.length - 1] == before.end


def _touches_what_was_sent(plan: Plan, recognized: Recognized) -> bool:
    decision = plan.decision
    transcript = recognized.transcript
    if not recognized.length:
        return False
    sent = transcript.head + recognized.length
    if decision is not None and decision.removed and decision.removed[0] < sent:
        return True
    if decision is not None and any(event.kind == "rollback" for event in decision.events):
        return True
    if not plan.evictions:
        return False
    places = {
        (m.digest, nth)
        for m, nth in zip(transcript.messages[:sent], transcript.occurrences, strict=False)
    }
    return any(
        row.kind in WHOLE or (row.digest, row.occurrence) in places for row in plan.evictions
    )


def _is_cold(plan: Plan, recognized: Recognized, *, ttl: float, at: float) -> bool:
    last = recognized.trend.at
    mine = plan.decision.trend.at if plan.decision is not None else None
    return last is not None and (at if mine is None else mine) - last > ttl


def _cost_unmanaged(
    prices: TokenPrices, billed: Sequence[ReportedUsage], *, removed: int, share: float
) -> float:
    prompt = (billed[0].prompt or 0) + removed
    read = prompt * (prices.input * (1 - share) + prices.cache_read * share)
    return tiered(prices, prompt, read, billed[-1].completion or 0)


MAX_CONVERSATIONS = 20_000
MAX_READ = 500

Key = tuple[str, str]


class _Entry(NamedTuple):
    health: Health
    snapshot: Snapshot
    run: Run


class HealthBook:
    def __init__(self) -> None:
        self._known: OrderedDict[Key, _Entry] = OrderedDict()

    def check_up(
        self,
        plan: Plan,
        recognized: Recognized,
        settings: ContextSettings,
        *,
        used: int,
        evicted: int,
        at: float,
        pressure: WindowPressure,
    ) -> Checkup | None:
        """The conversation's health after a request; None for one that says nothing new.

        ``used`` are the calibrated tokens of what went up, ``pressure`` is theirs, ``evicted`` what
        a batch took out.
        """
        if not self._is_news(plan.decision, recognized):
            return None
        rules = settings.health
        thread = recognized.thread
        key = (thread.branch.tenant, thread.branch.conversation)
        known = self._known.get(key)
        before, own = (Run(), None) if known is None else (known.run, known.health)
        run = follow_calls(recognized.transcript, before, length=recognized.length, most=LOOP)
        limits = recognized.policy_limits
        decision = plan.decision
        observes = settings.observes
        reading = None if decision is None else decision.reading
        # or it took nothing out
        made = None if decision is None or observes or not decision.is_new else decision
        sample = Sample(
            at=at,
            utilization=pressure.level,
            evicted=0 if made is None else evicted,
            ratios=() if made is None else _ratios(made),
            compacted=made is not None and made.cut is not None,
            burn_rate=None if reading is None else reading.velocity_tokens_per_turn,
            spike=None if decision is None else _spike(decision, recognized),
            repeats=run.longest,
            bloat=0.0 if decision is None else _bloat(decision, recognized, settings),
            bloat_limit=(
                None if pressure.zone == "green" or _is_kept(decision, settings) else limits.bloat
            ),
            requests_left=_requests_left(decision, settings, budget=limits.budget, used=used),
            window_id=None if decision is None or observes else decision.window_id,
            due=0.0 if made is None else made.due / max(1, limits.base),
            rung=made is not None and made.needed_rung,
        )
        checkup = check(_health_of(thread, own), sample, rules)
        self._known[key] = _Entry(checkup.health, checkup.snapshot, run)
        self._known.move_to_end(key)
        if len(self._known) > MAX_CONVERSATIONS:
            self._known.popitem(last=False)
        return checkup

    def _is_news(self, decision: Decision | None, recognized: Recognized) -> bool:
        """A request that only repeats the last one says nothing new."""
        if recognized.length != len(recognized.transcript.chain) or (
            decision is not None and decision.is_new
        ):
            return True
        branch = recognized.thread.branch
        return (
            recognized.thread.health is None
            and (branch.tenant, branch.conversation) not in self._known
        )

    def forget(self, tenant: str, conversation: str) -> None:
        self._known.pop((tenant, conversation), None)

    def read(self) -> dict[tuple[str, ...], float]:
        newest = [known.snapshot for known in islice(reversed(self._known.values()), MAX_READ)]
        found: dict[tuple[str, ...], float] = {}
        for name in METRICS:
            values = [value for each in newest if (value := getattr(each, name)) is not None]
            if values:
                found[(name,)] = sum(values) / len(values)
        return found


def _health_of(thread: Thread, own: Health | None) -> Health | None:
    """What is known of a conversation's health here, or what its store has if that is newer, which
    is taken over.
    """
    if thread.health is None:
        return own
    stored = Health.from_json(thread.health)
    thread.health = None
    return stored if own is None or (stored is not None and stored.at > own.at) else own


METRICS = tuple(name for name in Snapshot._fields if name not in {"at", "window_id"})


def _bloat(decision: Decision, recognized: Recognized, settings: ContextSettings) -> float:
    """Tool results' share of what went up: of the whole request where a plan was only observed."""
    if settings.observes and decision.pieces is not None:
        whole = recognized.transcript
        return raw_buckets(whole).get("tool_outputs", 0) / max(1, whole.tokens)
    return decision.buckets.get("tool_outputs", 0) / max(1, decision.after)


def _ratios(decision: Decision) -> tuple[float, ...]:
    return tuple(
        each.ratio
        for report in decision.trail
        if report.kept
        for each in report.condensed
        if each.original_tokens and each.compressed_tokens and not each.failure
    )


def _spike(decision: Decision, recognized: Recognized) -> float | None:
    reading = decision.reading
    before = recognized.trend.baseline
    if reading is None or not reading.spike or not decision.trend.deltas:
        return None
    if (reading.last_delta or 0) < SPIKE_SHARE * recognized.policy_limits.base:
        return None
    return decision.trend.deltas[-1] / max(1.0, before or 0.0)


def _is_kept(decision: Decision | None, settings: ContextSettings) -> bool:
    """Whether layers keep the conversation in its window: no rung was needed."""
    return _is_managed(settings) and decision is not None and not decision.needed_rung


def _is_managed(settings: ContextSettings) -> bool:
    return not settings.observes and settings.manages


def _requests_left(
    decision: Decision | None, settings: ContextSettings, *, budget: TokenBudget, used: int
) -> float | None:
    """Until the window overflows at the conversation's velocity; 0 for a request that does not fit,
    or needed a rung.

    None where nothing grows, and where layers keep the conversation in its window.
    """
    if _is_managed(settings) and decision is not None:
        return 0.0 if decision.needed_rung else None
    room = budget.window - budget.reserve - used
    if budget.max_input is not None:
        room = min(room, budget.max_input - used)
    if room < 0:
        return 0.0
    if decision is None:
        return None
    speed = None if decision.reading is None else decision.reading.velocity_tokens_per_turn
    return room / speed if speed is not None and speed > 0 else None


log = logging.getLogger("weir.alerts")

MAX_WAITING = 256
ATTEMPTS = 2
RETRY_PAUSE = 1.0
CLOSING = 2.0
MAX_ANSWER = 4_096
GRADES = {"info": 0, "warning": 1, "critical": 2}
ENCODED = "whsec_"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An alert, and the request that it began with; ``about`` tells two of a kind apart that began
    with the same one.
    """

    alert: HealthAlert
    tenant: str
    conversation: str
    policy: str
    request: str
    about: str = ""

    @property
    def id(self) -> str:
        return f"alert_{self.request.removeprefix('req_')}_{self.alert.kind}{self.about}"

    def body(self) -> bytes:
        alert = self.alert
        data = {
            "kind": alert.kind,
            "level": alert.level,
            "class": alert.category,
            "value": round(alert.value, 4),
            "threshold": alert.limit,
            "said": alert.said,
            "conversation": self.conversation,
            "tenant": self.tenant[:TENANT_SHOWN],
            "policy": self.policy,
            "request": self.request,
        }
        return json.dumps(
            {"type": "weir.alert", "id": self.id, "at": alert.at, "data": data}
        ).encode()


BUDGET_ALERTS: Mapping[str, Level] = {
    "budget_nearly_used": "warning",
    "budget_used_up": "warning",
    "budget_refuses": "critical",
}
"""The alerts about budgets, with their levels: 80 % is used, all of a soft one is, of a hard one."""


def notice_of_budget(notice: BudgetNotice) -> Notice:
    """What is said of a budget that is used up, or nearly."""
    use = notice.use
    limit = said_amount(use.unit, use.limit)
    used = said_amount(use.unit, use.used)
    if notice.share < 1:
        kind = "budget_nearly_used"
        said = "is nearly used up"
    elif use.hard:
        kind = "budget_refuses"
        said = "is used up, and requests are refused until it resets"
    else:
        kind = "budget_used_up"
        said = "is used up, and requests go on"
    text = f"The budget of the {use.scope} {use.label}, {limit} a {use.period}, {said} ({used})."
    return Notice(
        alert=HealthAlert(
            kind=kind,
            level=BUDGET_ALERTS[kind],
            category="notice",
            at=notice.at,
            value=use.used,
            limit=notice.share * use.limit,
            said=text,
        ),
        tenant=notice.tenant,
        conversation="",
        policy="",
        request=notice.request,
        about=f"_{use.scope}_{use.period}_{use.unit}",
    )


@dataclass(slots=True)
class Alerts:
    client: Client
    settings: AlertSettings
    metrics: Metrics
    clock: Callable[[], float] = time.time
    pause: float = RETRY_PAUSE
    _waiting: asyncio.Queue[Notice] = field(default_factory=partial(asyncio.Queue, MAX_WAITING))
    _task: asyncio.Task[None] | None = None

    def tell(self, notice: Notice) -> None:
        alert = notice.alert
        self.metrics.alerts.labels(alert.level, alert.category, alert.kind).inc()
        log_alert(
            log,
            AlertLine(
                level=alert.level,
                category=alert.category,
                alert=alert.kind,
                value=alert.value,
                threshold=alert.limit,
                conversation=notice.conversation,
                tenant=notice.tenant[:TENANT_SHOWN],
                request=notice.request,
                said=alert.said,
            ),
        )
        settings = self.settings
        if settings.webhook is None or GRADES[alert.level] < GRADES[settings.level]:
            return
        try:
            self._waiting.put_nowait(notice)
        except asyncio.QueueFull:
            self.metrics.alerts_undelivered.labels("dropped").inc()
            return
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="weir-alerts")

    def tell_stored(self, row: ExchangeRow) -> None:
        """What began by the word of a store that several servers share: one of them tells it."""
        for alert in row.health.opened if row.health is not None else ():
            notice = Notice(
                alert=alert,
                tenant=row.tenant,
                conversation=row.name,
                policy=row.policy,
                request=row.id,
            )
            self.tell(notice)

    async def close(self) -> None:
        task = self._task
        self._task = None
        if task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await self._waiting.join()
        while not self._waiting.empty():
            self._waiting.get_nowait()
            self.metrics.alerts_undelivered.labels("dropped").inc()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        LOG_CONTEXT.set(None)  # begun with the first alert's request, it works for all
        while True:
            notice = await self._waiting.get()
            try:
                await self._deliver(notice)
            except Exception:  # whatever a webhook brings about is no request's affair
                log.exception("an alert could not be sent", extra=_about(notice))
                self.metrics.alerts_undelivered.labels("failed").inc()
            finally:
                self._waiting.task_done()

    async def _deliver(self, notice: Notice) -> None:
        why = "no webhook"
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self.pause)
            settings = self.settings
            if settings.webhook is None:
                return
            try:
                async with asyncio.timeout(settings.seconds):
                    status = await self._post(notice, settings.webhook.get_secret_value(), settings)
            except (ProxyError, StreamBroken, OSError, TimeoutError, ValueError) as error:
                why = type(error).__name__
                continue
            if status < 300:
                return
            why = f"status {status}"
            if 400 <= status < 500 and status not in {408, 425, 429}:
                break
        self.metrics.alerts_undelivered.labels("failed").inc()
        log.warning("the webhook did not take alert %s: %s", notice.id, why, extra=_about(notice))

    async def _post(self, notice: Notice, url: str, settings: AlertSettings) -> int:
        parts = urlsplit(url)
        receiver = UpstreamSettings(
            name="webhook",
            base_url=f"{parts.scheme}://{parts.netloc}",
            timeout=Timeouts(
                connect=settings.seconds, first_byte=settings.seconds, idle=settings.seconds
            ),
        )
        body = notice.body()
        now = str(int(self.clock()))
        headers = [
            (b"content-type", b"application/json"),
            (b"webhook-id", notice.id.encode()),
            (b"webhook-timestamp", now.encode()),
        ]
        if settings.secret is not None:
            signed = signature(settings.secret.get_secret_value(), notice.id, now, body)
            headers.append((b"webhook-signature", signed.encode()))
        answer = await self.client.send(
            receiver,
            method="POST",
            path=parts.path or "/",
            query=parts.query.encode(),
            headers=headers,
            tenant="",
            body=body,
        )
        try:
            await answer.read(MAX_ANSWER)
        finally:
            answer.close()
        return answer.status


def _about(notice: Notice) -> dict[str, str]:
    return {"request": notice.request, "conversation": notice.conversation}


def signature(secret: str, notice: str, timestamp: str, body: bytes) -> str:
    """A secret that begins with ``whsec_`` is base64 behind that."""
    key = secret.encode()
    if secret.startswith(ENCODED):
        with contextlib.suppress(binascii.Error):
            key = base64.b64decode(secret.removeprefix(ENCODED), validate=True)
    digest = hmac.new(key, f"{notice}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
