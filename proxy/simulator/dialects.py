"""The two endpoints that answer by a model, whole and as a stream, each in its servers' words.

``POST /v1/chat/completions`` is answered as OpenAI, vLLM and llama.cpp do, ``POST /v1/messages`` as Anthropic does: its
checks, its blocks, its event names.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.simulator.checks import check_chat, check_shapes, reject
from proxy.simulator.delivery import SimulatedCall, compact
from proxy.simulator.model import Completion, SimulatorSettings, Surface
from proxy.simulator.window import Dialect, PromptPart, Rejected, Request, tool_pieces

DONE = b"data: [DONE]\n\n"


def _chat_pieces(request: Request) -> list[PromptPart]:
    return [*tool_pieces(request), *(PromptPart("message", message) for message in request["messages"])]


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


def _chat_body(outcome: Completion) -> Mapping[str, Any]:
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


def _chat_events(outcome: Completion) -> tuple[bytes, ...]:
    """The ``chat.completion.chunk`` events; a usage chunk only where ``stream_options.include_usage`` asks for it."""
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


CHAT = Surface(check=check_chat, pieces=_chat_pieces, body=_chat_body, events=_chat_events)


BLOCKS = (
    "document",
    "image",
    "redacted_thinking",
    "search_result",
    "server_tool_use",
    "text",
    "thinking",
    "tool_result",
    "tool_use",
    "web_search_tool_result",
)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def _check_messages(request: Request, settings: SimulatorSettings) -> None:
    check_shapes(request)
    for name in ("model", "max_tokens", "messages"):
        if request.get(name) is None:
            raise reject(f"{name}: Field required")
    asked, messages = request["max_tokens"], request["messages"]
    if asked < 1:
        raise reject("max_tokens: Input should be greater than or equal to 1")
    if settings.max_output is not None and asked > settings.max_output:
        text = f"max_tokens: {asked} > {settings.max_output}, which is the maximum allowed number of output tokens for "
        raise reject(text + str(request["model"]))
    budget = (request.get("thinking") or {}).get("budget_tokens")
    if budget is not None and budget >= asked:
        raise reject("`max_tokens` must be greater than `thinking.budget_tokens`.")
    if not messages:
        raise reject("messages: at least one message is required")
    if settings.strict:
        for index, message in enumerate(messages):
            _check_message(index, message, last=index == len(messages) - 1)
        if messages[0]["role"] != "user":
            raise reject('messages: first message must use the "user" role')
        _check_pairs(messages)


def _check_message(index: int, message: Any, *, last: bool) -> None:
    role = message.get("role")
    if role == "system":
        text = 'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter, '
        raise reject(text + 'not "system" as an input message role.')
    if role not in {"user", "assistant"}:
        text = f'messages: Unexpected role "{role}". Allowed roles are "user" or "assistant".'
        raise reject(text)
    if "weir" in message:
        raise reject(f"messages.{index}.weir: Extra inputs are not permitted")
    content = message.get("content")
    if not content:
        if role == "assistant" and last:
            return
        text = f"messages.{index}: all messages must have non-empty content except for the optional final assistant"
        raise reject(f"{text} message")
    if isinstance(content, str):
        if role == "assistant" and last and content != content.rstrip():
            raise reject("messages: final assistant content cannot end with trailing whitespace")
        return
    for at, block in enumerate(content):
        _check_block(f"messages.{index}.content.{at}", block)


def _check_block(path: str, block: Any) -> None:
    kind = block.get("type")
    if kind not in BLOCKS:
        tags = ", ".join(f"'{name}'" for name in BLOCKS)
        raise reject(f"{path}: Input tag '{kind}' found using 'type' does not match any of the expected tags: {tags}")
    if kind == "text" and not str(block.get("text") or "").strip():
        raise reject("messages: text content blocks must be non-empty")


def _ids(message: Request, kind: str, key: str) -> list[str]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [str(block.get(key)) for block in content if block.get("type") == kind]


def _check_pairs(messages: Sequence[Request]) -> None:
    """Every ``tool_use`` answered in the next message, every ``tool_result`` for a call of the one before."""
    asked: list[str] = []
    for index, message in enumerate(messages):
        given = _ids(message, "tool_result", "tool_use_id")
        missing = [call for call in asked if call not in given]
        if missing:
            raise _unanswered(index - 1, missing)
        stray = next((call for call in given if call not in asked), None)
        if stray is not None:
            text = (
                f"messages.{index}.content.{given.index(stray)}: unexpected `tool_use_id` found in `tool_result` "
                f"blocks: {stray}. Each `tool_result` block must have a corresponding `tool_use` block in the "
                "previous message."
            )
            raise reject(text)
        asked = _ids(message, "tool_use", "id") if message["role"] == "assistant" else []
    if asked:
        raise _unanswered(len(messages) - 1, asked)


def _unanswered(index: int, ids: Sequence[str]) -> Rejected:
    return reject(
        f"messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately after: "
        f"{', '.join(ids)}. Each `tool_use` block must have a corresponding `tool_result` block in the next message."
    )


def _message_pieces(request: Request) -> list[PromptPart]:
    """Tools, system prompt, messages: the order in which Anthropic's cache reads them."""
    pieces = tool_pieces(request)
    if request.get("system"):
        pieces.append(PromptPart("system", request["system"]))
    return [*pieces, *(PromptPart("message", message) for message in request["messages"])]


def _usage(outcome: Completion) -> dict[str, Any]:
    cached = outcome.cached if outcome.written else 0
    written = max(0, outcome.written - cached)
    return {
        "input_tokens": outcome.prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": outcome.spoken.tokens,
        "service_tier": "standard",
    }


def _blocks(outcome: Completion) -> list[dict[str, Any]]:
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


def _stop_reason(outcome: Completion) -> str:
    return STOP_REASONS.get(outcome.spoken.finish, outcome.spoken.finish)


def _message_body(outcome: Completion) -> Mapping[str, Any]:
    return {
        "id": outcome.id,
        "type": "message",
        "role": "assistant",
        "model": outcome.model,
        "content": _blocks(outcome),
        "stop_reason": _stop_reason(outcome),
        "stop_sequence": None,
        "usage": _usage(outcome),
    }


def _message_events(outcome: Completion) -> tuple[bytes, ...]:
    return tuple(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), compact(event)) for event in _events(outcome))


def _events(outcome: Completion) -> Iterator[Mapping[str, Any]]:
    counts = _usage(outcome)
    start = {**_message_body(outcome), "content": [], "stop_reason": None, "usage": {**counts, "output_tokens": 1}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(_blocks(outcome)):
        yield {"type": "content_block_start", "index": index, "content_block": _opened(block)}
        if index == 0:
            yield {"type": "ping"}
        for delta in _block_deltas(block, outcome):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": _stop_reason(outcome), "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": counts}
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


MESSAGES = Surface(check=_check_messages, pieces=_message_pieces, body=_message_body, events=_message_events)
