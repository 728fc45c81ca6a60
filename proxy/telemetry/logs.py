"""The operator's log: one line per request, secrets cut out, written off the event loop.

A line has the fields of :class:`ExchangeLine` (an alert's: :class:`AlertLine`) and no others. Every
other text that is written passes through :func:`redact`, loses the secrets of the configuration,
and carries the ids of its request. Of an exception its type and where it was raised are written,
and never its text, which may quote a message.
"""

import copy
import json
import logging
import queue
import re
import threading
import traceback
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import IO, ClassVar, Final, Literal

import msgspec

from proxy.errors import REDACTED, redact

MAX_RECORD_LEN: Final = 32_768
MIN_SECRET_LEN: Final = 6
MAX_FRAMES: Final = 40
MAX_CAUSES: Final = 5
BATCH_SECONDS: Final = 0.02

Form = Literal["line", "json"]

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

    ``usable`` is W - R - H in tokens, of which both numbers of tokens are shown as percent; the
    zone is of what was forwarded. ``scanned`` and ``prunable`` are the tokens that a prune looked
    at and could take, ``removed`` the messages it took. Fields that are None are left out.
    """

    NAME: ClassVar[str] = "ctx"

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

    def __str__(self) -> str:
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
        parts += [
            f"{name}={_word(value)}" for name in _TAIL if (value := getattr(self, name)) is not None
        ]
        return " ".join(parts)

    def record(self) -> dict[str, object]:
        known = {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }
        shares = {
            "received_pct": self._share(self.tokens_before),
            "forwarded_pct": self._share(self.tokens_after),
        }
        return known | shares


class AlertLine(msgspec.Struct, frozen=True, kw_only=True):
    """What an alert is logged with."""

    NAME: ClassVar[str] = "alert"

    level: str
    category: str
    alert: str
    value: float
    threshold: float
    conversation: str
    tenant: str
    request: str
    said: str

    def __str__(self) -> str:
        return " ".join(
            ("alert", *(f"{name}={_word(getattr(self, name))}" for name in self.__struct_fields__))
        )

    def record(self) -> dict[str, object]:
        return msgspec.structs.asdict(self)


_SHOWN_FIRST: Final = {
    "tokens_before",
    "tokens_after",
    "usable",
    "zone",
    "overflow",
    "scanned",
    "prunable",
    "removed",
}
_TAIL: Final = tuple(name for name in ExchangeLine.__struct_fields__ if name not in _SHOWN_FIRST)


def log_exchange(logger: logging.Logger, line: ExchangeLine) -> None:
    """Log a request that has ended: at WARNING where it failed, else at INFO."""
    is_served = line.status is not None and line.status < 500
    _log(logger, logging.INFO if is_served else logging.WARNING, line)


def log_alert(logger: logging.Logger, line: AlertLine) -> None:
    """Log an alert at the level of its own."""
    _log(
        logger,
        {"critical": logging.ERROR, "info": logging.INFO}.get(line.level, logging.WARNING),
        line,
    )


def _log(logger: logging.Logger, level: int, line: ExchangeLine | AlertLine) -> None:
    # a record made here needs no look at the stack for where it comes from
    if logger.isEnabledFor(level):
        logger.handle(logger.makeRecord(logger.name, level, "", 0, line, (), None))


class Secrets(logging.Filter):
    """Removes what must not be read: the secrets of the configuration, and what has the shape of
    one.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        self._form = form
        self._known: tuple[str, ...] = ()

    def add(self, secrets: Iterable[str]) -> None:
        """Never write these texts; those too short to be a secret are ignored."""
        known = {*self._known, *(each for each in secrets if len(each) >= MIN_SECRET_LEN)}
        self._known = tuple(sorted(known, key=len, reverse=True))

    def mask(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._known:
            if secret in text:
                text = text.replace(secret, REDACTED)
        return redact(text, limit=MAX_RECORD_LEN)

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the record's message, or its fields, and its ids."""
        fields = getattr(record, "ids", {})
        line = record.msg
        if not isinstance(line, str) and self._form == "json":
            fields = line.record()
            record.msg = line.NAME
        record.msg = self.mask(str(record.msg))
        record.__dict__["fields"] = {
            k: self.mask(v) if isinstance(v, str) else v for k, v in fields.items()
        }
        return True


class Formatter(logging.Formatter):
    """One line for people, or one JSON object."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """Time (UTC), level, logger, message and fields.

        Further lines of a message are indented for people, so that none can be forged.
        """
        fields: Mapping[str, object] = record.__dict__["fields"]
        time = (
            datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        if self._form == "json":
            body = {
                "time": time,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.msg,
            }
            own = {
                ("severity" if name == "level" else name): value for name, value in fields.items()
            }
            return json.dumps(body | own, separators=(",", ":"))
        first, newline, rest = record.msg.partition("\n")
        text = (
            " ".join((first, *(f"{name}={_word(value)}" for name, value in fields.items())))
            + newline
            + rest
        )
        text = text.replace("\r", "\\r").replace("\n", "\n    ")
        return f"{time} {record.levelname:<7} {record.name} {text}"


class LogListener(QueueListener):
    """Writes records in a thread, some at a time: one that woke for every record would take the
    event loop's turns.
    """

    def __init__(
        self, records: "queue.SimpleQueue[logging.LogRecord]", handler: logging.Handler
    ) -> None:
        super().__init__(records, handler)
        self._records = records
        self._stopping = threading.Event()

    def dequeue(self, block: bool) -> logging.LogRecord:  # noqa: FBT001 - the library's signature
        """The next record."""
        if self._records.empty():
            self._stopping.wait(BATCH_SECONDS)
        return super().dequeue(block)

    def finish(self, timeout: float) -> bool:
        """Write what waits for at most ``timeout`` seconds; whether all of it was written."""
        self.enqueue_sentinel()
        self._stopping.set()
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()


class LogStream(logging.StreamHandler[IO[str]]):
    """Writes to a stream, and counts what the stream does not take."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self.dropped = 0

    def createLock(self) -> None:  # noqa: N802 - the library's name
        """None: one thread writes, and the process could not end while that waits for the stream
        with a lock held.
        """
        self.lock = None

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the library's signature
        """Count a record that cannot be written; the library would print its arguments."""
        self.dropped += 1


class QueuedLog(QueueHandler):
    """Writes records to ``stream`` in a thread of its own; a caller never waits for the stream.

    At most ``capacity`` records wait. What comes on top of that is dropped and counted.
    """

    def __init__(self, stream: IO[str], *, form: Form = "line", capacity: int = 10_000) -> None:
        self._records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        super().__init__(self._records)
        self._capacity = capacity
        self._refused = 0
        self._secrets = Secrets(form)
        self._stream = LogStream(stream)
        self._stream.setFormatter(Formatter(form))
        self._stream.addFilter(self._secrets)
        self._listener = LogListener(self._records, self._stream)
        self._listener.start()

    @property
    def dropped(self) -> int:
        """Records that were not written."""
        return self._refused + self._stream.dropped

    def hide(self, secrets: Iterable[str]) -> None:
        """Never write these texts, the secrets of the configuration."""
        self._secrets.add(secrets)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A copy of the record with its message made now, because its arguments could change before
        it is written.
        """
        kept = copy.copy(record)
        if not isinstance(record.msg, ExchangeLine | AlertLine):
            kept.msg = _message(record)
            kept.args = None
            kept.exc_info = None
            source = record if hasattr(record, "request") else LOG_CONTEXT.get()
            ids = {name: getattr(source, name, None) for name in _IDS}
            kept.__dict__["ids"] = {name: str(value) for name, value in ids.items() if value}
        return kept

    def enqueue(self, record: logging.LogRecord) -> None:
        """Have the record written."""
        if self._records.qsize() < self._capacity:
            self._records.put(record)
        else:
            self._refused += 1

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the library's signature
        """Count a record that cannot be formatted; the library would print its arguments."""
        self._refused += 1

    def losses(self) -> dict[tuple[str, ...], float]:
        """Records that were not written, as the metrics have it."""
        return {("log_queue_full",): self.dropped}

    def stop(self, timeout: float = 2.0) -> bool:
        """Write what waits for at most ``timeout`` seconds; whether all of it was written."""
        return self._listener.finish(timeout)


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    # below its first line it shows tasks and callbacks with what they hold
    if record.name == "asyncio":
        text = text.partition("\n")[0]
    if record.exc_info and record.exc_info[1] is not None:
        text = f"{text}\n{_described(record.exc_info[1])}"
    return text


def _described(error: BaseException) -> str:
    """The types of an exception and its causes, and where each was raised; never its text."""
    lines: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen and len(seen) < MAX_CAUSES:
        seen.add(id(cause))
        lines.append(
            f"{'caused by ' if lines else ''}{type(cause).__module__}.{type(cause).__qualname__}"
        )
        frames = [*traceback.walk_tb(cause.__traceback__)][-MAX_FRAMES:]
        lines += (
            f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
            for frame, line in frames
        )
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(lines)


def _word(value: object) -> str:
    """``value`` as one word of a key=value line, so that nobody can forge a field or a line."""
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1 else f"{value:.1f}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
