"""Reading conversations from a store that a Weir may be writing: what every command about them shares."""

import asyncio
import contextlib
import difflib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import click

from policies.clipping import TEXT_OF
from proxy.access.keys import Keyring
from proxy.cli import Failure
from proxy.config import Config, masked_url
from proxy.store import Store, StoreError
from proxy.store.records import CheckpointRow, ConversationRow, ExchangeRow, Original, RemovedRow

T = TypeVar("T")

NAMES_TRIED = 10_000
NAMES_SHOWN = 3
MOST_REMOVED = 100_000
MOST_REQUESTS = 100_000
COMPACT = "compact"

store_option = click.option("--store", metavar="URL", help="The database; else the configuration's.")


@contextlib.asynccontextmanager
async def opened_to_read(url: str) -> AsyncIterator[Store]:
    """The store behind ``url``, looked at only; its errors as one-line failures."""
    async with _opened(url, read_only=True) as store:
        yield store


@contextlib.asynccontextmanager
async def opened_to_write(url: str) -> AsyncIterator[Store]:
    """The store behind ``url`` for a moment, beside a Weir that may be running; its errors as one-line failures.

    A file that is not there is not made.
    """
    async with opened_to_read(url):
        pass
    async with _opened(url, visitor=True) as store:
        yield store


@contextlib.asynccontextmanager
async def _opened(url: str, *, read_only: bool = False, visitor: bool = False) -> AsyncIterator[Store]:
    try:
        store = await Store.open(url, read_only=read_only, visitor=visitor)
        try:
            yield store
        finally:
            await store.close()
    except StoreError as fault:
        raise Failure(f"{masked_url(url)}: {fault}") from fault


async def key_names(store: Store, config: Config) -> dict[str, str]:
    """The name of every key, of the configuration and of the store, by its tenant."""
    return Keyring(config.keys, await store.list_keys(), secret=await store.secret(), mode="keys").names


def reading(url: str, read: Callable[[Store], Awaitable[T]]) -> T:
    """What ``read`` makes of the store behind ``url``."""

    async def work() -> T:
        async with opened_to_read(url) as store:
            return await read(store)

    return asyncio.run(work())


def writing(url: str, write: Callable[[Store], Awaitable[T]]) -> T:
    """What ``write`` makes of the store behind ``url``, which it may change."""

    async def work() -> T:
        async with opened_to_write(url) as store:
            return await write(store)

    return asyncio.run(work())


async def found(store: Store, name: str) -> ConversationRow:
    """The conversation with this name or id. Fails for none, and for one of several that different keys named so."""
    row = await store.conversation(None, name)
    known = await store.conversations(None, limit=NAMES_TRIED)
    if row is None:
        raise Failure(f"no conversation {name}{_near(name, [each.name for each in known])}")
    same = sorted({each.id for each in known if name in (each.name, each.id)})
    if len(same) > 1:
        shown = ", ".join(same[:NAMES_SHOWN]) + (", …" if len(same) > NAMES_SHOWN else "")
        raise Failure(f"{len(same)} conversations of different keys are called {name}; say which by its id: {shown}")
    return row


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=NAMES_SHOWN, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else "; see weir conversations list"


async def removed_from(store: Store, row: ConversationRow) -> list[RemovedRow]:
    """What is out of the window in the newest branch of a conversation, what went first before what went later."""
    return list(reversed(await store.removed(row, limit=MOST_REMOVED)))


async def checkpoints_of(store: Store, row: ConversationRow) -> list[CheckpointRow]:
    """Every version of the checkpoint, oldest first."""
    return [each for each in await store.checkpoints(row) if each.body]


async def checkpoint_of(store: Store, row: ConversationRow, version: int | None = None) -> CheckpointRow:
    """One version of the checkpoint, the newest one without a number. Fails with the versions that there are."""
    if version is not None:
        one = await store.checkpoint_at(row, version)
        if one is None:
            versions = sorted({each.version for each in await checkpoints_of(store, row)})
            there = f"there are {', '.join(map(str, versions))}" if versions else "there is none"
            raise Failure(f"{row.name} has no checkpoint {version}: {there}")
        return one
    latest = await store.latest_checkpoint(row.tenant, row.id)
    key = None if latest is None else (latest[1].branch, latest[1].version)
    for each in reversed(await checkpoints_of(store, row)) if key is not None else ():
        if (each.branch, each.version) == key:
            return each
    raise Failure(f"{row.name} has no checkpoint: nothing was compacted or saved in it")


async def request_of(store: Store, row: ConversationRow, request: str) -> ExchangeRow:
    """The request with this id, or the only one whose id begins so. Fails for none and for several."""
    rows = await store.timeline(row, limit=MOST_REQUESTS)
    known = [each for each in rows if each.id == request] or [each for each in rows if each.id.startswith(request)]
    if len(known) != 1:
        said = "no request" if not known else f"{len(known)} requests begin with"
        raise Failure(f"{said} {request} in {row.name}; see weir conversations show {row.name} --timeline")
    return known[0]


async def originals_of(store: Store, row: ConversationRow, ref: str) -> list[Original]:
    """The message with this ref, or all that the summary with this ref covers."""
    ref = ref.removesuffix(TEXT_OF)
    one = await store.original(row.tenant, ref)
    originals = [one] if one is not None else await store.covered(row.tenant, ref)
    if not originals:
        gone = await removed_from(store, row)
        hint = "" if gone else ": nothing was removed from it"
        if any(each.ref == ref for each in gone):
            hint = ": its content was not kept (store.content is digest) or is damaged"
        raise Failure(f"no original {ref} in {row.name}{hint}")
    return originals


def kinds_of(gone: Iterable[RemovedRow]) -> dict[str, int]:
    """How many messages each kind of edit, or layer of a cut, has taken."""
    counts: dict[str, int] = {}
    for each in gone:
        counts[each.how] = counts.get(each.how, 0) + 1
    return dict(sorted(counts.items()))


def removed_line(gone: list[RemovedRow]) -> str:
    """What was removed, in one line."""
    if not gone:
        return "nothing"
    kinds = ", ".join(f"{kind} {count}" for kind, count in kinds_of(gone).items())
    return f"{len(gone)} messages, {sum(each.tokens for each in gone):,} tokens ({kinds})"
