"""A compaction that the client requests, made and answered by Weir."""

import time

import msgspec

from proxy.exchange.exchange import Request
from proxy.exchange.relay import JSON, Relay
from proxy.exchange.reserve import reserve
from proxy.features.compaction import (
    COMPACT_PATH,
    compaction_on,
    is_weirs,
    lacks_compaction,
    make_compaction,
)
from proxy.stream import EVENT_STREAM, UpstreamResponse
from proxy.wire.compactions import as_compacted


async def answer_compaction(
    relay: Relay, request: Request, received: UpstreamResponse | None = None
) -> bool:
    """Whether Weir has made and answered the compaction that a request needs.

    Weir makes it where the upstream is known to make none, or has just said so in what was
    ``received``.
    """
    runtime = relay.runtime
    exchange = relay.exchange
    plan_request = request.plan_request
    path = exchange.route.path
    upstream = request.destination.upstream.name
    if received is not None:
        is_due = lacks_compaction(received, path)
    else:
        is_due = is_weirs(request.chat, upstream, path, unsupported=runtime.unsupported)
    if not is_due or plan_request is None:
        return False
    recognized = await runtime.planner.recognize(plan_request)
    if recognized is None:
        return False
    exchange.plan = msgspec.structs.replace(
        exchange.plan, body=request.chat.body, recognized=recognized
    )
    exchange.identify()
    await reserve(runtime, exchange, request, recognized)
    made = await make_compaction(
        runtime.planner,
        plan_request,
        recognized,
        secret=runtime.secret,
        name=exchange.id,
        keeps=request.destination.path.endswith(COMPACT_PATH),
    )
    compactions = request.chat.codec.compactions
    if made is None or compactions is None:
        return False
    if received is not None:
        runtime.unsupported[upstream, compaction_on(path)] = None
        received.answer.close()
    exchange.compacted = True
    exchange.ready = exchange.ready or time.perf_counter()
    body = as_compacted(made) if path == COMPACT_PATH else compactions.answer(made)
    await relay.respond(body, kind=EVENT_STREAM if request.chat.stream else JSON)
    return True
