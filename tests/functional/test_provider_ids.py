"""What one key made at the provider is that key's: nobody else reads, continues, lists or deletes it."""

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import weir
from tests.functional.scripted import Asked, Reply, ScriptedUpstream, completion, scripted, whole

ANNE, BERT, CARL = "sk-anne-01234567", "sk-bert-01234567", "sk-carl-01234567"
YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: {upstream_key}}}}}
models: [{{match: "*", window: 32768}}]
auth: {{mode: keys}}
keys:
  - {{name: anne, secret: {anne}}}
  - {{name: bert, secret: {bert}}}
  - {{name: carl, secret: {carl}, allow: [shared]}}
"""
USER = {"role": "user", "content": "hello"}
FILES = [{"id": "file-anne", "object": "file"}, {"id": "file-other", "object": "file"}]


def reply(asked: Asked) -> Reply:
    """An upstream that answers whoever asks, as for one customer."""
    path = asked.target.partition("?")[0]
    if path == "/v1/files":
        value: Any = {"object": "list", "data": FILES} if asked.method == "GET" else FILES[0]
        return whole(value)
    if path.startswith("/v1/responses"):
        item = {"id": "msg_anne", "type": "message", "role": "assistant", "status": "completed"}
        item["content"] = [{"type": "output_text", "text": "yes", "annotations": []}]  # type: ignore[assignment]
        # metadata is what the client sent: nobody gets an id by saying it
        return whole({"id": "resp_anne", "object": "response", "output": [item], "metadata": {"id": "file-other"}})
    if path == "/v1/messages":
        value = {"id": "msg_1", "type": "message", "role": "assistant", "container": {"id": "container_anne"}}
        value["content"] = [{"type": "tool_use", "id": "toolu_1", "name": "x", "input": {"file_id": "file-other"}}]
        return whole(value)
    return whole(completion("ok"))


class Scene:
    def __init__(self, root: str, upstream: ScriptedUpstream, http: httpx.AsyncClient) -> None:
        self.root = root
        self.upstream = upstream
        self.http = http

    async def ask(self, key: str, path: str, body: object = None, *, method: str = "POST") -> httpx.Response:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        url = httpx.URL(self.root).copy_with(raw_path=path.encode())
        return await self.http.request(method, url, content=data, headers=headers)

    async def makes(self, key: str) -> None:
        """Has a key be given an answer, a file and a container."""
        assert (await self.ask(key, "/v1/responses", {"model": "m", "input": "x"})).status_code == 200
        assert (await self.ask(key, "/v1/files", {"purpose": "x"})).status_code == 200
        body = {"model": "m", "max_tokens": 9, "messages": [USER], "container": {"skills": []}}
        assert (await self.ask(key, "/v1/messages", body)).status_code == 200


@asynccontextmanager
async def scene(folder: Path, upstream_key: str = "sk-operator-0123") -> AsyncIterator[Scene]:
    async with scripted(reply) as upstream, httpx.AsyncClient(timeout=30) as http:
        keys = {"anne": ANNE, "bert": BERT, "carl": CARL}
        yaml = YAML.format(upstream=upstream.base_url, upstream_key=upstream_key, **keys)
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=None) as target:
            yield Scene(target.root, upstream, http)
            await target.stored()


def asks(path: str, **fields: Any) -> tuple[str, object]:
    array = {"/v1/responses": {"input": "x"}}.get(path, {"messages": [USER], "max_tokens": 9})
    return path, {"model": "m", **array, **fields}


def part(**file: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [file]}]


RESPONSES, CHAT, MESSAGES = "/v1/responses", "/v1/chat/completions", "/v1/messages"
NAMING = (
    (*asks(RESPONSES, previous_response_id="resp_anne"), "previous_response_id"),
    (RESPONSES, b'{"model":"m","input":"x","previous_\\u0072esponse_id":"resp_anne"}', "previous_response_id"),
    (
        RESPONSES,
        b'{"model":"m","input":"x","previous_response_id":"resp_anne","previous_response_id":null}',
        "previous_response_id",
    ),
    (*asks(RESPONSES, input=[{"type": "item_reference", "id": "msg_anne"}]), "input[0].id"),
    (*asks(RESPONSES, input=[USER, {"type": "reasoning", "id": "msg_anne", "summary": []}]), "input[1].id"),
    (
        *asks(RESPONSES, input=[{"type": "message", "role": "assistant", "id": "msg_anne", "content": []}]),
        "input[0].id",
    ),
    (*asks(RESPONSES, input=part(type="input_file", file_id="file-anne")), "input[0].content[0].file_id"),
    (
        *asks(RESPONSES, tools=[{"type": "file_search", "vector_store_ids": ["file-anne"]}]),
        "tools[0].vector_store_ids[0]",
    ),
    (*asks(RESPONSES, prompt={"id": "pmpt_1"}), "prompt.id"),
    (*asks(RESPONSES, conversation={"id": "conv_1"}), "conversation.id"),
    (*asks(CHAT, messages=part(type="file", file={"file_id": "file-anne"})), "messages[0].content[0].file.file_id"),
    (*asks(CHAT, messages=[{"role": "assistant", "audio": {"id": "audio_1"}}, USER]), "messages[0].audio.id"),
    (*asks(MESSAGES, container="container_anne"), "container"),
    (
        *asks(MESSAGES, messages=part(type="document", source={"type": "file", "file_id": "file-anne"})),
        "messages[0].content[0].source.file_id",
    ),
    ("/v1/batches", {"input_file_id": "file-anne"}, "input_file_id"),
)
PATHS = (
    ("GET", "/v1/responses/resp_anne"),
    ("DELETE", "/v1/responses/resp_anne"),
    ("POST", "/v1/responses/resp_anne/cancel"),
    ("GET", "/v1//responses/resp_anne/input_items"),
    ("GET", "/v1/%72esponses/resp_anne"),
    ("DELETE", "/v1/files/file-anne"),
    ("GET", "/v1/models/../files/file-anne"),
)


async def test_what_a_key_made_is_its_own_and_nobody_elses(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        await run.makes(ANNE)
        before = len(run.upstream.asked)
        for path, body, field in NAMING:
            refused = await run.ask(BERT, path, body)
            error = refused.json()["error"]
            assert (refused.status_code, error.get("param", field)) == (404, field), (path, body)
            assert field in error["message"]
            assert "shared" in error["message"]
        for method, path in PATHS:
            assert (await run.ask(BERT, path, method=method)).status_code in (400, 404), path
        assert len(run.upstream.asked) == before, "nothing went up"
        for key in (ANNE, CARL):
            for path, body, _ in NAMING:
                told = json.dumps(body) if not isinstance(body, bytes) else body.decode()
                if "_anne" in told or "-anne" in told:
                    assert (await run.ask(key, path, body)).status_code == 200, (key, path, body)
            assert (await run.ask(key, "/v1/responses/resp_anne", method="GET")).status_code == 200


async def test_lists_have_only_what_is_the_keys_own(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        await run.makes(ANNE)
        for key, names in ((ANNE, ["file-anne"]), (BERT, []), (CARL, ["file-anne", "file-other"])):
            listed = await run.ask(key, "/v1/files?limit=10", method="GET")
            assert [each["id"] for each in listed.json()["data"]] == names


async def test_what_says_what_it_is_goes_up_whatever_its_id(tmp_path: Path) -> None:
    items = [
        {"type": "message", "id": "msg_x", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "abc"},
        {"type": "function_call", "id": "fc_x", "call_id": "call_x", "name": "look", "arguments": '{"file_id":"f"}'},
        {"type": "function_call_output", "id": "fco_x", "call_id": "call_x", "output": "there"},
        USER,
    ]
    call = {"type": "tool_use", "id": "toolu_x", "name": "look", "input": {"file_id": "of-the-tool"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_x", "content": "there"}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    async with scene(tmp_path) as run:
        body = {"model": "m", "input": items, "store": False, "metadata": {"file_id": "mine"}}
        assert (await run.ask(BERT, RESPONSES, body)).status_code == 200
        assert (await run.ask(BERT, *asks(MESSAGES, messages=turns))).status_code == 200
        assert (await run.ask(BERT, *asks(CHAT, conversation="a name of the client's"))).status_code == 200


async def test_it_is_known_after_a_restart_and_not_judged_with_a_credential_of_the_callers(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        await run.makes(ANNE)
    async with scene(tmp_path) as run:
        for key, status in ((ANNE, 200), (BERT, 404)):
            assert (await run.ask(key, *asks(RESPONSES, previous_response_id="resp_anne"))).status_code == status
            assert (await run.ask(key, "/v1/files/file-anne", method="GET")).status_code == status
    async with scene(tmp_path, "pass") as run:
        assert (await run.ask(BERT, "/v1/files/file-anne", method="GET")).status_code == 200


EVENTS = (
    {"type": "response.created", "response": {"id": "resp_anne", "object": "response", "output": []}},
    {"type": "response.output_item.added", "item": {"id": "msg_anne", "type": "message", "content": []}},
    {"type": "response.completed", "response": {"id": "resp_anne", "object": "response", "output": []}},
)


@pytest.mark.parametrize("sent", [1, 3])
async def test_the_ids_of_a_stream_are_the_keys_as_soon_as_it_has_them(tmp_path: Path, sent: int) -> None:
    frames = tuple(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in EVENTS[:sent])

    def streams(asked: Asked) -> Reply:
        if asked.method == "POST" and asked.json.get("stream"):
            return Reply(kind="text/event-stream", chunks=frames)
        return reply(asked)

    async with scripted(streams) as upstream, httpx.AsyncClient(timeout=30) as http:
        yaml = YAML.format(upstream=upstream.base_url, upstream_key="sk-op-01234", anne=ANNE, bert=BERT, carl=CARL)
        async with weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target:
            run = Scene(target.root, upstream, http)
            body = {"model": "m", "input": "x", "stream": True, "background": True}
            with contextlib.suppress(httpx.RemoteProtocolError):  # the stream may be cut before its end
                await run.ask(ANNE, RESPONSES, body)
            assert (await run.ask(ANNE, "/v1/responses/resp_anne", method="GET")).status_code == 200
            assert (await run.ask(BERT, "/v1/responses/resp_anne", method="GET")).status_code == 404
