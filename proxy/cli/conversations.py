"""``weir conversations``: what the store knows, read without disturbing a Weir that is running."""

import json
import shlex
from typing import Any

import click
import msgspec

from policies.health import KEPT
from policies.memory.checkpoint import Checkpoint, InvalidCheckpoint
from policies.tokens import TEXT_OF
from proxy.cli import Failure
from proxy.cli.output import listing, print_facts
from proxy.cli.shared import (
    Findings,
    confirm,
    found,
    given_again,
    key_names,
    moment,
    reading,
    reads,
    removed_json,
    removed_line,
    say,
    stored,
    tame,
    writing,
)
from proxy.config.values import Config, masked_url
from proxy.features.checkpoints import checkpoints_of, newest_checkpoint, saved_of
from proxy.features.health_routes import conversation_health
from proxy.features.removed import removed_of
from proxy.http.request import exchange_of, fields_of
from proxy.store import Store
from proxy.store.records import CheckpointRow, ConversationRow, RemovedRow

REQUESTS_SHOWN = 200
MAX_REMOVED = 100_000
MAX_REQUESTS = 100_000
EXCERPT = 60
OBSERVED = "observe=1"
ALERTS_SHOWN = 20
TIMELINE = (
    "at length tokens_before tokens_after limit pressure zone velocity action actions status"
    " outcome usage_cached overhead_ms id"
)
FACTS = (
    "name id key parent closed model requests branches created updated version checkpoints removed"
)
REQUEST = (
    "policy tokens_before tokens_after limit pressure_before pressure zone velocity turns_until_red"
    " action actions evicted observed status outcome"
)
METRICS = "utilization eviction_rate compression_ratio burn_rate fidelity_score tool_result_bloat"

name_argument = click.argument("name", metavar="ID")


@click.group()
def conversations() -> None:
    """List, inspect, export and delete conversations.

    \b
    Example:
      weir conversations list
      weir conversations show support-4711 --timeline
      weir conversations export support-4711 > support-4711.json
    """


@conversations.command("list")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, help="How many conversations, newest first."
)
@reads
async def list_conversations(store: Store, config: Config, *, limit: int) -> Findings:
    """List the conversations of all keys, last used first; tokens are those of the last request.

    \b
    Example:
      weir conversations list --store sqlite+aiosqlite:///weir.db --limit 10
    """
    rows = await store.conversations(None, limit=limit)
    names = await key_names(store, config) if rows else {}
    return listing(
        [
            {**msgspec.structs.asdict(row), "key": names.get(row.tenant, row.tenant[:8])}
            for row in rows
        ],
        "name key model requests tokens_before tokens_after limit updated zone actions parent"
        " closed",
        empty=f"No conversations in {masked_url(config.store.url)}.",
        optional="parent closed",
    )


@conversations.command()
@name_argument
@click.option(
    "--timeline",
    "view",
    flag_value="timeline",
    help=f"A line per request, the newest {REQUESTS_SHOWN}.",
)
@click.option(
    "--checkpoint",
    "view",
    flag_value="checkpoint",
    help="The state of the task, and the newest summary.",
)
@click.option(
    "--removed", "view", flag_value="removed", help="Every removed message, with its ref for --ref."
)
@click.option(
    "--request", metavar="ID", help="What was done to a request, layer by layer, and why."
)
@click.option("--ref", help="The full text of a removed message; with --json as it was sent.")
@reads
async def show(
    store: Store,
    config: Config,
    *,
    name: str,
    view: str | None,
    request: str | None,
    ref: str | None,
) -> Findings:
    """Show a conversation, by name or id: how full and how healthy it is, and what was removed.

    \b
    Example:
      weir conversations show support-4711 --timeline
      weir conversations show support-4711 --request req_0a1b2c
      weir conversations show support-4711 --ref 74e67f258338
    """
    row = await found(store, name)
    if request is not None:
        return await _request(store, row, request)
    if ref is not None:
        return await _originals(store, row, ref)
    if view == "timeline":
        requests = await store.timeline(row, limit=REQUESTS_SHOWN)
        return listing([exchange_of(each) for each in requests], TIMELINE)
    if view == "checkpoint":
        return await _checkpoint(store, row)
    if view == "removed":
        return await _removed(store, row)
    return await _status(store, row, config)


@conversations.command()
@name_argument
@reads
async def notes(store: Store, _: Config, *, name: str) -> Findings:
    """List a conversation's notes: decisions, bugs, constraints, what is left to do.

    \b
    Example:
      weir conversations notes support-4711
    """
    row = await found(store, name)
    rows = [fields_of(note) for note in await store.notes(row.tenant, row.id)]
    return listing(rows, "at category importance source text", empty="There are no notes.")


@conversations.command()
@name_argument
@reads
async def export(store: Store, _: Config, *, name: str) -> Findings:
    """Print everything about a conversation as one JSON document.

    \b
    Example:
      weir conversations export support-4711 > support-4711.json
    """
    document = await store.export(await found(store, name))
    return Findings(lambda: document, lambda: click.echo(json.dumps(document, indent=2)))


@conversations.command()
@name_argument
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@stored
def delete(config: Config, *, name: str, yes: bool) -> Findings:
    """Delete a conversation permanently: requests, checkpoints, notes, and its archived messages.

    A running Weir may still hold the conversation in memory and recreate it with the next request;
    delete it over HTTP (DELETE /weir/conversations/ID) to avoid that.

    \b
    Example:
      weir conversations delete support-4711
    """

    async def read(store: Store) -> tuple[ConversationRow, str]:
        row = await found(store, name)
        key = (await key_names(store, config)).get(row.tenant, row.tenant[:8])
        gone = await removed_from(store, row)
        saved = await checkpoints_of(store, row)
        return (
            row,
            (
                f"{tame(row.name)} ({row.id}) of key {key}, last used {moment(row.updated)} UTC:"
                f" {row.requests} requests, {len(saved)} checkpoints; out of the window and kept:"
                f" {removed_line(gone)}."
            ),
        )

    row, going = reading(config, read)
    if not yes:
        click.echo(going, err=True)
        confirm("Delete it permanently?")
    if not writing(config, lambda store: store.delete(row)):
        raise Failure(f"{row.name} is already deleted")
    deleted = {"id": row.id, "name": row.name, "deleted": True}
    return Findings(lambda: deleted, lambda: click.echo(f"Deleted {tame(row.name)}."))


async def removed_from(store: Store, row: ConversationRow) -> list[RemovedRow]:
    return list(reversed(await store.removed(row, limit=MAX_REMOVED)))


async def _status(store: Store, row: ConversationRow, config: Config) -> Findings:
    gone = await removed_from(store, row)
    saved = await checkpoints_of(store, row)
    last = next(iter(await store.timeline(row, limit=1)), None)
    snapshots = await store.snapshots(row)
    alerts = await store.alerts(row)
    names = await key_names(store, config)
    given = click.get_current_context().params
    value: dict[str, Any] = {
        **msgspec.structs.asdict(row),
        "key": names.get(row.tenant, row.tenant[:8]),
        "last": None if last is None else exchange_of(last),
        "removed": removed_json(gone),
        "checkpoints": [each.version for each in saved],
        "health": conversation_health(row, snapshots, alerts, limit=KEPT),
    }

    def show() -> None:
        last = value["last"] or {"detail": {}}
        health = value["health"]
        print_facts(
            (value, FACTS),
            (last, REQUEST),
            (last["detail"], "buckets caps"),
            ({"health": health["status"], **health["trend"]}, "health trend"),
            (health["snapshot"] or {}, METRICS),
        )
        if health["alerts"]:
            click.echo()
            listing(
                health["alerts"][:ALERTS_SHOWN], "at closed level kind said", optional="closed"
            ).show()
        where = given_again(given["path"], given["store"])
        for option in [
            "--timeline",
            *(["--checkpoint"] if saved else []),
            *(["--removed"] if gone else []),
        ]:
            click.echo(
                f"  weir conversations show {shlex.quote(tame(row.name))} {option}{where}", err=True
            )

    return Findings(lambda: value, show)


async def _request(store: Store, row: ConversationRow, request: str) -> Findings:
    rows = await store.timeline(row, limit=MAX_REQUESTS)
    known = [each for each in rows if each.id == request] or [
        each for each in rows if each.id.startswith(request)
    ]
    if len(known) != 1:
        said = "no request" if not known else f"{len(known)} requests begin with"
        raise Failure(
            f"{said} {request} in {row.name}; see weir conversations show {row.name} --timeline"
        )
    value = exchange_of(known[0])

    def show() -> None:
        print_facts(
            (
                {"request": value["id"], "at": value["at"], "model": value["model"]},
                "request at model",
            ),
            (value, REQUEST),
            (value["decision"], "recommendation new_window_id compaction_summary_tokens"),
        )
        click.echo()
        if not value["layers"]:
            again = value["actions"] not in {"none", OBSERVED}
            said = "what was taken out before stays out" if again else "nothing had to go"
            click.echo(f"No layer ran: {said}.")
        else:
            listing(
                value["layers"], "layer scope tokens_before tokens_after units kept reason"
            ).show()

    return Findings(lambda: value, show)


async def _checkpoint(store: Store, row: ConversationRow) -> Findings:
    newest = await newest_checkpoint(store, row)
    if newest is None:
        raise Failure(f"{row.name} has no checkpoint: nothing was compacted or saved in it")
    return Findings(lambda: saved_of(newest), lambda: _print_checkpoint(newest))


def _print_checkpoint(row: CheckpointRow) -> None:
    click.echo(f"Version {row.version}, {moment(row.at)} UTC, saved for {row.reason}.\n", err=True)
    try:
        say(Checkpoint.from_json(row.body).to_markdown().rstrip("\n"))
    except InvalidCheckpoint:
        say(row.body)
    if row.cut is not None:
        tokens = f"{row.cut.tokens:,} tokens ({row.cut.origin})"
        click.echo(
            f"\n{tokens} stand for the first {row.cut.covers} messages; ref {row.cut.ref}:\n",
            err=True,
        )
        say(row.cut.text)


async def _removed(store: Store, row: ConversationRow) -> Findings:
    gone = await removed_from(store, row)
    value = [{**removed_of(each, with_text=False), "text": each.text} for each in gone]
    shown = [{**each, "text": str(each["text"])[:EXCERPT]} for each in value]
    listed = listing(
        shown, "ref role tool tokens kept how since text", empty="Nothing was removed."
    )
    return Findings(lambda: value, listed.show)


async def _originals(store: Store, row: ConversationRow, ref: str) -> Findings:
    ref = ref.removesuffix(TEXT_OF)
    one = await store.original(row.tenant, ref)
    originals = [one] if one is not None else await store.covered(row.tenant, ref)
    if not originals:
        gone = await removed_from(store, row)
        hint = "" if gone else ": nothing was removed from it"
        if any(each.ref == ref for each in gone):
            hint = ": its content was not kept (store.content is digest) or is damaged"
        raise Failure(f"no original {ref} in {row.name}{hint}")
    value = [
        {"ref": o.ref, "role": o.role, "tokens": o.tokens, "message": json.loads(o.body)}
        for o in originals
    ]

    def show() -> None:
        for original in originals:
            if len(originals) > 1:
                click.echo(f"--- {original.ref} {original.role}", err=True)
            say(original.text)

    return Findings(lambda: value, show)
