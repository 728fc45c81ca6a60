"""What providers say when they refuse: the error shape of each dialect and the true overflow wordings.

Wordings with numbers follow the servers' own templates: OpenAI's chat API, vLLM's ``renderers/params.py``,
llama.cpp's ``server-task.cpp``, SGLang's tokenizer manager, TGI's ``validation.rs``, Anthropic's Messages API,
and for hosted providers the bodies that users reported.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.simulator.settings import Dialect
from proxy.simulator.window import Overflow

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a request is refused, in OpenAI's terms; ``extra`` are further fields of the error object."""

    message: str
    status: int = 400
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | int | None = None
    extra: Body = field(default_factory=dict)


class Rejected(Exception):
    """A request that the simulated server does not accept."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_VLLM_KINDS = {404: "NotFoundError", 401: "AuthenticationError", 429: "TooManyRequests"}


def problem_body(problem: Problem, dialect: Dialect) -> Body:
    """The JSON body that a server of ``dialect`` sends for ``problem``."""
    server = problem.status >= 500
    match dialect:
        case Dialect.ANTHROPIC:
            kind = _ANTHROPIC_KINDS.get(problem.status, "api_error" if server else "invalid_request_error")
            error = {"type": kind, "message": problem.message}
            return {"type": "error", "error": error, "request_id": "req_simulated"}
        case Dialect.VLLM:
            kind = _VLLM_KINDS.get(problem.status, "InternalServerError" if server else "BadRequestError")
            shown = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.status}
            return {"error": {**shown, **problem.extra}}
        case Dialect.LLAMACPP:
            kind = "server_error" if server else problem.kind
            return {"error": {"code": problem.status, "message": problem.message, "type": kind, **problem.extra}}
        case _:
            shown = {"message": problem.message, "type": problem.kind, "param": problem.param, "code": problem.code}
            return {"error": {**shown, **problem.extra}}


def status_problem(status: int, *, model: str, dialect: Dialect, retry_after: str) -> Problem:
    """The error that a provider of ``dialect`` sends with an HTTP status that is not about the request."""
    if status == 429 and dialect is Dialect.ANTHROPIC:
        text = (
            "This request would exceed your organization's rate limit of 30,000 input tokens per minute. Please "
            "reduce the prompt length or the maximum tokens requested, or try again later."
        )
        return Problem(status=429, message=text)
    if status == 429:
        text = (
            f"Rate limit reached for {model} in organization org-simulated on tokens per min (TPM): Limit 30000, "
            f"Used 29000, Requested 2000. Please try again in {retry_after}s. "
            "Visit https://platform.openai.com/account/rate-limits to learn more."
        )
        return Problem(status=429, message=text, kind="tokens", code="rate_limit_exceeded")
    if status == 401:
        text = "Incorrect API key provided. You can find your API key at https://platform.openai.com/account/api-keys."
        return Problem(status=401, message=text, code="invalid_api_key")
    if status in {503, 529}:
        return Problem(status=status, message="Overloaded", kind="overloaded_error")
    if status >= 500:
        text = "The server had an error while processing your request. Sorry about that!"
        return Problem(status=status, message=text, kind="server_error")
    return Problem(status=status, message=f"The request was refused with status {status}.")


def missing_problem(method: str, path: str, *, status: int, dialect: Dialect) -> Problem:
    """The 404 or 405 for a URL that the simulated server does not have."""
    if dialect is Dialect.LLAMACPP:
        return Problem(status=status, message="File Not Found", kind="not_found_error")
    if dialect is not Dialect.OPENAI:
        return Problem(status=status, message="Not Found")
    if status == 405:
        text = f"Not allowed to {method} on {path}. (HINT: Perhaps you meant to use a different HTTP method?)"
        return Problem(status=405, message=text, code="method_not_supported")
    return Problem(status=404, message=f"Invalid URL ({method} {path})")


def _openai_legacy(o: Overflow) -> str:
    head = f"This model's maximum context length is {o.window} tokens. However, "
    texts = o.prompt - o.tools
    if o.prompt > o.window or not o.completion:
        spread = f" ({texts} in the messages, {o.tools} in the functions)" if o.tools else ""
        cure = "messages or functions" if o.tools else "messages"
        return f"{head}your messages resulted in {o.prompt} tokens{spread}. Please reduce the length of the {cure}."
    if o.tools:
        spread = f"{texts} in the messages, {o.tools} in the functions, and {o.completion} in the completion"
        cure = "messages, functions, or completion"
    else:
        spread = f"{texts} in the messages, {o.completion} in the completion"
        cure = "messages or completion"
    return f"{head}you requested {o.total} tokens ({spread}). Please reduce the length of the {cure}."


def _openai_requested(o: Overflow) -> str:
    return (
        f"This model's maximum context length is {o.window} tokens. However, you requested {o.total} tokens "
        f"({o.prompt} in the messages, {o.completion or 0} in the completion). "
        "Please reduce the length of the messages or completion."
    )


def _vllm(o: Overflow) -> str:
    head = f"This model's maximum context length is {o.window} tokens. However, "
    if o.prompt >= o.window or not o.completion:
        return (
            f"{head}your prompt contains {o.prompt} input tokens, which exceeds this limit even without any output "
            f"tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value={o.prompt})"
        )
    return (
        f"{head}you requested {o.completion} output tokens and your prompt contains {o.prompt} input tokens, for a "
        f"total of {o.total} tokens. Please reduce the length of the input prompt or the number of requested output "
        f"tokens. (parameter=input_tokens, value={o.prompt})"
    )


def _vllm_at_least(o: Overflow) -> str:
    least = max(1, o.window - (o.completion or 0) + 1)
    return (
        f"This model's maximum context length is {o.window} tokens. However, you requested {o.completion or 0} output "
        f"tokens and your prompt contains at least {least} input tokens, for a total of at least {o.window + 1} "
        "tokens. Please reduce the length of the input prompt or the number of requested output tokens. "
        f"(parameter=input_tokens, value={least})"
    )


def _vllm_015(o: Overflow) -> str:
    return (
        f"This model's maximum context length is {o.window} tokens. However, your request has {o.prompt} input tokens "
        f"plus {o.completion or 0} 'max_tokens'. Please reduce one or the other. "
        f"(parameter=input_tokens, max_tokens, value=({o.prompt}, {o.completion or 0}))"
    )


def _vllm_011(o: Overflow) -> str:
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


def _anthropic(o: Overflow) -> str:
    if o.prompt > o.window:
        return f"prompt is too long: {o.prompt} tokens > {o.window} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {o.prompt} + {o.completion or 0} > {o.window}, "
        "decrease input length or `max_tokens` and try again"
    )


def _llamacpp(o: Overflow) -> str:
    return f"request ({o.prompt} tokens) exceeds the available context size ({o.window} tokens), try increasing it"


def _sglang(o: Overflow) -> str:
    if o.prompt >= o.window or not o.completion:
        return f"The input ({o.prompt} tokens) is longer than the model's context length ({o.window} tokens)."
    return (
        f"Requested token count exceeds the model's maximum context length of {o.window} tokens. You requested a "
        f"total of {o.total} tokens: {o.prompt} tokens from the input messages and {o.completion} tokens for the "
        "completion. Please reduce the number of tokens in the input messages or the completion to fit within the "
        "limit."
    )


def _openrouter(o: Overflow) -> str:
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


def _vllm_shape(message: str, param: str | None = "input_tokens") -> Body:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}


def _gemini(o: Overflow) -> Body:
    text = f"The input token count ({o.prompt}) exceeds the maximum number of tokens allowed ({o.window})."
    return {"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}}


WORDINGS: Mapping[str, tuple[int, Callable[[Overflow], Any]]] = {
    "openai": (400, lambda o: _openai_shape(_openai_legacy(o))),
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
    "vllm": (400, lambda o: _vllm_shape(_vllm(o))),
    "vllm-at-least": (400, lambda o: _vllm_shape(_vllm_at_least(o))),
    "vllm-0.15": (400, lambda o: _vllm_shape(_vllm_015(o), "input_tokens, max_tokens")),
    "vllm-0.11": (400, lambda o: _flat(_vllm_011(o))),
    "vllm-0.8": (400, lambda o: _flat(_openai_requested(o))),
    "llamacpp": (
        400,
        lambda o: {
            "error": {
                "code": 400,
                "message": _llamacpp(o),
                "type": "exceed_context_size_error",
                "n_prompt_tokens": o.prompt,
                "n_ctx": o.window,
            }
        },
    ),
    "anthropic": (
        400,
        lambda o: {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": _anthropic(o)},
            "request_id": "req_simulated",
        },
    ),
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


def overflow_error(overflow: Overflow, wording: str) -> tuple[int, bytes]:
    """Status and body with which the server named ``wording`` refuses a request that is too long."""
    status, body = WORDINGS[wording]
    return status, json.dumps(body(overflow)).encode()
