"""The operator's log: one line per request, secrets cut out, written off the event loop.

A line has the fields of :class:`ExchangeLine` (an alert's: :class:`AlertLine`) and no others. Every other text that
is written passes through :func:`redact`, loses the secrets of the configuration, and carries the ids of the request
it was said about. Of an exception its type and where it was raised are written, and never its words: those may
quote a message.
"""

import contextlib
import json
import logging
import queue
import re
import threading
import time
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from operator import attrgetter
from typing import IO, Final, Literal

import msgspec

from proxy.errors import REDACTED, redact

MAX_RECORD_LEN: Final = 32_768
MIN_SECRET_LEN: Final = 6
MAX_FRAMES: Final = 40
MAX_CAUSES: Final = 5

_BARE: Final = re.compile(r"[!#-<>-~]+")


class RequestContext(msgspec.Struct):
    request: str
    trace: str | None = None
    conversation: str | None = None


LOG_CONTEXT: Final[ContextVar[RequestContext | None]] = ContextVar("weir-about", default=None)
"""The request that the running task works for; tasks and threads that it starts inherit it."""
_IDS: Final = ("request", "conversation", "trace")


class ExchangeLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one request is logged with: tokens, identifiers and outcome, never content.

    ``usable`` is W - R - H in tokens, of which both numbers of tokens are shown as percent; the zone is of what was
    forwarded. ``scanned`` and ``prunable`` are the tokens that a prune looked at and could take, ``removed`` the
    messages it took. Fields that are None are left out.
    """

    request: str
    tokens_before: int
    tokens_after: int
    usable: int
    zone: str
    status: int | None
    outcome: str
    conversation: str | None = None
    trace: str | None = None
    tenant: str | None = None
    model: str | None = None
    policy: str | None = None
    actions: str = "none"
    overflow: bool = False
    scanned: int | None = None
    prunable: int | None = None
    removed: int | None = None
    attempts: int = 1
    overhead_ms: float | None = None
    duration_ms: float | None = None
    ending: str | None = None
    error: str | None = None

    def _share(self, tokens: int) -> float:
        """Percent of what is usable, the base of the zone."""
        if self.usable <= 0:
            return 100.0 if tokens else 0.0
        return round(100 * tokens / self.usable, 1)

    def text(self) -> str:
        before = self.tokens_before
        after = self.tokens_after
        received = f"received={before} received_pct={self._share(before):.1f}"
        forwarded = f"forwarded={after} forwarded_pct={self._share(after):.1f}"
        parts = [f"ctx {received} {forwarded} usable={self.usable} zone={self.zone}"]
        if self.overflow:
            parts.append("overflow=yes")
        if self.scanned is not None:
            parts.append(f"scan={self.scanned}/{self.prunable or 0}")
        if self.removed is not None:
            parts.append(f"removed={self.removed}")
        told = [(name, value) for name, value in zip(_TAIL, _TAIL_OF(self), strict=True) if value is not None]
        words = [value for _, value in told if isinstance(value, str)]
        plain = (int, str) if all(words) and _BARE.fullmatch("".join(words)) else int
        parts += [f"{name}={value if isinstance(value, plain) else _word(value)}" for name, value in told]
        return " ".join(parts)

    def record(self) -> dict[str, object]:
        known = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        shares = {"received_pct": self._share(self.tokens_before), "forwarded_pct": self._share(self.tokens_after)}
        return known | shares


class AlertLine(msgspec.Struct, frozen=True, kw_only=True):
    level: str
    category: str
    alert: str
    value: float
    threshold: float
    conversation: str
    tenant: str
    request: str
    said: str

    def text(self) -> str:
        return " ".join(("alert", *(f"{name}={_word(getattr(self, name))}" for name in self.__struct_fields__)))

    def record(self) -> dict[str, object]:
        return msgspec.structs.asdict(self)


_SHOWN_FIRST: Final = {"tokens_before", "tokens_after", "usable", "zone", "overflow", "scanned", "prunable", "removed"}
_TAIL: Final = tuple(name for name in ExchangeLine.__struct_fields__ if name not in _SHOWN_FIRST)
_TAIL_OF: Final = attrgetter(*_TAIL)


def log_exchange(logger: logging.Logger, line: ExchangeLine) -> None:
    _log(logger, logging.INFO if line.status is not None and line.status < 500 else logging.WARNING, line)


def log_alert(logger: logging.Logger, line: AlertLine) -> None:
    _log(logger, {"critical": logging.ERROR, "info": logging.INFO}.get(line.level, logging.WARNING), line)


def _log(logger: logging.Logger, level: int, line: ExchangeLine | AlertLine) -> None:
    if logger.isEnabledFor(level):
        logger.handle(_LineRecord(logger.name, level, line))


class _LineRecord(logging.LogRecord):
    def __init__(self, name: str, level: int, line: ExchangeLine | AlertLine) -> None:
        self.__dict__.update(_ORDINARY)
        self.name = name
        self.levelno = level
        self.levelname = logging.getLevelName(level)
        self.created = time.time()
        self.line = line
        if isinstance(line, AlertLine):
            self.msg = line.text()


_ORDINARY: Final = vars(logging.LogRecord("", logging.INFO, "", 0, "ctx", None, None))


class _Formatter(logging.Formatter):
    def __init__(self, form: Literal["line", "json"]) -> None:
        super().__init__()
        self.hidden: tuple[str, ...] = ()
        self._as = self._as_json if form == "json" else self._as_line

    def format(self, record: logging.LogRecord) -> str:
        return self._as(record)

    def said(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.name == "asyncio":  # below its first line it shows tasks and callbacks with what they hold
            text = text.partition("\n")[0]
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}\n{_described(record.exc_info[1])}"
        return self._clean(text)

    def _clean(self, text: str) -> str:
        for secret in self.hidden:
            if secret in text:
                text = text.replace(secret, REDACTED)
        return redact(text, limit=MAX_RECORD_LEN)

    def _as_line(self, record: logging.LogRecord) -> str:
        """Time (UTC), level, logger, text and ids; further lines are indented, so that none can be forged."""
        if isinstance(record, _LineRecord):
            text = self._clean(record.line.text())
        else:
            text, rest, more = record.getMessage().partition("\n")
            ids = (f"{name}={_word(self._clean(value))}" for name, value in getattr(record, "ids", {}).items())
            text = " ".join((text, *ids)) + rest + more
        text = text.replace("\r", "\\r").replace("\n", "\n    ")
        return f"{_time(record)} {record.levelname:<7} {record.name} {text}"

    def _as_json(self, record: logging.LogRecord) -> str:
        body: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        if isinstance(record, _LineRecord):
            body["message"] = "ctx" if isinstance(record.line, ExchangeLine) else "alert"
            own = {k: self._clean(v) if isinstance(v, str) else v for k, v in record.line.record().items()}
            body |= {("severity" if name == "level" else name): value for name, value in own.items()}
        else:
            body["message"] = record.getMessage()
            body |= {name: self._clean(value) for name, value in getattr(record, "ids", {}).items()}
        return json.dumps(body, separators=(",", ":"))


def _described(error: BaseException) -> str:
    said: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen and len(seen) < MAX_CAUSES:
        seen.add(id(cause))
        said.append(f"{'caused by ' if said else ''}{type(cause).__module__}.{type(cause).__qualname__}")
        frames = [*traceback.walk_tb(cause.__traceback__)][-MAX_FRAMES:]
        said += (f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in frames)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(said)


BATCH_SECONDS: Final = 0.02


class QueuedLog(QueueHandler):
    """Writes records to ``stream`` in a thread of its own; a caller never waits for the stream.

    At most ``capacity`` records wait. What comes on top of that is dropped and counted in ``dropped``.
    ``hide`` names texts, the secrets of the configuration, that are written nowhere.
    """

    def __init__(self, stream: IO[str], *, form: Literal["line", "json"] = "line", capacity: int = 10_000) -> None:
        self._waiting: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        super().__init__(self._waiting)
        self.dropped = 0
        self._capacity = capacity
        self._stream = stream
        self._formatter = _Formatter(form)
        self._thread = threading.Thread(target=self._write, name="weir-log", daemon=True)
        self._thread.start()

    def hide(self, secrets: Iterable[str]) -> None:
        known = {*self._formatter.hidden, *(each for each in secrets if len(each) >= MIN_SECRET_LEN)}
        self._formatter.hidden = tuple(sorted(known, key=len, reverse=True))

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record, told now, because its arguments could change before it is written."""
        kept = logging.makeLogRecord(record.__dict__)
        kept.msg, kept.args = self._formatter.said(record), None
        kept.exc_info = kept.exc_text = kept.stack_info = None
        source = record if hasattr(record, "request") else LOG_CONTEXT.get()
        ids = {name: getattr(source, name, None) for name in _IDS}
        kept.__dict__["ids"] = {name: str(value) for name, value in ids.items() if value}
        return kept

    def handle(self, record: logging.LogRecord) -> bool:
        if self.filters and not self.filter(record):
            return False
        if isinstance(record, _LineRecord):
            self.enqueue(record)
        else:
            self.emit(record)
        return True

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the library's signature
        """Count a record that cannot be told; the library would print its arguments."""
        self.dropped += 1

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() < self._capacity:
            self._waiting.put(record)
        else:
            self.dropped += 1

    def losses(self) -> dict[tuple[str, ...], float]:
        return {("log_queue_full",): self.dropped}

    def stop(self, timeout: float = 2.0) -> bool:
        """Write what waits for at most ``timeout`` seconds; True if all of it was written."""
        ends = time.monotonic() + timeout
        self._waiting.put(None)
        self._stopping.set()
        self._thread.join(max(0.0, ends - time.monotonic()))
        return not self._thread.is_alive()

    def _write(self) -> None:
        going = True
        while going:
            batch = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while batch[-1] is not None:
                    batch.append(self._waiting.get_nowait())
            going = batch[-1] is not None
            self._write_batch([record for record in batch if record is not None])
            if going:
                self._stopping.wait(BATCH_SECONDS)

    def _write_batch(self, records: list[logging.LogRecord]) -> None:
        try:
            self._stream.write("".join(self._formatter.format(record) + "\n" for record in records))
            self._stream.flush()
        except Exception:  # noqa: BLE001 - a stream that is gone must not end the thread
            self.dropped += len(records)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: object) -> str:
    """``value`` as one word of a key=value line, so that nobody can forge a field or a line."""
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1 else f"{value:.1f}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
