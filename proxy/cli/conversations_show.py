"""How the commands about conversations print what they found: tables for people, JSON for programs."""

import datetime as dt
import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import click
from rich.table import Table
from rich.text import Text

from policies.checkpoint import Checkpoint, InvalidCheckpoint
from proxy.cli.config import console, print_json
from proxy.cli.conversations_read import kinds_of, removed_line
from proxy.http.archive import removed_of
from proxy.http.control import KeptNote
from proxy.http.conversations import decision_of, exchange_of
from proxy.store.records import CheckpointRow, ConversationRow, ExchangeRow, NoteRow, Original, RemovedRow

EXCERPT = 60
OBSERVED = "observe=1"
STATE = ("pressure", "pressure_before", "velocity", "turns_until_red", "action", "observed", "detail")


def show_list(rows: list[ConversationRow], names: Mapping[str, str], *, as_json: bool) -> None:
    """Conversations, keys by ``names``; what one is a part of and when it was closed only where there is such a one."""
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    more = [
        (title, cell)
        for title, cell in (
            ("part of", lambda row: Text(tame(row.parent or ""))),
            ("closed (UTC)", lambda row: "" if row.closed is None else moment(row.closed)),
        )
        if any(str(cell(row)) for row in rows)
    ]
    columns = ("conversation", "key", "model", "requests", "tokens", "last used (UTC)", "zone", "last actions")
    table = plain_table(*columns, *(title for title, _ in more))
    for row in rows:
        table.add_row(
            Text(tame(row.name)),
            Text(key_name(row.tenant, names)),
            Text(tame(row.model)),
            str(row.requests),
            tokens(row.tokens_before, row.tokens_after, row.limit),
            moment(row.updated),
            row.zone,
            actions_of(row.actions),
            *(cell(row) for _, cell in more),
        )
    console().print(table)


def show_status(
    row: ConversationRow,
    gone: list[RemovedRow],
    checkpoints: list[CheckpointRow],
    names: Mapping[str, str],
    *,
    last: list[ExchangeRow],
    where: str,
    as_json: bool,
) -> None:
    """How full a conversation is, what was done to it, and the commands that say more; ``where`` leads to the store."""
    if as_json:
        out = {"messages": len(gone), "tokens": sum(each.tokens for each in gone), "kinds": kinds_of(gone)}
        state = {name: getattr(each, name) for each in last for name in STATE}
        print_json({**asdict(row), **state, "removed": out, "checkpoints": [each.version for each in checkpoints]})
        return
    table = Table.grid(padding=(0, 2))
    values = {
        "conversation": row.name,
        "id": row.id,
        "key": names.get(row.tenant, row.tenant),
        "part of": row.parent,
        "closed": None if row.closed is None else f"{moment(row.closed)} UTC",
        "model": row.model,
        "requests": f"{row.requests} on {row.branches} branch{'es' if row.branches != 1 else ''}",
        "first and last used": f"{moment(row.created)} to {moment(row.updated)} UTC",
        "last request": f"{tokens(row.tokens_before, row.tokens_after, row.limit)} tokens, {row.zone}",
        **{name: line for each in last for name, line in (("pressure", _pressure(each)), ("growth", _growth(each)))},
        "last actions": actions_of(row.actions),
        "batches of edits": str(row.version),
        "checkpoints": ", ".join(str(each.version) for each in checkpoints) or "none",
        "removed": removed_line(gone),
    }
    for label, value in values.items():
        if value is not None:
            table.add_row(label, Text(tame(value)))
    console().print(table)
    for option in ["--timeline", *(["--checkpoint"] if checkpoints else []), *(["--removed"] if gone else [])]:
        click.echo(f"  weir conversations show {shlex.quote(tame(row.name))} {option}{where}", err=True)


def _pressure(row: ExchangeRow) -> str:
    """Pressure before and after the newest request was managed, the zone, and what that took."""
    before = row.pressure if row.pressure_before is None else row.pressure_before
    moved = f"{before:.2f} > {row.pressure:.2f}" if f"{before:.2f}" != f"{row.pressure:.2f}" else f"{row.pressure:.2f}"
    return f"{moved}, {row.zone}; {row.action}{', observed only' if row.observed else ''}"


def _growth(row: ExchangeRow) -> str:
    """How fast the conversation grows, and when that will be too much."""
    if row.velocity is None:
        return "not known yet"
    left = "" if row.turns_until_red is None else f", red in {row.turns_until_red:g}"
    return f"{row.velocity:,.1f} tokens per request{left}"


def show_timeline(requests: list[ExchangeRow], *, as_json: bool) -> None:
    """One line per request."""
    if as_json:
        print_json([exchange_of(row).plain() for row in requests])
        return
    table = plain_table(
        "at (UTC)", "messages", "tokens", "pressure", "zone", "velocity", "action", "actions", "outcome", "cached",
        "weir ms", "request",
    )  # fmt: skip
    for row in requests:
        cached = f"{row.usage_cached / row.usage_prompt:.0%}" if row.usage_cached and row.usage_prompt else ""
        table.add_row(
            moment(row.at),
            str(row.length),
            tokens(row.tokens_before, row.tokens_after, row.limit),
            f"{row.pressure:.2f}",
            row.zone,
            "" if row.velocity is None else f"{row.velocity:,.0f}",
            row.action,
            actions_of(row.actions),
            f"{row.status} {row.outcome}",
            cached,
            f"{row.overhead_ms:.1f}",
            row.id,
        )
    console().print(table)


def show_request(row: ExchangeRow, *, as_json: bool) -> None:
    """What was done to one request and why: its decision record, and each layer that ran."""
    shown = exchange_of(row).plain()
    if as_json:
        print_json(shown)
        return
    decision, layers = decision_of(row).plain(), shown["layers"]
    table = Table.grid(padding=(0, 2))
    facts = {
        "request": row.id,
        "at": f"{moment(row.at)} UTC",
        "model and policy": f"{row.model}, {row.policy}{', observed only' if row.observed else ''}",
        "tokens": tokens(row.tokens_before, row.tokens_after, row.limit),
        "pressure": _pressure(row),
        "actions": actions_of(row.actions),
        "removed or shortened": f"{row.evicted}",
        "summary": None
        if decision["compaction_summary_tokens"] is None
        else f"{row.detail['summary_tokens']:,} tokens",
        "new window": decision["new_window_id"],
        "recommendation": decision["recommendation"],
        "outcome": f"{row.status} {row.outcome}",
    }
    for label, value in facts.items():
        if value is not None:
            table.add_row(label, Text(tame(str(value))))
    console().print(table)
    if not isinstance(layers, list) or not layers:
        again = row.actions not in {"none", "observe=1"}
        said = "what was taken out before stays out" if again else "nothing had to go"
        click.echo(f"\nNo layer ran: {said}.")
        return
    ran = plain_table("layer", "about", "tokens", "units", "kept", "why not more")
    for each in layers:
        moved = f"{each['tokens_before']:,} > {each['tokens_after']:,}"
        kept = "last rung" if each["rung"] and each["kept"] else "yes" if each["kept"] else "no"
        ran.add_row(each["layer"], each["scope"], moved, str(each["units"]), kept, Text(tame(each["reason"] or "")))
    click.echo()
    console().print(ran)


def show_summary(row: CheckpointRow, *, as_json: bool) -> None:
    """What stands for the history at a version of the checkpoint: its summary, else its state."""
    cut = row.cut
    if as_json:
        known = {"version": row.version, "at": row.at, "reason": row.reason, "branch": row.branch}
        made = {
            name: None if cut is None else getattr(cut, name) for name in ("covers", "origin", "tokens", "ref", "text")
        }
        print_json({**known, **made, "covered": list(row.covered), "state": json.loads(row.body)})
    elif cut is None:
        show_state(row)
    else:
        click.echo(
            f"Version {row.version}, {moment(row.at)} UTC: {cut.tokens:,} tokens ({cut.origin}) stand for the first "
            f"{cut.covers} messages after the head; ref {cut.ref}.\n",
            err=True,
        )
        say(cut.text)


def show_state(row: CheckpointRow) -> None:
    """A version of the checkpoint as Markdown; as it was stored where it is none."""
    stands = "" if row.cut is None else f"; stands for the first {row.cut.covers} messages after the head"
    click.echo(f"Version {row.version}, {moment(row.at)} UTC, saved for {row.reason}{stands}.\n", err=True)
    try:
        say(Checkpoint.from_json(row.body).to_markdown().rstrip("\n"))
    except InvalidCheckpoint:
        say(row.body)


def show_removed(gone: list[RemovedRow], *, as_json: bool) -> None:
    """Messages that are out of the window, one line each."""
    if as_json:
        print_json([{**removed_of(each, with_text=False).plain(), "text": each.text} for each in gone])
        return
    if not gone:
        click.echo("Nothing was removed.", err=True)
        return
    table = plain_table("ref", "role", "tool", "tokens", "how", "since (UTC)", "begins with")
    for each in gone:
        start = " ".join(each.text[: 4 * EXCERPT].split())[:EXCERPT]
        counted = f"{each.tokens:,} > {each.kept:,}" if each.kept else f"{each.tokens:,}"
        table.add_row(
            each.ref, each.role or "?", Text(tame(each.tool)), counted, each.how, moment(each.at), Text(tame(start))
        )
    console().print(table)


def show_originals(originals: list[Original], *, as_json: bool) -> None:
    """Removed messages in full: what they say, or with JSON as they were sent."""
    if as_json:
        shown = [(each, json.loads(each.body)) for each in originals]
        print_json([{"ref": o.ref, "role": o.role, "tokens": o.tokens, "message": body} for o, body in shown])
        return
    for original in originals:
        if len(originals) > 1:
            click.echo(f"--- {original.ref} {original.role}", err=True)
        say(original.text)


def show_notes(rows: Iterable[NoteRow], *, as_json: bool) -> None:
    """Notes, one line each."""
    listed = list(rows)
    if as_json:
        print_json([KeptNote.of(row).plain() for row in listed])
        return
    if not listed:
        click.echo("There are no notes.", err=True)
        return
    table = plain_table("at (UTC)", "category", "importance", "from", "note")
    for row in listed:
        table.add_row(moment(row.at), row.category, row.importance, row.source, Text(tame(row.text)))
    console().print(table)


def actions_of(actions: str) -> str:
    """What was done to a request; of one that was only observed, what would have been."""
    parts = actions.split(",")
    if OBSERVED not in parts:
        return actions
    planned = [part for part in parts if part != OBSERVED]
    return "observed" + (f": {','.join(planned)}" if planned else "")


def say(text: str) -> None:
    """Print what somebody else wrote: on a terminal without control characters, elsewhere as it is."""
    shown = tame(text) if sys.stdout.isatty() else text
    click.echo(shown.encode("utf-8", "replace"))


def tame(text: str) -> str:
    """A text without control characters."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def key_name(tenant: str, names: Mapping[str, str]) -> str:
    """What operators call a key, else how its tenant begins."""
    return tame(names.get(tenant, tenant[:8]))


def plain_table(*columns: str) -> Table:
    """A table as the command line prints them."""
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def tokens(before: int, after: int, limit: int) -> str:
    """Tokens of a request before and after it was managed, and what there is room for."""
    moved = f"{before:,} > {after:,}" if after != before else f"{after:,}"
    return f"{moved} of {limit:,}"


def moment(at: float) -> str:
    """Seconds since the epoch as a date and a time in UTC."""
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
