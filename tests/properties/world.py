"""A script played against a served Weir and a strict upstream, and all that was seen of it.

What a client sent, what the upstream received and counted, and what Weir's API says of it are kept for the promises.
"""

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.functional.harness import COUNTER, RunningWeir, weir
from tests.properties.clients import JSON, PATHS, Client, Line, array_of, texts_of
from tests.properties.scripts import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Begin,
    Delete,
    Fork,
    Model,
    Note,
    Restart,
    Rewind,
    Script,
    Side,
    Step,
    Switch,
    Talk,
    Work,
    written,
)
from tests.upstream import Dialect, RecordedRequest, RunningSimulator, SimulatorSettings, serve_simulator
from tests.upstream.chat import SimulatedChat
from tests.upstream.messages import SimulatedMessages
from tests.upstream.model import Surface
from tests.upstream.responses import SimulatedResponses

SURFACES: Mapping[str, Callable[..., Surface]] = {
    CHAT: SimulatedChat,
    RESPONSES: SimulatedResponses,
    MESSAGES: SimulatedMessages,
}
KEY = "sk-first-0123456789abcdef"
OTHER_KEY = "sk-other-0123456789abcdef"
MANY_ROWS = 500
REPLY = "I have read that, and go on."
QUESTION = "Say in five words what was done so far."
REF = re.compile(r"\b[0-9a-f]{12}\b")
_COUNTS = re.compile(r"before=~?(\d+);after=~?(\d+);limit=(\d+)")


@dataclass(kw_only=True)
class Exchange:
    """One request of a client: what was sent, what came back, and what reached the upstream.

    Attributes:
        lines: what is said in it, the note in its place.
        tokens: what the upstream counts of the client's own bytes.
        taken: whether the upstream takes the client's own bytes.
        least: tokens of its system prompt, tools, task, newest user text and what no model has read.
        received: what the upstream was sent for it, attempts that it refused as well.
        compared: the same client's exchange before it, where this one only adds to it at the end, in the same model.
        cpu: seconds of this process from the first byte to the answer's last.
    """

    step: int
    client: int
    endpoint: str
    model: int
    name: str | None
    lines: tuple[Line, ...]
    system: str
    sent: bytes
    tokens: int
    answer: int | None
    taken: bool
    least: int
    is_side: bool
    floats: bool
    status: int = 0
    said: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    received: tuple[RecordedRequest, ...] = ()
    compared: "Exchange | None" = None
    deleted: bool = False
    cpu: float = 0.0

    def __str__(self) -> str:
        shown = {k: v for k, v in self.headers.items() if k.startswith("x-weir-") and "overhead" not in k}
        side = ", a side request" if self.is_side else ""
        up = [f"{each.status} {each.prompt_tokens} tokens" for each in self.received]
        return (
            f"step {self.step}, client {self.client} ({self.endpoint}, model {self.model}{side}): {len(self.lines)} "
            f"messages, {self.tokens} tokens as the upstream counts, max_tokens {self.answer}; "
            f"status {self.status} {shown}; upstream {up}{f'; {self.said}' if self.status != 200 else ''}"
        )

    @property
    def echoed(self) -> str | None:
        """The conversation that Weir's answer names."""
        return self.headers.get("x-weir-conversation")

    @property
    def forwarded(self) -> RecordedRequest | None:
        """What the upstream answered, None where nothing came that far."""
        return self.received[-1] if self.status == 200 and self.received else None

    @property
    def counts(self) -> tuple[int, int, int] | None:
        """Tokens before and after, and the limit, as the answer's header says them."""
        found = _COUNTS.match(self.headers.get("x-weir-tokens", ""))
        return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


@dataclass
class World:
    """What there is while a script is played."""

    script: Script
    folder: Path
    upstream: RunningSimulator
    running: RunningWeir
    stack: AsyncExitStack
    http: httpx.AsyncClient
    clients: list[Client] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    latest: dict[tuple[int, int], Exchange] = field(default_factory=dict)
    said: int = 0
    step: int = 0
    blobs: dict[str, str] = field(default_factory=dict)
    harmed: list[str] = field(default_factory=list)

    # -- what the script says --------------------------------------------------------------------------------------

    async def play(self, step: Step) -> list[Exchange]:
        """Play one step; the exchanges that it made come back."""
        before = len(self.exchanges)
        match step:
            case Begin():
                self._begin(step)
            case Restart():
                await self._restart()
            case Talk() | Work():
                await self._say(self._client(step.client), step)
            case Side():
                client = self._client(step.client)
                await self._send(client, self._model(step.model), question=QUESTION)
            case Switch():
                self._client(step.client).model = self._model(step.model)
            case Rewind():
                client = self._client(step.client)
                client.rewind(step.turns)
                self._forget(client)
            case Fork():
                client = self._client(step.client)
                self.clients.append(client.forked(len(self.clients), step.name))
            case Note():
                client = self._client(step.client)
                client.distance = step.distance
                self._forget(client)
            case Delete():
                await self._delete(self._client(step.client))
        await self.running.stored()
        self.step += 1
        return self.exchanges[before:]

    def _client(self, number: int) -> Client:
        return self.clients[number % len(self.clients)]

    def _model(self, number: int) -> int:
        return number % len(self.script.models)

    def _size(self, model: int, share: float, most: int) -> int:
        return min(most, max(8, round(share * self.script.models[model].window))) if share else 0

    def _begin(self, step: Begin) -> None:
        model = self._model(step.model)
        most = 8 * self.script.longest
        system = written("prose", self._size(model, step.system, most), 1_000_000 + step.opening)
        task = written("prose", self._size(model, step.task, most), 2_000_000 + step.opening)
        lines = [Line("user", task)]
        self.clients.append(Client(step, len(self.clients), model, system, lines, name=step.name))

    async def _say(self, client: Client, step: Talk | Work) -> None:
        for _ in range(step.turns):
            self.said += 1
            text = written(step.kind, self._size(client.model, step.size, self.script.longest), self.said)
            if isinstance(step, Work):
                client.lines += [Line("call", "", self.said), Line("result", text, self.said)]
                await self._send(client, client.model)
            else:
                if client.lines[-1].role == "result":
                    client.lines.append(Line("assistant", f"{REPLY} {self.said}"))
                client.lines.append(Line("user", text))
                await self._send(client, client.model)
                client.lines.append(Line("assistant", f"{REPLY} {self.said}"))

    def _forget(self, client: Client) -> None:
        for key in [each for each in self.latest if each[0] == client.number]:
            del self.latest[key]

    async def _restart(self) -> None:
        await self.stack.aclose()
        self.running = await self.stack.enter_async_context(_weir(self.script, self.folder, self.upstream))

    # -- requests --------------------------------------------------------------------------------------------------

    async def _send(self, client: Client, model: int, *, question: str | None = None) -> None:
        window = self.script.models[model].window
        body = client.body(f"m{model}", window, question=question)
        tokens, answer, taken = self._judged(client.endpoint, body, window)
        least, _, _ = self._judged(client.endpoint, client.least(question).body(f"m{model}", window), window)
        exchange = Exchange(
            step=self.step,
            client=client.number,
            endpoint=client.endpoint,
            model=model,
            name=client.name,
            lines=tuple(client.sent(question)),
            system=client.system,
            sent=body,
            tokens=tokens,
            answer=answer,
            taken=taken,
            least=least,
            is_side=question is not None,
            floats=client.distance is not None,
            compared=self.latest.get((client.number, model)),
        )
        self.exchanges.append(exchange)
        self.upstream.forget()
        named = {} if client.name is None else {"x-weir-conversation": client.name}
        url = f"{self.running.root}{PATHS[client.endpoint]}"
        begun = time.process_time()
        received = await self.http.post(url, content=body, headers={**_headers(KEY), **named})
        exchange.cpu = time.process_time() - begun
        exchange.status = received.status_code
        exchange.headers = received.headers
        exchange.said = received.text[:600] if received.status_code != 200 else ""
        exchange.received = tuple(self.upstream.answered())
        if question is None:
            self.latest[client.number, model] = exchange

    def _judged(self, endpoint: str, body: bytes, window: int) -> tuple[int, int | None, bool]:
        """Tokens of a request, its ``max_tokens``, and whether the upstream takes it as it is."""
        simulator = self.upstream.simulator
        surface = SURFACES[endpoint](simulator.settings, simulator.model.counter)
        request = json.loads(body)
        tokens = surface.tokens(request)
        answer = request.get("max_tokens", request.get("max_output_tokens"))
        least = max(1, answer or 1) if self.script.counts_answer else 1
        return tokens, answer, tokens + least <= window

    # -- what Weir's API says --------------------------------------------------------------------------------------

    async def get(self, path: str, *, key: str = KEY) -> httpx.Response:
        return await self.http.get(f"{self.running.root}/weir/{path}", headers=_headers(key))

    async def timeline(self, name: str) -> list[JSON] | None:
        """All rows of a conversation, None where it is not found."""
        answer = await self.get(f"conversations/{name}/timeline?limit={MANY_ROWS}")
        return None if answer.status_code == 404 else list(answer.json()["data"])

    async def removed(self, name: str) -> list[JSON]:
        """What is out of the window, as the API lists it."""
        answer = await self.get(f"conversations/{name}/removed?limit={MANY_ROWS}")
        return list(answer.json()["data"])

    async def blob(self, ref: str) -> str | None:
        """What an archived message says, None where there is none."""
        found: list[str] = []
        cursor: str | None = "0"
        while cursor is not None:
            page = await self.get(f"blobs/{ref}.txt?cursor={cursor}")
            if page.status_code == 404:
                return None
            found.append(page.text)
            cursor = page.headers.get("x-weir-cursor")
        return "".join(found)

    async def archived(self, name: str, said: str) -> dict[str, str]:
        """What the removed messages of a conversation say, and those that ``said`` names, by their refs."""
        refs = [*(row["ref"] for row in await self.removed(name)), *REF.findall(said)]
        for ref in dict.fromkeys(refs):
            if ref not in self.blobs:
                text = await self.blob(ref)
                self.blobs |= {ref: text} if text is not None else {}
        return {ref: self.blobs[ref] for ref in refs if ref in self.blobs}

    def echoed(self) -> dict[str, list[Exchange]]:
        """The exchanges by the conversation that their answers named, without deleted ones."""
        found: dict[str, list[Exchange]] = {}
        for each in self.exchanges:
            if each.echoed is not None and not each.deleted:
                found.setdefault(each.echoed, []).append(each)
        return found

    async def _delete(self, client: Client) -> None:
        own = [each for each in self.exchanges if each.client == client.number and not each.deleted]
        name = own[-1].echoed if own else None
        if name is None:
            return  # nothing of it is left to be deleted
        others = [each for each in self.echoed() if each != name]
        before = {each: await self.timeline(each) for each in others}
        answer = await self.http.delete(f"{self.running.root}/weir/conversations/{name}", headers=_headers(KEY))
        if answer.status_code != 200:
            self.harmed.append(f"DELETE of {name} is answered {answer.status_code}")
        gone = await self.timeline(name)
        if gone is not None:
            self.harmed.append(f"{name} is still found with {len(gone)} rows after it was deleted")
        for other in others:
            if await self.timeline(other) != before[other]:
                self.harmed.append(f"the deletion of {name} changed the rows of {other}")
        for each in self.exchanges:
            if each.echoed == name:
                each.deleted = True
        self.latest = {key: each for key, each in self.latest.items() if not each.deleted}

    def model_of(self, exchange: Exchange) -> Model:
        return self.script.models[exchange.model]


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


def forwarded_array(exchange: Exchange) -> list[Any]:
    assert exchange.forwarded is not None
    return array_of(exchange.forwarded.body)


def forwarded_texts(exchange: Exchange) -> Iterator[str]:
    assert exchange.forwarded is not None
    return texts_of(json.loads(exchange.forwarded.body))


@asynccontextmanager
async def _weir(script: Script, folder: Path, upstream: RunningSimulator) -> AsyncIterator[RunningWeir]:
    known = [
        f"  - {{match: m{number}, window: {model.known}}}"
        for number, model in enumerate(script.models)
        if model.known is not None
    ]
    models = "\n".join(["models:", *known]) if known else ""
    yaml = f"upstreams: {{main: {{base_url: '{upstream.base_url}', api_key: pass}}}}\n{models}\n"
    async with weir(upstream.base_url, folder / "weir.db", yaml=yaml, folder=folder, window=None) as running:
        yield running


@asynccontextmanager
async def opened(script: Script, folder: Path) -> AsyncIterator[World]:
    """A Weir in front of an upstream with the script's models; nothing was said yet."""
    windows = {f"m{number}": model.window for number, model in enumerate(script.models)}
    settings = SimulatorSettings(
        dialect=Dialect.VLLM,
        windows=windows,
        models=tuple(windows),
        tells_window=False,
        stops_at_window=not script.counts_answer,
    )
    async with (
        serve_simulator(settings, counter=COUNTER) as upstream,
        httpx.AsyncClient(timeout=120) as http,
        AsyncExitStack() as stack,
    ):
        running = await stack.enter_async_context(_weir(script, folder, upstream))
        yield World(script, folder, upstream, running, stack, http)
