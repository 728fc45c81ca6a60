"""What one tenant's summaries may take: tokens, asked and answered, within any hour."""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from proxy.store import StoreError

log = logging.getLogger("weir.summaries")

SLOT = 60.0
SLOTS = 60
MOST_TENANTS = 4_096


@dataclass(slots=True)
class _Account:
    """One tenant's: tokens by the slot in which they were used, and what calls under way may take."""

    used: deque[tuple[int, int]] = field(default_factory=deque)
    total: int = 0
    held: int = 0


class Allowance:
    """Tokens by tenant over a sliding hour, to the minute; ``clock`` is monotonic, in seconds.

    What a call may take is reserved before it is made, so that calls at the same time cannot exceed together what
    none of them would alone.
    """

    def __init__(self, clock: Callable[[], float], *, most_tenants: int = MOST_TENANTS) -> None:
        self._clock = clock
        self._most = most_tenants
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def reserve(self, tenant: str, tokens: int, *, limit: int) -> bool:
        """Whether ``tokens`` more stay within ``limit``; they are then held until :meth:`settle`."""
        account = self._account(tenant)
        if account.total + account.held + tokens > limit:
            return False
        account.held += tokens
        return True

    def settle(self, tenant: str, reserved: int, *, used: int) -> None:
        """Count what was used in place of what was reserved."""
        account = self._account(tenant)
        account.held = max(0, account.held - reserved)
        if used <= 0:
            return
        slot = int(self._clock() // SLOT)
        account.total += used
        if account.used and account.used[-1][0] == slot:
            used += account.used.pop()[1]
        account.used.append((slot, used))

    def used(self, tenant: str) -> int:
        """Tokens that a tenant used within the last hour."""
        return self._account(tenant).total

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
        """Forget the tenant that asked longest ago and has nothing under way, above so many."""
        if len(self._accounts) > self._most:
            idle = next((name for name, account in self._accounts.items() if not account.held), None)
            if idle is not None and idle != next(reversed(self._accounts)):
                del self._accounts[idle]


class SharedBook(Protocol):
    """Where several servers count together."""

    async def reserve(self, tenant: str, tokens: int, *, limit: int, at: float) -> int | None:
        """The slot in which the tokens are counted, None where they are too many."""
        ...

    async def correct(self, tenant: str, slot: int, more: int) -> None:
        """Count more tokens in a slot, or fewer."""
        ...


class Reserved(NamedTuple):
    """Tokens that a call may take, and the slot of the shared book that has them."""

    tokens: int
    slot: int | None


class Budget:
    """This process's allowance, and where servers share a book, that of all; its own holds while the book fails."""

    def __init__(self, own: Allowance, book: SharedBook | None, now: Callable[[], float]) -> None:
        self._own = own
        self._book = book
        self._now = now

    async def reserve(self, tenant: str, tokens: int, *, limit: int) -> Reserved | None:
        """What is held until :meth:`settle`; None where ``limit`` would be exceeded."""
        if not self._own.reserve(tenant, tokens, limit=limit):
            return None
        if self._book is None:
            return Reserved(tokens, None)
        try:
            slot = await self._book.reserve(tenant, tokens, limit=limit, at=self._now())
        except StoreError as error:
            log.warning("what other servers' summaries took is not known: %s", error)
            return Reserved(tokens, None)
        if slot is None:
            self._own.settle(tenant, tokens, used=0)
            return None
        return Reserved(tokens, slot)

    async def settle(self, tenant: str, reserved: Reserved, *, used: int) -> None:
        """Count what was used in place of what was reserved."""
        self._own.settle(tenant, reserved.tokens, used=used)
        if self._book is None or reserved.slot is None:
            return
        try:
            await self._book.correct(tenant, reserved.slot, max(0, used) - reserved.tokens)
        except StoreError as error:
            log.warning("what a summary took is counted as what it might have taken: %s", error)
