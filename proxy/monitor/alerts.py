"""Where alerts go: a line in the log, a metric, and a webhook that is called off the way of any request.

A webhook gets one POST for each episode that begins, with the headers of the Standard Webhooks specification
(https://www.standardwebhooks.com): ``webhook-id``, ``webhook-timestamp``, and with a secret ``webhook-signature``,
which is ``v1,`` and the base64 of the HMAC-SHA-256 over ``id.timestamp.body``. What it does not take at the second try
is counted and forgotten: a sink that is down, slow or wrong changes nothing.
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
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from policies.quality.health import HealthAlert
from proxy.access.destination import TENANT_SHOWN
from proxy.config import AlertSettings
from proxy.errors import ProxyError
from proxy.store.records import ExchangeRow
from proxy.telemetry import LOG_CONTEXT, AlertLine, Metrics, log_alert
from proxy.telemetry.metrics import ALERTS, ALERTS_UNDELIVERED
from proxy.upstream.client import Client, StreamBroken, Target

log = logging.getLogger("weir.alerts")

MAX_WAITING = 256
ATTEMPTS = 2
RETRY_PAUSE = 1.0
CLOSING = 2.0
MAX_ANSWER = 4_096
GRADES = {"info": 0, "warning": 1, "critical": 2}
ENCODED = "whsec_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One alert, and whose it is; ``tenant`` is the hash of the key, ``request`` the id of the one it began with."""

    alert: HealthAlert
    tenant: str
    conversation: str
    policy: str
    request: str

    @property
    def id(self) -> str:
        """What tells this episode from every other."""
        return f"alert_{self.request.removeprefix('req_')}_{self.alert.kind}"

    def body(self) -> bytes:
        """The JSON that a webhook gets."""
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
        return json.dumps({"type": "weir.alert", "id": self.id, "at": alert.at, "data": data}).encode()


class Alerts:
    """Tells the sinks; one task, begun with the first alert for a webhook and ended by :meth:`close`."""

    def __init__(
        self,
        client: Client,
        settings: AlertSettings,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.time,
        pause: float = RETRY_PAUSE,
    ) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._pause = pause
        self._waiting: asyncio.Queue[Notice] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def adopt(self, settings: AlertSettings) -> None:
        """Go on with another webhook."""
        self._settings = settings

    def tell(self, notice: Notice) -> None:
        """Log and count an alert, and have the webhook called soon."""
        alert = notice.alert
        self._metrics.add(ALERTS, alert.level, alert.category, alert.kind)
        line = AlertLine(
            level=alert.level,
            category=alert.category,
            alert=alert.kind,
            value=alert.value,
            threshold=alert.limit,
            conversation=notice.conversation,
            tenant=notice.tenant[:TENANT_SHOWN],
            request=notice.request,
            said=alert.said,
        )
        log_alert(log, line)
        settings = self._settings
        if settings.webhook is None or GRADES[alert.level] < GRADES[settings.level]:
            return
        try:
            self._waiting.put_nowait(notice)
        except asyncio.QueueFull:
            self._metrics.add(ALERTS_UNDELIVERED, "dropped")
            return
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="weir-alerts")

    def tell_stored(self, row: ExchangeRow) -> None:
        """Tell what began with an exchange by the word of a store that several servers share: one of them does."""
        for alert in row.health.opened if row.health is not None else ():
            notice = Notice(alert=alert, tenant=row.tenant, conversation=row.name, policy=row.policy, request=row.id)
            self.tell(notice)

    async def close(self) -> None:
        """Stop, having given the webhook two seconds for what still waits."""
        task, self._task = self._task, None
        if task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await self._waiting.join()
        while not self._waiting.empty():
            self._waiting.get_nowait()
            self._metrics.add(ALERTS_UNDELIVERED, "dropped")
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
                self._metrics.add(ALERTS_UNDELIVERED, "failed")
            finally:
                self._waiting.task_done()

    async def _deliver(self, notice: Notice) -> None:
        """Call the webhook, a second time where that may help."""
        why = "no webhook"
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._pause)
            settings = self._settings
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
        self._metrics.add(ALERTS_UNDELIVERED, "failed")
        log.warning("the webhook did not take alert %s: %s", notice.id, why, extra=_about(notice))

    async def _post(self, notice: Notice, url: str, settings: AlertSettings) -> int:
        parts = urlsplit(url)
        target = Target(
            name="webhook",
            base_url=f"{parts.scheme}://{parts.netloc}",
            connect=settings.seconds,
            first_byte=settings.seconds,
            idle=settings.seconds,
        )
        body, now = notice.body(), str(int(self._clock()))
        headers = [
            (b"content-type", b"application/json"),
            (b"webhook-id", notice.id.encode()),
            (b"webhook-timestamp", now.encode()),
        ]
        if settings.secret is not None:
            signed = signature(settings.secret.get_secret_value(), notice.id, now, body)
            headers.append((b"webhook-signature", signed.encode()))
        answer = await self._client.send(
            target,
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
    """What the log says of the request beside the message."""
    return {"request": notice.request, "conversation": notice.conversation}


def signature(secret: str, notice: str, timestamp: str, body: bytes) -> str:
    """The value of ``webhook-signature``; a secret that begins with ``whsec_`` is base64 behind that."""
    key = secret.encode()
    if secret.startswith(ENCODED):
        with contextlib.suppress(binascii.Error):
            key = base64.b64decode(secret.removeprefix(ENCODED), validate=True)
    digest = hmac.new(key, f"{notice}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
