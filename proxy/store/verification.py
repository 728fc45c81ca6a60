"""Walking a chain of the audit from its start, and saying what is wrong where it breaks."""

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from proxy.store.audit import missing_guards
from proxy.store.chain import GENESIS, AuditRow, AuditType, hash_of, head_text
from proxy.store.packing import Damaged, unpack_words
from proxy.store.schema import BRANCH, CONVERSATION, OF_TENANT, REQUEST, TENANT, audit
from proxy.store.transaction import Transaction

AT_ONCE = 2_000
FIRST = -(2**63)
FIELDS = ", ".join(each.name for each in fields(AuditRow))
# As text: a column that was tampered with may hold a value of another type, which no conversion would let through.
PAGE = sa.text(
    f"SELECT {FIELDS} FROM audit WHERE tenant = :tenant AND seq > :seq ORDER BY seq LIMIT {AT_ONCE}"  # noqa: S608 - constants
).bindparams(OF_TENANT)
AFTER = sa.text(
    f"SELECT {FIELDS} FROM audit WHERE tenant = :tenant AND prev = :prev ORDER BY seq LIMIT 5"  # noqa: S608
).bindparams(OF_TENANT)
BEFORE = sa.text("SELECT seq FROM audit WHERE tenant = :tenant AND hash = :prev ORDER BY seq LIMIT 1").bindparams(
    OF_TENANT
)
LAST_SEAL = (
    sa.text(
        "SELECT sealed, facts FROM audit WHERE tenant = :tenant AND sealed > 0 ORDER BY sealed DESC, seq DESC LIMIT 1"
    )
    .bindparams(OF_TENANT)
    .columns(sa.column("sealed"), audit.c.facts)
)
CHAINS = sa.text("SELECT tenant, count(*) AS size FROM audit GROUP BY tenant ORDER BY tenant").columns(
    audit.c.tenant, sa.column("size", sa.Integer)
)

Kind = Literal["edited", "missing", "inserted", "reordered"]
IDS = {"tenant": TENANT, "conversation": CONVERSATION, "branch": BRANCH, "request": REQUEST}
Progress = Callable[[int, int], None]


class _Raw(NamedTuple):
    """A row as the driver gave it, whatever types its values have."""

    tenant: str
    seq: int
    at: float
    type: str
    conversation: str
    branch: str
    request: str
    sealed: int
    facts: str
    prev: bytes
    hash: bytes

    @classmethod
    def of(cls, row: sa.Row[*tuple[Any, ...]]) -> "_Raw":
        """A row with its ids and facts as they were given, where they can be read."""
        raw = cls(*row)
        given: dict[str, Any] = {name: kind.shown(getattr(raw, name)) for name, kind in IDS.items()}
        facts: object = raw.facts
        with suppress(Damaged):
            given["facts"] = unpack_words(facts) if isinstance(facts, bytes) else facts
        return raw._replace(**given)

    def is_at(self, seq: int) -> bool:
        """Whether its hash is that of its fields as the row with this number."""
        try:
            return hash_of(self.tenant, seq, *self[2:-1]) == self.hash
        except (TypeError, ValueError):
            return False


@dataclass(frozen=True, slots=True)
class Broken:
    """The first row of a chain that is not what was written, by its number, and what happened to it."""

    seq: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was found in one chain.

    Attributes:
        rows: how many there are; ``good`` how many of them, from the first on, are what was written.
        sealed: the last row that was taken out under a seal, 0 for none.
        head: number and hash of the last good row, by which a chain that was cut short is found later.
        found: which of the heads that were looked for are in it.
    """

    tenant: str
    rows: int
    good: int
    sealed: int = 0
    head: str = ""
    broken: Broken | None = None
    found: frozenset[bytes] = frozenset()


class VerifiedChains(NamedTuple):
    """What was found in the chains of the audit, and which of the triggers that guard its table are not there."""

    chains: list[Verified]
    unguarded: list[str]


def verify(
    tx: Transaction, tenant: str | None = None, *, heads: Collection[bytes] = (), progress: Progress | None = None
) -> VerifiedChains:
    """Every chain of the audit, or a tenant's, walked to the first row that is wrong.

    ``progress`` is told after every page how many rows of how many were looked at, on the thread of the store.
    """
    sizes = {row.tenant: row.size for row in tx.execute(CHAINS) if tenant is None or row.tenant == tenant}
    total, done, found = sum(sizes.values()), 0, []
    for each, size in sizes.items():
        walk = _Walk(tx, each, frozenset(heads))
        for number in walk.pages():
            if progress is not None:
                progress(done + min(number, size), total)
        done += size
        found.append(walk.result(size))
    return VerifiedChains(found, missing_guards(tx))


class _Walk:
    def __init__(self, tx: Transaction, tenant: str, heads: frozenset[bytes]) -> None:
        self._tx = tx
        self._tenant = tenant
        self._heads = heads
        self._found: set[bytes] = set()
        self._good = 0
        self._at = FIRST
        self._seq, self._link = 0, GENESIS
        self._sealed, self._seal_link = self._last_seal()
        self._broken: Broken | None = None

    def pages(self) -> Iterator[int]:
        """Look at every row until one is wrong; how many were, after each page."""
        looked, begun = 0, False
        while True:
            rows = [_Raw.of(row) for row in self._tx.execute(PAGE, {"tenant": self._tenant, "seq": self._at})]
            if not rows:
                return
            for row in rows:
                if not begun:
                    begun = True
                    self._begin(row)
                self._look(row)
                if self._broken is not None:
                    return
            looked += len(rows)
            yield looked

    def result(self, size: int) -> Verified:
        return Verified(
            tenant=self._tenant,
            rows=size,
            good=self._good,
            sealed=self._sealed,
            head=head_text(self._seq, self._link) if self._good else "",
            broken=self._broken,
            found=frozenset(self._found),
        )

    def _last_seal(self) -> tuple[int, bytes | None]:
        row = self._tx.execute(LAST_SEAL, {"tenant": self._tenant}).first()
        if row is None:
            return 0, None
        try:
            return int(row.sealed), bytes.fromhex(json.loads(row.facts)["after"])
        except (KeyError, TypeError, ValueError):
            return 0, None

    def _begin(self, row: _Raw) -> None:
        """Start behind what was taken out under a seal: at it, or inside it where that is not finished yet."""
        first = row.seq
        if self._seal_link is None or first == 1 or not isinstance(first, int):
            return
        if first > self._sealed:
            self._seq, self._link = self._sealed, self._seal_link
            self._note(self._link)
        elif 1 < first <= self._sealed and isinstance(row.prev, bytes):
            self._seq, self._link = first - 1, row.prev

    def _look(self, row: _Raw) -> None:
        expected = self._seq + 1
        if row.seq == expected and row.prev == self._link and row.is_at(expected) and self._agrees(row):
            self._seq = self._at = expected
            self._link = row.hash
            self._good += 1
            self._note(row.hash)
            return
        self._broken = self._diagnosed(row, expected)

    def _agrees(self, row: _Raw) -> bool:
        """Whether the last row under the seal is the one that the seal names, and only seals seal."""
        if row.seq == self._sealed and row.hash != self._seal_link:
            return False
        return (row.type == AuditType.SEAL) == (row.sealed > 0)

    def _note(self, link: bytes) -> None:
        if link in self._heads:
            self._found.add(link)

    def _diagnosed(self, row: _Raw, expected: int) -> Broken:
        """What happened, told by where the row's own hash says that it belongs and who else would fit here."""
        if not isinstance(row.seq, int) or row.seq < 1:
            return Broken(row.seq if isinstance(row.seq, int) else expected, "inserted")
        if row.seq > expected:
            return Broken(expected, "missing")
        rightful = self._fits(expected)
        if row.is_at(expected):
            if row.prev == self._link or self._good == 0:
                return Broken(expected, "edited")
            return Broken(expected - 1, "edited")
        true = self._place_of(row)
        if true is None or true == expected:
            return Broken(expected, "inserted" if rightful else "edited")
        if true < expected:
            return Broken(true, "inserted")
        return Broken(expected, "reordered" if rightful else "missing")

    def _fits(self, seq: int) -> bool:
        """Whether some row is, by its own hash, the one behind the last good row."""
        rows = self._tx.execute(AFTER, {"tenant": self._tenant, "prev": self._link})
        return any(raw.seq != seq and raw.is_at(seq) for raw in (_Raw.of(row) for row in rows))

    def _place_of(self, row: _Raw) -> int | None:
        """The number that a row's own hash was made for, None if none is found."""
        tried = {row.seq - 1, row.seq + 1}
        if isinstance(row.prev, bytes):
            before = self._tx.execute(BEFORE, {"tenant": self._tenant, "prev": row.prev}).scalar()
            tried |= {before + 1} if isinstance(before, int) else {1} if row.prev == GENESIS else set()
        return next((seq for seq in sorted(tried) if row.is_at(seq)), None)
