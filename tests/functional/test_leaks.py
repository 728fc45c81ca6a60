"""Canary secrets and canary content go through every way in which a request can fail; nothing tells of them after.

Searched are both forms of the log at DEBUG, spans, metrics, every column and byte of the database, the answers and
their headers. What an upstream says of a client's own content is relayed, and what a database keeps of content is
said in ``docs/privacy.md``.
"""

import asyncio
import contextlib
import gc
import json
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from policies.health import HealthAlert
from proxy.features.alerts import Alerts, Notice
from proxy.features.feature import Features, Turn
from proxy.features.plugins import NewResult, Plugin, Plugins
from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.canaries import (
    CONTENT,
    SECRETS,
    Ears,
    columns,
    conversation,
    files,
    found_in,
    leaked,
    listening,
    request,
)
from tests.functional.harness import RunningWeir, free_port, weir
from tests.functional.scripted import Asked, Reply, ScriptedUpstream, as_asked, completion, events, scripted, whole

pytestmark = pytest.mark.slow

YAML = """
upstreams:
  main: {{base_url: "{url}", api_key: "{upstream}", timeout: {{connect: 1s, first_byte: 500ms, idle: 500ms}}}}
  summaries: {{base_url: "{url}", api_key: "{summariser}"}}
  client: {{base_url: "{url}", api_key: pass}}
  dead: {{base_url: "http://127.0.0.1:{dead}/v1", api_key: "{upstream}"}}
  lost: {{base_url: "http://nowhere.invalid/v1", api_key: "{upstream}"}}
  tls: {{base_url: "https://127.0.0.1:{port}/v1", api_key: "{upstream}"}}
models:
  - {{match: dead, upstream: dead}}
  - {{match: lost, upstream: lost}}
  - {{match: tls, upstream: tls}}
  - {{match: own, upstream: client}}
  - {{match: summariser, upstream: summaries, window: 8192}}
auth: {{mode: keys, admin_token: "{admin}"}}
keys:
  - {{name: app, secret: "{client}", allow: [policy, mode], upstream_key: "{own_upstream}"}}
  - {{name: alias, secret: "{alias}"}}
  - {{name: other, secret: "{other}", models: ["only-this"]}}
policies:
  small: {{window: 8192, cascade: [{{layer: evict, at: 0.5, stop_at: 0.3}}]}}
  written: {{preset: balanced, window: 8192, summarizer: summariser, summaries: {{wait: 20}}}}
  custom: {{window: 8192, cascade: [{{layer: custom, at: 0.4, params: {{path: "leaky_layer:raises", seconds: 5}}}}, {{layer: evict}}]}}
default_policy: small
window: 8192
store: {{content: {content}}}
limits: {{body: 256KiB}}
telemetry:
  alerts: {{webhook: "{url}/hook?token={webhook_query}", secret: "{webhook}", level: info, seconds: 1}}
"""

LEAKY = """
def raises(messages, budget):
    raise ValueError("cannot do " + str(messages))
"""

Say = Callable[[Asked], Reply]


def echo(asked: Asked) -> dict[str, Any]:
    """An error that quotes everything that was sent: the line, the headers, the body."""
    said = f"{asked.target} {asked.headers} {asked.body.decode()}"
    return {"error": {"message": said, "type": "invalid_request_error", "param": None, "code": "bad"}}


@dataclass(slots=True)
class Seen:
    """What one way of failing has shown to a client."""

    status: int
    text: str
    headers: str


@dataclass(slots=True)
class Run:
    """A Weir in front of an upstream that says what a test wants, and a client with a key."""

    target: RunningWeir
    upstream: ScriptedUpstream
    http: httpx.AsyncClient
    database: Path
    ears: Ears
    seen: list[Seen] = field(default_factory=list)

    async def post(
        self, body: object, *, key: str | None = "client", path: str = "/v1/chat/completions", **headers: str
    ) -> Seen:
        """The answer to one request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **{n.replace("_", "-"): v for n, v in headers.items()}}
        if key is not None:
            given["authorization"] = f"Bearer {SECRETS[key]}"
        return await self.get("POST", path, content=content, headers=given)

    async def get(self, method: str, path: str, **options: Any) -> Seen:
        """The answer to any request."""
        text, status, headers = "", 0, ""
        with contextlib.suppress(httpx.HTTPError):
            async with self.http.stream(method, f"{self.target.root}{path}", **options) as answer:
                status, headers = answer.status_code, str(answer.headers.raw)
                async for chunk in answer.aiter_raw():
                    text += chunk.decode("utf-8", "replace")
        self.seen.append(Seen(status, text, headers))
        return self.seen[-1]

    async def manage(self, method: str, path: str, body: bytes = b"", *, key: str = "client") -> Seen:
        """An answer of the management API."""
        headers = {"authorization": f"Bearer {SECRETS[key]}"}
        return await self.get(method, f"/weir/{path}", content=body, headers=headers)

    def say(self, reply: Reply | Say) -> None:
        """What the upstream answers from now on."""
        self.upstream.say = reply if callable(reply) else lambda _: reply


Way = Callable[[Run], Awaitable[None]]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    """Note a way of failing."""
    WAYS[function.__name__] = function  # type: ignore[attr-defined]  # every function has a name
    return function


# What is wrong with the request


@way
async def malformed(run: Run) -> None:
    body = json.dumps(request()).encode()
    for broken in (body[:-40], body + b"}", b"\xff" + body, b"[" * 500 + body, b'"' + body, body.replace(b'"m"', b"5")):
        assert (await run.post(broken)).status in {400, 413}
    odd = request(messages=CONTENT["text"])
    assert (await run.post(odd)).status in {200, 400}
    assert (await run.post(request(messages=[CONTENT["text"], 5, None]))).status in {200, 400}
    assert (await run.post(request(), content_encoding="gzip")).status == 400


@way
async def too_large(run: Run) -> None:
    seen = await run.post(request(messages=[{"role": "user", "content": CONTENT["text"] * 30_000}]))
    assert seen.status == 413


@way
async def not_allowed(run: Run) -> None:
    assert (await run.post(request(), key="other")).status == 403
    assert (await run.post(request(), key="wrong")).status == 401
    assert (await run.post(request(), key=None)).status == 401
    assert (await run.post(request(), key=None, x_api_key=SECRETS["wrong"])).status == 401
    assert (await run.post(request(), key=None, api_key=SECRETS["wrong"])).status == 401
    assert (await run.post(request(), key=None, authorization=f"Basic {SECRETS['wrong']}")).status == 401
    for header in ("x-api-key", "api-key"):
        body = json.dumps(request()).encode()
        headers = {header: SECRETS["alias"], "content-type": "application/json"}
        assert (await run.get("POST", "/v1/chat/completions", content=body, headers=headers)).status == 200
    for name in ("key", "api_key"):
        assert (await run.post(request(), path=f"/v1/chat/completions?{name}={SECRETS['query']}")).status == 200
        assert (
            await run.post(request(), path=f"/v1/chat/completions?{name}={SECRETS['query']}", key=None)
        ).status == 401


@way
async def unknown_names(run: Run) -> None:
    assert (await run.post(request(), x_weir_policy="nosuch")).status == 400
    assert (await run.post(request(), x_weir_mode="nosuch")).status == 400
    assert (await run.post(request(), path="/nothing/here")).status == 404
    assert (await run.post(request(), path=f"/v1/../{CONTENT['text']}")).status in {400, 404}


@way
async def not_http(run: Run) -> None:
    """A wrong framing, an upgrade to a websocket, a header that is too long."""
    port = int(run.target.root.rpartition(":")[2])
    key, body = SECRETS["client"], json.dumps(request()).encode()
    head = f"POST /v1/chat/completions?key={SECRETS['query']} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    for more in (
        "Content-Length: +5\r\n\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n",
        f"X-Long: {key * 4_000}\r\n\r\n",
        f"Content-Length: {len(body) + 9}\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + more.encode() + body)
        with contextlib.suppress(TimeoutError, ConnectionError):
            text = (await asyncio.wait_for(reader.read(4_096), 0.3)).decode("latin-1")
            run.seen.append(Seen(0, text, ""))
        writer.close()


@way
async def loop(run: Run) -> None:
    via = f"1.1 weir-{run.target.runtime.instance}"
    assert (await run.post(request(), via=via)).status == 400


@way
async def does_not_fit(run: Run) -> None:
    words = " ".join(f"{CONTENT['text']}{n}" for n in range(4_000))
    seen = await run.post(request(messages=[{"role": "system", "content": words}, *conversation(3)[1:]]))
    assert (seen.status, '"context_length_exceeded"' in seen.text) == (400, True)


# What is wrong with the upstream


@way
async def refusals(run: Run) -> None:
    """Each quotes the key and all content, in body and headers, whole and cut into pieces."""
    for status in (400, 401, 403, 404, 429, 500, 503):
        for pieces in (1, 40):

            def say(asked: Asked, status: int = status, pieces: int = pieces) -> Reply:
                body = json.dumps(echo(asked)).encode()
                size = len(body) // pieces + 1
                parts = tuple(body[at : at + size] for at in range(0, len(body), size))
                headers = (("x-echo", asked.headers.get("authorization", "")), ("retry-after", "0"))
                return Reply(status, chunks=parts, headers=headers)

            run.say(say)
            for model in ("m", "own"):
                assert (await run.post(request(model=model))).status == status
                assert (
                    await run.post({"input": CONTENT["text"], "model": model}, path="/v1/embeddings")
                ).status == status


@way
async def unreachable(run: Run) -> None:
    for model in ("dead", "lost", "tls"):
        assert (await run.post(request(model=model))).status == 502


@way
async def silence(run: Run) -> None:
    run.say(Reply(silent=True))
    assert (await run.post(request())).status == 504
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    run.say(Reply(kind="text/event-stream", chunks=(chunk,), silent=False, between=0.9))
    await run.post(request(stream=True))


@way
async def broken_streams(run: Run) -> None:
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    for chunks in ((chunk,), (b"data: {" + CONTENT["text"].encode() + b"\n\n",), ()):
        run.say(Reply(kind="text/event-stream", chunks=chunks, cut=True))
        await run.post(request(stream=True))
    run.say(lambda asked: events(echo(asked), done=False))
    await run.post(request(stream=True))
    run.say(lambda asked: events({"choices": [{"index": 0, "delta": {"content": "a"}}]}, echo(asked), done=False))
    await run.post(request(stream=True))


@way
async def nonsense(run: Run) -> None:
    for body in (b"", CONTENT["text"].encode(), b'{"choices": "' + CONTENT["text"].encode() + b'"}', b"\xff\xfe"):
        run.say(Reply(chunks=(body,) if body else ()))
        await run.post(request())
        await run.post(request(stream=True))
    run.say(Reply(302, headers=(("location", f"http://127.0.0.1:1/?key={SECRETS['upstream']}"),)))
    assert (await run.post(request())).status == 502


@way
async def overflow(run: Run) -> None:
    """The upstream never takes it; its refusal quotes the request."""

    def say(asked: Asked) -> Reply:
        error = echo(asked)["error"]
        error |= {"code": "context_length_exceeded"}
        error["message"] = f"This model's maximum context length is 300 tokens. {error['message']}"
        return whole({"error": error}, status=400)

    run.say(say)
    assert (await run.post(request(6, words=500, mark="over", model="little"))).status == 400


# What is wrong inside


@way
async def summariser(run: Run) -> None:
    """It fails in each way that there is; some quote their prompt, which is the conversation."""

    def quoting(asked: Asked) -> str:
        return str(asked.json["messages"])

    ways: tuple[Say, ...] = (
        lambda a: whole(echo(a), status=500),
        lambda a: whole(echo(a), status=400),
        lambda a: whole(echo(a), status=401),
        lambda _: Reply(chunks=(b"{" + CONTENT["text"].encode(),)),
        lambda _: Reply(chunks=(b"\xff\xfe\xfd",)),
        lambda _: Reply(cut=True),
        lambda _: whole(completion("")),
        lambda a: whole(completion(quoting(a))),
        lambda a: whole(completion(f"I cannot do that. {quoting(a)[:500]}")),
        lambda a: whole(completion(quoting(a)[:300], finish="length")),
    )
    for number, fails in enumerate(ways):
        run.say(lambda a, f=fails: f(a) if a.json.get("model") == "summariser" else as_asked(a, completion("yes")))
        body = request(12, words=500, mark=f"s{number}")
        assert (await run.post(body, x_weir_policy="written")).status == 200
    assert sum(a.json.get("model") == "summariser" for a in run.upstream.asked) >= 3


@way
async def custom_function(run: Run) -> None:
    assert (await run.post(request(12, words=500, mark="custom"), x_weir_policy="custom")).status == 200


class Loud(Plugin):
    """A plugin that quotes what it gets in what it raises."""

    async def turn_start(self, turn: Turn) -> None:
        raise ValueError(f"{turn} {CONTENT['text']}")

    async def tool_result(self, turn: Turn, result: NewResult) -> None:
        raise KeyError(result.text) from ValueError(CONTENT["result"])


@way
async def plugin(run: Run) -> None:
    runtime = run.target.runtime
    features = runtime.features
    plugins = Plugins([Loud()])
    runtime.features = Features([plugins])
    plugins.start()
    assert (await run.post(request(mark="plugin"))).status == 200
    await plugins.close()
    runtime.features = features


class Broken:
    """Stands for a part of Weir's own that has a bug; it raises what it was given."""

    def __getattr__(self, name: str) -> Any:
        def fail(*given: object, **named: object) -> Any:
            raise RuntimeError(f"{name} {given} {named} {CONTENT} {SECRETS}")

        return fail


@way
async def bugs(run: Run) -> None:
    """In planning, in the health of a conversation, in the key ring, in a task that nobody waits for."""
    runtime = run.target.runtime
    planner, health, keyring = runtime.planner, runtime.health, runtime.keyring
    runtime.planner = msgspec.structs.replace(planner, transcripts=Broken())  # type: ignore[arg-type]
    assert (await run.post(request(mark="bug"))).status == 200
    runtime.planner = planner
    runtime.health = Broken()  # type: ignore[assignment]
    with contextlib.suppress(httpx.HTTPError):
        await run.post(request(mark="bug"))
    runtime.health = health

    async def without_keys(ask: Callable[[], Awaitable[Seen]]) -> int:
        """The status of an answer that had no key ring from its beginning to its end: keys are read anew all the time."""
        while True:
            runtime.keyring = broken = Broken()  # type: ignore[assignment]
            seen = await ask()
            if runtime.keyring is broken:
                return seen.status

    embedding = {"input": CONTENT["text"]}
    assert await without_keys(lambda: run.post(request(mark="bug"))) == 500
    assert await without_keys(lambda: run.manage("GET", "conversations")) in {0, 500}
    assert await without_keys(lambda: run.post(embedding, path="/v1/embeddings")) in {0, 500}
    runtime.keyring = keyring

    async def forgotten() -> None:
        raise RuntimeError(f"{CONTENT} {SECRETS}")

    task = asyncio.create_task(forgotten())
    await asyncio.sleep(0)
    del task
    gc.collect()


@way
async def store_trouble(run: Run) -> None:
    """Locked, gone, and with a table missing, so that a statement with its parameters fails."""
    with contextlib.closing(sqlite3.connect(run.database, isolation_level=None)) as other:
        await run.target.stored()
        other.execute("BEGIN IMMEDIATE")
        assert (await run.post(request(9, words=500, mark="locked"))).status == 200
        assert (
            await run.manage("POST", "conversations/x/notes", b'{"text": "%b"}' % CONTENT["text"].encode())
        ).status >= 400
        other.execute("ROLLBACK")
        await run.target.stored()
        for table in ("exchanges", "originals", "branches"):
            other.execute(f"ALTER TABLE {table} RENAME TO gone_{table}")
        assert (await run.post(request(9, words=500, mark="tables"))).status == 200
        await run.target.stored()
        assert (await run.manage("GET", f"search?q={CONTENT['text']}")).status == 500
        await run.target.stored()
        for table in ("exchanges", "originals", "branches"):
            other.execute(f"ALTER TABLE gone_{table} RENAME TO {table}")
    await run.target.stored()


@way
async def webhook(run: Run) -> None:
    run.say(lambda asked: whole(echo(asked), status=400))
    alert = HealthAlert(kind="loop", level="critical", category="x", value=1.0, limit=0.5, at=1.0, said="words")
    notice = Notice(alert=alert, tenant="t", conversation="c", policy="p", request="req_hook")
    run.target.runtime.features[Alerts].emit(notice)
    async with asyncio.timeout(5):
        while not any("/hook" in a.target for a in run.upstream.asked):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)


@way
async def management(run: Run) -> None:
    text, secret = CONTENT["text"], SECRETS["client"]
    for method, path, body in (
        ("GET", f"search?q={text}&nosuch={text}", b""),
        ("GET", f"conversations/{text}", b""),
        ("GET", f"conversations/{text}/nosuch/{secret}", b""),
        ("GET", f"blobs/{text}?cursor={text}", b""),
        ("GET", f"conversations?limit={text}", b""),
        ("POST", "conversations/x/notes", text.encode()),
        ("POST", "conversations/x/rollback/abc", b""),
        ("PUT", "policies/leak", f"window: {text}".encode()),
        ("PUT", "policies/leak", f"{text}: 1".encode()),
        ("PUT", f"policies/{text}", b"- a"),
    ):
        await run.manage(method, path, body)
        await run.manage(method, path, body, key="admin")
        assert (await run.manage(method, path, body, key="wrong")).status in {401, 429}


@way
async def client_gone(run: Run) -> None:
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    run.say(Reply(kind="text/event-stream", chunks=(chunk,) * 20, between=0.05))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await run.post(request(stream=True, mark="gone"))
    run.say(Reply(silent=True))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await run.post(request(mark="gone"))
    await asyncio.sleep(0.2)


@asynccontextmanager
async def running(folder: Path, *, content: str = "full") -> AsyncIterator[Run]:
    def say(asked: Asked) -> Reply:
        return as_asked(asked, completion("yes"))

    database = folder / "w.db"
    with listening() as ears:
        telemetry = Telemetry.create(OtelSettings(), span_exporter=ears.spans)
        async with scripted(say) as upstream, httpx.AsyncClient(timeout=10) as http:
            yaml = YAML.format(url=upstream.base_url, port=upstream.port, dead=free_port(), content=content, **SECRETS)
            async with weir("", database, yaml=yaml, folder=folder, window=None, telemetry=telemetry) as target:
                yield Run(target, upstream, http, database, ears)


@pytest.fixture(autouse=True)
def leaky_module(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "leaky_layer.py").write_text(LEAKY)
    sys.path.append(str(tmp_path))
    yield
    sys.path.remove(str(tmp_path))


async def search(run: Run, name: str) -> None:
    """Look through all that this way of failing has left."""
    await run.target.runtime.preparation.settled()
    await run.target.stored()
    await asyncio.sleep(0.1)
    run.target.runtime.telemetry.flush()
    assert not leaked(run.ears.logged()), (name, [x for x in run.ears.line.getvalue().splitlines() if leaked(x)][:3])
    assert not leaked(run.ears.traced()), name
    metrics = (await run.http.get(f"{run.target.root}/metrics")).text
    assert not leaked(metrics), name
    for table, text in columns(run.database).items():
        assert not leaked(text, content=False), (name, table)
    for seen in run.seen:
        mine = {"client", "alias", "query"}  # what the client sent itself, the upstream may quote to it
        shown = leaked(seen.text + seen.headers, content=False, but=mine)
        assert not shown, (name, shown, seen.text[:2_000])
    run.ears.forget()
    run.seen.clear()


CONCERNED = frozenset({"malformed", "refusals", "summariser", "custom_function", "plugin", "bugs", "store_trouble"})
"""Ways of failing of which Weir writes lines that mean one request."""


async def lines_with_ids(run: Run, name: str) -> list[dict[str, Any]]:
    """The lines of a way of failing, once each of Weir's about a request has been found to have its id."""
    await run.target.runtime.preparation.settled()
    await run.target.stored()
    lines = [json.loads(line) for line in run.ears.json.getvalue().splitlines()]
    ours = [x for x in lines if x["logger"].startswith("weir") and x["level"] != "debug"]
    assert ours, name
    assert [x for x in ours if "request" not in x and x["logger"] != "weir.settle"] == [], name
    return lines


@pytest.mark.requirement("S.2", "S.16", "S.17", "S.19", "P7", "A3.14")
async def test_no_failure_tells_a_secret_or_what_was_said_and_every_line_has_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.app.KEYS_EVERY", 3_600)  # what tends a locked store says so, and means no request
    async with running(tmp_path) as run:
        for name, fails in WAYS.items():
            run.say(lambda asked: as_asked(asked, completion("yes")))
            await fails(run)
            if name in CONCERNED:
                lines = await lines_with_ids(run, name)
            await search(run, name)
        planned = [x for x in lines if x["logger"] == "weir.planning"]  # of the last of them
        assert planned
        assert all({"request", "trace", "conversation"} <= set(x) for x in planned)
        assert {x["request"] for x in planned} <= {x["request"] for x in lines if x["message"] == "ctx"}
        stored = columns(run.database)
        assert found_in(stored["frames.body"], [CONTENT["result"]]), "content is kept where it should be"
        run.ears.forget()
    assert not leaked(run.ears.logged())
    assert not leaked(files(run.database), content=False)


@pytest.mark.requirement("P7", "S.2")
async def test_with_digests_only_no_failure_leaves_a_word_in_the_database(tmp_path: Path) -> None:
    async with running(tmp_path, content="digest") as run:
        for name in ("summariser", "custom_function", "overflow", "store_trouble", "management", "does_not_fit"):
            run.say(lambda asked: as_asked(asked, completion("yes")))
            await WAYS[name](run)
            await search(run, name)
        run.say(lambda asked: as_asked(asked, completion(f"Summary: {CONTENT['text']} and {CONTENT['result']}. " * 9)))
        seen = await run.post(request(14, words=500, mark="last"), x_weir_policy="written")
        assert "compact=" in seen.headers
        await search(run, "compacted")
        stored = columns(run.database)
        shown = {table: found for table, text in stored.items() if (found := leaked(text))}
        assert shown == {}
        assert len(stored["edits.ref"]) > 100
        assert len(stored["cuts.ref"]) > 10
    assert not leaked(files(run.database))


@pytest.mark.requirement("P7")
async def test_with_digests_only_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    """It is managed anew, because nothing is left to replay."""
    sizes = []
    for steps in (14, 16, 30):
        async with running(tmp_path, content="digest") as run:
            for more in range(2):
                seen = await run.post(request(steps + more, words=500, mark="again"), x_weir_policy="written")
                assert seen.status == 200
                assert "degraded" not in seen.headers
                sizes.append(len(run.upstream.asked[-1].body))
            note = await run.manage("POST", "conversations/x/notes", b'{"text": "a"}')
            assert note.status >= 400
    assert max(sizes) < 40_000


@pytest.mark.requirement("P7", "S.2")
async def test_one_tenants_words_are_in_no_error_of_another(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        assert (await run.post(request(9, words=500), x_weir_conversation="mine")).status == 200
        await run.target.stored()
        for path in (
            "conversations/mine",
            f"search?q={CONTENT['result']}",
            "conversations",
            "conversations/mine/removed",
        ):
            seen = await run.manage("GET", path, key="alias")
            assert not found_in(seen.text, [*CONTENT.values(), "mine"] if "mine" not in path else CONTENT.values())


def test_the_canaries_would_be_found() -> None:
    """A search that finds nothing anywhere proves nothing."""
    for word in (*SECRETS.values(), *CONTENT.values()):
        assert leaked(f"x{word}y")
        assert leaked(f"x {word.encode().hex()} y")
    with socket.socket() as unused:
        assert not leaked(repr(unused))
