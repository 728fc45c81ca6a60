"""What a summariser's answer says: its text, what it took, or why there is none."""

from typing import Any

import msgspec

from policies import Failed, Summary
from proxy.tap import Usage, usage_from


def read_answer(content: bytes) -> tuple[Summary | Failed, Usage | None]:
    """The text of a completion and its usage; a text that is longer than may be is none."""
    try:
        answer = msgspec.json.decode(content)
        choice = answer["choices"][0]
        message = choice["message"]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError):
        return Failed("not_an_answer"), None
    usage = usage_from(answer.get("usage"))
    if not isinstance(message, dict):
        return Failed("not_an_answer"), usage
    text, calls = message.get("content"), message.get("tool_calls") or message.get("function_call")
    return Summary(
        text=text if isinstance(text, str) else "",
        finish_reason=str(choice.get("finish_reason") or ""),
        tool_calls=len(calls) if isinstance(calls, list) else int(calls is not None and bool(calls)),
        model=str(answer.get("model") or ""),
    ), usage


def wants_other_form(status: int, content: bytes) -> bool:
    """Whether a model refuses ``max_tokens`` or a temperature, as OpenAI's reasoning models do."""
    if status != 400:
        return False
    error = _error(content)
    return error.get("code") in ("unsupported_parameter", "unsupported_value") and error.get("param") in (
        "max_tokens",
        "temperature",
    )


def _error(content: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return {}
    error = value.get("error") if isinstance(value, dict) else None
    return error if isinstance(error, dict) else {}


def error_code(content: bytes) -> object:
    """The code in an error body, None without one."""
    return _error(content).get("code")
