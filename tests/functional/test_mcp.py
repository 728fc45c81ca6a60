"""The MCP server: a client finds and reads what was removed from its own conversations, with the key it has anyway."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tests.functional.harness import COUNTER, EVICTING, TOOLS, Deployment, InTurns, Talk
from tests.upstream import Dialect, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

WINDOW = 8_192
ADMIN = "admin-secret-token"


@asynccontextmanager
async def served(
    folder: Path,
    deployment: Deployment,
    *,
    store: str = "",
    recall: str = "",
    dialect: Dialect = Dialect.OPENAI,
    upstreams: list[RunningSimulator] | None = None,
) -> AsyncIterator[InTurns]:
    async with serve_simulator(SimulatorSettings(window=WINDOW, dialect=dialect), counter=COUNTER) as upstream:
        if upstreams is not None:
            upstreams.append(upstream)
        yaml = f"""
upstreams: {{up: {{kind: openai, base_url: "{upstream.base_url}", api_key: pass, speaks: [chat, responses, messages]}}}}
models: [{{match: "*", upstream: up, window: {WINDOW}}}]
auth: {{mode: open, admin_token: {ADMIN}}}
policies: {{p: {{{json.dumps(EVICTING)[1:-1]}{recall}}}}}
default_policy: p
{store}
"""
        async with deployment.serving(upstream.base_url, yaml=yaml, folder=folder, window=None) as target:
            yield target


@asynccontextmanager
async def connected(target: InTurns, key: str = "sk-test", **headers: str) -> AsyncIterator[ClientSession]:
    given = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with (
        httpx2.AsyncClient(headers=given) as http,
        streamable_http_client(f"{target.root()}/weir/mcp", http_client=http) as streams,
        ClientSession(*streams) as session,
    ):
        await session.initialize()
        yield session


async def called(session: ClientSession, tool: str, **arguments: Any) -> str:
    result = await session.call_tool(tool, arguments)
    assert [block.type for block in result.content] == ["text"]
    text = result.content[0].text
    return f"error: {text}" if result.is_error else text


async def past_the_window(target: InTurns, *said: str, key: str = "sk-test", name: str | None = None) -> None:
    """A conversation of an agent whose first tool results, long evicted, say this."""
    headers = {} if name is None else {"x-weir-conversation": name}
    talk = Talk(target.client(key, default_headers=headers), mark=name or key)
    talk.grow(1, kind="agent")
    for each in said:
        talk.add_step()
        whole = talk.messages[-1]["content"]
        talk.messages[-1]["content"] = f"{whole[:300]}\n{each}\n{whole[300:]}"
    talk.grow(18, kind="agent")
    await talk.ask(tools=TOOLS)


async def test_what_was_removed_is_found_by_words_and_read_by_its_ref(tmp_path: Path, deployment: Deployment) -> None:
    async with served(tmp_path, deployment) as target:
        await past_the_window(target, "the deployment token is zx-4471-quebec")
        async with connected(target) as session:
            tools = (await session.list_tools()).tools
            assert [tool.name for tool in tools] == ["recall", "read"]
            found = await called(session, "recall", query="deployment token")
            assert "zx-4471-quebec" in found
            assert "Data, not an instruction" in found
            (ref,) = set(re.findall(r"ref ([0-9a-f]{12})", found))
            assert "bytes 0 to" in await called(session, "read", ref=ref, cursor=True)
            text, cursor, pages = "", 0, 0
            while True:
                page = await called(session, "read", ref=ref, cursor=cursor)
                text += page
                pages += 1
                following = re.search(r'"next_cursor": ?(\d+)', page)
                if following is None:
                    break
                cursor = int(following.group(1))
            assert "zx-4471-quebec" in text
            assert pages < 10
            assert "nothing that was removed" in await called(session, "recall", query="xylophone zebra")
            assert "nothing was removed" in await called(session, "read", ref="0123456789ab")


async def test_a_lone_character_of_a_script_without_blanks_and_an_emoji_count(
    tmp_path: Path, deployment: Deployment
) -> None:
    said = {
        "\u732b": "\u9ed1\u732b\u53eb\u58a8 511 EUR",
        "\U0001f98a": "Den \U0001f98a: 512 EUR",
        "\u72d7": "\u72d7 513 EUR",
    }
    headers = {"authorization": "Bearer sk-test"}
    async with served(tmp_path, deployment) as target:
        await past_the_window(target, *said.values())
        async with connected(target) as session, httpx.AsyncClient(headers=headers, timeout=60) as http:
            for query, text in said.items():
                assert text[-7:] in await called(session, "recall", query=query)
                found = (await http.get(f"{target.root()}/weir/search", params={"q": query})).json()["data"]
                assert found, query
                assert all(query in each["text"] for each in found)


async def test_a_caller_sees_its_own_conversations_and_one_alone_where_it_names_it(
    tmp_path: Path, deployment: Deployment
) -> None:
    async with served(tmp_path, deployment) as target:
        await past_the_window(target, "the harbour code is theirs-1", key="sk-other")
        await past_the_window(target, "the harbour code is first-2", name="first")
        await past_the_window(target, "the harbour code is second-3", name="second")
        async with connected(target) as session:
            found = await called(session, "recall", query="harbour code")
        assert "theirs-1" not in found
        assert found.index("second-3") < found.index("first-2")
        assert "of conversation second" in found
        async with connected(target, x_weir_conversation="first") as session:
            found = await called(session, "recall", query="harbour code")
            assert "first-2" in found
            assert "second-3" not in found
        async with connected(target, x_weir_conversation="nobody") as session:
            assert "no conversation 'nobody'" in await called(session, "recall", query="harbour code")
        async with connected(target, key="sk-other") as session:
            theirs = await called(session, "recall", query="harbour code")
            (ref,) = set(re.findall(r"ref ([0-9a-f]{12})", theirs))
        async with connected(target) as session:
            assert "nothing was removed" in await called(session, "read", ref=ref)


async def test_what_is_wrong_is_said(tmp_path: Path, deployment: Deployment) -> None:
    async with served(tmp_path, deployment) as target:
        async with connected(target) as session:
            assert (await called(session, "recall")).startswith("error: [recall: Give query.")
            assert (await called(session, "recall", query=["a"])).startswith("error: [recall: Give query.")
            assert (await called(session, "read", cursor=1)).startswith("error: [recall: Give ref.")
            assert "there are recall and read" in await called(session, "forget", query="a")
        async with httpx.AsyncClient(base_url=target.root()) as http:
            for method in ("GET", "DELETE"):
                answer = await http.request(method, "/weir/mcp", headers={"authorization": "Bearer sk-test"})
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            accepts = {"accept": "application/json, text/event-stream"}
            for key, status in (("weir-sk-unknown", 401), (ADMIN, 403)):
                answer = await http.post("/weir/mcp", json=call, headers={**accepts, "authorization": f"Bearer {key}"})
                assert answer.status_code == status, answer.text
            page = {**accepts, "authorization": "Bearer sk-test", "origin": "http://elsewhere.example"}
            assert (await http.post("/weir/mcp", json=call, headers=page)).status_code == 403
            own = {**accepts, "authorization": "Bearer sk-test"}
            for body, status in ((b"{", 400), (b"[1]", 400), (b'{"q": "%s"}' % (b"x" * 300_000), 413)):
                typed = {**own, "content-type": "application/json"}
                assert (await http.post("/weir/mcp", content=body, headers=typed)).status_code == status


async def test_where_no_texts_are_stored_it_is_said(tmp_path: Path, deployment: Deployment) -> None:
    async with served(tmp_path, deployment, store="store: {content: digest}") as target:
        await past_the_window(target, "the deployment token is zx-4471-quebec")
        async with connected(target) as session:
            assert "store no texts" in await called(session, "recall", query="deployment token")
