"""Rows for the tests of the store."""

from hashlib import blake2b, sha256
from pathlib import Path

import msgspec

from policies.ledger import EVERY_WINDOW, NOTHING, Cut, Edit, EditKind, Ledger
from proxy.store.records import Branch, Change, EvictionRow, ExchangeRow, NoteRow, Original, SummaryRow

TO_THE_FIRST_SCHEMA = (
    "DROP TABLE key_days",
    "DROP TABLE reservations",
    *(f"ALTER TABLE keys DROP COLUMN {name}" for name in ("tokens_per_minute", "team", "budgets")),
    "UPDATE alembic_version SET version_num = '1'",
)
"""Statements that make of a database one of the first release."""


def url(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


def decided(branch: Branch) -> Ledger:
    return branch.views.get(EVERY_WINDOW, NOTHING)


def digest(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def chain(count: int, *, of: str = "a") -> list[bytes]:
    return [digest(of, j) for j in range(count)]


def exchange(
    number: int,
    *,
    tenant: str = "tenant-a",
    conversation: str = "c1",
    name: str | None = None,
    branch: str = "b1",
    parent: str | None = None,
    end: bytes = b"",
    length: int = 0,
    at: float | None = None,
) -> ExchangeRow:
    return ExchangeRow(
        id=f"{tenant}-{branch}-{number}",
        tenant=tenant,
        conversation=conversation,
        name=name or conversation,
        branch=branch,
        parent=parent,
        at=1000.0 + number if at is None else at,
        model="gpt-x",
        policy="balanced",
        chain_end=end,
        length=length,
        status=200,
        outcome="ok",
        tokens_before=1000 + number,
        tokens_after=900 + number,
        limit=8000,
        pressure=0.5,
        zone="green",
        actions="none",
        usage_prompt=900,
        detail={"buckets": {"system": 12}},
    )


def edit(number: int, *, of: str = "a", text: str | None = None, ref: str | None = None) -> Edit:
    return Edit(
        digest=digest(of, "message", number),
        occurrence=0,
        kind=EditKind.EVICT,
        text=f"[evicted {number}]" if text is None else text,
        ref=ref or digest(of, "message", number).hex()[:12],
        tokens=7,
        chain=digest(of, number),
    )


def cut(version: int = 1, *, covers: int = 3, of: str = "a") -> Cut:
    prefix = digest(of, covers - 1)
    return Cut(
        covers=covers,
        prefix=prefix,
        text=f"summary {version} of {of}",
        tokens=40,
        version=version,
        ref=prefix.hex()[:12],
        before=(0,),
        after=(2,),
        origin="model+extract",
        narrative="we went on",
        noted=covers,
    )


def original(number: int, *, of: str = "a", text: str | None = None) -> Original:
    said = f"output {number} of the tool about src/app{number}.py" if text is None else text
    return Original(
        ref=digest(of, "message", number).hex()[:12],
        role="tool",
        tokens=50,
        body=b'{"role": "tool", "content": "%s"}' % said.encode(),
        text=said,
    )


def eviction(
    number: int,
    *,
    tool: str = "read_file",
    layer: str = "evict",
    policy: str = "balanced",
    before: int = 300,
    after: int = 30,
) -> EvictionRow:
    return EvictionRow(
        digest=digest("evicted", number),
        occurrence=0,
        kind=layer,
        layer=layer,
        policy=policy,
        scorer="hybrid",
        tool=tool,
        tokens_before=before,
        tokens_after=after,
        tokens_remaining=4000,
    )


def change(
    expected: int = 0,
    *,
    tenant: str = "tenant-a",
    conversation: str = "c1",
    branch: str = "b1",
    count: int = 3,
    of: str | None = None,
    with_cut: bool = True,
    at: float = 2000.0,
) -> Change:
    """A batch of ``count`` edits on version ``expected``, whose originals are archived and covered by a cut."""
    of = f"{tenant}{branch}{expected}" if of is None else of
    originals = tuple(original(i, of=of) for i in range(count))
    return Change(
        tenant=tenant,
        conversation=conversation,
        name=conversation,
        branch=branch,
        expected=expected,
        at=at,
        edits=tuple(edit(i, of=of) for i in range(count)),
        cut=cut(expected + 1, of=of) if with_cut else None,
        originals=originals,
        covered=tuple(o.ref for o in originals) if with_cut else (),
        checkpoint=f'{{"goal": "g{expected}"}}' if with_cut else None,
    )


def saved(expected: int, *, at: float = 2000.0, reason: str = "safety", said: str | None = None) -> Change:
    """A change that only saves the state."""
    body = f'{{"goal": "g{expected}"}}' if said is None else said
    return msgspec.structs.replace(change(expected, count=0, with_cut=False, at=at), checkpoint=body, reason=reason)


def note(number: int, *, importance: str = "normal", at: float | None = None) -> NoteRow:
    return NoteRow(
        id=digest("note", number),
        at=100.0 + number if at is None else at,
        category="decisions",
        importance=importance,
        source="api",
        text=f"note {number}",
    )


def summary(number: int, *, at: float = 100.0, text: str = "") -> SummaryRow:
    return SummaryRow(
        key=digest("asked", number),
        at=at,
        purpose="compact-1",
        model="gpt-x",
        tokens_in=900,
        tokens_out=40,
        text=text or f"what was said {number}",
    )


def sha(body: bytes) -> str:
    return sha256(body).hexdigest()
