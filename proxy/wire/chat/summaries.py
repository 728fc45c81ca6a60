"""What goes to a summariser: a request of its own, or the conversation's request with the instruction behind it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from policies import Summarize
from proxy.wire.chat.messages import MARK, read_message
from proxy.wire.chat.render import render
from proxy.wire.chat.request import ChatRequest, rewritten
from proxy.wire.raw import Raw, split_object, write_value

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
