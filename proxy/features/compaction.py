"""Compactions: what a client asks for, native where there is one, and else Weir's own.

A client asks by ``/responses/compact``, by a ``compaction_trigger``, by ``compaction: {type:
summarize}`` or by an edit that pauses after its compaction; or the policy leaves it to the
provider. Where the upstream makes none, Weir does (experimental): the text is what its own
compaction would be, of the whole history.

Weir's is an item, or a block, in which what it stands for is sealed, so it holds as long as its
client has it, in every process, whatever is stored. On the way up a message with that text takes
its place: no upstream could read it.
"""

import base64
import hmac
import json
import logging
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from policies.effects import step
from policies.planner import compacted
from policies.settings import ClientEdits, ContextSettings, Mode
from policies.summary.material import inside
from proxy.config.values import UpstreamSettings
from proxy.effects.perform import drive
from proxy.errors import InvalidRequest
from proxy.planning.planner import Planner
from proxy.planning.values import Plan, PlanRequest, Recognized
from proxy.stream import UpstreamResponse
from proxy.telemetry.names import service_at
from proxy.upstream.client import has_no_route
from proxy.wire.anthropic import MESSAGES, raw_blocks, with_content
from proxy.wire.codec import OWN, ClientRequest, array_of, first_object, message_of
from proxy.wire.raw import Raw, named_event, read_value, replace_fields, split_array, write_value
from proxy.wire.responses import RESPONSES

log = logging.getLogger("weir.exchange")

COMPACTION = "compaction"
MAX_TEXT = 4 * 2**20
SAID = frozenset({"user", "system", "developer"})
DECLARES = frozenset({"additional_tools", "configuration_update"})
EDITS = "context_management"
RESULTS = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
COMPACT = "compact_20260112"
# what Anthropic does where the client leaves them out
RESULTS_AT = 100_000
COMPACT_AT = 150_000
KEPT = 3
COMPACTS = b"compact-2026-01-12"
LEAST_TRIGGER = 50_000  # tokens (platform.claude.com, "Compaction")
NEAR = 0.9
"""Share of the size that compacts from which on a request asks for it: below nothing is added to
it.
"""
_REFUSALS = frozenset({400, 422, 501})
_UNKNOWN = (b"compaction", b"cannot determine type")
"""Of an item in what vLLM and others say of a type that they do not know; the second is
llama.cpp's.
"""

Unseal = Callable[[str], str]


class Made(NamedTuple):
    """A compaction to be given: ``before`` and ``after`` are tokens of the history and of the text,
    ``at`` is s.
    """

    request: ClientRequest
    text: str
    sealed: str
    before: int
    after: int
    at: int
    name: str


def client_edits(fields: Mapping[str, Raw]) -> ClientEdits | None:
    """What the client asks to have taken out of its request by Anthropic's ``context_management``.

    None where it asks for nothing, or for something that is not known here: that is the upstream's
    to judge.
    """
    field = read_value(fields[EDITS]) if EDITS in fields else None
    if isinstance(field, list):
        return _of_responses(field)
    edits = field.get("edits") if isinstance(field, dict) else None
    if not isinstance(edits, list) or not edits:
        return None
    values: dict[str, Any] = {}
    for edit in edits:
        read = _EDITS.get(str(edit.get("type"))) if isinstance(edit, dict) else None
        if read is None:
            return None
        values |= read(edit)
    return ClientEdits(**values)


def _of_responses(field: list[Any]) -> ClientEdits | None:
    sizes = [
        each.get("compact_threshold")
        for each in field
        if isinstance(each, dict) and each.get("type") == COMPACTION
    ]
    size = sizes[0] if len(sizes) == len(field) == 1 else None
    return (
        ClientEdits(compact_at=size)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0
        else None
    )


def _results(edit: Mapping[str, Any]) -> dict[str, Any]:
    trigger = edit.get("trigger")
    excluded = edit.get("exclude_tools")
    by_uses = isinstance(trigger, dict) and trigger.get("type") == "tool_uses"
    return {
        "results_over" if by_uses else "results_at": _number(trigger, RESULTS_AT),
        "keep": _number(edit.get("keep"), KEPT),
        "at_least": _number(edit.get("clear_at_least"), 0),
        "exclude": (
            frozenset(str(name) for name in excluded) if isinstance(excluded, list) else frozenset()
        ),
    }


def _thinking(edit: Mapping[str, Any]) -> dict[str, Any]:
    return {"thinking": None if edit.get("keep") == "all" else _number(edit.get("keep"), 1)}


def _compact(edit: Mapping[str, Any]) -> dict[str, Any]:
    pauses = edit.get("pause_after_compaction") is True
    return {"compact_at": _number(edit.get("trigger"), COMPACT_AT), "pauses": pauses}


_EDITS = {RESULTS: _results, THINKING: _thinking, COMPACT: _compact}


def _number(value: object, default: int) -> int:
    number = value.get("value") if isinstance(value, dict) else None
    return (
        number
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0
        else default
    )


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
    """Whether Weir makes the compaction that a request asks for, without asking the upstream for
    one.

    Only Anthropic makes those of Messages; others would answer as if they had not been asked.
    """
    return (upstream, compaction_on(path)) in unsupported or chat.codec is MESSAGES


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
    """The plan asking the provider to compact, where the policy leaves it to the provider and it
    can.

    Nothing is asked twice: what the client says itself holds.
    """
    recognized = plan.recognized
    if recognized is None or not _may_ask(plan_request.settings, client, upstream):
        return plan
    budget = recognized.limits.budget
    size = budget.estimate(recognized.policy_limits.trigger)
    size = max(size, LEAST_TRIGGER) if client.codec is MESSAGES else size
    if budget.estimate(recognized.transcript.tokens) < math.floor(NEAR * size):
        return plan
    edits: Any = [{"type": COMPACTION, "compact_threshold": size}]
    if client.codec is MESSAGES:
        before = client.value(EDITS) or {}
        trigger = {"type": "input_tokens", "value": size}
        edits = {
            **before,
            "edits": [*before.get("edits", ()), {"type": COMPACT, "trigger": trigger}],
        }
    body = replace_fields(plan.body, client.fields, {EDITS: write_value(edits)})
    betas = (*plan.betas, COMPACTS) if client.codec is MESSAGES else plan.betas
    return msgspec.structs.replace(plan, body=body, betas=betas, native=True)


def _may_ask(settings: ContextSettings, chat: ClientRequest, upstream: UpstreamSettings) -> bool:
    if settings.compaction != "provider" or settings.mode is not Mode.ENFORCE:
        return False
    if (
        chat.codec not in (RESPONSES, MESSAGES)
        or not is_native(chat, upstream)
        or COMPACTION in chat.fields
    ):
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
    codec = request.codec
    elements = split_array(request.fields.get(codec.array, b"[]")) or ()
    place = _items if codec is RESPONSES else _messages
    new = place(elements, unseal)
    if new is None:
        return request
    return codec.parse(replace_fields(request.body, request.fields, {codec.array: array_of(new)}))


def _text_of(block: object, unseal: Unseal) -> str | None:
    sealed = (
        block.get("encrypted_content")
        if isinstance(block, dict) and block.get("type") == COMPACTION
        else None
    )
    return unseal(sealed) if isinstance(sealed, str) and sealed.startswith(OWN.decode()) else None


def _items(elements: Sequence[Raw], unseal: Unseal) -> Sequence[Raw] | None:
    """Before a compaction only what others than the model said, and what they declared, is read."""
    for at in range(len(elements) - 1, -1, -1):
        text = _text_of(first_object(elements[at]), unseal) if OWN in bytes(elements[at]) else None
        if text is not None:
            said = [raw for raw in elements[:at] if _stays(first_object(raw))]
            return [*said, RESPONSES.own(text, {}, role="user"), *elements[at + 1 :]]
    return None


def _stays(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in DECLARES or (kind == "message" and item.get("role") in SAID)


def _messages(elements: Sequence[Raw], unseal: Unseal) -> Sequence[Raw] | None:
    """Before a compaction nothing is read; its text begins a turn of the user's."""
    for at in range(len(elements) - 1, -1, -1):
        raw = elements[at]
        blocks = raw_blocks(raw) if OWN in bytes(raw) else ()
        for place in range(len(blocks) - 1, -1, -1):
            text = _text_of(read_value(blocks[place]), unseal)
            if text is None:
                continue
            own = write_value({"type": "text", "text": text})
            rest = blocks[place + 1 :]
            later = elements[at + 1 :]
            if rest and first_object(raw).get("role") == "user":
                return [with_content(raw, array_of([own, *rest])), *later]
            if rest:
                return [
                    message_of("user", array_of([own])),
                    with_content(raw, array_of(rest)),
                    *later,
                ]
            if later and first_object(later[0]).get("role") == "user":
                return [with_content(later[0], array_of([own, *raw_blocks(later[0])])), *later[1:]]
            return [message_of("user", array_of([own])), *later]
    return None


def as_compacted(made: Made) -> bytes:
    elements = split_array(made.request.fields.get("input", b"[]"))
    if elements is None:
        elements = (message_of("user", bytes(made.request.fields["input"])),)
    kept = [_as_given(item) for item in map(first_object, elements) if _stays(item)]
    kept = [item for item in kept if inside(_first_text(item)) is None]
    named = {"id": f"resp_{made.name}", "object": "response.compaction", "created_at": made.at}
    return write_value({**named, "output": [*kept, _item(made)], "usage": _usage(made)})


def _as_given(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if item.get("type", "message") != "message":
        return dict(item)
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"status": "completed", **item, "type": "message", "content": parts}


def _first_text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    first = content[0] if isinstance(content, list) and content else None
    return str(first.get("text") or "") if isinstance(first, dict) else ""


def _item(made: Made) -> dict[str, object]:
    return {"type": COMPACTION, "id": f"cmp_{made.name}", "encrypted_content": made.sealed}


def _usage(made: Made) -> dict[str, object]:
    return {
        "input_tokens": made.before,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": made.after,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": made.before + made.after,
    }


def as_answer(made: Made) -> bytes:
    events = _response(made) if made.request.codec is RESPONSES else _message(made)
    if not made.request.stream:
        whole = events[-1]["response"] if made.request.codec is RESPONSES else events[0]["message"]
        return write_value(whole)
    if made.request.codec is RESPONSES:
        events = [{**event, "sequence_number": n} for n, event in enumerate(events)]
    else:
        begun = {**events[0]["message"], "content": [], "stop_reason": None}
        events = [{"type": "message_start", "message": begun}, *events[1:]]
    return b"".join(map(named_event, events))


def _response(made: Made) -> list[dict[str, Any]]:
    request = made.request
    item = _item(made)
    head = {
        "id": f"resp_{made.name}",
        "object": "response",
        "created_at": made.at,
        "model": request.model,
    }
    said = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "error": None,
    }
    begun = {**head, **said, "status": "in_progress", "output": [], "usage": None}
    whole = {**begun, "status": "completed", "output": [item], "usage": _usage(made)}
    return [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]


def _message(made: Made) -> list[dict[str, Any]]:
    said = {"content": made.text, "encrypted_content": made.sealed}
    usage = {"input_tokens": made.before, "output_tokens": made.after}
    whole = {
        "id": f"msg_{made.name}",
        "type": "message",
        "role": "assistant",
        "model": made.request.model,
        "content": [{"type": COMPACTION, **said}],
        "stop_reason": COMPACTION,
        "stop_sequence": None,
        "usage": usage,
    }
    return [
        {"type": "message_start", "message": whole},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": COMPACTION, **dict.fromkeys(said)},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "compaction_delta", **said}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": COMPACTION, "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]


COMPACT_PATH = "/responses/compact"


def is_native(chat: ClientRequest, upstream: UpstreamSettings) -> bool:
    known = chat.codec.providers
    return (
        bool(known) and service_at(upstream.address, upstream.name, upstream.provider)[0] in known
    )
