"""Vectors of originals by an embeddings model: 32-bit floats of length 1, which go with the original.

They are compared here, one by one: a conversation has thousands of them at most.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import mul

import sqlalchemy as sa

from proxy.store.archive import held_by
from proxy.store.packing import Damaged, unpack_message
from proxy.store.tables import keep_first, originals, vectors

ADD = keep_first(vectors)


def lacking(connection: sa.Connection, tenant: str, conversation: str, model: str, limit: int) -> dict[str, str]:
    """The newest originals of a conversation that have no vector by this model: texts by ref."""
    known = sa.select(vectors.c.ref).where(vectors.c.tenant == tenant, vectors.c.model == model)
    query = (
        sa.select(originals.c.ref, originals.c.body)
        .where(originals.c.tenant == tenant, originals.c.body.is_not(None))
        .where(originals.c.ref.in_(held_by(tenant, conversation)), originals.c.ref.not_in(known))
        .order_by(originals.c.id.desc())
        .limit(limit)
    )
    found: dict[str, str] = {}
    for row in connection.execute(query):
        with suppress(Damaged):
            found[row.ref] = unpack_message(row.body)[1]
    return {ref: text for ref, text in found.items() if text}


def add(connection: sa.Connection, tenant: str, model: str, given: Mapping[str, Sequence[float]]) -> None:
    """Keep vectors by ref; those of originals that have gone meanwhile are left out."""
    there = connection.scalars(
        sa.select(originals.c.ref).where(originals.c.tenant == tenant, originals.c.ref.in_(list(given)))
    )
    rows = [{"tenant": tenant, "ref": ref, "model": model, "body": _packed(given[ref])} for ref in sorted(there)]
    if rows:
        connection.execute(ADD[connection.dialect.name], rows)


def nearest(
    connection: sa.Connection, tenant: str, conversation: str, model: str, wanted: Sequence[float], *, limit: int
) -> list[tuple[str, float]]:
    """The refs of a conversation's originals that are most like ``wanted``, with the cosine, the nearest first."""
    query = sa.select(vectors.c.ref, vectors.c.body).where(
        vectors.c.tenant == tenant, vectors.c.model == model, vectors.c.ref.in_(held_by(tenant, conversation))
    )
    mine = array("f", _packed(wanted))
    found: list[tuple[str, float]] = []
    for row in connection.execute(query):
        other = array("f", row.body)
        if len(other) == len(mine):
            found.append((row.ref, sum(map(mul, mine, other))))
    return sorted(found, key=lambda each: -each[1])[:limit]


def _packed(vector: Sequence[float]) -> bytes:
    length = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
    return array("f", (x / length for x in vector)).tobytes()
