"""The record of answers that a later request may go on from, because their provider keeps them.

An answer's row holds what its request added to the history and what the answer did; the rows from the first request to
an answer hold all of it. Only what is found whole counts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from proxy.store.packing import Damaged, pack, unpack
from proxy.store.records import AnswerRow, ConversationRow
from proxy.store.schema import NOTHING, answer_items, answers
from proxy.store.transaction import Rows, Transaction, chunks, keep_first, keep_last, of, recorded, stored

MAX_LINKS = 20_000
ADD_ANSWER = keep_last(answers)
ADD_ITEM = keep_first(answer_items)
OF_TENANT = of(answers, "tenant")
_START = sa.select(answers.c.id, answers.c.parent, sa.literal(0).label("back")).where(of(answers, "tenant", "id"))
_LINE = _START.cte("line", recursive=True)
_LINE = _LINE.union_all(
    sa.select(answers.c.id, answers.c.parent, _LINE.c.back + 1)
    .join(_LINE, answers.c.id == _LINE.c.parent)
    .where(OF_TENANT, _LINE.c.back < MAX_LINKS)
)
LINE = sa.select(answers).join(_LINE, _LINE.c.id == answers.c.id).where(OF_TENANT)


def add_answers(tx: Transaction, rows: Sequence[AnswerRow]) -> None:
    if not rows or not tx.full:
        return
    packed = tx.aside(lambda: [pack(row.given, row.output, row.opening) for row in rows])
    tx.many(ADD_ANSWER, [stored(answers, row, body=body) for row, body in zip(rows, packed, strict=True)])
    tx.many(ADD_ITEM, [{"tenant": r.tenant, "item": item, "answer": r.id} for r in rows for item in r.items])


def answers_behind(tx: Transaction, tenant: str, answer: str) -> list[AnswerRow]:
    return _whole_answers(tx, LINE, {"of_tenant": tenant, "of_id": answer})


def known_answers(tx: Transaction, tenant: str, ids: Collection[str]) -> int:
    query = sa.select(sa.func.count()).select_from(answers).where(answers.c.tenant == tenant)
    return sum(int(tx.scalar(query.where(answers.c.id.in_(chunk))) or 0) for chunk in chunks(ids))


def answers_with(tx: Transaction, tenant: str, items: Collection[str]) -> list[AnswerRow]:
    found: list[AnswerRow] = []
    for chunk in chunks(items):
        ids = sa.select(answer_items.c.answer).where(answer_items.c.tenant == tenant, answer_items.c.item.in_(chunk))
        found += _whole_answers(tx, sa.select(answers).where(answers.c.tenant == tenant, answers.c.id.in_(ids)))
    return found


def forget_answer(tx: Transaction, tenant: str, answer: str) -> None:
    tx.execute(sa.delete(answers).where(answers.c.tenant == tenant, answers.c.id == answer))


def answers_of(tx: Transaction, conversation: ConversationRow) -> list[Mapping[str, Any]]:
    mine = answers.c.tenant == conversation.tenant, answers.c.conversation == conversation.id
    rows = _whole_answers(tx, sa.select(answers).where(*mine).order_by(answers.c.at))
    return [
        {k: v.decode(errors="replace") if isinstance(v, bytes) else v for k, v in asdict(row).items()} for row in rows
    ]


def _whole_answers(tx: Transaction, query: Rows, given: Mapping[str, str] = NOTHING) -> list[AnswerRow]:
    found: list[AnswerRow] = []
    for row in tx.execute(query, dict(given)):
        try:
            said = dict(zip(("given", "output", "opening"), unpack(row.body, parts=3), strict=True))
        except Damaged:
            tx.damage("answer", row.tenant, row.id)
        else:
            found.append(recorded(AnswerRow, answers, row, items=(), **said))
    return found
