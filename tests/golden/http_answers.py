"""What the management API and the routes beside it answer to one life of a Weir, with what differs by run masked.

``python -m tests.golden.http_answers`` writes the answers anew.
"""

import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx

from proxy.access.admission import AuthThrottle
from tests.functional.api import ADMIN, Api
from tests.functional.harness import COUNTER, Talk, weir
from tests.upstream import Dialect, SimulatorSettings
from tests.upstream.app import serve_simulator

ANSWERS = Path(__file__).with_name("http_answers.json")
POLICIES = """
upstreams:
  main: {{base_url: "{upstream}", api_key: pass}}
  claude: {{base_url: "{claude}", api_key: pass}}
window: 4096
auth: {{admin_token: {admin}}}
models: [{{match: gpt-test, window: 8192}}, {{match: claude-test, window: 8192, upstream: claude}}]
policies:
  alarmed: {{health: {{utilization: 0.05, utilization_requests: 1, tool_bloat: 0.05}}}}
  evicting: {{cascade: [{{layer: evict}}, {{layer: compact}}]}}
  capped: {{mode: observe, buckets: {{tool_outputs: {{cap: 0.10}}, history: {{cap: 0.60}}}}}}
default_policy: alarmed
"""
MASKS = (
    (r"127\.0\.0\.1:\d+", "HOST"),
    (r"/tmp/[\w./-]*/", "FOLDER/"),
    (r"\b1[6-9]\d{8}(\.\d+)?\b", "TIME"),
    (r'": -?\d+\.\d+(e-?\d+)?\b', '": FLOAT'),
    (r'": -?\d+\b', '": COUNT'),
    (r"<weir-\d+>", "<weir-MARK>"),
    (r"\bafter=\d+", "after=COUNT"),  # the mark that Weir's text has is another one each time
    (r"\b(\d\.\d)\d;(green|yellow|orange|red|critical);", r"\1#;\2;"),
    (r"\breq_[0-9a-f]+", "REQUEST"),
    (r"\bW[yz][A-Za-z0-9_-]+", "CURSOR"),
    (r"\b[0-9a-f]{12,}\b", "HEX"),
    (r"20\d\d-\d\d-\d\d(T[\d:+]+)?", "DAY"),
    (r'"facts": \{.*?\}, "prev"', '"facts": {}, "prev"'),  # what happened at once has no order
    (r'"type": "[a-z_.]+", "conversation"', '"type": "TYPE", "conversation"'),
    (r'"request": "\w*"', '"request": "REQUEST"'),
)
VOLATILE = frozenset(
    {"date", "server", "content-length", "x-weir-sha256", "x-weir-size", "x-weir-cursor", "x-weir-overhead-ms"}
)
MAX_BODY_LEN = 1_500
PARTS = ("/timeline", "/checkpoints", "/removed", "/audit", "/health", "/notes")
WHOLE = ("", "/checkpoint", "/checkpoint.md")
WRONG_QUERIES = (
    *("limit=0", "limit=x", "limit=-1", "cursor=!!", "cursor=W10", "since=yesterday", "closed=maybe", "by=week"),
    *(
        "type=nothing",
        "nonsense=1",
        "limit=1&limit=2",
        "&".join(f"a{n}=1" for n in range(30)),
        "q=%20",
        "q=" + "x" * 1001,
    ),
)
WRONG_BODIES: tuple[tuple[str, str, object], ...] = (
    ("POST", "conversations/full/notes", b"{"),
    ("POST", "conversations/full/notes", [1]),
    ("POST", "conversations/full/notes", {"text": ""}),
    ("POST", "conversations/full/notes", {"text": "a", "category": 1}),
    ("POST", "conversations/full/notes", {"text": "a", "importance": "huge"}),
    ("POST", "conversations/full/notes", {"text": "a", "colour": "red"}),
    ("POST", "conversations/full/notes", {"text": "x" * 4001}),
    ("POST", "conversations/full/notes", b" " * (65 * 1024)),
    ("POST", "conversations/full/pin", {}),
    ("POST", "conversations/full/pin", {"ref": "nothing"}),
    ("POST", "conversations/full/compact", {"now": True}),
    ("POST", "conversations/full/rollback/x", None),
    ("POST", "conversations/full/rollback/99", None),
    ("GET", "conversations/full/checkpoints/99", None),
    ("GET", "conversations/full/checkpoints/9999999999", None),
    ("GET", "conversations/full/checkpoints/99/source", None),
    ("GET", "conversations/none", None),
    ("GET", "conversations/full/nonsense", None),
    ("GET", "conversations/full/checkpoints/1/nonsense", None),
    ("GET", "conversations/a%2Fb", None),
    ("GET", "", None),
    ("GET", "nonsense/here", None),
    ("GET", "blobs/nothing", None),
    ("GET", "blobs/nothing?cursor=x", None),
    ("GET", "search", None),
    ("GET", "search?q=module&conversation=none", None),
    ("PATCH", "conversations/full", None),
    ("DELETE", "usage", None),
    ("OPTIONS", "conversations/full", None),
    ("HEAD", "usage", None),
    ("DELETE", "conversations/none", None),
)
WRONG_POLICIES: tuple[tuple[str, bytes], ...] = (
    ("bad%20name", b"preset: balanced"),
    ("made", b""),
    ("made", b"\xff"),
    ("made", b"[1]"),
    ("made", b"- a"),
    ("made", b"headrom: 1"),
    ("made", b'{"headroom": 20}'),
    ("made", b"a: [1"),
)


def masked(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, put in MASKS:
        text = re.sub(pattern, put, text)
    return text


class Recorder:
    """Asks, and keeps what was answered."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.answers: dict[str, Any] = {}

    async def ask(self, method: str, path: str, body: object = None, *, key: str | None = "sk-test") -> Any:
        """One answer of ``/weir/…``; its JSON, if it is."""
        answer = await self.api.ask(method, path, body, key=key)
        who = {"sk-test": "caller", ADMIN: "operator", None: "nobody"}.get(key, "other")
        self.keep(f"{who} {method} {path}", answer)
        is_json = answer.headers.get("content-type") == "application/json" and "x-weir-size" not in answer.headers
        return json.loads(answer.content) if is_json and answer.content else answer.text

    async def at_root(self, method: str, path: str, **options: Any) -> None:
        """One answer of another route."""
        answer = await self.api.http.request(method, f"{self.api.target.root}{path}", **options)
        self.keep(f"{method} {path}", answer)

    def keep(self, name: str, answer: httpx.Response, *, most: int = MAX_BODY_LEN) -> None:
        """Note an answer under a name that no other has, with at most so many characters of its body."""
        name = masked(name[:120])
        while name in self.answers:
            name += " again"
        headers = {n: masked(v) for n, v in answer.headers.items() if n not in VOLATILE}
        body = masked(answer.content.decode("utf-8", "backslashreplace"))
        self.answers[name] = [answer.status_code, headers, body[:most]]


def written(answers: dict[str, Any]) -> str:
    """The answers, one a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(answer, ensure_ascii=False)}" for name, answer in answers.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


async def record(folder: Path) -> dict[str, Any]:
    """Every answer."""
    async with (
        serve_simulator(SimulatorSettings(window=8_192), counter=COUNTER) as simulator,
        serve_simulator(SimulatorSettings(window=8_192, dialect=Dialect.ANTHROPIC), counter=COUNTER) as claude,
    ):
        yaml = POLICIES.format(upstream=simulator.base_url, claude=claude.base_url, admin=ADMIN)
        async with (
            weir("", folder / "w.db", yaml=yaml, folder=folder, window=None) as target,
            httpx.AsyncClient() as http,
        ):
            api = Api(target, simulator, http, folder)
            recorder = Recorder(api)
            await _live(api)
            await _read(recorder)
            await _change(recorder)
            await _refused(recorder)
            await _beside(recorder)
            await _exchanges(recorder)
            return recorder.answers


async def _live(api: Api) -> None:
    """Three conversations, one after the other so that their order is theirs."""
    for name, policy, seed in (("full", "alarmed", 1), ("evicted", "evicting", 2), ("looked", "capped", 4)):
        headers = {"x-weir-conversation": name, "x-weir-policy": policy}
        talk = Talk(api.target.client(default_headers=headers), seed=seed)
        if name == "full":
            talk.grow(5, kind="agent")
        for step in range(9 if name != "full" else 5):
            await (talk.agent if name != "full" or step == 0 else talk.chat)(1)
            await api.target.runtime.preparation.settled()
            await api.target.stored()
            if step == 0 and name == "full":
                talk.grow(6)


async def _read(recorder: Recorder) -> None:
    for key in ("sk-test", ADMIN, "sk-nobody"):
        await recorder.ask("GET", "conversations?limit=2", key=key)
        for name in ("full", "evicted", "looked") if key == "sk-test" else ("full",):
            for part in PARTS:
                await recorder.ask("GET", f"conversations/{name}{part}?limit=1", key=key)
            for part in WHOLE:
                await recorder.ask("GET", f"conversations/{name}{part}", key=key)
        for by in ("", "?by=model", "?by=policy", "?by=day", "?by=conversation"):
            await recorder.ask("GET", f"usage{by}", key=key)
        for path in ("health", "audit?limit=3", "policies?limit=2", "policies/evicting", "policies/none", "config"):
            await recorder.ask("GET", path, key=key)
        await recorder.ask("GET", "search?q=module&limit=2", key=key)
    first = await recorder.ask("GET", "conversations?limit=1")
    await recorder.ask("GET", f"conversations?limit=1&cursor={first['next']}")
    for part in ("timeline", "checkpoints", "removed", "audit"):
        page = await recorder.ask("GET", f"conversations/full/{part}?limit=1")
        if page["next"]:
            await recorder.ask("GET", f"conversations/full/{part}?limit=1&cursor={page['next']}")
    for each in (await recorder.ask("GET", "conversations/full/checkpoints"))["data"]:
        await recorder.ask("GET", f"conversations/full/checkpoints/{each['version']}")
        await recorder.ask("GET", f"conversations/full/checkpoints/{each['version']}/source")
    gone = (await recorder.ask("GET", "conversations/full/removed"))["data"]
    for key in ("sk-test", ADMIN):
        await recorder.ask("GET", f"blobs/{gone[0]['ref']}", key=key)
        await recorder.ask("GET", f"blobs/{gone[0]['ref']}.txt", key=key)
    await recorder.ask("GET", f"blobs/{gone[0]['ref']}?cursor=9")


async def _change(recorder: Recorder) -> None:
    gone = (await recorder.ask("GET", "conversations/full/removed"))["data"]
    for _ in range(2):
        await recorder.ask("POST", "conversations/full/notes", {"text": "Use fetch.", "category": "decisions"})
    await recorder.ask("GET", "conversations/full/notes")
    await recorder.ask("POST", "conversations/full/pin", {"ref": gone[-1]["ref"]})
    await recorder.ask("POST", "conversations/full/compact")
    await recorder.ask("POST", "conversations/full/rollback/0")
    for _ in range(2):
        await recorder.ask("POST", "conversations/full/close")
    await recorder.ask("GET", "conversations?closed=true")
    for body in (b"about: mine\nhealth: {utilization: 0.7}\n", b'{"preset": "off"}'):
        await recorder.ask("PUT", "policies/made", body, key=ADMIN)
        await recorder.ask("GET", "policies/made")
    await recorder.ask("PUT", "policies/balanced", b"headroom: 0.04", key=ADMIN)
    await recorder.ask("DELETE", "policies/balanced", key=ADMIN)
    for _ in range(2):
        await recorder.ask("DELETE", "policies/made", key=ADMIN)
    await recorder.ask("PUT", "policies/made", b"preset: balanced")
    await recorder.ask("DELETE", "conversations/looked")
    await recorder.ask("GET", "audit?limit=4")
    await recorder.ask("GET", "audit?type=policy.change&limit=4", key=ADMIN)


async def _refused(recorder: Recorder) -> None:
    for query in WRONG_QUERIES:
        for path in ("conversations", "conversations/full/timeline", "usage", "search", "audit"):
            await recorder.ask("GET", f"{path}?{query}")
    for method, path, body in WRONG_BODIES:
        await recorder.ask(method, path, body)
    for name, policy in WRONG_POLICIES:
        await recorder.ask("PUT", f"policies/{name}", policy, key=ADMIN)
    for key in (None, "weir-sk-unknown", "wrong"):
        for path in ("conversations", "config"):
            recorder.api.target.runtime.auth_throttle = AuthThrottle()
            await recorder.ask("GET", path, key=key)
    recorder.api.target.runtime.auth_throttle = AuthThrottle()


async def _beside(recorder: Recorder) -> None:
    for headers in (
        {"origin": "https://elsewhere.example"},
        {"sec-fetch-site": "cross-site"},
        {"host": "rebound.example"},
        {"host": "rebound.example", "authorization": "Bearer sk-test"},
        {"origin": "https://elsewhere.example", "authorization": "Bearer sk-test"},
    ):
        await recorder.at_root("GET", "/weir/usage", headers=headers)
        await recorder.at_root("POST", "/v1/chat/completions", headers=headers, content=b"{")
    key = {"authorization": "Bearer sk-test"}
    for method, path in (
        *(("GET", "/healthz"), ("POST", "/healthz"), ("GET", "/readyz"), ("GET", "/nothing"), ("GET", "/v1/models")),
        *(("GET", "/v1/models/gpt-test"), ("BREW", "/v1/models"), ("GET", "/v1"), ("GET", "/v1/nothing")),
        *(("POST", "/openai/deployments/gpt-test/chat/completions"), ("DELETE", "/v1/files/x")),
    ):
        await recorder.at_root(method, path, headers=key)
    for content in (b"", b"{", b"[]", b'{"model": "gpt-test"}', b'{"model": "gpt-test", "messages": []}'):
        await recorder.at_root("POST", "/v1/chat/completions", headers=key, content=content)
    embed = {"model": "gpt-test", "input": "a"}
    await recorder.at_root("POST", "/v1/embeddings", headers=key, json=embed)
    await recorder.at_root("GET", "/v1/models", headers={**key, "upgrade": "websocket"})
    await recorder.at_root("GET", "/v1/models", headers={**key, "via": "1.1 weir"})


async def _exchanges(recorder: Recorder) -> None:
    """Requests of each endpoint that are passed, streamed, edited and refused."""
    key = {"authorization": "Bearer sk-test", "x-weir-policy": "balanced"}
    too_long = "word " * 20_000
    for path, model, array, rest, system in (
        ("/v1/chat/completions", "gpt-test", "messages", {}, {}),
        ("/v1/responses", "gpt-test", "input", {"store": False}, {"instructions": too_long}),
        ("/v1/messages", "claude-test", "messages", {"max_tokens": 100}, {"system": too_long}),
    ):
        head = [] if system else [{"role": "system", "content": too_long}]
        for name, messages, options in (
            ("passed", _said(1), {}),
            ("streamed", _said(1), {"stream": True}),
            ("edited", _said(25), {}),
            ("refused", [*head, *_said(1)], system),
        ):
            headers = {**key, "anthropic-version": "2023-06-01", "x-weir-conversation": f"{name}-{model}"}
            body = {"model": model, **rest, array: messages, **options}
            target = recorder.api.target
            answer = await recorder.api.http.post(f"{target.root}{path}", headers=headers, json=body)
            await target.stored()  # what it taught of the model's count holds for the next one
            recorder.keep(f"{name} POST {path}", answer, most=MAX_BODY_LEN if answer.status_code >= 400 else 0)


def _said(turns: int) -> list[dict[str, str]]:
    """A conversation in which each of ``turns`` requests was answered, and its newest request."""
    said = [
        {"role": role, "content": f"{role} {turn}: " + " ".join(f"word{turn * 7 + n}" for n in range(120))}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]
    return [*said, {"role": "user", "content": "Go on."}]


def main() -> None:
    """Write the answers of today."""
    with tempfile.TemporaryDirectory() as folder:
        answers = asyncio.run(record(Path(folder)))
    ANSWERS.write_text(written(answers))


if __name__ == "__main__":
    main()
