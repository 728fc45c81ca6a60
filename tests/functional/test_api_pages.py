"""Every list comes in pages, and all pages together are the list."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy.app import ROUTES
from tests.functional.api import ADMIN, NAME, Api, compacted, serving
from tests.functional.harness import Deployment

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
