"""What a key's requests took outlives their conversations."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import RunningWeir, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted

YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
models: [{{match: dear, prices: {{input: 2.0, output: 8.0}}}}]
window: 16384
"""


def answer(asked: Asked) -> Reply:
    return as_asked(asked, completion("The harbour is deep and the ferry leaves at nine.", prompt=900, completed=400))


@dataclass(frozen=True, slots=True)
class Bill:
    """One Weir and a caller of it."""

    target: RunningWeir
    http: httpx.AsyncClient
    folder: Path

    async def ask(self, name: str, *, model: str = "dear", **more: Any) -> None:
        messages = [{"role": "user", "content": f"Dossier {name}: " + "words of it " * 400}]
        body = {"model": model, "messages": messages, **more}
        headers = {"x-weir-conversation": name}
        found = await self.http.post(f"{self.target.root}/v1/chat/completions", json=body, headers=headers)
        assert found.status_code == 200
        await self.target.stored()

    async def get(self, path: str) -> Any:
        return (await self.http.get(f"{self.target.root}/weir/{path}")).json()


@pytest.fixture
async def bill(tmp_path: Path) -> AsyncIterator[Bill]:
    async with scripted(answer) as upstream:
        yaml = YAML.format(upstream=upstream.base_url)
        http = httpx.AsyncClient(headers={"authorization": "Bearer sk-1"}, timeout=30)
        async with weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target, http:
            yield Bill(target, http, tmp_path)


async def test_usage_says_the_same_after_a_conversation_was_deleted(bill: Bill) -> None:
    await bill.ask("matter-of-smith")
    await bill.ask("other")
    kinds = ("", "?by=model", "?by=policy", "?by=day")
    before = [await bill.get(f"usage{kind}") for kind in kinds]
    assert before[0]["total"]["requests"] == 2
    gone = await bill.http.delete(f"{bill.target.root}/weir/conversations/matter-of-smith")
    assert gone.status_code == 200
    assert [await bill.get(f"usage{kind}") for kind in kinds] == before
    by_name = await bill.get("usage?by=conversation")
    assert {row["group"]: row["requests"] for row in by_name["data"]} == {"other": 1, None: 1}
    assert by_name["total"] == before[0]["total"]
    await bill.target.runtime.store.prune(2**40)
    assert (await bill.get("usage"))["total"] == before[0]["total"]
    with closing(sqlite3.connect(bill.folder / "w.db")) as file:
        assert file.execute("SELECT DISTINCT conversation FROM usage_days").fetchall() == [("",)]
