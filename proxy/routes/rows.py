"""The store's rows as the management API shows them. Times are seconds since the epoch (UTC)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from types import MappingProxyType

from policies.checkpoint import Checkpoint
from policies.health import Snapshot
from policies.ledger import EditKind
from policies.pressure import STATUSES, bucket_report, turns_remaining
from proxy.caching import shown
from proxy.store import AuditRow
from proxy.store.records import (
    AlertRow,
    CheckpointRow,
    ConversationRow,
    EvictionRow,
    ExchangeRow,
    NoteRow,
    Original,
    RemovedRow,
)

BLOBS = "/weir/blobs/"
EXCERPT = 200
FOUND_TEXT = 2_000
UNSHOWN = frozenset({"trend", "asked_again", "ends", "events", "refusal", "health"})
SHOWN = tuple(each.name for each in fields(ExchangeRow) if each.name not in UNSHOWN)
EMERGENCY = "emergency_compaction"
ACTED = frozenset({"evict_and_compress", "cross_window_save"})
PREPARING = frozenset({"orange", "red", "critical"})

WHY: Mapping[str, str] = MappingProxyType(
    {
        EditKind.INGEST_CAP: "the result was longer than the policy lets a single one be",
        EditKind.DEDUPE: "a later message says the same, or a later call replaced it",
        EditKind.EVICT: "it was old, and worth least of what could go",
        EditKind.PRUNE: "it was older than the results that the policy keeps",
        EditKind.MERGE: "it said nearly the same as another result",
        EditKind.TRUNCATE: "it was among the largest results",
        EditKind.CLIP: "nothing else was left to shorten",
        EditKind.MEDIA: "it was an old image, sound or file",
        EditKind.REASONING: "it was thinking of an earlier turn",
        EditKind.CUSTOM: "the policy's own function chose it",
        EditKind.PRUNE_TOOLS: "the tool was not used",
        EditKind.SUMMARY: "a summary of the result stands for it",
        EditKind.PROGRESSIVE: "it was condensed with its age",
        EditKind.DELEGATE: "another model read it and said what matters",
        "compact": "a summary of the older history stands for it",
        "rollover": "the conversation went on in a new window, from a checkpoint",
        "resume": "the conversation goes on from another one's checkpoint, which says it",
        "drop_oldest": "it was among the oldest, and nothing else was left to remove",
        "sliding_window": "it was older than the messages that the policy keeps",
    }
)
"""Why a message was taken out, by the kind of its edit or the layer of its cut."""


def conversation_json(row: ConversationRow) -> dict[str, object]:
    """A conversation as the API lists it."""
    return asdict(row)


def state_json(last: ExchangeRow | None) -> dict[str, object]:
    """The reading of the conversation's last request, the buckets it filled, and how many requests are left."""
    if last is None:
        return {"pressure": None, "buckets": {}, "turns_until_red": None}
    reading = {
        "current_tokens": last.tokens_after,
        "max_tokens": last.detail.get("base"),
        "utilization_pct": round(100 * last.pressure, 1),
        "zone": last.zone,
        "velocity_tokens_per_turn": last.velocity,
        "turns_until_red": last.turns_until_red,
        "source": last.detail.get("source"),
    }
    return {"pressure": reading, "buckets": last.detail.get("buckets", {}), "turns_until_red": last.turns_until_red}


def report_json(
    row: ConversationRow, last: ExchangeRow | None, *, windows: int, events: int, soft: Mapping[str, float]
) -> dict[str, object]:
    """The status report (requirements A0.136 and A0.92): the window, every bucket against its cap, what was done.

    ``windows`` is how many windows the conversation has had, ``events`` how often something was taken out of them;
    ``soft`` are the shares of their caps at which buckets warn.
    """
    return {
        "window_status": "healthy" if last is None else status_of(last),
        "turn": row.requests,
        "windows_created": windows,
        "utilization": 0.0 if last is None else round(last.pressure, 2),
        "budget_report": None if last is None else budget_json(last, soft),
        "audit_events": events,
    }


def status_of(last: ExchangeRow) -> str:
    """What Weir was doing about the window at a request, in the words of the header ``x-weir-pressure``."""
    if last.action == EMERGENCY:
        return "emergency"
    if last.action in ACTED:
        return "active"
    return STATUSES.get(last.zone, "active")


def budget_json(last: ExchangeRow, soft: Mapping[str, float]) -> dict[str, object]:
    """Every bucket of a request against its cap where it has one, and all of them against W - R - H."""
    used, caps = _numbers(last.detail.get("buckets")), _numbers(last.detail.get("caps"))
    report = bucket_report(dict.fromkeys(caps, 0) | used, caps, (), limit=last.limit, soft=soft)
    left = turns_remaining(report.total_used, last.limit, last.velocity)
    own = {name: value for name, value in asdict(report).items() if name != "buckets"}
    burn = {
        "burn_rate_tokens_per_turn": None if last.velocity is None else round(last.velocity, 1),
        "turns_until_exhausted": None if left is None else round(left, 1),
    }
    return {"buckets": [asdict(line) for line in report.buckets], **own, **burn}


def _numbers(found: object) -> dict[str, int]:
    """Tokens by bucket as a row holds them."""
    return {str(name): int(tokens) for name, tokens in found.items()} if isinstance(found, Mapping) else {}


def exchange_json(row: ExchangeRow) -> dict[str, object]:
    """One request of a conversation as the API shows it; what the next one is planned from is not shown."""
    own = {name: getattr(row, name) for name in SHOWN}
    told = {
        "fidelity": row.detail.get("fidelity"),
        "layers": row.detail.get("layers", []),
        "decision": decision_json(row),
    }
    return own | {"chain_end": row.chain_end.hex(), "detail": dict(row.detail)} | shown(row.detail) | told


def decision_json(row: ExchangeRow) -> dict[str, object]:
    """The decision record of a request (requirement A0.148); null is what was not measured or did not happen."""
    before = row.pressure_before
    return {
        "action": row.action,
        "utilization_before": None if before is None else round(before, 4),
        "utilization_after": round(row.pressure, 4),
        "evicted_blocks": row.evicted,
        "compression_strategy": row.strategy or None,
        "recommendation": recommendation_of(row),
        "new_window_id": row.detail.get("window_id"),
        "compaction_summary_tokens": row.detail.get("summary_tokens"),
    }


def recommendation_of(row: ExchangeRow) -> str:
    """What an operator might do about the window after a request, in a word.

    ``enlarge`` where only the last rungs helped or nothing did, ``enforce`` where what was needed was only observed,
    ``prepare`` from orange on, ``watch`` in yellow, else ``none``.
    """
    if row.action == EMERGENCY or row.zone == "critical":
        return "enlarge"
    if row.observed and row.action in ACTED:
        return "enforce"
    if row.zone in PREPARING:
        return "prepare"
    return "watch" if row.zone == "yellow" else "none"


def checkpoint_json(row: CheckpointRow) -> dict[str, object]:
    """One version of the checkpoint; ``covers``, ``ref`` and ``summary`` are null where it was only saved."""
    cut = row.cut
    return {
        "version": row.version,
        "reason": row.reason,
        "window_id": row.window_id,
        "at": row.at,
        "branch": row.branch,
        "messages": row.length,
        "covers": None if cut is None else cut.covers,
        "ref": None if cut is None else cut.ref,
        "summary": None if cut is None else cut.text,
        "coverage": coverage_of(row),
        "state": json.loads(row.body),
    }


def coverage_of(row: CheckpointRow) -> float | None:
    """Share of the identifiers of what was removed that the state shows, 3 decimals; null where there are none."""
    state = Checkpoint.from_json(row.body)
    return round(state.coverage([each.value for each in state.identifiers]), 3) if state.identifiers else None


def changed_json(row: CheckpointRow, before: CheckpointRow | None) -> dict[str, object]:
    """What a version's state has that the one ``before`` it has not, and what it has no more; all of it for a first."""
    state = Checkpoint.from_json(row.body)
    return dict(state.delta(Checkpoint.from_json(before.body) if before is not None else None))


def version_json(row: CheckpointRow) -> dict[str, object]:
    """One version of the checkpoint in a list: ``size`` is that of its state, in bytes."""
    own = {name: getattr(row, name) for name in ("version", "reason", "window_id", "at", "branch")}
    size = len(row.body.encode("utf-8", "surrogatepass"))
    return own | {"messages": row.length, "size": size, "covers": None if row.cut is None else row.cut.covers}


def removed_json(row: RemovedRow, *, with_text: bool) -> dict[str, object]:
    """One message that is out of the window: what took it and why, since when, and where its original is."""
    beginning = {"begins": row.text[:EXCERPT]} if with_text else {}
    return {
        "ref": row.ref,
        "how": row.how,
        "why": WHY.get(row.how, "the policy took it"),
        "since": row.at,
        "version": row.version,
        "tool": row.tool or None,
        "role": row.role or None,
        "tokens": row.tokens,
        "kept": row.kept,
        "blob": BLOBS + row.ref,
        **beginning,
    }


def note_json(row: NoteRow) -> dict[str, object]:
    """One note."""
    own = {name: getattr(row, name) for name in ("at", "category", "importance", "source", "text")}
    return {"id": row.id.hex(), **own}


def found_json(row: Original) -> dict[str, object]:
    """One original that a search found, the beginning of what it says."""
    own = {"ref": row.ref, "role": row.role, "tokens": row.tokens}
    return own | {"text": row.text[:FOUND_TEXT], "blob": BLOBS + row.ref}


def eviction_json(row: EvictionRow) -> dict[str, object]:
    """One thing that a batch took out or made shorter."""
    own = {**asdict(row), "digest": row.digest.hex(), "call_hash": row.call_hash.hex()}
    return own | {"ref": row.digest.hex()[:12], "freed": row.freed}


def snapshot_json(snapshot: Snapshot) -> dict[str, object]:
    """The health metrics after one request, shares and ratios with three decimals; what was not measured is null."""
    return {n: round(v, 3) if isinstance(v, float) and n != "at" else v for n, v in snapshot._asdict().items()}


def alert_json(row: AlertRow) -> dict[str, object]:
    """One alert; ``closed`` is null while it is open."""
    return {
        "kind": row.kind,
        "level": row.level,
        "class": row.category,
        "conversation": row.conversation,
        "at": row.at,
        "closed": row.closed,
        "value": round(row.value, 4),
        "threshold": row.limit,
        "said": row.said,
    }


def audit_json(row: AuditRow) -> dict[str, object]:
    """One row of the audit with all that its hash covers."""
    return {**asdict(row), "facts": row.told, "prev": row.prev.hex(), "hash": row.hash.hex()}
