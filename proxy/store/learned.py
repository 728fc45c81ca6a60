"""What upstreams taught: real windows, and how their counts differ from ours."""

from collections.abc import Sequence

import sqlalchemy as sa

from proxy.store.records import CalibrationRow, LimitRow
from proxy.store.tables import calibrations, keep_last, limits

LEARN = keep_last(limits, replaced=("token_limit", "seen", "expires"))
CALIBRATE = keep_last(calibrations, replaced=("ratio", "samples"))


def all_limits(connection: sa.Connection) -> list[LimitRow]:
    """Every learned window, expired ones included."""
    rows = connection.execute(sa.select(limits).order_by(limits.c.scope))
    return [LimitRow(scope=r.scope, limit=r.token_limit, seen=r.seen, expires=r.expires) for r in rows]


def learn_limit(connection: sa.Connection, row: LimitRow) -> None:
    """Store a learned window in place of what its scope had."""
    connection.execute(
        LEARN[connection.dialect.name],
        {"scope": row.scope, "token_limit": row.limit, "seen": row.seen, "expires": row.expires},
    )


def all_calibrations(connection: sa.Connection) -> list[CalibrationRow]:
    """Every calibration."""
    rows = connection.execute(sa.select(calibrations).order_by(calibrations.c.scope))
    return [CalibrationRow(scope=r.scope, ratio=r.ratio, samples=r.samples) for r in rows]


def save_calibrations(connection: sa.Connection, rows: Sequence[CalibrationRow]) -> None:
    """Store calibrations in place of what their scopes had."""
    newest = {row.scope: {"scope": row.scope, "ratio": row.ratio, "samples": row.samples} for row in rows}
    if newest:
        connection.execute(CALIBRATE[connection.dialect.name], [newest[scope] for scope in sorted(newest)])
