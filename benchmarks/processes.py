"""The processes of a benchmark: started on their own core, asked for their cost, stopped by their
id.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
READY_WITHIN = 30.0
STOP_WITHIN = 10.0
QUIET_WITHIN = 2.0
FORGOTTEN = ("WEIR_", "OTEL_", "OPENAI_")


@dataclass(frozen=True, slots=True)
class Cores:
    """Where processes run: what is measured on ``tested``, everything else on ``others``."""

    tested: frozenset[int]
    others: frozenset[int]

    @classmethod
    def split(cls) -> "Cores":
        """The first core for what is measured, the rest for the others; one core is shared if there
        is only one.
        """
        first, *rest = sorted(os.sched_getaffinity(0))
        return cls(frozenset({first}), frozenset(rest or [first]))


@dataclass(slots=True)
class Running:
    """A process that was started here."""

    name: str
    process: "subprocess.Popen[str]"
    port: int = 0
    ready_s: float = 0.0

    @property
    def pid(self) -> int:
        """Its id."""
        return self.process.pid

    def cpu(self) -> float:
        """CPU seconds so far, user and system, of all its threads, those that ended too.

        Linux gives each process a CPU clock whose id is made from the process id
        (clock_getcpuclockid(3)).
        """
        return time.clock_gettime((~self.pid << 3) | 2)

    def rss_mb(self) -> float:
        """Resident memory now, MB."""
        return _status(self.pid, "VmRSS") / 1024

    def peak_mb(self) -> float:
        """The most resident memory it ever had, MB."""
        return _status(self.pid, "VmHWM") / 1024

    def settle(self) -> None:
        """Wait until it has finished what it does after its answers: 0.1 s with next to no CPU
        used.
        """
        ends = time.monotonic() + QUIET_WITHIN
        before = self.cpu()
        while time.monotonic() < ends:
            time.sleep(0.1)
            now = self.cpu()
            if now - before < 0.002:
                return
            before = now

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """One line in, one line out. Raises RuntimeError if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(dict(job)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @contextmanager
    def profiled(self, out: Path) -> Iterator[None]:
        """Have its profiler (``benchmarks.profiled``) count what happens inside, and write
        ``out``.
        """
        self.settle()
        self.process.send_signal(signal.SIGUSR1)
        yield
        self.settle()
        self.process.send_signal(signal.SIGUSR2)
        ends = time.monotonic() + STOP_WITHIN
        while not out.exists():
            if time.monotonic() > ends:
                raise RuntimeError(f"the profiler of {self.name} has written nothing")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def companion(
    module: str, *arguments: str, name: str, cores: frozenset[int], home: Path
) -> Iterator[Running]:
    """A module of this package as a process; its port is in the first line that it prints, unless
    it reads jobs.
    """
    log = home / f"{name}.log"
    with log.open("w") as errors:
        running = _start(
            name,
            [sys.executable, "-m", f"benchmarks.{module}", *arguments],
            cores=cores,
            errors=errors,
        )
        try:
            if module != "load":
                assert running.process.stdout is not None
                line = running.process.stdout.readline()
                if not line:
                    raise RuntimeError(f"{name} did not start: {log.read_text()[-2000:]}")
                running.port = json.loads(line)["port"]
                _wait_until_open(running)
            yield running
        finally:
            running.stop()


@contextmanager
def weir(
    name: str,
    *,
    upstream: int,
    window: int,
    cores: frozenset[int],
    home: Path,
    otlp: int | None = None,
    profile: tuple[str, Path] | None = None,
    extra: Sequence[str] = (),
) -> Iterator[Running]:
    """Weir as its users start it, ready.

    ``otlp``: the port that its spans are sent to. ``profile``: one of ``benchmarks.profiled`` and
    the file it writes.
    """
    port = _free_port()
    log = home / f"{name}.log"
    entry = (
        ["-m", "proxy"] if profile is None else ["-m", "benchmarks.profiled", *map(str, profile)]
    )
    command = [
        sys.executable,
        *entry,
        "serve",
        "--upstream",
        f"http://127.0.0.1:{upstream}/v1",
        "--window",
        str(window),
        "--store",
        f"sqlite+aiosqlite:///{home}/{name}.db",
        "--port",
        str(port),
        *extra,
    ]
    environment = {"WEIR_DRAIN": "0"}
    if otlp is not None:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{otlp}"
    with log.open("w") as errors:
        started = time.monotonic()
        running = _start(name, command, cores=cores, errors=errors, environment=environment)
        running.port = port
        try:
            _wait_until_ready(running, log)
            running.ready_s = time.monotonic() - started
            yield running
        finally:
            running.stop()


@contextmanager
def other(
    name: str, command: str, *, upstream: int, window: int, cores: frozenset[int], home: Path
) -> Iterator[Running]:
    """Another proxy, started by ``command`` with the same places in braces as those of
    ``benchmarks.peers``.
    """
    port = _free_port()
    folder = home / name
    folder.mkdir()
    root = f"http://127.0.0.1:{upstream}"
    places = {
        "port": port,
        "root": root,
        "upstream": f"{root}/v1",
        "window": window,
        "folder": folder,
    }
    given = shlex.split(
        command.format_map(places | {"trigger": window * 7 // 10, "summariser": ""})
    )
    with (home / f"{name}.log").open("w") as errors:
        running = _start(name, given, cores=cores, errors=errors)
        running.port = port
        try:
            _wait_until_open(running)
            yield running
        finally:
            running.stop()


def _start(
    name: str,
    command: Sequence[str],
    *,
    cores: frozenset[int],
    errors: IO[str],
    environment: Mapping[str, str] | None = None,
) -> Running:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(FORGOTTEN)}
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=inherited | {"PYTHONUNBUFFERED": "1"} | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    finally:
        os.sched_setaffinity(0, mine)
    return Running(name, process)


def _wait_until_ready(running: Running, log: Path) -> None:
    ends = time.monotonic() + READY_WITHIN
    while time.monotonic() < ends:
        if running.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{running.port}/readyz", timeout=2
            ) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.01)
    raise RuntimeError(f"{running.name} did not become ready: {log.read_text()[-3000:]}")


def _wait_until_open(running: Running) -> None:
    ends = time.monotonic() + READY_WITHIN
    while time.monotonic() < ends:
        try:
            socket.create_connection(("127.0.0.1", running.port), timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return
    raise RuntimeError(f"{running.name} does not listen")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0
