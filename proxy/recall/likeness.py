"""What is in the archive and like a text, by the vectors that are kept there; nothing where that fails."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from policies.effects import Embed, Vectors
from proxy.perform import Ask
from proxy.store import Original, Store, StoreError

log = logging.getLogger("weir.recall")

MOST_NEAR = 8
PATIENCE = 2.0
"""Seconds that a request waits for the vector of its question."""
LIKE = 0.45
"""Least cosine of a text that is meant although no words plainly say so."""


def by_likeness(
    store: Store, tenant: str, conversation: str, model: str | None, ask: Ask | None
) -> Callable[[str], Awaitable[Sequence[tuple[Original, float]]]] | None:
    """What gives the removed texts that are most like a text, each with its cosine; None where nothing can."""
    if model is None or ask is None:
        return None

    async def alike(text: str) -> Sequence[tuple[Original, float]]:
        try:
            reply = await ask(Embed((text,), model, seconds=PATIENCE))
            if isinstance(reply, Vectors):
                return await store.nearest(tenant, conversation, model, reply.rows[0], limit=MOST_NEAR)
        except StoreError as error:
            log.warning("the archive cannot be searched by likeness: %s", error)
        return ()

    return alike
