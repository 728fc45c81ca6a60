"""Windows learned from the errors of upstreams: where they hold, how long, and what confirms them.

An error that names the window is believed. One that does not is narrowed down between the largest prompt that passed
and the smallest that was refused: after one refusal the next request may come close to what failed, after a second
it stays within what has passed, and when the time is up the search begins anew.
"""

from collections import OrderedDict
from collections.abc import Iterable

from proxy.store.records import LimitRow


class LearnedLimits:
    """Windows that upstreams stated or let feel, each for a while. Times are seconds since the epoch."""

    MIN_LIMIT = 256
    ONCE = 3600.0
    CONFIRMED = 24 * 3600.0
    UNTRIED = 1 / 3  # of what failed twice, where nothing is known to have passed

    def __init__(self, rows: Iterable[LimitRow] = (), *, most: int = 10_000) -> None:
        self._most = most
        self._rows = {row.scope: row for row in rows}
        self._inferred: set[str] = set()
        self._passed: OrderedDict[str, int] = OrderedDict()

    def learn(self, scope: str, limit: int, *, now: float) -> LimitRow | None:
        """The row that now holds: an hour after one error, a day once a second one agrees; None if implausible.

        While a smaller limit lasts, a larger one changes nothing.
        """
        if isinstance(limit, bool) or limit < self.MIN_LIMIT:
            return None
        if scope in self._inferred:
            self._inferred.discard(scope)
            self._rows.pop(scope, None)
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
        self._put(row, now)
        return row

    def refused(self, scope: str, tokens: int, *, now: float) -> LimitRow | None:
        """The row that holds after an overflow error without a number about a prompt of ``tokens``.

        None where it tells nothing: as large a prompt has passed, or a smaller window is known.
        """
        passed = self._passed.get(scope, 0)
        held = self._live(scope, now)
        if tokens <= max(passed, self.MIN_LIMIT) or (
            held is not None and held.limit < tokens and not self._guessed(held)
        ):
            return None
        refusals = held.seen + 1 if held is not None and self._guessed(held) else 1
        limit = tokens - 1 if refusals == 1 else passed or int(tokens * self.UNTRIED)
        row = LimitRow(scope=scope, limit=max(limit, self.MIN_LIMIT), seen=refusals, expires=now + self.ONCE)
        self._inferred.add(scope)
        self._put(row, now)
        return row

    def passed(self, scope: str, tokens: int) -> None:
        """Remember that a prompt of ``tokens`` was answered; a guessed window that is smaller was guessed wrong."""
        if tokens <= self._passed.get(scope, 0):
            return
        self._passed[scope] = tokens
        self._passed.move_to_end(scope)
        if len(self._passed) > self._most:
            self._passed.popitem(last=False)
        if scope in self._inferred and self._rows[scope].limit < tokens:
            self._inferred.discard(scope)
            del self._rows[scope]

    def follow(self, rows: Iterable[LimitRow]) -> bool:
        """Take over what another process has learned since; whether that was anything."""
        news = (row for row in rows if row.limit >= self._passed.get(row.scope, 0))
        newer = [row for row in news if (own := self._rows.get(row.scope)) is None or own.expires < row.expires]
        self._rows |= {row.scope: row for row in newer}
        return bool(newer)

    def get(self, scope: str, *, now: float) -> int | None:
        """The limit that holds for ``scope``, tokens."""
        row = self._live(scope, now)
        return row.limit if row is not None else None

    def rows(self, *, now: float) -> tuple[LimitRow, ...]:
        """Every limit that still holds."""
        return tuple(row for row in self._rows.values() if row.expires > now)

    def _guessed(self, row: LimitRow) -> bool:
        return row.scope in self._inferred

    def _put(self, row: LimitRow, now: float) -> None:
        self._rows.pop(row.scope, None)
        self._rows[row.scope] = row
        if len(self._rows) > self._most:
            self._forget(now)

    def _live(self, scope: str, now: float) -> LimitRow | None:
        row = self._rows.get(scope)
        return row if row is not None and row.expires > now else None

    def _forget(self, now: float) -> None:
        self._rows = {row.scope: row for row in self.rows(now=now)}
        for scope in list(self._rows)[: max(0, len(self._rows) - self._most)]:
            del self._rows[scope]
        self._inferred &= self._rows.keys()
