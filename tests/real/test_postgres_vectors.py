"""Vectors of removed texts on a real PostgreSQL server."""

from dataclasses import replace

import pytest

from proxy.store import Store
from tests.proxy.store_rows import change
from tests.real.test_postgres import server, store, url  # noqa: F401 - fixtures

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.mark.requirement("A4.25")
async def test_vectors_are_kept_found_by_likeness_and_go_with_their_texts(store: Store) -> None:  # noqa: F811
    made = replace(change(0), conversation="conv-1", name="trip")
    await store.commit(made)
    texts = await store.lacking_vectors(made.tenant, "conv-1", "m", limit=10)
    assert texts
    given = {ref: [1.0 + n, 1.0, 0.0] for n, ref in enumerate(texts)} | {"gone": [1.0]}
    await store.add_vectors(made.tenant, "m", given)
    near = await store.nearest(made.tenant, "conv-1", "m", [2.0, 2.0, 0.0], limit=5)
    assert near[0][0].ref == next(iter(texts))
    assert near[0][1] == pytest.approx(1.0)
    assert await store.lacking_vectors(made.tenant, "conv-1", "m", limit=10) == {}
    assert await store.nearest("another", "conv-1", "m", [2.0, 2.0, 0.0], limit=5) == []
    row = await store.conversation(made.tenant, "trip")
    assert row is not None
    await store.delete(row, at=9.0)
    assert await store.nearest(made.tenant, "conv-1", "m", [2.0, 2.0, 0.0], limit=5) == []
