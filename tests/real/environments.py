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
CLIENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weir" / "clients"
"""Where programs of npm's are installed: some are hundreds of megabytes, and every working tree can use them."""
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


def packages(name: str) -> Path:
    """A folder with the ``node_modules`` that ``npm/NAME/package-lock.json`` describes.

    Raises Unavailable where there is no Node, or npm cannot install it in five minutes.
    """
    lock = HERE / "npm" / name / "package-lock.json"
    folder = CLIENTS / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if shutil.which("npm") is None:
        raise Unavailable("there is no npm")
    with alone(name, CLIENTS):
        if not (folder / STAMP).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(lock.parent, folder)
            _install_packages(folder)
            (folder / STAMP).touch()
    return folder


def _install_packages(folder: Path) -> None:
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{folder.name} could not be installed in {PATIENCE:.0f} s") from None
    assert "EINTEGRITY" not in done.stderr, done.stderr
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{folder.name} could not be installed: {last}")


@contextmanager
def alone(name: str, within: Path = CACHE) -> Iterator[None]:
    """Only one process at a time builds what is called ``name``."""
    within.mkdir(parents=True, exist_ok=True)
    with (within / f"{name}.busy").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(folder: Path, lock: Path) -> None:
    # what of it is run is compiled when it is imported: of an SDK that is a small part
    options = ["-q", "--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes", "--no-compile"]
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
