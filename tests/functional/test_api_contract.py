"""The OpenAPI document is true: it has every route, and every live answer is of the shape that it says."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate

from proxy.access.admission import MAX_WRONG, AuthThrottle
from proxy.app import ROUTES
from proxy.features.activity import METRICS, OPERATORS_METRICS
from proxy.http.routes import PREFIX
from proxy.store.records import LimitRow
from tests.functional.api import ADMIN, Api, filled
from tests.functional.contract import Contract
from tests.functional.harness import COUNTER, Talk, weir
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

POLICIES = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
window: 4096
auth: {{admin_token: {admin}}}
policies:
  alarmed: {{health: {{utilization: 0.05, utilization_requests: 1, tool_bloat: 0.05}}}}
  evicting: {{cascade: [{{layer: evict}}, {{layer: compact}}]}}
  turning: {{cascade: [{{layer: rollover}}]}}
  looking: {{mode: observe}}
  capped: {{mode: observe, buckets: {{tool_outputs: {{cap: 0.10}}, history: {{cap: 0.60}}}}}}
default_policy: alarmed
"""


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_simulator(SimulatorSettings(window=8_192), counter=COUNTER) as simulator:
        yaml = POLICIES.format(upstream=simulator.base_url, admin=ADMIN)
        async with (
            weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target,
            httpx.AsyncClient() as http,
        ):
            yield Api(target, simulator, http, tmp_path)


def talk(api: Api, name: str, policy: str, seed: int) -> Talk:
    headers = {"x-weir-conversation": name, "x-weir-policy": policy}
    return Talk(api.target.client(default_headers=headers), seed=seed)


async def lived(api: Api) -> None:
    """Conversations in which everything happened that can: eviction, compaction, rollover, refusal, alerts, a pin."""
    full = talk(api, "full", "alarmed", 1)
    full.grow(5, kind="agent")
    await full.agent(1)
    full.grow(6)
    await full.chat(4)
    assert "compact=" in full.actions()[-1]
    evicted = talk(api, "evicted", "evicting", 2)
    await evicted.agent(12)
    turned = talk(api, "turned", "turning", 3)
    turned.grow(8)
    await turned.chat(6)
    await talk(api, "looked", "looking", 4).agent(9)
    await talk(api, "ended", "alarmed", 5).agent(1)


@pytest.mark.requirement("A0.136", "A0.92", "A0.128", "A0.138", "A0.148")
async def test_every_live_answer_is_what_the_document_says(api: Api) -> None:
    await lived(api)
    contract = await Contract.of(api)

    async def ask(method: str, path: str, body: object = None, key: str | None = "sk-test", **options: Any) -> Any:
        answer = await api.ask(method, path, body, key=key, **options)
        contract.check(method, answer)
        return answer.json() if answer.headers["content-type"] == "application/json" else answer.text

    names = [row["name"] for row in (await ask("GET", "conversations?limit=500"))["data"]]
    assert set(names) == {"full", "evicted", "turned", "looked", "ended"}
    strategies = set()
    for name in names:
        for key in ("sk-test", ADMIN):
            for part in ("", "/timeline", "/checkpoints", "/removed", "/audit", "/health", "/notes"):
                found = await ask("GET", f"conversations/{name}{part}", key=key)
                if part == "/timeline":
                    strategies |= {row["strategy"] for row in found["data"]}
    assert any("compact" in s for s in strategies), strategies
    assert "rollover" in strategies
    assert any("evict" in s for s in strategies), strategies
    health = await ask("GET", "conversations/full/health")
    assert health["alerts"], "alerts were to be had"
    assert (await ask("GET", "health", key=ADMIN))["data"]
    kept = await ask("GET", "conversations/full/checkpoint")
    await ask("GET", "conversations/full/checkpoint.md")
    for each in (await ask("GET", "conversations/turned/checkpoints"))["data"]:
        await ask("GET", f"conversations/turned/checkpoints/{each['version']}")
    await ask("GET", f"conversations/full/checkpoints/{kept['version']}")
    saved = (await ask("GET", "conversations/full/checkpoints"))["data"]
    batch = next(each["version"] for each in saved if each["reason"] == "compaction")
    assert await ask("GET", f"conversations/full/checkpoints/{batch}/source")
    gone = (await ask("GET", "conversations/full/removed"))["data"]
    await ask("GET", f"blobs/{gone[0]['ref']}")
    await ask("GET", f"blobs/{gone[0]['ref']}.txt")
    assert (await ask("GET", "search?q=module"))["data"]
    for by in (
        "",
        "?by=team",
        "?by=key",
        "?by=key&format=csv",
        "?by=model",
        "?by=policy",
        "?by=day",
        "?by=conversation",
        "?by=conversation&limit=1",
    ):
        for key in ("sk-test", ADMIN, "sk-nobody"):
            await ask("GET", f"usage{by}", key=key)
    note = {"text": "Use fetch.", "category": "decisions", "importance": "high"}
    for _ in range(2):
        await ask("POST", "conversations/full/notes", note)
    assert (await ask("GET", "conversations/full/notes"))["data"][0]["text"] == "Use fetch."
    await ask("POST", "conversations/full/pin", {"ref": gone[-1]["ref"]})
    await ask("POST", "conversations/full/compact")
    await ask("POST", "conversations/full/rollback/0")
    await ask("POST", "conversations/full/close")
    for key in ("sk-test", ADMIN):
        assert (await ask("GET", "audit", key=key))["data"]
    for body in ("preset: balanced\nhealth: {utilization: 0.7}\n", "preset: balanced\n"):
        await ask("PUT", "policies/made", body.encode(), key=ADMIN)
    await ask("GET", "policies")
    for name in ("made", "balanced", "alarmed"):
        await ask("GET", f"policies/{name}")
    await ask("DELETE", "policies/made", key=ADMIN)
    await ask("GET", "config", key=ADMIN)
    await watched(ask, api, contract)
    await ask("DELETE", "conversations/ended")
    await ask("GET", "audit", key=ADMIN)
    await errors(api, contract)
    await ask("POST", "keys", {"name": "made", "models": ["sim*"], "allow": ["mode"]}, key=ADMIN)
    await ask("POST", "keys/made/rotate", key=ADMIN)
    await ask("POST", "keys/made/policy", {"policy": "balanced"}, key=ADMIN)
    await ask("POST", "keys/made/limits", {"concurrency": 4, "expires": "30d"}, key=ADMIN)
    await ask("POST", "keys/made/budgets", {"budgets": ["day,tokens=5,dollars=0.5"]}, key=ADMIN)
    for key in ("sk-test", ADMIN):
        await ask("GET", "budgets", key=key)
    await ask("GET", "keys", key=ADMIN)
    await ask("DELETE", "keys/made", key=ADMIN)
    assert await Contract.of(api) == Contract(contract.document)
    contract.seen.add(("GET", f"{PREFIX}openapi.json", 200))
    expected = {(r.method, PREFIX + r.pattern, status) for r in ROUTES for status in r.statuses}
    assert expected - contract.seen == set()


async def watched(ask: Any, api: Api, contract: Contract) -> None:
    """What people look at."""
    for key in ("sk-test", ADMIN):
        for row in (await ask("GET", "conversations/full/timeline?limit=3"))["data"]:
            both = await ask("GET", f"conversations/full/requests/{row['id']}", key=key)
            assert both["kept"]
            assert both["client"][0].keys() >= {"place", "status"}
    for metric in METRICS:
        key = ADMIN if metric in OPERATORS_METRICS else "sk-test"
        await ask("GET", f"series?metric={metric}&step=1m&since=1h", key=key)
    async with api.http.stream(
        "GET", f"{api.target.root}{PREFIX}live", headers={"authorization": "Bearer sk-test"}
    ) as told:
        assert told.headers["content-type"].startswith("text/event-stream")
    contract.seen.add(("GET", f"{PREFIX}live", 200))
    limits, scope = api.target.runtime.limits_resolver, "http://x:1 - m"
    await api.target.runtime.store.learn(limits=[LimitRow(scope=scope, limit=4096, seen=1, expires=9e9)])
    limits.follow([], await api.target.runtime.store.limits())
    assert [row["scope"] for row in (await ask("GET", "windows", key=ADMIN))["data"]] == [scope]
    await ask("POST", "windows/forget", {"scope": scope}, key=ADMIN)
    assert (await ask("GET", "windows", key=ADMIN))["data"] == []


async def errors(api: Api, contract: Contract) -> None:
    """Every refusal of every route, each as the document says."""
    for route in ROUTES:
        api.target.runtime.auth_throttle = AuthThrottle()
        path = filled(route.pattern, id="nobody", name="none")
        wrong = await api.ask(route.method, f"{path}?nonsense=1", key=ADMIN if route.asker == "operator" else "sk-test")
        assert wrong.status_code == 400
        contract.check(route.method, wrong)
        for headers, status in (({}, 401), ({"origin": "https://elsewhere.example"}, 403)):
            if route.asker == "anyone" and status == 401:
                continue
            answer = await api.http.request(
                route.method,
                f"{api.target.root}{PREFIX}{path}",
                headers={"authorization": "Bearer weir-sk-unknown", **headers},
            )
            assert answer.status_code == status, (route.pattern, answer.text)
            contract.check(route.method, answer)
    for _ in range(MAX_WRONG + 1):
        answer = await api.ask("GET", "usage", key="weir-sk-unknown")
    assert answer.status_code == 429
    contract.check("GET", answer)
    for method, path, body, status in (
        ("GET", "conversations/nobody", None, 404),
        ("POST", "conversations/full/pin", {"ref": 5}, 400),
        ("POST", "conversations/full/notes", b"{", 400),
        ("POST", "conversations/full/notes", {"text": "x" * 70_000}, 413),
        ("GET", "conversations/full/checkpoints/77", None, 404),
        ("POST", "conversations/full/rollback/77", None, 404),
    ):
        answer = await api.ask(method, path, body)
        assert answer.status_code == status
        contract.check(method, answer)
    for body, status in ((b"preset: nonsense", 400), (b"x" * 300_000, 413)):
        answer = await api.ask("PUT", "policies/made", body, key=ADMIN)
        assert answer.status_code == status
        contract.check("PUT", answer)


async def test_the_document_is_valid_and_has_exactly_the_routes_that_there_are(api: Api) -> None:
    document = (await Contract.of(api)).document
    validate(document)
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, PREFIX + route.pattern) for route in ROUTES}
    for route in ROUTES:
        operation = document["paths"][PREFIX + route.pattern][route.method.lower()]
        shared = document["components"]["parameters"]
        parameters = [
            shared[each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in operation["parameters"]
        ]
        names = [each["name"] for each in parameters if each["in"] == "query"]
        assert names == list(route.query)
        assert operation["summary"]
        security = operation.get("security", document["security"])
        assert ({"admin": []} in security) == (route.asker in {"operator", "key"})
        assert ({"key": []} in security) == (route.asker in {"caller", "key"})
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


async def test_an_object_with_a_field_that_the_document_does_not_have_is_noticed(api: Api) -> None:
    await talk(api, "full", "alarmed", 1).agent(1)
    contract = await Contract.of(api)
    found = await api.get("conversations")
    schema = contract.document["paths"][f"{PREFIX}conversations"]["get"]["responses"]["200"]
    schema = schema["content"]["application/json"]["schema"]
    assert contract.problems(schema, found) == []
    for spoilt in (
        {**found, "more": 1},
        {"data": found["data"]},
        {**found, "data": [{**found["data"][0], "colour": "red"}]},
        {**found, "data": [{**found["data"][0], "requests": "1"}]},
        {**found, "data": [{**found["data"][0], "zone": "pink"}]},
    ):
        assert contract.problems(schema, spoilt)
