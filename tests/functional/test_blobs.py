"""What was cut out of a result can be read on from where it was cut, and its original back in full."""

import base64
import hashlib
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import (
    ALONE,
    COUNTER,
    TOOLS,
    Deployment,
    InTurns,
    Talk,
    answered,
    arrays_of,
    opening,
    prose,
)
from tests.upstream import SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

POLICY = """
upstreams:
  only: {{kind: openai, base_url: "{upstream}", api_key: pass}}
models:
  - {{match: "*", upstream: only, window: {window}}}
policies:
  mine:
    estimator: chars4
    ingest: {{cap: {cap}, from_start: true{ingest}}}
    cascade: [{cascade}]
default_policy: mine
"""
TEXT = "".join(f"Zeile {n}: äöü 漢字 🙂 {prose(6, seed=n)}\n" for n in range(3_600))


@pytest.fixture
async def upstream() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=200_000), counter=COUNTER) as simulator:
        yield simulator


def policy(
    upstream: RunningSimulator,
    *,
    cap: int = 1_000,
    ingest: str = "",
    window: int = 200_000,
    cascade: str = "{layer: ingest_cap, at: 0}, {layer: evict}",
) -> str:
    return POLICY.format(upstream=upstream.base_url, cap=cap, ingest=ingest, window=window, cascade=cascade)


def step(text: str, name: str = "read_file") -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": text},
    ]


async def sent(target: InTurns, upstream: RunningSimulator, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The array that went up for a request with these messages after the opening."""
    talk = Talk(target.client(), messages=[*opening(), *added])
    await talk.ask(tools=TOOLS)
    return list(answered(upstream)[-1].json()["messages"])


async def page(target: InTurns, ref: str, cursor: object = None, key: str = "sk-test") -> httpx.Response:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http:
        params = {} if cursor is None else {"cursor": str(cursor)}
        return await http.get(f"{target.root()}/weir/blobs/{ref}", params=params)


def cut_of(text: str) -> tuple[str, dict[str, Any], str]:
    """The shown beginning, the line of JSON where a text was cut, and the shown end."""
    head, line, tail = re.split(r"\n?(\{\"truncated\": .*\})\n?", text)
    return head, json.loads(line), tail


async def walk(target: InTurns, ref: str, cursor: int) -> list[httpx.Response]:
    """Every page from a cursor to the end."""
    pages = [await page(target, ref, cursor)]
    while pages[-1].headers["x-weir-end"] == "false":
        pages.append(await page(target, ref, pages[-1].headers["x-weir-cursor"]))
    return pages


@ALONE
@pytest.mark.requirement("A4.18", "A3.12", "A0.26", "P11")
async def test_a_walk_along_the_cursors_goes_on_where_the_shown_beginning_ended(
    upstream: RunningSimulator, tmp_path: Path, deployment: Deployment
) -> None:
    async with deployment.serving(upstream.base_url, yaml=policy(upstream), folder=tmp_path) as target:
        shown = (await sent(target, upstream, step(TEXT)))[-1]["content"]
        line = cut_of(shown)[1]
        assert line["truncated"] is True
        rest = await walk(target, line["ref"], line["next_cursor"])
        head = cut_of(shown)[0]
        assert head + b"".join(p.content for p in rest).decode() == TEXT
        whole = await walk(target, line["ref"], 0)
        assert len(whole) > 3
        assert b"".join(p.content for p in whole) == TEXT.encode()
        for part in whole:
            assert part.text  # every page is valid UTF-8 by itself
            assert part.headers["content-type"] == "text/plain; charset=utf-8"
            assert int(part.headers["x-weir-size"]) == len(TEXT.encode())
            assert part.headers["x-weir-sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
            assert len(part.content) <= 64 * 1024


@pytest.mark.requirement("A4.18", "A0.26")
@pytest.mark.parametrize("parts", [False, True])
async def test_the_ref_alone_gives_the_message_as_the_client_sent_it(
    parts: bool, upstream: RunningSimulator, tmp_path: Path, deployment: Deployment
) -> None:
    added = step(TEXT)
    if parts:
        half = len(TEXT) // 2
        added[1]["content"] = [{"type": "text", "text": TEXT[:half]}, {"type": "text", "text": TEXT[half:]}]
    async with deployment.serving(upstream.base_url, yaml=policy(upstream), folder=tmp_path) as target:
        shown = (await sent(target, upstream, added))[-1]["content"]
        line = cut_of(shown)[1]
        pages = await walk(target, line["ref"].removesuffix(".txt"), 0)
        assert json.loads(b"".join(p.content for p in pages)) == added[1]
        assert pages[0].headers["content-type"] == "application/json"
        text = b"".join(p.content for p in await walk(target, line["ref"], line["next_cursor"])).decode()
        said = TEXT[: len(TEXT) // 2] + "\n" + TEXT[len(TEXT) // 2 :] if parts else TEXT
        assert cut_of(shown)[0] + text == said


@pytest.mark.requirement("A4.18")
async def test_cursors_that_lead_nowhere_and_other_tenants(
    upstream: RunningSimulator, tmp_path: Path, deployment: Deployment
) -> None:
    async with deployment.serving(upstream.base_url, yaml=policy(upstream), folder=tmp_path) as target:
        shown = (await sent(target, upstream, step(TEXT)))[-1]["content"]
        ref = cut_of(shown)[1]["ref"]
        size = len(TEXT.encode())
        for cursor in (size, size + 1, 10**14):
            beyond = await page(target, ref, cursor)
            assert (beyond.status_code, beyond.content, beyond.headers["x-weir-end"]) == (200, b"", "true")
        assert (await page(target, ref, size - 1)).content == TEXT.encode()[-1:]
        for wrong in ("-1", "x", "1.5", "٣", "9" * 40, ""):
            refused = await page(target, ref, wrong)
            if wrong:
                assert refused.status_code == 400, wrong
                assert refused.json()["error"]["code"] == "invalid_request"
        for other in (ref, ref.removesuffix(".txt")):
            assert (await page(target, other, 0, key="sk-other")).status_code == 404
        assert (await page(target, "0123456789ab.txt")).status_code == 404


@pytest.mark.requirement("A4.20")
async def test_a_result_of_200_kb_of_html_is_served_and_costs_no_more_than_its_cap(
    upstream: RunningSimulator, tmp_path: Path, deployment: Deployment
) -> None:
    html = "<html>" + "".join(f"<div id='{n}'>{random.Random(n).random()}</div>" for n in range(5_000)) + "</html>"
    assert len(html) > 190_000
    async with deployment.serving(upstream.base_url, yaml=policy(upstream), folder=tmp_path) as target:
        shown = (await sent(target, upstream, step(html)))[-1]["content"]
        assert len(shown) <= 4_000
        assert shown.startswith("<html><div id='0'>")
        assert shown.endswith("</html>")


@pytest.mark.requirement("A2.23", "A2.18")
async def test_a_retry_keeps_the_newest_picture_and_old_ones_leave_a_line(
    tmp_path: Path, deployment: Deployment
) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG" + bytes(600)).decode()

    def shown(text: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        return {"role": "user", "content": [{"type": "text", "text": text}, image]}

    turns = [m for n in range(6) for m in (shown(f"picture {n}"), {"role": "assistant", "content": prose(300, seed=n)})]
    messages = [*opening(), {"role": "assistant", "content": "Show me."}, *turns, shown("and this?")]
    async with serve_simulator(SimulatorSettings(window=3_000), counter=COUNTER) as simulator:
        cascade = "{layer: media}, {layer: compact}"
        yaml = policy(simulator, window=32_000, cascade=cascade)
        async with deployment.serving(simulator.base_url, yaml=yaml, folder=tmp_path, window=None) as target:
            talk = Talk(target.client(), messages=messages)
            await talk.ask()
            assert "retry=" in talk.actions()[-1]
            array = arrays_of(answered(simulator))[-1]
            assert array[-1]["content"][-len(messages[-1]["content"]) :] == messages[-1]["content"]
            for message in array[:-1]:
                said = str(message["content"])
                if isinstance(message["content"], list) and "picture" in said and "<weir-" not in said:
                    assert message in messages or "image image/png left out; original: weir blob" in str(message)
