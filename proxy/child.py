"""A process that receives requests and answers in frames: four bytes of length, then the content.

It ends as soon as its input is closed, even while it works, so that it never outlives the Weir that
started it. An operator's function runs in one, because a thread that hangs cannot be ended; its
frames are JSON.
"""

import asyncio
import importlib
import inspect
import json
import operator
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

LENGTH = struct.Struct(">I")
AT_ONCE = 256 * 1024
Frames = queue.SimpleQueue[bytes]
SHAPE = "should be module:function"
Function = Callable[[Any, Any], Any]


def python(code: str, *arguments: str, path: Sequence[str] = ()) -> tuple[str, ...]:
    """The command that runs code with this process's module path, followed by ``path``."""
    begin = (
        "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "sys.path[:] = json.loads(sys.argv[1]); "
    )
    return (sys.executable, "-c", begin + code, json.dumps([*sys.path, *path]), *arguments)


class ChildProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", output: asyncio.StreamReader) -> None:
        self._process = process
        self._output = output
        self._input: asyncio.StreamWriter | None = None
        self._ends = list[asyncio.BaseTransport]()

    @classmethod
    async def start(cls, command: Sequence[str]) -> Self:
        pipe = subprocess.PIPE
        loop = asyncio.get_running_loop()
        output = asyncio.StreamReader()
        # The loop's own way forks, which takes five times as long: it copies the page tables of the
        # whole process.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)  # noqa: ASYNC220, S603
        child = cls(process, output)
        pipes = process.stdout, process.stdin
        try:
            read, written = (
                asyncio.StreamReaderProtocol(each) for each in (output, asyncio.StreamReader())
            )
            child._ends.append((await loop.connect_read_pipe(lambda: read, process.stdout))[0])
            transport, _ = await loop.connect_write_pipe(lambda: written, process.stdin)
            child._ends.append(transport)
            child._input = asyncio.StreamWriter(transport, written, None, loop)
        except BaseException:
            for open_pipe in pipes[len(child._ends) :]:  # a transport closes its own
                with suppress(OSError):  # where the loop was interrupted it has closed it
                    cast("BinaryIO", open_pipe).close()
            await child.end()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def send(self, *frames: bytes | memoryview) -> None:
        """A long frame is written in pieces. Raises ConnectionError where the process has ended."""
        output = self._input
        assert output is not None  # noqa: S101 - it was started with one
        for frame in frames:
            whole = memoryview(frame).cast("B")
            output.write(LENGTH.pack(len(whole)))
            for start in range(0, len(whole), AT_ONCE):
                output.write(whole[start : start + AT_ONCE])
                await output.drain()
        await output.drain()

    async def receive(self, *, limit: int) -> bytes:
        """Raises IncompleteReadError where the process has ended, ValueError for an answer too
        long.
        """
        size = LENGTH.unpack(await self._output.readexactly(LENGTH.size))[0]
        if size > limit:
            raise ValueError("the answer is too long")
        return await self._output.readexactly(size)

    async def ended_by(self) -> int:
        """The signal that ended it, 0 where none did; a running process is killed."""
        await self.end()
        return max(0, -(self._process.returncode or 0))

    async def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for end in self._ends:
            end.close()
        await asyncio.to_thread(self._process.wait)


def answering() -> tuple[BinaryIO, Frames]:
    """Where this process writes its answers and reads its requests; printed output goes to standard
    error.
    """
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    frames = Frames()
    threading.Thread(target=_read, args=(sys.stdin.buffer, frames), daemon=True).start()
    return output, frames


def write_frame(output: BinaryIO, frame: bytes) -> None:
    """No reader is left for a process whose Weir is gone: it ends without output."""
    try:
        output.write(LENGTH.pack(len(frame)) + frame)
        output.flush()
    except BrokenPipeError:
        os._exit(0)


def _read(source: BinaryIO, frames: Frames) -> None:
    """End the process at the end of its input, whatever it is doing."""
    try:
        while header := source.read(LENGTH.size):
            frames.put(source.read(LENGTH.unpack(header)[0]))
    finally:
        os._exit(0)


def load(path: str) -> Function:
    """Raises LookupError with the reason."""
    module, colon, name = path.partition(":")
    if not colon or not name or ":" in name:
        raise LookupError(SHAPE)
    try:
        found: Any = operator.attrgetter(name)(importlib.import_module(module))
    except BaseException as error:  # noqa: BLE001 - a module of somebody else's may raise anything, SystemExit too
        raise LookupError(f"it cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise LookupError("a plain function is needed")
    with suppress(ValueError):  # a built-in without a signature
        try:
            inspect.signature(found).bind(None, None)
        except TypeError:
            raise LookupError("it does not take two arguments (messages, budget)") from None
    return found  # type: ignore[no-any-return]


def work(path: str) -> None:
    output, frames = answering()
    try:
        function = load(path)
    except LookupError as error:
        _write(output, {"failed": str(error)})
        return
    _write(output, {"messages": []})  # it is ready
    while True:
        asked = json.loads(frames.get())
        _write(output, _answer(function, asked["messages"], asked["budget"]))


def _answer(function: Function, messages: Any, budget: Any) -> dict[str, Any]:
    try:
        return {"messages": function(messages, budget)}
    except BaseException as error:  # noqa: BLE001 - whatever an operator's function does, the next layer goes on
        return {"failed": f"it raised {_where(error)}"}


def _where(error: BaseException) -> str:
    """Without the text of the exception, which may quote a message."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    place = f" at {Path(last.filename).name}:{last.lineno}" if last else ""
    return type(error).__name__ + place


def _write(output: BinaryIO, value: dict[str, Any]) -> None:
    try:
        body = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        body = json.dumps({"failed": "what it gave back is not JSON"}).encode()
    write_frame(output, body)
