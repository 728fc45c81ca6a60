"""What was removed is found by what it is about: vectors kept with the archive, from a real embeddings endpoint."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from proxy.server import serve
from proxy.store import Store
from tests.functional.harness import (
    COUNTER,
    SHARED,
    TOOLS,
    Deployment,
    InTurns,
    Talk,
    answered,
    arrays_of,
    opening,
    tool_step,
)
from tests.upstream import Request, SimulatedAnswer
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

WINDOW = 8192
CONFIG = """
upstreams:
  sim: {base_url: URL, api_key: pass}
  vectors: {base_url: 'http://127.0.0.1:PORT/v1', api_key: pass}
models: [{match: 'meaning-*', upstream: vectors}, {match: '*', upstream: sim, window: 8192}]
policies:
  mine:
    placeholder: marker
    RECALL
    cascade: [{layer: evict, at: 0.6, stop_at: 0.2, params: {scorer: fifo}}]
default_policy: mine
"""
OF_ITSELF = "embeddings: meaning-1"
SAID = "The automobile is parked at the north gate."
ASKED = {"role": "user", "content": "Where did I leave my car?"}
ONE_THING = ("automobile", "car")


@dataclass(slots=True)
class Meaning:
    """An embeddings endpoint that knows one synonym, and counts what it was asked."""

    fails: bool = False
    asked: list[list[str]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        texts: list[str] = json.loads(body)["input"]
        self.asked.append(texts)
        rows = [[1.0, 0.0] if any(f" {w} " in f" {t.strip('?')} " for w in ONE_THING) else [0.0, 1.0] for t in texts]
        data = [{"object": "embedding", "index": n, "embedding": row} for n, row in enumerate(rows)]
        answer = json.dumps({"object": "list", "data": data, "model": "meaning-1"}).encode()
        status = 500 if self.fails else 200
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": answer})


@dataclass(slots=True)
class Place:
    simulator: RunningSimulator
    meaning: Meaning
    yaml: str
    folder: Path
    deployment: Deployment
    recalls: list[SimulatedAnswer]

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[InTurns]:
        options: dict[str, Any] = {"yaml": self.yaml, "folder": self.folder, "window": None}
        async with self.deployment.serving(self.simulator.base_url, **options) as target:
            yield target

    async def vectors(self) -> int:
        store = await Store.open(self.deployment.url, read_only=True)
        found = await store._read(lambda tx: tx.scalar(text("SELECT count(*) FROM vectors")))
        await store.close()
        return int(found or 0)


@pytest.fixture
async def place(request: pytest.FixtureRequest, tmp_path: Path, deployment: Deployment) -> AsyncIterator[Place]:
    """The policy recalls of itself, or as the parameter says; the model calls what ``recalls`` has, else it answers."""
    meaning, recalls = Meaning(), list[SimulatedAnswer]()

    def answer(_: Request) -> SimulatedAnswer:
        return recalls.pop(0) if recalls else SimulatedAnswer(text="Understood.")

    async with (
        serve_simulator(SimulatorSettings(window=WINDOW, answer=answer), counter=COUNTER) as simulator,
        serve(meaning) as server,
    ):
        yaml = CONFIG.replace("URL", simulator.base_url).replace("PORT", str(server.port))
        yaml = yaml.replace("RECALL", getattr(request, "param", OF_ITSELF))
        yield Place(simulator, meaning, yaml, tmp_path, deployment, recalls)


async def evicted(target: InTurns, place: Place) -> Talk:
    """A conversation whose word on the automobile is out of the window."""
    talk = Talk(target.client(default_headers={"x-weir-conversation": "trip"}), opening())
    talk.messages += tool_step(900, text=SAID + " " + "Nothing else of note. " * 100)
    while not talk.headers or talk.actions()[-1] == "none":
        await talk.agent(1)
    await target.settled()
    assert SAID not in json.dumps(arrays_of(answered(place.simulator))[-1])
    talk.messages += [{"role": "assistant", "content": "So far."}, ASKED]
    return talk


@SHARED
@pytest.mark.requirement("A4.25")
async def test_a_question_in_other_words_brings_back_what_was_said_after_a_restart_too(place: Place) -> None:
    async with place.serve() as target:
        talk = await evicted(target, place)
    assert await place.vectors() > 0
    async with place.serve() as target:
        talk.client = target.client(default_headers={"x-weir-conversation": "trip"})
        await talk.ask(tools=TOOLS)
        sent = arrays_of(answered(place.simulator))[-1]
        assert SAID in json.dumps(sent)
        assert sent[-1] == ASKED
        assert place.meaning.asked[-1] == [ASKED["content"]]
        async with httpx.AsyncClient() as http:
            mine = {"authorization": "Bearer sk-test"}
            gone = await http.delete(f"{target.root()}/weir/conversations/trip", headers=mine)
    assert gone.status_code < 300
    assert await place.vectors() == 0


@pytest.mark.requirement("A4.25", "P6")
async def test_an_endpoint_that_fails_costs_nobody_an_answer(place: Place) -> None:
    place.meaning.fails = True
    async with place.serve() as target:
        talk = await evicted(target, place)
        await talk.ask(tools=TOOLS)
    assert place.meaning.asked
    assert await place.vectors() == 0
    assert {s.status for s in answered(place.simulator)} == {200}
    assert SAID not in json.dumps(arrays_of(answered(place.simulator))[-1])
