"""An operator's own function that decides which messages stay.

Each function has one process of its own, ended when the function does not come back in time: a
thread could not be ended. After that the function is switched off for half a minute. It is called
as ``function(messages, budget)``: messages are copies in OpenAI's form, each with ``"weir":
{"index", "tokens", "protected"}``; ``budget`` has ``max_tokens`` for all of them, their ``tokens``
now, and the number of ``messages``. It gives back some of them, in their order, with another text
where it likes; whether a call kept its result is judged by the layer.
"""

import asyncio
import json
import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from policies.effects import Failed, Kept, Reply, Trim, Trimmed
from proxy.child import ChildProcess, python

log = logging.getLogger("weir.custom")

START_PATIENCE = 10.0
SWITCHED_OFF = 30.0
MAX_ANSWER = 64 * 1024 * 1024
MARK = "weir"
# modules are looked for in the working directory, too: an operator's may be next to the
# configuration
HERE = ("",)


def check_custom(path: str, *, patience: float = START_PATIENCE) -> str | None:
    """The fault of a function's import path, None if it can be called with messages and a budget.

    It is imported in a process of its own, so that what its module does at import cannot harm this
    one.
    """
    command = python("from proxy.child import load; load(sys.argv[2])", path, path=HERE)
    try:
        done = subprocess.run(command, capture_output=True, timeout=patience, check=False)  # noqa: S603 - own code
    except subprocess.TimeoutExpired:
        return f"{path}: its module is not imported within {patience:g} seconds"
    if done.returncode == 0:
        return None
    said = (
        done.stderr.decode("utf-8", "replace")
        .strip()
        .rpartition("\n")[2]
        .removeprefix("LookupError: ")
    )
    return (
        f"{path}: {said or f'importing its module ended the process with status {done.returncode}'}"
    )


class CustomFunctions:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}

    async def trim(self, effect: Trim, messages: Sequence[Mapping[str, Any]]) -> Reply:
        given = _given(effect, messages)
        budget = {
            "max_tokens": effect.max_tokens,
            "tokens": sum(effect.tokens),
            "messages": len(given),
        }
        worker = self._workers.setdefault(effect.path, _Worker(effect.path, self._clock))
        try:
            answer = await worker.ask({"messages": given, "budget": budget}, effect.seconds)
            return Trimmed(_selection(answer, given))
        except TimeoutError:
            code = "timeout"
            why = f"no answer within {effect.seconds:g} seconds"
        except (OSError, EOFError) as error:
            code = "crashed"
            why = f"{type(error).__name__}: {error}"
        except (ValueError, RuntimeError) as error:
            code = "rejected" if isinstance(error, ValueError) else "failed"
            why = str(error)
        log.warning("custom function %s: %s: %s", effect.path, code, why)
        return Failed(code)

    async def close(self) -> None:
        workers = self._workers
        self._workers = {}
        for worker in workers.values():
            await worker.end()


class _Worker:
    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._lock = asyncio.Lock()
        self._process: ChildProcess | None = None
        self._off_until = 0.0

    async def ask(self, question: dict[str, Any], seconds: float) -> Any:
        """What the function gives back. Raises TimeoutError, OSError, EOFError, ValueError, and
        RuntimeError for what it raised itself. Other requests' questions are waited for as long as
        the limit, too.
        """
        async with asyncio.timeout(seconds):
            await self._lock.acquire()
        try:
            if self._clock() < self._off_until:
                raise RuntimeError("switched off, it failed a moment ago")
            body = await asyncio.to_thread(lambda: json.dumps(question).encode())
            async with asyncio.timeout(START_PATIENCE):
                process = await self._running()
            async with asyncio.timeout(seconds):
                await process.send(body)
                return await self._received(process)
        except (TimeoutError, OSError, EOFError):
            self._off_until = self._clock() + SWITCHED_OFF
            await self.end()
            raise
        except asyncio.CancelledError:
            await self.end()  # its answer would be taken for that of the next question
            raise
        finally:
            self._lock.release()

    async def end(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            await process.end()

    async def _running(self) -> ChildProcess:
        if self._process is None or not self._process.is_running:
            command = python(
                "from proxy.child import work; work(sys.argv[2])", self._path, path=HERE
            )
            self._process = await ChildProcess.start(command)
            try:
                await self._received(self._process)
            except RuntimeError as error:
                raise OSError(str(error)) from None
        return self._process

    async def _received(self, process: ChildProcess) -> Any:
        answer = await asyncio.to_thread(json.loads, await process.receive(limit=MAX_ANSWER))
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["messages"]


def _given(effect: Trim, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    columns = zip(
        effect.indices, messages, effect.texts, effect.tokens, effect.protected, strict=True
    )
    return [
        {
            **message,
            **({} if text is None else {"content": text}),
            MARK: {"index": index, "tokens": tokens, "protected": protected},
        }
        for index, message, text, tokens, protected in columns
    ]


def _selection(returned: Any, given: Sequence[dict[str, Any]]) -> tuple[Kept, ...]:
    """Raises ValueError for anything but some of the messages in their order."""
    if not isinstance(returned, list):
        raise ValueError("what it gave back is no list")  # noqa: TRY004 - one kind of refusal for all
    kept: list[Kept] = []
    left = iter(given)
    for number, message in enumerate(returned):
        mark = message.get(MARK) if isinstance(message, dict) else None
        before = next((each for each in left if each[MARK] == mark), None)
        if before is None:
            raise ValueError(f"item {number} was not given, or not at that place")
        content = message.get("content")
        if message | {"content": None} != before | {"content": None}:
            raise ValueError(f"item {number} has more changed than its content")
        is_same = content == before.get("content")
        if not is_same and not isinstance(content, str):
            raise ValueError(f"item {number} has a content that is no string")
        kept.append(Kept(before[MARK]["index"], None if is_same else content))
    return tuple(kept)
