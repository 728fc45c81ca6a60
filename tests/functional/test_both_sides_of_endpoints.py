"""What is archived and shown of Responses and Messages says what the client's items and blocks said."""

from typing import Any

import httpx
import pytest

from proxy.simulator import Dialect, SimulatorSettings, run_simulator
from tests.functional.harness import COUNTER, EITHER, Deployment
from tests.functional.test_counted_requests import HEADERS, long_messages, long_responses
from tests.profile import each_once


@each_once
@EITHER
@pytest.mark.parametrize(("dialect", "talk"), [(Dialect.ANTHROPIC, long_messages), (Dialect.OPENAI, long_responses)])
async def test_originals_and_both_sides_are_readable(dialect: Dialect, talk: Any, deployment: Deployment) -> None:
    with run_simulator(SimulatorSettings(dialect=dialect, window=8192), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url) as proxy, httpx.AsyncClient(headers=HEADERS) as client:
            await talk(proxy)
            await proxy.settled()
            at = f"{proxy.root()}/weir/conversations"
            found = (await client.get(at)).json()["data"]
            name = max(found, key=lambda each: each["requests"])["id"]
            removed = (await client.get(f"{at}/{name}/removed")).json()["data"]
            results = [each for each in removed if each["role"] == "tool"]
            texts = [(await client.get(f"{proxy.root()}{each['blob']}.txt")).text for each in results[:3]]
            requests = (await client.get(f"{at}/{name}/timeline")).json()["data"]
            both = (await client.get(f"{at}/{name}/requests/{requests[-1]['id']}")).json()
    assert all("line 3: value" in text and "tool_result" not in text for text in texts), texts
    assert both["kept"]
    shown = " ".join(row["text"] or "" for row in both["client"])
    assert "Audit the files." in shown
    assert "line 3: value 22003," in shown
    assert "read(" in shown
    assert any(row["status"] == "added" and row["text"] for row in both["model"])
