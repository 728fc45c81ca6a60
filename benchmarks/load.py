"""The load generator: a closed loop of connections in bare asyncio that checks every answer.

    python -m benchmarks.load

Reads one job as JSON from each line of its input and answers each with one line: what was measured.
Conversations live as long as the process, so that a job goes on where the last one with the same
``name`` stopped.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import uvloop

from benchmarks.traffic import MESSAGES, Request, Source, source

PATIENCE = 30.0
KEPT_ERRORS = 5
_HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@dataclass(slots=True)
class Tally:
    """What was measured, times in seconds."""

    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    failed: int = 0
    seen: dict[str, str] = field(default_factory=dict)

    def fail(self, why: str) -> None:
        """Count a wrong answer."""
        self.failed += 1
        if len(self.errors) < KEPT_ERRORS:
            self.errors.append(why)

    def report(self, elapsed: float) -> dict[str, Any]:
        """The figures, in milliseconds."""
        return {
            "requests": len(self.latencies),
            "failed": self.failed,
            "errors": self.errors,
            "elapsed_s": round(elapsed, 3),
            "p50_ms": percentile(self.latencies, 0.50),
            "p99_ms": percentile(self.latencies, 0.99),
            "max_ms": percentile(self.latencies, 1.0),
            "first_byte_p50_ms": percentile(self.first_bytes, 0.50),
            "headers": self.seen,
        }


def percentile(values: list[float], share: float) -> float | None:
    """The value below which ``share`` of the values are, in milliseconds; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)


class Connection(asyncio.Protocol):
    """One connection that sends the next request when it has the answer to the last one."""

    def __init__(
        self, make: Source, tally: Tally, *, until: float, most: int | None = None
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._make = make
        self._tally = tally
        self._until = until
        self._left = most
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None
        self._sent = 0.0
        self._reset()

    def _reset(self) -> None:
        self._buffer = bytearray()
        self._body = bytearray()
        self._head = b""
        self._length: int | None = None
        self._first: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._tally.fail(f"the connection was closed: {exc}")
            self.done.set_result(None)

    def _next(self) -> None:
        assert self._transport is not None
        if perf_counter() >= self._until or self._left == 0:
            self.done.set_result(None)
            self._transport.close()
            return
        if self._left is not None:
            self._left -= 1
        self._reset()
        self._request = self._make()
        self._sent = perf_counter()
        self._transport.write(self._request.data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._head:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = bytes(self._buffer[:end]).lower()
            del self._buffer[: end + 4]
            if b"transfer-encoding: chunked" not in self._head:
                self._length = int(_field(self._head, b"content-length") or b"0")
        if self._buffer and self._first is None:
            self._first = perf_counter() - self._sent
        if self._length is not None:
            if len(self._buffer) >= self._length:
                self._answered(bytes(self._buffer))
        elif self._dechunk():
            self._answered(bytes(self._body))

    def _dechunk(self) -> bool:
        buffer = self._buffer
        start = 0
        while (end := buffer.find(b"\r\n", start)) >= 0:
            size = int(buffer[start:end], 16)
            if len(buffer) < end + size + 4:
                break
            if not size:
                return True
            self._body += buffer[end + 2 : end + 2 + size]
            start = end + size + 4
        if start:
            del buffer[:start]
        return False

    def _answered(self, body: bytes) -> None:
        assert self._request is not None
        tally = self._tally
        now = perf_counter()
        tally.latencies.append(now - self._sent)
        if self._first is not None:
            tally.first_bytes.append(self._first)
        status = self._head[9:12]
        if status != b"200":
            tally.fail(f"status {status.decode()}: {body[:200].decode('utf-8', 'replace')}")
        elif body != self._request.expected:
            tally.fail(
                f"another body than expected, {len(body)} bytes:"
                f" {body[:200].decode('utf-8', 'replace')}"
            )
        elif _field(self._head, b"x-weir-actions") not in (b"", b"none"):
            tally.fail(
                f"something was done to it: {_field(self._head, b'x-weir-actions').decode()}"
            )
        elif not tally.seen:
            tally.seen.update(
                (name.decode(), value.strip().decode())
                for name, _, value in (line.partition(b":") for line in self._head.split(b"\r\n"))
                if name.startswith(b"x-weir-")
            )
        self._next()


class Pulse(asyncio.Protocol):
    """Asks for ``/healthz`` all the time: how long that takes tells how long the event loop was
    held.
    """

    def __init__(self, pause: float = 0.002) -> None:
        self.waits: list[float] = []
        self._pause = pause
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._sent = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._sent = perf_counter()
            self._transport.write(_HEALTH)

    def data_received(self, data: bytes) -> None:
        del data
        self.waits.append(perf_counter() - self._sent)
        self._loop.call_later(self._pause, self._ask)

    def stop(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.close()


def _prepared(make: Source, count: int) -> Source:
    """The next ``count`` requests, made beforehand so that making them delays nothing that is
    measured.
    """
    return iter([make() for _ in range(count)]).__next__


def _field(head: bytes, name: bytes) -> bytes:
    start = head.find(b"\r\n" + name + b":")
    return head[start + len(name) + 3 :].split(b"\r\n", 1)[0].strip() if start >= 0 else b""


async def run(job: dict[str, Any], known: dict[tuple[Any, ...], Source]) -> dict[str, Any]:
    """What one job measured."""
    loop = asyncio.get_running_loop()
    case = job["case"]
    messages = job.get("messages", MESSAGES)
    sources = []
    for seed in range(job["connections"]):
        key = (job["name"], case, messages, seed)
        if key not in known:
            known[key] = source(case, seed=seed, messages=messages)
        sources.append(_prepared(known[key], job["most"]) if job.get("most") else known[key])
    tally = Tally()
    until = perf_counter() + job["seconds"]
    pulse = None
    if job.get("pulse"):
        _, pulse = await loop.create_connection(Pulse, "127.0.0.1", job["port"])
    started = perf_counter()
    connections = []
    for make in sources:
        factory = partial(Connection, make, tally, until=until, most=job.get("most"))
        connections.append((await loop.create_connection(factory, "127.0.0.1", job["port"]))[1])
        await asyncio.sleep(job.get("spread", 0.0) / len(sources))
    _, late = await asyncio.wait([c.done for c in connections], timeout=job["seconds"] + PATIENCE)
    for _ in late:
        tally.fail(f"no answer within {PATIENCE:g} seconds")
    report = tally.report(perf_counter() - started)
    if pulse is not None:
        pulse.stop()
        report["pulse_p50_ms"] = percentile(pulse.waits, 0.5)
        report["pulse_max_ms"] = percentile(pulse.waits, 1.0)
    return report


def main() -> None:
    """Do jobs until the input ends."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.load", description="The load generator."
    ).parse_args()
    known: dict[tuple[Any, ...], Source] = {}

    async def jobs() -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await run(json.loads(line), known)), flush=True)

    uvloop.run(jobs())


if __name__ == "__main__":
    main()
