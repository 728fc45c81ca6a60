"""The management API: what it tells of a conversation, to whom, and what it does to one."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from policies.memory.checkpoint import Checkpoint
from proxy.app import ROUTES
from tests.functional.api import ADMIN, BODIES, NAME, Api, compacted, filled, serving
from tests.functional.harness import ALONE, EARLY, NOTHING_RECALLED, SHARED, TOOLS, Deployment, Talk


@pytest.fixture
async def api(tmp_path: Path, deployment: Deployment) -> AsyncIterator[Api]:
    """A Weir in front of a window of 4,096 tokens."""
    async with serving(tmp_path, deployment=deployment) as api:
        yield api


@pytest.fixture
async def roomy(tmp_path: Path, deployment: Deployment) -> AsyncIterator[Api]:
    """A Weir in front of a window in which nothing has to go by itself."""
    async with serving(tmp_path, window=32_768, upstream=32_768, deployment=deployment) as api:
        yield api


@pytest.mark.requirement("P7", "S.2")
async def test_another_caller_gets_404_everywhere_and_changes_nothing(api: Api) -> None:
    talk = await compacted(api)
    ref = (await api.of("removed"))["data"][0]["ref"]
    row = (await api.get("conversations"))["data"][0]
    before = await api.get(f"conversations/{NAME}")
    for route in ROUTES:
        if not {"{id}", "{ref}", "search"}.intersection(route.pattern.split("/")):
            continue
        body = BODIES.get(route.pattern.rpartition("/")[2]) if route.method == "POST" else None
        for name in (NAME, row["id"]):
            path = filled(route.pattern, id=name, ref=ref)
            path = "search?q=module&conversation=" + name if path == "search" else path
            error = await api.refused(404, route.method, path, body, key="sk-other")
            assert error["code"] == "invalid_request"
            assert row["id"] not in error["message"] or row["id"] == name
    assert await api.get("conversations", key="sk-other") == {"data": [], "next": None}
    assert (await api.get("health", key="sk-other"))["data"] == []
    assert (await api.get("search", key="sk-other", q="module"))["data"] == []
    after = await api.get(f"conversations/{NAME}")
    assert after == before
    assert (await api.of("notes"))["data"] == []
    await talk.chat(1)
    assert talk.headers[-1]["x-weir-conversation"] == NAME


@pytest.mark.requirement("A0.101", "A0.116")
async def test_the_checkpoint_is_json_and_markdown_of_one_version(api: Api) -> None:
    await compacted(api)
    newest = await api.of("checkpoint")
    page = await api.ask("GET", f"conversations/{NAME}/checkpoint.md")
    listed = (await api.of("checkpoints"))["data"]
    versions = [each["version"] for each in listed]
    assert versions == sorted(versions, reverse=True)
    assert newest["version"] == versions[0]
    one = await api.of(f"checkpoints/{newest['version']}")
    assert one.pop("changed")
    assert one == newest
    assert page.headers["content-type"] == "text/markdown; charset=utf-8"
    assert page.text == Checkpoint.from_json(json.dumps(newest["state"])).to_markdown()
    assert newest["state"]["goal"] in page.text
    for each in listed:
        whole = await api.of(f"checkpoints/{each['version']}")
        assert {name: whole[name] for name in ("at", "reason", "window_id", "covers", "messages")} == {
            name: each[name] for name in ("at", "reason", "window_id", "covers", "messages")
        }
        assert each["size"] == len(json.dumps(whole["state"], ensure_ascii=False).encode())
    made = [await api.of(f"checkpoints/{v}") for v in versions]
    assert any(each["summary"] and each["ref"] and each["covers"] > 0 for each in made)
    assert len((await api.of("checkpoints", limit="1"))["data"]) == 1
    error = await api.refused(404, "GET", f"conversations/{NAME}/checkpoints/999")
    assert ", ".join(map(str, sorted(versions))) in error["message"]
    assert error["weir"]["versions"] == sorted(versions)
    for wrong in ("x", "-1", "1.5", "٣", "9" * 40):
        error = await api.refused(400, "GET", f"conversations/{NAME}/checkpoints/{wrong}")
        assert error["param"] == "version"


@pytest.mark.requirement("S.24", "A0.26", "A4.18")
async def test_the_source_of_a_version_is_what_the_client_sent_byte_for_byte(api: Api) -> None:
    talk = await compacted(api)
    request = {"model": "sim", "max_tokens": 256, "tools": TOOLS}
    for number in range(6):
        talk.add_step()
        raws = [json.dumps(m, indent=number % 3, sort_keys=True) for m in talk.messages[len(talk.messages) - 2 :]]
        known = [json.dumps(m, separators=(",", ":"), ensure_ascii=False) for m in talk.messages[:-2]]
        body = json.dumps(request)[:-1] + ', "messages": [' + ", ".join([*known, *raws]) + "]}"
        answer = await api.http.post(
            f"{api.target.base_url}/chat/completions",
            content=body.encode(),
            headers={"authorization": "Bearer sk-test", "x-weir-conversation": NAME},
        )
        assert answer.status_code == 200, answer.text
    versions = [each for each in (await api.of("checkpoints"))["data"] if each["covers"]]
    assert versions
    for each in versions:
        part = f"conversations/{NAME}/checkpoints/{each['version']}/source"
        pages, cursor = b"", "0"
        while True:
            found = await api.ask("GET", part, params={"cursor": cursor})
            assert found.status_code == 200, found.text
            pages += found.content
            if found.headers["x-weir-end"] == "true":
                break
            cursor = found.headers["x-weir-cursor"]
        assert found.headers["x-weir-size"] == str(len(pages))
        covered = json.loads(pages)
        places = [talk.messages.index(message) for message in covered]
        assert places == sorted(places)
        assert 0 < len(covered) <= each["covers"]
        seen = {
            place: {json.dumps(m, separators=(",", ":"), ensure_ascii=False)} for place, m in enumerate(talk.messages)
        }
        for place, message in enumerate(talk.messages):
            seen[place] |= {json.dumps(message, indent=n, sort_keys=True) for n in range(3)}
        rest = pages.decode()[1:-1]
        for place in places:
            raw = next(raw for raw in sorted(seen[place], key=len, reverse=True) if rest.startswith(raw))
            rest = rest[len(raw) :].removeprefix(",")
        assert rest == ""


@pytest.mark.requirement("A0.26", "A4.18")
async def test_everything_that_was_removed_is_listed_with_its_reason_and_leads_to_its_original(api: Api) -> None:
    talk = await compacted(api)
    rows = (await api.of("removed"))["data"]
    assert rows
    for row in rows:
        assert row["why"] != "the policy took it"
        assert row["since"] > 1e9
        original = await api.ask("GET", row["blob"].removeprefix("/weir/"))
        assert original.json() in talk.messages
        assert original.json()["role"] == row["role"]
    assert (await api.of("removed", limit="2"))["data"] == rows[:2]
    assert (await api.refused(400, "GET", f"conversations/{NAME}/removed?limit=0"))["param"] == "limit"
    audit = (await api.of("audit"))["data"]
    assert {row["ref"] for row in audit} & {row["ref"] for row in rows}


@pytest.mark.requirement("A0.60")
async def test_notes_are_taken_over_http_and_stored_once(api: Api) -> None:
    await api.talk().agent(1)
    path = f"conversations/{NAME}/notes"
    made = await api.ask(
        "POST", path, {"text": "Use port 8401 in tests.", "category": "decisions", "importance": "high"}
    )
    again = await api.ask("POST", path, {"text": "Use port 8401 in tests.", "category": "decisions"})
    other = await api.ask("POST", path, {"text": "ä\ud800 half", "category": "weather"})
    notes = (await api.of("notes"))["data"]
    assert made.status_code == 201
    assert made.json()["source"] == "api"
    assert (again.status_code, again.json()) == (200, made.json())
    assert (other.status_code, other.json()["category"], other.json()["importance"]) == (201, "misc", "normal")
    assert notes == [made.json(), other.json()]
    assert (await api.ask("POST", path, {"text": "x" * 4_000})).status_code == 201
    error = await api.refused(400, "POST", path, {"text": "y", "importance": "urgent"})
    assert error["param"] == "importance"
    assert "critical, high, normal" in error["message"]
    for body, param in (
        ({"text": "x" * 4_001}, "text"),
        ({"text": " "}, "text"),
        ({"text": 5}, "text"),
        ({}, "text"),
        ({"text": "x", "category": 5}, "category"),
        ({"text": "x", "importance": []}, "importance"),
        ({"text": "x", "colour": "red"}, "colour"),
        ([1], "body"),
        (b"5", "body"),
    ):
        error = await api.refused(400, "POST", path, body)
        assert (error["param"], error["code"]) == (param, "invalid_request"), body
    for raw in (b"{", b"\xff", b"[" * 20_000):
        assert (await api.refused(400, "POST", path, raw))["code"] == "invalid_json"
    assert (await api.refused(413, "POST", path, {"text": "x" * 70_000}))["code"] == "request_too_large"
    assert len((await api.of("notes"))["data"]) == 3


@ALONE
@pytest.mark.requirement("A0.136", "A0.101")
async def test_a_conversation_is_compacted_when_somebody_asks_for_it(roomy: Api) -> None:
    talk = roomy.talk()
    talk.grow(24, kind="agent")
    await talk.agent(2)
    assert talk.actions()[-1] == "none"
    asked = await roomy.ask("POST", f"conversations/{NAME}/compact")
    assert (asked.status_code, asked.json()) == (202, {"wanted": "compact"})
    await talk.agent(1)
    assert "compact=1" in talk.actions()[-1]
    shorter = roomy.sent()[-1]
    assert len(shorter) < len(talk.messages) - 2
    await talk.agent(1)
    assert roomy.sent()[-1][: len(shorter)] == shorter, "it is compacted once"
    checkpoint = await roomy.of("checkpoint")
    assert checkpoint["covers"] > 0
    for body in ({"what": "x"}, [1]):
        assert (await roomy.refused(400, "POST", f"conversations/{NAME}/compact", body))["code"] == "invalid_request"
    assert (await roomy.ask("POST", f"conversations/{NAME}/compact", {})).status_code == 202


@pytest.mark.requirement("A0.112")
async def test_a_closed_conversation_is_archived(api: Api) -> None:
    await api.talk().agent(1)
    await api.talk(name="open").agent(1)
    closed = await api.ask("POST", f"conversations/{NAME}/close")
    again = await api.ask("POST", f"conversations/{NAME}/close")
    assert closed.status_code == 200
    assert closed.json() == again.json()
    assert (await api.get(f"conversations/{NAME}"))["closed"] == closed.json()["closed"] > 1e9
    for given, names in (("true", {NAME}), ("false", {"open"})):
        assert {row["name"] for row in (await api.get("conversations", closed=given))["data"]} == names
    assert len((await api.get("conversations"))["data"]) == 2
    assert (await api.refused(400, "GET", "conversations?closed=maybe"))["param"] == "closed"


@SHARED
@pytest.mark.requirement("A0.112")
async def test_a_deleted_conversation_is_gone_for_good(deployment: Deployment, tmp_path: Path) -> None:
    async with serving(tmp_path, deployment=deployment, rules=EARLY | NOTHING_RECALLED) as api:
        talk = await compacted(api)
        ref = (await api.of("removed"))["data"][0]["ref"]
        await api.ask("POST", f"conversations/{NAME}/notes", {"text": "a note"})
        gone = await api.ask("DELETE", f"conversations/{NAME}")
        assert (gone.status_code, gone.json()) == (200, {"deleted": True})
        for path in (f"conversations/{NAME}", f"conversations/{NAME}/notes", f"blobs/{ref}"):
            await api.refused(404, "GET", path)
        await api.refused(404, "DELETE", f"conversations/{NAME}")
        assert (await api.get("search", q="module"))["data"] == []
        assert (await api.get("conversations"))["data"] == []
        for each in api.turns.weirs:  # the next request goes to the one that deleted it, and to the other
            async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
                await http.delete(f"{each.root}/weir/conversations/{NAME}")
            for requests in (1, 2):
                await talk.chat(1)
                await api.turns.settled()
                row = await api.get(f"conversations/{NAME}")
                assert (row["requests"], row["version"]) == (requests, 1)


@pytest.mark.requirement("P7")
async def test_the_operator_names_by_its_id_what_several_callers_call_the_same(api: Api) -> None:
    for key in ("sk-test", "sk-other"):
        await api.talk(key).agent(1)
        await api.ask("GET", f"conversations/{NAME}", key=key)
    ids = sorted(row["id"] for row in (await api.get("conversations", key=ADMIN))["data"])
    for method, path in (("DELETE", f"conversations/{NAME}"), ("POST", f"conversations/{NAME}/close")):
        error = await api.refused(400, method, path, key=ADMIN)
        assert error["weir"]["ids"] == ids
    mine = (await api.get(f"conversations/{NAME}"))["id"]
    assert (await api.ask("DELETE", f"conversations/{mine}", key=ADMIN)).status_code == 200
    await api.refused(404, "GET", f"conversations/{NAME}")
    assert (await api.get(f"conversations/{NAME}", key="sk-other"))["requests"] == 1


@pytest.mark.requirement("A2.24")
async def test_a_conversation_of_a_sub_agent_names_the_one_it_is_a_part_of(api: Api) -> None:
    await api.talk().agent(1)
    client = api.target.client(default_headers={"x-weir-conversation": "child", "x-weir-parent": NAME})
    await Talk(client).agent(1)
    assert (await api.get("conversations/child"))["parent"] == NAME
    assert (await api.get(f"conversations/{NAME}"))["parent"] is None
