"""Whose conversations are whose: by key, all in common, or by a header."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tests.functional.harness import TOOLS, RunningWeir, Talk, weir
from tests.functional.scripted import as_asked, completion, scripted

BASE = 'upstreams: {{main: {{base_url: "{url}", api_key: {api_key}}}}}\nwindow: 8192\n'
KNOWN = "keys: [{name: a, secret: secret-of-a}, {name: b, secret: secret-of-b}]\n"
LINE = "PLUM-77 is the number of the ledger"


@asynccontextmanager
async def served(folder: Path, more: str = "", *, api_key: str = "pass") -> AsyncIterator[RunningWeir]:
    async with (
        scripted(lambda asked: as_asked(asked, completion("ok"))) as upstream,
        weir(
            "", folder=folder, yaml=BASE.format(url=upstream.base_url, api_key=api_key) + more, window=None, env={}
        ) as target,
    ):
        yield target


async def tenant_of(target: RunningWeir, key: str, **headers: str) -> str:
    """Of a conversation that is named after what was sent; as the key's own list has it."""
    given = {"authorization": f"Bearer {key}", **headers}
    name = f"c-{key}-{'-'.join(headers.values())}"
    async with httpx.AsyncClient(headers=given) as http:
        asked = {"model": "m", "messages": [{"role": "user", "content": name}]}
        sent = await http.post(f"{target.base_url}/chat/completions", json=asked, headers={"x-weir-conversation": name})
        assert sent.status_code == 200, sent.text
        await target.stored()
        listed = (await http.get(f"{target.root}/weir/conversations")).json()["data"]
    return str(next(each["tenant"] for each in listed if each["name"] == name))


BY_KEY, ALL, HEADER = "auth: {tenant: key}\n", "auth: {tenant: single}\n", "auth: {tenant: 'header:X-User'}\n"
BEYOND = "listen: {host: 0.0.0.0}\nauth: {mode: open, open_beyond_loopback: true}\n"
ONE: Mapping[str, str] = {"x-user": "ann"}
OTHER: Mapping[str, str] = {"x-user": "bob"}
NONE: Mapping[str, str] = {}


@pytest.mark.parametrize(
    ("more", "first", "second", "same"),
    [
        ("", ("sk-1", NONE), ("sk-2", NONE), True),
        (BY_KEY, ("sk-1", NONE), ("sk-2", NONE), False),
        (BEYOND, ("sk-1", NONE), ("sk-2", NONE), False),
        (ALL, ("sk-1", NONE), ("sk-2", NONE), True),
        (KNOWN, ("secret-of-a", NONE), ("secret-of-b", NONE), False),
        (KNOWN + "auth: {mode: open}\n", ("sk-1", NONE), ("secret-of-b", NONE), False),
        (KNOWN + ALL, ("secret-of-a", NONE), ("secret-of-b", NONE), True),
        (HEADER, ("sk-1", ONE), ("sk-2", ONE), True),
        (HEADER, ("sk-1", ONE), ("sk-1", OTHER), False),
        (HEADER, ("sk-1", ONE), ("sk-1", NONE), False),
        (HEADER, ("sk-1", NONE), ("sk-2", NONE), False),
        (KNOWN + HEADER, ("secret-of-a", ONE), ("secret-of-a", OTHER), False),
        (KNOWN + HEADER, ("secret-of-a", ONE), ("secret-of-b", ONE), False),
    ],
)
async def test_whose_conversations_are_whose(
    tmp_path: Path, more: str, first: tuple[str, Any], second: tuple[str, Any], same: bool
) -> None:
    async with served(tmp_path, more) as target:
        tenants = [await tenant_of(target, key, **headers) for key, headers in (first, second)]
    assert (tenants[0] == tenants[1]) is same


async def test_a_token_that_is_renewed_goes_on_with_the_conversation_and_its_archive(tmp_path: Path) -> None:
    """Access tokens of a login live for minutes to hours; the agent's MCP client sends none at all."""
    async with served(tmp_path) as target:
        talk = Talk(target.client("sk-oauth-1"))
        talk.grow(1, kind="agent")
        talk.add_step()
        talk.messages[-1]["content"] += f"\n{LINE}\n"
        talk.grow(18, kind="agent")
        await talk.ask(tools=TOOLS)
        talk.client = target.client("sk-oauth-2")
        talk.grow(1, kind="agent")
        await talk.ask(tools=TOOLS)
        await target.stored()
        assert talk.headers[0]["x-weir-conversation"] == talk.headers[1]["x-weir-conversation"]
        assert "compact" in talk.actions()[0]
        async with (
            httpx2.AsyncClient() as http,
            streamable_http_client(f"{target.root}/weir/mcp", http_client=http) as streams,
            ClientSession(*streams) as session,
        ):
            await session.initialize()
            found = await session.call_tool("recall", {"query": "PLUM-77"})
    assert LINE in found.content[0].text
