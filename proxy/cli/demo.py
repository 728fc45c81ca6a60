"""``weir demo``: a recorded agent run in a small window, without and with Weir."""

import asyncio
import logging
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from proxy.cli import Failure
from proxy.cli.config import console, json_option, print_json
from proxy.cli.conversations import COMPACT, Removed, kinds_of, opened_to_read, removed_from, removed_line
from proxy.cli.playback import MAX_TOKENS, SUMMARIZER, Batch, Demonstration, Result, Tally, playing
from proxy.cli.recording import load_recording
from proxy.config import ConfigError

PAUSE = 0.1
PLAIN_EVERY = 10
BAR = 14
DIRECT, MANAGED = "without Weir", "with Weir"
ROWS: tuple[tuple[str, Callable[[Tally], str]], ...] = (
    ("requests answered", lambda tally: f"{tally.answered} of {tally.requests}"),
    ("refused", lambda tally: ", ".join(f"{count} {code}" for code, count in tally.refused.items()) or "0"),
    ("tokens sent in answered requests", lambda tally: f"{tally.tokens:,}"),
    ("largest of them", lambda tally: f"{tally.largest:,}"),
    ("prefix reuse (cached / sent tokens)", lambda tally: f"{tally.reuse:.1%}"),
    ("values that tool calls needed, seen", lambda tally: f"{tally.visible} of {tally.needed}"),
)


@click.command()
@click.option(
    "--window", type=click.IntRange(min=1024), default=8192, show_default=True, help="The model's window, tokens."
)
@click.option("--steps", type=click.IntRange(min=1), help="Requests to play; else the whole recording.")
@click.option("--policy", help="A preset, see `weir policy list`; else the default one.")
@click.option("--summarizer", is_flag=True, help="Let the simulated model write summaries; else Weir extracts.")
@click.option("--fast", is_flag=True, help="No pauses for people who watch.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="FILE", help="Where to keep Weir's database.")
@json_option
def demo(
    *,
    window: int,
    steps: int | None,
    policy: str | None,
    summarizer: bool,
    fast: bool,
    keep: Path | None,
    as_json: bool,
) -> int:
    """Replay a recorded agent run through the openai SDK, without and with Weir; no key, no network.

    Every request goes once straight to a simulated model with a small window and once through a real Weir in front
    of it. Exits with 1 if a request through Weir was not answered.

    \b
    Example:
      weir demo
      weir demo --window 6000 --policy balanced --fast --json
    """
    recording = load_recording()
    if keep is not None and keep.exists():
        raise click.BadParameter(f"{keep} exists already; name a new file", param_hint="--keep")
    if keep is not None and not keep.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {keep.parent}", param_hint="--keep")
    with _database(keep) as file:
        show = Demonstration(
            recording=recording,
            steps=min(steps or len(recording.requests), len(recording.requests)),
            window=window,
            store=file,
            policy=policy,
            summarizer=summarizer,
        )
        screen = Console(stderr=True, highlight=False) if as_json else console()
        pause = 0.0 if fast or not screen.is_terminal else PAUSE
        result, gone = _play(show, screen, pause=pause)
    if as_json:
        print_json(_report(show, result, gone))
    else:
        _print_end(show, result, gone)
    return 0 if result.managed.answered == show.steps else 1


@contextmanager
def _database(keep: Path | None) -> Iterator[Path]:
    """A new file's path; a folder made for it stays for `weir conversations`, unless the demo breaks off."""
    if keep is not None:
        yield keep.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="weir-demo-"))
    try:
        yield folder / "weir.db"
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _play(show: Demonstration, screen: Console, *, pause: float) -> tuple[Result, list[Removed]]:
    try:
        return asyncio.run(_run(show, screen, pause=pause))
    except ConfigError as fault:
        raise Failure(fault.problems[0]) from fault


async def _run(show: Demonstration, screen: Console, *, pause: float) -> tuple[Result, list[Removed]]:
    async with playing(show) as playback:
        with _view(show, playback.result, screen) as view, _no_alerts():
            for number in range(1, show.steps + 1):
                batch = await playback.step(number)
                view.played(number, batch)
                await asyncio.sleep(pause)
    async with opened_to_read(show.url) as store:
        row = await store.conversation(None, playback.result.conversation)
        return playback.result, await removed_from(store, row) if row is not None else []


@contextmanager
def _no_alerts() -> Iterator[None]:
    """Keep the alerts out of the picture: `weir health` shows them."""
    logger = logging.getLogger("weir.alerts")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class View(Protocol):
    """What shows the demo while it runs."""

    def played(self, number: int, batch: Batch | None) -> None:
        """Request ``number`` was played on both sides, with ``batch`` if it made Weir edit."""
        ...


@contextmanager
def _view(show: Demonstration, result: Result, screen: Console) -> Iterator[View]:
    """A live picture on a terminal, else lines."""
    screen.print(
        f"{show.steps} requests of a recorded agent run, {MAX_TOKENS} tokens for each answer, "
        f"a model with a window of {show.window:,} tokens",
        soft_wrap=True,
    )
    if not screen.is_terminal:
        yield PlainView(show, result, screen)
        return
    with Live(console=screen, refresh_per_second=10, transient=True) as live:
        yield LiveView(show, result, live)


class Events:
    """What is worth a line: the first refusal of each side, and every batch of edits."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._refused: set[str] = set()

    def of(self, number: int, batch: Batch | None) -> Iterator[str]:
        """The lines about request ``number``."""
        for name, tally in ((DIRECT, self._result.direct), (MANAGED, self._result.managed)):
            if not tally.last.answered and name not in self._refused:
                self._refused.add(name)
                yield f"request {number:>3}  {name}: {tally.last.message}"
        if batch is not None:
            did = f"{batch.before:,} > {batch.after:,} tokens ({batch.actions})"
            yield f"request {number:>3}  {MANAGED}: {did}"


class PlainView:
    """A line for each event, and one for every ten requests."""

    def __init__(self, show: Demonstration, result: Result, screen: Console) -> None:
        self._show = show
        self._result = result
        self._screen = screen
        self._events = Events(result)

    def played(self, number: int, batch: Batch | None) -> None:
        """Say what is new."""
        for line in self._events.of(number, batch):
            self._screen.print(Text(line), soft_wrap=True)
        if number % PLAIN_EVERY == 0 or number == self._show.steps:
            counts = f"{self._result.direct.answered} {DIRECT}, {self._result.managed.answered} {MANAGED}"
            self._screen.print(f"request {number:>3} of {self._show.steps}: answered {counts}", soft_wrap=True)


class LiveView:
    """Two bars, the prompt that arrived against the window, under a line for each event."""

    def __init__(self, show: Demonstration, result: Result, live: Live) -> None:
        self._show = show
        self._result = result
        self._live = live
        self._events = Events(result)

    def played(self, number: int, batch: Batch | None) -> None:
        """Draw what holds now."""
        for line in self._events.of(number, batch):
            self._live.console.print(Text(line))
        self._live.update(self._picture(number))

    def _picture(self, number: int) -> Group:
        bars = Table.grid(padding=(0, 2))
        for name, tally in ((DIRECT, self._result.direct), (MANAGED, self._result.managed)):
            bars.add_row(name, *self._row(tally))
        done = Table.grid(padding=(0, 2))
        done.add_row("request", ProgressBar(total=self._show.steps, completed=number, width=BAR), f"{number}")
        return Group(bars, done)

    def _row(self, tally: Tally) -> tuple[ProgressBar, str, str]:
        window, tokens, colour = self._show.window, tally.last.tokens, "green" if tally.last.answered else "red"
        bar = ProgressBar(
            total=window, completed=min(tokens, window), width=BAR, complete_style=colour, finished_style=colour
        )
        failed = tally.requests - tally.answered
        said = f"[green]{tally.answered} answered[/]" + (f", [red]{failed} refused[/]" if failed else "")
        return bar, f"{tokens:>6,} of {window:,} tokens", said


def _print_end(show: Demonstration, result: Result, gone: list[Removed]) -> None:
    table = Table("", DIRECT, MANAGED, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, direct, managed in _rows(result):
        table.add_row(label, direct, managed)
    out = console()
    out.print()
    out.print(table)
    out.print()
    out.print(Text(f"Removed, and kept word for word: {removed_line(gone)}."))
    if not result.managed.last.answered:
        out.print(Text(f"The last request through Weir was not answered: {result.managed.last.message}"))
    click.echo("".join(f"  {line}\n" for line in _look(show, result, gone)), nl=False)
    click.echo("Next:")
    click.echo(f"  {command_name()} serve --upstream https://api.openai.com/v1  # or any server that speaks its API")
    click.echo("  export OPENAI_BASE_URL=http://127.0.0.1:8400/v1  # then start your agent as ever")


def _rows(result: Result) -> Iterator[tuple[str, str, str]]:
    for label, shown in ROWS:
        yield label, shown(result.direct), shown(result.managed)
    calls = f"{result.summaries} ({result.summary_tokens:,} tokens)" if result.summaries else "0"
    yield "batches of edits / summariser calls", "-", f"{len(result.batches)} / {calls}"
    yield "Weir's own time per request, median", "-", f"{result.overhead:.1f} ms"


def _look(show: Demonstration, result: Result, gone: list[Removed]) -> Iterator[str]:
    """The commands that show what Weir did, as far as there is something to show."""
    options = [("--timeline", bool(result.conversation)), ("--removed", bool(gone))]
    options.append(("--checkpoint", any(COMPACT in each.how for each in gone)))
    for option, is_there in options:
        if is_there:
            base = f"{command_name()} conversations show {result.conversation}"
            yield f"{base} {option} --store {shlex.quote(show.url)}"
    if result.conversation:
        yield f"{command_name()} health {result.conversation} --store {shlex.quote(show.url)}"


def command_name() -> str:
    """How to call this program from here: ``weir`` where the shell finds it, else by its path."""
    own = Path(sys.executable).with_name("weir")
    if shutil.which("weir") is not None or not own.exists():
        return "weir"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def _report(show: Demonstration, result: Result, gone: list[Removed]) -> dict[str, object]:
    return {
        "recording": {"id": show.recording.id, "source": show.recording.source},
        "requests": show.steps,
        "window": show.window,
        "max_tokens": MAX_TOKENS,
        "policy": show.policy,
        "summarizer": SUMMARIZER if show.summarizer else None,
        "without": _tally(result.direct),
        "with": {
            **_tally(result.managed),
            "conversation": result.conversation,
            "batches": [
                {"request": b.request, "before": b.before, "after": b.after, "actions": b.actions}
                for b in result.batches
            ],
            "summariser_calls": result.summaries,
            "summariser_tokens": result.summary_tokens,
            "overhead_ms_median": result.overhead,
            "removed": {
                "messages": len(gone),
                "tokens": sum(each.tokens for each in gone),
                "kinds": kinds_of(gone),
            },
        },
        "store": show.url,
    }


def _tally(tally: Tally) -> dict[str, object]:
    return {
        "answered": tally.answered,
        "refused": dict(tally.refused),
        "prompt_tokens": tally.tokens,
        "cached_tokens": tally.cached,
        "prefix_reuse": round(tally.reuse, 4),
        "largest_prompt": tally.largest,
        "literals": {"needed": tally.needed, "seen": tally.visible},
    }
