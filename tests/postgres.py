"""A PostgreSQL server of the tests' own: the machine's programs, a data directory that nobody else has, a free port.

The system's own cluster, if the package made one, is left alone. A PgBouncer stands in front of it where a test wants
one. In CI both must be there; elsewhere the tests that need them are skipped without.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from proxy.store import Store
from tests.functional.harness import free_port

PATIENCE = 60.0
UNPRIVILEGED = "nobody"
"""The server refuses to run as root; so does whoever makes its directory."""
OPTIONS = (
    "listen_addresses=127.0.0.1",
    "fsync=off",
    "shared_buffers=16MB",
    "max_connections=100",
    "autovacuum=off",
    "log_min_messages=fatal",
)
ACCESS = """\
local all all trust
host all guarded 127.0.0.1/32 scram-sha-256
hostssl all ciphered 127.0.0.1/32 trust
host all ciphered 127.0.0.1/32 reject
host all all 127.0.0.1/32 trust
"""


class Missing(Exception):
    """There is no server on this machine."""


@dataclass(slots=True)
class Postgres:
    """A running server; ``folder`` is where its socket and its log are."""

    programs: Path
    folder: Path
    port: int
    process: "subprocess.Popen[bytes]"
    migrated: str = ""

    def url(self, database: str = "postgres", *, user: str = "weir") -> str:
        """The URL of a database over TCP, as providers print it."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    async def run(self, *statements: str, database: str = "postgres") -> list[Any]:
        """Run statements as the owner of everything; the rows of the last."""
        connection = await asyncpg.connect(self.url(database))
        try:
            rows: list[Any] = []
            for statement in statements:
                rows = await connection.fetch(statement)
            return rows
        finally:
            await connection.close()

    async def database(self) -> str:
        """The name of a new, empty database."""
        name = f"db_{uuid.uuid4().hex[:12]}"
        await self.run(f"CREATE DATABASE {name}")
        return name

    async def with_schema(self) -> str:
        """The name of a new database with Weir's schema: a copy of the one that the migrations made.

        Its files are copied: from 15 on the server would log every page of them, which takes twice as long.
        """
        if not self.migrated:
            made = await self.database()
            await (await Store.open(self.url(made))).close()
            self.migrated = made
        name = f"db_{uuid.uuid4().hex[:12]}"
        ((version,),) = await self.run("SHOW server_version_num")
        how = "STRATEGY file_copy" if int(version) >= 150_000 else ""
        await self.run(f"CREATE DATABASE {name} TEMPLATE {self.migrated} {how}")
        return name

    async def drop(self, database: str) -> None:
        """Have a database gone, whoever is still connected."""
        await self.run(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def pids(self) -> list[int]:
        """The processes of the server, its backends first."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        return [*(int(pid) for pid in found.stdout.split()), self.process.pid]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Every process of the server stopped: connections stay, and nobody answers."""
        pids = self.pids()[::-1]  # the postmaster first, so that it begins no more
        pids += [pid for pid in self.pids() if pid not in pids]
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                _signal(pid, signal.SIGCONT)

    def start(self) -> None:
        """Begin, and return once it takes connections."""
        settings = [word for option in (*OPTIONS, f"port={self.port}") for word in ("-c", option)]
        settings += ["-c", f"unix_socket_directories={self.folder}"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(self.programs / "postgres"), "-D", str(self.folder / "data"), *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                user=_user(),
                cwd=self.folder,
            )
        asked = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "weir", "-d", "postgres", "-q")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            if _run(self.programs / "pg_isready", *asked).returncode == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {(self.folder / 'log').read_text(errors='replace')[-300:]}")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it, whoever is connected."""
        self.process.send_signal(how)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """A server with TLS, its owner ``weir``; Missing where there are no programs for it."""
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="weir-postgres-"))
    try:
        if _user() is not None:
            shutil.chown(folder, UNPRIVILEGED)
        made = _run(programs / "initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "weir", "-N", "-E", "UTF8")
        assert made.returncode == 0, made.stderr.decode(errors="replace")
        (folder / "data" / "pg_hba.conf").write_text(ACCESS)
        server = Postgres(programs, folder, free_port(), process=None)  # type: ignore[arg-type]  # started next
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def pgbouncer(server: Postgres, *, mode: str = "transaction", size: int = 4, **settings: str) -> Iterator[int]:
    """The port of a PgBouncer in front of ``server`` that gives a server's connection to one ``mode`` at a time."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    if not Path(program).exists():
        raise Missing("there is no pgbouncer on this machine")
    folder, port = Path(tempfile.mkdtemp(prefix="weir-pgbouncer-")), free_port()
    (folder / "users").write_text('"weir" ""\n')
    lines = {
        "listen_addr": "127.0.0.1",
        "listen_port": str(port),
        "unix_socket_dir": "",
        "auth_type": "any",
        "auth_file": str(folder / "users"),
        "pool_mode": mode,
        "default_pool_size": str(size),
        "logfile": str(folder / "log"),
        **settings,
    }
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={server.port} user=weir\n[pgbouncer]\n"
        + "".join(f"{name} = {value}\n" for name, value in lines.items())
    )
    if _user() is not None:
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, UNPRIVILEGED)
    process = subprocess.Popen(
        [program, "-q", str(folder / "pgbouncer.ini")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=_user(),
        cwd=folder,
    )
    try:
        asked = ("-h", "127.0.0.1", "-p", str(port), "-U", "weir", "-d", "postgres", "-q")
        until = time.monotonic() + PATIENCE
        while _run(server.programs / "pg_isready", *asked).returncode:
            assert process.poll() is None, "pgbouncer ended while starting"
            assert time.monotonic() < until, "pgbouncer did not start"
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _user() -> str | None:
    return UNPRIVILEGED if os.geteuid() == 0 else None


def _signal(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


def _programs() -> Path:
    """Where the server's programs are."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    if found is None or not (Path(found).resolve().parent / "postgres").exists():
        raise Missing("there is no PostgreSQL server on this machine")
    return Path(found).resolve().parent


def _version(folder: Path) -> int:
    return int(folder.parent.name) if folder.parent.name.isdigit() else 0


def _run(program: Path, *words: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [str(program), *words], capture_output=True, timeout=PATIENCE, user=_user(), cwd="/", check=False
    )
