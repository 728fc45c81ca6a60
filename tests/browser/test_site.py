"""The documentation's pages in a real browser, light and dark, on a desk and on a telephone."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser

from tests.browser.browser import axe, chromium, executable
from tests.functional.harness import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``make site`` builds it: a link that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def address(built: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium(executable()) as opened:
        yield opened


@pytest.mark.timeout(300)
async def test_every_page_can_be_read_by_everybody(built: Path, address: str, browser: Browser) -> None:
    pages = sorted(path.name for path in built.glob("*.html") if path.name != "404.html")
    assert len(pages) > 20
    found: dict[str, list[str]] = {}
    for scheme, width, shown in (
        ("light", 1440, pages), ("dark", 390, pages), ("light", 390, pages[::6]), ("dark", 1440, pages[::6])
    ):  # fmt: skip
        view = await browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
        )
        page = await view.new_page()
        outside: list[str] = []
        page.on("request", lambda request, kept=outside: kept.append(request.url))
        for name in shown:
            await page.goto(f"{address}/{name}")
            faults = await axe(page)
            if await page.evaluate("document.documentElement.scrollWidth") > width:
                faults.append("it is wider than the screen")
            if faults:
                found[f"{name}, {scheme}, {width}"] = faults
        assert [url for url in outside if not url.startswith((address, "data:"))] == []
        await view.close()
    assert found == {}
