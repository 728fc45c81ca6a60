"""What upstreams taught: real windows, and how their counts differ from ours."""

import json
from collections.abc import Sequence

import sqlalchemy as sa

from proxy.store.records import CalibrationRow, LimitRow
from proxy.store.tables import calibrations, keep_last, limits

LEARN = keep_last(limits, replaced=("token_limit", "seen", "expires"))
CALIBRATE = keep_last(calibrations, replaced=("ratio", "samples", "recent", "drift", "strict"))


def all_limits(connection: sa.Connection) -> list[LimitRow]:
    """Every learned window, expired ones included."""
    rows = connection.execute(sa.select(limits).order_by(limits.c.scope))
    return [LimitRow(scope=r.scope, limit=r.token_limit, seen=r.seen, expires=r.expires) for r in rows]


def all_calibrations(connection: sa.Connection) -> list[CalibrationRow]:
    """Every calibration."""
    return [
        CalibrationRow(
            scope=row.scope,
            ratio=row.ratio,
            samples=row.samples,
            recent=tuple(json.loads(row.recent)),
            drift=row.drift,
            strict=row.strict,
        )
        for row in connection.execute(sa.select(calibrations).order_by(calibrations.c.scope))
    ]


def learn(connection: sa.Connection, known: Sequence[CalibrationRow], windows: Sequence[LimitRow]) -> None:
    """Store calibrations and learned windows in place of what their scopes had."""
    ratios = {
        row.scope: {
            "scope": row.scope,
            "ratio": row.ratio,
            "samples": row.samples,
            "recent": json.dumps(row.recent),
            "drift": row.drift,
            "strict": row.strict,
        }
        for row in known
    }
    sizes = {
        row.scope: {"scope": row.scope, "token_limit": row.limit, "seen": row.seen, "expires": row.expires}
        for row in windows
    }
    for statement, rows in ((CALIBRATE, ratios), (LEARN, sizes)):
        if rows:
            connection.execute(statement[connection.dialect.name], [rows[scope] for scope in sorted(rows)])
