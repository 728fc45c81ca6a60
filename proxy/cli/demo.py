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

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from proxy.cli import Failure
from proxy.cli.conversations import kinds_of, removed_from, removed_line
from proxy.cli.output import console, print_json, print_line, print_table
from proxy.cli.playback import (
    MAX_TOKENS,
    SUMMARIZER,
    Batch,
    Demonstration,
    Playback,
    SideTotals,
    load_recording,
    playing,
)
from proxy.cli.stored import json_option, opened
from proxy.config import ConfigError
from proxy.store.records import RemovedRow

PAUSE = 0.1
PLAIN_EVERY = 10
BAR_WIDTH = 14
DIRECT, MANAGED = "without Weir", "with Weir"
ROWS: tuple[tuple[str, Callable[[SideTotals], str]], ...] = (
    ("requests answered", lambda side: f"{side.answered} of {side.requests}"),
    ("refused", lambda side: ", ".join(f"{count} {code}" for code, count in side.refused.items()) or "0"),
    ("tokens sent in answered requests", lambda side: f"{side.tokens:,}"),
    ("largest of them", lambda side: f"{side.largest:,}"),
    ("prefix reuse (cached / sent tokens)", lambda side: f"{side.reuse:.1%}"),
    ("values that tool calls needed, seen", lambda side: f"{side.visible} of {side.needed}"),
)

View = Callable[[int, Batch | None], None]
"""Shows that a request was played on both sides, with the batch if it made Weir edit."""


@click.command()
@click.option(
    "--window", type=click.IntRange(min=1024), default=8192, show_default=True, help="The model's window, tokens."
)
@click.option("--steps", type=click.IntRange(min=1), help="How many requests to play; defaults to all.")
@click.option("--policy", help="A preset, see `weir policy list`; defaults to the default policy.")
@click.option(
    "--summarizer", is_flag=True, help="Have the simulated model write summaries; by default Weir extracts them."
)
@click.option("--fast", is_flag=True, help="Do not pause between requests.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="FILE", help="Keep Weir's database in this file.")
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
    """Play a recorded agent run through the openai SDK, with and without Weir; needs no key and no network.

    Every request is sent once directly to a simulated model with a small window and once through a real Weir in front
    of it. Exits with 1 if a request through Weir was not answered.

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
            summarizer=summarizer,
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
    return 0 if played.managed.totals.answered == show.steps else 1


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


async def _play(show: Demonstration, screen: Console, *, pause: float) -> tuple[Playback, list[RemovedRow]]:
    async with playing(show) as played:
        with _view(played, screen) as view, _no_alerts():
            for number in range(1, show.steps + 1):
                view(number, await played.step(number))
                await asyncio.sleep(pause)
    async with opened(show.url, read_only=True) as store:
        row = await store.conversation(None, played.conversation)
        return played, await removed_from(store, row) if row is not None else []


@contextmanager
def _no_alerts() -> Iterator[None]:
    """Keep the alerts out of the picture: `weir health` shows them."""
    logger = logging.getLogger("weir.alerts")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _view(played: Playback, screen: Console) -> Iterator[View]:
    """A live picture on a terminal, else lines."""
    show, events = played.show, _Events(played)
    screen.print(
        f"{show.steps} requests of a recorded agent run, {MAX_TOKENS} tokens for each answer, "
        f"a model with a window of {show.window:,} tokens",
        soft_wrap=True,
    )

    def say(number: int, batch: Batch | None) -> None:
        for line in events.of(number, batch):
            screen.print(Text(line), soft_wrap=True)
        if number % PLAIN_EVERY == 0 or number == show.steps:
            answered = [f"{side.answered} {name}" for name, side in _sides(played)]
            screen.print(f"request {number:>3} of {show.steps}: answered {', '.join(answered)}", soft_wrap=True)

    if not screen.is_terminal:
        yield say
        return
    with Live(console=screen, refresh_per_second=10, transient=True) as live:

        def draw(number: int, batch: Batch | None) -> None:
            for line in events.of(number, batch):
                live.console.print(Text(line))
            live.update(_picture(played, number))

        yield draw


class _Events:
    """What is worth a line: the first refusal of each side, and every batch of edits."""

    def __init__(self, played: Playback) -> None:
        self._played = played
        self._refused: set[str] = set()

    def of(self, number: int, batch: Batch | None) -> Iterator[str]:
        for name, side in _sides(self._played):
            if not side.last.answered and name not in self._refused:
                self._refused.add(name)
                yield f"request {number:>3}  {name}: {side.last.message}"
        if batch is not None:
            did = f"{batch.before:,} > {batch.after:,} tokens ({batch.actions})"
            yield f"request {number:>3}  {MANAGED}: {did}"


def _sides(played: Playback) -> tuple[tuple[str, SideTotals], ...]:
    return (DIRECT, played.direct.totals), (MANAGED, played.managed.totals)


def _picture(played: Playback, number: int) -> Group:
    """Two bars, the prompt that arrived against the window, and how far the demo has come."""
    window, bars = played.show.window, Table.grid(padding=(0, 2))
    for name, side in _sides(played):
        tokens, colour = side.last.tokens, "green" if side.last.answered else "red"
        bar = ProgressBar(
            total=window, completed=min(tokens, window), width=BAR_WIDTH, complete_style=colour, finished_style=colour
        )
        failed = side.requests - side.answered
        said = f"[green]{side.answered} answered[/]" + (f", [red]{failed} refused[/]" if failed else "")
        bars.add_row(name, bar, f"{tokens:>6,} of {window:,} tokens", said)
    done = Table.grid(padding=(0, 2))
    done.add_row("request", ProgressBar(total=played.show.steps, completed=number, width=BAR_WIDTH), f"{number}")
    return Group(bars, done)


def _print_end(played: Playback, gone: list[RemovedRow]) -> None:
    direct, managed = played.direct.totals, played.managed.totals
    calls = f"{played.summaries} ({played.summary_tokens:,} tokens)" if played.summaries else "0"
    click.echo()
    print_table(
        ("", DIRECT, MANAGED),
        [
            *((label, shown(direct), shown(managed)) for label, shown in ROWS),
            ("batches of edits / summariser calls", "-", f"{len(played.batches)} / {calls}"),
            ("Weir's own time per request, median", "-", f"{played.overhead:.1f} ms"),
        ],
        numbers=1,
    )
    click.echo()
    print_line(f"Removed, and kept word for word: {removed_line(gone)}.")
    if not managed.last.answered:
        print_line(f"The last request through Weir was not answered: {managed.last.message}")
    for line in _commands(played, gone):
        click.echo(f"  {line}")
    click.echo("Next:")
    click.echo(f"  {_command_name()} serve --upstream https://api.openai.com/v1  # or any server that speaks its API")
    click.echo("  export OPENAI_BASE_URL=http://127.0.0.1:8400/v1  # then start your agent as usual")


def _commands(played: Playback, gone: list[RemovedRow]) -> Iterator[str]:
    """The commands that show what Weir did, as far as there is something to show."""
    if not played.conversation:
        return
    store = f"--store {shlex.quote(played.show.url)}"
    compacted = any("compact" in each.how for each in gone)
    for option, is_there in (("--timeline", True), ("--removed", bool(gone)), ("--checkpoint", compacted)):
        if is_there:
            yield f"{_command_name()} conversations show {played.conversation} {option} {store}"
    yield f"{_command_name()} health {played.conversation} {store}"


def _command_name() -> str:
    """How to call this program from here: ``weir`` where the shell finds it, else by its path."""
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
        "summarizer": SUMMARIZER if show.summarizer else None,
        "without": _totals(played.direct.totals),
        "with": {
            **_totals(played.managed.totals),
            "conversation": played.conversation,
            "batches": [
                {"request": b.request, "before": b.before, "after": b.after, "actions": b.actions}
                for b in played.batches
            ],
            "summariser_calls": played.summaries,
            "summariser_tokens": played.summary_tokens,
            "overhead_ms_median": played.overhead,
            "removed": {
                "messages": len(gone),
                "tokens": sum(each.tokens for each in gone),
                "kinds": kinds_of(gone),
            },
        },
        "store": show.url,
    }


def _totals(side: SideTotals) -> dict[str, object]:
    return {
        "answered": side.answered,
        "refused": dict(side.refused),
        "prompt_tokens": side.tokens,
        "cached_tokens": side.cached,
        "prefix_reuse": round(side.reuse, 4),
        "largest_prompt": side.largest,
        "literals": {"needed": side.needed, "seen": side.visible},
    }
