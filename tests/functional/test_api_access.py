"""Who may ask the management API what: every route of the table, with every kind of key, and web pages."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from proxy.access.admission import AuthThrottle
from proxy.app import ROUTES
from proxy.http.routes import PREFIX, ManagementRoute
from tests.functional.api import ADMIN, BODIES, NAME, Api, compacted, filled, serving
from tests.functional.harness import COUNTER, weir
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

KEYED = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
window: 4096
auth: {{admin_token: {admin}, mode: keys}}
keys:
  - {{name: mine, secret: sk-test-0123}}
  - {{name: theirs, secret: sk-other-0123}}
"""
MINE, THEIRS = "sk-test-0123", "sk-other-0123"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """A Weir in mode ``open`` on loopback."""
    async with serving(tmp_path) as api:
        yield api


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Api]:
    """A Weir that knows two keys."""
    async with serve_simulator(SimulatorSettings(window=4_096), counter=COUNTER) as simulator:
        yaml = KEYED.format(upstream=simulator.base_url, admin=ADMIN)
        async with (
            weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target,
            httpx.AsyncClient() as http,
        ):
            yield Api(target, simulator, http, tmp_path)


async def raw(
    api: Api, method: str, target: str, *, key: str | None = "sk-test", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a request whose target is sent as it is."""
    where = urlsplit(api.target.root)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    lines = {"host": where.netloc, "connection": "close", **{n.replace("_", "-"): v for n, v in headers.items()}}
    if key is not None:
        lines["authorization"] = f"Bearer {key}"
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = top.decode("latin-1").split("\r\n")
    return int(first.split(" ")[1]), {n.lower(): v for n, _, v in (line.partition(": ") for line in rest)}, body


def asked(route: ManagementRoute) -> str:
    """A route's path for something that is not there."""
    return filled(route.pattern, id="nobody")


def body_of(route: ManagementRoute) -> object:
    if route.method == "PUT":
        return b"preset: balanced"
    return BODIES.get(route.pattern.rpartition("/")[2]) if route.method == "POST" else None


@pytest.mark.requirement("P7")
async def test_every_route_asks_for_a_key_and_for_the_right_one(keyed: Api) -> None:
    for route in ROUTES:
        wanted = {None: 401, "sk-nobody-0123": 401, "weir-sk-unknown": 401, ADMIN + "x": 401, ADMIN[:-1]: 401}
        if route.asker == "anyone":
            wanted = {None: 200, "sk-nobody-0123": 200}
        if route.asker == "operator":
            wanted |= {MINE: 403, THEIRS: 403}
        if route.asker == "caller":
            wanted |= {ADMIN: 403}
        keyed.target.runtime.auth_throttle = AuthThrottle()
        for key, status in wanted.items():
            path = asked(route) + ("?q=x" if route.pattern == "search" else "")
            answer = await keyed.ask(route.method, path, body_of(route), key=key)
            assert answer.status_code == status, (route.method, route.pattern, key, answer.text)
            assert answer.headers["cache-control"] == "no-store"
            if status == 401:
                assert "nobody" not in answer.text
    assert "mine" not in keyed.target.runtime.config.policies, "nothing was set"


@pytest.mark.requirement("P7", "S.2")
async def test_what_is_anothers_looks_like_what_is_not_there(keyed: Api) -> None:
    await compacted(keyed, key=MINE)
    ref = (await keyed.of("removed", key=MINE))["data"][0]["ref"]
    tried = 0
    for route in ROUTES:
        named = {"{id}", "{ref}"}.intersection(route.pattern.split("/"))
        if not named:
            continue
        there, nowhere = filled(route.pattern, ref=ref), filled(route.pattern, id="support-9999", ref="0123456789ab")
        one = await keyed.ask(route.method, there, body_of(route), key=THEIRS)
        other = await keyed.ask(route.method, nowhere, body_of(route), key=THEIRS)
        assert one.status_code == other.status_code == 404, (route.method, route.pattern, one.text)
        assert one.text.replace(NAME, "support-9999").replace(ref, "0123456789ab") == other.text
        assert set(one.headers) == set(other.headers)
        tried += 1
    assert tried > 15
    for path, more in {"conversations": {}, "audit": {}, "usage": {}, "health": {}, "search": {"q": "module"}}.items():
        found = await keyed.get(path, key=THEIRS, **more)
        assert found["data"] == [], path
        assert NAME not in json.dumps(found)
    for path in ("search?q=x&conversation=" + NAME, f"search?q=module&conversation={ref}"):
        await keyed.refused(404, "GET", path, key=THEIRS)
    for path in ("conversations", "audit", "usage"):
        assert (await keyed.get(path, key=ADMIN))["data"], path
    usage = (await keyed.get("usage", key=ADMIN))["data"]
    assert [(row["key"], row["requests"]) for row in usage] == [
        ("mine", (await keyed.get(f"conversations/{NAME}", key=MINE))["requests"])
    ]


STRANGE = (
    "%00", "%2F", "%2e%2e", "..", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%F0%9F%99%82", "%ff%fe", "%ed%a0%80", "x" * 10_240, "%0d%0aset-cookie:a",
    "'%20OR%201=1--", "%25", "%", "*", "~", "{id}", "-1", "9" * 40, "%20", "a%00b", "%E2%80%AE", ";id", "null", "None",
)  # fmt: skip


async def test_strange_names_are_not_found_and_never_an_error_of_weirs(api: Api) -> None:
    await api.talk().agent(1)
    for route in ROUTES:
        for name in ("id", "version", "ref", "name", "rid", "key") if "{" in route.pattern else ():
            if f"{{{name}}}" not in route.pattern:
                continue
            for strange in STRANGE:
                target = PREFIX + filled(route.pattern, **{name: strange})
                key = ADMIN if route.asker == "operator" else "sk-test"
                status, _, body = await raw(api, route.method, target, key=key)
                assert status in {400, 404}, (route.method, target[:80], status, body[:200])
                assert json.loads(body)["error"]["code"] == "invalid_request"
    assert (await api.get("conversations"))["data"][0]["name"] == NAME


@pytest.mark.requirement("S.10")
async def test_a_web_page_of_another_origin_is_refused(api: Api) -> None:
    where = urlsplit(api.target.root).netloc
    port = where.rpartition(":")[2]
    paths = [f"{PREFIX}conversations", f"{PREFIX}openapi.json", f"{PREFIX}usage"]
    for target in paths:
        for headers in (
            {"origin": "https://elsewhere.example"},
            {"origin": "null"},
            {"origin": f"http://127.0.0.1:{int(port) - 1}"},
            {"origin": f"http://elsewhere.example:{port}"},
            {"origin": "http://[::1"},
            {"sec_fetch_site": "cross-site"},
            {"sec_fetch_site": "same-site"},
        ):
            for key in (None, "sk-test", ADMIN):
                status, got, body = await raw(api, "GET", target, key=key, **headers)
                assert status == 403, (headers, body)
                assert not [name for name in got if name.startswith("access-control")]
        for headers in (
            {"origin": f"http://{where}"},
            {"sec_fetch_site": "same-origin"},
            {"sec_fetch_site": "none"},
            {},
        ):
            assert (await raw(api, "GET", target, **headers))[0] == 200, headers
    posted = await raw(api, "POST", f"{PREFIX}conversations/x/compact", key=None, origin="https://elsewhere.example")
    assert posted[0] == 403


@pytest.mark.requirement("S.10")
async def test_a_name_bound_to_loopback_is_no_way_in_without_a_key(api: Api) -> None:
    port = urlsplit(api.target.root).port
    for host in (
        f"evil.example:{port}",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "xlocalhost",
    ):
        for target in ("conversations", "usage", "openapi.json"):
            status, _, body = await raw(api, "GET", PREFIX + target, key=None, host=host, origin=f"http://{host}")
            assert status == 403, (host, body)
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "weir.localhost"):
        assert (await raw(api, "GET", f"{PREFIX}conversations", key=None, host=host))[0] == 200, host
    assert (await raw(api, "GET", f"{PREFIX}conversations", host="weir.internal"))[0] == 200, (
        "whoever has a key may use a name"
    )
