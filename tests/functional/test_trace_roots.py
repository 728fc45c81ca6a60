"""What the root of a trace says by itself: what was refused and why, what was clamped, and what a viewer can list."""

import json

import openai
import pytest

from tests.functional.test_traces import TOO_LONG, agent, ask, scene
from tests.receiver import attributes


@pytest.mark.requirement("P15", "A0.139")
async def test_a_refused_request_says_what_it_held_and_what_it_was_allowed() -> None:
    async with scene() as started:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(started, TOO_LONG)
        root = attributes((await started.spans())[0].attributes)
    held = refused.value.body["weir"]["buckets"]  # type: ignore[index, call-overload]
    assert root["weir.action"] == "refuse"
    assert root["weir.tokens.before"] == sum(held.values())
    assert root["weir.tokens.limit"] < root["weir.tokens.before"]
    assert root["weir.tokens.buckets"] == [f"{name}={tokens}" for name, tokens in held.items() if tokens]
    assert root["ctx.pressure.current_tokens"] == root["weir.tokens.before"]
    assert (root["ctx.pressure.zone"], root["ctx.pressure.utilization_pct"] > 100) == ("critical", True)


@pytest.mark.requirement("P15")
async def test_a_clamped_answer_is_told_with_what_was_asked_for_and_what_went_up() -> None:
    async with scene(window=8192, believed=32_768) as started:
        await ask(started, agent(14), max_tokens=2_000)
        spans = await started.spans()
        sent = json.loads(started.simulator.answered()[-1].body)["max_tokens"]
    root, *_, first, second = (attributes(span.attributes) for span in spans)
    for span in (root, second):
        assert (span["weir.max_tokens.before"], span["weir.max_tokens.after"]) == (2_000, sent)
    assert sent < 2_000
    assert "weir.max_tokens.before" not in first
