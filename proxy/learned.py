"""Windows learned from the errors of upstreams: where they hold, how long, and what confirms them."""

from collections.abc import Iterable

from proxy.store.records import LimitRow


def limit_scope(*, origin: str, model: str, credential: str) -> str:
    """Where a learned limit holds: one upstream, one model, one credential (its digest, never itself)."""
    return f"{origin} {credential} {model}"


class LearnedLimits:
    """Windows that upstreams stated in overflow errors, each for a while. Times are seconds since the epoch."""

    SMALLEST = 256
    ONCE = 3600.0
    CONFIRMED = 24 * 3600.0

    def __init__(self, rows: Iterable[LimitRow] = (), *, most: int = 10_000) -> None:
        self._most = most
        self._rows = {row.scope: row for row in rows}

    def learn(self, scope: str, limit: int, *, now: float) -> LimitRow | None:
        """The row that now holds: an hour after one error, a day once a second one agrees; None if implausible.

        While a smaller limit lasts, a larger one changes nothing.
        """
        if isinstance(limit, bool) or limit < self.SMALLEST:
            return None
        held = self._live(scope, now)
        if held is not None and held.limit < limit:
            return held
        agreed = held is not None and held.limit == limit
        row = LimitRow(
            scope=scope,
            limit=limit,
            seen=held.seen + 1 if held is not None and agreed else 1,
            expires=now + (self.CONFIRMED if agreed else self.ONCE),
        )
        self._rows.pop(scope, None)
        self._rows[scope] = row
        if len(self._rows) > self._most:
            self._forget(now)
        return row

    def follow(self, rows: Iterable[LimitRow]) -> bool:
        """Take over what another process has learned since; whether that was anything."""
        newer = [row for row in rows if (own := self._rows.get(row.scope)) is None or own.expires < row.expires]
        self._rows |= {row.scope: row for row in newer}
        return bool(newer)

    def get(self, scope: str, *, now: float) -> int | None:
        """The limit that holds for ``scope``, tokens."""
        row = self._live(scope, now)
        return row.limit if row is not None else None

    def rows(self, *, now: float) -> tuple[LimitRow, ...]:
        """Every limit that still holds."""
        return tuple(row for row in self._rows.values() if row.expires > now)

    def _live(self, scope: str, now: float) -> LimitRow | None:
        row = self._rows.get(scope)
        return row if row is not None and row.expires > now else None

    def _forget(self, now: float) -> None:
        self._rows = {row.scope: row for row in self.rows(now=now)}
        for scope in list(self._rows)[: max(0, len(self._rows) - self._most)]:
            del self._rows[scope]
