"""What a key's requests took: it outlives their conversations, and no answer is free of charge for saying nothing."""

import asyncio
import gzip
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.harness import RunningWeir, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, events, scripted

ANSWER = "The harbour is deep and the ferry leaves at nine. " * 40
YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
models: [{{match: dear, prices: {{input: 2.0, output: 8.0}}}}]
window: 16384
"""


def answer(asked: Asked) -> Reply:
    """Streams say no usage; one for ``cut`` breaks off, one for ``left`` does not end, answers to ``packed`` are gzip."""
    given = completion(ANSWER, prompt=900, completed=400)
    if asked.json["model"] == "dear" and asked.json.get("stream"):
        words = [{"choices": [{"index": 0, "delta": {"content": f"{word} "}}]} for word in ANSWER.split()]
        said = events(*words, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if "Dossier packed" in asked.body.decode():
            return packed(replace(said, chunks=(b"".join(said.chunks),)))
        if "Dossier cut" in asked.body.decode():
            return replace(said, chunks=said.chunks[:200], cut=True)
        return said
    return packed(as_asked(asked, given)) if "Dossier packed" in asked.body.decode() else as_asked(asked, given)


def packed(reply: Reply) -> Reply:
    return replace(reply, chunks=tuple(map(gzip.compress, reply.chunks)), headers=(("content-encoding", "gzip"),))


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

    async def row(self, name: str) -> Any:
        (row,) = (await self.get(f"conversations/{name}/timeline"))["data"]
        return row

    async def get(self, path: str) -> Any:
        return (await self.http.get(f"{self.target.root}/weir/{path}")).json()

    async def command(self) -> str:
        store = f"sqlite+aiosqlite:///{self.folder / 'w.db'}"
        asked = ["usage", "--config", str(self.folder / "weir.yaml"), "--store", store]
        return (await asyncio.to_thread(CliRunner().invoke, main, asked)).output


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
