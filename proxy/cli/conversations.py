"""``weir conversations``: what the store knows, read without disturbing a Weir that is running."""

import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click
import msgspec

from policies.ledger import Note
from policies.memory.checkpoint import Checkpoint, InvalidCheckpoint
from policies.tokens import TEXT_OF
from proxy.cli import Failure
from proxy.cli.output import print_columns, print_facts, table
from proxy.cli.shared import (
    FILE,
    Findings,
    answering,
    confirm,
    found,
    given_again,
    json_option,
    key_names,
    moment,
    over_store,
    print_json,
    reading,
    reads,
    removed_json,
    removed_line,
    say,
    store_option,
    stored,
    tame,
    writing,
)
from proxy.config.values import Config, masked_url
from proxy.http.archive import checkpoints_of, newest_checkpoint, removed_of, saved_of
from proxy.http.conversations import MAX_NOTE_LEN, USUAL, KeptNote, tokens_by_bucket
from proxy.http.request import decision_of, exchange_of
from proxy.store import Store
from proxy.store.records import CheckpointRow, ConversationRow, ExchangeRow, NoteRow, Original, RemovedRow

REQUESTS_SHOWN = 200
MAX_REMOVED = 100_000
MAX_REQUESTS = 100_000
MAX_EXCERPT_LEN = 60
OBSERVED = "observe=1"
LAST_REQUEST = ("pressure", "pressure_before", "velocity", "turns_until_red", "action", "observed", "detail")
CUT_SHOWN = ("covers", "origin", "tokens", "ref", "text")

name_argument = click.argument("name", metavar="ID")


@click.group()
def conversations() -> None:
    """List, inspect, export and delete conversations.

    \b
    Example:
      weir conversations list
      weir conversations show support-4711 --timeline
      weir conversations checkpoint support-4711
    """


@conversations.command("list")
@answering
@store_option
@click.option("--limit", type=click.IntRange(min=1), default=50, help="How many conversations, newest first.")
@json_option
@over_store
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
@click.option("--timeline", is_flag=True, help=f"One line per request, the newest {REQUESTS_SHOWN}.")
@click.option("--checkpoint", is_flag=True, help="The newest checkpoint: the summary of the compacted history.")
@click.option("--removed", is_flag=True, help="Every removed message, with its ref for --ref.")
@click.option("--request", metavar="ID", help="What was done to a request, layer by layer, and why.")
@click.option("--ref", help="The full text of a removed message; with --json as it was sent.")
@stored
def show(
    config: Config, *, name: str, timeline: bool, checkpoint: bool, removed: bool, request: str | None, ref: str | None
) -> Findings:
    """Show a conversation, by name or id.

    \b
    Example:
      weir conversations show support-4711 --timeline
      weir conversations show support-4711 --request req_0a1b2c
      weir conversations show support-4711 --ref 74e67f258338
    """
    if sum((timeline, checkpoint, removed, request is not None, ref is not None)) > 1:
        raise click.UsageError("--timeline, --checkpoint, --removed, --request and --ref cannot be combined")

    async def read(store: Store) -> Findings:
        row = await found(store, name)
        if timeline:
            requests = await store.timeline(row, limit=REQUESTS_SHOWN)
            return table(requests, TIMELINE, plain=lambda each: exchange_of(each).plain())
        if checkpoint:
            return _summary(await _checkpoint(store, row))
        if removed:
            return await _removed(store, row)
        if request is not None:
            return await _request(store, row, request)
        if ref is not None:
            return await _originals(store, row, ref)
        return await _status(store, row, config)

    return reading(config, read)


@conversations.command()
@name_argument
@click.option("--format", "form", type=click.Choice(["md", "json"]), default="md", help="Output format.")
@click.option("--version", type=click.IntRange(min=1), help="Which version; defaults to the newest.")
@reads
async def checkpoint(
    store: Store, _: Config, *, name: str, form: Literal["md", "json"], version: int | None
) -> Findings:
    """Show a conversation's checkpoint: goal, rules, progress, decisions, identifiers.

    \b
    Example:
      weir conversations checkpoint support-4711
      weir conversations checkpoint support-4711 --version 3 --format json
    """
    row = await _checkpoint(store, await found(store, name), version)
    answer = Findings(lambda: saved_of(row).plain(), lambda: _print_state(row))
    return answer if form == "md" else Findings(answer.value, lambda: print_json(answer.value()))


@conversations.command()
@name_argument
@reads
async def removed(store: Store, _: Config, *, name: str) -> Findings:
    """List the messages removed from a conversation's window: by what, since when, and the ref of the original.

    \b
    Example:
      weir conversations removed support-4711
      weir conversations show support-4711 --ref 74e67f258338
    """
    return await _removed(store, await found(store, name))


@conversations.command()
@name_argument
@click.option("--add", "text", metavar="TEXT", help=f"A note to add, up to {MAX_NOTE_LEN:,} characters.")
@stored
def notes(config: Config, *, name: str, text: str | None) -> Findings:
    """List a conversation's notes (decisions, bugs, constraints, what is left to do), or add one.

    A running Weir uses a note that is added here only after a restart; add it over HTTP
    (POST /weir/conversations/ID/notes) to have it used at once.

    \b
    Example:
      weir conversations notes support-4711
      weir conversations notes support-4711 --add "The customer wants a refund, not a replacement."
    """
    if text is None:
        return reading(config, lambda store: _notes(store, name))
    if not text.strip() or len(text) > MAX_NOTE_LEN:
        raise click.BadParameter(f"should be 1 to {MAX_NOTE_LEN} characters", param_hint="--add")
    note = NoteRow.of(Note("misc", USUAL, text, "api"), at=time.time())

    async def add(store: Store) -> bool:
        row = await found(store, name)
        return await store.add_notes(row.tenant, row.id, [note]) > 0

    is_new = writing(config, add)
    said = "Added the note." if is_new else "This note already exists."
    return Findings(lambda: {**KeptNote.of(note).plain(), "new": is_new}, lambda: click.echo(said))


@conversations.command()
@name_argument
@click.option("--out", metavar="FILE", type=FILE, help="Write to this file; defaults to standard output.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@answering
@store_option
def export(config: Config, *, name: str, out: Path | None, force: bool) -> None:
    """Export everything about a conversation as one JSON document; a file is readable by its owner only.

    \b
    Example:
      weir conversations export support-4711 --out support-4711.json
    """
    if out is not None and out.exists() and not force:
        raise Failure(f"{out} already exists; --force overwrites it")

    async def read(store: Store) -> dict[str, object]:
        return await store.export(await found(store, name))

    document = json.dumps(reading(config, read), indent=2)
    if out is None:
        return click.echo(document)
    _write(out, f"{document}\n", force=force)
    return click.echo(f"{out}: {len(document):,} characters.", err=True)


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
      weir conversations export support-4711 --out support-4711.json
      weir conversations delete support-4711
    """

    async def read(store: Store) -> tuple[ConversationRow, str]:
        row = await found(store, name)
        key = (await key_names(store, config)).get(row.tenant, row.tenant[:8])
        gone, saved = await removed_from(store, row), await checkpoints_of(store, row)
        counts = f"{len(saved)} checkpoints, {len(await store.notes(row.tenant, row.id))} notes"
        return row, (
            f"{tame(row.name)} ({row.id}) of key {key}, last used {moment(row.updated)} UTC: "
            f"{row.requests} requests, {counts}; out of the window and kept: {removed_line(gone)}."
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
    gone, saved = await removed_from(store, row), await checkpoints_of(store, row)
    last = next(iter(await store.timeline(row, limit=1)), None)
    names, given = await key_names(store, config), click.get_current_context().params

    def value() -> dict[str, object]:
        state = {} if last is None else {name: getattr(last, name) for name in LAST_REQUEST}
        budget = {} if last is None else {name: last.detail.get(name) or {} for name in ("buckets", "caps")}
        return {
            **msgspec.structs.asdict(row),
            **state,
            **budget,
            "removed": removed_json(gone),
            "checkpoints": [each.version for each in saved],
        }

    def shown() -> None:
        print_facts(
            {
                "conversation": row.name,
                "id": row.id,
                "key": names.get(row.tenant, row.tenant),
                "part of": row.parent,
                "closed": None if row.closed is None else f"{moment(row.closed)} UTC",
                "model": row.model,
                "requests": f"{row.requests} on {row.branches} branch{'es' if row.branches != 1 else ''}",
                "first and last used": f"{moment(row.created)} to {moment(row.updated)} UTC",
                "last request": f"{_tokens(row)} tokens, {row.zone}",
                "pressure": None if last is None else _pressure(last),
                "growth": None if last is None else _growth(last),
                "buckets": None if last is None else _buckets(last),
                "last actions": actions_of(row.actions),
                "version": row.version,
                "checkpoints": ", ".join(str(each.version) for each in saved) or "none",
                "removed": removed_line(gone),
            }
        )
        for option in ["--timeline", *(["--checkpoint"] if saved else []), *(["--removed"] if gone else [])]:
            where = given_again(given["path"], given["store"])
            click.echo(f"  weir conversations show {shlex.quote(tame(row.name))} {option}{where}", err=True)

    return Findings(value, shown)


def _pressure(row: ExchangeRow) -> str:
    before, after = f"{row.pressure if row.pressure_before is None else row.pressure_before:.2f}", f"{row.pressure:.2f}"
    moved = f"{before} > {after}" if before != after else after
    return f"{moved}, {row.zone}; {row.action}{', observed only' if row.observed else ''}"


def _growth(row: ExchangeRow) -> str:
    if row.velocity is None:
        return "not known yet"
    left = "" if row.turns_until_red is None else f", red in {row.turns_until_red:g}"
    return f"{row.velocity:,.1f} tokens per request{left}"


def _buckets(row: ExchangeRow) -> str | None:
    used, caps = tokens_by_bucket(row.detail.get("buckets")), tokens_by_bucket(row.detail.get("caps"))
    shown = [f"{name} {used.get(name, 0):,}" + (f" of {caps[name]:,}" if name in caps else "") for name in used | caps]
    return ", ".join(shown) or None


async def _request(store: Store, row: ConversationRow, request: str) -> Findings:
    rows = await store.timeline(row, limit=MAX_REQUESTS)
    known = [each for each in rows if each.id == request] or [each for each in rows if each.id.startswith(request)]
    if len(known) != 1:
        said = "no request" if not known else f"{len(known)} requests begin with"
        raise Failure(f"{said} {request} in {row.name}; see weir conversations show {row.name} --timeline")
    return Findings(lambda: exchange_of(known[0]).plain(), lambda: _print_request(known[0]))


def _print_request(row: ExchangeRow) -> None:
    decision, layers = decision_of(row).plain(), exchange_of(row).plain()["layers"]
    summarized = decision["compaction_summary_tokens"] is not None
    print_facts(
        {
            "request": row.id,
            "at": f"{moment(row.at)} UTC",
            "model and policy": f"{row.model}, {row.policy}{', observed only' if row.observed else ''}",
            "tokens": _tokens(row),
            "pressure": _pressure(row),
            "actions": actions_of(row.actions),
            "removed or shortened": row.evicted,
            "summary": f"{row.detail['summary_tokens']:,} tokens" if summarized else None,
            "new window": decision["new_window_id"],
            "recommendation": decision["recommendation"],
            "outcome": f"{row.status} {row.outcome}",
        }
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


async def _checkpoint(store: Store, row: ConversationRow, version: int | None = None) -> CheckpointRow:
    if version is not None:
        one = await store.checkpoint_at(row, version)
        if one is None:
            versions = sorted({each.version for each in await checkpoints_of(store, row)})
            there = f"there are {', '.join(map(str, versions))}" if versions else "there is none"
            raise Failure(f"{row.name} has no checkpoint {version}: {there}")
        return one
    if (newest := await newest_checkpoint(store, row)) is not None:
        return newest
    raise Failure(f"{row.name} has no checkpoint: nothing was compacted or saved in it")


def _summary(row: CheckpointRow) -> Findings:
    cut = row.cut

    def value() -> dict[str, object]:
        made = {name: None if cut is None else getattr(cut, name) for name in CUT_SHOWN}
        known = {"version": row.version, "at": row.at, "reason": row.reason, "branch": row.branch}
        return {**known, **made, "covered": list(row.covered), "state": json.loads(row.body)}

    def shown() -> None:
        if cut is None:
            return _print_state(row)
        click.echo(
            f"Version {row.version}, {moment(row.at)} UTC: {cut.tokens:,} tokens ({cut.origin}) stand for the first "
            f"{cut.covers} messages after the head; ref {cut.ref}.\n",
            err=True,
        )
        return say(cut.text)

    return Findings(value, shown)


def _print_state(row: CheckpointRow) -> None:
    stands = "" if row.cut is None else f"; stands for the first {row.cut.covers} messages after the head"
    click.echo(f"Version {row.version}, {moment(row.at)} UTC, saved for {row.reason}{stands}.\n", err=True)
    try:
        say(Checkpoint.from_json(row.body).to_markdown().rstrip("\n"))
    except InvalidCheckpoint:
        say(row.body)


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
    return Findings(
        lambda: [{"ref": o.ref, "role": o.role, "tokens": o.tokens, "message": json.loads(o.body)} for o in originals],
        lambda: _print_originals(originals),
    )


def _print_originals(originals: Sequence[Original]) -> None:
    for original in originals:
        if len(originals) > 1:
            click.echo(f"--- {original.ref} {original.role}", err=True)
        say(original.text)


async def _notes(store: Store, name: str) -> Findings:
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


def _write(out: Path, text: str, *, force: bool) -> None:
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=out.parent, prefix=f".{out.name}.", encoding="utf-8", delete=False
        ) as f:
            written = Path(f.name)
            f.write(text)
        try:
            if force:
                written.replace(out)
            else:
                out.hardlink_to(written)
        finally:
            written.unlink(missing_ok=True)
    except FileExistsError as fault:
        raise Failure(f"{out} already exists; --force overwrites it") from fault
    except OSError as fault:
        raise Failure(f"{out} cannot be written: {fault.strerror}") from fault


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
