"""The pages at /weir/ui over HTTP: who sees what, what a form may do, and what is kept of a request."""

import asyncio
import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import openai
import pytest
from click.testing import CliRunner

from proxy.cli import main
from proxy.store import write_queue
from proxy.store.inspections import ref_of
from tests.functional.api import ADMIN, NAME, Api, compacted, serving
from tests.functional.harness import ALONE, SHARED, Deployment, Talk, prose, weir

pytestmark = pytest.mark.slow

TOKEN = re.compile(r'name="token" value="([0-9a-f]+)"')
HOSTILE = "<script>alert(1)</script>"
KEPT = 4
HOUR, DAY = 3600.0, 86_400.0


@pytest.fixture
async def api(tmp_path: Path, deployment: Deployment) -> AsyncIterator[Api]:
    async with serving(tmp_path, deployment=deployment) as api:
        yield api


class Visitor:
    """A browser without a screen: it keeps cookies, follows redirects and fills in forms."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.http = httpx.AsyncClient(follow_redirects=True)

    async def get(self, path: str = "", **options: Any) -> httpx.Response:
        return await self.http.get(f"{self.api.turns.root()}/weir/ui{path}", **options)

    async def send(self, path: str, page: str = "", **fields: Any) -> httpx.Response:
        """A form, with the token of a page of this visitor's."""
        found = TOKEN.search((await self.get(page)).text)
        assert found is not None
        return await self.post(path, token=found[1], **fields)

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(f"{self.api.turns.root()}/weir/ui{path}", data=fields)

    async def sign_in(self, key: str) -> httpx.Response:
        return await self.send("/login", page="/login", key=key)


@asynccontextmanager
async def visitor(api: Api, key: str | None = None) -> AsyncIterator[Visitor]:
    made = Visitor(api)
    try:
        if key is not None:
            assert (await made.sign_in(key)).status_code == 200
        yield made
    finally:
        await made.http.aclose()


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Api]:
    async with serving(tmp_path) as api:
        for name in ("mine", "theirs"):
            made = await api.ask("POST", "keys", {"name": name}, key=ADMIN)
            setattr(Keys, name, made.json()["secret"])
        yield api


class Keys:
    mine = theirs = ""


PAGES = ("", "/conversations", f"/conversations/{NAME}", "/usage", "/policies", "/policies/balanced", "/search")
FOR_OPERATORS = ("/keys", "/system")


@pytest.mark.requirement("P7", "S.2")
async def test_who_has_no_key_sees_the_form_and_who_has_one_only_its_own(keyed: Api) -> None:
    await compacted(keyed, key=Keys.mine)
    async with visitor(keyed) as nobody:
        for path in (*PAGES, *FOR_OPERATORS, f"/conversations/{NAME}/requests/x"):
            page = await nobody.get(path)
            assert "Sign in" in page.text
            assert NAME not in re.sub(r'name="next" value="[^"]*"', "", page.text)
        for wrong in ("sk-nobody", "weir-sk-nobody", ADMIN + "x", ""):
            refused = await nobody.send("/login", page="/login", key=wrong)
            assert refused.status_code == 401
            assert "API key" in refused.text
    async with visitor(keyed, Keys.mine) as mine, visitor(keyed, Keys.theirs) as theirs:
        request = (await keyed.of("timeline", key=Keys.mine))["data"][-1]["id"]
        own = f"/conversations/{NAME}"
        ref = (await keyed.of("removed", key=Keys.mine))["data"][0]["ref"]
        for path in (own, f"{own}/requests/{request}", f"{own}/checkpoints/1", f"/originals/{ref}"):
            assert (await mine.get(path)).status_code == 200, path
            foreign = await theirs.get(path)
            assert foreign.status_code == 404, path
            assert "There is no" in foreign.text
        assert NAME in (await mine.get("/conversations")).text
        for path in ("", "/conversations", "/usage?by=conversation", "/search?q=module"):
            assert f">{NAME}<" not in (await theirs.get(path)).text
        for path in ("rollback", "pin", "close", "compact", "notes"):
            answer = await theirs.send(f"{own}/{path}", version="0", ref=ref, text="x")
            assert answer.status_code == 404, path
        for path in FOR_OPERATORS:
            assert (await mine.get(path)).status_code == 403
        created = await mine.send("/keys", name="stolen")
        assert created.status_code == 403


@pytest.mark.requirement("P7", "S.2")
async def test_the_operator_sees_every_conversation_and_nothing_that_was_said(api: Api) -> None:
    talk = await compacted(api)
    said = talk.messages[1]["content"][:40]
    request = (await api.of("timeline"))["data"][-1]["id"]
    ref = (await api.of("removed"))["data"][0]["ref"]
    own = f"/conversations/{NAME}"
    async with visitor(api, ADMIN) as operator, visitor(api, "sk-test") as caller:
        assert said in (await caller.get(f"{own}/requests/{request}")).text
        for path in ("", "/conversations", *(f"{own}?tab={tab}" for tab in ("requests", "removed", "audit", "health"))):
            page = await operator.get(path)
            assert page.status_code == 200
            assert said not in page.text
        page = await operator.get(f"{own}/requests/{request}")
        assert "own key only" in page.text
        assert said not in page.text
        assert "src/module_" not in page.text
        assert (await operator.get(f"/originals/{ref}")).status_code == 403
        for path in (*PAGES[:-1], *FOR_OPERATORS):
            assert (await operator.get(path)).status_code == 200, path


@pytest.mark.requirement("S.10")
async def test_pages_say_what_a_browser_may_do_with_them(api: Api) -> None:
    await api.talk().agent(1)
    async with visitor(api, "sk-test") as caller:
        for path in PAGES:
            page = await caller.get(path)
            policy = page.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert "default-src 'none'" in policy
            assert page.headers["x-frame-options"] == "DENY"
            assert page.headers["cache-control"] == "no-store"
            assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:", page.text), path
            assert not re.search(r'(?:src|href|action)="(?:https?:)?//', page.text), path
            forms = re.findall(r'<form[^>]*method="post".*?</form>', page.text, re.DOTALL)
            assert all(TOKEN.search(form) for form in forms)
        cookie = next(c for c in caller.http.cookies.jar if c.name == "weir_session")
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert (cookie.get_nonstandard_attr("SameSite") or "").lower() == "strict"
        assert cookie.path == "/weir/ui"
        assert "sk-test" not in (cookie.value or "")
    async with httpx.AsyncClient() as plain:
        page = await plain.get(f"{api.target.root}/weir/ui/", headers={"accept-encoding": "gzip"})
        size = int(page.headers["content-length"])
        for address in re.findall(r'"(/weir/ui/static/[^"]+)"', page.text):
            asset = await plain.get(api.target.root + address, headers={"accept-encoding": "gzip"})
            assert asset.status_code == 200
            assert "immutable" in asset.headers["cache-control"]
            size += int(asset.headers["content-length"])
        assert 20_000 < size <= 150_000


@pytest.mark.requirement("S.10", "P7")
async def test_a_form_is_sent_by_its_own_page_and_session_or_not_at_all(api: Api) -> None:
    await compacted(api)
    path = f"/conversations/{NAME}/close"
    async with visitor(api, "sk-test") as caller, visitor(api, "sk-other") as other:
        own = TOKEN.search((await caller.get()).text)
        theirs = TOKEN.search((await other.get()).text)
        assert own is not None
        assert theirs is not None
        for token in ("", "0" * 64, theirs[1]):
            assert (await caller.post(path, token=token)).status_code == 403
        for headers in ({"origin": "https://elsewhere.example"}, {"sec-fetch-site": "cross-site"}):
            where = f"{api.target.root}/weir/ui{path}"
            assert (await caller.http.post(where, data={"token": own[1]}, headers=headers)).status_code == 403
        assert (await api.get(f"conversations/{NAME}"))["closed"] is None
        assert (await caller.get(headers={"sec-fetch-site": "cross-site"})).status_code == 403
        followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await caller.get(headers=followed)).status_code == 200
        assert (await caller.post(path, token=own[1])).status_code == 200
        assert (await api.get(f"conversations/{NAME}"))["closed"] is not None
    async with visitor(api) as stranger:
        first = await stranger.get(headers=followed)
        assert first.headers["refresh"] == "0", "a browser comes again with its cookie"
        assert (await stranger.get(headers={"host": "evil.example"})).status_code == 403


async def test_what_comes_before_a_key_is_known_is_small_and_of_one_kind(keyed: Api) -> None:
    async with visitor(keyed) as stranger, visitor(keyed, Keys.mine) as caller:
        nested = b"--b0\r\ncontent-type: multipart/mixed; boundary=b1\r\n\r\n--b1\r\n\r\n"
        where = f"{keyed.target.root}/weir/ui"
        kind = {"content-type": "multipart/form-data; boundary=b0"}
        for each in (stranger, caller):
            assert (await each.http.post(f"{where}/login", content=nested, headers=kind)).status_code == 415
        assert (await stranger.post("/login", key="k" * 4_096)).status_code == 413
        assert (await stranger.post("/policies/mine", text="x" * 5_000)).url.path.endswith("/login")
        assert (await caller.post("/policies/mine", text="x" * 300_000)).status_code == 413
        assert (await stranger.send("/login", page="/login", key="wrong")).status_code == 401
        deep = base64.urlsafe_b64encode(b"[" * 760).decode()
        assert (await stranger.get("/login", headers={"cookie": f"weir_session={deep}.00"})).status_code == 200


@pytest.mark.requirement("P7")
async def test_a_session_ends_by_signing_out_with_its_key_or_with_another_admin_token(keyed: Api) -> None:
    runtime = keyed.target.runtime
    async with visitor(keyed, Keys.mine) as caller, visitor(keyed, ADMIN) as operator:
        assert "Sign out" in (await caller.get()).text
        kept = {"weir_session": caller.http.cookies["weir_session"]}
        assert "You have signed out" in (await caller.send("/logout")).text
        assert "Sign in" in (await caller.get("/conversations")).text
        async with httpx.AsyncClient(cookies=kept) as thief:
            assert "login" in (await thief.get(f"{keyed.target.root}/weir/ui")).headers["location"]
        await caller.sign_in(Keys.mine)
        assert "Sign out" in (await caller.get()).text
        for elsewhere in ("https://evil.example", "//evil.example", "/weir/ui/\r\nx: y", "/weir/uiX"):
            signed = await caller.send("/login", page="/login", key=Keys.mine, next=elsewhere)
            assert signed.url.path == "/weir/ui"
        cookie = caller.http.cookies["weir_session"]
        for forged in (cookie[:-2] + "00", cookie.partition(".")[0] + ".", "x.y", "." + cookie, cookie * 20):
            async with httpx.AsyncClient(cookies={"weir_session": forged}) as other:
                assert "login" in (await other.get(f"{keyed.target.root}/weir/ui")).headers["location"]
        await operator.send("/keys/mine/revoke")
        assert "Sign in" in (await caller.get()).text
        assert "Weir" in (await operator.get("/system")).text
        renewed = keyed.folder / "weir.yaml"
        renewed.write_text(renewed.read_text().replace(ADMIN, "another-admin-token"))
        from proxy.config.loading import load_config

        runtime.adopt(load_config(renewed, env={}))
        assert "Sign in" in (await operator.get("/system")).text


@pytest.mark.requirement("P7")
async def test_a_rotated_key_opens_its_conversations_and_ends_what_the_old_one_opened(keyed: Api) -> None:
    await compacted(keyed, key=Keys.mine)
    async with visitor(keyed, Keys.mine) as before, visitor(keyed) as after:
        assert NAME in (await before.get("/conversations")).text
        made = await keyed.ask("POST", "keys/mine/rotate", key=ADMIN)
        assert "Sign in" in (await before.get("/conversations")).text
        assert (await before.sign_in(Keys.mine)).status_code == 401
        assert (await after.sign_in(made.json()["secret"])).status_code == 200
        assert NAME in (await after.get("/conversations")).text


@SHARED
@pytest.mark.requirement("P8")
async def test_any_replica_knows_a_session_and_draws_any_request(api: Api) -> None:
    await compacted(api)
    async with visitor(api, "sk-test") as caller:
        for row in (await api.of("timeline"))["data"]:
            for _ in api.turns.targets:
                page = await caller.get(f"/conversations/{NAME}/requests/{row['id']}")
                assert page.status_code == 200
                assert "What the model saw" in page.text
                assert "Sign out" in page.text


@pytest.mark.requirement("S.10")
async def test_what_people_and_models_say_is_shown_as_text(api: Api) -> None:
    talk = api.talk()
    talk.messages.append({"role": "user", "content": f"{HOSTILE} & <b>bold</b> \u202eright\u202c"})
    await talk.chat(1)
    async with visitor(api, "sk-test") as caller:
        await caller.send(f"/conversations/{NAME}/notes", text=HOSTILE)
        await api.turns.settled()
        request = (await api.of("timeline"))["data"][-1]["id"]
        for path in (f"/conversations/{NAME}/requests/{request}", f"/conversations/{NAME}?tab=notes"):
            page = (await caller.get(path)).text
            assert HOSTILE not in page
            assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
        for path in (
            f"/conversations?name={HOSTILE}",
            f"/search?q={HOSTILE}",
            f"/?done={HOSTILE}",
            f"/originals/{HOSTILE}",
        ):
            assert HOSTILE not in (await caller.get(path)).text


@ALONE
@pytest.mark.requirement("A0.148")
async def test_both_sides_are_what_came_and_what_went(api: Api) -> None:
    """Line by line against what the simulator was sent, also once its summary was taken back; that stands once."""
    talk = await compacted(api)
    rows = (await api.of("timeline"))["data"]
    before = await _compared(api, talk, rows)
    assert before >= {"same", "removed", "added"}
    store = api.target.runtime.store
    told = await store.export(next(each for each in await store.conversations(None)))
    assert told["cuts"]
    assert not {ref_of(each["text"]) for each in told["cuts"]} & {each["ref"] for each in told["inspected_parts"]}
    undone = await api.ask("POST", f"conversations/{NAME}/rollback/0")
    assert undone.status_code == 200, undone.text
    assert await _compared(api, talk, rows) == before


async def _compared(api: Api, talk: Talk, rows: list[dict[str, Any]]) -> set[str]:
    kinds = set()
    for row, array in zip(rows[::-1], api.sent()[::-1], strict=False):
        both = await api.of(f"requests/{row['id']}")
        assert both["kept"]
        seen = [each["text"] for each in both["model"]]
        went = [_said(message) for message in array]
        assert seen == went
        came = [_said(message) for message in talk.messages[: len(both["client"])]]
        assert [each["text"] for each in both["client"]] == came
        kinds |= {each["status"] for each in (*both["client"], *both["model"])}
        places = [[each["place"] for each in both[side]] for side in ("client", "model")]
        assert all(side == sorted(set(side)) for side in places)
        for each in both["client"]:
            if each["link"] is not None:
                original = await api.ask("GET", each["link"].removeprefix("/weir/") + ".txt")
                assert original.status_code == 200
    return kinds


def _said(message: dict[str, Any]) -> str:
    text = [message["content"]] if message.get("content") else []
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "\n".join([*text, *(f"→ {call['name']}({call['arguments']})" for call in calls)])


@pytest.mark.requirement("A0.148", "P9")
async def test_only_the_newest_requests_are_kept_and_nothing_that_only_older_ones_needed(tmp_path: Path) -> None:
    async with serving(tmp_path, rules={"preset": "balanced", "inspect": {"requests": KEPT}}) as api:
        talk = await compacted(api)
        await talk.chat(12)
        talk.messages[1:] = [{"role": "user", "content": "Something else. " + prose(50, seed=77)}]
        await talk.chat(KEPT)
        await api.turns.settled()
        store = api.target.runtime.store
        names = [row["name"] for row in await api_conversations(api)]
        for name in names:
            rows = (await api.get(f"conversations/{name}/timeline"))["data"]
            kept = [(await api.get(f"conversations/{name}/requests/{row['id']}"))["kept"] for row in rows]
            assert kept == [False] * (len(rows) - KEPT) + [True] * min(KEPT, len(rows))
        found = [await store.conversation(None, name) for name in names]
        exported = [await store.export(each) for each in found if each is not None]
        archived = {original["ref"] for each in exported for original in each["originals"]}
        for each in exported:
            refs = {part["ref"] for part in each["inspected_parts"]}
            assert refs
            assert not refs & archived, "the archive has them"
            needed = json.dumps(each["inspected"])
            assert all(ref in needed for ref in refs)
        for name in names:
            await api.ask("DELETE", f"conversations/{name}")
        assert await rows_in(api, "inspected") == await rows_in(api, "inspected_parts") == 0


async def api_conversations(api: Api) -> list[dict[str, Any]]:
    return list((await api.get("conversations"))["data"])


async def rows_in(api: Api, table: str) -> int:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(api.folder / "w.db")) as file:
        return int(file.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@pytest.mark.requirement("P9")
@pytest.mark.parametrize(
    ("rules", "content", "kept"),
    [
        ({"inspect": {"requests": 0}}, "full", False),
        ({}, "digest", False),
    ],
)
async def test_what_nobody_wants_kept_is_not_kept(
    tmp_path: Path, rules: dict[str, Any], content: str, *, kept: bool
) -> None:
    async with serving(tmp_path, rules={"preset": "balanced", **rules}) as first:
        yaml = (tmp_path / "weir.yaml").read_text() + f"store: {{content: {content}}}\n"
        async with weir("", tmp_path / "other.db", yaml=yaml, folder=tmp_path, window=None) as running:
            talk = Talk(running.client(default_headers={"x-weir-conversation": NAME}))
            await talk.chat(2)
            await running.stored()
            async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
                at = f"{running.root}/weir/conversations/{NAME}"
                request = (await http.get(f"{at}/timeline")).json()["data"][-1]["id"]
                both = (await http.get(f"{at}/requests/{request}")).json()
                assert both["kept"] is kept
                assert all(row["text"] is None for row in both["client"])
        assert prose(20, seed=1)[:30].encode() not in (tmp_path / "other.db").read_bytes()
        del first


@pytest.mark.requirement("P9")
async def test_what_requests_said_while_too_much_waited_is_kept_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as api:
        talk = Talk(api.turns.client(default_headers={"x-weir-conversation": NAME}))
        monkeypatch.setattr(write_queue, "MAX_HELD", 0)
        await talk.chat(6)
        await api.turns.settled()
        monkeypatch.undo()
        await talk.chat(1)
        await api.turns.settled()
        rows = (await api.get(f"conversations/{NAME}/timeline"))["data"]
        kept = [await api.get(f"conversations/{NAME}/requests/{row['id']}") for row in rows]
        assert [each["kept"] for each in kept] == [False] * 6 + [True]
        said = [row["text"] for row in kept[-1]["client"]]
        assert said == [_said(message) for message in talk.messages[: len(said)]]


async def test_keys_of_the_file_are_shown_and_counted_where_the_database_has_none(tmp_path: Path) -> None:
    names = ("alpha", "beta", "gamma")
    keys = json.dumps([{"name": name, "secret": f"sk-of-{name}"} for name in names])
    async with serving(tmp_path, more=f"keys: {keys}\n") as api, visitor(api, ADMIN) as operator:
        page = (await operator.get("/keys")).text
        store = f"sqlite+aiosqlite:///{tmp_path / 'w.db'}"
        asked = ["keys", "list", "--config", str(tmp_path / "weir.yaml"), "--store", store]
        listed = (await asyncio.to_thread(CliRunner().invoke, main, asked)).output
    assert all(f'class="name">{name}</a> <span class="badge">of the file' in page for name in names)
    assert "No keys" not in page
    assert f"No keys in {store}; 3 in the configuration" in listed


async def test_a_key_made_on_the_page_is_shown_once_and_works_with_the_real_sdk(api: Api) -> None:
    async with visitor(api, ADMIN) as operator:
        page = await operator.send("/keys", page="/keys", name="made here", policy="balanced", models="sim*")
        assert page.status_code == 201
        secret = re.search(r"weir-sk-[\w-]+", page.text)
        assert secret is not None
        assert secret[0] not in (await operator.get("/keys")).text
        made = Talk(api.target.client(secret[0]))
        await made.chat(1)
        with pytest.raises(openai.PermissionDeniedError):
            await Talk(api.target.client(secret[0]), model="gpt-x").chat(1)
        assert (await operator.send("/keys", page="/keys", name="made here")).status_code == 400
        await operator.send("/keys/made%20here/rotate", page="/keys")
        with pytest.raises(openai.AuthenticationError):
            await made.chat(1)


@pytest.mark.requirement("P7")
async def test_limits_of_a_key_are_set_on_the_page_as_over_http(api: Api) -> None:
    async with visitor(api, ADMIN) as operator:
        page = await operator.send("/keys", page="/keys", name="slow", requests_per_minute="1", expires="2124-02-29")
        secret = re.search(r"weir-sk-[\w-]+", page.text)
        assert secret is not None
        slow = Talk(api.target.client(secret[0]))
        await slow.chat(1)
        with pytest.raises(openai.RateLimitError):
            await slow.chat(1)
        assert "1 a minute" in page.text
        assert "2124-02-29 00:00:00 UTC" in page.text
        refused = await operator.send("/keys/slow/limits", page="/keys", concurrency="many")
        assert refused.status_code == 400
        assert "concurrency should be a whole number from 1 on, or none." in refused.text
        changed = await operator.send("/keys/slow/limits", page="/keys", concurrency="1000", expires="")
        assert "1,000 concurrent" in changed.text, "an empty field lifts a limit"
        row = (await api.ask("GET", "keys", key=ADMIN)).json()["data"][0]
        assert (row["concurrency"], row["requests_per_minute"], row["expires"]) == (1000, None, None)
        await api.ask("POST", "keys/slow/limits", {"expires": time.time() + 0.2}, key=ADMIN)
        await asyncio.sleep(0.3)
        with pytest.raises(openai.AuthenticationError, match="expired"):
            await slow.chat(1)
        assert "expired" in (await operator.get("/keys")).text


@SHARED
@pytest.mark.requirement("P9")
async def test_the_store_is_shown_growing_hour_by_hour(api: Api) -> None:
    await compacted(api)
    store = api.target.runtime.store
    async with visitor(api, ADMIN) as operator:
        assert "known after a day" in (await operator.get("/system")).text
        while not await store.sizes():  # Weir keeps it by itself, soon after it began and then each hour
            await asyncio.sleep(0.05)
        now, ((_, size),) = time.time(), await store.sizes()
        for hours in (40 * 24, 8 * 24, 30, 3):
            await store.keep_size(now - 3600.0 * hours)
        kept = await store.sizes()
        assert [(now - at) // 3600 for at, _ in kept] == [8 * 24, 30, 3, 0], "a month is kept"
        assert min(bytes_ for _, bytes_ in kept) >= min(size, 10_000)
        page = (await operator.get("/system")).text
        assert re.search(r"<p>[+-][\d.]+ [kMG]?B in 24h, [+-][\d.]+ [kMG]?B in 7d</p>", page)
        assert "Bytes of the store" in page


@pytest.mark.requirement("P9")
async def test_the_stores_growth_is_in_the_metrics_and_over_time(tmp_path: Path, deployment: Deployment) -> None:
    now = time.time()
    async with serving(tmp_path, deployment=deployment) as api:
        store = api.target.runtime.store
        while not (kept := await store.sizes()):
            await asyncio.sleep(0.05)
        size = kept[-1][1]
        await store.keep_size(now - 8 * DAY)
        await store.keep_size(now - 30 * HOUR)
        then = await store.sizes()
        asked = {"metric": "store_bytes", "step": "1d", "since": "10d"}
        given = (await api.ask("GET", f"series?{urlencode(asked)}", key=ADMIN)).json()
        by_day = {round((now - point["at"]) // DAY): point["value"] for point in given["data"]}
        assert given["unit"] == "bytes"
        assert [value for value in by_day.values() if value] == [bytes_ for _, bytes_ in then]
        assert by_day[4] is None, "a day without a measurement has none"
        refused = await api.ask("GET", f"series?{urlencode(asked)}")
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        runtime = api.target.runtime
        runtime.sizes = then
        page = runtime.telemetry.metrics.render()[0].decode()
    grown = dict(re.findall(r'^weir_store_growth_bytes{weir_period="(\w+)"} (\S+)$', page, re.MULTILINE))
    assert {period: float(value) for period, value in grown.items()} == {
        "24h": then[-1][1] - then[1][1],
        "7d": then[-1][1] - then[0][1],
    }, "what it was a month ago is not known"
    assert f"weir_store_size_bytes {size}" in page


async def test_a_policy_is_set_on_the_page_or_refused_beside_its_lines(api: Api) -> None:
    async with visitor(api, ADMIN) as operator:
        wrong = await operator.send("/policies/mine", text="preset: balanced\nheadrom: 0.1\n")
        assert wrong.status_code == 400
        assert re.search(r'<li class="bad">headrom: 0.1<span class="said">[^<]*headroom', wrong.text)
        assert "mine" not in api.target.runtime.config.policies
        right = await operator.send("/policies/mine", text="preset: balanced\r\nheadroom: 0.1\r\n")
        assert right.status_code == 200
        assert api.target.runtime.config.policy("mine").headroom == 0.1
        assert "headroom" in (await operator.get("/policies/mine")).text
        await operator.send("/policies/mine/delete")
        assert "mine" not in api.target.runtime.config.policies
    async with visitor(api, "sk-test") as caller:
        assert (await caller.send("/policies/mine", text="preset: balanced")).status_code == 403


async def test_usage_as_a_table_for_other_programs(api: Api) -> None:
    await compacted(api)
    async with visitor(api, "sk-test") as caller:
        told = (await caller.get("/usage.csv?by=conversation")).text.splitlines()
        assert told[0].startswith("tenant,key,group,requests")
        assert NAME in told[1]


async def test_live_requests_are_told_as_they_are_stored(api: Api) -> None:
    async with (
        visitor(api, "sk-test") as caller,
        caller.http.stream("GET", f"{api.target.root}/weir/ui/live") as told,
    ):
        await api.talk().agent(1)
        await api.talk("sk-other").agent(1)
        async for line in told.aiter_lines():
            if line.startswith("data: "):
                row = json.loads(line.removeprefix("data: "))
                assert row["name"] == NAME
                break


async def test_it_can_be_turned_off_and_is_not_loaded_before_a_page_is_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        yaml = (tmp_path / "weir.yaml").read_text() + "dashboard: false\n"
        async with (
            weir("", yaml=yaml, folder=tmp_path, window=None) as running,
            httpx.AsyncClient() as http,
        ):
            for path in ("", "/", "/login", "/static/weir.css"):
                assert (await http.get(f"{running.root}/weir/ui{path}")).status_code == 404
        assert (await api.ask("GET", "conversations")).status_code == 200
    code = "import sys, proxy.app; sys.exit('jinja2' in sys.modules or 'proxy.dashboard.site' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@ALONE
@pytest.mark.requirement("P12", "A0.148")
async def test_the_overview_says_which_requests_it_counts_and_forwarded_of_none_that_weir_answered_itself(
    api: Api,
) -> None:
    huge = {"type": "function", "function": {"name": "f", "description": prose(30_000, seed=1)}}
    async with visitor(api, "sk-test") as caller, httpx.AsyncClient(base_url=api.turns.root()) as http:
        for path, body in (
            ("embeddings", {"model": "sim", "input": "x"}),
            ("chat/completions", {"model": "sim", "messages": [{"role": "user", "content": "x"}]}),
            ("chat/completions", {"model": "sim", "messages": [{"role": "user", "content": "y"}], "tools": [huge]}),
        ):
            await http.post(f"/v1/{path}", json=body, headers={"authorization": "Bearer sk-test"})
        await api.turns.settled()
        overview = (await caller.get("/")).text
        refused = next(row for row in overview.split("<tr>") if "context length exceeded" in row)
        link = re.search(r'href="/weir/ui(/conversations/[^"]*/requests/[^"]*)"', refused)
        assert link is not None
        page = (await caller.get(link[1])).text
    figures = {name: value.strip() for name, value in re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)", overview)}
    assert (figures["Managed requests"], figures["Refused"]) == ("2", "1")
    assert "Requests" not in figures
    assert refused.count("&ndash;") == 1
    assert re.search(r"<dt>Forwarded</dt><dd><span[^>]*>&ndash;", page)


@ALONE
@pytest.mark.requirement("P12", "P14", "A0.148")
async def test_the_list_of_conversations_counts_as_forwarded_what_usage_does(api: Api) -> None:
    """Of an observed request what went up, of a refused one nothing."""
    said = [{"role": role, "content": prose(100, seed=n)} for n in range(12) for role in ("user", "assistant")]
    huge = {"role": "system", "content": prose(30_000, seed=1)}
    sent = {"watched": (said[:-1], "observe"), "refused": ([huge, said[0]], "enforce")}
    async with visitor(api, "sk-test") as caller, httpx.AsyncClient(base_url=api.turns.root()) as http:
        for name, (messages, mode) in sent.items():
            headers = {"authorization": "Bearer sk-test", "x-weir-conversation": name, "x-weir-mode": mode}
            body = {"model": "sim", "messages": messages, "max_tokens": 64}
            await http.post("/v1/chat/completions", json=body, headers=headers)
        await api.turns.settled()
        listed = (await caller.get("/conversations")).text
        own = (await caller.get("/conversations/watched")).text
        usage = (await http.get("/weir/usage?by=conversation", headers=headers)).json()["data"]
    (watched,) = (row for row in usage if row["group"] == "watched")
    assert watched["tokens_after"] == watched["tokens_before"] > 2_000
    rows = {name: re.findall(r"<td[^>]*>([^<]*)", row) for row in listed.split("<tr>") for name in sent if name in row}
    assert [rows["watched"][6:9], rows["refused"][6:8]] == [[f"{watched['tokens_after']:,}"] * 2 + ["0%"], ["0", "0"]]
    would = [int(said.replace(",", "")) for said in re.findall("would: ([0-9,]+)", own)]
    assert len(would) == 1
    assert would[0] < watched["tokens_after"]


@pytest.mark.requirement("P7")
async def test_the_page_of_a_conversation_says_what_is_so_and_goes_on_by_itself(api: Api) -> None:
    await compacted(api)
    out = len((await api.of("removed", limit="500"))["data"])
    row = (await api.of("timeline"))["data"][-1]
    assert out > 1
    async with visitor(api, "sk-test") as caller:
        page = (await caller.get(f"/conversations/{NAME}")).text
        assert re.search(rf"Removed</dt>\s*<dd>\s*{out}\b", page), page[:4_000]
        assert 'sse-connect="/weir/ui/live"' in page
        assert '<div id="live">' in page
        said = (await caller.get(f"/conversations/{NAME}?done=Send+your+key+to+the+support")).text
        assert "Send your key" not in said
        assert "Noted." in (await caller.get(f"/conversations/{NAME}?done=note")).text
        request = (await caller.get(f"/conversations/{NAME}/requests/{row['id']}")).text
        assert "there is nothing to do yet" not in request
        assert "or it was dropped" not in request


@pytest.mark.requirement("P7", "A0.148")
async def test_a_request_is_explained_in_sentences_and_shared_by_a_link_that_opens_it_alone(keyed: Api) -> None:
    await compacted(keyed, key=Keys.mine)
    rows = (await keyed.of("timeline", key=Keys.mine))["data"]
    row = next(each for each in reversed(rows) if each["strategy"])
    page = f"/conversations/{NAME}/requests/{row['id']}"
    async with visitor(keyed, Keys.mine) as caller:
        text = (await caller.get(page)).text
        lead = re.sub(r"<[^>]*>|\s+", " ", text.partition('<p class="lead">')[2].partition("</p>")[0])
        assert re.search(r"The window was \d+% full\.", lead), lead
        assert re.search(r"\d+ earlier messages of [\d,]+ tokens became an extract of [\d,]+ tokens\.", lead), lead
        assert "Nothing is lost: the originals are stored." in lead
        untouched = (await caller.get(f"/conversations/{NAME}/requests/{rows[0]['id']}")).text
        assert "The request was sent as the client wrote it." in untouched
        made = await caller.send(page, page=page)
        found = re.search(r"https?://[^<\s]+/weir/ui(/shared/[^<\s]+)", made.text)
        assert found, made.text[:2_000]
        overview = (await caller.get()).text
        assert re.search(r"Since 20\d\d-\d\d-\d\d, Weir has saved", overview)
    link = found[1]
    async with visitor(keyed) as stranger:
        assert (await stranger.get(page)).url.path.endswith("/login")
        shown = await stranger.get(link)
        assert shown.status_code == 200
        assert "became an extract of" in shown.text
        assert "/originals/" not in shown.text
        assert "Share</button>" not in shown.text
        for forged in (link[:-1], link.replace("/shared/", "/shared/x"), "/shared/x.y"):
            assert (await stranger.get(forged)).status_code == 404
        assert (await stranger.get(f"/conversations/{NAME}")).url.path.endswith("/login")
    async with visitor(keyed, ADMIN) as operator:
        assert (await operator.send(page, page=page)).status_code == 403
        assert "became an extract of" in (await operator.get(link)).text
        kept = (await keyed.ask("GET", "keys", key=ADMIN)).json()["data"]
        key = next(each for each in kept if each["name"] == "mine")
        assert (await keyed.ask("DELETE", f"keys/{key['name']}", key=ADMIN)).status_code == 200
        assert (await operator.get(link)).status_code == 404, "with the key the link ends"


@ALONE
@pytest.mark.requirement("P7")
async def test_search_finds_what_was_removed_and_what_is_still_in_the_window(api: Api) -> None:
    talk = await compacted(api)
    newest = next(message for message in reversed(talk.messages) if message["role"] == "user")
    words = " ".join(newest["content"].split()[:6])
    found = (await api.ask("GET", f"search?{urlencode({'q': words})}")).json()
    assert [each["conversation"] for each in found["in_window"]][:1] == [NAME]
    assert any(words in each["text"] for each in found["in_window"])
    async with visitor(api, "sk-test") as caller:
        page = (await caller.get(f"/search?{urlencode({'q': words})}")).text
        assert "Still in the window" in page
        assert words in page
        nothing = (await caller.get("/search?q=zzzxqv")).text
        assert "Nothing was found" in nothing


@pytest.mark.requirement("P7")
async def test_a_key_gets_another_policy_and_keeps_its_secret(keyed: Api) -> None:
    async def policy_after(body: object = None) -> str:
        if body is not None:
            changed = await keyed.ask("POST", "keys/mine/policy", body, key=ADMIN)
            assert (changed.status_code, changed.json()) == (200, {"name": "mine", **body})  # type: ignore[dict-item]
        await keyed.talk(Keys.mine).agent(1)
        await keyed.turns.settled()
        return str((await keyed.of("timeline", key=Keys.mine))["data"][-1]["policy"])

    assert await policy_after() == "balanced"
    assert await policy_after({"policy": "advised"}) == "advised"
    assert await policy_after({"policy": None}) == "balanced"
    wrong = await keyed.ask("POST", "keys/mine/policy", {"policy": "blanced"}, key=ADMIN)
    assert (wrong.status_code, "balanced" in wrong.text) == (400, True)
    assert (await keyed.ask("POST", "keys/mine/policy", {"policy": "off"}, key=Keys.mine)).status_code == 403
    store = f"sqlite+aiosqlite:///{keyed.folder / 'w.db'}"
    done = await asyncio.to_thread(
        CliRunner().invoke, main, ["keys", "set", "mine", "--policy", "off", "--store", store, "--json"]
    )
    assert json.loads(done.stdout)["policy"] == "off"


TEAMS = """
teams:
  research: {budgets: [{period: month, tokens: 1000000, dollars: 50}]}
  other: {budgets: [{period: day, tokens: 5, hard: false}]}
"""


async def test_the_page_of_keys_draws_each_budget_and_makes_keys_with_them(tmp_path: Path) -> None:
    async with serving(tmp_path, more=TEAMS) as api, visitor(api, ADMIN) as operator:
        fields = {"name": "made", "team": "research", "budgets": "day,tokens=1,soft week,dollars=2,soft"}
        page = await operator.send("/keys", page="/keys", **fields)
        assert page.status_code == 201
        secret = re.search(r'class="secret"[^>]*>([^<]+)<', page.text)
        assert secret is not None
        made = secret[1]
        wrong = await operator.send("/keys", page="/keys", name="n", budgets="day,tokens=none")
        assert wrong.status_code == 400
        assert "a budget is written day,tokens=1000000" in wrong.text
        await compacted(api, key=made)
        await api.turns.settled()
        rows = re.findall(
            r"<tr><td>(team|key) (\w+)</td><td>.*?aria-label=\"(\d+)% used\"", (await operator.get("/keys")).text
        )
        assert [row[:2] for row in rows] == [
            *[("team", "research")] * 2,
            ("team", "other"),
            *[("key", "made")] * 2,
        ]
        assert int(rows[3][2]) > 100
        usage = (await operator.get("/usage?by=team")).text
        assert "research" in usage
    (tmp_path / "own").mkdir()
    async with serving(tmp_path / "own", more=TEAMS) as api:
        one = (await api.ask("POST", "keys", {"name": "one", "team": "research"}, key=ADMIN)).json()["secret"]
        two = (await api.ask("POST", "keys", {"name": "two", "team": "other"}, key=ADMIN)).json()["secret"]
        await compacted(api, key=two)
        async with visitor(api, one) as caller:
            assert "other" not in re.sub("<nav.*?</nav>", "", (await caller.get("/usage?by=team")).text)
