"""``/healthz``: the process is alive. ``/readyz``: store and at least one upstream reachable. ``/metrics``."""

import asyncio
import contextlib
import time
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from proxy.config.values import UpstreamSettings
from proxy.errors import MethodNotAllowed
from proxy.http.request import respond, respond_error, respond_json
from proxy.runtime import Runtime
from proxy.store.errors import StoreError
from proxy.stream.receive import Receive
from proxy.stream.relay import Send
from proxy.telemetry import CONTENT_TYPE

GOOD_FOR = 5.0
PATIENCE = 2.0
READING = ("GET", "HEAD")


class HealthRoutes:
    """The ASGI application of the three routes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reachable: dict[str, tuple[float, bool]] = {}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one probe."""
        del receive
        if scope["method"] not in READING:
            error = MethodNotAllowed(f"{scope['method'][:10]} is not answered here: GET is.", allowed=READING)
            await respond_error(send, error)
            return
        if scope["path"] == "/metrics":
            page = await asyncio.to_thread(self._runtime.telemetry.metrics.render)
            await respond(send, page, kind=CONTENT_TYPE.encode())
        elif scope["path"] == "/healthz":
            await respond_json(send, {"status": "ok"})
        else:
            await self._ready(scope, send)

    async def _ready(self, scope: MutableMapping[str, Any], send: Send) -> None:
        shutdown = scope.get("state", {}).get("shutdown")
        draining = shutdown is not None and shutdown.draining.is_set()
        store = await self._store()
        upstreams = await asyncio.gather(*(self._upstream(u) for u in self._runtime.config.upstreams.values()))
        names = self._runtime.config.upstreams
        ready = not draining and store == "ok" and any(upstreams)
        state = {
            "status": "ready" if ready else "draining" if draining else "not ready",
            "store": store,
            "upstreams": {n: "ok" if up else "unreachable" for n, up in zip(names, upstreams, strict=True)},
        }
        await respond_json(send, state, status=200 if ready else 503)

    async def _store(self) -> str:
        try:
            await self._runtime.store.ping()
        except StoreError as error:
            return f"unavailable: {type(error).__name__}"
        return "failing" if self._runtime.settler.failing else "ok"

    async def _upstream(self, upstream: UpstreamSettings) -> bool:
        base = upstream.base_url or upstream.api_base
        if base is None:
            return True
        known = self._reachable.get(base)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        up = await _connects(base)
        self._reachable[base] = (time.monotonic() + GOOD_FOR, up)
        return up


async def _connects(base: str) -> bool:
    parts = urlsplit(base)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, port), PATIENCE)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
