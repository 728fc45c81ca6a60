"""Whether Weir is alive and ready, and its metrics.

``/healthz``: the process is alive. ``/readyz``: the store and at least one upstream can be reached.
"""

import asyncio
import ssl
from functools import cache
from urllib.parse import urlsplit

from cachetools import TTLCache
from starlette.requests import Request
from starlette.responses import Response

from proxy.config.values import UpstreamSettings
from proxy.http.request import as_json
from proxy.runtime import Runtime
from proxy.store.records import StoreError

GOOD_FOR = 5.0
MAX_UPSTREAMS = 1_000
PROBE_PATIENCE = 2.0


class Probes:
    """Whether the process is alive, whether it is ready, and its metrics."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reachable: TTLCache[str, bool] = TTLCache(MAX_UPSTREAMS, GOOD_FOR)
        self._heard: set[str] = set()
        self._asking: dict[str, asyncio.Task[bool]] = {}

    async def healthz(self, _: Request) -> Response:
        return as_json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        accept = ",".join(request.headers.getlist("accept"))
        page, kind = await asyncio.to_thread(self._runtime.telemetry.metrics.render, accept)
        return Response(page, headers={"content-type": kind})

    async def readyz(self, request: Request) -> Response:
        draining = request.state.shutdown.draining.is_set()
        store = await self._store()
        upstreams = await asyncio.gather(
            *(self._upstream(u) for u in self._runtime.config.upstreams.values())
        )
        names = self._runtime.config.upstreams
        ready = not draining and store == "ok" and any(upstreams)
        status = "draining" if draining else "not ready"
        state = {
            "status": "ready" if ready else status,
            "store": store,
            "upstreams": {
                n: "ok" if up else "unreachable" for n, up in zip(names, upstreams, strict=True)
            },
        }
        return as_json(state, status=200 if ready else 503)

    async def _store(self) -> str:
        try:
            await self._runtime.store.ping()
        except StoreError as error:
            return f"unavailable: {type(error).__name__}"
        return "failing" if self._runtime.write_queue.failing else "ok"

    async def _upstream(self, upstream: UpstreamSettings) -> bool:
        base = upstream.address
        if not base:
            return True
        known = self._reachable.get(base)
        if known is not None:
            return known
        asking = self._asking.get(base)
        # concurrent callers wait for the same answer: no key is needed to call
        if asking is None:
            asking = self._asking[base] = asyncio.create_task(self._probe(base))
            asking.add_done_callback(lambda _: self._asking.pop(base, None))
        return await asyncio.shield(asking)

    async def _probe(self, base: str) -> bool:
        answers = await _answers(base)
        if answers:
            self._heard.add(base)
        up = answers or (answers is False and base not in self._heard)
        self._reachable[base] = up
        return up


async def connects(base: str) -> bool:
    return await _answers(base) is not None


async def _answers(base: str) -> bool | None:
    """Whether an upstream answers at all, None where nothing listens.

    The system still accepts connections for a frozen one; one that never answered such a probe may
    not support it.
    """
    parts = urlsplit(base)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    answers = None
    try:
        async with asyncio.timeout(PROBE_PATIENCE):
            reader, writer = await asyncio.open_connection(
                parts.hostname, port, ssl=_handshake() if secure else None
            )
            answers = secure
            try:
                host = parts.netloc.rpartition("@")[2]
                question = (
                    f"HEAD {parts.path or '/'} HTTP/1.1\r\nHost: {host}\r\nConnection:"
                    " close\r\n\r\n"
                )
                if not secure:
                    writer.write(question.encode())
                    answers = bool(await reader.read(1))
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        pass
    return answers


@cache
def _handshake() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
