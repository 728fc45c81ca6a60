"""A planned array of chat messages as bytes, and what goes to a summariser.

A summariser gets a request of its own, or the conversation's request with the instruction behind it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from policies.effects import Summarize
from policies.ledger import EditKind, PlannedMessage
from proxy.wire.messages import (
    MARK,
    ChatRequest,
    content_with,
    marker_for_summary,
    marker_within,
    read_message,
    rewritten,
    unmarked,
    without_media,
    without_reasoning,
)
from proxy.wire.raw import Raw, split_object, write_value


def render(
    pieces: Sequence[PlannedMessage], messages: Sequence[Raw], marked: frozenset[int], *, role: str = "user"
) -> list[Raw]:
    """The raw slices of a planned array: the client's own bytes wherever a message was not replaced.

    ``marked`` are the indices of messages with Weir's own mark, which is taken out. Cache markers stay on what
    replaces their block. A summary is a message of ``role`` user or system; with ``system_append`` it is added to the
    first system message, and is a user's where there is none.
    """
    rendered = [
        b"" if piece.index is None else _render(piece, messages[piece.index], marked=piece.index in marked)
        for piece in pieces
    ]
    own = [n for n, piece in enumerate(pieces) if piece.index is None]
    for n in own:
        markers = marker_for_summary(pieces, messages) if pieces[n].is_summary else {}
        rendered[n] = _render_own(pieces[n], markers, role=role if pieces[n].is_summary else "user")
    if own and role == "system_append":
        return _appended(pieces, rendered)
    return rendered


def _render_own(piece: PlannedMessage, markers: Mapping[str, Any], *, role: str) -> Raw:
    role = "system" if role == "system" else "user"
    return write_value({"role": role, "content": content_with(piece.text or "", markers)})


def _appended(pieces: Sequence[PlannedMessage], rendered: list[Raw]) -> list[Raw]:
    """The array with its summary as the last part of the first system message; as it is where there is none."""
    value = dict(read_message(rendered[0]))
    place = next((n for n, piece in enumerate(pieces) if piece.is_summary), None)
    if value.get("role") not in ("system", "developer") or place is None:
        return rendered
    content, text = value.get("content"), pieces[place].text or ""
    if isinstance(content, list):
        value["content"] = [*content, {"type": "text", "text": text}]
    else:
        value["content"] = f"{content or ''}\n\n{text}"
    return [write_value(value), *(raw for n, raw in enumerate(rendered[1:], 1) if n != place)]


def _render(piece: PlannedMessage, raw: Raw, *, marked: bool) -> Raw:
    if piece.text is None:
        return unmarked(raw) if marked else raw
    value = dict(read_message(raw))
    value.pop(MARK, None)
    if piece.kind is EditKind.REASONING:
        value = without_reasoning(value)
    elif piece.kind is EditKind.MEDIA:
        value = without_media(value, piece.text.split("\n"))
    else:
        value["content"] = content_with(piece.text, marker_within(value))
    return write_value(value)


REASONING_ROOM = 4_096
SCHEMA_NAME = "working_notes"
NOT_IN_PLACE = frozenset(
    {
        *("stream", "stream_options", "n", "response_format", "max_tokens", "max_completion_tokens", "stop", "store"),
        *("logprobs", "top_logprobs"),
    }
)
"""Fields of a client's request that are about its own answer and not about the prefix that a provider has cached."""

_MARKED = f'"{MARK}"'.encode()
_FREE = frozenset({"auto", "none"})


@dataclass(frozen=True, slots=True)
class Form:
    """How a model takes its limits.

    OpenAI's reasoning models refuse ``max_tokens`` and any temperature but their own, and count what they think
    in ``max_completion_tokens`` (API reference, chat completions): so the limit has room for that on top.
    """

    reasons: bool = False

    def limit(self, max_tokens: int) -> dict[str, object]:
        """The field that says how long an answer may be."""
        if self.reasons:
            return {"max_completion_tokens": max_tokens + REASONING_ROOM}
        return {"max_tokens": max_tokens}


PLAIN = Form()
REASONING = Form(reasons=True)


def own_body(effect: Summarize, *, model: str, form: Form = PLAIN) -> bytes:
    """A request of two messages that has nothing to do with the client's."""
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "system", "content": effect.system}, {"role": "user", "content": effect.prompt}],
        **form.limit(effect.max_tokens),
        "stream": False,
    }
    if not form.reasons:
        body["temperature"] = 0
    if effect.schema:
        described = {"name": SCHEMA_NAME, "strict": True, "schema": dict(effect.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": described}
    return write_value(body)


def standing_body(
    effect: Summarize, *, request: ChatRequest, role: str = "user", pruned: Collection[str] = (), form: Form = PLAIN
) -> bytes:
    """The client's request over ``effect.standing``, with the instruction as its last message.

    All of its fields go along but those that are about its own answer, so that the prefix is the one the provider
    has seen. No schema is asked for: OpenAI's cache reads a schema before the messages. ``role`` is where the policy
    has summaries stand, ``pruned`` are the tools that the forwarded requests go without.
    """
    raws = request.messages or ()
    kept = [piece.index for piece in effect.standing if piece.index is not None and piece.text is None]
    marked = frozenset(index for index in kept if _is_marked(raws[index]))
    asked = write_value({"role": "user", "content": effect.prompt})
    fields = dict(
        split_object(
            rewritten(request, messages=[*render(effect.standing, raws, marked, role=role), asked], pruned=pruned)
        )
    )
    reasons = form.reasons or "max_completion_tokens" in request.fields
    own = {name: write_value(value) for name, value in Form(reasons).limit(effect.max_tokens).items()}
    sent = {name: bytes(raw) for name, raw in fields.items() if name not in NOT_IN_PLACE} | own | {"stream": b"false"}
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + raw for name, raw in sent.items()) + b"}"


def forces_a_call(request: ChatRequest) -> bool:
    """Whether the client has the model call a tool in any case, so that it would not write."""
    return any(_forced(request.value(name)) for name in ("tool_choice", "function_call"))


def _forced(choice: Any) -> bool:
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools")
            choice = allowed.get("mode") if isinstance(allowed, dict) else choice.get("mode")
        else:
            choice = choice.get("type", "function")
    return choice is not None and choice not in _FREE


def _is_marked(raw: Raw) -> bool:
    return _MARKED in bytes(raw) and MARK in read_message(raw)
