"""What one tenant's summaries may take: tokens, asked and answered, within any hour."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

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
