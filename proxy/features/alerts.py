"""Alerts about a conversation's health: a log line, a metric, and a webhook.

Each episode that begins is one POST to the webhook, made in the background, with the headers of the
Standard Webhooks specification (https://www.standardwebhooks.com): ``webhook-signature`` is ``v1,``
and the base64 of the HMAC-SHA-256 over ``id.timestamp.body``. What is not taken at the second try
is counted and forgotten.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import msgspec

from policies.health import HealthAlert
from proxy.access.destination import TENANT_SHOWN
from proxy.config.values import AlertSettings, Config, Timeouts, UpstreamSettings
from proxy.errors import ProxyError
from proxy.features.feature import Feature, Turn
from proxy.store.records import ExchangeRow
from proxy.telemetry.logs import LOG_CONTEXT, AlertLine, log_alert
from proxy.telemetry.metrics import Metrics
from proxy.upstream.client import Client
from proxy.upstream.connection import StreamBroken

log = logging.getLogger("weir.alerts")

MAX_WAITING = 256
ATTEMPTS = 2
RETRY_PAUSE = 1.0
CLOSING = 2.0
MAX_ANSWER = 4_096
GRADES = {"info": 0, "warning": 1, "critical": 2}
ENCODED = "whsec_"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An alert, and the request that it began with; ``about`` distinguishes two of a kind that
    began with the same one.
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


@dataclass(slots=True)
class Alerts(Feature):
    """Raises alerts: counts and logs them, and sends them to the webhook."""

    client: Client
    settings: AlertSettings
    metrics: Metrics
    clock: Callable[[], float] = time.time
    pause: float = RETRY_PAUSE
    _waiting: asyncio.Queue[Notice] = field(default_factory=partial(asyncio.Queue, MAX_WAITING))
    _task: asyncio.Task[None] | None = None

    def adopt(self, config: Config) -> None:
        self.settings = config.telemetry.alerts

    def on_alerts(self, turn: Turn, alerts: Sequence[HealthAlert]) -> None:
        for alert in alerts:
            notice = Notice(
                alert=alert,
                tenant=turn.tenant,
                conversation=turn.conversation or "",
                policy=turn.policy,
                request=turn.request,
            )
            self.emit(notice)

    def emit_stored(self, row: ExchangeRow) -> None:
        """Raise the alerts that began with a row, as the shared store reports them."""
        if row.health is not None:
            turn = Turn(
                request=row.id,
                tenant=row.tenant,
                model=row.model,
                policy=row.policy,
                conversation=row.name,
            )
            self.on_alerts(turn, row.health.opened)

    def emit(self, notice: Notice) -> None:
        """Log and count an alert, and have it sent to the webhook; never waits."""
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
            except Exception:  # no failure of a webhook affects a request
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
    """A secret that begins with ``whsec_`` is base64 after that prefix."""
    key = secret.encode()
    if secret.startswith(ENCODED):
        with contextlib.suppress(binascii.Error):
            key = base64.b64decode(secret.removeprefix(ENCODED), validate=True)
    digest = hmac.new(key, f"{notice}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
