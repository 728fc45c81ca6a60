"""A model that a key may not use is not reached by any spelling, and no request goes to a provider by a guess."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import RunningWeir, weir
from tests.functional.scripted import Asked, Reply, ScriptedUpstream, completion, scripted, whole

LIMITED, RELAYING, FREE = "sk-limited-0123", "sk-relaying-012", "sk-free-01234567"
OPERATOR = "sk-operator-0123"
MINE, OTHER = "gpt-mini", "gpt-4"
ONE = """
upstreams: {{one: {{base_url: "{one}", api_key: {operator}}}}}
"""
TWO = """
upstreams:
  one: {{base_url: "{one}", api_key: {operator}}}
  two: {{base_url: "{two}", api_key: {operator}}}
models:
  - {{match: "claude-*", upstream: two}}
"""
KEYS = """
auth: {{mode: keys}}
keys:
  - {{name: limited, secret: {limited}, models: [{mine}]}}
  - {{name: relaying, secret: {relaying}, models: [{mine}], allow: [relay, shared]}}
  - {{name: free, secret: {free}, allow: [shared]}}
"""


@dataclass(slots=True)
class Scene:
    """Weir in front of two upstreams that write down whatever reaches them."""

    weir: RunningWeir
    one: ScriptedUpstream
    two: ScriptedUpstream
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=30))

    async def ask(
        self,
        path: str,
        *,
        key: str = LIMITED,
        method: str = "POST",
        body: Any = None,
        kind: str | None = "application/json",
        chunked: bool = False,
        headers: Mapping[str, str] = {},
    ) -> httpx.Response:
        """One request, its path as it is spelled."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(data or b""), 50_000):
                yield (data or b"")[start : start + 50_000]

        sent = {"authorization": f"Bearer {key}", **({"content-type": kind} if kind else {}), **headers}
        url = httpx.URL(self.weir.root).copy_with(raw_path=path.encode())
        return await self.http.request(method, url, content=parts() if chunked else data, headers=sent)

    def asked(self) -> list[Asked]:
        return [*self.one.asked, *self.two.asked]


def say(asked: Asked) -> Reply:
    return whole({**completion("ok"), "object": "list", "data": []}, headers=(("x-weir-actions", "forged"),))


@asynccontextmanager
async def scene(folder: Path, upstreams: str = ONE) -> AsyncIterator[Scene]:
    async with scripted(say) as one, scripted(say) as two:
        yaml = (upstreams + KEYS).format(
            one=one.base_url,
            two=two.base_url,
            operator=OPERATOR,
            limited=LIMITED,
            relaying=RELAYING,
            free=FREE,
            mine=MINE,
        )
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=None) as target:
            started = Scene(target, one, two)
            try:
                yield started
            finally:
                await started.http.aclose()


def said(model: object, **more: object) -> dict[str, object]:
    return {"model": model, "input": "x", "messages": [{"role": "user", "content": "x"}], **more}


def form(*fields: tuple[str, str], boundary: str = "edge") -> bytes:
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields]
    file = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
    return "".join([*parts, file, "Content-Type: audio/wav\r\n\r\n\0\1\r\n", f"--{boundary}--\r\n"]).encode()


FORM = "multipart/form-data; boundary=edge"
BIG = {"input": "x" * 10_000_000}
PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/",
    "/v1//chat/completions",
    "/v1/chat%2fcompletions",
    "/v1/chat%2Fcompletions/",
    "/v1/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/",
    "/v1//responses",
    "/v1/responses/compact",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/images/generations",
    "/v1/audio/speech",
    "/v1/rerank",
    "/v1/made-up",
    "/v1/made-up/chat/completions",
    "/v1/Chat/Completions",
    "/v1/chat/completions;a=b",
    "/v1/chat%252fcompletions",
    "/v1/realtime/client_secrets",
    "/v1/fine_tuning/jobs",
    "/v1/threads/thread_1/runs",
    "/v1/messages/batches",
)
IN_PATH = (
    "/v1/engines/gpt-4/completions",
    "/v1/engines/gpt-4/chat/completions",
    "/v1/deployments/gpt-4/chat/completions",
    "/v1/deployments/gpt%2d4/embeddings",
    "/openai/deployments/gpt-4/chat/completions?api-version=2024-10-21",
    "/openai/deployments/gpt-4/audio/transcriptions",
    "/openai//deployments//gpt-4//chat/completions/",
    "/v1/models/gpt-4:generateContent",
)
ODD: tuple[bytes, ...] = (
    b'{"model":"gpt-mini","model":"gpt-4","input":"x","messages":[]}',
    b'{"model":"gpt-4","model":"gpt-mini","input":"x","messages":[]}',
    b'{"model":"gpt-mini","input":"x","messages":[],"mod\\u0065l":"gpt-4"}',
    b'{"mod\\u0065l":"gpt-4","input":"x","messages":[]}',
    b'{"model":"gpt-mini","Model":"gpt-4","input":"x","messages":[]}',
    b'{"MODEL":"gpt-4","input":"x","messages":[]}',
    b'{"model":["gpt-4"],"input":"x","messages":[]}',
    b'{"model":{"id":"gpt-4"},"input":"x","messages":[]}',
    b'{"model":null,"input":"x","messages":[]}',
    b'{"model":"","input":"x","messages":[]}',
    b'{"input":"x","messages":[]}',
    b'\xef\xbb\xbf{"model":"gpt-4","input":"x","messages":[]}',
    '{"model":"gpt-4","input":"x"}'.encode("utf-16"),
    b'{"model":"gpt-mini","input":"x","messages":[]}{"model":"gpt-4"}',
    b'{"model":"gpt-mini","models":["gpt-4"],"input":"x","messages":[]}',
    b'{"model":"gpt-mini","fallbacks":[{"model":"gpt-4"}],"input":"x","messages":[]}',
    b'{"model":"gpt-mini","fallbacks":[{"gpt-mini":["gpt-4"]}],"input":"x","messages":[]}',
    b'{"model":"gpt-mini","tools":[{"type":"image_generation","model":"gpt-4"}],"input":"x","messages":[]}',
    b'{"model":"gpt-mini","tools":[{"type":"advisor","mod\\u0065l":"gpt-4"}],"input":"x","messages":[]}',
    b"model=gpt-4&input=x",
    b"[]",
    b"gpt-4",
)
NAMELESS = (
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/file-1/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("GET", "/v1/chat/completions"),
    ("GET", "/v1/engines"),
    ("POST", "/v1/vector_stores"),
    ("POST", "/v1/assistants"),
    ("POST", "/v1/fine_tuning/jobs"),
    ("DELETE", "/v1/models/gpt-mini"),
    ("PATCH", "/v1/responses"),
    ("OPTIONS", "/v1/responses"),
)


@pytest.mark.requirement("P7", "S.7")
async def test_a_key_with_models_reaches_no_other_by_any_spelling(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        answers: list[tuple[object, httpx.Response]] = []
        for path in PATHS:
            answers.append((path, await run.ask(path, body=said(OTHER))))
            answers.append((path, await run.ask(path, body=said(OTHER), chunked=True)))
        for path in IN_PATH:
            for model in (None, MINE, OTHER):
                body = {"input": "x", "messages": []} | ({"model": model} if model else {})
                answers.append((path, await run.ask(path, body=body)))
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages/"):
            answers += [((path, body), await run.ask(path, body=body, kind=None)) for body in ODD]
            answers += [((path, body), await run.ask(path, body=body, chunked=True)) for body in ODD]
        for path in ("/v1/audio/transcriptions", "/v1/images/edits", "/v1/responses", "/v1/embeddings"):
            answers.append(((path, "form"), await run.ask(path, body=form(("model", MINE)), kind=FORM)))
        for big in ({**BIG, "model": OTHER}, {"model": MINE, **BIG, "Model": OTHER}):
            answers += [("big", await run.ask("/v1/responses", body=big, chunked=c)) for c in (True, False)]
        answers += [((m, p), await run.ask(p, method=m, body={"a": 1})) for m, p in NAMELESS]
        for path in ("/v1/chat/completions?model=gpt-4", "/v1/embeddings?a=b&Mod%65l=gpt-4"):
            answers.append((path, await run.ask(path, body=said(MINE))))
        packed = {"content-encoding": "gzip"}
        answers.append(("gzip", await run.ask("/v1/responses", body=said(MINE), headers=packed)))
        passed = [(what, answer.status_code) for what, answer in answers if not 400 <= answer.status_code < 500]
        assert not passed
        assert not run.asked(), [a.target for a in run.asked()]
        for what, answer in answers:
            assert answer.json()["error"]["message"], what


@pytest.mark.requirement("P7", "P4")
async def test_a_key_with_models_gets_them_everywhere_whole_and_with_the_operators_key(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        sent: list[bytes] = []
        for path in ("/v1/responses", "/v1//embeddings/", "/v1/messages"):
            for chunked in (True, False):
                body = json.dumps(said(MINE) | BIG if "embeddings" in path else said(MINE), indent=1).encode()
                answer = await run.ask(path, body=body, chunked=chunked)
                assert answer.status_code == 200, path
                if "embeddings" in path:
                    assert answer.headers.get_list("x-weir-actions") == ["relayed"], path
                sent.append(body)
        targets = ["/responses", "/embeddings", "/messages"]
        asked = [each for each in run.one.asked if each.target.removeprefix("/v1") in targets]  # not for its window
        assert [each.body for each in asked] == sent, "byte for byte"
        assert {each.headers["authorization"] for each in run.one.asked} == {f"Bearer {OPERATOR}"}
        assert [*dict.fromkeys(each.target for each in asked)] == [f"/v1{target}" for target in targets]


@pytest.mark.requirement("P7")
async def test_all_routes_but_the_managed_ones_models_and_embeddings_are_for_keys_that_may_relay(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as run:
        for path in (
            "/v1/completions",
            "/v1/moderations",
            "/v1/images/generations",
            "/v1/engines/gpt-mini/completions",
        ):
            refused = await run.ask(path, body=said(MINE))
            assert refused.status_code == 403, path
            assert "relay" in refused.json()["error"]["message"], path
        assert not run.asked()
        for path in ("/v1/completions", "/v1/moderations"):
            assert (await run.ask(path, body=said(MINE), key=RELAYING)).status_code == 200, path
        told = form(("model", MINE))
        assert (await run.ask("/v1/audio/transcriptions", body=told, kind=FORM, key=RELAYING)).status_code == 200
        assert [each.body for each in run.one.asked][2:] == [told]
        run.one.asked.clear()
        for key in (RELAYING, FREE):
            for method, path in NAMELESS:
                assert (await run.ask(path, method=method, body={"a": 1}, key=key)).status_code == 200, path
        assert [each.target for each in run.one.asked] == [path for _, path in NAMELESS] * 2
        refused = await run.ask("/v1/files", method="GET", body=None)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert "relay" in refused.json()["error"]["message"]
        still = await run.ask("/v1/responses", body=said(OTHER), key=RELAYING)
        assert (still.status_code, still.json()["error"]["code"]) == (403, "model_not_allowed")
        assert (await run.ask("/v1/made-up", body=said(OTHER), key=RELAYING)).status_code == 403


@pytest.mark.requirement("P7", "S.7", "P10")
async def test_no_conversation_goes_to_another_provider_than_its_models(tmp_path: Path) -> None:
    async with scene(tmp_path, TWO) as run:
        paths = ("/v1/messages", "/v1/responses", "/v1/chat/completions/", "/v1/made-up")
        for path, chunked in zip(paths, (True, False) * 2, strict=True):
            big = {"input": "word " * 200_000} if path == "/v1/responses" else BIG  # which is counted there
            for body in (said("claude-9"), {**big, "model": "claude-9", "messages": []}):
                answer = await run.ask(path, key=FREE, body=body, chunked=chunked)
                assert answer.status_code in (200, 400), answer.text  # a chat of 10 MB in one field has no window
        assert not run.one.asked
        assert len(run.two.asked) >= 7
        for body in ODD:
            if b"models" not in body and b"fallbacks" not in body and b"tools" not in body:
                for path in ("/v1/messages", "/v1/chat/completions"):
                    answer = await run.ask(path, key=FREE, body=body, chunked=True)
                    assert answer.status_code in (400, 200), (body, answer.text)
        odd = {each.body for each in run.asked()} & set(ODD)
        assert odd == {b'{"mod\\u0065l":"gpt-4","input":"x","messages":[]}'}, "which says one model, escaped"
        for path in ("/v1/files", "/v1/made-up"):
            for kind, body in (("application/octet-stream", b"\0\1"), (None, b"text")):
                assert (await run.ask(path, key=FREE, body=body, kind=kind)).status_code == 400, (path, kind)
        before = len(run.one.asked)
        assert (await run.ask("/v1/files", key=FREE, body=form(("purpose", "batch")), kind=FORM)).status_code == 200
        assert (await run.ask("/v1/files", key=FREE, method="GET", body=None)).status_code == 200
        assert (await run.ask("/v1/messages", key=FREE, body=said("gpt-5"))).status_code == 200
        asked = [each.target for each in run.one.asked[before:] if each.target in ("/v1/files", "/v1/messages")]
        assert len(asked) == 3, "the first one takes what no rule sends elsewhere"


STEERING = tuple(
    f"{before}{name}"
    for before in ("", "x-", "x-weir-", "openai-", "litellm-", "x-litellm-", "azure-", "target-", "x-original-", "x-portkey-")
    for name in (
        "upstream", "base-url", "api-base", "base_url", "api_base", "baseURL", "endpoint", "host", "forwarded-host",
        "url", "proxy", "provider-url", "custom-host", "origin", "server", "destination", "backend", "api-url",
        "azure-endpoint", "forward-to",
    )
)  # fmt: skip


@pytest.mark.requirement("S.7")
async def test_nothing_that_a_client_says_leads_to_another_address(tmp_path: Path) -> None:
    names = sorted({name.lower() for name in STEERING} - {"host"})
    assert len(names) >= 190
    async with scene(tmp_path) as scene_:
        away = scene_.two.base_url
        host = away.partition("//")[2].partition("/")[0]
        fields = {name.replace("-", spelled): away for name in STEERING for spelled in ("_", "-")}
        everything = {**fields, "metadata": fields, "extra_body": fields, "litellm_params": fields}
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            for start in range(0, len(names), 40):
                for value in (away, host):
                    headers = dict.fromkeys(names[start : start + 40], value)
                    assert (await scene_.ask(path, key=FREE, body=said(MINE), headers=headers)).status_code == 200
            query = "&".join(f"{name}={away}" for name in STEERING)
            for more in ({"body": said(MINE, **everything)}, {"body": said(MINE), "headers": {"host": host}}):
                assert (await scene_.ask(path, key=FREE, **more)).status_code == 200
            assert (await scene_.ask(f"{path}?{query}", key=FREE, body=said(MINE))).status_code == 200
            absolute = f"{away.removesuffix('/v1')}{path}"
            assert await as_proxy(scene_.weir, absolute, said(MINE)) == 200
        assert scene_.two.connections == 0
        paths = [asked.target.partition("?")[0] for asked in scene_.one.asked]
        assert sum(path in ("/v1/chat/completions", "/v1/embeddings") for path in paths) == 2 * (
            2 * -(-len(names) // 40) + 4
        )


async def as_proxy(target: RunningWeir, url: str, body: object) -> int:
    """The status of a request whose target is a whole URL, as one to a forward proxy is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(target.root.rpartition(":")[2]))
    data = json.dumps(body).encode()
    head = f"POST {url} HTTP/1.1\r\nHost: {url.split('/')[2]}\r\nAuthorization: Bearer {FREE}\r\n"
    head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return int(answer.split()[1])
