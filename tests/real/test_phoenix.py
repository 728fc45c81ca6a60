"""Traces of a whole Weir in a real viewer: Arize Phoenix, started here, read back over its own API.

It takes minutes to install. In every run ``tests/functional/test_traces.py`` reads the same trees, over both
protocols, with the official messages.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.telemetry.setup import OtelSettings, Protocol, Telemetry
from tests.functional.harness import COUNTER, TOOLS, free_port, opening, tool_step, weir
from tests.profile import soak
from tests.real.environments import Unavailable, clean_environment, environment
from tests.receiver import PART
from tests.upstream import RecordedRequest
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = [pytest.mark.real, soak, pytest.mark.timeout(420)]

PATIENCE = 90.0
ALONE = {
    "PHOENIX_TELEMETRY_ENABLED": "false",
    "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
    "PHOENIX_AGENTS_DISABLE_WEB_ACCESS": "true",
    "PHOENIX_AGENTS_DISABLE_GITHUB": "true",
    "PHOENIX_AGENTS_DISABLE_BASH": "true",
    "PHOENIX_ENABLE_MCP_SERVER": "false",
}
"""Nothing of it speaks with the internet, or runs commands."""
TREE = {
    "weir edit sim": [
        *("weir context.plan", "chat sim", "weir context.plan", "chat sim"),
    ],
    "weir context.plan": [f"weir context.layer {layer}" for layer in ("ingest_cap", "dedupe", "evict", "compact")],
}


@dataclass(frozen=True, slots=True)
class Phoenix:
    """A Phoenix on this machine: its base URLs for OTLP and its API."""

    http: str
    grpc: str

    async def read(self, path: str, **wanted: Any) -> list[dict[str, Any]]:
        """The rows of a list of its API."""
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            answer = await client.get(f"{self.http}/v1/projects/default/{path}", params=wanted)
        rows: list[dict[str, Any]] = answer.json()["data"] if answer.status_code == 200 else []
        return rows


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    """A Phoenix with a database of its own."""
    try:
        python = environment("phoenix") / "bin" / "python"
    except Unavailable as reason:
        pytest.skip(str(reason))
    folder, web, rpc = tmp_path_factory.mktemp("phoenix"), free_port(), free_port()
    own = {"PHOENIX_WORKING_DIR": str(folder), "PHOENIX_HOST": "127.0.0.1", "HOME": str(folder)}
    own |= {"PHOENIX_PORT": str(web), "PHOENIX_GRPC_PORT": str(rpc)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(python), "-m", "phoenix.server.main", "serve"],
            env={**clean_environment(), **ALONE, **own},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            until_up(process, f"http://127.0.0.1:{web}", folder / "log")
            yield Phoenix(f"http://127.0.0.1:{web}", f"http://127.0.0.1:{rpc}")
        finally:
            stop(process)


def until_up(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        assert process.poll() is None, log.read_text(errors="replace")[-2_000:]
        try:
            if httpx.get(f"{address}/healthz", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.25)
    pytest.skip(f"phoenix did not start in {PATIENCE:.0f} s")


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def converse(name: str, protocol: Protocol, endpoint: str) -> list[RecordedRequest]:
    """A request that passes, and one that does not fit and is asked again; both exported, as the upstream saw them."""
    telemetry = Telemetry.create(
        OtelSettings(
            otlp_endpoint=endpoint,
            otlp_protocol=protocol,
            capture_content=True,
        )
    )
    async with (
        serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator,
        weir(simulator.base_url, window=32_768, telemetry=telemetry) as target,
    ):
        client = target.client(default_headers={"x-weir-conversation": name})
        grown = [*opening(), *(message for number in range(22) for message in tool_step(number))]
        for messages in (opening(), grown):
            await client.chat.completions.create(model="sim", messages=messages, max_tokens=512, tools=TOOLS)
        return simulator.answered()


@pytest.mark.requirement("P15", "A0.139")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_phoenix_shows_the_trees_the_session_and_the_tokens_of_a_conversation(
    phoenix: Phoenix, protocol: Protocol
) -> None:
    name = f"chat-by-{protocol[:4]}"
    seen = await converse(name, protocol, phoenix.grpc if protocol == "grpc" else phoenix.http)
    spans: list[dict[str, Any]] = []
    for _ in range(60):
        every = await phoenix.read("spans", limit=200)
        spans = [span for span in every if span["attributes"].get("session.id") == name]
        if len(spans) >= 12:
            break
        await asyncio.sleep(0.25)
    spans.sort(key=lambda span: span["start_time"])
    second = spans[-1]["context"]["trace_id"]
    assert tree([span for span in spans if span["context"]["trace_id"] == second]) == TREE
    calls = [span for span in spans if span["name"] == "chat sim"]
    assert [(span["span_kind"], span["status_code"]) for span in calls] == [
        *(("LLM", "UNSET"), ("LLM", "ERROR"), ("LLM", "UNSET")),
    ]
    first, refused, again = seen
    assert (refused.status, refused.prompt_tokens > again.prompt_tokens > first.prompt_tokens) == (400, True)
    counted = [span["attributes"].get("llm.token_count.prompt") for span in calls]
    assert counted == [first.prompt_tokens, None, again.prompt_tokens]
    assert {span["span_kind"] for span in spans if span["name"] != "chat sim"} == {"CHAIN"}
    roots = [span["attributes"] for span in spans if span["parent_id"] is None]
    assert all(root["input.value"] and root["output.value"] for root in roots)
    assert calls[0]["attributes"]["llm.input_messages.0.message.role"] == "system"
    assert calls[0]["attributes"]["llm.output_messages.0.message.content"]
    (session,) = [row for row in await phoenix.read("sessions") if row["session_id"] == name]
    assert len(session["traces"]) == 2
    for kind in ("prompt", "completion"):
        used = sum(getattr(each, f"{kind}_tokens") for each in (first, again))
        assert session[f"token_count_{kind}"] == used > 0


def tree(spans: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Names of the children of each span that has some, in order of their start."""
    names = {span["context"]["span_id"]: span["name"] for span in spans}
    found: dict[str, list[str]] = {}
    for span in (each for each in spans if not PART.match(each["name"])):
        if span["parent_id"] in names:
            found.setdefault(names[span["parent_id"]], []).append(span["name"])
    return found
