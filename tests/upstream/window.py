"""The window: tokens of a request by pieces, whether prompt and answer fit, the cache of prefixes, and refusals.

Refusals have each dialect's shape, and the words of the servers' own templates: OpenAI's chat API, vLLM's
``renderers/params.py``, llama.cpp's ``server-task.cpp``, Anthropic's Messages API.
"""

import base64
import binascii
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

Request = Mapping[str, Any]
Count = Callable[[str], int]

PRIMING = 3
PER_MESSAGE = 4  # three for the frame, one for the role
PER_CALL = 8
AUDIO_OR_FILE = 256
IMAGE_LOW, IMAGE_AUTO, IMAGE_HIGH = 85, 765, 1105
PIECES_KEPT = 50_000
IGNORED_KEYS = frozenset({"cache_control", "prompt_cache_breakpoint"})
_dumps = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class PromptPart:
    kind: str
    value: Any


def tool_pieces(request: Request) -> list[PromptPart]:
    pieces = [PromptPart("tools", request[name]) for name in ("tools", "functions") if request.get(name)]
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("json_schema"):
        pieces.append(PromptPart("tools", form["json_schema"]))
    return pieces


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    digests: tuple[bytes, ...]
    tokens: tuple[int, ...]
    tools: int
    breakpoint: int

    @property
    def total(self) -> int:
        return sum(self.tokens) + PRIMING


def canonical(value: Any) -> tuple[bytes, bool]:
    text = _dumps(value)
    marked = '"cache_control"' in text or '"prompt_cache_breakpoint"' in text
    return (_dumps(_unmarked(value)) if marked else text).encode("utf-8", "surrogatepass"), marked


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unmarked(item) for key, item in value.items() if key not in IGNORED_KEYS}
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    return value


class PromptCounter:
    def __init__(self, count: Count) -> None:
        self.count = count
        self._known: dict[bytes, int] = {}

    def measure(self, pieces: Iterable[PromptPart]) -> CountedPrompt:
        """The pieces with their digests and tokens; ``breakpoint`` counts pieces up to the last cache marker."""
        digests: list[bytes] = []
        tokens: list[int] = []
        tools = marked = 0
        for index, piece in enumerate(pieces, start=1):
            data, is_marked = canonical(piece.value)
            digest = blake2b(data, digest_size=16, person=piece.kind.encode()[:16]).digest()
            size = self._known.get(digest)
            if size is None:
                size = self._tokens(piece, data)
                if len(self._known) >= PIECES_KEPT:
                    self._known.clear()
                self._known[digest] = size
            if piece.kind == "tools":
                tools += size
            if is_marked:
                marked = index
            digests.append(digest)
            tokens.append(size)
        return CountedPrompt(tuple(digests), tuple(tokens), tools, marked)

    def _tokens(self, piece: PromptPart, data: bytes) -> int:
        if piece.kind == "message":
            return _message_tokens(piece.value, self.count)
        if piece.kind == "system":
            return PER_MESSAGE + _content_tokens(piece.value, self.count)
        return self.count(data.decode("utf-8", "surrogatepass"))


def _message_tokens(message: Request, count: Count) -> int:
    total = PER_MESSAGE + _content_tokens(message.get("content"), count)
    calls = [
        *(message.get("tool_calls") or ()),
        *([{"function": message["function_call"]}] if message.get("function_call") else ()),
    ]
    for call in calls:
        function = call.get("function") or call.get("custom") or {}
        arguments = function.get("arguments") or function.get("input") or ""
        total += count(str(function.get("name", ""))) + count(str(arguments)) + PER_CALL
    if message.get("refusal"):
        total += count(str(message["refusal"]))
    return total + (1 if message.get("name") else 0)


def _content_tokens(content: Any, count: Count) -> int:
    if isinstance(content, str):
        return count(content) if content else 0
    if isinstance(content, list):
        return sum(_part_tokens(part, count) for part in content if isinstance(part, dict))
    return 0


def _part_tokens(part: Request, count: Count) -> int:
    match part.get("type"):
        case "text" | "refusal" | "thinking":
            return count(str(part.get("text") or part.get("refusal") or part.get("thinking") or ""))
        case "image_url":
            image = part.get("image_url")
            return image_tokens(image) if isinstance(image, dict) else IMAGE_AUTO
        case "image":
            return IMAGE_AUTO
        case "compaction":
            return count(str(part.get("content") or ""))
        case "tool_use" | "server_tool_use" | "mcp_tool_use":
            return count(str(part.get("name", ""))) + count(json.dumps(part.get("input"))) + PER_CALL
        case "tool_result":
            return 4 + _content_tokens(part.get("content"), count)
        case _:
            return AUDIO_OR_FILE


def image_tokens(image: Request) -> int:
    """85 for detail ``low``, else 85 + 170 a tile of a PNG data URL, else 765 (auto) or 1105 (high), at most 1105.

    The tiles are those of OpenAI's vision guide for the gpt-4o family: fit into 2048 px, short side to 768 px.
    """
    detail = image.get("detail", "auto")
    if detail == "low":
        return IMAGE_LOW
    size = _png_size(str(image.get("url", "")))
    if size is None:
        return IMAGE_HIGH if detail == "high" else IMAGE_AUTO
    width, height = size
    scale = min(1.0, 2048 / max(width, height))
    scale *= min(1.0, 768 / (min(width, height) * scale))
    tiles = math.ceil(width * scale / 512) * math.ceil(height * scale / 512)
    return min(IMAGE_HIGH, IMAGE_LOW + 170 * tiles)


def _png_size(url: str) -> tuple[int, int] | None:
    prefix = "data:image/png;base64,"
    if not url.startswith(prefix):
        return None
    try:
        head = base64.b64decode(url[len(prefix) : len(prefix) + 32])
    except binascii.Error:
        return None
    width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    return (width, height) if width and height else None


def overflows(prompt: CountedPrompt, *, window: int, asked: int | None) -> bool:
    return prompt.total + max(asked or 1, 1) > window


class PrefixCache:
    def __init__(self, *, entries: int = 100_000) -> None:
        self._entries = entries
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def cached_tokens(self, prompt: CountedPrompt, *, credential: str, model: str) -> int:
        tokens = 0
        for key, size in zip(_chain(prompt, credential, model), prompt.tokens, strict=True):
            if key not in self._seen:
                break
            tokens += size
        return tokens

    def remember(self, prompt: CountedPrompt, *, credential: str, model: str) -> None:
        for key in _chain(prompt, credential, model):
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._entries:
            self._seen.popitem(last=False)


def _chain(prompt: CountedPrompt, credential: str, model: str) -> Iterator[bytes]:
    key = blake2b(f"{credential}\n{model}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    for digest in prompt.digests:
        key = blake2b(key + digest, digest_size=16).digest()
        yield key


Body = Mapping[str, Any]


class Dialect(StrEnum):
    OPENAI = "openai"
    VLLM = "vllm"
    LLAMACPP = "llamacpp"
    ANTHROPIC = "anthropic"


@dataclass(eq=False)
class Problem(Exception):
    """What is wrong with a request; raised, it refuses it."""

    message: str
    param: str | None = None
    code: str | int | None = None
    _: KW_ONLY
    status: int = 400
    kind: str = "invalid_request_error"
    extra: Body = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OversizedPrompt:
    window: int
    prompt: int
    tools: int = 0
    completion: int | None = None

    @property
    def total(self) -> int:
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
    server, status, message = problem.status >= 500, problem.status, problem.message
    shown: Body
    match dialect:
        case Dialect.ANTHROPIC:
            kind = _ANTHROPIC_KINDS.get(status, "api_error" if server else "invalid_request_error")
            shown = {"type": kind, "message": message, **problem.extra}
            return {"type": "error", "error": shown, "request_id": "req_simulated"}
        case Dialect.VLLM:
            kind = _VLLM_KINDS.get(status, "InternalServerError" if server else "BadRequestError")
            shown = {"message": message, "type": kind, "param": problem.param, "code": status}
        case Dialect.LLAMACPP:
            shown = {"code": status, "message": message, "type": "server_error" if server else problem.kind}
        case _:
            shown = {"message": message, "type": problem.kind, "param": problem.param, "code": problem.code}
    return {"error": {**shown, **problem.extra}}


def status_problem(status: int, *, model: str, dialect: Dialect, retry_after: str) -> Problem:
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
