"""How servers beside the simulator's four dialects refuse a request that is too long, for ``fault:wording:NAME``.

Wordings with numbers follow the servers' own templates: OpenAI's chat API, vLLM's ``renderers/params.py``,
SGLang's tokenizer manager, TGI's ``validation.rs``, and for hosted providers the bodies that users reported.
"""

from collections.abc import Mapping
from typing import Any

from tests.upstream.model import Wording
from tests.upstream.window import OversizedPrompt

Body = Mapping[str, Any]


def _openai_requested(o: OversizedPrompt) -> str:
    return (
        f"This model's maximum context length is {o.window} tokens. However, you requested {o.total} tokens "
        f"({o.prompt} in the messages, {o.completion or 0} in the completion). "
        "Please reduce the length of the messages or completion."
    )


def _vllm_at_least(o: OversizedPrompt) -> str:
    least = max(1, o.window - (o.completion or 0) + 1)
    return (
        f"This model's maximum context length is {o.window} tokens. However, you requested {o.completion or 0} output "
        f"tokens and your prompt contains at least {least} input tokens, for a total of at least {o.window + 1} "
        "tokens. Please reduce the length of the input prompt or the number of requested output tokens. "
        f"(parameter=input_tokens, value={least})"
    )


def _vllm_015(o: OversizedPrompt) -> str:
    return (
        f"This model's maximum context length is {o.window} tokens. However, your request has {o.prompt} input tokens "
        f"plus {o.completion or 0} 'max_tokens'. Please reduce one or the other. "
        f"(parameter=input_tokens, max_tokens, value=({o.prompt}, {o.completion or 0}))"
    )


def _vllm_011(o: OversizedPrompt) -> str:
    if o.prompt >= o.window or not o.completion:
        return (
            f"This model's maximum context length is {o.window} tokens. However, your request has {o.prompt} input "
            "tokens. Please reduce the length of the input messages."
        )
    return (
        f"'max_tokens' or 'max_completion_tokens' is too large: {o.completion}. This model's maximum context length "
        f"is {o.window} tokens and your request has {o.prompt} input tokens "
        f"({o.completion} > {o.window} - {o.prompt})."
    )


def _sglang(o: OversizedPrompt) -> str:
    if o.prompt >= o.window or not o.completion:
        return f"The input ({o.prompt} tokens) is longer than the model's context length ({o.window} tokens)."
    return (
        f"Requested token count exceeds the model's maximum context length of {o.window} tokens. You requested a "
        f"total of {o.total} tokens: {o.prompt} tokens from the input messages and {o.completion} tokens for the "
        "completion. Please reduce the number of tokens in the input messages or the completion to fit within the "
        "limit."
    )


def _openrouter(o: OversizedPrompt) -> str:
    tools = f", {o.tools} of tool input" if o.tools else ""
    answer = f", {o.completion} in the output" if o.completion else ""
    return (
        f"This endpoint's maximum context length is {o.window} tokens. However, you requested about {o.total} tokens "
        f"({o.prompt - o.tools} of text input{tools}{answer}). Please reduce the length of either one, or use the "
        "context-compression plugin to compress your prompt automatically."
    )


def _openai_shape(
    message: str, *, param: str | None = "messages", code: str | None = "context_length_exceeded"
) -> Body:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def _flat(message: str) -> Body:
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


def _vllm_shape(message: str, param: str = "input_tokens") -> Body:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}


def _gemini(o: OversizedPrompt) -> Body:
    text = f"The input token count ({o.prompt}) exceeds the maximum number of tokens allowed ({o.window})."
    return {"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}}


WORDINGS: Mapping[str, Wording] = {
    "openai-gpt5": (
        400,
        lambda o: _openai_shape(
            f"Input tokens exceed the configured limit of {o.window} tokens. Your messages resulted in {o.prompt} "
            "tokens. Please reduce the length of the messages."
        ),
    ),
    "openai-no-numbers": (
        400,
        lambda _: _openai_shape(
            "Your input exceeds the context window of this model. Please adjust your input and try again.",
            param="input",
        ),
    ),
    "vllm-at-least": (400, lambda o: _vllm_shape(_vllm_at_least(o))),
    "vllm-0.15": (400, lambda o: _vllm_shape(_vllm_015(o), "input_tokens, max_tokens")),
    "vllm-0.11": (400, lambda o: _flat(_vllm_011(o))),
    "vllm-0.8": (400, lambda o: _flat(_openai_requested(o))),
    "deepseek": (400, lambda o: _openai_shape(_openai_requested(o), param=None, code="invalid_request_error")),
    "groq": (400, lambda _: _openai_shape("Please reduce the length of the messages or completion.")),
    "mistral": (
        400,
        lambda o: {
            "object": "error",
            "message": f"Prompt contains {o.prompt} tokens and 0 draft tokens, too large for model with {o.window} "
            "maximum context length",
            "type": "invalid_request_invalid_args",
            "param": None,
            "code": "3051",
        },
    ),
    "gemini": (400, lambda o: [_gemini(o)]),
    "xai": (
        400,
        lambda o: {
            "code": "Client specified an invalid argument",
            "error": f"This model's maximum prompt length is {o.window} but the request contains {o.prompt} tokens.",
        },
    ),
    "openrouter": (400, lambda o: {"error": {"message": _openrouter(o), "code": 400, "metadata": {}}}),
    "sglang": (400, lambda o: _flat(_sglang(o))),
    "tgi": (
        422,
        lambda o: {
            "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= "
            f"{o.window}. Given: {o.prompt} `inputs` tokens and {o.completion or 0} `max_new_tokens`",
            "error_type": "validation",
        },
    ),
    "bedrock": (400, lambda _: {"message": "Input is too long for requested model."}),
    "cohere": (
        400,
        lambda o: {
            "message": "too many tokens: total number of tokens (prompt and prediction) cannot exceed "
            f"{o.window} - received {o.total}. Try using a shorter prompt or a smaller max_tokens value."
        },
    ),
    "moonshot": (
        400,
        lambda o: {
            "error": {
                "message": f"Invalid request: Your request exceeded model token limit: {o.window} "
                f"(requested: {o.total})",
                "type": "invalid_request_error",
            }
        },
    ),
    "github-models": (
        413,
        lambda o: {
            "error": {
                "code": "tokens_limit_reached",
                "message": f"Request body too large for this model. Max size: {o.window} tokens.",
                "details": f"Request body too large for this model. Max size: {o.window} tokens.",
            }
        },
    ),
}
