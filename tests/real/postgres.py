"""A PostgreSQL server of the tests' own: the machine's programs, a data directory that nobody else has, a free port."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.functional.harness import free_port
from tests.real.environments import Unavailable, environment

PATIENCE = 60.0
UNPRIVILEGED = "nobody"
"""The server refuses to run as root; so does whoever makes its directory."""
OPTIONS = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "shared_buffers=16MB")


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a database without a table in it; Unavailable where there is no server, or no driver."""
    programs, driver = _programs(), _driver()
    folder = Path(tempfile.mkdtemp(prefix="weir-postgres-"))
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    process: subprocess.Popen[bytes] | None = None
    try:
        if user is not None:
            shutil.chown(folder, user)
        made = _run(programs / "initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "weir", "-N", user=user)
        if made.returncode:
            raise Unavailable(f"initdb: {made.stderr.decode(errors='replace').strip()[-200:]}")
        port = free_port()
        settings = [word for option in (*OPTIONS, f"port={port}") for word in ("-c", option)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(programs / "postgres"), "-D", str(folder / "data"), *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                user=user,
                cwd=folder,
            )
        _wait(programs, port, process, folder / "log", user=user)
        sys.path.insert(0, str(driver))
        try:
            yield f"postgresql+asyncpg://weir@127.0.0.1:{port}/postgres"
        finally:
            sys.path.remove(str(driver))
    finally:
        if process is not None:
            process.terminate()  # SIGTERM: it waits for connections, of which none is left
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _programs() -> Path:
    """Where the server's programs are."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    if found is None or not (Path(found).resolve().parent / "postgres").exists():
        raise Unavailable("there is no PostgreSQL server on this machine")
    return Path(found).resolve().parent


def _version(folder: Path) -> int:
    return int(folder.parent.name) if folder.parent.name.isdigit() else 0


def _driver() -> Path:
    """The folder with the driver in it."""
    return next((environment("postgres") / "lib").glob("python*/site-packages"))


def _run(program: Path, *words: str, user: str | None) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [str(program), *words], capture_output=True, timeout=PATIENCE, user=user, cwd="/", check=False
    )


def _wait(programs: Path, port: int, process: "subprocess.Popen[bytes]", log: Path, *, user: str | None) -> None:
    """Return once it takes connections."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        asked = ("-h", "127.0.0.1", "-p", str(port), "-U", "weir", "-d", "postgres", "-q")
        if _run(programs / "pg_isready", *asked, user=user).returncode == 0:
            return
        time.sleep(0.1)
    raise Unavailable(f"the server did not start: {log.read_text(errors='replace')[-300:]}")
