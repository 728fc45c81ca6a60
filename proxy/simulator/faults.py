"""Misbehaviour on demand: a fault is named in the model, in the header ``x-sim-fault`` or in the settings.

A fault is written ``name``, ``name:argument`` or ``name:argument@times``; with ``@times`` only the first that
many requests of that spelling meet it. In a model it stands behind ``fault:``.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from proxy.simulator.delivery import Delivery, as_json
from proxy.simulator.dialects import problem_body, status_problem
from proxy.simulator.settings import Dialect, Request

MODEL_PREFIX = "fault:"
HEADER = "x-sim-fault"
_FIRST_TEXT = re.compile(rb'"(?:content|text)":"(?=[^"])')


@dataclass(frozen=True, slots=True)
class Fault:
    """One misbehaviour; ``times`` None stands for every request."""

    name: str
    argument: str = ""
    times: int | None = None

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


def parse_fault(text: str) -> Fault:
    """The fault that is written as ``text``; raises ValueError for an unknown name."""
    rest, _, times = text.removeprefix(MODEL_PREFIX).partition("@")
    name, _, argument = rest.partition(":")
    if name not in FAULTS and name not in WINDOW_FAULTS and not _is_status(name):
        known = ", ".join(sorted({*FAULTS, *WINDOW_FAULTS, "<status>"}))
        raise ValueError(f"unknown fault {name!r}; known are {known}")
    return Fault(name, argument, int(times) if times.isdigit() else None)


def _is_status(name: str) -> bool:
    return name.isdigit() and len(name) == 3


def apply_fault(fault: Fault, delivery: Delivery, scene: Scene) -> Delivery:
    """The delivery as the fault makes it."""
    if _is_status(fault.name):
        return _status(fault, scene)
    change = FAULTS.get(fault.name)
    return delivery if change is None else change(delivery, fault, scene)


def named_fault(request: Request, header: str | None, default: str | None) -> str | None:
    """The spelling of the fault for this request: header, then model, then settings."""
    model = request.get("model")
    if header:
        return header
    if isinstance(model, str) and model.startswith(MODEL_PREFIX):
        return model
    return default


def _status(fault: Fault, scene: Scene) -> Delivery:
    status, wait = int(fault.name), fault.argument or "1"
    problem = status_problem(status, model=scene.model, dialect=scene.dialect, retry_after=wait)
    headers = {"retry-after": wait} if status in {429, 503, 529} else {}
    if status in {204, 304}:
        return Delivery(status=status)
    return as_json(json.dumps(problem_body(problem, scene.dialect)).encode(), status=status, headers=headers)


def _latency(delivery: Delivery, fault: Fault, _: Scene) -> Delivery:
    return replace(delivery, before=fault.number(1.0))


def _slow_chunks(delivery: Delivery, fault: Fault, _: Scene) -> Delivery:
    return replace(delivery, between=fault.number(0.2))


def _stall(delivery: Delivery, _: Fault, __: Scene) -> Delivery:
    return replace(delivery, stall_at=-1)


def _stall_mid_stream(delivery: Delivery, fault: Fault, _: Scene) -> Delivery:
    return replace(_halved(delivery), stall_at=int(fault.number(1)))


def _cut_stream(delivery: Delivery, fault: Fault, _: Scene) -> Delivery:
    return replace(_halved(delivery), cut_at=int(fault.number(1)))


def _halved(delivery: Delivery) -> Delivery:
    """A JSON body in two chunks under its full length, so that it can end in the middle."""
    if delivery.streamed or not delivery.chunks:
        return delivery
    body = delivery.chunks[0]
    return replace(delivery, chunks=(body[: len(body) // 2], body[len(body) // 2 :]))


def _end_early(delivery: Delivery, fault: Fault, _: Scene) -> Delivery:
    if not delivery.streamed:
        return delivery
    return replace(delivery, chunks=delivery.chunks[: int(fault.number(2))])


def _no_done(delivery: Delivery, _: Fault, __: Scene) -> Delivery:
    return replace(delivery, chunks=delivery.chunks[:-1]) if delivery.streamed else delivery


def _error_in_stream(delivery: Delivery, _: Fault, scene: Scene) -> Delivery:
    if not delivery.streamed:
        return as_json(scene.overflow)
    return replace(delivery, chunks=(_error_event(scene),))


def _error_after_content(delivery: Delivery, fault: Fault, scene: Scene) -> Delivery:
    if not delivery.streamed:
        return as_json(scene.overflow)
    return replace(delivery, chunks=(*delivery.chunks[: int(fault.number(2))], _error_event(scene)))


def _error_event(scene: Scene) -> bytes:
    event = b"event: error\n" if scene.dialect is Dialect.ANTHROPIC else b""
    return event + b"data: " + scene.overflow + b"\n\n"


def _empty_200(delivery: Delivery, _: Fault, __: Scene) -> Delivery:
    return replace(delivery, chunks=(), length=None if delivery.streamed else 0)


def _truncated_json(delivery: Delivery, _: Fault, __: Scene) -> Delivery:
    whole = b"".join(delivery.chunks)
    half = whole[: len(whole) // 2]
    return replace(delivery, chunks=(half,), length=None if delivery.streamed else len(half))


def _redirect(_: Delivery, fault: Fault, __: Scene) -> Delivery:
    target = fault.argument or "//redirected.invalid/v1/chat/completions"
    target = target if "://" in target or target.startswith("/") else f"//{target}"
    return Delivery(status=307, headers={"location": target if "://" in target else f"http:{target}"}, length=0)


def _split_bytes(delivery: Delivery, _: Fault, __: Scene) -> Delivery:
    whole = b"".join(delivery.chunks)
    return replace(delivery, chunks=tuple(whole[i : i + 1] for i in range(len(whole))))


def _framing(delivery: Delivery, _: Fault, __: Scene) -> Delivery:
    """Legal but rare framing: byte order mark, comments, CRLF and CR line ends, ``id``, no space after ``data:``."""
    if not delivery.streamed:
        return delivery
    events = [b"\xef\xbb\xbf: connected\n\n"]
    for index, event in enumerate(delivery.chunks):
        match index % 4:
            case 0:
                events.append(event.replace(b"\n", b"\r\n"))
            case 1:
                events.append(b": keep-alive\n\n" + event.replace(b"data: ", b"data:", 1))
            case 2:
                events.append(event.replace(b"\n", b"\r"))
            case _:
                events.append(b"id: %d\nretry: 3000\n" % index + event)
    return replace(delivery, chunks=tuple(events))


def _separators(delivery: Delivery, _: Fault, __: Scene) -> Delivery:
    """Unicode line separators in the text, raw as JSON allows, which only a wrong splitter takes for line ends."""
    marks = "\u2028\u2029\u0085".encode()
    changed = tuple(_FIRST_TEXT.sub(lambda match: match.group() + marks, chunk, count=1) for chunk in delivery.chunks)
    return replace(delivery, chunks=changed, length=None if delivery.streamed else sum(map(len, changed)))


def _huge_event(delivery: Delivery, fault: Fault, _: Scene) -> Delivery:
    if not delivery.streamed:
        return delivery
    filler = b"x" * int(fault.number(1) * 1024 * 1024)
    huge = (
        b'data: {"id":"chatcmpl-huge","object":"chat.completion.chunk","created":0,"model":"sim","choices":[{"index":0,'
    )
    huge += b'"delta":{"content":"' + filler + b'"},"finish_reason":null}]}\n\n'
    return replace(delivery, chunks=(*delivery.chunks[:1], huge, *delivery.chunks[1:]))


def _html(_: Delivery, fault: Fault, __: Scene) -> Delivery:
    body = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
    status = int(fault.number(502))
    return Delivery(status=status, headers={"content-type": "text/html"}, chunks=(body,), length=len(body))


Change = Callable[[Delivery, Fault, Scene], Delivery]

FAULTS: Mapping[str, Change] = {
    "latency": _latency,
    "slow_chunks": _slow_chunks,
    "stall": _stall,
    "stall_mid_stream": _stall_mid_stream,
    "cut_stream": _cut_stream,
    "end_early": _end_early,
    "no_done": _no_done,
    "error_in_stream": _error_in_stream,
    "error_in_stream_after_content": _error_after_content,
    "empty_200": _empty_200,
    "truncated_json": _truncated_json,
    "redirect": _redirect,
    "split_bytes": _split_bytes,
    "framing": _framing,
    "separators": _separators,
    "huge_event": _huge_event,
    "html": _html,
}
WINDOW_FAULTS = frozenset({"window", "wrong_window", "wording", "overflow_in_stream"})
"""Faults about the window itself: another size, other numbers or words in the error, the error inside a 200."""
