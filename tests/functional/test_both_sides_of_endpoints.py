"""What is archived and shown of Responses and Messages says what the client's items and blocks said."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import ALONE, COUNTER, Deployment, weir
from tests.functional.test_counted_requests import HEADERS, STEPS, long_messages, long_responses, said
from tests.profile import each_once
from tests.upstream import Dialect, SimulatorSettings, run_simulator


@each_once
@ALONE
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


def as_result(text: str) -> dict[str, Any]:
    return {"type": "search_result", "source": "kb", "title": "Found", "content": [{"type": "text", "text": text}]}


def as_text(text: str) -> dict[str, Any]:
    return {"type": "document", "title": "Found", "source": {"type": "text", "media_type": "text/plain", "data": text}}


def as_content(text: str) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": text}]}}


@pytest.mark.requirement("A4.25", "P7")
@pytest.mark.parametrize("block", [as_result, as_text, as_content])
async def test_text_that_comes_in_search_results_and_documents_is_kept_found_and_clipped(
    block: Any, tmp_path: Path
) -> None:
    tools = [{"name": "read", "description": "Read", "input_schema": {"type": "object", "properties": {}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Audit the files."}]
    body = {"model": "claude", "max_tokens": 300, "tools": tools, "messages": messages}
    with run_simulator(SimulatorSettings(dialect=Dialect.ANTHROPIC, window=8192), counter=COUNTER) as simulator:
        async with weir(simulator.base_url, tmp_path / "w.db") as proxy, httpx.AsyncClient(headers=HEADERS) as client:
            for step in range(STEPS):
                call = {"type": "tool_use", "id": f"toolu_{step}", "name": "read", "input": {"path": f"{step}.txt"}}
                text = said(step) if step < STEPS - 1 else "\n".join(map(said, range(100, 150)))
                result = {"type": "tool_result", "tool_use_id": f"toolu_{step}", "content": [block(text)]}
                messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
                answer = await client.post(f"{proxy.base_url}/messages", json=body)
                assert answer.status_code == 200, answer.text
            await proxy.stored()
            search = await client.get(f"{proxy.root}/weir/search", params={"q": "3007"})
    assert "value 3007," in json.dumps(search.json())
    assert "compact" in answer.headers["x-weir-actions"]
    assert "ingest_cap=1" in answer.headers["x-weir-actions"]
    first = json.loads(simulator.ledger[-1].body)["messages"][0]
    assert re.search(r"line \d+: value \d+", json.dumps(first)), "the summary quotes what left"
