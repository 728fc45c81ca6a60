"""Answers that a later request may go on from, because their provider keeps them, and ids that are
a tenant's there.

A row holds what its request added to the history and what the answer did; the rows from the first
request to an answer hold all of it. Only a complete history counts.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from proxy.store.packing import Damaged, pack, unpack
from proxy.store.records import AnswerRow, ConversationRow, ProviderIdsRow
from proxy.store.schema import answer_items, answers, provider_ids
from proxy.store.transaction import (
    Rows,
    Transaction,
    keep_first,
    keep_last,
    of,
    owned,
    recorded,
    stored,
)

MAX_LINKS = 20_000
ADD_ANSWER = keep_last(answers)
ADD_ITEM = keep_first(answer_items)
_START = sa.select(answers.c.id, answers.c.parent, sa.literal(0).label("back")).where(
    of(answers, "tenant", "id")
)
_LINE = _START.cte("line", recursive=True)
_LINE = _LINE.union_all(
    sa.select(answers.c.id, answers.c.parent, _LINE.c.back + 1)
    .join(_LINE, answers.c.id == _LINE.c.parent)
    .where(of(answers, "tenant"), _LINE.c.back < MAX_LINKS)
)
LINE = sa.select(answers).join(_LINE, _LINE.c.id == answers.c.id).where(of(answers, "tenant"))


def add_answers(tx: Transaction, rows: Sequence[AnswerRow]) -> None:
    if not rows or not tx.full:
        return
    packed = tx.aside(lambda: [pack((row.given, row.output, row.opening)) for row in rows])
    tx.many(
        ADD_ANSWER,
        [stored(answers, row, body=body) for row, body in zip(rows, packed, strict=True)],
    )
    tx.many(
        ADD_ITEM,
        [{"tenant": r.tenant, "item": item, "answer": r.id} for r in rows for item in r.items],
    )


def answers_behind(tx: Transaction, tenant: str, answer: str) -> list[AnswerRow]:
    return _whole_answers(tx, LINE, {"of_tenant": tenant, "of_id": answer})


def known_answers(tx: Transaction, tenant: str, ids: Collection[str]) -> int:
    query = sa.select(sa.func.count()).select_from(answers)
    return int(tx.scalar(query.where(owned(answers, tenant, id=list(ids)))) or 0)


def answers_with(tx: Transaction, tenant: str, items: Collection[str]) -> list[AnswerRow]:
    ids = sa.select(answer_items.c.answer).where(owned(answer_items, tenant, item=list(items)))
    return _whole_answers(tx, sa.select(answers).where(owned(answers, tenant, id=ids)))


def forget_answer(tx: Transaction, tenant: str, answer: str) -> None:
    tx.execute(sa.delete(answers).where(owned(answers, tenant, id=answer)))


MAX_PROVIDER_IDS = 100_000
"""Per tenant; the oldest are deleted."""
ADD_PROVIDER_ID = keep_last(provider_ids)


def add_provider_ids(tx: Transaction, rows: Sequence[ProviderIdsRow]) -> None:
    """Store ids that were given to tenants; now and then a tenant's excess ids are deleted."""
    tx.many(
        ADD_PROVIDER_ID,
        [{"tenant": r.tenant, "digest": d, "at": r.at} for r in rows for d in r.digests],
    )
    looked_at = {row.tenant for row in rows if any(digest[0] == 0 for digest in row.digests)}
    for tenant in sorted(looked_at):
        mine = owned(provider_ids, tenant)
        newest = sa.select(provider_ids.c.at).where(mine).order_by(provider_ids.c.at.desc())
        last = tx.scalar(newest.offset(MAX_PROVIDER_IDS).limit(1))
        if last is not None:
            tx.execute(sa.delete(provider_ids).where(mine, provider_ids.c.at <= last))


def own_provider_ids(tx: Transaction, tenant: str, digests: Sequence[bytes]) -> set[bytes]:
    return set(
        tx.scalars(
            sa.select(provider_ids.c.digest).where(
                owned(provider_ids, tenant, digest=list(digests))
            )
        )
    )


def answers_of(tx: Transaction, conversation: ConversationRow) -> list[Mapping[str, Any]]:
    mine = owned(answers, conversation.tenant, conversation=conversation.id)
    rows = _whole_answers(tx, sa.select(answers).where(mine).order_by(answers.c.at))
    return [
        {
            k: v.decode(errors="replace") if isinstance(v, bytes) else v
            for k, v in msgspec.structs.asdict(row).items()
        }
        for row in rows
    ]


def _whole_answers(
    tx: Transaction, query: Rows, given: Mapping[str, str] | None = None
) -> list[AnswerRow]:
    found: list[AnswerRow] = []
    for row in tx.execute(query, given):
        try:
            added, output, opening = unpack(row.body, tuple[bytes, bytes, bytes])
        except Damaged:
            tx.damage("answer", row.tenant, row.id)
        else:
            found.append(
                recorded(
                    AnswerRow, answers, row, items=(), given=added, output=output, opening=opening
                )
            )
    return found
