"""Compactions that a client asks for, or that the policy leaves to the provider: native where there is one.

A client asks by ``/responses/compact``, by a ``compaction_trigger``, by ``compaction: {type: summarize}`` or by an edit
that pauses after its compaction. Where the upstream makes none, Weir does (experimental): the text is what its own
compaction would be, of the whole history.
"""

import json
import logging
import math
from typing import Any

import msgspec

from policies.planner import compacted
from policies.settings import ContextSettings, Mode
from policies.summary.material import inside
from proxy.config.values import UpstreamSettings
from proxy.effects.perform import drive, step
from proxy.exchange.asked import COMPACT, EDITS
from proxy.exchange.request import COMPACT_PATH, Request, is_native
from proxy.planning.values import Plan, Recognized
from proxy.runtime import Runtime
from proxy.stream import UpstreamResponse
from proxy.upstream.providers import has_no_route
from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import ClientRequest
from proxy.wire.compaction import COMPACTION, Made, seal
from proxy.wire.raw import replace_fields, write_value
from proxy.wire.responses import RESPONSES

log = logging.getLogger("weir.exchange")

COMPACTS = b"compact-2026-01-12"
LEAST_TRIGGER = 50_000  # tokens (platform.claude.com, "Compaction")
NEAR = 0.9
"""Share of the size that compacts from which on a request asks for it: below nothing is added to it."""
_REFUSALS = frozenset({400, 422, 501})
_UNKNOWN = (b"compaction", b"cannot determine type")
"""Of an item in what vLLM and others say of a type that they do not know; the second is llama.cpp's."""


def lacks_compaction(received: UpstreamResponse, path: str) -> bool:
    status, body = received.answer.status, received.body or b""
    if path.endswith(COMPACT_PATH):
        return has_no_route(status, body, COMPACT_PATH)
    return status in _REFUSALS and any(words in body.lower() for words in _UNKNOWN)


def compaction_on(path: str) -> str:
    return path if path == COMPACT_PATH else f"{COMPACTION} {path}"


def is_weirs(runtime: Runtime, request: Request, path: str) -> bool:
    """Whether Weir makes the compaction that a request asks for, without asking the upstream for one.

    Only Anthropic makes those of Messages; others would answer as if they had not been asked.
    """
    lacks = (request.destination.upstream.name, compaction_on(path)) in runtime.lacking
    return lacks or request.chat.codec is MESSAGES


async def make_compaction(runtime: Runtime, request: Request, recognized: Recognized, *, name: str) -> Made | None:
    edits, budget = None if request.asked is None else request.asked.edits, recognized.limits.budget
    due = edits.compact_at if edits is not None and edits.pauses else None
    if due is not None and budget.estimate(recognized.transcript.tokens) < due:
        return None
    try:
        return await _made(runtime, request, recognized, name=name)
    except Exception:
        log.exception("a compaction could not be made, the upstream's answer goes on")
        return None


async def _made(runtime: Runtime, request: Request, recognized: Recognized, *, name: str) -> Made:
    asked, budget = request.asked, recognized.limits.budget
    assert asked is not None  # noqa: S101 - whoever asks has looked
    transcript, observes = recognized.transcript, asked.settings.observes
    users = [at for at, each in enumerate(transcript.messages) if at >= transcript.head and each.role == "user"]
    keeps = request.destination.path.endswith(COMPACT_PATH)
    shown = [at for at in users if keeps and inside(transcript.read(at).text) is None]
    flow = compacted(
        transcript,
        settings=asked.settings,
        budget=budget,
        known=recognized.thread.known_at(recognized.length, observed=observes),
        counter=asked.counter,
        summarizer_input=asked.summarizer_input,
        readings=runtime.planner.readings,
        shown=shown,
    )
    text = await drive(flow, step(flow), asked.ask, asked.span)
    return Made(
        request=request.chat,
        text=text,
        sealed=seal(text, tenant=asked.tenant, secret=runtime.secret),
        before=budget.estimate(transcript.tokens),
        after=budget.estimate(asked.counter.count(text)),
        at=int(runtime.planner.clock()),
        name=f"weir{name.removeprefix('req_')}",
    )


def natively(request: Request, plan: Plan) -> Plan:
    """The plan asking the provider to compact, where the policy leaves it to the provider and it can.

    Nothing is asked twice: what the client says itself holds.
    """
    asked, recognized, chat = request.asked, plan.recognized, request.client
    if asked is None or recognized is None or not _may_ask(asked.settings, chat, request.destination.upstream):
        return plan
    budget = recognized.limits.budget
    size = budget.estimate(recognized.policy_limits.trigger)
    size = max(size, LEAST_TRIGGER) if chat.codec is MESSAGES else size
    if budget.estimate(recognized.transcript.tokens) < math.floor(NEAR * size):
        return plan
    edits: Any = [{"type": COMPACTION, "compact_threshold": size}]
    if chat.codec is MESSAGES:
        before = chat.value(EDITS) or {}
        trigger = {"type": "input_tokens", "value": size}
        edits = {**before, "edits": [*before.get("edits", ()), {"type": COMPACT, "trigger": trigger}]}
    body = replace_fields(plan.body, chat.fields, {EDITS: write_value(edits)})
    betas = (*plan.betas, COMPACTS) if chat.codec is MESSAGES else plan.betas
    return msgspec.structs.replace(plan, body=body, betas=betas, native=True)


def _may_ask(settings: ContextSettings, chat: ClientRequest, upstream: UpstreamSettings) -> bool:
    if settings.compaction != "provider" or settings.mode is not Mode.ENFORCE or settings.enforce == "observe":
        return False
    if chat.codec not in (RESPONSES, MESSAGES) or not is_native(chat, upstream) or COMPACTION in chat.fields:
        return False
    said = chat.value(EDITS)
    return not said or (isinstance(said, dict) and COMPACT not in json.dumps(said))
