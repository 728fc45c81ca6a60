"""How long the dashboard's pages take with many conversations in the store.

    python -m benchmarks.pages [--conversations 10000] [--requests 10] [--rounds 5]

A real Weir with a database file is filled with rows like those that it wrote: conversations of two
weeks with so many requests each, and one with 2,000. The garbage collector is set as ``weir serve``
sets it. Each page is fetched over HTTP, one after the other; the target is that none takes more
than 300 ms from the request to the last byte. It exits with 1 where one does.
"""

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from proxy.cli.serve import COLLECT_AFTER
from proxy.telemetry.process import collect_seldom
from tests.browser.browser import KEY, NAME, Watched, fill, used, watched
from tests.functional.api import ADMIN

TARGET = 300.0
LONG = 2_000
APART = 120.0  # seconds between two conversations: ten thousand are two weeks
TOKEN = re.compile(r'name="token" value="([0-9a-f]+)"')
OVERVIEW = ("", "?period=7d", "/data/series?of=tokens&period=7d")
LISTS = (
    "/conversations",
    "/conversations?name=filler-99",
    "/conversations?zone=red",
    "/conversations?policy=balanced",
)
USAGE = tuple(
    f"/usage{query}" for query in ("", "?by=model", "?by=policy", "?by=day", "?by=conversation")
)
TABS = tuple(
    f"/conversations/{NAME}?tab={tab}"
    for tab in ("requests", "removed", "checkpoints", "health", "audit")
)
ANYBODYS = (*OVERVIEW, *LISTS, *USAGE)
PAGES = {
    ADMIN: (*ANYBODYS, "/policies", "/keys", "/system"),
    KEY: (*ANYBODYS, *TABS, "/search?q=module"),
}
WHO = {ADMIN: "operator", KEY: "key"}


async def sign_in(http: httpx.AsyncClient, site: Watched, key: str) -> None:
    """As a browser does it."""
    found = TOKEN.search((await http.get(f"{site.at}/login")).text)
    assert found is not None
    (await http.post(f"{site.at}/login", data={"token": found[1], "key": key})).raise_for_status()


async def measure(site: Watched, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each page for each visitor."""
    found: dict[tuple[str, str], list[float]] = {}
    for key, paths in PAGES.items():
        async with httpx.AsyncClient(follow_redirects=True, timeout=60, trust_env=False) as http:
            await sign_in(http, site, key)
            for path in paths * rounds:
                begun = time.perf_counter()
                (await http.get(site.at + path)).raise_for_status()
                found.setdefault((WHO[key], path or "/"), []).append(
                    1e3 * (time.perf_counter() - begun)
                )
    return found


async def main(arguments: argparse.Namespace) -> int:
    """Fill a store, fetch every page, and say what each took."""
    with tempfile.TemporaryDirectory() as folder:
        async with watched(Path(folder)) as site:
            await used(site)
            fill(
                site,
                conversations=arguments.conversations,
                requests=LONG,
                each=arguments.requests,
                apart=APART,
            )
            collect_seldom(COLLECT_AFTER)
            size = site.database.stat().st_size / 2**20
            print(
                f"{arguments.conversations:,} conversations of {arguments.requests} requests,"
                f" {size:,.0f} MiB"
            )
            took = await measure(site, arguments.rounds)
    print(f"{'page':58} {'first':>8} {'median':>8} {'worst':>8}  ms")
    for (who, path), times in sorted(took.items(), key=lambda each: -statistics.median(each[1])):
        mark = " > target" if max(times) > TARGET else ""
        name = f"{who} {path}"
        print(f"{name:58} {times[0]:8.0f} {statistics.median(times):8.0f} {max(times):8.0f}{mark}")
    return int(any(max(times) > TARGET for times in took.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    sys.exit(asyncio.run(main(parser.parse_args())))
