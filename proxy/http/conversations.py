"""Conversations: how full they are, what was done to each request and why, what a caller does to one, its notes."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from policies.ledger import Burn, Note, VelocityClass
from policies.memory.notes import CATEGORIES, IMPORTANCE, category_of
from policies.pressure import STATUSES, BucketLine, bucket_report, turns_remaining, velocity_class
from proxy.errors import InvalidRequest, NotFound
from proxy.http.request import (
    ZONES,
    Count,
    Digest,
    Exchange,
    ManagementAnswer,
    ManagementRequest,
    Moment,
    Page,
    Shape,
    Share,
    Tokens,
    Zone,
    as_json,
    cursor_of,
    exchange_of,
    page,
    page_of_whole,
)
from proxy.store.conversations import Narrowing
from proxy.store.records import ConversationRow, ExchangeRow, NoteRow


class Conversation(Shape):
    """A conversation and its last request."""

    id: str
    name: str
    tenant: Annotated[str, Meta(description="whose key it is of")]
    created: Moment
    updated: Moment
    model: str
    requests: Count
    branches: Count
    version: Annotated[int, Meta(ge=0, description="rises with each batch of edits, saved checkpoint and rollback")]
    tokens_before: Annotated[int, Meta(ge=0, description="tokens of the last request as the client sent it")]
    tokens_after: Annotated[int, Meta(ge=0, description="tokens of it as it was forwarded")]
    limit: Annotated[int, Meta(description="tokens that there is room for, W - R - H")]
    zone: Zone
    actions: str
    parent: str | None
    closed: Moment | None


class Pressure(Shape):
    """The reading of the last request."""

    current_tokens: Tokens
    max_tokens: Tokens | None
    utilization_pct: Annotated[float, Meta(ge=0)]
    zone: Zone
    velocity_tokens_per_turn: float | None
    turns_until_red: float | None
    velocity_class: VelocityClass | None
    source: Literal["model_reported", "client_estimated"] | None


class Budget(Shape):
    """Every bucket against its cap, and all of them against what pressure is a share of."""

    buckets: list[BucketLine]
    total_used: Tokens
    total_utilization: Share
    burn_rate_tokens_per_turn: float | None
    turns_until_exhausted: float | None


class ConversationStatus(Conversation):
    """A conversation, the reading of its last request, and the status report."""

    pressure: Pressure | None
    buckets: dict[str, int]
    turns_until_red: float | None
    window_status: Literal["healthy", "preparing", "active", "emergency"]
    turn: Count
    windows_created: Annotated[int, Meta(ge=1)]
    utilization: Share
    budget_report: Budget | None
    audit_events: Annotated[int, Meta(ge=0, description="what was taken out of the window or shortened")]


def status_of(
    row: ConversationRow, last: ExchangeRow | None, *, windows: int, events: int, soft: Mapping[str, float]
) -> ConversationStatus:
    """A conversation with its status report (requirements A0.136 and A0.92).

    ``windows`` is how many windows it has had, ``events`` how often something was taken out of them; ``soft`` are the
    shares of their caps at which buckets warn.
    """
    return ConversationStatus.of(
        row,
        pressure=None if last is None else _pressure(last),
        buckets={} if last is None else last.detail.get("buckets", {}),
        turns_until_red=None if last is None else last.turns_until_red,
        window_status="healthy" if last is None else _window_status(last),
        turn=row.requests,
        windows_created=windows,
        utilization=0.0 if last is None else round(last.pressure, 2),
        budget_report=None if last is None else _budget(last, soft),
        audit_events=events,
    )


def _pressure(last: ExchangeRow) -> Pressure:
    return Pressure.of(
        last,
        current_tokens=last.tokens_after,
        max_tokens=last.detail.get("base"),
        utilization_pct=round(100 * last.pressure, 1),
        velocity_tokens_per_turn=last.velocity,
        velocity_class=velocity_class(last.velocity),
        source=last.detail.get("source"),
    )


def _window_status(last: ExchangeRow) -> str:
    told = last.detail.get("status")
    return told if isinstance(told, str) else STATUSES.get(last.zone, "active")


def _budget(last: ExchangeRow, soft: Mapping[str, float]) -> Budget:
    used, caps = tokens_by_bucket(last.detail.get("buckets")), tokens_by_bucket(last.detail.get("caps"))
    burns = tuple(Burn(name, 0, (rate,)) for name, rate in tokens_by_bucket(last.detail.get("burn")).items())
    base = last.detail.get("base")
    limit = base if isinstance(base, int) else last.limit  # what pressure is a share of
    report = bucket_report(dict.fromkeys(caps, 0) | used, caps, burns, limit=limit, soft=soft)
    left = turns_remaining(report.total_used, last.limit, last.velocity)
    return Budget.of(
        report,
        burn_rate_tokens_per_turn=None if last.velocity is None else round(last.velocity, 1),
        turns_until_exhausted=None if left is None else round(left, 1),
    )


def tokens_by_bucket(found: object) -> dict[str, int]:
    return {str(name): int(tokens) for name, tokens in found.items()} if isinstance(found, Mapping) else {}


async def listing(asked: ManagementRequest) -> Page[Conversation]:
    """The caller's conversations, the one used last first; ``closed`` leaves those that are, or are not.

    So do ``name`` (a part of it), ``model``, ``zone`` and ``policy``, which is that of the newest request; with ``key``
    the operator sees those of one key, by its name or tenant.
    """
    limit, after, query = asked.limit(), asked.after(float, str, str), asked.query
    only = Narrowing(
        name=query.get("name"),
        model=query.get("model"),
        zone=asked.word("zone", ZONES),
        policy=query.get("policy"),
        closed=asked.flag("closed"),
    )
    rows = await asked.store.conversations(_tenant_of(asked), limit=limit + 1, only=only, after=after)
    return page(rows, limit, Conversation.of, lambda row: (row.updated, row.id, row.tenant))


def _tenant_of(asked: ManagementRequest) -> str | None:
    key = asked.query.get("key")
    if asked.tenant is not None or key is None:
        return asked.tenant
    return next((tenant for tenant, name in asked.runtime.keyring.names.items() if name == key), key)


async def one(asked: ManagementRequest) -> ConversationStatus:
    """One conversation: its row, the reading of its last request, and the status report."""
    row = await asked.conversation()
    last = next(iter(await asked.store.timeline(row, limit=1)), None)
    newest = await asked.store.latest_checkpoint(row.tenant, row.id)
    events = await asked.store.count_evictions(row)
    soft = {} if last is None else asked.runtime.config.soft_shares(last.policy)
    windows = 1 if newest is None else newest[1].window_id
    return status_of(row, last, windows=windows, events=events, soft=soft)


async def timeline(asked: ManagementRequest) -> Page[Exchange]:
    """The newest requests of a conversation, oldest first; ``cursor`` leads to older ones, ``since`` leaves newer."""
    limit, since = asked.limit(), asked.since("") if "since" in asked.query else None
    after = asked.after(float, str)
    row = await asked.conversation()
    found = await asked.store.timeline(row, limit=limit + 1, since=since, after=after)
    rows = found[-limit:]
    following = cursor_of((rows[0].at, rows[0].id)) if len(found) > limit else None
    return Page(data=[exchange_of(row) for row in rows], next=following)


MAX_NOTE_LEN = 4_000
USUAL = "normal"
Importance = Literal["critical", "high", "normal"]


class KeptNote(Shape):
    """One note on a conversation."""

    id: Digest
    at: Moment
    category: str
    importance: Importance
    source: str
    text: str


class NewNote(Shape):
    """A note to take; another category is filed under misc."""

    text: Annotated[str, Meta(min_length=1, max_length=MAX_NOTE_LEN)]
    category: str | UnsetType = UNSET
    importance: Importance | UnsetType = UNSET


class Wanted(Shape):
    """What the next request was asked to do."""

    wanted: Literal["compact"]


class Closed(Shape):
    """When the conversation was closed."""

    closed: Moment


class Deleted(Shape):
    """That it is gone."""

    deleted: Literal[True]


async def compact(asked: ManagementRequest) -> Wanted:
    """Have the conversation's next request compacted, whatever its size."""
    await asked.fields(())
    await asked.runtime.planner.conversations.want(await asked.only_conversation(), "compact")
    return Wanted(wanted="compact")


async def close(asked: ManagementRequest) -> Closed:
    """Archive the conversation; closing it again changes nothing."""
    await asked.fields(())
    row = await asked.only_conversation()
    if row.closed is not None:
        return Closed(closed=row.closed)
    return Closed(closed=await asked.runtime.planner.conversations.close(row))


async def delete(asked: ManagementRequest) -> Deleted:
    """Delete the conversation for good: rows, bodies, and what memory holds of it."""
    row = await asked.only_conversation()
    if not await asked.store.delete(row, asked.runtime.planner.clock()):
        raise NotFound(f"There is no conversation {row.name[:80]!r}.")
    asked.runtime.summarizer.forget(row.tenant)
    asked.runtime.planner.conversations.forget(row)
    asked.runtime.answers.forget_all(row)
    asked.runtime.health.forget(row.tenant, row.id)
    return Deleted(deleted=True)


async def notes(asked: ManagementRequest) -> Page[KeptNote]:
    """The notes on a conversation, oldest first."""
    wanted = asked.limit(), asked.after(str)
    row = await asked.conversation()
    rows = await asked.store.notes(row.tenant, row.id)
    return page_of_whole(rows, wanted, KeptNote.of, lambda row: (row.id.hex(),))


async def add_note(asked: ManagementRequest) -> KeptNote | ManagementAnswer:
    """Store a note on the conversation; the same text in the same category is stored once."""
    note = _note(await asked.fields(NewNote.__struct_fields__))
    row = await asked.only_conversation()
    if not asked.store.keeps_content:
        raise InvalidRequest("This proxy stores nothing that is said (store.content: digest), and so no notes.")
    stored = NoteRow.of(note, at=asked.runtime.planner.clock())
    if await asked.store.add_notes(row.tenant, row.id, [stored]):
        asked.runtime.planner.conversations.note(row, note)
        return KeptNote.of(stored)
    known = {each.id: each for each in await asked.store.notes(row.tenant, row.id)}
    return as_json(KeptNote.of(known.get(stored.id, stored)))


def _note(fields: dict[str, object]) -> Note:
    text, category = fields.get("text"), fields.get("category", "")
    importance = fields.get("importance", USUAL)
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_NOTE_LEN:
        raise InvalidRequest(f"text must be 1 to {MAX_NOTE_LEN} characters.", param="text")
    if not isinstance(category, str):
        raise InvalidRequest(f"category must be one of {', '.join(CATEGORIES)}.", param="category")
    if not isinstance(importance, str) or importance not in IMPORTANCE:
        raise InvalidRequest(f"importance must be one of {', '.join(IMPORTANCE)}.", param="importance")
    return Note(category_of(category), importance, text, "api")
