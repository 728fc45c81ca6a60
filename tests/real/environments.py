"""Private environments for the tests: installed once from a lock with hashes, reused while the lock stays the same."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE / ".cache"
PATIENCE = 300.0
STAMP = "stamp"


class Unavailable(Exception):
    """What cannot be had on this machine, and why; tests that need it are skipped."""


def clean_environment() -> dict[str, str]:
    """The process environment without what would steer Python, Weir or an SDK."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI_", "WEIR_", "OTEL_"))}


def environment(name: str) -> Path:
    """The environment that ``NAME.lock`` describes; its interpreter is ``bin/python``.

    Raises Unavailable where pip cannot install it in five minutes, AssertionError where a file has another hash.
    """
    lock, folder = HERE / f"{name}.lock", CACHE / name
    wanted = f"{sys.version_info[:2]} {hashlib.sha256(lock.read_bytes()).hexdigest()}"
    with alone(name):
        stamp = folder / STAMP
        if not (stamp.is_file() and stamp.read_text() == wanted):
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, symlinks=True)
            _install(folder, lock)
            stamp.write_text(wanted)
    return folder


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Only one process at a time builds what is called ``name``."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{name}.busy").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(folder: Path, lock: Path) -> None:
    options = ["-q", "--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes"]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    try:
        done = subprocess.run(
            [*pip, *options, "--only-binary", ":all:", "-r", str(lock)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=clean_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{lock.name} could not be installed in {PATIENCE:.0f} s") from None
    assert "DO NOT MATCH THE HASHES" not in done.stderr, done.stderr
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{lock.name} could not be installed: {last}")
