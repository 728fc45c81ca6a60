"""Every list comes in pages, and all pages together are the list."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy.app import ROUTES
from tests.functional.api import ADMIN, NAME, Api, compacted, serving
from tests.functional.harness import SHARED, Deployment

pytestmark = pytest.mark.slow


@pytest.fixture
async def api(tmp_path: Path, deployment: Deployment) -> AsyncIterator[Api]:
    async with serving(tmp_path, deployment=deployment, more=TEAM) as api:
        yield api


TEAM = """
teams: {all: {budgets: [{period: day, tokens: 9}, {period: week, tokens: 9}, {period: month, tokens: 9}]}}
"""
LISTS = sorted({r.pattern for r in ROUTES if {"cursor", "limit"} <= set(r.query) and r.asker != "operator"})


async def test_all_pages_together_are_the_list(api: Api) -> None:
    for number in range(3):
        talk = await compacted(api, name=NAME if number == 0 else f"other-{number}")
        await talk.chat(8 if number == 0 else 1)
    await api.ask("POST", f"conversations/{NAME}/close")
    for text in ("one", "two", "three"):
        await api.ask("POST", f"conversations/{NAME}/notes", {"text": text})
    await api.ask("PUT", "policies/mine", b"health: {utilization: 0.01, utilization_requests: 1}", key=ADMIN)
    long = []
    for pattern in LISTS:
        path = pattern.format(id=NAME)
        for key in ("sk-test", ADMIN):
            if pattern == "search" and key == ADMIN:
                continue
            more = {"q": "module file"} if pattern == "search" else {"by": "conversation"} if pattern == "usage" else {}
            whole = await api.get(path, key=key, limit="500", **more)
            assert whole["next"] is None, path
            size = 1 if key == ADMIN else 2
            rows, events, pages = list[Any](), list[Any](), 0
            cursor: dict[str, str] = {}
            while True:
                page = await api.get(path, key=key, limit=str(size), **more, **cursor)
                assert len(page["data"]) <= size
                rows = page["data"] + rows if pattern.endswith("timeline") else rows + page["data"]
                events += page.get("events", [])
                pages += 1
                if page["next"] is None:
                    break
                cursor = {"cursor": page["next"]}
            assert rows == whole["data"], path
            assert events == whole.get("events", []), path
            assert pages == max(1, -(-max(len(rows), len(events)) // size)), path
            long += [pattern] if len(whole["data"]) > 2 else []
    assert set(LISTS) - set(long) <= {"health"}, "a list with nothing in it proves nothing"


@SHARED
async def test_what_comes_in_between_two_pages_moves_nothing(api: Api) -> None:
    talk = await compacted(api)
    await api.turns.settled()
    before = (await api.of("timeline"))["data"]
    first = await api.of("timeline", limit="2")
    await talk.chat(2)
    await api.turns.settled()
    second = await api.of("timeline", limit="2", cursor=first["next"])
    assert first["data"] == before[-2:]
    assert second["data"] == before[-4:-2]


async def test_the_timeline_begins_where_it_is_asked_to(api: Api) -> None:
    talk = api.talk()
    await talk.agent(3)
    rows = (await api.of("timeline"))["data"]
    for start, expected in ((rows[1]["at"], rows[1:]), (rows[2]["at"] + 1, []), (0, rows)):
        assert (await api.of("timeline", since=repr(start)))["data"] == expected
    for ago in ("1d", "24h", "600m", "3600s"):
        assert (await api.of("timeline", since=ago))["data"] == rows
    assert (await api.of("timeline", since="0s"))["data"] == []
    for wrong in ("yesterday", "-1", "1w", "", "1e9", "٣d", "nan", "9" * 30):
        assert (await api.refused(400, "GET", f"conversations/{NAME}/timeline?since={wrong}"))["param"] == "since"


def word(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


WRONG = (
    "x", "", "%00", "🙂", "x" * 2_000, word(None), word([]), word({"a": 1}), word(["\0"]), word(["\ud800"]), word([1e999]),
    word([True, True]), word([[1]]), word([2**70, "x"]), word([1.5, 2, 3]), base64.urlsafe_b64encode(b"[" * 600).decode(),
    word([1, "x", "x", "x", "x", "x", "x"]), base64.urlsafe_b64encode(b"[NaN]").decode(),
)  # fmt: skip


async def test_a_cursor_that_no_page_gave_is_refused(api: Api) -> None:
    await compacted(api)
    for pattern in LISTS:
        more = "&q=module" if pattern == "search" else ""
        for wrong in WRONG:
            error = await api.refused(400, "GET", f"{pattern.format(id=NAME)}?cursor={wrong}{more}")
            assert error["param"] == "cursor", (pattern, wrong)
    for pattern, gone in (
        (f"conversations/{NAME}/removed", word(["0123456789ab"])),
        (f"conversations/{NAME}/notes", word(["00"])),
        (f"conversations/{NAME}/checkpoints", word(["br-x", 1])),
        ("policies", word(["none"])),
    ):
        assert "begin again" in (await api.refused(400, "GET", f"{pattern}?cursor={gone}"))["message"]


@pytest.mark.requirement("P7")
async def test_another_callers_cursor_shows_nothing_of_its_list(api: Api) -> None:
    await compacted(api)
    for pattern in ("conversations", "audit", "usage", "health"):
        following = (await api.get(pattern, limit="1"))["next"]
        if following is not None:
            assert (await api.get(pattern, key="sk-other", cursor=following))["data"] == []
