"""The dashboard in a real browser, used as a person uses it."""

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from proxy.access.destination import TENANT_SHOWN
from proxy.store.records import ConversationRow
from tests.browser.browser import (
    KEY,
    NAME,
    OTHER,
    Watched,
    axe,
    chromium,
    executable,
    fill,
    large_message,
    sign_in,
    used,
    watched,
)
from tests.functional.api import ADMIN
from tests.functional.harness import Talk

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
MANY, LONG = 10_000, 2_000
PATIENCE = 30_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium(executable()) as browser:
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> AsyncIterator[Watched]:
    del browser  # without one nothing has to be made
    async with watched(tmp_path_factory.mktemp("site")) as site:
        await used(site)
        yield site


@asynccontextmanager
async def looking(browser: Browser, site: Watched, key: str | None = KEY, **options: Any) -> AsyncIterator[Page]:
    """A page, whose console has to stay quiet: what the policy of its content refuses is an error there."""
    context = await browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page = await context.new_page()
    page.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    said: list[str] = []
    page.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith((site.at, "data:")) else said.append(asked.url))
    try:
        if key is not None:
            await sign_in(page, site, key)
        yield page
        assert [line for line in said if "status of 4" not in line] == []
    finally:
        await context.close()


async def test_signing_in_with_a_wrong_and_a_right_token_and_out_again(browser: Browser, site: Watched) -> None:
    async with looking(browser, site, None) as page:
        await sign_in(page, site, "weir-sk-nobody")
        await expect(page.get_by_role("alert")).to_contain_text("Incorrect API key")
        await sign_in(page, site, ADMIN)
        await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        await expect(page.get_by_text("operator", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_text("You have signed out")).to_be_visible()
        await page.goto(f"{site.at}/system")
        await expect(page.get_by_role("button", name="Sign in").last).to_be_visible()


@pytest.mark.requirement("A0.148")
async def test_a_person_finds_a_conversation_and_reads_both_sides_by_keyboard_alone(
    browser: Browser, site: Watched
) -> None:
    async with looking(browser, site) as page:
        await page.get_by_role("link", name="Conversations", exact=True).first.focus()
        await page.keyboard.press("Enter")
        await expect(page).to_have_title("Conversations - Weir")
        await page.get_by_label("Name").focus()
        await page.keyboard.type("axios")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**name=axios**")
        row = page.get_by_role("link", name=NAME)
        await expect(row).to_have_count(1)
        await row.focus()
        await page.keyboard.press("Enter")
        await expect(page).to_have_title(f"{NAME} - Weir")
        bars = page.locator("svg.chart a")
        assert await bars.count() > 20
        acted = page.locator("svg.chart a:has(polygon.mark)").first
        await acted.focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="What the client sent, and what the model saw")).to_be_visible()
        await expect(page.locator(".s-added")).to_contain_text("Written by Weir")
        removed = page.locator("details.fold", has_text="removed").first
        await expect(removed.locator("pre").first).to_be_hidden()
        await removed.locator("summary").focus()
        await page.keyboard.press("Enter")
        await expect(removed.locator("pre").first).to_be_visible()
        await removed.get_by_role("link", name=re.compile("Original")).first.click()
        await expect(page.get_by_role("heading", name=re.compile("Original"))).to_be_visible()


async def test_the_chart_has_room_for_what_the_client_sent(browser: Browser, site: Watched) -> None:
    """Its line goes on above the window, and no further than the picture."""
    async with looking(browser, site) as page:
        await page.goto(f"{site.at}/conversations/{NAME}")
        line = page.locator("svg.chart path.raw")
        window = float(await page.locator("svg.chart line.window").get_attribute("y1") or 0)
        heights = [float(y) for y in re.findall(r",([\d.]+)", await line.get_attribute("d") or "")]
        drawn, whole = await line.bounding_box(), await page.locator("svg.chart").bounding_box()
    assert heights.count(min(heights)) == 1
    assert min(heights) < window
    assert drawn is not None
    assert whole is not None
    assert whole["y"] < drawn["y"] < drawn["y"] + drawn["height"] < whole["y"] + whole["height"]


async def test_a_batch_is_rolled_back_and_gone_and_a_message_pinned(browser: Browser, site: Watched) -> None:
    talk = site.talk("to-be-changed", seed=11)
    await talk.agent(18)
    await site.settled()
    async with looking(browser, site) as page:
        await page.goto(f"{site.at}/conversations/to-be-changed?tab=removed")
        heads = page.get_by_role("heading", name=re.compile(r"^Batch"))
        await expect(heads.first).to_be_visible()
        await page.get_by_role("button", name="Roll back").last.click()
        await expect(page.get_by_role("status")).to_contain_text("Rolled back")
        await expect(heads).to_have_count(0)
        await expect(page.get_by_text("Nothing is out of the window")).to_be_visible()
        await page.get_by_role("link", name="Notes", exact=True).click()
        await page.get_by_label("Note", exact=True).fill("Refund, not replacement.")
        await page.get_by_role("button", name="Add").click()
        await expect(page.get_by_role("cell", name="Refund, not replacement.")).to_be_visible()
        await page.get_by_role("link", name="Checkpoints", exact=True).click()
        await page.get_by_role("table").get_by_role("link").first.click()
        await page.get_by_role("button", name="Compare").click()
        await expect(page.get_by_role("heading", name="What it says")).to_be_visible()
        await talk.agent(1)  # it is over the window, so something goes again
        await site.settled()
        await page.goto(f"{site.at}/conversations/to-be-changed?tab=removed")
        await page.get_by_role("button", name=re.compile("^Pin")).first.click()
        await expect(page.get_by_role("status")).to_contain_text("comes back with the next request")


async def test_a_policy_is_edited_with_an_error_and_without(browser: Browser, site: Watched) -> None:
    async with looking(browser, site, ADMIN) as page:
        await page.goto(f"{site.at}/policies/mine")
        text = page.get_by_label(re.compile("YAML"))
        await text.fill("preset: balanced\nheadrom: 0.1")
        await page.get_by_role("button", name="Set policy").click()
        await expect(page.locator("li.bad")).to_contain_text("did you mean headroom?")
        await text.fill("preset: balanced\nheadroom: 0.1")
        await page.get_by_role("button", name="Set policy").click()
        await expect(page.get_by_role("status")).to_contain_text("next request")
        assert site.weir.runtime.config.policy("mine").headroom == 0.1


async def test_a_live_request_arrives_while_somebody_looks(browser: Browser, site: Watched) -> None:
    async with looking(browser, site) as page:
        await expect(page.locator(".series.drawn")).to_have_count(2)
        await expect(page.locator("#live").get_by_role("link", name="comes-live")).to_have_count(0)
        await page.wait_for_timeout(200)  # the stream has to be open: what came before it is on the page
        talk = site.talk("comes-live", seed=21)
        await talk.chat(2)
        await expect(page.locator("#live").get_by_role("link", name="comes-live").first).to_be_visible()
        await expect(page.locator(".series.drawn")).to_have_count(2)


async def test_the_charts_dates_are_the_same_in_every_country(browser: Browser, site: Watched) -> None:
    async with looking(browser, site, locale="en-US", timezone_id="America/New_York") as page:
        await expect(page.locator(".series.drawn")).to_have_count(2)
        chart = page.locator(".series").first
        await chart.locator(".u-over").hover()
        moment = re.compile(rf"^{time.strftime('%Y-', time.gmtime())}\d\d-\d\d \d\d:\d\d UTC$")
        await expect(chart.locator(".u-legend .u-value").first).to_have_text(moment)


async def test_anothers_conversation_does_not_exist(browser: Browser, site: Watched) -> None:
    async with looking(browser, site, OTHER) as theirs, looking(browser, site) as page:
        await theirs.goto(f"{site.at}/conversations")
        address = await theirs.get_by_role("link", name="theirs").get_attribute("href")
        assert address is not None
        for where in (address, f"/weir/ui/conversations/{NAME}-9", "/weir/ui/nothing"):
            answer = await page.goto(site.weir.root + where)
            assert answer is not None
            assert answer.status == 404
            await expect(page.get_by_role("alert")).to_contain_text("There is no")


async def test_every_page_is_for_everybody_and_fits_a_telephone(browser: Browser, site: Watched) -> None:
    request = (await site.weir.runtime.store.timeline(await conversation(site), limit=30))[-1].id
    own = f"/conversations/{NAME}"
    tabs = [f"{own}?tab={tab}" for tab in ("requests", "removed", "checkpoints", "notes", "health", "audit")]
    mine = ["", "/conversations", *tabs, f"{own}/requests/{request}", f"{own}/checkpoints/1", "/usage?by=model"]
    mine += ["/policies", "/policies/article-support?all=1", "/search?q=module", "/nothing"]
    found: dict[str, list[str]] = {}
    for key, paths in ((KEY, mine), (ADMIN, ["/keys", "/system", "/policies/balanced"])):
        async with looking(browser, site, key, viewport={"width": 360, "height": 740}) as page:
            for path in paths:
                await page.goto(site.at + path)
                if faults := await axe(page):
                    found[path] = faults
                assert await page.evaluate("document.documentElement.scrollWidth") <= 360, path
    async with looking(browser, site, color_scheme="dark") as page:
        for path in ("", "/conversations", tabs[-1], f"{own}/requests/{request}"):
            await page.goto(site.at + path)
            if faults := await axe(page, "color-contrast"):
                found[f"{path}, dark"] = faults
    assert found == {}


async def test_numbers_stand_right_and_times_are_exact_on_hover(browser: Browser, site: Watched) -> None:
    kept = await site.weir.runtime.store.conversations(None, limit=50)
    names = {name for each in kept for name in (each.name, each.tenant[:TENANT_SHOWN])}
    async with looking(browser, site, ADMIN) as page:
        for path in ("", "/conversations", f"/conversations/{NAME}?tab=requests", "/usage?by=model"):
            await page.goto(site.at + path)
            cells = await page.eval_on_selector_all(
                "td", "all => all.map(td => [td.innerText.trim(), getComputedStyle(td).textAlign])"
            )
            cells = [cell for cell in cells if cell[0] not in names]  # one in forty is of digits alone
            numbers = {said: where for said, where in cells if re.fullmatch(r"\$?\d[\d,.]*%?", said)}
            assert numbers, path
            assert set(numbers.values()) == {"right"}, (path, numbers)
            times = await page.eval_on_selector_all("time", "all => all.map(time => [time.dateTime, time.title])")
            assert times, path
            assert [title for iso, title in times if title[:16] != iso[:16].replace("T", " ")] == [], path


async def conversation(site: Watched, name: str = NAME) -> ConversationRow:
    return next(each for each in await site.weir.runtime.store.conversations(None, limit=50) if each.name == name)


async def test_pages_need_no_script(browser: Browser, site: Watched) -> None:
    async with looking(browser, site, java_script_enabled=False) as page:
        await expect(page.locator(".series svg")).to_have_count(2)
        await page.get_by_role("link", name="Conversations", exact=True).first.click()
        await page.get_by_label("Name").fill("axios")
        await page.get_by_role("button", name="Show").click()
        await page.get_by_role("link", name=NAME).click()
        await page.get_by_role("link", name="Notes", exact=True).click()
        await page.get_by_label("Note", exact=True).fill("Without a script.")
        await page.get_by_role("button", name="Add").click()
        await expect(page.get_by_role("cell", name="Without a script.")).to_be_visible()


async def test_pages_hold_with_ten_thousand_conversations_and_a_message_of_five_megabytes(
    browser: Browser, site: Watched, record_property: Any
) -> None:
    huge = site.talk("huge", seed=31)
    huge.messages.append(large_message())
    await huge.ask()  # the middle of it is clipped
    await site.settled()
    (last,) = await site.weir.runtime.store.timeline(await conversation(site, "huge"))
    fill(site, conversations=MANY, requests=LONG)
    async with looking(browser, site) as page:
        for path in ("", "/conversations", "/conversations?zone=red", "/conversations?policy=balanced", "/usage?by=conversation",
                     f"/conversations/{NAME}", f"/conversations/huge/requests/{last.id}"):  # fmt: skip
            answer = await page.goto(site.at + path)
            assert answer is not None
            assert answer.status == 200, path
            timing = await page.evaluate("performance.getEntriesByType('navigation')[0].responseStart")
            record_property(f"ms {path or '/'}", round(timing))
            assert await page.title() not in ("1", "")
        await page.goto(f"{site.at}/conversations?name=fox")
        await expect(page.get_by_role("link", name="fox")).to_have_count(1)
        await page.goto(f"{site.at}/conversations?name=onerror")
        await page.get_by_role("link", name="onerror").click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text("onerror=")
        await page.goto(f"{site.at}/conversations")
        seen = set[str]()
        for _ in range(3):
            seen |= set(await page.locator("td a.name").all_inner_texts())
            following = await page.get_by_role("link", name="Next page").get_attribute("href")
            await page.goto(f"{site.weir.root}{following}")
        assert len(seen) > 100
        await page.goto(f"{site.at}/conversations/{NAME}")
        await page.get_by_role("link", name="Older requests").click()
        await expect(page.get_by_role("link", name="Newest", exact=True)).to_be_visible()


async def test_a_key_is_made_and_used_with_the_real_sdk(browser: Browser, site: Watched) -> None:
    """The last one: with a key the door is shut for everybody who has none."""
    async with looking(browser, site, ADMIN) as page:
        await page.get_by_role("link", name="Keys").click()
        await page.get_by_label("Name", exact=True).fill("support-bot")
        await page.get_by_role("button", name="Create key").click()
        secret = await page.locator(".secret").inner_text()
        await Talk(site.weir.client(secret)).chat(1)
        await page.reload()
        await expect(page.locator("main")).not_to_contain_text(secret)
        await page.get_by_label("Limits of support-bot").click()
        row = page.get_by_role("row", name=re.compile("support-bot"))
        await row.get_by_label("Requests a minute").fill("1")
        await row.get_by_role("button", name="Set limits").click()
        await expect(page.get_by_role("cell", name=re.compile("1 a minute"))).to_be_visible()
        await page.get_by_role("button", name="Revoke support-bot").click()
        await expect(page.get_by_role("status")).to_contain_text("Revoked")
        with pytest.raises(Exception, match="401"):
            await Talk(site.weir.client(secret)).chat(1)
