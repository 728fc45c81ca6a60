"""What servers say when they refuse: the error shape of each dialect, and its words for a request that is too long.

Wordings follow the servers' own templates: OpenAI's chat API, vLLM's ``renderers/params.py``, llama.cpp's
``server-task.cpp``, Anthropic's Messages API.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Body = Mapping[str, Any]


class Dialect(StrEnum):
    """Whose errors, extras and endpoints are spoken."""

    OPENAI = "openai"
    VLLM = "vllm"
    LLAMACPP = "llamacpp"
    ANTHROPIC = "anthropic"


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


@dataclass(frozen=True, slots=True)
class OversizedPrompt:
    """A request that does not fit ``window``: tokens of the prompt, of the tools in it, and asked for."""

    window: int
    prompt: int
    tools: int = 0
    completion: int | None = None

    @property
    def total(self) -> int:
        """Tokens of prompt and answer together."""
        return self.prompt + (self.completion or 0)


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
    server, status, message = problem.status >= 500, problem.status, problem.message
    match dialect:
        case Dialect.ANTHROPIC:
            kind = _ANTHROPIC_KINDS.get(status, "api_error" if server else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_simulated"}
        case Dialect.VLLM:
            kind = _VLLM_KINDS.get(status, "InternalServerError" if server else "BadRequestError")
            shown: Body = {"message": message, "type": kind, "param": problem.param, "code": status}
        case Dialect.LLAMACPP:
            shown = {"code": status, "message": message, "type": "server_error" if server else problem.kind}
        case _:
            shown = {"message": message, "type": problem.kind, "param": problem.param, "code": problem.code}
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


def _openai(o: OversizedPrompt) -> str:
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


def _vllm(o: OversizedPrompt) -> str:
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


def _anthropic(o: OversizedPrompt) -> str:
    if o.prompt > o.window:
        return f"prompt is too long: {o.prompt} tokens > {o.window} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {o.prompt} + {o.completion or 0} > {o.window}, "
        "decrease input length or `max_tokens` and try again"
    )


def _llamacpp(o: OversizedPrompt) -> str:
    return f"request ({o.prompt} tokens) exceeds the available context size ({o.window} tokens), try increasing it"


def overflow_problem(overflow: OversizedPrompt, dialect: Dialect) -> Problem:
    """What a server of ``dialect`` says to a request that is too long."""
    match dialect:
        case Dialect.ANTHROPIC:
            return Problem(message=_anthropic(overflow))
        case Dialect.VLLM:
            return Problem(message=_vllm(overflow), param="input_tokens")
        case Dialect.LLAMACPP:
            sizes = {"n_prompt_tokens": overflow.prompt, "n_ctx": overflow.window}
            return Problem(message=_llamacpp(overflow), kind="exceed_context_size_error", extra=sizes)
        case _:
            return Problem(message=_openai(overflow), param="messages", code="context_length_exceeded")
