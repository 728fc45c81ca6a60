"""Budgets of keys and teams: a request of a key that has one is reserved before it goes up.

A request may begin as long as something is left after what is used and what is in flight, so that a
hard budget is exceeded by the last request at most. The reservation ends with the request's row. A
store that does not answer cannot say what is used: the request is allowed, and its answer says so.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from proxy.access.destination import Caller
from proxy.config.budgets import (
    UNITS,
    Budget,
    Period,
    TeamSettings,
    Unit,
    budgets_from,
    period_at,
    seconds_left,
)
from proxy.config.file import nearest
from proxy.errors import BudgetExceeded, InvalidRequest, RateLimited
from proxy.store import Store
from proxy.store.budgets import Limit, Reservation, Scope, Spent
from proxy.store.records import StoreError
from proxy.store.transaction import chunks

log = logging.getLogger("weir")

LEASE = 300.0
"""Seconds for which a reservation is believed; a request that runs renews it every minute."""
RENEWED_EVERY = 60.0
NEARLY = 0.8
MAX_KNOWN = 2_000
AT_ONCE = 100
"""Budgets that one statement looks up: SQLite takes 500 parts of one."""
BYTES_A_TOKEN = 4
"""The value for a request that is not counted."""


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True):
    """One budget of a key or a team in one unit; ``reserved`` is held by requests in flight.

    ``label`` is the name that people use. ``resets`` is when the period ends, seconds since 1970.
    """

    scope: Scope
    name: str
    label: str
    period: Period
    unit: Unit
    limit: float
    used: float
    reserved: float
    resets: float
    hard: bool

    @property
    def ratio(self) -> float:
        """What is used and reserved, as a share of the limit."""
        return (self.used + self.reserved) / self.limit

    @property
    def is_used_up(self) -> bool:
        return self.used >= self.limit

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a metric: key, team, period and unit."""
        key, team = (self.label, "") if self.scope == "key" else ("", self.label)
        return (key, team, self.period, self.unit)

    def __str__(self) -> str:
        """``tokens=812/1000;period=day;key=bot``."""
        taken = self.used + self.reserved
        about = f"period={self.period};{self.scope}={quote(self.label)}"
        return f"{self.unit}={amount(self.unit, taken)}/{amount(self.unit, self.limit)};{about}"


class BudgetNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A budget is reached, or nearly: reported once in a period."""

    use: BudgetUse
    share: float
    tenant: str
    request: str
    at: float


class _Held(NamedTuple):
    """A budget, and who has it: ``name`` is the store's key for the sum."""

    scope: Scope
    name: str
    label: str
    budget: Budget


def amount(unit: Unit, value: float) -> str:
    """A sum as people read it: whole tokens, dollars to the hundredth of a cent."""
    if unit == "tokens":
        return f"{value:.0f}"
    return f"{value:.4f}".rstrip("0").rstrip(".")


async def _nothing() -> None:
    """What is settled where nothing waits."""


class Budgets:
    """The budgets of all keys, and the reservations of the requests that run here.

    ``settle`` stores the rows of requests that have ended, so that these hold nothing any more.
    """

    def __init__(
        self,
        store: Store,
        *,
        settle: Callable[[], Awaitable[None]] = _nothing,
        clock: Callable[[], float] = time.time,
        notify: Callable[[BudgetNotice], None] = lambda _: None,
        refused: Callable[[BudgetUse], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._settle = settle
        self._clock = clock
        self._notify = notify
        self._refused = refused
        self._running: set[str] = set()
        self._noticed: set[str] = set()
        self._known: dict[tuple[str, ...], BudgetUse] = {}

    async def reserve(
        self, caller: Caller, request: str, *, tokens: int, dollars: float
    ) -> tuple[BudgetUse | None, RateLimited | None]:
        """The budget that is used up the furthest, and why the request may not go up.

        None and None where the store cannot say. The refusal is BudgetExceeded where a hard one is
        used up, RateLimited where what is in flight may take what is left of it.
        """
        at = self._clock()
        row = Reservation(
            id=request,
            key=caller.account,
            team=caller.team,
            tokens=tokens,
            dollars=dollars,
            expires=at + LEASE,
        )
        held = list(budgets_of(caller))
        try:
            uses, is_reserved = await self._try(row, held, at=at)
            if not is_reserved and not any(use.hard and use.is_used_up for use in uses):
                await self._settle()
                uses, is_reserved = await self._try(row, held, at=at)
        except StoreError as error:
            log.warning("a budget cannot be looked up, the request is allowed: %s", error)
            return None, None
        for use in uses:
            self._learn(use)
        await self._notice(uses, caller, request, at)
        if is_reserved:
            self._running.add(request)
            return max(uses, key=lambda use: use.ratio), None
        reached = [use for use in uses if use.hard and use.ratio >= 1]
        worst = max(reached, key=lambda use: (use.is_used_up, use.resets))
        self._refused(worst)
        return worst, refusal(worst, at=at)

    async def _try(
        self, row: Reservation, held: Sequence[_Held], *, at: float
    ) -> tuple[list[BudgetUse], bool]:
        spent, is_reserved = await self._store.reserve(row, _limits_of(held, at=at), at=at)
        return [*_uses_of(held, spent, at=at)], is_reserved

    def ended(self, request: str) -> None:
        """Stop renewing the reservation of a request: its row is about to be stored."""
        self._running.discard(request)

    async def renew(self) -> None:
        """Renew the reservations of the requests that run here. Raises StoreError."""
        at = self._clock()
        await self._store.renew_reservations([*self._running], until=at + LEASE, at=at)

    async def look_up(
        self, callers: Iterable[Caller], teams: Mapping[str, TeamSettings]
    ) -> list[BudgetUse]:
        """What is used of the budgets of keys and teams, teams first. Raises StoreError."""
        at = self._clock()
        held = [each for name, team in teams.items() for each in _of_team(name, team)]
        held += [each for caller in callers for each in _of_key(caller)]
        uses: list[BudgetUse] = []
        for some in chunks(held, AT_ONCE):
            spent = await self._store.spent(_limits_of(some, at=at), at=at)
            uses += _uses_of(some, spent, at=at)
        return uses

    def ratios(self) -> dict[tuple[str, ...], float]:
        """What is used of each budget that was looked up in its present period, as a share."""
        now = self._clock()
        self._known = {name: use for name, use in self._known.items() if use.resets > now}
        return {name: use.used / use.limit for name, use in self._known.items()}

    def _learn(self, use: BudgetUse) -> None:
        if use.labels in self._known or len(self._known) < MAX_KNOWN:
            self._known[use.labels] = use

    async def _notice(
        self, uses: Sequence[BudgetUse], caller: Caller, request: str, at: float
    ) -> None:
        for use in uses:
            share = 1.0 if use.is_used_up else NEARLY
            about = (use.scope, use.name, use.period, use.unit, use.limit, share, use.resets)
            name = ":".join(map(str, about))
            if use.used < share * use.limit or name in self._noticed:
                continue
            try:
                is_first = await self._store.is_first_notice(name, until=use.resets, at=at)
            except StoreError as error:
                log.warning("whether a budget's alert was sent cannot be looked up: %s", error)
                continue
            if len(self._noticed) > MAX_KNOWN:
                self._noticed.clear()
            self._noticed.add(name)
            if is_first:
                notice = BudgetNotice(
                    use=use, share=share, tenant=caller.tenant, request=request, at=at
                )
                self._notify(notice)


def budgets_of(caller: Caller) -> Iterator[_Held]:
    """What a request of a caller counts in: its key's budgets, and its team's."""
    yield from _of_key(caller)
    if caller.team_rules is not None:
        yield from _of_team(caller.team, caller.team_rules)


def _of_key(caller: Caller) -> Iterator[_Held]:
    for budget in caller.budgets:
        yield _Held("key", caller.account, caller.name or "", budget)


def _of_team(name: str, team: TeamSettings) -> Iterator[_Held]:
    for budget in team.budgets:
        yield _Held("team", name, name, budget)


def _limits_of(held: Sequence[_Held], *, at: float) -> list[Limit]:
    return [
        Limit(
            scope=each.scope,
            name=each.name,
            since=period_at(each.budget.period, at)[0],
            tokens=each.budget.tokens,
            dollars=each.budget.dollars,
            hard=each.budget.hard,
        )
        for each in held
    ]


def _uses_of(held: Sequence[_Held], spent: Sequence[Spent], *, at: float) -> Iterator[BudgetUse]:
    """What is used of each budget, a value for each of its units."""
    for each, use in zip(held, spent, strict=True):
        budget = each.budget
        for unit in UNITS:
            limit = budget.limit(unit)
            if limit is None:
                continue
            yield BudgetUse(
                scope=each.scope,
                name=each.name,
                label=each.label,
                period=budget.period,
                unit=unit,
                limit=limit,
                used=use.tokens if unit == "tokens" else use.dollars,
                reserved=use.reserved_tokens if unit == "tokens" else use.reserved_dollars,
                resets=period_at(budget.period, at)[1],
                hard=budget.hard,
            )


def key_budgets(given: Mapping[str, object], teams: Collection[str]) -> dict[str, Any]:
    """The ``team`` and ``budgets`` among what was given; ``none`` or None takes one away.

    Raises InvalidRequest, which says what to write.
    """
    found: dict[str, Any] = {}
    if "team" in given:
        team = given["team"]
        found["team"] = None if team in (None, "none", "") else team
        if found["team"] is not None and (not isinstance(team, str) or team not in teams):
            hint = nearest(str(team)[:80], sorted(teams)) or "; name it under teams in the file"
            raise InvalidRequest(f"There is no team {str(team)[:80]!r}{hint}.", param="team")
    if "budgets" in given:
        budgets = given["budgets"]
        try:
            made = () if budgets in (None, "none", ["none"]) else budgets_from(budgets)
        except ValueError as fault:
            raise InvalidRequest(f"budgets: {fault}.", param="budgets") from None
        found["budgets"] = tuple(map(str, made))
    return found


def refusal(use: BudgetUse, *, at: float) -> RateLimited:
    """The message for a request that a budget has no room for."""
    whose = f"{use.scope} {use.label}"
    limit = said_amount(use.unit, use.limit)
    used = said_amount(use.unit, use.used)
    begins = f"The budget of the {whose}, {limit} a {use.period}"
    if not use.is_used_up:
        held = said_amount(use.unit, use.reserved)
        return RateLimited(
            f"{begins}, has {used} used, and requests in flight may take {held} more. Please try"
            " again in a moment."
        )
    ends = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(use.resets))
    return BudgetExceeded(
        f"{begins}, is used up ({used}). It resets at {ends}. Before that, ask the operator of this"
        " proxy for a larger budget.",
        retry_after=seconds_left(use.period, at),
    )


def said_amount(unit: Unit, value: float) -> str:
    return f"{value:,.0f} tokens" if unit == "tokens" else f"${value:,.4f}".rstrip("0").rstrip(".")
