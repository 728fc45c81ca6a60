"""What a key's requests use of its limits in all processes together: for a shared database only.

One row a key, so that the server decides about its requests one after another: ``begun`` are
requests begun by second, ``open`` those that are open by process, each until a time by which the
process has to renew it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from proxy.store.records import KeyUse, Refusal
from proxy.store.transaction import Transaction

OPEN_FOR = 30
"""Seconds for which a process counts as having requests open; it renews that before they are over.
"""
MINUTE = 60
_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("key", "process"), sa.Text()),
    **dict.fromkeys(("here", "rate", "most", "open_for", "minute", "count"), sa.BigInteger()),
}


def _statement(text: str) -> sa.TextClause:
    named = [name for name in _KINDS if f":{name}" in text]
    return sa.text(text).bindparams(*(sa.bindparam(name, type_=_KINDS[name]) for name in named))


# 1 and 2 are Refusal.RATE and Refusal.CONCURRENCY
ENTER = _statement("""
INSERT INTO key_use AS k (key, begun, open, refused, since)
SELECT :key, jsonb_build_object(t.now::text, :count)::text,
  jsonb_build_object(:process, jsonb_build_array(:here, t.now + :open_for))::text, 0, t.now
FROM (SELECT floor(extract(epoch FROM clock_timestamp()))::bigint AS now) t
ON CONFLICT (key) DO UPDATE SET (begun, open, refused, since) = (
  SELECT
    (CASE WHEN s.refused = 0
      THEN s.begun || jsonb_build_object(s.now::text, coalesce((s.begun ->> s.now::text)::bigint, 0) + :count)
      ELSE s.begun END)::text,
    (s.open || jsonb_build_object(:process, jsonb_build_array(
      CASE WHEN s.refused = 0 THEN :here ELSE :here - 1 END, s.now + :open_for)))::text,
    s.refused,
    s.since
  FROM (
    SELECT t.now, b.begun, b.since, o.open, CASE
        WHEN :rate > 0 AND b.number >= :rate THEN 1
        WHEN :most > 0 AND o.number + :here > :most THEN 2
        ELSE 0 END AS refused
    FROM (SELECT floor(extract(epoch FROM clock_timestamp()))::bigint AS now) t
    CROSS JOIN LATERAL (
      SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}') AS begun,
        coalesce(sum(e.value::text::bigint), 0) AS number,
        coalesce(min(e.key::bigint), t.now) AS since
      FROM jsonb_each(k.begun::jsonb) e WHERE e.key::bigint >= t.now - :minute) b
    CROSS JOIN LATERAL (
      SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}') AS open,
        coalesce(sum((e.value ->> 0)::bigint), 0) AS number
      FROM jsonb_each(k.open::jsonb) e WHERE e.key <> :process AND (e.value ->> 1)::bigint > t.now) o
  ) s)
RETURNING refused, since + :minute + 1 - floor(extract(epoch FROM clock_timestamp()))::bigint AS seconds
""")
KEEP = _statement("""
UPDATE key_use AS k SET open = ((k.open::jsonb - :process) || CASE WHEN :here > 0
  THEN jsonb_build_object(:process, jsonb_build_array(:here, t.now + :open_for)) ELSE '{}'::jsonb END)::text
FROM (SELECT floor(extract(epoch FROM clock_timestamp()))::bigint AS now) t WHERE k.key = :key
""")
# k alone is read: what a statement joins is as it was before it waited for the row
FORGET = _statement("""
UPDATE key_use AS k SET begun = (
  SELECT ((k.begun::jsonb - b.second) || CASE WHEN b.number > :count
    THEN jsonb_build_object(b.second, b.number - :count) ELSE '{}'::jsonb END)::text
  FROM (SELECT e.key AS second, e.value::text::bigint AS number FROM jsonb_each(k.begun::jsonb) e
    ORDER BY e.key DESC LIMIT 1) b)
WHERE k.key = :key AND k.begun::jsonb <> '{}'::jsonb
""")


def enter(
    tx: Transaction, key: str, *, process: str, here: int, rate: int, most: int, count: int = 1
) -> KeyUse:
    """Whether one more request of a key may begin: ``rate`` in a minute, ``most`` at once, 0 for no
    limit.

    ``here`` are those that the process then has open, this one too; in its minute it counts as
    ``count``.
    """
    given = {"key": key, "process": process, "here": here, "rate": rate, "most": most}
    given |= {"count": count}
    row = tx.execute(ENTER, {**given, "open_for": OPEN_FOR, "minute": MINUTE}).one()
    return KeyUse(refused=Refusal(row.refused), seconds=max(1, row.seconds))


def keep(
    tx: Transaction,
    here: Mapping[str, int],
    *,
    process: str,
    forgotten: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Store how many requests of each key a process has open, and remove the ``forgotten`` ones
    from those begun.
    """
    rows = [
        {"key": key, "process": process, "here": here[key], "open_for": OPEN_FOR}
        for key in sorted(here)
    ]
    if rows:
        tx.execute(KEEP, rows)
    if forgotten:
        tx.execute(FORGET, [{"key": key, "count": forgotten[key]} for key in sorted(forgotten)])
