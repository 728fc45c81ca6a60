"""The process that an operator's function runs in, because a thread that hangs cannot be ended. Frames are JSON."""

import importlib
import inspect
import json
import os
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from proxy.custom.process import answering, write_frame

SHAPE = "should be module:function"
Function = Callable[[Any, Any], Any]


def problem_with(path: str) -> str | None:
    try:
        load(path)
    except LookupError as error:
        return str(error.args[0])
    return None


def load(path: str) -> Function:
    """Raises LookupError with the reason."""
    module, _, name = path.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise LookupError(SHAPE)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LookupError(f"no module {error.name}") from None
    except BaseException as error:  # noqa: BLE001 - a module of somebody else's may raise anything, SystemExit too
        raise LookupError(f"importing {module} raised {_where(error)}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise LookupError(f"module {module} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise LookupError(f"{name} in {module} is not a function")  # noqa: TRY004 - one error for every reason
    if inspect.iscoroutinefunction(found):
        raise LookupError(f"{name} in {module} is a coroutine function; a plain function is needed")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError:
        raise LookupError(f"{name} in {module} does not take two arguments (messages, budget)") from None
    except ValueError:  # a built-in without a signature
        pass
    return found  # type: ignore[no-any-return]


def work(path: str) -> None:
    output, frames = answering()
    try:
        function = load(path)
    except LookupError as error:
        _write(output, {"failed": "not_found", "detail": str(error.args[0])})
        return
    _write(output, {"ready": True})
    while True:
        asked = json.loads(frames.get())
        _write(output, _answer(function, asked["messages"], asked["budget"]))


def _answer(function: Function, messages: Any, budget: Any) -> dict[str, Any]:
    try:
        return {"messages": function(messages, budget)}
    except BaseException as error:  # noqa: BLE001 - whatever an operator's function does, the next layer goes on
        return {"failed": "raised", "detail": _where(error)}


def _where(error: BaseException) -> str:
    """Without the text of the exception, which may quote a message."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    return type(error).__name__ + (f" at {os.path.basename(last.filename)}:{last.lineno}" if last else "")  # noqa: PTH119


def _write(output: BinaryIO, value: dict[str, Any]) -> None:
    try:
        body = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        body = json.dumps({"failed": "not_json", "detail": "what came back is not JSON"}).encode()
    write_frame(output, body)
