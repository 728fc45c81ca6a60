"""What stands in front of Weir: streams that it must not hold back, and pages whose origin Weir does not see."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import RunningWeir, weir
from tests.functional.scripted import Asked, Reply, ScriptedUpstream, chunks_of, completion, events, scripted, whole

CONFIG = """
upstreams: {{main: {{base_url: "{url}", api_key: pass}}}}
window: 8192
public_url: https://weir.example.com/
auth: {{admin_token: admin-token-0001}}
"""
PUBLIC = "https://weir.example.com"


def answer(asked: Asked) -> Reply:
    if not asked.json.get("stream"):
        return whole(completion("ok"))
    headers = tuple((name.removeprefix("x-say-"), v) for name, v in asked.headers.items() if name.startswith("x-say-"))
    given = events(*chunks_of(completion("ok"), usage=False))
    return Reply(kind=given.kind, chunks=given.chunks, headers=headers)


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[RunningWeir]:
    upstream: ScriptedUpstream
    async with (
        scripted(answer) as upstream,
        weir("", folder=tmp_path, yaml=CONFIG.format(url=upstream.base_url), window=None) as running,
    ):
        yield running


async def signed_in(target: RunningWeir, **headers: str) -> httpx.Response:
    """What signing in as the operator answers where the browser's own origin is said by ``headers``."""
    async with httpx.AsyncClient(base_url=target.root) as http:
        page = await http.get("/weir/ui/login")
        token = page.text.partition('name="token" value="')[2].partition('"')[0]
        assert token
        form: dict[str, Any] = {"token": token, "key": "admin-token-0001"}
        return await http.post("/weir/ui/login", data=form, headers=headers)


async def test_pages_behind_a_plain_reverse_proxy_are_weirs_own(target: RunningWeir) -> None:
    """nginx's plain proxy_pass sends its own address as Host, and nothing of the client's."""
    answered = await signed_in(target, origin=PUBLIC)
    assert answered.status_code == 303, answered.text
    assert "; Secure" in answered.headers["set-cookie"]
    for origin in ("https://evil.example", "http://weir.example.com", "https://weir.example.com:444", "null"):
        refused = await signed_in(target, origin=origin)
        assert refused.status_code == 403, origin
        assert "public_url" in refused.text
    refused = await signed_in(target, origin=PUBLIC, sec_fetch_site="same-site")
    assert refused.status_code == 303  # which is not how that header is written
    refused = await signed_in(target, origin=PUBLIC, **{"sec-fetch-site": "cross-site"})
    assert refused.status_code == 403


async def test_the_public_name_is_no_name_that_was_bound_anew(target: RunningWeir) -> None:
    async with httpx.AsyncClient(base_url=target.root) as http:
        for host, status in (("weir.example.com", 200), ("evil.example", 403)):
            page = await http.get("/weir/ui", headers={"host": host})
            assert page.status_code == status, host
