"""``POST /v1/messages``, whole and as a stream, in Anthropic's words and blocks, whoever's server it is."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from proxy.simulator.checks import check_shapes, reject
from proxy.simulator.delivery import compact
from proxy.simulator.memory import Sealer, ServerMemory
from proxy.simulator.messages_rules import REQUEST, form, sequence
from proxy.simulator.model import AdmittedRequest, Completion, Sender, SimulatorSettings, Surface
from proxy.simulator.window import Dialect, PromptCounter, PromptPart, Rejected, Request, tool_pieces

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
    "window": "model_context_window_exceeded",
}
SIGNATURE = "EqoB"


class SimulatedMessages(Surface):
    """The endpoint."""

    prefix = "msg_"

    def __init__(self, settings: SimulatorSettings, counter: PromptCounter) -> None:
        super().__init__(settings, counter)
        self.sealer = Sealer(settings.seed)
        self.memory = ServerMemory()

    @property
    def shape(self) -> Dialect:
        """Anthropic's, even of other servers."""
        return Dialect.ANTHROPIC

    def admit(self, request: Request, sender: Sender) -> AdmittedRequest:
        """What the model reads of it."""
        self.judge(request)
        return AdmittedRequest(request=request, sender=sender)

    def judge(self, request: Request, *, counting: bool = False) -> None:
        """Raise :class:`Rejected` for the first thing that the request itself has wrong."""
        settings = self.settings
        if settings.strict:
            for problem in form(request, counting=counting):
                raise Rejected(problem)
        else:
            check_shapes(request, REQUEST)
            for name in ("model", "max_tokens", "messages"):
                if not request.get(name):
                    raise reject(f"{name}: Field required")
        asked = request.get("max_tokens")
        if settings.max_output is not None and asked is not None and asked > settings.max_output:
            text = f"max_tokens: {asked} > {settings.max_output}, which is the maximum allowed number of output tokens"
            raise reject(f"{text} for {request['model']}")
        if settings.strict:
            for problem in sequence(request, request["messages"]):
                raise Rejected(problem)

    def pieces(self, request: Request) -> list[PromptPart]:
        """Tools, system prompt, messages: the order in which Anthropic's cache reads them."""
        pieces = tool_pieces(request)
        if request.get("system"):
            pieces.append(PromptPart("system", request["system"]))
        return [*pieces, *(PromptPart("message", message) for message in request["messages"])]

    def body(self, outcome: Completion) -> Mapping[str, Any]:
        """The message."""
        return {
            "id": outcome.id,
            "type": "message",
            "role": "assistant",
            "model": outcome.model,
            "content": self.blocks(outcome),
            "stop_reason": STOP_REASONS.get(outcome.spoken.finish, outcome.spoken.finish),
            "stop_sequence": None,
            **outcome.admitted.notes,
            "usage": _usage(outcome),
        }

    def blocks(self, outcome: Completion) -> list[dict[str, Any]]:
        """What was said: thinking, text, calls."""
        spoken = outcome.spoken
        blocks: list[dict[str, Any]] = []
        if spoken.reasoning:
            blocks.append({"type": "thinking", "thinking": spoken.reasoning, "signature": f"sig_{outcome.id[-12:]}"})
        if spoken.text or not spoken.calls:
            blocks.append({"type": "text", "text": spoken.text})
        for index, call in enumerate(spoken.calls):
            name = call.id or f"toolu_{outcome.id[-16:]}{index}"
            blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": json.loads(call.arguments)})
        return blocks

    def error_event(self, error: bytes, sequence: int) -> bytes:
        """A named event: clients do not see others."""
        del sequence
        return b"event: error\ndata: " + error + b"\n\n"

    def events(self, outcome: Completion) -> tuple[bytes, ...]:
        """The answer as named events."""
        whole = self.body(outcome)
        return tuple(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), compact(event)) for event in _events(whole, outcome)
        )


def _usage(outcome: Completion) -> dict[str, Any]:
    cached = outcome.cached if outcome.written else 0
    written = max(0, outcome.written - cached)
    usage: dict[str, Any] = {
        "input_tokens": outcome.prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": outcome.spoken.tokens,
        "service_tier": "standard",
    }
    return usage


def _events(whole: Mapping[str, Any], outcome: Completion) -> Iterator[Mapping[str, Any]]:
    start = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 1}}
    edited = start.pop("context_management", None)
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(whole["content"]):
        yield {"type": "content_block_start", "index": index, "content_block": _opened(block)}
        if index == 0:
            yield {"type": "ping"}
        for delta in _block_deltas(block, outcome):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None}, "usage": whole["usage"]}
    yield {"type": "message_delta", **end, **({"context_management": edited} if edited else {})}
    yield {"type": "message_stop"}


def _opened(block: Mapping[str, Any]) -> Mapping[str, Any]:
    empty: Mapping[str, Any] = {"text": "", "thinking": "", "signature": "", "input": {}}
    return {key: empty.get(key, value) for key, value in block.items()}


def _block_deltas(block: Mapping[str, Any], outcome: Completion) -> Iterator[Mapping[str, Any]]:
    if block["type"] == "text":
        for piece in outcome.spoken.pieces:
            yield {"type": "text_delta", "text": piece}
    elif block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    else:
        text = json.dumps(block["input"])
        yield {"type": "input_json_delta", "partial_json": text[: len(text) // 2]}
        yield {"type": "input_json_delta", "partial_json": text[len(text) // 2 :]}
