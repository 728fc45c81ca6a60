"""Pictures of every page for the documentation, from a real run: ``python -m tests.browser.screenshots [FOLDER]``."""

import asyncio
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import httpx

from tests.browser.browser import KEY, NAME, Watched, chromium, executable, sign_in, used, watched
from tests.functional.api import ADMIN

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZES = {1440: 900, 360: 740}


async def pages(site: Watched) -> dict[str, list[tuple[str, str]]]:
    """The pages by the key that sees them, each with the name of its picture."""
    store = site.weir.runtime.store
    row = next(each for each in await store.conversations(None, limit=50) if each.name == NAME)
    acted = next(each for each in reversed(await store.timeline(row)) if each.strategy)
    own = f"/conversations/{NAME}"
    mine = [("overview", ""), ("conversations", "/conversations"), ("conversation", own)]
    mine += [("removed", f"{own}?tab=removed"), ("request", f"{own}/requests/{acted.id}")]
    operators = [("policies", "/policies"), ("keys", "/keys"), ("usage", "/usage?by=model"), ("system", "/system")]
    return {KEY: mine, ADMIN: operators}


def spread(site: Watched) -> None:
    """Have the run have taken a working day."""
    with closing(sqlite3.connect(site.database)) as file, file:
        file.execute("UPDATE exchanges SET at = at - 1500.0 * ((SELECT max(rowid) FROM exchanges) - rowid)")


async def keep_keys(site: Watched) -> None:
    """Keys of three teams, and a store that has grown for two days."""
    teams = [
        {
            "name": "support-bot",
            "policy": "article-support",
            "models": ["gpt-*"],
            "requests_per_minute": 60,
            "budgets": ["month,dollars=50", "day,tokens=2000000"],
        }
    ]
    teams += [{"name": "research", "concurrency": 8, "allow": ["policy"]}, {"name": "contractor", "expires": "30d"}]
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {ADMIN}"}, trust_env=False) as http:
        for team in teams:
            (await http.post(f"{site.weir.root}/weir/keys", json=team)).raise_for_status()
    now = time.time()
    with closing(sqlite3.connect(site.database)) as file, file:
        kept = [(f"size:{int(now) // 3600 - hours}", 516_000 - 7_000 * hours) for hours in range(1, 48)]
        file.executemany("INSERT INTO meta (name, number) VALUES (?, ?)", kept)


async def draw(folder: Path) -> None:
    """Run Weir, use it, and take the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data:
        async with watched(Path(data)) as site, chromium(executable()) as browser:
            await used(site, steps=30)
            spread(site)
            for key, shown in (await pages(site)).items():
                if key == ADMIN:  # last: with the first key the door is shut for whoever has none
                    await keep_keys(site)
                for width, height in SIZES.items():
                    context = await browser.new_context(viewport={"width": width, "height": height})
                    page = await context.new_page()
                    await sign_in(page, site, key)
                    for name, path in shown:
                        await page.goto(site.at + path)
                        await page.wait_for_timeout(300)  # charts are drawn
                        await page.screenshot(path=folder / f"{name}-{width}.png")
                    await context.close()


if __name__ == "__main__":
    asyncio.run(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES))
