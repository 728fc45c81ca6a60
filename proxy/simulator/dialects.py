"""``POST /v1/chat/completions``, whole and as a stream, as OpenAI, vLLM and llama.cpp answer it."""

from collections.abc import Iterator, Mapping
from typing import Any

from proxy.simulator.checks import check_chat, refuse_first
from proxy.simulator.delivery import SimulatedCall, compact
from proxy.simulator.model import AdmittedRequest, Completion, Sender, Surface
from proxy.simulator.window import Dialect, PromptPart, Request, tool_pieces

DONE = b"data: [DONE]\n\n"


def _choices(outcome: Completion) -> range:
    n = outcome.request.get("n")
    return range(n if isinstance(n, int) and n > 0 else 1)


def _chat_usage(outcome: Completion) -> Mapping[str, Any]:
    completion = outcome.spoken.tokens * len(_choices(outcome))
    return {
        "prompt_tokens": outcome.prompt,
        "completion_tokens": completion,
        "total_tokens": outcome.prompt + completion,
        "prompt_tokens_details": {"cached_tokens": outcome.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _extras(outcome: Completion) -> Mapping[str, Any]:
    if outcome.dialect is Dialect.LLAMACPP:
        timings = {"cache_n": outcome.cached, "prompt_n": outcome.prompt - outcome.cached}
        return {"timings": {**timings, "predicted_n": outcome.spoken.tokens}}
    return {"service_tier": "default"} if outcome.dialect is Dialect.OPENAI else {}


def _call_id(outcome: Completion, call: SimulatedCall, index: int) -> str:
    return call.id or f"call_{outcome.id[-16:]}{index}"


def _tool_calls(outcome: Completion) -> list[Mapping[str, Any]]:
    return [
        {
            "id": _call_id(outcome, call, index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(outcome.spoken.calls)
    ]


def _message(outcome: Completion) -> Mapping[str, Any]:
    spoken = outcome.spoken
    message: dict[str, Any] = {"role": "assistant", "content": spoken.text or (None if spoken.calls else "")}
    if outcome.dialect is Dialect.OPENAI:
        message |= {"refusal": None, "annotations": []}
    if spoken.reasoning:
        message["reasoning_content"] = spoken.reasoning
    if spoken.calls:
        message["tool_calls"] = _tool_calls(outcome)
    return message


def _deltas(outcome: Completion) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    spoken = outcome.spoken
    yield {"role": "assistant", "content": None if spoken.calls and not spoken.text else ""}, None
    if spoken.reasoning:
        yield {"reasoning_content": spoken.reasoning}, None
    for piece in spoken.pieces:
        yield {"content": piece}, None
    for index, call in enumerate(spoken.calls):
        function: dict[str, str] = {"name": call.name, "arguments": ""}
        first = {"index": index, "id": _call_id(outcome, call, index), "type": "function", "function": function}
        yield {"tool_calls": [first]}, None
        middle = len(call.arguments) // 2
        for part in (call.arguments[:middle], call.arguments[middle:]):
            if part:
                yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}, None
    yield {}, spoken.finish


class SimulatedChat(Surface):
    prefix = "chatcmpl-"

    def admit(self, request: Request, sender: Sender) -> AdmittedRequest:
        refuse_first(check_chat(request, self.settings))
        return AdmittedRequest(request=request, sender=sender)

    def pieces(self, request: Request) -> list[PromptPart]:
        return [*tool_pieces(request), *(PromptPart("message", message) for message in request["messages"])]

    def body(self, outcome: Completion) -> Mapping[str, Any]:
        return {
            "id": outcome.id,
            "object": "chat.completion",
            "created": outcome.created,
            "model": outcome.model,
            "choices": [
                {"index": index, "message": _message(outcome), "logprobs": None, "finish_reason": outcome.spoken.finish}
                for index in _choices(outcome)
            ],
            "usage": _chat_usage(outcome),
            "system_fingerprint": "fp_simulator",
            **_extras(outcome),
        }

    def events(self, outcome: Completion) -> tuple[bytes, ...]:
        options = outcome.request.get("stream_options") or {}
        wants_usage = bool(options.get("include_usage"))
        head = {
            "id": outcome.id,
            "object": "chat.completion.chunk",
            "created": outcome.created,
            "model": outcome.model,
            "system_fingerprint": "fp_simulator",
        }
        tail = {"usage": None} if wants_usage else {}
        events = [
            {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}], **tail}
            for index in _choices(outcome)
            for delta, finish in _deltas(outcome)
        ]
        if wants_usage:
            events.append({**head, "choices": [], "usage": _chat_usage(outcome), **_extras(outcome)})
        return (*(b"data: " + compact(event) + b"\n\n" for event in events), DONE)
