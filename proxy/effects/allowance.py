"""What summaries may take of a tenant's tokens within any hour, and what they took."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.store import Store
from proxy.store.records import StoreError

log = logging.getLogger("weir.summaries")

SLOT = 60.0
SLOTS = 60
MAX_TENANTS = 4_096


class Reserved(NamedTuple):
    tokens: int
    slot: int | None = None


@dataclass(slots=True)
class _Account:
    used: deque[tuple[int, int]] = field(default_factory=deque)
    total: int = 0
    held: int = 0


class Allowance:
    def __init__(
        self,
        clock: Callable[[], float],
        *,
        book: Store | None = None,
        now: Callable[[], float] = time.time,
        most_tenants: int = MAX_TENANTS,
    ) -> None:
        self._clock = clock
        self._book = book
        self._now = now
        self._most = most_tenants
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    async def reserve(self, tenant: str, tokens: int, *, limit: int) -> Reserved | None:
        account = self._account(tenant)
        if account.total + account.held + tokens > limit:
            return None
        account.held += tokens
        if self._book is None:
            return Reserved(tokens)
        try:
            slot = await self._book.reserve(tenant, tokens, limit=limit, at=self._now())
        except StoreError as error:
            log.warning("what other servers' summaries took is not known: %s", error)
            return Reserved(tokens)
        if slot is None:
            self._count(tenant, tokens, used=0)
            return None
        return Reserved(tokens, slot)

    async def settle(self, tenant: str, reserved: Reserved, *, used: int) -> None:
        self._count(tenant, reserved.tokens, used=used)
        if self._book is None or reserved.slot is None:
            return
        try:
            await self._book.correct(tenant, reserved.slot, max(0, used) - reserved.tokens)
        except StoreError as error:
            log.warning("what a summary took is counted as what it might have taken: %s", error)

    def _count(self, tenant: str, reserved: int, *, used: int) -> None:
        account = self._account(tenant)
        account.held = max(0, account.held - reserved)
        if used <= 0:
            return
        slot = int(self._clock() // SLOT)
        account.total += used
        if account.used and account.used[-1][0] == slot:
            used += account.used.pop()[1]
        account.used.append((slot, used))

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
            self._make_room()
        self._accounts.move_to_end(tenant)
        oldest = int(self._clock() // SLOT) - SLOTS
        while account.used and account.used[0][0] < oldest:
            account.total -= account.used.popleft()[1]
        return account

    def _make_room(self) -> None:
        if len(self._accounts) > self._most:
            idle = next((name for name, account in self._accounts.items() if not account.held), None)
            if idle is not None and idle != next(reversed(self._accounts)):
                del self._accounts[idle]
