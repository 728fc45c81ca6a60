"""``weir watch``: the requests of a running Weir as they pass, asked for through its management API."""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from proxy.cli import Failure
from proxy.cli.conversations import actions_of
from proxy.cli.output import console
from proxy.cli.run import weir_address
from proxy.cli.shared import Unreached, config_option, get, loaded, since_option, tame
from proxy.config.loading import environment

TITLES = ("time", "conversation", "model", "sent > forwarded", "pressure", "action", "ms")
CONVERSATIONS_ASKED, ROWS_ASKED = 200, 50
LATE = 600.0  # a request is told when it has ended, perhaps after one that began later
MAX_SEEN = 10_000
Row = Mapping[str, Any]


class Follower:
    """What a Weir says of new requests: each once, oldest first, from a moment on."""

    def __init__(self, root: str, key: str, *, since: float) -> None:
        self._root = root
        self._headers = {"Authorization": f"Bearer {key}"}
        self._since = since
        self._seen: deque[str] = deque(maxlen=MAX_SEEN)
        self._looked: dict[str, float] = {}

    def news(self) -> list[Row]:
        """The requests that came in since the last call. Raises Unreached, and Failure where waiting mends nothing."""
        rows: list[Row] = []
        for each in self._ask("conversations", limit=CONVERSATIONS_ASKED):
            if each["updated"] < self._since or self._looked.get(each["id"]) == each["updated"]:
                continue
            since = max(self._since, self._looked.get(each["id"], 0.0) - LATE)
            found = self._ask(f"conversations/{each['id']}/timeline", since=f"{since:.3f}", limit=ROWS_ASKED)
            new = [row for row in found if row["id"] not in self._seen]
            self._seen += [row["id"] for row in new]
            rows += new
            self._looked[each["id"]] = each["updated"]
        return sorted(rows, key=lambda row: float(row["at"]))

    def _ask(self, path: str, **query: object) -> list[dict[str, Any]]:
        answer = get(f"{self._root}/weir/{path}?{urlencode(query)}", self._headers)
        if answer.status == 404 and "/" in path:  # deleted between two questions
            return []
        if answer.status in (401, 403):
            raise Failure("this key is refused: give the admin token or a client's key, --key or WEIR_ADMIN_TOKEN")
        if answer.status >= 500:
            raise Unreached(f"its database cannot be read now ({answer.status})")
        told = answer.json()
        if answer.status != 200 or not isinstance(told, dict) or "data" not in told:
            raise Failure(f"what answers at {self._root} is not Weir ({answer.status}); name its address with --url")
        return list(told["data"])


@click.command()
@config_option
@click.option("--url", metavar="URL", help="Weir's address, http://host:port; defaults to the configuration's.")
@click.option("--key", help="Whose requests: the admin token (all), or a client's key; defaults to WEIR_ADMIN_TOKEN, "
              "the configuration's, OPENAI_API_KEY.")  # fmt: skip
@since_option("1m", "Begin with what is newer, like 90s, 5m or 1h.")
@click.option("--interval", type=click.FloatRange(min=0.05), default=1.0, help="Seconds between looks.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
def watch(*, path: Path | None, url: str | None, key: str | None, since: float, interval: float, as_json: bool) -> None:
    """Watch managed requests as they pass: tokens sent and forwarded, pressure, action, Weir's own milliseconds.

    On a terminal the newest fill the screen; elsewhere each is a line. Ctrl-C ends it.

    \b
    Example:
      weir watch
      weir watch --key "$WEIR_ADMIN_TOKEN" --since 1h --json
    """
    config = loaded(path)
    root = weir_address(url, config)
    token = config.admin_token.get_secret_value() if config.admin_token is not None else ""
    usual = token or environment().get("OPENAI_API_KEY", "") or "any"
    try:
        follower = Follower(root, key or usual, since=since)
        first = follower.news()
    except Unreached as fault:
        raise Failure(
            f"no Weir answers at {root} ({fault}): start one with weir serve, or name it with --url"
        ) from fault
    screen = console()
    with contextlib.suppress(KeyboardInterrupt):
        if screen.is_terminal and not as_json:
            _draw(follower, first, screen, interval)
        else:
            for row in _endless(follower, first, interval):
                click.echo(json.dumps(row) if as_json else _line(row))


def _endless(follower: Follower, first: list[Row], interval: float) -> Iterator[Row]:
    yield from first
    while True:
        time.sleep(interval)
        with contextlib.suppress(Unreached):  # it may be starting again
            yield from follower.news()


def _draw(follower: Follower, first: list[Row], screen: Console, interval: float) -> None:
    rows = deque(first, maxlen=max(1, screen.height - 2))
    with Live(_table(rows), console=screen, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_table(rows), refresh=True)
            time.sleep(interval)
            with contextlib.suppress(Unreached):
                rows.extend(follower.news())


def _table(rows: deque[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for title in TITLES:
        table.add_column(title, no_wrap=True, overflow="ellipsis", justify="right" if title == "ms" else "left")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    done = actions_of(row["actions"]) if row["status"] in (0, 200) else f"{row['status']} {row['outcome']}"
    return (
        time.strftime("%H:%M:%S", time.localtime(row["at"])),
        tame(row["name"]),
        tame(row["model"]),
        f"{row['tokens_before']:,} > {row['tokens_after']:,}",
        f"{row['pressure']:.2f} {row['zone']}",
        done,
        f"{row['overhead_ms']:.1f}",
    )


def _line(row: Row) -> str:
    at, name, model, tokens, pressure, done, ms = _cells(row)
    return f"{at}  {name}  {model}  {tokens}  {pressure}  {done}  {ms} ms"
