"""Processes of Weir's without the seconds of imports that each of them would begin with.

One process imports the product and waits. Whoever starts ``python -m proxy …``, or a process that plans, gets one that
is forked from it, with the arguments, the environment, the folder and the descriptors that it was to have; it is a
child of whoever asked, as any other. What is started in another way, or with another environment as far as Python or an import reads it, is
started as it stands. All forks of one process have one seed of ``hash()``; what else an import draws or keeps of its
process, a fork draws anew.
"""

import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import multiprocessing
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from proxy.child import python
from proxy.config.presets import preset_policies
from proxy.planning import workers
from proxy.wire import counting

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "proxy"]
PLANS = [*python("from proxy.planning.workers import work; work()")[:3]]
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux: orphans below get this process as their parent
MAX_MESSAGE = 1 << 20
EARLY = ("PYTHON", "LD_", "MALLOC_", "TZ", "LANG", "LC_")
INHERITED = 160 * 2**20
"""Bytes at most of a fork that are its parent's: imports, and a vocabulary."""
LATE = frozenset({"PYTHONPATH", "HOME"})
"""The search path can be set later, and of the home an import learns only where it would be searched."""
STREAMS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
OTHERWISE = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
IDS = ("umask", "process_group")
KNOWN = {"self", "args", "cwd", "env", "start_new_session", *STREAMS, *OTHERWISE, *IDS} | {
    *("close_fds", "startupinfo", "creationflags", "restore_signals"),
}
"""What ``subprocess`` asks itself for, by the names of Python 3.11."""


def early(environment: Mapping[str, str], read: Collection[str] = ()) -> dict[str, str]:
    """What of an environment has been read once everything is imported: by Python itself, and those of ``read``."""
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(EARLY) or name in read) and name not in LATE
    }


@contextmanager
def forked_processes() -> Iterator[None]:
    """While this is open every such process that can be is forked."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(execute)
    ready: list[_Ready] = []

    @functools.wraps(execute)
    def fork_or_execute(popen: Any, *given: Any) -> None:
        told = signature.bind(popen, *given).arguments
        args, pipes = told["args"], [told[name] for name in STREAMS]
        environment = dict(os.environ if told["env"] is None else told["env"])
        plain = not any(told[name] for name in OTHERWISE) and all(told[name] < 0 for name in IDS)
        if not plain or list(args[:3]) not in (COMMAND, PLANS):
            execute(popen, *given)
            return
        if not ready:
            ready.append(_Ready())
        if not ready[0].is_as_in(environment):
            execute(popen, *given)
            return
        session = bool(told["start_new_session"])
        words = [str(word) for word in args[2:]]
        asked = {"words": words, "env": environment, "session": session}
        folder = str(Path(told["cwd"] or ".").absolute())
        standard = [own if own != -1 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        popen.pid = ready[0].fork({**asked, "cwd": folder}, standard)
        popen._child_created = True
        popen._close_pipe_fds(*pipes)

    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux" and set(signature.parameters) == KNOWN:
            patch.setattr(subprocess.Popen, "_execute_child", fork_or_execute)
            patch.setattr(workers, "LARGE", workers.LARGE + INHERITED)
            if "PYTEST_XDIST_WORKER" in os.environ:  # it will be wanted: no test has to wait for its imports
                ready.append(_Ready())
        yield
    for each in ready:
        each.end()


class _Ready:
    """The process that has imported everything, as seen by whoever wants a fork of it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for line in (self._line, theirs):
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE)
            words = [sys.executable, "-c", "from tests.forked import wait; wait()", str(theirs.fileno())]
            self._environment = dict(os.environ)
            self._process = subprocess.Popen(words, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._prctl = ctypes.CDLL(None).prctl

    @functools.cached_property
    def _read(self) -> frozenset[str]:
        """Names of the environment that it has read; it can be asked for forks once it says which."""
        return frozenset(json.loads(self._line.recv(MAX_MESSAGE)))

    def is_as_in(self, environment: Mapping[str, str]) -> bool:
        """Whether a process of this environment would have imported the same."""
        return early(environment, self._read) == early(self._environment, self._read)

    def fork(self, asked: Mapping[str, Any], standard: list[int]) -> int:
        """The id of a new child of this process."""
        self._prctl(SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._line, [json.dumps(asked).encode()], standard)
            return int(self._line.recv(32))
        finally:
            self._prctl(SUBREAPER, 0, 0, 0, 0)

    def end(self) -> None:
        self._line.close()
        self._process.kill()  # it may still be importing
        self._process.wait()


def built_once(build: Callable[[str, Sequence[Path]], Any]) -> Callable[[str, Sequence[Path]], Any]:
    """``build``, which makes the same of the same places; a folder that is not there is none."""
    built = functools.cache(build)

    def once(name: str, directories: Sequence[Path]) -> Any:
        there = tuple(each for each in directories if each.is_dir())
        return built(name, there or tuple(directories))

    return once


def wait() -> NoReturn:
    """Import what every command needs, and fork for whoever asks; a fork returns from here as the command's own run."""
    line = socket.socket(fileno=int(sys.argv[1]))
    with _names_read() as read:
        for command in pkgutil.iter_modules(importlib.import_module("proxy.cli").__path__):
            importlib.import_module(f"proxy.cli.{command.name}")
        for late in ("uvloop", "uvicorn.lifespan.on", "pydantic.dataclasses", "encodings.idna"):
            importlib.import_module(late)
        preset_policies()  # kept as long as their files stay as they are, which every command looks at
    counting._build = built_once(counting._build)  # for the same places the same, and there it is already
    counting._build("o200k_base", counting.vocabulary_directories(None))
    line.send(json.dumps([*read]).encode())
    gc.collect()
    gc.freeze()
    while True:
        asked, standard, *_ = socket.recv_fds(line, MAX_MESSAGE, 3)
        if not asked:
            os._exit(0)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if (child := os.fork()) == 0:
                for descriptor in (reading, writing, line.detach()):
                    os.close(descriptor)
                _become(json.loads(asked), standard)
            os.write(writing, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from here on the fork belongs to whoever asked
        line.send(os.read(reading, 32))
        for descriptor in (reading, writing, *standard):
            os.close(descriptor)


@contextmanager
def _names_read() -> Iterator[set[str]]:
    """Names of the environment that are read meanwhile."""
    names: set[str] = set()
    look_up = type(os.environ).__getitem__

    def noted(environment: Any, name: str) -> str:
        names.add(name)
        return look_up(environment, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(os.environ), "__getitem__", noted)
        yield names


def _become(asked: Mapping[str, Any], standard: list[int]) -> NoReturn:
    """Run the command as Python does with ``-m``, or ``-c``."""
    if asked["session"]:
        os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    multiprocessing.current_process().authkey = os.urandom(32)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    path = asked["env"].get("PYTHONPATH", "")
    sys.path[:1] = [asked["cwd"], *(str(Path(each).absolute()) for each in path.split(os.pathsep) if each)]
    code, *words = asked["words"]
    if code == PLANS[2]:
        sys.argv[:] = ["-c", *words]
        exec(code, {"__name__": "__main__"})
        sys.exit()
    sys.argv[:] = ["proxy", *words]
    runpy.run_module("proxy", run_name="__main__", alter_sys=True)
    sys.exit()


def _stream(number: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """What Python makes of a standard descriptor when it starts."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    buffering = 0 if at_once and number else -1
    raw: Any = open(number, "wb" if number else "rb", buffering, closefd=False)  # noqa: SIM115 - the process has it to its end
    lines = number == 2 or os.isatty(number)
    return io.TextIOWrapper(
        raw, old.encoding, old.errors, line_buffering=bool(number) and lines, write_through=at_once and bool(number)
    )
