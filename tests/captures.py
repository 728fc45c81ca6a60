"""Requests of real clients on ``/v1/responses`` and ``/v1/messages``: a sample, and all of them where they are."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).parent / "data" / "endpoints" / "captured.jsonl"
ALL = Path(__file__).parents[2] / "shared" / "data" / "endpoints"


@dataclass(frozen=True)
class Capture:
    name: str
    path: str
    beta: str
    body: dict[str, Any]


def sample() -> Iterator[Capture]:
    for line in SAMPLE.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        yield Capture(f"{entry['client']} {entry['run']} {entry['seq']}", entry["path"], entry["beta"], entry["body"])


def everything() -> Iterator[Capture]:
    """Every captured request with a body; nothing where the captures are not at hand."""
    for path in sorted(ALL.glob("*.jsonl")):
        yield from _unfolded(path)


def _unfolded(path: Path) -> Iterator[Capture]:
    """The requests of one file, with what they share with the one before written out."""
    before: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        body = entry["body"]
        if not isinstance(body, dict):
            continue
        for key in ("tools", "system", "instructions"):
            if body.get(key) == {"@same": True}:
                body[key] = before[key]
        for key in ("input", "messages"):
            if isinstance(body.get(key), dict):
                body[key] = before[key][: body[key]["@keep"]] + body[key]["then"]
        before |= body
        beta = dict(entry["headers"]).get("anthropic-beta", "")
        yield Capture(f"{path.stem} {entry['run']} {entry['seq']}", entry["path"], beta, body)
