"""A recording played against the simulator, each request once directly and once through a real Weir.

Closed loop: whatever the simulator says, the recorded answer becomes the history of the next request.
"""

import json
import statistics
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from proxy.app import create_app
from proxy.cli.recording import Recording
from proxy.config import Config, Flags, load_config
from proxy.server import serve
from proxy.simulator import RunningSimulator, Seen, SimulatorSettings, serve_simulator
from proxy.telemetry import Telemetry, TelemetrySettings
from proxy.tokenizer import Tokenizer

MODEL = "sim"
SUMMARIZER = "sim-summarizer"
MAX_TOKENS = 512
ENCODING = "o200k_base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """What is to be played: how many requests of the recording, in which window, managed how."""

    recording: Recording
    steps: int
    window: int
    store: Path
    policy: str | None = None
    summarizer: bool = False

    @property
    def url(self) -> str:
        """The database that Weir writes."""
        return f"sqlite+aiosqlite:///{self.store}"

    def config_for(self, upstream: str) -> Config:
        """Weir's configuration in front of ``upstream``; the environment has no say in it."""
        flags = Flags(
            upstream=upstream,
            window=self.window,
            store=self.url,
            policy=self.policy,
            summarizer=SUMMARIZER if self.summarizer else None,
        )
        return load_config(None, env={}, flags=flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request as the simulator met it, and its answer.

    ``tokens`` are those of the prompt that arrived (0 if none did), ``code`` and ``message`` the error's; ``stable``
    is whether it began with the one before; ``visible`` counts the literals that stood in it, of ``needed``.
    """

    tokens: int
    prompt: int = 0
    cached: int = 0
    code: str | None = None
    message: str = ""
    stable: bool = True
    visible: int = 0
    needed: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether there was an answer."""
        return self.code is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One moment at which Weir changed what it had been forwarding."""

    request: int
    before: int
    after: int
    actions: str


@dataclass(slots=True)
class Tally:
    """What one side has come to so far."""

    requests: int = 0
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    cached: int = 0
    largest: int = 0
    visible: int = 0
    needed: int = 0
    last: Sent = field(default_factory=lambda: Sent(tokens=0))

    def add(self, sent: Sent) -> None:
        """Count one request."""
        self.last = sent
        self.requests += 1
        self.needed += sent.needed
        if sent.code is not None:
            self.refused[sent.code] += 1
            return
        self.answered += 1
        self.tokens += sent.prompt
        self.cached += sent.cached
        self.largest = max(self.largest, sent.prompt)
        self.visible += sent.visible

    @property
    def reuse(self) -> float:
        """Cached over prompt tokens as the simulator reported them, 0 without an answer."""
        return self.cached / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Result:
    """Both sides, and what Weir did; ``conversation`` is the name it gave, empty where it kept none."""

    direct: Tally = field(default_factory=Tally)
    managed: Tally = field(default_factory=Tally)
    batches: list[Batch] = field(default_factory=list)
    summaries: int = 0
    summary_tokens: int = 0
    overheads: list[float] = field(default_factory=list)
    conversation: str = ""

    @property
    def overhead(self) -> float:
        """Milliseconds that a request spent in Weir before it was sent on, median."""
        return statistics.median(self.overheads) if self.overheads else 0.0


class Side:
    """One of the two ways to the simulator: a client of its own, and what arrived from it."""

    def __init__(self, client: openai.AsyncOpenAI, simulator: RunningSimulator) -> None:
        self._client = client
        self._simulator = simulator
        self._seen = 0
        self._before: list[Any] = []

    async def send(self, messages: list[dict[str, Any]], *, tools: list[Any], needed: tuple[str, ...]) -> Sent:
        """What became of one request; an error is an outcome too."""
        given: Any = messages
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=MODEL, messages=given, tools=tools, max_tokens=MAX_TOKENS
            )
            usage = raw.parse().usage
        except openai.APIStatusError as error:
            code, message = _fault(error)
            return Sent(tokens=self._arrived(), code=code, message=message, needed=len(needed))
        except openai.APIConnectionError as error:
            return Sent(tokens=0, code="connection_error", message=str(error), needed=len(needed))
        details = usage.prompt_tokens_details if usage is not None else None
        tokens, body, before = self._arrived(), self._body(), self._before
        text = json.dumps(body, ensure_ascii=False)
        self._before = body
        return Sent(
            tokens=tokens,
            prompt=usage.prompt_tokens if usage is not None else tokens,
            cached=(details.cached_tokens or 0) if details is not None else 0,
            stable=body[: len(before)] == before,
            visible=sum(value in text for value in needed),
            needed=len(needed),
            headers={name.lower(): value for name, value in raw.headers.items()},
        )

    def _entries(self) -> list[Seen]:
        return [seen for seen in self._simulator.answered() if seen.model == MODEL]

    def _arrived(self) -> int:
        entries = self._entries()
        fresh, self._seen = len(entries) > self._seen, len(entries)
        return entries[-1].prompt_tokens if fresh else 0

    def _body(self) -> list[Any]:
        body: list[Any] = json.loads(self._entries()[-1].body)["messages"]
        return body


class Playback:
    """Both sides over one recording; :meth:`step` plays the next request on each."""

    def __init__(self, show: Demonstration, *, direct: Side, managed: Side, simulator: RunningSimulator) -> None:
        self._show = show
        self._direct = direct
        self._managed = managed
        self._simulator = simulator
        self.result = Result()

    async def step(self, number: int) -> Batch | None:
        """Play request ``number`` (from 1) on both sides; the batch of edits that it brought, if any."""
        recording, result = self._show.recording, self.result
        index = recording.requests[number - 1]
        messages, tools = list(recording.messages[:index]), list(recording.tools)
        needed = recording.literals.get(index, ())
        result.direct.add(await self._direct.send(messages, tools=tools, needed=needed))
        sent = await self._managed.send(messages, tools=tools, needed=needed)
        result.managed.add(sent)
        asked = [seen for seen in self._simulator.answered() if seen.model == SUMMARIZER]
        result.summaries, result.summary_tokens = len(asked), sum(seen.prompt_tokens for seen in asked)
        if sent.answered:
            result.overheads.append(float(sent.headers["x-weir-overhead-ms"]))
            result.conversation = sent.headers.get("x-weir-conversation", result.conversation)
        if sent.stable:
            return None
        tokens = dict(part.split("=") for part in sent.headers["x-weir-tokens"].split(";"))
        batch = Batch(
            request=number,
            before=int(tokens["before"]),
            after=int(tokens["after"]),
            actions=sent.headers["x-weir-actions"],
        )
        result.batches.append(batch)
        return batch


@asynccontextmanager
async def playing(show: Demonstration) -> AsyncIterator[Playback]:
    """A simulator, a Weir in front of a second one, and a client of each; all of it ends with the block.

    Two simulators, so that neither side finds the other's prompts in the cache.
    """
    tokenizer = Tokenizer()
    counter = tokenizer.counter(ENCODING)
    settings = SimulatorSettings(window=show.window, models=(MODEL,), summary_model=SUMMARIZER)
    async with AsyncExitStack() as stack:
        stack.callback(tokenizer.close)
        alone = await stack.enter_async_context(serve_simulator(settings, counter=counter))
        behind = await stack.enter_async_context(serve_simulator(settings, counter=counter))
        app = create_app(
            show.config_for(behind.base_url), telemetry=Telemetry.create(TelemetrySettings()), tokenizer=tokenizer
        )
        server = await stack.enter_async_context(serve(app))
        clients = [
            await stack.enter_async_context(_client(base))
            for base in (alone.base_url, f"http://127.0.0.1:{server.port}/v1")
        ]
        yield Playback(show, direct=Side(clients[0], alone), managed=Side(clients[1], behind), simulator=behind)


def _client(base_url: str) -> openai.AsyncOpenAI:
    """The SDK as anybody uses it, without retries and without the environment's HTTP proxies."""
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key="sk-demo",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


def _fault(error: openai.APIStatusError) -> tuple[str, str]:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("code") or f"status_{error.status_code}"), str(body.get("message") or error)
