"""A Chromium, and a Weir with something to look at."""

import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from playwright.async_api import Browser, Page, async_playwright

from proxy.store.schema import exchanges
from proxy.store.usage import ADD_TO_DAYS
from tests.functional.api import ADMIN
from tests.functional.harness import COUNTER, RunningWeir, Talk, prose, weir
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ("--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage", "--disable-gpu")
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
WINDOW = 8_192
AT_ONCE = 10_000
NAME = "migrate-axios"
KEY, OTHER = "sk-test", "sk-other"
YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
window: {window}
auth: {{admin_token: {admin}}}
models: [{{match: "sim", prices: {{input: 0.4, output: 1.6, cache_read: 0.04}}}}]
teams:
  support: {{budgets: [{{period: month, tokens: 2000000, dollars: 25}}, {{period: day, tokens: 5000}}], requests_per_minute: 600}}
"""


def executable() -> str:
    """Where the browser is; the test is skipped without one, but in CI there has to be one."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip("there is no chromium: apt-get install chromium")
    assert found is not None, ".ci/run installs chromium"
    return found


@asynccontextmanager
async def chromium(path: str) -> AsyncIterator[Browser]:
    """A browser that goes nowhere by itself."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS])
        try:
            yield browser
        finally:
            await browser.close()


@dataclass(slots=True)
class Watched:
    """A Weir that a browser looks at, and its database."""

    weir: RunningWeir
    database: Path

    @property
    def at(self) -> str:
        """The address of the pages."""
        return f"{self.weir.root}/weir/ui"

    def talk(self, name: str, key: str = KEY, **more: Any) -> Talk:
        """A conversation with the real SDK."""
        return Talk(self.weir.client(key, default_headers={"x-weir-conversation": name}), **more)

    async def settled(self) -> None:
        """Return once everything is written."""
        await self.weir.runtime.preparation.settled()
        await self.weir.stored()


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[Watched]:
    """A Weir in front of the simulator, with a database file and an operator."""
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        yaml = YAML.format(upstream=simulator.base_url, window=WINDOW, admin=ADMIN)
        async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=None) as running:
            yield Watched(running, folder / "w.db")


async def used(site: Watched, *, steps: int = 22) -> None:
    """A run that went past the window twice, a chat that did not, and one of another key."""
    run = site.talk(NAME)
    await run.agent(steps)
    run.add_question()
    await run.ask()
    run.add_answer()
    await run.chat(2)
    await site.talk("support-4711", seed=3).chat(4)
    await site.talk("theirs", OTHER, seed=5).chat(1)
    await site.settled()


async def sign_in(page: Page, site: Watched, key: str) -> None:
    """As a person does it."""
    await page.goto(f"{site.at}/login")
    await page.get_by_label("Your key, or the admin token").fill(key)
    await page.get_by_role("button", name="Sign in").last.click()
    await page.wait_for_url(f"{site.at}**")


HOSTILE = (
    '<img src=x onerror="document.title=1">',
    "\u05e9\u05dc\u05d5\u05dd \u202e\u05e2\u05d5\u05dc\u05dd",
    "\U0001f98a\U0001f680 fox",
    "x" * 250,
)


def fill(site: Watched, *, conversations: int, requests: int, each: int = 0, apart: float = 1.0) -> None:
    """Rows like those that are there, so many that a table over all of them would be felt.

    One conversation gets ``requests``, and all of them ``each``; they were used so many seconds ``apart``.
    """
    with closing(sqlite3.connect(site.database)) as file, file:
        file.create_function("hostile", 1, lambda n: HOSTILE[n] if n < len(HOSTILE) else f"filler-{n}")
        moved = {name: f"one.{name} - {apart} * n" for name in ("updated", "created")}
        changed = {"id": "randomblob(10)", "name": "hostile(n)", **moved}
        _copy(file, "conversations", where=f"name = '{NAME}'", count=conversations, changed=changed)
        home = f"(SELECT id FROM conversations WHERE name = '{NAME}')"
        if each:
            spread = {"id": "randomblob(12)", "conversation": "other.id", "at": "other.updated - 30.0 * n"}
            whose = f"tenant = (SELECT tenant FROM conversations WHERE name = '{NAME}')"
            others = f"(SELECT * FROM conversations WHERE {whose} AND id <> {home}) AS other"
            _copy(file, "exchanges", where=f"conversation = {home}", count=each, changed=spread, beside=others)
        changed = {"id": "randomblob(12)", "at": "one.at - 60.0 * n"}
        _copy(file, "exchanges", where=f"conversation = {home}", count=requests, changed=changed)
        file.execute(f"UPDATE conversations SET requests = requests + {requests} WHERE id = {home}")
        file.execute("DELETE FROM usage_days")
    engine = sa.create_engine(f"sqlite:///{site.database}")
    with engine.begin() as connection:
        for tenant in connection.scalars(sa.select(exchanges.c.tenant).distinct()).all():
            ids = connection.scalars(sa.select(exchanges.c.id).where(exchanges.c.tenant == tenant)).all()
            for start in range(0, len(ids), AT_ONCE):
                connection.execute(ADD_TO_DAYS, {"of_tenant": tenant, "ids": ids[start : start + AT_ONCE]})
    engine.dispose()


def _copy(
    file: sqlite3.Connection, table: str, *, where: str, count: int, changed: Mapping[str, str], beside: str = ""
) -> None:
    """One row so many times, in each ``changed``; once more for each row of what stands ``beside``."""
    columns = [row[1] for row in file.execute(f"PRAGMA table_info({table})")]
    shown = ", ".join(changed.get(column, f"one.{column}") for column in columns)
    file.execute(
        f"WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < {count}) "
        f"INSERT INTO {table} ({', '.join(columns)}) SELECT {shown} "
        f"FROM numbers, (SELECT * FROM {table} WHERE {where} LIMIT 1) AS one{beside and ', ' + beside}"
    )


def large_message() -> dict[str, str]:
    """Five megabytes in one message."""
    text = prose(2_000, seed=9)
    return {"role": "user", "content": text * (5_000_000 // len(text) + 1)}


async def axe(page: Page, *rules: str) -> list[str]:
    """What axe-core holds for serious on a page, by all of its rules or by some."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text(encoding="utf-8"))
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found = await page.evaluate("options => axe.run(document, options)", options)
    return [
        f"{each['id']}: {[node['target'] for node in each['nodes']][:4]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
