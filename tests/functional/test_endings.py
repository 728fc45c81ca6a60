"""``finish_reason: length`` means three things: a full window before the answer, a cap, a window that left too little."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from proxy.telemetry.logs import QueuedLog
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.upstream.overflow import Ending, ending_of
from tests.functional.harness import RunningWeir, opening, weir
from tests.functional.scripted import ScriptedUpstream, as_asked, completion, scripted

WINDOW = 8_192
CAP, EXHAUSTED = Ending.OUTPUT_CAP, Ending.RESERVE_EXHAUSTED


@pytest.mark.requirement("A1.16")
@pytest.mark.parametrize(
    ("reasons", "prompt", "completed", "asked", "clamped", "expected"),
    [
        (("stop",), 8_000, 192, 1_024, False, None),
        (("tool_calls",), 8_000, 192, 1_024, False, None),
        (("length",), 1_000, 512, 512, False, CAP),  # what the client asked for
        (("length",), 1_000, 300, None, False, CAP),  # a default of the server's, with room left
        (("length",), 8_000, 192, 1_024, False, EXHAUSTED),
        (("length",), 8_000, 189, 1_024, False, CAP),  # three tokens of room: the window was not the reason
        (("length",), 8_000, 190, 1_024, False, EXHAUSTED),  # two: servers stop a token early
        (("length",), 8_000, 192, 192, False, CAP),  # both at once: it got what it asked for
        (("length",), 8_000, 180, 1_024, True, EXHAUSTED),  # Weir asked for less
        (("model_context_window_exceeded",), None, None, None, False, EXHAUSTED),
        (("max_output_tokens",), 1_000, 512, 512, False, CAP),
        (("length",), 7_000, None, 1_192, False, CAP),  # a stream without usage: there was room for all of it
        (("length",), 7_000, None, 1_193, False, EXHAUSTED),
        (("length",), None, None, 1_193, False, CAP),
        (("length", "length"), 7_000, 1_300, 1_000, False, CAP),  # two choices: their sum says nothing
        (("stop", "length"), 7_500, 692, 1_000, False, EXHAUSTED),
    ],
)
def test_an_answer_that_stopped_at_a_length_has_one_of_two_labels(
    reasons: tuple[str, ...], prompt: int | None, completed: int | None, asked: int | None, clamped: bool, expected: Any
) -> None:
    found = ending_of(reasons, prompt=prompt, completion=completed, max_tokens=asked, window=WINDOW, clamped=clamped)
    assert found is expected


@dataclass(slots=True)
class Watched:
    """Weir before a scripted upstream, and all that it tells of a request."""

    target: RunningWeir
    upstream: ScriptedUpstream
    spans: InMemorySpanExporter
    log: io.StringIO

    async def ask(self, *, stream: bool, usage: bool = True, **options: Any) -> str | None:
        """The finish reason that the client sees."""
        given = {"model": "m", "messages": opening(), **options}
        chat = self.target.client().chat.completions
        if not stream:
            return str((await chat.create(**given)).choices[0].finish_reason)
        if usage:
            given["stream_options"] = {"include_usage": True}
        found = [c.choices[0].finish_reason async for c in await chat.create(stream=True, **given) if c.choices]
        return found[-1]

    async def told(self) -> dict[str, Any]:
        """What root span, event, metric, row and log line say of the last request."""
        await asyncio.sleep(0.1)
        self.target.runtime.telemetry.flush()
        root = [s for s in self.spans.get_finished_spans() if s.kind is SpanKind.SERVER][-1]
        async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
            metrics = (await http.get(f"{self.target.root}/metrics")).text
            listed = (await http.get(f"{self.target.root}/weir/conversations")).json()["data"][0]
            url = f"{self.target.root}/weir/conversations/{listed['id']}/timeline"
            rows = (await http.get(url)).json()["data"]
        row = max(rows, key=lambda r: r["at"])
        lines = [json.loads(x) for x in self.log.getvalue().splitlines()]
        return {
            "span": (root.attributes or {}).get("weir.answer.ending"),
            "event": [dict(e.attributes or {}) for e in root.events if e.name == "weir.reserve_exhausted"],
            "metric": 'weir_events_total{weir_kind="reserve_exhausted"}' in metrics,
            "row": row["detail"].get("ending"),
            "row_event": "reserve_exhausted" in [e["kind"] for e in row["detail"].get("events", [])],
            "line": [x for x in lines if x["message"] == "ctx"][-1].get("ending"),
            "retries": row["attempts"] - 1,
        }


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    spans, log = InMemorySpanExporter(), io.StringIO()
    telemetry = Telemetry.create(OtelSettings(), span_exporter=spans)
    handler = QueuedLog(log, form="json")
    logging.getLogger("weir").addHandler(handler)
    level = logging.getLogger("weir").level
    logging.getLogger("weir").setLevel(logging.INFO)
    try:
        async with (
            scripted(lambda asked: as_asked(asked, completion("yes"))) as upstream,
            weir(upstream.base_url, tmp_path / "w.db", window=WINDOW, telemetry=telemetry) as target,
        ):
            yield Watched(target, upstream, spans, log)
    finally:
        logging.getLogger("weir").removeHandler(handler)
        logging.getLogger("weir").setLevel(level)
        handler.stop()


@pytest.mark.requirement("A1.16")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cap_that_was_reached_with_room_left_is_reported_and_nothing_more(
    watched: Watched, stream: bool
) -> None:
    answer = completion("so far", finish="length", prompt=300, completed=64)
    watched.upstream.say = lambda asked: as_asked(asked, answer)
    assert await watched.ask(stream=stream, max_tokens=64) == "length"
    assert await watched.told() == {
        "span": "output_cap",
        "event": [],
        "metric": False,
        "row": "output_cap",
        "row_event": False,
        "line": "output_cap",
        "retries": 0,
    }


@pytest.mark.requirement("A1.16")
@pytest.mark.parametrize("finish", ["length", "model_context_window_exceeded"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_window_that_left_less_than_was_asked_for_is_flagged_everywhere(
    watched: Watched, stream: bool, finish: str
) -> None:
    answer = completion("so far", finish=finish, prompt=8_000, completed=192)
    watched.upstream.say = lambda asked: as_asked(asked, answer)
    assert await watched.ask(stream=stream, max_tokens=1_024) == finish
    told = await watched.told()
    assert told.pop("event") == [
        {
            "weir.reason": finish,
            "weir.tokens.limit": WINDOW,
            "weir.tokens": 8_000,
            "weir.count": 192,
            "weir.tokens.asked": 1_024,
        }
    ]
    label = "reserve_exhausted"
    expected = {"span": label, "metric": True, "row": label, "row_event": True, "line": label, "retries": 0}
    assert told == expected
