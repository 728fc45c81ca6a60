"""Sinks of alerts: a webhook that is called once, off the way, signed, and may be as broken as it likes."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import io
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from pydantic import SecretStr

from policies.health import HealthAlert, Level
from proxy.config.values import AlertSettings
from proxy.features.alerts import MAX_WAITING, Alerts, Notice, signature
from proxy.telemetry.logs import AlertLine, QueuedLog, log_alert
from proxy.telemetry.metrics import Metrics
from proxy.upstream.client import Client

SECRET = "a secret of sixteen"


@dataclass(slots=True)
class Webhook:
    """A server that keeps what it is sent and answers with the statuses that it is given, then 204."""

    statuses: list[int] = field(default_factory=list)
    silent: bool = False
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    serving: set["asyncio.Task[None] | None"] = field(default_factory=set)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        size = int(headers["content-length"])
        lines = dict(line.split(": ", 1) for line in head[1:] if line)
        self.got.append((head[0], {k.lower(): v for k, v in lines.items()}, await reader.readexactly(size)))
        if self.silent:
            await self.over.wait()
        status = self.statuses.pop(0) if self.statuses else 204
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def webhook(*statuses: int, silent: bool = False) -> AsyncIterator[Webhook]:
    hook = Webhook(list(statuses), silent)
    server = await asyncio.start_server(hook.answer, "127.0.0.1", 0)
    hook.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hooks/weir?team=a"
    try:
        yield hook
    finally:
        hook.over.set()
        server.close()
        await asyncio.gather(*(task for task in hook.serving if task is not None))


@asynccontextmanager
async def sinks(url: str | None, metrics: Metrics, **options: object) -> AsyncIterator[Alerts]:
    client = Client(instance="test")
    settings = AlertSettings(webhook=None if url is None else SecretStr(url), **options)  # type: ignore[arg-type]
    alerts = Alerts(client, settings, metrics, clock=lambda: 1_760_000_000.5, pause=0.01)
    try:
        yield alerts
    finally:
        await alerts.close()
        await client.close()


def notice(number: int = 1, level: Level = "warning") -> Notice:
    alert = HealthAlert("loop", level, "anomaly", 1000.0 + number, 3.0, 3.0, "the same call 3 times in a row")
    return Notice(
        alert=alert, tenant="0123456789abcdef", conversation="support\n4711", policy="p", request=f"req_{number}"
    )


def counted(metrics: Metrics, name: str) -> list[str]:
    return [line for line in metrics.render()[0].decode().splitlines() if line.startswith(name)]


@pytest.mark.requirement("A0.124", "P15")
async def test_a_webhook_gets_each_alert_once_signed_and_with_its_facts() -> None:
    metrics = Metrics()
    async with webhook() as hook, sinks(hook.url, metrics, secret=SecretStr(SECRET)) as alerts:
        alerts.emit(notice(1))
        alerts.emit(notice(2, "critical"))
        await alerts.close()

    assert [json.loads(body)["data"]["request"] for _, _, body in hook.got] == ["req_1", "req_2"]
    line, headers, body = hook.got[0]
    assert line == "POST /hooks/weir?team=a HTTP/1.1"
    said = json.loads(body)
    assert (said["type"], said["id"], said["at"]) == ("weir.alert", "alert_1_loop", 1001.0)
    assert said["data"] == {
        "kind": "loop", "level": "warning", "class": "anomaly", "value": 3.0, "threshold": 3.0, "policy": "p",
        "said": "the same call 3 times in a row", "conversation": "support\n4711", "tenant": "01234567", "request": "req_1",
    }  # fmt: skip
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == ("alert_1_loop", "1760000000")
    digest = hmac.new(SECRET.encode(), b"alert_1_loop.1760000000." + body, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    assert sorted(counted(metrics, "weir_alerts_total")) == [
        'weir_alerts_total{weir_alert_class="anomaly",weir_alert_kind="loop",weir_alert_level="critical"} 1.0',
        'weir_alerts_total{weir_alert_class="anomaly",weir_alert_kind="loop",weir_alert_level="warning"} 1.0',
    ]
    assert not counted(metrics, "weir_alerts_undelivered_total")


@pytest.mark.parametrize(
    ("statuses", "calls", "lost"),
    [((500,), 2, 0), ((429,), 2, 0), ((500, 503), 2, 1), ((404,), 1, 1), ((301, 301), 2, 1), ((200,), 1, 0)],
)
async def test_a_webhook_is_called_again_once_where_that_may_help(
    statuses: tuple[int, ...], calls: int, lost: int
) -> None:
    metrics = Metrics()
    async with webhook(*statuses) as hook, sinks(hook.url, metrics) as alerts:
        alerts.emit(notice())
        await alerts.close()
    assert len(hook.got) == calls
    assert len({headers["webhook-id"] for _, headers, _ in hook.got}) == 1
    failed = 'weir_alerts_undelivered_total{weir_reason="failed"} 1.0'
    assert counted(metrics, "weir_alerts_undelivered") == ([failed] if lost else [])


async def test_what_waits_is_bounded_and_the_rest_is_counted() -> None:
    metrics = Metrics()
    async with webhook(silent=True) as hook, sinks(hook.url, metrics) as alerts:
        for number in range(MAX_WAITING + 30):
            alerts.emit(notice(number))
        assert counted(metrics, "weir_alerts_undelivered") == [
            'weir_alerts_undelivered_total{weir_reason="dropped"} 30.0'
        ]
        assert not hook.got


def test_a_secret_of_the_specification_is_base64() -> None:
    # the specification's own example
    signed = signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}'
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.requirement("P15")
@pytest.mark.parametrize("form", ["line", "json"])
def test_the_log_line_has_the_alerts_facts_and_cannot_be_forged(form: str) -> None:
    line = AlertLine(
        level="critical", category="overflow", alert="utilization", value=0.93, threshold=0.9, conversation="a\nctx b",
        tenant="0123", request="req_1", said="above 90%",
    )  # fmt: skip
    stream = io.StringIO()
    handler = QueuedLog(stream, form="json" if form == "json" else "line")
    logger = logging.getLogger(f"weir.alerts.{form}")
    logger.propagate = False
    logger.addHandler(handler)
    log_alert(logger, line)
    handler.stop()
    [written] = stream.getvalue().splitlines()
    if form == "json":
        said = json.loads(written)
        assert (said["message"], said["level"], said["severity"]) == ("alert", "error", "critical")
        assert (said["alert"], said["value"], said["conversation"]) == ("utilization", 0.93, "a\nctx b")
    else:
        assert written.endswith(
            "ERROR   weir.alerts.line alert level=critical category=overflow alert=utilization value=0.93 threshold=0.9 "
            'conversation="a\\nctx b" tenant=0123 request=req_1 said="above 90%"'
        )
