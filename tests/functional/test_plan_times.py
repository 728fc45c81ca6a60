"""Where the time of a plan goes: what its span holds below it, received by OTLP from a whole Weir."""

from collections.abc import Iterable

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from proxy.telemetry import names
from tests.functional.harness import opening, prose
from tests.functional.test_traces import PATIENT, ask, scene

MOST_UNTOLD = 0.1


def told(plan: Span, spans: Iterable[Span]) -> int:
    """Nanoseconds of a span that some span directly below it covers."""
    covered, reached = 0, plan.start_time_unix_nano
    below = [s for s in spans if s.parent_span_id == plan.span_id]
    for span in sorted(below, key=lambda s: s.start_time_unix_nano):
        assert plan.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= plan.end_time_unix_nano
        covered += max(0, span.end_time_unix_nano - max(reached, span.start_time_unix_nano))
        reached = max(reached, span.end_time_unix_nano)
    return covered


def length(span: Span) -> int:
    return span.end_time_unix_nano - span.start_time_unix_nano


@pytest.mark.requirement("P15", "A0.139")
async def test_the_time_of_a_compaction_is_told_by_what_it_was_spent_on() -> None:
    messages = opening()[:1]
    for number in range(60):
        messages += [
            {"role": "user", "content": prose(300, seed=2 * number)},
            {"role": "assistant", "content": prose(900, seed=2 * number + 1)},
        ]
    async with scene(window=65_536, believed=65_536, balanced=PATIENT, summarizer="notes") as started:
        await ask(started, [*messages, {"role": "user", "content": "and now?"}])
        await started.spans()
        spans = started.receiver.spans(parts=True)
        (plan,) = (s for s in spans if s.name == names.PLAN_SPAN)
        layers = [s for s in spans if s.name.startswith(names.LAYER_SPAN)]
        (compact,) = (s for s in layers if s.name.endswith("compact"))
        within = {s.name for s in spans if s.parent_span_id == compact.span_id}
        beside = {s.name for s in spans if s.parent_span_id == plan.span_id}
        assert told(plan, spans) >= (1 - MOST_UNTOLD) * length(plan), [(s.name, length(s) / 1e6) for s in spans]
        assert sum(map(length, layers)) <= length(plan)
        assert {"chat notes", "weir context.extract"} <= within
        assert {"weir context.read", compact.name} <= beside
