"""The demo's recording played against the simulator, each request once directly and once through a real Weir.

Closed loop: whatever the simulator says, the recorded answer becomes the history of the next request.
"""

import json
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import openai

from proxy.app import create_app
from proxy.config import Config, Flags, load_config
from proxy.replay import Recording, read_recordings
from proxy.server import serve
from proxy.simulator import RecordedRequest, RunningSimulator, SimulatorSettings, serve_simulator
from proxy.telemetry import OtelSettings, Telemetry
from proxy.wire.tokenizer import Tokenizer

MODEL = "sim"
SUMMARIZER = "sim-summarizer"
MAX_TOKENS = 512
ENCODING = "o200k_base"


def load_recording() -> Recording:
    """The agent run that ships with Weir; NOTICE.md beside it says where it is from."""
    with as_file(files("proxy.cli").joinpath("data", "recorded_run.jsonl")) as path:
        return next(read_recordings(path)).recording


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
class DemoAnswer:
    """What became of one request.

    ``tokens`` are those of the prompt that arrived (0 if none did), ``code`` and ``message`` the error's; ``stable``
    is whether it began with the one before; ``visible`` counts the values that stood in it, of ``needed``.
    """

    tokens: int
    prompt: int = 0
    cached: int = 0
    code: str | None = None
    message: str = ""
    stable: bool = True
    visible: int = 0
    needed: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)

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
class SideTotals:
    """What one side has come to so far."""

    requests: int = 0
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    cached: int = 0
    largest: int = 0
    visible: int = 0
    needed: int = 0
    last: DemoAnswer = field(default_factory=lambda: DemoAnswer(tokens=0))

    def add(self, answer: DemoAnswer) -> None:
        """Count one request."""
        self.last = answer
        self.requests += 1
        self.needed += answer.needed
        if answer.code is not None:
            self.refused[answer.code] += 1
            return
        self.answered += 1
        self.tokens += answer.prompt
        self.cached += answer.cached
        self.largest = max(self.largest, answer.prompt)
        self.visible += answer.visible

    @property
    def reuse(self) -> float:
        """Cached over prompt tokens as the simulator reported them, 0 without an answer."""
        return self.cached / self.tokens if self.tokens else 0.0


class Side:
    """One of the two ways to a simulator: a client of its own, what arrived from it, and its totals."""

    def __init__(self, client: openai.AsyncOpenAI, simulator: RunningSimulator) -> None:
        self.totals = SideTotals()
        self._client = client
        self._simulator = simulator
        self._seen = 0
        self._before: list[Any] = []

    async def send(self, messages: list[Any], *, tools: Any, needed: tuple[str, ...]) -> DemoAnswer:
        """What became of one request; an error is an outcome too."""
        answer = await self._send(messages, tools, needed)
        self.totals.add(answer)
        return answer

    async def _send(self, messages: list[Any], tools: Any, needed: tuple[str, ...]) -> DemoAnswer:
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=MODEL, messages=messages, tools=tools, max_tokens=MAX_TOKENS
            )
            usage = raw.parse().usage
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            code = str(body.get("code") or f"status_{error.status_code}")
            said = str(body.get("message") or error)
            return DemoAnswer(tokens=self._arrived(), code=code, message=said, needed=len(needed))
        except openai.APIConnectionError as error:
            return DemoAnswer(tokens=0, code="connection_error", message=str(error), needed=len(needed))
        details = usage.prompt_tokens_details if usage is not None else None
        tokens, before = self._arrived(), self._before
        self._before = body = json.loads(self.seen(MODEL)[-1].body)["messages"]
        text = json.dumps(body, ensure_ascii=False)
        return DemoAnswer(
            tokens=tokens,
            prompt=usage.prompt_tokens if usage is not None else tokens,
            cached=(details.cached_tokens or 0) if details is not None else 0,
            stable=body[: len(before)] == before,
            visible=sum(value in text for value in needed),
            needed=len(needed),
            headers={name.lower(): value for name, value in raw.headers.items()},
        )

    def seen(self, model: str) -> list[RecordedRequest]:
        """The requests for a model that the simulator has answered."""
        return [seen for seen in self._simulator.answered() if seen.model == model]

    def _arrived(self) -> int:
        """Tokens of the prompt that has just arrived, 0 if none did."""
        entries = self.seen(MODEL)
        fresh, self._seen = len(entries) > self._seen, len(entries)
        return entries[-1].prompt_tokens if fresh else 0


class Playback:
    """Both sides over one recording, and what Weir did; ``conversation`` is the name it gave, empty for none."""

    def __init__(self, show: Demonstration, *, direct: Side, managed: Side) -> None:
        self.show = show
        self.direct = direct
        self.managed = managed
        self.batches: list[Batch] = []
        self.summaries = self.summary_tokens = 0
        self.conversation = ""
        self._overheads: list[float] = []

    @property
    def overhead(self) -> float:
        """Milliseconds that a request spent in Weir before it was sent on, median."""
        return statistics.median(self._overheads) if self._overheads else 0.0

    async def step(self, number: int) -> Batch | None:
        """Play request ``number`` (from 1) on both sides; the batch of edits that it brought, if any."""
        recording = self.show.recording
        index = recording.requests[number - 1]
        messages, tools = list(recording.values[:index]), recording.tools
        needed = tuple(value for fact in recording.facts if index in fact.needed_at for value in fact.needles)
        await self.direct.send(messages, tools=tools, needed=needed)
        answer = await self.managed.send(messages, tools=tools, needed=needed)
        asked = self.managed.seen(SUMMARIZER)
        self.summaries, self.summary_tokens = len(asked), sum(seen.prompt_tokens for seen in asked)
        if answer.answered:
            self._overheads.append(float(answer.headers["x-weir-overhead-ms"]))
            self.conversation = answer.headers.get("x-weir-conversation", self.conversation)
        if answer.stable:
            return None
        tokens = dict(part.split("=") for part in answer.headers["x-weir-tokens"].split(";"))
        actions = answer.headers["x-weir-actions"]
        batch = Batch(request=number, before=int(tokens["before"]), after=int(tokens["after"]), actions=actions)
        self.batches.append(batch)
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
        telemetry = Telemetry.create(OtelSettings())
        app = create_app(show.config_for(behind.base_url), telemetry=telemetry, tokenizer=tokenizer)
        server = await stack.enter_async_context(serve(app))
        direct = Side(await stack.enter_async_context(_client(alone.base_url)), alone)
        weir = f"http://127.0.0.1:{server.port}/v1"
        managed = Side(await stack.enter_async_context(_client(weir)), behind)
        yield Playback(show, direct=direct, managed=managed)


def _client(base_url: str) -> openai.AsyncOpenAI:
    """The SDK as anybody uses it, without retries and without the environment's HTTP proxies."""
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key="sk-demo",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )
