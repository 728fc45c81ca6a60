"""What commands share: options and the configuration these make, the store next to a running Weir,
JSON and plain lines.

And one GET at a time, of a Weir or an upstream, with the standard library alone.
"""

import asyncio
import contextlib
import datetime as dt
import difflib
import errno
import functools
import http.client
import json
import os
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from proxy.access.admission import Keyring
from proxy.cli import Failure
from proxy.config.file import ConfigError, nearest
from proxy.config.loading import environment, load_config
from proxy.config.values import Config, Flags, masked_url, moment_in
from proxy.store import Store
from proxy.store.records import ConversationRow, RemovedRow, StoreError


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def in_yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def say(text: str) -> None:
    shown = tame(text) if sys.stdout.isatty() else text
    click.echo(shown.encode("utf-8", "replace"))


def tame(text: str) -> str:
    return "".join(
        c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def moment(at: float) -> str:
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S")


_NOT_LISTENING = {
    errno.EADDRINUSE: "; end the program that has it, or choose another port with --port",
    errno.EADDRNOTAVAIL: "; give --host an address of this machine",
    errno.EACCES: "; choose a port from 1024 on with --port",
}


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=2048)
    except OSError as fault:
        said = (
            f"cannot listen on {host}:{port}: {os.strerror(fault.errno) if fault.errno else fault}"
        )
        raise Failure(said + _NOT_LISTENING.get(fault.errno or 0, "")) from fault


def given_again(path: Path | None, store: str | None = None) -> str:
    """The options that name a configuration and a store, for a command that a message tells the
    user to type.
    """
    options = (("--config", path), ("--store", store))
    return "".join(
        f" {option} {shlex.quote(str(value))}" for option, value in options if value is not None
    )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


T = TypeVar("T")
NAMES_TRIED = 10_000
UNHURRIED = 60.0  # seconds that a database server may take for a command's statement
NAMES_SHOWN = 3

FILE = click.Path(path_type=Path, dir_okay=False)
POSITIVE = click.IntRange(min=1)
config_option = click.option(
    "--config", "path", type=FILE, help="The YAML configuration file; defaults to WEIR_CONFIG."
)


def store_url(context: click.Context, option: click.Parameter, given: str | None) -> str | None:  # noqa: ARG001 - click's
    """The URL of a store that was named by its URL, or by the path of its SQLite file."""
    return given if given is None or "://" in given else f"sqlite+aiosqlite:///{given}"


store_option = click.option(
    "--store",
    metavar="PATH|URL",
    callback=store_url,
    help="The database; defaults to the configuration's.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@dataclass(frozen=True, slots=True)
class Findings:
    """What a command found: the value that ``--json`` prints, how people see it, and what then
    fails the command.
    """

    value: Callable[[], object]
    show: Callable[[], object]
    failure: str = ""


Command = Callable[..., Any]


def since_option(default: str, said: str) -> Callable[[Command], Command]:
    """``--since``, which gives a command seconds since 1970."""

    def read(_context: click.Context, _option: click.Parameter, given: str) -> float:
        try:
            return moment_in(given, now=time.time())
        except ValueError as fault:
            raise click.BadParameter(f"since {fault}", param_hint="--since") from fault

    return click.option("--since", default=default, callback=read, help=said)


def configured(command: Callable[..., Findings]) -> Command:
    """Give a command ``--config`` and ``--json``; it is called with ``config``, and what it answers
    is printed.
    """

    @functools.wraps(command)
    def run(*, path: Path | None, as_json: bool, store: str | None = None, **options: Any) -> None:
        answer = command(config=loaded(path, Flags(store=store)), **options)
        if as_json:
            print_json(answer.value())
        else:
            answer.show()
        if answer.failure:
            raise Failure(answer.failure)

    return config_option(json_option(run))


def stored(command: Callable[..., Findings]) -> Command:
    """The same with ``--store``."""
    return configured(store_option(command))


def reads(command: Callable[..., Awaitable[Findings]]) -> Command:
    """The same for a coroutine, which is also given the store, open for reading; it answers when
    that is closed.
    """

    @functools.wraps(command)
    def run(*, config: Config, **options: Any) -> Findings:
        return reading(config, lambda store: command(store, config, **options))

    return stored(run)


def loaded(path: Path | None, flags: Flags | None = None) -> Config:
    try:
        return load_config(path, env=environment(), flags=flags or Flags())
    except ConfigError as fault:
        more = (
            f" (and {len(fault.problems) - 1} more, see weir doctor)"
            if len(fault.problems) > 1
            else ""
        )
        hint = (
            "; weir init writes one"
            if fault.problems[0].endswith(os.strerror(errno.ENOENT))
            else ""
        )
        raise Failure(f"{fault.problems[0]}{more}{hint}") from fault


def vocabularies() -> Path | None:
    """The folder that the user gave for vocabularies."""
    cache = environment().get("TIKTOKEN_CACHE_DIR")
    return Path(cache) if cache else None


def known_policy(name: str, config: Config) -> str:
    if name not in config.policies:
        raise click.BadParameter(
            f"no policy {name}{nearest(name, sorted(config.policies))}", param_hint="--policy"
        )
    return name


def reading(config: Config, read: Callable[[Store], Awaitable[T]], **how: Any) -> T:
    """What ``read`` makes of the configuration's store, which has to be there; ``how`` else it is
    opened.
    """

    async def work() -> T:
        async with opened(config.store.url, read_only=True, **how) as store:
            return await read(store)

    return asyncio.run(work())


def confirm(question: str) -> None:
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        click.echo(err=True)
        raise Failure(
            "nothing was deleted: nobody answered (--yes deletes without asking)"
        ) from None
    if not agreed:
        raise Failure("nothing was deleted")


def writing(config: Config, write: Callable[[Store], Awaitable[T]], *, create: bool = False) -> T:
    """What ``write`` makes of the configuration's store, which it may change; with ``create`` it
    need not be there.
    """

    async def work() -> T:
        if not create:
            async with opened(config.store.url, read_only=True):
                pass
        async with opened(config.store.url) as store:
            return await write(store)

    return asyncio.run(work())


@contextlib.asynccontextmanager
async def opened(url: str, **how: Any) -> AsyncIterator[Store]:
    """A store for a moment, next to a Weir that may be running, as ``Store.open``; its errors as
    one-line failures.
    """
    try:
        store = await Store.open(url, statement_timeout=UNHURRIED, **how)
        try:
            yield store
        finally:
            await store.close()
    except StoreError as fault:
        hint = "; weir serve makes one, --store names another" if fault.reason == "absent" else ""
        raise Failure(f"{masked_url(url)}: {fault}{hint}") from fault


async def key_names(store: Store, config: Config) -> dict[str, str]:
    return Keyring(
        config.keys, await store.list_keys(), secret=await store.secret(), mode="keys"
    ).names


async def named(store: Store) -> list[ConversationRow]:
    return await store.conversations(None, limit=NAMES_TRIED)


async def found(store: Store, name: str) -> ConversationRow:
    """The conversation with this name or id. Fails for none, and where several keys have a
    conversation of that name.
    """
    row = await store.conversation(None, name)
    known = await named(store)
    if row is None:
        close = difflib.get_close_matches(
            name, [each.name for each in known], n=NAMES_SHOWN, cutoff=0.6
        )
        hint = f"did you mean {' or '.join(close)}?" if close else "see weir conversations list"
        raise Failure(f"no conversation {name}; {hint}")
    same = sorted({each.id for each in known if name in (each.name, each.id)})
    if len(same) > 1:
        shown = ", ".join(same[:NAMES_SHOWN]) + (", …" if len(same) > NAMES_SHOWN else "")
        raise Failure(
            f"{len(same)} conversations of different keys are called {name}; say which by its id:"
            f" {shown}"
        )
    return row


def removed_json(gone: Sequence[RemovedRow]) -> dict[str, object]:
    return {
        "messages": len(gone),
        "tokens": sum(each.tokens for each in gone),
        "kinds": _kinds(gone),
    }


def removed_line(gone: Sequence[RemovedRow]) -> str:
    if not gone:
        return "nothing"
    kinds = ", ".join(f"{kind} {count}" for kind, count in _kinds(gone).items())
    return f"{len(gone)} messages, {sum(each.tokens for each in gone):,} tokens ({kinds})"


def _kinds(gone: Sequence[RemovedRow]) -> dict[str, int]:
    return dict(sorted(Counter(each.how for each in gone).items()))


MAX_BODY = 8 << 20
SECONDS = 5.0
HEALTH_SECONDS = 2.0


class Unreached(Exception): ...


@dataclass(frozen=True, slots=True)
class Reached:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def get(
    url: str,
    headers: Mapping[str, str] = {},
    *,
    body: bytes | None = None,
    seconds: float = SECONDS,
) -> Reached:
    """What is answered to a GET, or with a body to a POST; no proxy is used, no redirect followed.
    Raises Unreached.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with closing(kind(parts.hostname or "", parts.port, timeout=seconds)) as connection:
        try:
            connection.request("GET" if body is None else "POST", path, body, dict(headers))
            answer = connection.getresponse()
            said = {name.lower(): value for name, value in answer.getheaders()}
            return Reached(answer.status, said, answer.read(MAX_BODY))
        except TimeoutError:
            raise Unreached(f"no answer within {seconds:g} s") from None
        except socket.gaierror:
            raise Unreached(f"the name {parts.hostname} is not known") from None
        except (OSError, http.client.HTTPException, ValueError) as fault:
            raise Unreached(
                str(getattr(fault, "strerror", None) or fault or type(fault).__name__)
            ) from None


def is_weir(root: str) -> bool | None:
    """Whether a Weir answers at ``http://host:port``, None where nothing does."""
    try:
        answer = get(f"{root}/healthz", seconds=HEALTH_SECONDS)
    except Unreached:
        return None
    return answer.status == 200 and answer.json() == {"status": "ok"}
