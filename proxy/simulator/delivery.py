"""An answer as it goes over the wire, decided before the first byte: what, how fast, and how it ends or misbehaves.

A fault is written ``name``, ``name:argument`` or ``name:argument@times``; with ``@times`` only the first that many
requests of that spelling meet it. In a model it stands behind ``fault:``.
"""

import json
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from proxy.simulator.errors import Dialect, problem_body, status_problem

FAULT_HEADER = "x-sim-fault"
FAULT_PREFIX = "fault:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmission:
    """What is sent.

    Attributes:
        chunks: the body in the pieces in which it is sent; one for JSON, one an event for a stream.
        length: the Content-Length to state, None for a chunked body.
        before: seconds until the headers; ``between`` until each further chunk.
        stall_at: index of the chunk that is never sent, headers included at -1.
        cut_at: index of the chunk before which the connection is dropped without a proper end.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: tuple[bytes, ...] = ()
    length: int | None = None
    before: float = 0.0
    between: float = 0.0
    stall_at: int | None = None
    cut_at: int | None = None

    @property
    def streamed(self) -> bool:
        """Whether the body is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def completes(self) -> bool:
        """Whether the client gets a whole 200."""
        return self.status == 200 and self.stall_at is None and self.cut_at is None


def as_json(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Transmission:
    """A JSON answer with its length."""
    named = {"content-type": "application/json", **(headers or {})}
    return Transmission(status=status, headers=named, chunks=(body,), length=len(body))


def as_stream(events: tuple[bytes, ...], *, headers: Mapping[str, str] | None = None) -> Transmission:
    """A stream of server-sent events."""
    named = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **(headers or {})}
    return Transmission(headers=named, chunks=events)


def compact(value: Any) -> bytes:
    """JSON without spaces, non-ASCII as it is."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


class Connection(Protocol):
    """The way to one client."""

    async def wait(self, seconds: float | None) -> bool:
        """Sleep (None: for ever); True as soon as the client left or the server stops."""

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Hand an ASGI message to the server."""


async def deliver(delivery: Transmission, connection: Connection) -> None:
    """Send it, as far as it goes and the client stays."""
    if delivery.stall_at == -1:
        await connection.wait(None)
        return
    if await connection.wait(delivery.before):
        return
    headers = [(name.encode(), value.encode()) for name, value in delivery.headers.items()]
    if delivery.length is not None:
        headers.append((b"content-length", str(delivery.length).encode()))
    await connection.send({"type": "http.response.start", "status": delivery.status, "headers": headers})
    last = len(delivery.chunks) - 1 if delivery.stall_at is None and delivery.cut_at is None else None
    for index, chunk in enumerate(delivery.chunks):
        if index == delivery.stall_at:
            await connection.wait(None)
            return
        if index == delivery.cut_at or await connection.wait(delivery.between if index else 0):
            return
        await connection.send({"type": "http.response.body", "body": chunk, "more_body": index != last})
    if delivery.stall_at is not None:
        await connection.wait(None)
    if last == -1:
        await connection.send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One misbehaviour; ``times`` None stands for every request."""

    name: str = ""
    argument: str = ""
    times: int | None = None

    @property
    def is_status(self) -> bool:
        """Whether the server answers with an HTTP status that has nothing to do with the request."""
        return self.name.isdigit() and len(self.name) == 3

    def number(self, default: float) -> float:
        """The argument as a number, ``default`` where it is none."""
        try:
            return float(self.argument)
        except ValueError:
            return default


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a fault may look at: ``overflow`` is the error body of a request that is too long."""

    dialect: Dialect
    model: str
    overflow: bytes

    @property
    def error_event(self) -> bytes:
        """The overflow as an event of a stream."""
        event = b"event: error\n" if self.dialect is Dialect.ANTHROPIC else b""
        return event + b"data: " + self.overflow + b"\n\n"


Change = Callable[[Transmission, InjectedFault, Scene], Transmission]


@dataclass(frozen=True, slots=True)
class FaultRule:
    """How a fault changes the delivery; ``wins`` where it comes before the window is looked at."""

    change: Change = lambda delivery, _fault, _scene: delivery
    wins: bool = False


def parse_fault(text: str, known: Mapping[str, FaultRule]) -> InjectedFault:
    """The fault that is written as ``text``; raises ValueError for an unknown name."""
    rest, _, times = text.removeprefix(FAULT_PREFIX).partition("@")
    name, _, argument = rest.partition(":")
    fault = InjectedFault(name, argument, int(times) if times.isdigit() else None)
    if name not in known and not fault.is_status:
        raise ValueError(f"unknown fault {name!r}; known are {', '.join(sorted({*known, '<status>'}))}")
    return fault


def answer_with_status(fault: InjectedFault, scene: Scene) -> Transmission:
    """The error with the status that the fault names; its argument are the seconds to wait."""
    status, wait = int(fault.name), fault.argument or "1"
    if status in {204, 304}:
        return Transmission(status=status)
    problem = status_problem(status, model=scene.model, dialect=scene.dialect, retry_after=wait)
    headers = {"retry-after": wait} if status in {429, 503, 529} else {}
    return as_json(json.dumps(problem_body(problem, scene.dialect)).encode(), status=status, headers=headers)


def halved(delivery: Transmission) -> Transmission:
    """A JSON body in two chunks under its full length, so that it can end in the middle."""
    if delivery.streamed or not delivery.chunks:
        return delivery
    body = delivery.chunks[0]
    return replace(delivery, chunks=(body[: len(body) // 2], body[len(body) // 2 :]))


def _error_in_stream(delivery: Transmission, _: InjectedFault, scene: Scene) -> Transmission:
    return replace(delivery, chunks=(scene.error_event,)) if delivery.streamed else as_json(scene.overflow)


FAULTS: Mapping[str, FaultRule] = {
    "latency": FaultRule(lambda sent, fault, _: replace(sent, before=fault.number(1.0)), wins=True),
    "slow_chunks": FaultRule(lambda sent, fault, _: replace(sent, between=fault.number(0.2))),
    "stall": FaultRule(lambda sent, _fault, _scene: replace(sent, stall_at=-1), wins=True),
    "stall_mid_stream": FaultRule(lambda sent, fault, _: replace(halved(sent), stall_at=int(fault.number(1)))),
    "cut_stream": FaultRule(lambda sent, fault, _: replace(halved(sent), cut_at=int(fault.number(1)))),
    "error_in_stream": FaultRule(_error_in_stream),
    # about the window itself: another size, other numbers or words in the error, the error inside a 200
    "window": FaultRule(),
    "wrong_window": FaultRule(),
    "wording": FaultRule(),
    "overflow_in_stream": FaultRule(),
}
