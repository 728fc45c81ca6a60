"""``weir demo``: a recorded agent run in a small window, without and with Weir.

Each request of the recording is played against the simulator, once directly and once through a real
Weir. Closed loop: whatever the simulator says, the recorded answer becomes the history of the next
request.
"""

import asyncio
import json
import logging
import shlex
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import click
import openai
from openai.types import CompletionUsage
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from proxy.app import create_app
from proxy.cli import Failure
from proxy.cli.conversations import removed_from
from proxy.cli.output import console, print_line, print_table
from proxy.cli.shared import json_option, opened, print_json, removed_json, removed_line
from proxy.config.file import ConfigError
from proxy.config.loading import load_config
from proxy.config.values import Config, Flags
from proxy.features.replay.script import Recording, read_recordings
from proxy.server import serve
from proxy.simulator import Received, RunningSimulator, SimulatorSettings, serve_simulator
from proxy.store.records import RemovedRow
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.wire.counting import Tokenizer

MODEL = "sim"
NAME = "demo"
DIRECT = "without Weir"
MANAGED = "with Weir"
MAX_TOKENS = 512
ENCODING = "o200k_base"


def load_recording() -> Recording:
    with as_file(files("proxy.cli").joinpath("data", "recorded_run.jsonl")) as path:
        return next(read_recordings(path)).recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    recording: Recording
    steps: int
    window: int
    store: Path
    policy: str | None = None

    @property
    def url(self) -> str:
        return f"sqlite+aiosqlite:///{self.store}"

    def config_for(self, upstream: str) -> Config:
        flags = Flags(
            upstream=upstream,
            window=self.window,
            store=self.url,
            policy=self.policy,
        )
        return load_config(None, env={}, flags=flags)


@dataclass(slots=True)
class Side:
    """The requests that are sent one way, and what they add up to: tokens and values only of those
    answered.

    Of the last one, ``arrived`` are the tokens of the prompt that arrived (0 if none did), ``code``
    and ``message`` the error's; ``headers`` are those of the last answer, and ``stable`` is whether
    its prompt began with the one before.
    """

    name: str
    client: openai.AsyncOpenAI
    simulator: RunningSimulator
    requests: int = 0
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    cached: int = 0
    largest: int = 0
    visible: int = 0
    needed: int = 0
    arrived: int = 0
    code: str | None = None
    message: str = ""
    stable: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    _seen: int = 0
    _before: list[Any] = field(default_factory=list)

    @property
    def reuse(self) -> float:
        return self.cached / self.tokens if self.tokens else 0.0

    async def send(self, messages: list[Any], tools: Any, needed: tuple[str, ...]) -> None:
        self.requests += 1
        self.needed += len(needed)
        try:
            raw = await self.client.chat.completions.with_raw_response.create(
                model=MODEL, messages=messages, tools=tools, max_tokens=MAX_TOKENS
            )
            usage = raw.parse().usage
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            code = str(body.get("code") or f"status_{error.status_code}")
            self._refuse(code, str(body.get("message") or error), arrived=self._arrived())
        except openai.APIConnectionError as error:
            self._refuse("connection_error", str(error), arrived=0)
        else:
            assert usage is not None  # noqa: S101 - the simulator reports it
            self._count(usage, needed, raw.headers)

    def _refuse(self, code: str, message: str, *, arrived: int) -> None:
        self.refused[code] += 1
        self.code = code
        self.message = message
        self.arrived = arrived

    def _count(
        self, usage: CompletionUsage, needed: tuple[str, ...], headers: Mapping[str, str]
    ) -> None:
        before = self._before
        self._before = body = json.loads(self.received[-1].body)["messages"]
        text = json.dumps(body, ensure_ascii=False)
        details = usage.prompt_tokens_details
        self.answered += 1
        self.tokens += usage.prompt_tokens
        self.cached += (details.cached_tokens or 0) if details is not None else 0
        self.largest = max(self.largest, usage.prompt_tokens)
        self.visible += sum(value in text for value in needed)
        self.code = None
        self.arrived = self._arrived()
        self.headers = headers
        self.stable = body[: len(before)] == before

    @property
    def received(self) -> Sequence[Received]:
        return self.simulator.simulator.received

    def _arrived(self) -> int:
        is_new = len(self.received) > self._seen
        self._seen = len(self.received)
        return self.received[-1].prompt_tokens if is_new else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    request: int
    before: int
    after: int
    actions: str


@dataclass(slots=True)
class Playback:
    show: Demonstration
    direct: Side
    managed: Side
    batches: list[Batch] = field(default_factory=list)
    conversation: str = ""
    _overheads: list[float] = field(default_factory=list)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.direct, self.managed

    @property
    def overhead(self) -> float:
        return statistics.median(self._overheads) if self._overheads else 0.0

    async def step(self, number: int) -> Batch | None:
        recording = self.show.recording
        index = recording.requests[number - 1]
        messages = list(recording.values[:index])
        tools = recording.tools
        needed = tuple(
            value for fact in recording.facts if index in fact.needed_at for value in fact.needles
        )
        for side in self.sides:
            await side.send(messages, tools, needed)
        headers = self.managed.headers
        if self.managed.code is not None:
            return None
        self._overheads.append(float(headers["x-weir-overhead-ms"]))
        self.conversation = headers.get("x-weir-conversation", self.conversation)
        if self.managed.stable:
            return None
        tokens = dict(
            part.split("=") for part in headers["x-weir-tokens"].replace("~", "").split(";")
        )
        actions = headers["x-weir-actions"]
        batch = Batch(
            request=number,
            before=int(tokens["before"]),
            after=int(tokens["after"]),
            actions=actions,
        )
        self.batches.append(batch)
        return batch


@asynccontextmanager
async def playing(show: Demonstration) -> AsyncIterator[Playback]:
    """A simulator, a Weir in front of a second one, and a client of each; all of them end with the
    block.

    Two simulators, so that neither side finds the other's prompts in the cache.
    """
    tokenizer = Tokenizer()
    counter = tokenizer.counter(ENCODING)
    settings = SimulatorSettings(window=show.window, models=(MODEL,))
    async with AsyncExitStack() as stack:
        stack.callback(tokenizer.close)
        alone = await stack.enter_async_context(serve_simulator(settings, counter=counter))
        behind = await stack.enter_async_context(serve_simulator(settings, counter=counter))
        telemetry = Telemetry.create(OtelSettings())
        app = create_app(show.config_for(behind.base_url), telemetry=telemetry, tokenizer=tokenizer)
        server = await stack.enter_async_context(serve(app))
        direct = Side(DIRECT, await stack.enter_async_context(_client(alone.base_url)), alone)
        weir = f"http://127.0.0.1:{server.port}/v1"
        named = {"x-weir-conversation": NAME}
        managed = Side(MANAGED, await stack.enter_async_context(_client(weir, named)), behind)
        yield Playback(show, direct, managed)


def _client(base_url: str, headers: Mapping[str, str] = {}) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key="sk-demo",
        max_retries=0,
        default_headers=headers,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


PAUSE = 0.1
PLAIN_EVERY = 10
BAR_WIDTH = 14
ROWS: tuple[tuple[str, Callable[[Side], str]], ...] = (
    ("requests answered", lambda side: f"{side.answered} of {side.requests}"),
    (
        "refused",
        lambda side: ", ".join(f"{count} {code}" for code, count in side.refused.items()) or "0",
    ),
    ("tokens sent in answered requests", lambda side: f"{side.tokens:,}"),
    ("largest of them", lambda side: f"{side.largest:,}"),
    ("prefix reuse (cached / sent tokens)", lambda side: f"{side.reuse:.1%}"),
    ("values that tool calls needed, seen", lambda side: f"{side.visible} of {side.needed}"),
)

View = Callable[[int, Batch | None], None]


@click.command()
@click.option(
    "--window", type=click.IntRange(min=1024), default=8192, help="The model's window, tokens."
)
@click.option(
    "--steps", type=click.IntRange(min=1), help="How many requests to play; defaults to all."
)
@click.option("--policy", help="A preset, see `weir policy list`; defaults to the default policy.")
@click.option("--fast", is_flag=True, help="Do not pause between requests.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep Weir's database in this file.",
)
@json_option
def demo(
    *,
    window: int,
    steps: int | None,
    policy: str | None,
    fast: bool,
    keep: Path | None,
    as_json: bool,
) -> int:
    """Play a recorded agent run through the openai SDK, with and without Weir; needs no key and no
    network.

    Every request is sent once directly to a simulated model with a small window and once through a
    real Weir in front of it. Exits with 1 if a request through Weir was not answered.

    \b
    Example:
      weir demo
      weir demo --window 6000 --policy balanced --fast --json
    """
    if keep is not None and keep.exists():
        raise click.BadParameter(f"{keep} exists already; name a new file", param_hint="--keep")
    if keep is not None and not keep.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {keep.parent}", param_hint="--keep")
    recording = load_recording()
    with _database(keep) as file:
        show = Demonstration(
            recording=recording,
            steps=min(steps or len(recording.requests), len(recording.requests)),
            window=window,
            store=file,
            policy=policy,
        )
        screen = Console(stderr=True, highlight=False) if as_json else console()
        pause = 0.0 if fast or not screen.is_terminal else PAUSE
        try:
            played, gone = asyncio.run(_play(show, screen, pause=pause))
        except ConfigError as fault:
            raise Failure(fault.problems[0]) from fault
    if as_json:
        print_json(_report(played, gone))
    else:
        _print_end(played, gone)
    return 0 if played.managed.answered == show.steps else 1


@contextmanager
def _database(keep: Path | None) -> Iterator[Path]:
    """A new file's path; a folder made for it stays for `weir conversations`, unless the demo
    breaks off.
    """
    if keep is not None:
        yield keep.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="weir-demo-"))
    try:
        yield folder / "weir.db"
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


async def _play(
    show: Demonstration, screen: Console, *, pause: float
) -> tuple[Playback, list[RemovedRow]]:
    async with opened(show.url):  # a fault of the file is reported in one line, not by a server
        pass
    async with playing(show) as played:
        with _view(played, screen) as view, _no_log():
            for number in range(1, show.steps + 1):
                view(number, await played.step(number))
                await asyncio.sleep(pause)
    async with opened(show.url, read_only=True) as store:
        row = await store.conversation(None, played.conversation)
        return played, await removed_from(store, row) if row is not None else []


@contextmanager
def _no_log() -> Iterator[None]:
    logger = logging.getLogger("weir")
    nowhere = logging.NullHandler()
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(nowhere)
    try:
        yield
    finally:
        logger.removeHandler(nowhere)
        logger.propagate = before


@contextmanager
def _view(played: Playback, screen: Console) -> Iterator[View]:
    show = played.show
    screen.print(
        f"{show.steps} requests of a recorded agent run, each sent {DIRECT} and {MANAGED}.\nThe"
        f" model's window is {show.window:,} tokens; each answer may take {MAX_TOKENS} of them.\n",
        soft_wrap=True,
    )
    drawing = (
        Live(console=screen, refresh_per_second=10, transient=True)
        if screen.is_terminal
        else nullcontext()
    )
    with drawing as live:

        def view(number: int, batch: Batch | None) -> None:
            for line in _events(played, number, batch):
                screen.print(Text(line), soft_wrap=live is None)
            if live is not None:
                live.update(_picture(played, number))
            elif number % PLAIN_EVERY == 0 or number == show.steps:
                answered = ", ".join(f"{side.answered} {side.name}" for side in played.sides)
                screen.print(
                    f"request {number:>3} of {show.steps}: answered {answered}", soft_wrap=True
                )

        yield view


def _events(played: Playback, number: int, batch: Batch | None) -> Iterator[str]:
    """The first refusal of each side, and each batch."""
    for side in played.sides:
        if side.code is not None and side.refused.total() == 1:
            yield f"request {number:>3}: {side.name}, refused: {side.code}"
    if batch is not None:
        yield (
            f"request {number:>3}: {MANAGED}, {batch.before:,} > {batch.after:,} tokens"
            f" ({batch.actions})"
        )


def _picture(played: Playback, number: int) -> Group:
    window = played.show.window
    bars = Table.grid(padding=(0, 2))
    for side in played.sides:
        tokens = side.arrived
        colour = "green" if side.code is None else "red"
        bar = ProgressBar(
            total=window,
            completed=min(tokens, window),
            width=BAR_WIDTH,
            complete_style=colour,
            finished_style=colour,
        )
        failed = side.requests - side.answered
        said = f"[green]{side.answered} answered[/]" + (
            f", [red]{failed} refused[/]" if failed else ""
        )
        bars.add_row(side.name, bar, f"{tokens:>6,} of {window:,} tokens", said)
    done = Table.grid(padding=(0, 2))
    done.add_row(
        "request",
        ProgressBar(total=played.show.steps, completed=number, width=BAR_WIDTH),
        f"{number}",
    )
    return Group(bars, done)


def _print_end(played: Playback, gone: list[RemovedRow]) -> None:
    direct, managed = played.sides
    click.echo()
    print_table(
        ("", DIRECT, MANAGED),
        [
            *((label, shown(direct), shown(managed)) for label, shown in ROWS),
            ("batches of edits", "-", f"{len(played.batches)}"),
            ("Weir's own time per request, median", "-", f"{played.overhead:.1f} ms"),
        ],
        numbers=1,
    )
    click.echo()
    print_line(f"Removed, and kept word for word: {removed_line(gone)}.")
    if managed.code is not None:
        print_line(f"The last request through Weir was not answered: {managed.message}")
    if played.conversation:
        click.echo("\nLook at what Weir did:")
        click.echo(f"  export WEIR_STORE={shlex.quote(played.show.url)}")
    for line in _commands(played, gone):
        click.echo(f"  {_command_name()} {line}")
    click.echo("\nUse it:")
    click.echo(f"  {_command_name()} init             # writes weir.yaml")
    click.echo(f"  {_command_name()} serve --config weir.yaml")
    click.echo(f"  {_command_name()} run -- COMMAND   # your agent, with its base URL set to Weir")


def _commands(played: Playback, gone: list[RemovedRow]) -> Iterator[str]:
    if not played.conversation:
        return
    compacted = any("compact" in each.how for each in gone)
    for option, is_there in (
        ("--timeline", True),
        ("--removed", bool(gone)),
        ("--checkpoint", compacted),
    ):
        if is_there:
            yield f"conversations show {played.conversation} {option}"
    yield f"conversations show {played.conversation}"


def _command_name() -> str:
    own = Path(sys.executable).with_name("weir")
    if shutil.which("weir") is not None or not own.exists():
        return "weir"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def _report(played: Playback, gone: list[RemovedRow]) -> dict[str, object]:
    show = played.show
    return {
        "recording": {"id": show.recording.id, "source": show.recording.source},
        "requests": show.steps,
        "window": show.window,
        "max_tokens": MAX_TOKENS,
        "policy": show.policy,
        "without": _totals(played.direct),
        "with": {
            **_totals(played.managed),
            "conversation": played.conversation,
            "batches": [asdict(batch) for batch in played.batches],
            "overhead_ms_median": played.overhead,
            "removed": removed_json(gone),
        },
        "store": show.url,
    }


def _totals(side: Side) -> dict[str, object]:
    return {
        "answered": side.answered,
        "refused": dict(side.refused),
        "prompt_tokens": side.tokens,
        "cached_tokens": side.cached,
        "prefix_reuse": round(side.reuse, 4),
        "largest_prompt": side.largest,
        "literals": {"needed": side.needed, "seen": side.visible},
    }
