"""``weir conversations``: what the store knows, read without disturbing a Weir that is running."""

import json
import shlex
from typing import Any

import click
import msgspec

from policies.health import KEPT, trend_of
from policies.memory.checkpoint import Checkpoint, InvalidCheckpoint
from policies.tokens import TEXT_OF
from proxy.cli import Failure
from proxy.cli.output import print_columns, print_facts, table
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
from proxy.http.archive import checkpoints_of, newest_checkpoint, removed_of, saved_of
from proxy.http.conversations import KeptNote, tokens_by_bucket
from proxy.http.reports import conversation_health
from proxy.http.request import decision_of, exchange_of
from proxy.store import Store
from proxy.store.records import CheckpointRow, ConversationRow, ExchangeRow, RemovedRow

REQUESTS_SHOWN = 200
MAX_REMOVED = 100_000
MAX_REQUESTS = 100_000
MAX_EXCERPT_LEN = 60
OBSERVED = "observe=1"
METRICS = {
    "utilization": ".0%", "eviction_rate": ",.1f", "compression_ratio": ",.1f", "burn_rate": ",.1f",
    "fidelity_score": ".0%", "tool_result_bloat": ".0%",
}  # fmt: skip

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
@click.option("--limit", type=click.IntRange(min=1), default=50, help="How many conversations, newest first.")
@reads
async def list_conversations(store: Store, config: Config, *, limit: int) -> Findings:
    """List the conversations of all keys, last used first; tokens are those of the last request.

    \b
    Example:
      weir conversations list --store sqlite+aiosqlite:///weir.db --limit 10
    """
    rows = await store.conversations(None, limit=limit)
    names = await key_names(store, config) if rows else {}
    columns = {
        "conversation": lambda row: row.name,
        "key": lambda row: names.get(row.tenant, row.tenant[:8]),
        "model": lambda row: row.model,
        "requests": lambda row: row.requests,
        "tokens": _tokens,
        "last used (UTC)": lambda row: moment(row.updated),
        "zone": lambda row: row.zone,
        "last actions": lambda row: actions_of(row.actions),
        "part of": lambda row: row.parent,
        "closed (UTC)": lambda row: None if row.closed is None else moment(row.closed),
    }
    empty = f"No conversations in {masked_url(config.store.url)}."
    return table(rows, columns, empty=empty, optional=("part of", "closed (UTC)"))


@conversations.command()
@name_argument
@click.option("--timeline", "view", flag_value="timeline", help=f"A line per request, the newest {REQUESTS_SHOWN}.")
@click.option("--checkpoint", "view", flag_value="checkpoint", help="The state of the task, and the newest summary.")
@click.option("--removed", "view", flag_value="removed", help="Every removed message, with its ref for --ref.")
@click.option("--request", metavar="ID", help="What was done to a request, layer by layer, and why.")
@click.option("--ref", help="The full text of a removed message; with --json as it was sent.")
@reads
async def show(
    store: Store, config: Config, *, name: str, view: str | None, request: str | None, ref: str | None
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
        return table(requests, TIMELINE, plain=lambda each: exchange_of(each).plain())
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
    columns = {
        "at (UTC)": lambda note: moment(note.at),
        "category": lambda note: note.category,
        "importance": lambda note: note.importance,
        "from": lambda note: note.source,
        "note": lambda note: note.text,
    }
    rows = await store.notes(row.tenant, row.id)
    return table(rows, columns, plain=lambda note: KeptNote.of(note).plain(), empty="There are no notes.")


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

    A running Weir may still hold the conversation in memory and recreate it with the next request; delete it over HTTP
    (DELETE /weir/conversations/ID) to avoid that.

    \b
    Example:
      weir conversations delete support-4711
    """

    async def read(store: Store) -> tuple[ConversationRow, str]:
        row = await found(store, name)
        key = (await key_names(store, config)).get(row.tenant, row.tenant[:8])
        gone = await removed_from(store, row)
        saved = await checkpoints_of(store, row)
        return row, (
            f"{tame(row.name)} ({row.id}) of key {key}, last used {moment(row.updated)} UTC: {row.requests} requests, "
            f"{len(saved)} checkpoints; out of the window and kept: {removed_line(gone)}."
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


def actions_of(actions: str) -> str:
    parts = actions.split(",")
    if OBSERVED not in parts:
        return actions
    planned = [part for part in parts if part != OBSERVED]
    return "observed" + (f": {','.join(planned)}" if planned else "")


async def _status(store: Store, row: ConversationRow, config: Config) -> Findings:
    gone = await removed_from(store, row)
    saved = await checkpoints_of(store, row)
    last = next(iter(await store.timeline(row, limit=1)), None)
    snapshots = await store.snapshots(row)
    alerts = await store.alerts(row)
    names = await key_names(store, config)
    given = click.get_current_context().params
    health = conversation_health(row, snapshots, alerts, limit=KEPT)
    value = {
        **msgspec.structs.asdict(row),
        "last": None if last is None else exchange_of(last).plain(),
        "removed": removed_json(gone),
        "checkpoints": [each.version for each in saved],
        "health": health.plain(),
    }
    facts = {
        "conversation": row.name,
        "id": row.id,
        "key": names.get(row.tenant, row.tenant),
        "part of": row.parent,
        "closed": None if row.closed is None else f"{moment(row.closed)} UTC",
        "model": row.model,
        "requests": f"{row.requests} on {row.branches} branch{'es' if row.branches != 1 else ''}",
        "first and last used": f"{moment(row.created)} to {moment(row.updated)} UTC",
        "version": row.version,
        "checkpoints": ", ".join(str(each.version) for each in saved) or "none",
        "removed": removed_line(gone),
        "last request": None if last is None else last.id,
        **({} if last is None else _facts(last)),
        "health": f"{health.status}; trend {trend_of(snapshots).trend}",
        **({f"  {each.replace('_', ' ')}": _metric(snapshots[-1], each) for each in METRICS} if snapshots else {}),
    }

    def show() -> None:
        print_facts(facts)
        if alerts:
            click.echo()
            print_columns(alerts[:ALERTS_SHOWN], ALERT)
        where = given_again(given["path"], given["store"])
        for option in ["--timeline", *(["--checkpoint"] if saved else []), *(["--removed"] if gone else [])]:
            click.echo(f"  weir conversations show {shlex.quote(tame(row.name))} {option}{where}", err=True)

    return Findings(lambda: value, show)


def _metric(snapshot: Any, name: str) -> str:
    value = getattr(snapshot, name)
    return "-" if value is None else format(value, METRICS[name])


def _facts(row: ExchangeRow) -> dict[str, object]:
    before = f"{row.pressure if row.pressure_before is None else row.pressure_before:.2f} > "
    after = f"{row.pressure:.2f}"
    used = tokens_by_bucket(row.detail.get("buckets"))
    caps = tokens_by_bucket(row.detail.get("caps"))
    buckets = [
        f"{name} {used.get(name, 0):,}" + (f" of {caps[name]:,}" if name in caps else "") for name in used | caps
    ]
    left = "" if row.turns_until_red is None else f", red in {row.turns_until_red:g}"
    return {
        "tokens": _tokens(row),
        "pressure": f"{before if before != f'{after} > ' else ''}{after}, {row.zone}; {row.action}",
        "growth": "not known yet" if row.velocity is None else f"{row.velocity:,.1f} tokens per request{left}",
        "buckets": ", ".join(buckets) or None,
        "actions": actions_of(row.actions),
        "policy": row.policy,
        "outcome": f"{row.status} {row.outcome}",
    }


async def _request(store: Store, row: ConversationRow, request: str) -> Findings:
    rows = await store.timeline(row, limit=MAX_REQUESTS)
    known = [each for each in rows if each.id == request] or [each for each in rows if each.id.startswith(request)]
    if len(known) != 1:
        said = "no request" if not known else f"{len(known)} requests begin with"
        raise Failure(f"{said} {request} in {row.name}; see weir conversations show {row.name} --timeline")
    return Findings(lambda: exchange_of(known[0]).plain(), lambda: _print_request(known[0]))


def _print_request(row: ExchangeRow) -> None:
    decision = decision_of(row).plain()
    layers = exchange_of(row).plain()["layers"]
    facts = {"request": row.id, "at": f"{moment(row.at)} UTC", "model": row.model, **_facts(row)}
    print_facts(
        facts | {"removed or shortened": row.evicted, "recommendation": decision["recommendation"]},
    )
    click.echo()
    if not isinstance(layers, list) or not layers:
        again = row.actions not in {"none", "observe=1"}
        said = "what was taken out before stays out" if again else "nothing had to go"
        return click.echo(f"No layer ran: {said}.")
    columns = {
        "layer": lambda each: each["layer"],
        "about": lambda each: each["scope"],
        "tokens": lambda each: f"{each['tokens_before']:,} > {each['tokens_after']:,}",
        "units": lambda each: each["units"],
        "kept": lambda each: "last rung" if each["rung"] and each["kept"] else "yes" if each["kept"] else "no",
        "why not more": lambda each: each["reason"],
    }
    return print_columns(layers, columns)


async def _checkpoint(store: Store, row: ConversationRow) -> Findings:
    newest = await newest_checkpoint(store, row)
    if newest is None:
        raise Failure(f"{row.name} has no checkpoint: nothing was compacted or saved in it")
    return Findings(lambda: saved_of(newest).plain(), lambda: _print_checkpoint(newest))


def _print_checkpoint(row: CheckpointRow) -> None:
    click.echo(f"Version {row.version}, {moment(row.at)} UTC, saved for {row.reason}.\n", err=True)
    try:
        say(Checkpoint.from_json(row.body).to_markdown().rstrip("\n"))
    except InvalidCheckpoint:
        say(row.body)
    if row.cut is not None:
        tokens = f"{row.cut.tokens:,} tokens ({row.cut.origin})"
        click.echo(f"\n{tokens} stand for the first {row.cut.covers} messages; ref {row.cut.ref}:\n", err=True)
        say(row.cut.text)


async def _removed(store: Store, row: ConversationRow) -> Findings:
    columns = {
        "ref": lambda each: each.ref,
        "role": lambda each: each.role or "?",
        "tool": lambda each: each.tool,
        "tokens": lambda each: f"{each.tokens:,} > {each.kept:,}" if each.kept else f"{each.tokens:,}",
        "how": lambda each: each.how,
        "since (UTC)": lambda each: moment(each.at),
        "begins with": lambda each: " ".join(each.text[: 4 * MAX_EXCERPT_LEN].split())[:MAX_EXCERPT_LEN],
    }
    return table(
        await removed_from(store, row),
        columns,
        plain=lambda each: {**removed_of(each, with_text=False).plain(), "text": each.text},
        empty="Nothing was removed.",
    )


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
    value = [{"ref": o.ref, "role": o.role, "tokens": o.tokens, "message": json.loads(o.body)} for o in originals]

    def show() -> None:
        for original in originals:
            if len(originals) > 1:
                click.echo(f"--- {original.ref} {original.role}", err=True)
            say(original.text)

    return Findings(lambda: value, show)


def _tokens(row: ConversationRow | ExchangeRow) -> str:
    before, after = row.tokens_before, row.tokens_after
    moved = f"{before:,} > {after:,}" if after != before else f"{after:,}"
    return f"{moved} of {row.limit:,}"


TIMELINE = {
    "at (UTC)": lambda row: moment(row.at),
    "messages": lambda row: row.length,
    "tokens": _tokens,
    "pressure": lambda row: f"{row.pressure:.2f}",
    "zone": lambda row: row.zone,
    "velocity": lambda row: None if row.velocity is None else f"{row.velocity:,.0f}",
    "action": lambda row: row.action,
    "actions": lambda row: actions_of(row.actions),
    "outcome": lambda row: f"{row.status} {row.outcome}",
    "cached": lambda row: (
        f"{row.usage_cached / row.usage_prompt:.0%}" if row.usage_cached and row.usage_prompt else None
    ),
    "weir ms": lambda row: f"{row.overhead_ms:.1f}",
    "request": lambda row: row.id,
}
ALERTS_SHOWN = 20
ALERT = {
    "since (UTC)": lambda alert: moment(alert.at),
    "until": lambda alert: "open" if alert.closed is None else moment(alert.closed),
    "level": lambda alert: alert.level,
    "alert": lambda alert: alert.kind,
    "": lambda alert: alert.said,
}
