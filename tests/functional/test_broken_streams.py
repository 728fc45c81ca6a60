"""The comparison of clients in front of broken streams: one real client through all of it, and streams that the SDK can read."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks.broken_forms import SURFACES, call_of
from benchmarks.broken_streams import FINAL, Run, Server, run

SCHEMA = {"properties": {"note": {"type": "string"}, "cmd": {"type": "string"}}, "required": ["note", "cmd"]}


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[None]:
    """``server`` on a free port."""
    opened = await asyncio.start_server(server, "127.0.0.1", 0)
    server.port = opened.sockets[0].getsockname()[1]
    try:
        yield
    finally:
        opened.close()
        while len(asyncio.all_tasks()) > 1:  # its connections
            await asyncio.sleep(0.01)


@pytest.mark.requirement("R.34")
async def test_half_a_tool_call_is_not_run_where_its_stream_ends_as_weir_ends_it(tmp_path: Path) -> None:
    python = tmp_path / "py/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    server = Server(call="half")
    async with listening(server):
        result = await run(server, tmp_path, "openai-py", "Weir's")
    assert result.verdict == "error (1)", result.output
    assert "Connection lost, premature close" in result.output


@pytest.mark.requirement("R.34")
async def test_a_response_is_whole_only_on_the_second_request() -> None:
    surface = SURFACES["responses"]
    server = Server(runs={"r0": Run("responses", surface.endings["cut"])})
    async with (
        listening(server),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/r0/v1", api_key="k", max_retries=0) as client,
    ):
        kinds: list[str] = []

        async def read() -> None:
            async for event in await client.responses.create(model="m", input="hi", stream=True):
                kinds.append(event.type)

        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await read()
        async with client.responses.stream(model="m", input="hi") as stream:
            assert (await stream.get_final_response()).output_text == FINAL
    assert kinds[-1] == "response.output_text.delta"


@pytest.mark.parametrize("surface", SURFACES)
def test_a_call_that_is_not_whole_ends_within_its_command(surface: str) -> None:
    called = call_of([("look", {"properties": {}}), ("run", SCHEMA)], whole=False)
    assert called is not None
    name, arguments = called
    assert (name, "".join(arguments)) == ("run", '{"note": "x", "cmd": "touch ran; echo the rest')
    assert len(SURFACES[surface].call(*called, whole=False)) >= 1 + len(arguments)
