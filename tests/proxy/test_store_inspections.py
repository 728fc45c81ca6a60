"""What is kept of the newest requests, as the store keeps it."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from policies.messages import Message
from proxy.store import Store
from proxy.store.records import ConversationRow, Inspection
from tests.proxy.store_rows import digest, exchange, url
from tests.proxy.test_store_archive import raw

KEPT, STEPS = 20, 45


def message(number: int) -> tuple[Message, bytes]:
    """One of a conversation, and its JSON."""
    said = b'{"role": "user", "content": "%s"}' % (b"said in %d, " % number * 40)
    return Message(role="user", digest=digest("message", number), tokens=9), said


async def step(store: Store, number: int, *, known: int | None = None) -> None:
    """A request with two messages more than the one before, given anew from ``known`` on."""
    both = [message(n) for n in range(2 * number)]
    first = 2 * (number - 1) if known is None else known
    kept = Inspection(
        keep=KEPT,
        messages=[each for each, _ in both],
        pieces=None,
        raws=[r for _, r in both[first:]],
        first=first,
    )
    await store.record([msgspec.structs.replace(exchange(number), inspection=kept)])


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"))
    yield opened
    await opened.close()


async def only(store: Store) -> ConversationRow:
    [row] = await store.conversations(None)
    return row


@pytest.mark.requirement("A0.148", "R.67")
async def test_a_damaged_bundle_costs_what_it_holds_and_no_request(store: Store, tmp_path: Path) -> None:
    for number in range(1, 4):
        await step(store, number)
    raw(tmp_path / "w.db", "UPDATE inspected_parts SET body = x'00' WHERE number = 2")
    for number in range(4, STEPS):
        await step(store, number)
    row = await only(store)
    _, kept = await store.inspection(row, exchange(STEPS - 1).id)
    assert kept is not None
    lost = {message(n)[0].ref for n in (2, 3)}
    assert kept.bodies == {
        each.ref: said for each, said in map(message, range(2 * (STEPS - 1))) if each.ref not in lost
    }
    assert row.requests == STEPS - 1
    assert store.damaged == 1
