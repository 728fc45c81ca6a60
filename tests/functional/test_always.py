"""A layer that acts ``at: 0`` looks at every request, about the whole of it as about one bucket."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import COUNTER, prose, weir
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

WINDOW = 32_768
LAYERS = {
    "dedupe": ("{layer: dedupe, at: 0}", "dedupe"),
    "window": ("{layer: window, at: 0, params: {turns: 2}}", "sliding_window"),
    "reasoning": ("{layer: reasoning, at: 0, params: {ttl: 2}}", "reasoning"),
    "media": ("{layer: media, at: 0, params: {keep: 1}}", "media"),
    "prune": ("{layer: prune, at: 0, params: {protect: 300, minimum: 100}}", "prune"),
    "evict": ("{layer: evict, at: 0, params: {protect_steps: 1}}", "evict"),
    "history": ("{layer: window, scope: history, at: 0, params: {turns: 2}}", "sliding_window"),
    "truncate": ("{layer: truncate_largest, at: 0}", "truncate"),
}
PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def conversation(mark: str) -> list[dict[str, Any]]:
    """Five steps of a tool that says the same each time, in between a user with pictures, far below any trigger."""
    found: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": mark}]
    for step in range(5):
        call = {"id": f"c{step}", "type": "function", "function": {"name": "read", "arguments": '{"path": "same.ts"}'}}
        thought = prose(160, seed=step)
        found += [
            {"role": "assistant", "content": "Reading.", "tool_calls": [call], "reasoning_content": thought},
            {"role": "tool", "tool_call_id": f"c{step}", "content": prose(400, seed=77)},
            {"role": "assistant", "content": f"done {step}"},
            {"role": "user", "content": [{"type": "text", "text": f"and then {step}?"}, PIXEL]},
        ]
    return found


@pytest.mark.parametrize("name", LAYERS)
async def test_a_layer_at_0_acts_below_every_trigger(name: str, tmp_path: Path) -> None:
    layer, action = LAYERS[name]
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        yaml = f"""
upstreams: {{main: {{base_url: "{simulator.base_url}", api_key: pass}}}}
window: {WINDOW}
default_policy: mine
policies: {{mine: {{preset: five-bucket-128k, window: {WINDOW}, cascade: [{layer}]}}}}
"""
        async with weir("", yaml=yaml, folder=tmp_path, window=None) as target, httpx.AsyncClient() as http:
            body = {"model": "sim", "messages": conversation(name), "max_tokens": 64}
            answer = await http.post(f"{target.root}/v1/chat/completions", json=body, timeout=30)
    figures = dict(part.split("=") for part in answer.headers["x-weir-tokens"].split(";"))
    assert f"{action}=" in answer.headers["x-weir-actions"]
    assert int(figures["after"]) < int(figures["before"]) < WINDOW // 2
