"""The database: ``weir db`` (a copy, what is old, its schema) and ``weir audit``.

The audit log is a part of it: whether it is what was written, what it says, what was evicted.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from proxy.access.destination import TENANT_SHOWN
from proxy.cli import Failure
from proxy.cli.output import print_columns, print_line, progress, table
from proxy.cli.shared import Findings, confirm, counted, key_names, moment, named, reading, reads, stored, writing
from proxy.config.values import Config, masked_url, moment_in
from proxy.store import Store
from proxy.store.chain import AuditRow, AuditType, Verified, VerifiedChains
from proxy.store.records import EvictionRow, EvictionSum


@click.group()
def db() -> None:
    """Back up, prune and migrate the database.

    \b
    Example:
      weir db backup /backup/weir-monday.db
    """


@db.command()
@click.argument("target", metavar="PATH", type=click.Path(path_type=Path))
@stored
def backup(config: Config, *, target: Path) -> Findings:
    """Copy a SQLite database, also while Weir serves from it: one consistent moment, checked, readable by its owner.

    An existing file is never overwritten. A database of an older Weir is copied as it is. To restore, stop Weir and put
    the copy in the place of the database, without the -wal and -shm files beside it. PostgreSQL has its own tools:
    pg_dump --format=custom --file=PATH DATABASE.

    \b
    Example:
      weir db backup /backup/weir-monday.db
      weir serve --store sqlite+aiosqlite:////backup/weir-monday.db
    """
    if target.exists():
        raise Failure(f"{target} exists already; name a new file")
    reading(config, lambda store: store.backup(target.absolute()), any_schema=True)
    size = target.stat().st_size
    return Findings(
        lambda: {"path": str(target), "bytes": size}, lambda: click.echo(f"{target}: {size:,} bytes, checked.")
    )


@db.command()
@click.option("--older-than", metavar="AGE", help="Like 90m, 24h or 7d; defaults to the configuration's retention.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@stored
def prune(config: Config, *, older_than: str | None, yes: bool) -> Findings:
    """Delete the conversations that were not used for so long, permanently; a running Weir does so once a day.

    \b
    Example:
      weir db backup before.db
      weir db prune --older-than 7d
    """
    if older_than is None and config.store.retention is None:
        raise click.UsageError("the configuration keeps conversations for ever: say --older-than, for example 90d")
    try:
        before = time.time() - (config.store.retention or 0.0)
        before = moment_in(older_than, now=time.time()) if older_than is not None else before
    except ValueError as fault:
        raise click.BadParameter("should be like 90m, 24h or 7d", param_hint="--older-than") from fault
    due = reading(config, lambda store: store.counts(before=before))["due"]
    if not yes:
        said = f"{counted(int(due or 0), 'conversation')} last used before {moment(before)} UTC"
        click.echo(f"{masked_url(config.store.url)}: {said}.", err=True)
        confirm("Delete them permanently?")
    rows = writing(config, lambda store: store.prune(before))
    said = f"Deleted {counted(int(due or 0), 'conversation')}, {counted(rows, 'row')} in all."
    return Findings(lambda: {"before": before, "conversations": due, "rows": rows}, lambda: click.echo(said))


@db.command()
@stored
def migrate(config: Config) -> Findings:
    """Migrate the database to the latest schema, or create it; `weir serve` does the same when it starts.

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


OPERATOR = "operator"
FACTS_SHOWN = 100
EVICTIONS_SHOWN = 20
HEAD = re.compile(r"(?:(\d+):)?([0-9a-f]{64})")

tenant_option = click.option(
    "--tenant", metavar="T", help=f"Only this chain: a tenant's id or a prefix of it, or {OPERATOR}."
)


@click.group()
def audit() -> None:
    """Verify and read the audit log; list evictions.

    \b
    Example:
      weir audit verify
      weir audit list --conversation support-4711
      weir audit evictions --conversation support-4711
    """


@dataclass(frozen=True, slots=True)
class _Head:
    seq: int | None
    link: bytes


def _heads(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> list[_Head]:
    found = [HEAD.fullmatch(text.strip().lower()) for text in given]
    heads = [_Head(None if each[1] is None else int(each[1]), bytes.fromhex(each[2])) for each in found if each]
    if len(heads) < len(given):
        raise click.BadParameter("should be 64 hex digits, as verify prints them", param_hint="--head")
    return heads


@audit.command()
@tenant_option
@click.option(
    "--head", "noted", multiple=True, metavar="HASH", callback=_heads, help="A head printed earlier; may be repeated."
)
@reads
async def verify(store: Store, config: Config, *, tenant: str | None, noted: list[_Head]) -> Findings:
    """Verify that no row of the audit log was changed or removed.

    A chain that was truncated looks like a shorter one. So keep the head that this prints somewhere else, and pass it
    with --head later: it must still be in the chain. Rows that retention deleted are covered by a seal.

    \b
    Example:
      weir audit verify
      weir audit verify --head 412:9f2c51c0be5dbe6ea3f7a8a1b9d6a0a7c6f8a6f0f0b1c9d8e7f6a5b4c3d2e1f0
    """
    only = None if tenant is None else await _tenant(store, tenant)
    with progress("rows") as progressed:
        audited = await store.verify(
            only,
            heads=[each.link for each in noted],
            progress=lambda done, total: progressed(done, total, f"{done} of {total} rows"),
        )
    names = await key_names(store, config) if audited.chains else {}
    lost = [each for each in noted if not any(each.link in chain.found for chain in audited.chains)]
    failure = "; ".join(_faults(audited, len(lost)))

    chains = [
        {**msgspec.to_builtins(each), "found": sorted(link.hex() for link in each.found)} for each in audited.chains
    ]
    given = [{"head": each.link.hex(), "found": each not in lost} for each in noted]
    value = {"ok": not failure, "chains": chains, "heads": given, "unguarded": audited.unguarded}

    def show() -> None:
        _show_chains(audited.chains, names)
        for each in noted:
            found = _why_lost(each, audited.chains) if each in lost else "is in the chain"
            click.echo(f"{each.link.hex()[:12]}… {found}")

    return Findings(lambda: value, show, failure)


@audit.command("list")
@click.option("--conversation", metavar="ID", help="Only this conversation, by name or id; a deleted one too.")
@click.option("--type", "kind", type=click.Choice([str(each) for each in AuditType]), help="Only rows of this type.")
@click.option("--limit", type=click.IntRange(min=1), default=50, help="How many rows, newest first.")
@tenant_option
@reads
async def list_rows(
    store: Store, config: Config, *, conversation: str | None, kind: str | None, limit: int, tenant: str | None
) -> Findings:
    """List what was done to conversations, policies and keys, newest first.

    \b
    Example:
      weir audit list --conversation support-4711
      weir audit list --type budget_violation --limit 20 --json
    """
    only = None if tenant is None else await _tenant(store, tenant)
    known = None if conversation is None else await store.conversation(only, conversation)
    wanted = conversation if known is None else known.id
    rows = await store.audit(only, conversation=wanted, kind=kind, limit=limit)
    names = await key_names(store, config) if rows else {}
    names |= {each.id: each.name for each in await named(store)}
    columns = {
        "at (UTC)": lambda row: moment(row.at),
        "row": lambda row: row.seq,
        "type": lambda row: row.type,
        "facts": lambda row: _shortened(json.dumps(row.told, ensure_ascii=False)),  # at blanks, narrow terminals break
        "conversation": lambda row: names.get(row.conversation or "", row.conversation or "-"),
        "chain": lambda row: _chain_name(row.tenant, names),
        "request": lambda row: row.request or "-",
    }

    def plain(row: AuditRow) -> dict[str, object]:
        return {**msgspec.structs.asdict(row), "facts": row.told, "prev": row.prev.hex(), "hash": row.hash.hex()}

    return table(rows, columns, plain=plain, empty="The audit log has no such rows.")


@audit.command()
@click.option("--conversation", "name", metavar="NAME", help="Only this conversation, by name or id.")
@click.option("--policy", metavar="P", help="Only evictions by this policy.")
@click.option("--limit", type=click.IntRange(min=1), default=200, help="How many rows with --json.")
@reads
async def evictions(store: Store, _: Config, *, name: str | None, policy: str | None, limit: int) -> Findings:
    """List what was evicted, what that freed, and how much of it was requested again: the regret.

    If a tool's results are often requested again, give them a longer life in the policy; look at five to ten runs
    before changing anything. Results that a newer one repeats or replaces do not count as requested again.

    \b
    Example:
      weir audit evictions --policy balanced
      weir audit evictions --conversation support-4711 --json
    """
    one = None if name is None else await store.conversation(None, name)
    if name is not None and one is None:
        raise Failure(f"no conversation {name}; see weir conversations list")
    sums = await store.eviction_sums(None, conversation=one, policy=policy)
    rows = await store.evictions(None, conversation=one, policy=policy, limit=limit)
    asked = await store.evictions(None, conversation=one, policy=policy, asked_again=True, limit=limit)
    total = _total(sums)
    groups = {label: _grouped(sums, label) for label in ("layer", "tool")}

    listed = {"asked_again_rows": [_eviction_json(row) for row in asked], "rows": [_eviction_json(r) for r in rows]}
    value = {**total, **{f"by_{label}": group for label, group in groups.items()}, **listed}

    def show() -> None:
        if not sums:
            return click.echo("Nothing was evicted.", err=True)
        print_line(
            f"{total['evicted']} evicted, {total['tokens_freed']:,} tokens freed; {total['asked_again']} of "
            f"{total['results']} tool results were requested again (regret {_share(total['regret'])}).\n",
            wrap=True,
        )
        for label, group in groups.items():
            print_columns(group, {label: lambda each, label=label: each[label] or "(no tool)"} | GROUP)
            click.echo()
        if asked:
            click.echo("Requested again, newest first:")
            print_columns(asked[:EVICTIONS_SHOWN], ASKED_AGAIN)
        return None

    return Findings(lambda: value, show)


async def _tenant(store: Store, given: str) -> str:
    if given == OPERATOR:
        return ""
    known = await store.audited_tenants()
    matching = [each for each in known if each.startswith(given)] if given not in known else [given]
    if not given or len(matching) != 1:
        there = f"{len(matching)} chains begin" if len(matching) > 1 else "no chain begins"
        raise Failure(f"{there} with {given!r}; see weir audit verify")
    return matching[0]


def _faults(audited: VerifiedChains, lost: int) -> Iterator[str]:
    if broken := sum(chain.broken is not None for chain in audited.chains):
        yield f"{broken} of {len(audited.chains)} chains {'was' if broken == 1 else 'were'} changed"
    if lost:
        yield f"{lost} of the given heads {'is' if lost == 1 else 'are'} missing"
    if audited.unguarded:
        yield f"the table is no longer guarded: {', '.join(audited.unguarded)}"


def _show_chains(chains: list[Verified], names: Mapping[str, str]) -> None:
    columns = {
        "chain": lambda chain: _chain_name(chain.tenant, names),
        "rows": lambda chain: chain.rows,
        "good": lambda chain: chain.good,
        "sealed up to": lambda chain: chain.sealed or "-",
        "first broken": lambda chain: "-" if chain.broken is None else f"{chain.broken.seq}: {chain.broken.kind}",
        "head": lambda chain: chain.head,
    }
    table(chains, columns, empty="The audit log is empty.").show()


def _why_lost(head: _Head, chains: list[Verified]) -> str:
    if head.seq is not None and any(head.seq < chain.sealed for chain in chains):
        return "is not in any chain; a row with that number was deleted under a seal"
    return "is not in any chain: one was truncated or rewritten"


def _shortened(facts: str) -> str:
    return facts if len(facts) <= FACTS_SHOWN else f"{facts[:FACTS_SHOWN]}…"


def _chain_name(tenant: str, names: Mapping[str, str]) -> str:
    return names.get(tenant, tenant[:TENANT_SHOWN]) if tenant else OPERATOR


def _eviction_json(row: EvictionRow) -> dict[str, object]:
    return {
        **msgspec.structs.asdict(row),
        "digest": row.digest.hex(),
        "call_hash": row.call_hash.hex(),
        "freed": row.freed,
    }


def _total(sums: Sequence[EvictionSum]) -> dict[str, object]:
    results = sum(each.evicted for each in sums if each.tool)
    again = sum(each.asked_again for each in sums)
    return {
        "evicted": sum(each.evicted for each in sums),
        "results": results,
        "asked_again": again,
        "regret": round(again / results, 4) if results else None,
        "tokens_freed": sum(each.tokens_before - each.tokens_after for each in sums),
    }


def _grouped(sums: Iterable[EvictionSum], label: str) -> list[dict[str, object]]:
    groups: dict[str, list[EvictionSum]] = {}
    for each in sums:
        groups.setdefault(getattr(each, label), []).append(each)
    return [{label: name, **_total(group)} for name, group in groups.items()]


def _share(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) else "-"


GROUP = {
    "evicted": lambda each: each["evicted"],
    "requested again": lambda each: each["asked_again"],
    "regret": lambda each: _share(each["regret"]),
    "tokens freed": lambda each: f"{each['tokens_freed']:,}",
}
ASKED_AGAIN = {
    "evicted at (UTC)": lambda row: moment(row.at),
    "requested again": lambda row: moment(row.asked_again_at or 0.0),
    "conversation": lambda row: row.conversation,
    "tool": lambda row: row.tool,
    "layer": lambda row: row.layer,
    "scorer": lambda row: row.scorer or "-",
    "policy": lambda row: row.policy,
    "tokens": lambda row: f"{row.tokens_before:,} > {row.tokens_after:,}",
    "ref": lambda row: row.digest.hex()[:12],
}
