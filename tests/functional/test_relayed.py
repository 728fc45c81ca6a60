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


@pytest.mark.requirement("P4")
async def test_the_list_of_one_upstream_is_its_own_to_the_byte_for_a_key_that_may_use_all(tmp_path: Path) -> None:
    body = b'{"data" : [ {"id":"a"} ],\n "more": 1.0e1}'
    async with scene(tmp_path, lambda _: Reply(chunks=(body,))) as run:
        assert (await run.ask("GET", "/v1/models?limit=3")).content == body
        assert run.one.asked[0].target == "/v1/models?limit=3"


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


# -- credentials -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P7", "S.7")
@pytest.mark.parametrize("auth", ["bearer", "x-api-key", "api-key"])
@pytest.mark.parametrize("passes", [True, False])
async def test_a_key_goes_up_as_the_upstream_wants_it_and_no_other_beside_it(
    tmp_path: Path, auth: str, passes: bool
) -> None:
    async with scripted(lambda _: whole(completion("ok"))) as upstream:
        key = "pass" if passes else "sk-operator"
        yaml = f"""
upstreams: {{main: {{base_url: "{upstream.base_url}", api_key: {key}, auth: {auth}}}}}
auth: {{mode: keys}}
keys: [{{name: bot, secret: {BOT}, upstream_key: sk-of-bot}}]
"""
        async with weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path) as target, httpx.AsyncClient() as http:
            own = {"authorization": f"Bearer {BOT}", "x-api-key": "sk-a", "api-key": "sk-b", "anthropic-version": "v"}
            for path in ("chat/completions", "messages"):
                body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
                answer = await http.post(f"{target.base_url}/{path}", json=body, headers=own)
                assert answer.status_code == 200
        for asked in (each for each in upstream.asked if each.method == "POST"):
            sent = {n: v for n, v in asked.headers.items() if n in {"authorization", "x-api-key", "api-key"}}
            expected = "sk-of-bot" if passes else "sk-operator"
            assert sent == ({"authorization": f"Bearer {expected}"} if auth == "bearer" else {auth: expected})
            assert asked.headers["anthropic-version"] == "v"


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


NOWHERE = [
    *(
        (method, path)
        for method in ("TRACE", "PROPFIND")
        for path in ("/v1/files", "/healthz", "/nothing", "/weir/health")
    ),
    ("TRACE", "/v1/chat/completions"),
    ("POST", "/readyz"),
    ("DELETE", "/metrics"),
]


@pytest.mark.requirement("S.11")
@pytest.mark.parametrize(("method", "path"), NOWHERE)
async def test_a_method_that_is_not_answered_is_refused_in_the_shape_of_errors(method: str, path: str) -> None:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator, weir(simulator.base_url) as target:
        line, headers, body = await raw(target, f"{method} {path} HTTP/1.1\nHost: 127.0.0.1\nContent-Length: 0\n\n")
        assert line.split()[1] == ("404" if path == "/nothing" else "405")
        assert headers["content-type"] == "application/json"
        assert json.loads(body)["error"]["code"] == "invalid_request"
        assert path == "/nothing" or "GET" in headers["allow"]
        assert not simulator.ledger
        for odd in ("CONNECT x:443", "BREW /v1/files"):
            line, _, body = await raw(target, f"{odd} HTTP/1.1\nHost: x\n\n")
            assert line.split()[1] in {"400", "404", "405"}
            assert body


@pytest.mark.parametrize(("status", "answered"), [(304, 304), (999, 502)])
async def test_what_is_not_modified_is_relayed_and_an_unknown_status_is_the_upstreams_fault(
    status: int, answered: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def say(asked: Asked) -> Reply:
        del asked
        return Reply(status, headers=(("content-length", "1234"),), delimited=False)

    async with scene(tmp_path, say) as at:
        answer = await at.ask("GET", "/v1/catalogue")
    assert answer.status_code == answered
    assert not [each for each in caplog.records if each.exc_info]
