"""The pages at /weir/ui over HTTP: who sees what, what a form may do, and what is kept of a request."""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import openai
import pytest

from proxy.dashboard.requests import sentences_on
from proxy.store.inspections import ref_of
from tests.functional.api import ADMIN, NAME, Api, compacted, serving
from tests.functional.harness import ALONE, COUNTER, Deployment, Talk, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

TOKEN = re.compile(r'name="token" value="([0-9a-f]+)"')
HOSTILE = "<script>alert(1)</script>"
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


SENT: Mapping[str, tuple[Mapping[str, object], str]] = {
    "untouched": ({}, "The request was sent as the client wrote it."),
    "edits whose arrays are not kept": (
        {"actions": "compact=1", "tokens_after": 50},
        "What was taken out before stayed out; nothing new was removed.",
    ),
    "another model": (
        {"actions": "fallback=1", "model": "large"},
        "It did not fit the model that it was for, so it was sent to large.",
    ),
    "something else": ({"actions": "clamp=1"}, "Nothing new was removed; what was done to it: clamp=1."),
    "a budget": ({"outcome": "insufficient_quota"}, "A budget is used up, so the request was refused and not sent."),
    "a rate": (
        {"outcome": "rate_limit_exceeded"},
        "A rate or what is in flight left no room, so the request was refused and not sent.",
    ),
}


@pytest.mark.parametrize("case", SENT)
def test_no_sentence_says_of_a_request_what_was_not_done_to_it(case: str) -> None:
    changed, said = SENT[case]
    exchange = {"limit": 100, "tokens_before": 80, "tokens_after": 80, "actions": "none", "outcome": "ok", "model": "m"}
    whole = {**exchange, "observed": False, "layers": [], "detail": {}, **changed}
    sentences = list(sentences_on({"exchange": whole, "client": [], "model": [], "kept": False, "pruned": []}))
    assert sentences[1:] == [said]


async def test_a_layer_counts_as_the_upstream_does(tmp_path: Path) -> None:
    """The policy's estimator counts nearly twice as many tokens as the upstream."""
    policy = "default_policy: p\npolicies: {p: {preset: turn-atomic, window: 4096}}\n"
    async with (
        serve_simulator(SimulatorSettings(window=64_000), counter=COUNTER) as simulator,
        weir(
            "",
            tmp_path / "w.db",
            yaml=f'upstreams: {{main: {{base_url: "{simulator.base_url}", api_key: pass}}}}\n{policy}',
            folder=tmp_path,
            window=None,
        ) as target,
        httpx.AsyncClient(base_url=target.root) as http,
    ):
        messages: list[dict[str, str]] = []
        for turn in range(9):
            messages.append(
                {"role": "user", "content": f"{turn} " + "The ferry leaves at nine from the harbour. " * 70}
            )
            body = {"model": "sim", "messages": messages, "max_tokens": 50}
            answer = await http.post("/v1/chat/completions", json=body, headers={"x-weir-conversation": "counted"})
            assert answer.status_code == 200, answer.text
            messages.append({"role": "assistant", "content": "ok"})
        await target.stored()
        rows = (await http.get("/weir/conversations/counted/timeline")).json()["data"]
    acted = [row for row in rows if row["layers"]]
    assert acted
    for row in acted:
        assert row["layers"][0]["tokens_before"] <= row["tokens_before"]
        assert row["layers"][-1]["tokens_after"] <= row["limit"]


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
