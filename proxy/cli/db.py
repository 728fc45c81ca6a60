"""``weir db``: a copy of the database, what is old, its schema."""

import contextlib
import dataclasses
import time
from pathlib import Path

import click

from proxy.cli import Failure
from proxy.cli.shared import Findings, confirm, counted, moment, reading, stored, writing
from proxy.config.values import Config, masked_url, moment_in
from proxy.store import Store
from proxy.store.store import file_of

SQLITE = "sqlite+aiosqlite:///"


@click.group()
def db() -> None:
    """Back up, restore, prune and migrate the database.

    \b
    Example:
      weir db backup /backup/weir-monday.db
    """


@db.command()
@click.argument("target", metavar="PATH", type=click.Path(path_type=Path))
@stored
def backup(config: Config, *, target: Path) -> Findings:
    """Copy a SQLite database, also while Weir serves from it: one consistent moment, checked,
    readable by its owner.

    An existing file is never overwritten; `weir db restore` puts the copy back. PostgreSQL has its
    own tools: pg_dump --format=custom --file=PATH DATABASE.

    \b
    Example:
      weir db backup /backup/weir-monday.db
      weir serve --store sqlite+aiosqlite:////backup/weir-monday.db
    """
    if target.exists():
        raise Failure(f"{target} exists already; name a new file")
    reading(config, lambda store: store.backup(target.absolute()))
    size = target.stat().st_size
    return Findings(
        lambda: {"path": str(target), "bytes": size},
        lambda: click.echo(f"{target}: {size:,} bytes, checked."),
    )


@db.command()
@click.argument("source", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--replace", is_flag=True, help="Move the database that is there aside first; it is kept."
)
@stored
def restore(config: Config, *, source: Path, replace: bool) -> Findings:
    """Put a copy that `weir db backup` made in the place of the SQLite database.

    Stop Weir first, and start it afterwards. The copy is checked and is left where it is.
    PostgreSQL has its own tools: pg_restore --clean --dbname=DATABASE PATH.

    \b
    Example:
      weir db restore /backup/weir-monday.db --replace
      weir audit verify
    """
    url = config.store.url
    if not url.startswith("sqlite"):
        raise Failure(
            "PostgreSQL is restored by its own tools: pg_restore --clean --dbname=DATABASE PATH"
        )
    name = file_of(url)
    if not name or name == ":memory:":
        raise Failure(f"{url} is a database in memory: name a file with --store")
    target = Path(name).absolute()
    aside = target.with_name(f"{target.name}.{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    if target.exists() and not replace:
        raise Failure(
            f"{target} is there: stop Weir, then say --replace, which keeps it as"
            f" {target.name}.TIME"
        )
    copy = target.with_name(f"{target.name}.restored")
    of_copy = dataclasses.replace(
        config, store=dataclasses.replace(config.store, url=f"{SQLITE}{source.absolute()}")
    )
    reading(of_copy, lambda store: store.backup(copy))
    moved = target.exists()
    for end in ("", "-wal", "-shm"):  # what a log still holds belongs to the database that is moved
        with contextlib.suppress(FileNotFoundError):
            target.with_name(target.name + end).rename(aside.with_name(aside.name + end))
    copy.rename(target)
    size = target.stat().st_size

    def show() -> None:
        click.echo(
            f"{target}: {size:,} bytes, checked."
            + (f" The one before is {aside}." if moved else "")
        )

    return Findings(
        lambda: {"path": str(target), "bytes": size, "before": str(aside) if moved else None}, show
    )


@db.command()
@click.option(
    "--older-than",
    metavar="AGE",
    help="Like 90m, 24h or 7d; defaults to the configuration's retention.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@stored
def prune(config: Config, *, older_than: str | None, yes: bool) -> Findings:
    """Delete the conversations that were not used for so long, permanently; a running Weir does so
    once a day.

    \b
    Example:
      weir db backup before.db
      weir db prune --older-than 7d
    """
    if older_than is None and config.store.retention is None:
        raise click.UsageError(
            "the configuration keeps conversations for ever: say --older-than, for example 90d"
        )
    try:
        before = time.time() - (config.store.retention or 0.0)
        before = moment_in(older_than, now=time.time()) if older_than is not None else before
    except ValueError as fault:
        raise click.BadParameter(
            "should be like 90m, 24h or 7d", param_hint="--older-than"
        ) from fault
    due = reading(config, lambda store: store.counts(before=before))["due"]
    if not yes:
        said = f"{counted(int(due or 0), 'conversation')} last used before {moment(before)} UTC"
        click.echo(f"{masked_url(config.store.url)}: {said}.", err=True)
        confirm("Delete them permanently?")
    rows = writing(config, lambda store: store.prune(before))
    said = f"Deleted {counted(int(due or 0), 'conversation')}, {counted(rows, 'row')} in all."
    return Findings(
        lambda: {"before": before, "conversations": due, "rows": rows}, lambda: click.echo(said)
    )


@db.command()
@stored
def migrate(config: Config) -> Findings:
    """Migrate the database to the latest schema, or create it; `weir serve` does the same when it
    starts.

    A database written by a newer version of Weir is refused.

    \b
    Example:
      weir db migrate --store sqlite+aiosqlite:///weir.db
    """

    async def state(store: Store) -> tuple[str, str, tuple[str, ...]]:
        return store.schema, store.journal, store.notices

    schema, journal, notices = writing(config, state, create=True)

    def show() -> None:
        for notice in notices:
            click.echo(f"Note: {notice}", err=True)
        click.echo(f"Schema {schema}, up to date (journal: {journal}).")

    return Findings(lambda: {"schema": schema, "journal": journal, "notices": list(notices)}, show)
