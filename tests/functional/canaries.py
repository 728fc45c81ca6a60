"""Secrets and content that are told to Weir in every place there is, and a search of all that it says of them."""

import base64
import io
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import zstandard
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.store.packing import WORDS
from proxy.telemetry.logs import QueuedLog

# Without the shape of a key, so that only knowing them, or never writing them, keeps them out.
SECRETS = {
    "client": "canary7f3a-client-4b1d",
    "alias": "canary7f3a-alias-77c0",
    "query": "canary7f3a-query-90aa",
    "wrong": "canary7f3a-wrong-13f2",
    "upstream": "canary7f3a-upstream-5e55",
    "own_upstream": "canary7f3a-ownup-61d0",
    "other": "canary7f3a-other-2c9e",
    "admin": "canary7f3a-admin-b00c",
    "webhook": "canary7f3a-hook-8d1e",
    "webhook_query": "canary7f3a-hookquery-44",
    "summariser": "canary7f3a-summ-e3e3",
}
CONTENT = {
    "text": "quokka9-text",
    "result": "quokka9-result",
    "arguments": "quokka9-arguments",
    "system": "quokka9-system",
    "user": "quokka9-user",
    "metadata": "quokka9-metadata",
    "image": base64.b64encode(b"quokka9-image-bytes").decode().rstrip("="),
    "file": "quokka9-file.pdf",
    "property": "quokka9_property",
    "description": "quokka9-description",
    "stop": "quokka9-stop",
}
TOOL = "quokka9_tool"
"""The name of a tool is no content: rows of evictions show it."""


def conversation(steps: int = 1, *, words: int = 60, mark: str = "") -> list[dict[str, Any]]:
    """Messages with content of every kind; about ``words`` words in each tool result."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CONTENT['image']}"}}
    file = {
        "type": "file",
        "file": {"filename": CONTENT["file"], "file_data": f"data:application/pdf;base64,{CONTENT['image']}"},
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Rules {mark}: {CONTENT['system']}"},
        {"role": "user", "content": [{"type": "text", "text": f"{CONTENT['text']} {mark}"}, image, file]},
    ]
    for number in range(steps):
        arguments = f'{{"path": "/{CONTENT["arguments"]}/{mark}{number}"}}'
        call = {"id": f"c{number}", "type": "function", "function": {"name": TOOL, "arguments": arguments}}
        text = f"{CONTENT['result']} {mark} {number}: " + " ".join(f"{CONTENT['result']}{n}" for n in range(words // 4))
        messages.append({"role": "assistant", "content": f"{CONTENT['text']} {number}", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": text})
        messages.append({"role": "assistant", "content": f"{text[: len(text) // 2]} is what I found in {number}."})
        messages.append({"role": "user", "content": f"{CONTENT['text']} {mark} {number}: and what comes next?"})
    return messages


def request(steps: int = 1, *, words: int = 60, mark: str = "", **options: Any) -> dict[str, Any]:
    """A chat request with content in every field that can hold some."""
    schema = {"type": "object", "properties": {CONTENT["property"]: {"type": "string"}}}
    function = {"name": TOOL, "description": CONTENT["description"], "parameters": schema}
    return {
        "model": "m",
        "messages": conversation(steps, words=words, mark=mark),
        "tools": [{"type": "function", "function": function}],
        "user": CONTENT["user"],
        "metadata": {"note": CONTENT["metadata"]},
        "stop": [CONTENT["stop"]],
        "max_tokens": 64,
        **options,
    }


def spelled(word: str) -> tuple[str, ...]:
    """A word as it may have been written: as it is, escaped, in base64 or in hex."""
    raw = word.encode()
    return tuple(
        dict.fromkeys((word, quote(word, safe=""), base64.b64encode(raw).decode().rstrip("=")[:-1], raw.hex()))
    )


def found_in(text: str, words: Iterable[str]) -> list[str]:
    """The words that stand in the text in any spelling."""
    lowered = text.lower()
    return [word for word in words if any(each.lower() in lowered for each in spelled(word))]


def leaked(text: str, *, content: bool = True, but: Iterable[str] = ()) -> list[str]:
    """The secrets in a text, and with ``content`` what clients said."""
    words = [word for name, word in SECRETS.items() if name not in set(but)]
    return found_in(text, (*words, *CONTENT.values()) if content else words)


@dataclass(slots=True)
class Ears:
    """What the process logs, at every level and of every library, in both forms; and its spans."""

    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    line: io.StringIO = field(default_factory=io.StringIO)
    json: io.StringIO = field(default_factory=io.StringIO)

    def logged(self) -> str:
        """Both logs."""
        return self.line.getvalue() + self.json.getvalue()

    def traced(self) -> str:
        """Every attribute of every span and event, and every name."""
        return "\n".join(span.to_json() for span in self.spans.get_finished_spans())

    def forget(self) -> None:
        """Begin anew."""
        self.spans.clear()
        for stream in (self.line, self.json):
            stream.seek(0)
            stream.truncate()


QUIET = ("tests.upstream", "httpx", "httpcore", "openai", "urllib3")
"""Loggers of the test's own client and of its upstream."""


class _Ours(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.name.startswith(QUIET)


@contextmanager
def listening(level: int = logging.DEBUG) -> Iterator[Ears]:
    """Hear everything that is logged."""
    ears, root = Ears(), logging.getLogger()
    before, own = root.level, logging.getLogger("weir").level
    handlers = [QueuedLog(ears.line), QueuedLog(ears.json, form="json")]
    for handler in handlers:
        handler.addFilter(_Ours())
        root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("weir").setLevel(level)
    try:
        yield ears
    finally:
        root.setLevel(before)
        logging.getLogger("weir").setLevel(own)
        for handler in handlers:
            root.removeHandler(handler)
            handler.stop()


ZSTD = b"\x28\xb5\x2f\xfd"


def columns(database: Path) -> Mapping[str, str]:
    """Every column of every table of a database as text, full-text index included."""
    told = {}
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            cursor = connection.execute(f'SELECT * FROM "{table}"')
            rows = cursor.fetchall()
            for place, (name, *_) in enumerate(cursor.description):
                values = (row[place] for row in rows)
                said = (_unpacked(v) if isinstance(v, bytes) else str(v) for v in values)
                told[f"{table}.{name}"] = "\n".join(said)
    return told


def _unpacked(value: bytes) -> str:
    """Bytes as text, with what they hold where they are compressed."""
    whole = zstandard.ZstdDecompressor(dict_data=WORDS).decompress(value) if value.startswith(ZSTD) else value
    return whole.decode("utf-8", "replace") + value.hex()


def files(database: Path) -> str:
    """The bytes of a database and of what lies beside it."""
    return b"".join(p.read_bytes() for p in sorted(database.parent.glob(f"{database.name}*"))).decode("latin-1")
