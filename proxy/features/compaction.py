"""Compactions: what a client requests, native where there is one, and else Weir's own.

A client requests one by ``/responses/compact``, by a ``compaction_trigger``, by ``compaction:
{type: summarize}`` or by an edit that pauses after its compaction; or the policy leaves it to the
provider. Where the upstream makes none, Weir does (experimental): the text is what its own
compaction would be, of the whole history.

Weir's is an item, or a block, in which its content is sealed, so it is valid as long as its client
has it, in every process, whatever is stored. On the way up a message with that text takes its
place: no upstream could read it.
"""

import base64
import hmac
import json
import logging
import math
import zlib
from collections.abc import Collection

import msgspec

from policies.effects import step
from policies.planner import compacted
from policies.settings import ContextSettings, Mode
from policies.summary.material import inside
from proxy.config.values import UpstreamSettings
from proxy.effects.perform import drive
from proxy.errors import InvalidRequest
from proxy.planning.planner import Planner
from proxy.planning.values import Plan, PlanRequest, Recognized
from proxy.stream import UpstreamResponse
from proxy.telemetry.names import service_at
from proxy.upstream.client import has_no_route
from proxy.wire.codec import OWN, ClientRequest, Made, Unseal, array_of
from proxy.wire.compactions import COMPACT, COMPACTION, EDITS
from proxy.wire.raw import replace_fields, split_array, write_value

log = logging.getLogger("weir.exchange")

COMPACT_PATH = "/responses/compact"
MAX_TEXT = 4 * 2**20
NEAR = 0.9
"""Share of the compaction size from which on a request includes it; smaller ones are unchanged."""
_REFUSALS = frozenset({400, 422, 501})
_UNKNOWN = (b"compaction", b"cannot determine type")
"""Of an item in what vLLM and others say of a type that they do not know; the second is
llama.cpp's.
"""


def lacks_compaction(received: UpstreamResponse, path: str) -> bool:
    status = received.answer.status
    body = received.body or b""
    if path.endswith(COMPACT_PATH):
        return has_no_route(status, body, COMPACT_PATH)
    return status in _REFUSALS and any(words in body.lower() for words in _UNKNOWN)


def compaction_on(path: str) -> str:
    return path if path == COMPACT_PATH else f"{COMPACTION} {path}"


def is_weirs(
    chat: ClientRequest, upstream: str, path: str, *, unsupported: Collection[tuple[str, str]]
) -> bool:
    """Whether Weir makes the compaction that a request needs, without requesting one from the
    upstream.

    Only Anthropic makes those of Messages; others would answer as if none had been requested.
    """
    return (upstream, compaction_on(path)) in unsupported or (
        chat.codec.compactions is not None and chat.codec.compactions.are_ignored_elsewhere
    )


async def make_compaction(
    planner: Planner,
    plan_request: PlanRequest,
    recognized: Recognized,
    *,
    secret: bytes,
    name: str,
    keeps: bool,
) -> Made | None:
    edits = plan_request.edits
    budget = recognized.limits.budget
    transcript = recognized.transcript
    due = edits.compact_at if edits is not None and edits.pauses else None
    if due is not None and budget.estimate(transcript.tokens) < due:
        return None
    try:
        users = [
            at
            for at, each in enumerate(transcript.messages)
            if at >= transcript.head and each.role == "user"
        ]
        flow = compacted(
            transcript,
            settings=plan_request.settings,
            budget=budget,
            known=recognized.known(observed=plan_request.settings.observes),
            counter=plan_request.counter,
            summarizer_input=plan_request.summarizer_input,
            readings=planner.readings,
            shown=[at for at in users if keeps and inside(transcript.read(at).text) is None],
        )
        text = await drive(flow, step(flow), plan_request.ask, plan_request.span)
        return Made(
            request=plan_request.request,
            text=text,
            sealed=seal(text, tenant=plan_request.tenant, secret=secret),
            before=budget.estimate(transcript.tokens),
            after=budget.estimate(plan_request.counter.count(text)),
            at=int(planner.clock()),
            name=f"weir{name.removeprefix('req_')}",
        )
    except Exception:
        log.exception("a compaction could not be made, the upstream's answer goes on")
        return None


def natively(
    plan_request: PlanRequest, client: ClientRequest, upstream: UpstreamSettings, plan: Plan
) -> Plan:
    """The plan requesting compaction from the provider, where the policy leaves it to the provider
    and it can.

    Nothing is requested twice: the client's own request takes precedence.
    """
    recognized = plan.recognized
    compactions = client.codec.compactions
    if recognized is None or compactions is None:
        return plan
    if not _may_ask(plan_request.settings, client, upstream):
        return plan
    budget = recognized.limits.budget
    size = budget.estimate(recognized.policy_limits.trigger)
    size = max(size, compactions.least)
    if budget.estimate(recognized.transcript.tokens) < math.floor(NEAR * size):
        return plan
    edits, betas = compactions.request(client.fields, size)
    body = replace_fields(plan.body, client.fields, {EDITS: write_value(edits)})
    return msgspec.structs.replace(plan, body=body, betas=(*plan.betas, *betas), native=True)


def _may_ask(settings: ContextSettings, chat: ClientRequest, upstream: UpstreamSettings) -> bool:
    if settings.compaction != "provider" or settings.mode is not Mode.ENFORCE:
        return False
    if not is_native(chat, upstream) or COMPACTION in chat.fields:
        return False
    said = chat.value(EDITS)
    return not said or (isinstance(said, dict) and COMPACT not in json.dumps(said))


def seal(text: str, *, tenant: str, secret: bytes) -> str:
    data = text.encode("utf-8", "replace")
    return (
        OWN.decode()
        + _mark(data, tenant, secret)
        + ":"
        + base64.urlsafe_b64encode(zlib.compress(data)).decode()
    )


def unseal(sealed: str, *, tenant: str, secret: bytes) -> str:
    """The text again. Raises InvalidRequest where it is another tenant's, or not as it was
    given.
    """
    mark, _, packed = sealed.removeprefix(OWN.decode()).partition(":")
    try:
        data = zlib.decompressobj().decompress(base64.urlsafe_b64decode(packed.encode()), MAX_TEXT)
    except (ValueError, zlib.error):
        data = b""
    if not hmac.compare_digest(mark.encode(), _mark(data, tenant, secret).encode()):
        raise InvalidRequest(
            "This compaction was made for another key, or was changed since: it can only be sent"
            " back as it was given, with the key that it was given to. Send the history that it"
            " stands for.",
            param="encrypted_content",
        )
    return data.decode()


def _mark(data: bytes, tenant: str, secret: bytes) -> str:
    return hmac.digest(secret, tenant.encode() + b"\0" + data, "sha256").hex()[:32]


def opened(request: ClientRequest, unseal: Unseal) -> ClientRequest:
    """The request with a message in the place of Weir's compaction; itself where it has none."""
    codec = request.codec
    if codec.compactions is None:
        return request
    elements = split_array(request.fields.get(codec.array, b"[]")) or ()
    new = codec.compactions.opened(elements, unseal)
    if new is None:
        return request
    return codec.parse(replace_fields(request.body, request.fields, {codec.array: array_of(new)}))


def is_native(chat: ClientRequest, upstream: UpstreamSettings) -> bool:
    known = chat.codec.providers
    return (
        bool(known) and service_at(upstream.address, upstream.name, upstream.provider)[0] in known
    )
