"""A process that is asked and answers by frames: four bytes of length, the rest.

It ends as soon as its input is closed, even while it works, so that it never outlives the Weir that started it.
"""

import asyncio
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO, Self

LENGTH = struct.Struct(">I")
AT_ONCE = 256 * 1024
Frames = queue.SimpleQueue[bytes]


def python(code: str, *arguments: str, path: Sequence[str] = ()) -> tuple[str, ...]:
    """The command that runs code where modules are looked for as here, and then in ``path``."""
    begin = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    return (sys.executable, "-c", begin + code, json.dumps([*sys.path, *path]), *arguments)


class ChildProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", output: asyncio.StreamReader) -> None:
        self._process = process
        self._output = output
        self._input: asyncio.StreamWriter | None = None
        self._ends = list[asyncio.BaseTransport]()

    @classmethod
    async def start(cls, command: Sequence[str]) -> Self:
        pipe, loop, output = subprocess.PIPE, asyncio.get_running_loop(), asyncio.StreamReader()
        # The loop's own way forks, which takes it five times as long: it copies the page tables of all that Weir holds.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)  # noqa: ASYNC220, S603
        child = cls(process, output)
        try:
            read, written = (asyncio.StreamReaderProtocol(each) for each in (output, asyncio.StreamReader()))
            child._ends.append((await loop.connect_read_pipe(lambda: read, process.stdout))[0])
            transport, _ = await loop.connect_write_pipe(lambda: written, process.stdin)
            child._ends.append(transport)
            child._input = asyncio.StreamWriter(transport, written, None, loop)
        except BaseException:
            with process:
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
        """Raises IncompleteReadError where the process has ended, ValueError for an answer too long."""
        size = LENGTH.unpack(await self._output.readexactly(LENGTH.size))[0]
        if size > limit:
            raise ValueError("the answer is too long")
        return await self._output.readexactly(size)

    async def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for end in self._ends:
            end.close()
        await asyncio.to_thread(self._process.wait)


def answering() -> tuple[BinaryIO, Frames]:
    """Where this process writes its answers, and what it is asked; whatever prints goes to standard error."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    frames = Frames()
    threading.Thread(target=_read, args=(sys.stdin.buffer, frames), daemon=True).start()
    return output, frames


def write_frame(output: BinaryIO, frame: bytes) -> None:
    output.write(LENGTH.pack(len(frame)) + frame)
    output.flush()


def _read(source: BinaryIO, frames: Frames) -> None:
    """At the end of the input end the process, whatever it is doing."""
    try:
        while header := source.read(LENGTH.size):
            frames.put(source.read(LENGTH.unpack(header)[0]))
    finally:
        os._exit(0)
