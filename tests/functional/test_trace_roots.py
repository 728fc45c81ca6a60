"""What the root of a trace says by itself: what was refused and why, what was clamped, and what a viewer can list."""

import json

import openai
import pytest

from tests.functional.harness import opening
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


@pytest.mark.requirement("P15", "S.16")
@pytest.mark.parametrize("capture", [True, False])
async def test_a_viewer_can_list_requests_by_name_kind_and_what_was_said(capture: bool) -> None:
    async with scene(capture=capture) as started:
        await ask(started, opening())
        async for _ in await ask(started, opening(), stream=True):
            pass
        spans = await started.spans()
    roots = [span for span in spans if not attributes(span.attributes).get("gen_ai.operation.name") and span.kind == 2]
    assert [span.name for span in roots] == ["weir pass sim"] * 2
    for root in (attributes(root.attributes) for root in roots):
        assert root["openinference.span.kind"] == "CHAIN"
        said = (root.get("input.value"), root.get("output.value"))
        assert all(said) if capture else said == (None, None)
        assert not capture or said[0] == opening()[-1]["content"]
