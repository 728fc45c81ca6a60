"""Requests as they are stored, as server-sent events; any replica sends those of all of them."""

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse

from proxy.http.request import ManagementRequest
from proxy.http.routes import ManagementRoute
from proxy.store.records import StoreError

POLLED_EVERY = 1.0
BEATS_EVERY = 15.0
ENDS_AFTER = 600.0
"""Seconds after which a listener has to come again, and to say again who it is."""
AT_ONCE = 50


async def live_requests(request: ManagementRequest) -> Response:
    """The caller's requests as they are stored, as server-sent events: ``request``, whose data is
    the request as JSON.

    The operator hears of everybody's. The stream ends after ten minutes; whoever wants more comes
    again.
    """
    headers = {"cache-control": "no-transform", "x-accel-buffering": "no"}
    return StreamingResponse(events(request), media_type="text/event-stream", headers=headers)


async def events(request: ManagementRequest) -> AsyncIterator[bytes]:
    store = request.store
    clock = request.runtime.planner.clock
    loop = asyncio.get_running_loop()
    begun = quiet = loop.time()
    since = clock()
    seen = set[str]()
    yield b"retry: 3000\n\n"
    while loop.time() - begun < ENDS_AFTER and not request.shutdown.draining.is_set():
        await asyncio.sleep(POLLED_EVERY)
        try:
            rows = await store.passed(request.tenant, limit=AT_ONCE, since=since)
        except StoreError:
            continue
        fresh = [row for row in reversed(rows) if row["id"] not in seen]
        # A row is stored a moment after its time: look a little behind, and remember what was told.
        since = max(since, clock() - 10 * POLLED_EVERY)
        seen = {row["id"] for row in rows}
        for row in fresh:
            yield b"event: request\ndata: " + json.dumps(row).encode() + b"\n\n"
        if fresh:
            quiet = loop.time()
        if loop.time() - quiet > BEATS_EVERY:
            quiet = loop.time()
            yield b": still here\n\n"


ROUTES = (ManagementRoute("GET", "live", live_requests),)
