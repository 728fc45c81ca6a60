"""What is relayed is counted, what lists models lists those that may be used, and other protocols are told so at once."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.api import ADMIN
from tests.functional.harness import COUNTER, RunningWeir, Talk, weir
from tests.functional.scripted import Asked, Reply, Script, ScriptedUpstream, completion, events, scripted, whole
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

BOT, CODER = "sk-bot-01234567", "sk-coder-0123456"
KEYS = """
auth: {{mode: keys, admin_token: {admin}}}
keys:
  - {{name: bot, secret: {bot}, models: [gpt-mini, "claude-*", embed-1], allow: [policy]}}
  - {{name: coder, secret: {coder}, allow: [policy]}}
"""
ONE = "upstreams: {{one: {{base_url: '{one}', api_key: sk-operator}}}}\n"
TWO = """
upstreams:
  one: {{base_url: "{one}", api_key: sk-operator}}
  two: {{base_url: "{two}", api_key: sk-second, auth: x-api-key}}
  gone: {{base_url: "http://127.0.0.1:9/v1", api_key: sk-third}}
  library: {{kind: litellm, provider: anthropic, api_key: sk-fourth}}
models:
  - {{match: "claude-*", upstream: two}}
  - {{match: gone-1, upstream: gone}}
  - {{match: haiku, upstream: library}}
"""


@dataclass(slots=True)
class Scene:
    """Weir, its upstreams, and a client of it."""

    weir: RunningWeir
    one: ScriptedUpstream
    two: ScriptedUpstream
    folder: Path
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=30))

    async def ask(self, method: str, path: str, key: str = CODER, **more: Any) -> httpx.Response:
        """One request, below the root."""
        headers = {"authorization": f"Bearer {key}"} | more.pop("headers", {})
        return await self.http.request(method, f"{self.weir.root}{path}", headers=headers, **more)

    async def usage(self, query: str = "", key: str = ADMIN) -> dict[str | None, dict[str, Any]]:
        """What a key (or the operator) sees, by key or by what the query asks for."""
        rows = (await self.ask("GET", f"/weir/usage?{query}", key)).json()["data"]
        return {row["group"] if "by=" in query else row["key"]: row for row in rows}


@asynccontextmanager
async def scene(
    folder: Path, say: Script, *, upstreams: str = ONE, other: Script | None = None
) -> AsyncIterator[Scene]:
    async with scripted(say) as one, scripted(other or say) as two:
        yaml = (upstreams + KEYS).format(one=one.base_url, two=two.base_url, admin=ADMIN, bot=BOT, coder=CODER)
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=8_192) as target:
            started = Scene(target, one, two, folder)
            try:
                yield started
            finally:
                await started.http.aclose()


# -- usage -------------------------------------------------------------------------------------------------------------

RESPONSE = {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 60}, "total_tokens": 107}
MESSAGE = {"input_tokens": 40, "cache_read_input_tokens": 50, "cache_creation_input_tokens": 10, "output_tokens": 1}


def answers(asked: Asked) -> Reply:
    """Each route's answer as its provider gives it, streamed where it was asked for."""
    body = asked.json if asked.body[:1] == b"{" else {}
    route = asked.target.removeprefix("/v1").partition("?")[0]
    if route == "/responses" and body.get("stream"):
        text = {"type": "response.output_text.delta", "delta": 'say {"usage": {"input_tokens": 9999}}'}
        done = {"type": "response.completed", "response": {"output": [], "usage": RESPONSE}}
        return events({"type": "response.created", "response": {"usage": None}}, text, done, done=False)
    if route == "/responses":
        return whole({"output": ["x" * 200_000], "usage": RESPONSE})
    if route == "/messages":
        start = {"type": "message_start", "message": {"usage": MESSAGE}}
        end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 25}}
        return events(start, end, {"type": "message_stop"}, done=False)
    if route == "/embeddings":
        said = json.dumps({"data": [[0.5] * 50_000], "usage": {"prompt_tokens": 12, "total_tokens": 12}}).encode()
        packed = gzip.compress(said)
        parts = tuple(packed[at : at + 7] for at in range(0, len(packed), 7))
        return Reply(chunks=parts, headers=(("content-encoding", "gzip"),))
    return whole({"error": {"message": "no such file"}}, status=404) if route == "/files" else whole(completion("ok"))


@pytest.mark.requirement("P15", "P7")
async def test_what_is_relayed_is_counted_with_what_its_answer_reports(tmp_path: Path) -> None:
    priced = ONE + "models: [{{match: gpt-mini, prices: {{input: 1.0, output: 10.0, cache_read: 0.1}}}}]\n"
    async with scene(tmp_path, answers, upstreams=priced) as run:
        before = await run.ask("POST", "/v1/responses", json={"model": "gpt-mini", "input": "x"})
        assert before.headers["x-weir-actions"] == "none"
        await run.ask("POST", "/v1/responses", json={"model": "gpt-mini", "stream": True})
        await run.ask("POST", "/v1/messages", BOT, json={"model": "claude-9", "stream": True, "messages": []})
        async with openai.AsyncOpenAI(base_url=run.weir.base_url, api_key=BOT, max_retries=0) as client:
            await client.embeddings.with_raw_response.create(model="embed-1", input="hello", encoding_format="float")
        assert (await run.ask("GET", "/v1/files")).status_code == 404
        assert (await run.ask("POST", "/v1/responses", BOT, json={"model": "gpt-4"})).status_code == 403
        await Talk(run.weir.client(CODER), model="gpt-mini").ask()
        off = {"x-weir-policy": "off"}
        await Talk(run.weir.client(CODER, default_headers=off), model="gpt-mini").ask()
        rows = await run.usage()
        coder, bot = rows["coder"], rows["bot"]
        assert (coder["requests"], coder["failed"]) == (5, 1)
        assert (coder["prompt"], coder["cached"], coder["completion"]) == (220, 120, 24)
        assert coder["tokens_after"] > 210
        assert coder["tokens_saved"] == 0
        assert (bot["requests"], bot["failed"]) == (3, 1)
        assert (bot["prompt"], bot["cached"], bot["completion"]) == (112, 50, 25)
        relayed = 2 * (40 * 1.0 + 60 * 0.1 + 7 * 10.0) / 1e6
        by_policy = await run.usage("by=policy", CODER)
        chat = by_policy["off"]["cost"]
        assert by_policy["balanced"]["cost"] == pytest.approx(chat + relayed)
        assert {name: row["requests"] for name, row in by_policy.items()} == {"none": 1, "balanced": 3, "off": 1}
        by_model = await run.usage("by=model", CODER)
        assert {name: row["requests"] for name, row in by_model.items()} == {"gpt-mini": 4, "": 1}
        assert {*await run.usage("by=model", BOT)} == {"claude-9", "embed-1", "gpt-4"}
        assert (await run.usage("by=conversation", CODER))[None]["requests"] == 3
        assert sum(row["requests"] for row in (await run.usage("by=day", BOT)).values()) == 3
        page = (await run.ask("GET", "/metrics")).text
        assert len([line for line in page.splitlines() if 'weir_key="bot"' in line and "forwarded" in line]) == 1
        store = f"sqlite+aiosqlite:///{tmp_path}/w.db"
        asked = ["usage", "--config", str(tmp_path / "weir.yaml"), "--store", store, "--json"]
        shown = await asyncio.to_thread(CliRunner().invoke, main, asked)
    told = {row["key"]: row["requests"] for row in json.loads(shown.stdout)["data"]}
    assert told == {"coder": 5, "bot": 3}


@pytest.mark.requirement("R.43")
async def test_an_answer_that_cannot_be_unpacked_is_relayed_and_counted_without_tokens(tmp_path: Path) -> None:
    bomb = gzip.compress(b" " * 80_000_000)
    bodies = {"bomb": bomb, "broken": bomb[:500] + b"\0" * 90 + bomb[600:1000], "brotli": b"\x0b\x02\x80hello\x03"}

    def say(asked: Asked) -> Reply:
        name = asked.json["model"]
        packing = "br" if name == "brotli" else "gzip"
        return Reply(chunks=(bodies[name],), headers=(("content-encoding", packing),))

    async with scene(tmp_path, say) as run:
        for name, body in bodies.items():
            headers = {"authorization": f"Bearer {CODER}"}
            async with run.http.stream(
                "POST", f"{run.weir.base_url}/responses", json={"model": name}, headers=headers
            ) as answer:
                assert b"".join([part async for part in answer.aiter_raw()]) == body
        row = (await run.usage())["coder"]
        assert (row["requests"], row["failed"], row["prompt"]) == (3, 0, 0)


# -- the list of models ------------------------------------------------------------------------------------------------


def listing(*names: str, **more: object) -> Script:
    def say(asked: Asked) -> Reply:
        if asked.target.partition("?")[0].endswith("/models"):
            return whole({"object": "list", "data": [{"id": name, **more} for name in names]})
        return whole({"id": asked.target.rpartition("/")[2], "at": asked.target})

    return say


@pytest.mark.requirement("P4", "P7")
async def test_the_list_of_models_is_of_all_upstreams_and_of_what_the_key_may_use(tmp_path: Path) -> None:
    one = listing("gpt-mini", "gpt-4", "claude-old", object="model", owned_by="openai", context_length=9)
    two = listing("claude-9", "gpt-mini", type="model", display_name="Claude")
    async with scene(tmp_path, one, upstreams=TWO, other=two) as run:
        found = (await run.ask("GET", "/v1/models")).json()
        named = [entry["id"] for entry in found["data"]]
        assert found["object"] == "list"
        assert named == ["gpt-mini", "gpt-4", "claude-9", "gone-1", "haiku"]
        assert found["data"][0] == {
            "id": "gpt-mini",
            "object": "model",
            "created": 0,
            "owned_by": "openai",
            "context_length": 9,
        }
        assert found["data"][2] | {"display_name": "Claude", "object": "model", "owned_by": "two"} == found["data"][2]
        async with openai.AsyncOpenAI(base_url=run.weir.base_url, api_key=BOT, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["gpt-mini", "embed-1", "claude-9"]
            assert (await client.models.retrieve("claude-9")).id == "claude-9"
            with pytest.raises(openai.PermissionDeniedError):
                await client.models.retrieve("gpt-4")
        assert [each.target for each in run.two.asked] == ["/v1/models", "/v1/models", "/v1/models/claude-9"]
        assert {each.headers["x-api-key"] for each in run.two.asked} == {"sk-second"}
        assert not [each for each in run.two.asked if "authorization" in each.headers]
        assert {each.headers.get("anthropic-version") for each in run.two.asked[:2]} == {"2023-06-01"}
        card = (await run.ask("GET", "/v1/models/haiku")).json()
        assert (card["id"], card["object"]) == ("haiku", "model")
        assert (await run.ask("GET", "/v1/models", "sk-nobody")).status_code == 401


@pytest.mark.requirement("S.7")
async def test_a_clients_own_key_is_shown_to_the_first_upstream_alone_when_models_are_listed(tmp_path: Path) -> None:
    async with scripted(listing("a")) as one, scripted(listing("b")) as two:
        upstreams = f"{{one: {{base_url: '{one.base_url}'}}, two: {{base_url: '{two.base_url}'}}}}"
        yaml = f"upstreams: {upstreams}\nmodels: [{{match: b, upstream: two}}]\n"
        async with weir("", yaml=yaml, folder=tmp_path) as target:
            found = await target.client("sk-mine").models.list()
    assert [model.id for model in found.data] == ["a", "b"]
    assert one.asked[0].headers["authorization"] == "Bearer sk-mine"
    assert not two.asked


# -- other protocols ---------------------------------------------------------------------------------------------------


async def raw(target: RunningWeir, text: str) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers and body of the answer to a request as it is written here."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(target.root.rpartition(":")[2]))
    writer.write(text.replace("\n", "\r\n").encode())
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    writer.close()
    return head[0], headers, body


HANDSHAKE = """GET {path} HTTP/1.1
Host: 127.0.0.1
Connection: keep-alive, Upgrade
Upgrade: WebSocket
Sec-WebSocket-Version: 13
Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==

"""


@pytest.mark.requirement("P4", "S.12")
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime?model=m", "/", "/weir/health", "/v1/chat/completions"])
async def test_a_websocket_handshake_is_told_at_once_that_there_is_none(path: str) -> None:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator, weir(simulator.base_url) as target:
        line, headers, body = await raw(target, HANDSHAKE.format(path=path))
        assert line.split()[1] == "426"
        assert headers["upgrade"] == "HTTP/1.1"
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")
        assert "stream" in error["message"]
        assert not simulator.ledger
