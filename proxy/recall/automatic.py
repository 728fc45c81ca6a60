"""What the archive has for the newest user message beside the client's own array, before it is searched by words."""

from collections.abc import Awaitable, Callable, Collection, Sequence

from policies import Elsewhere
from proxy.recall.likeness import LIKE
from proxy.store import Original, Store

LONGEST_MESSAGE = 8_000  # characters of the newest message that are read
MOST_FOUND = 40
MOST_ALIKE = 3
DEFINITION = "tool_definition"
Alike = Callable[[str], Awaitable[Sequence[tuple[Original, float]]]]


async def elsewhere(
    store: Store,
    tenant: str,
    conversation: str,
    text: str,
    *,
    known: Collection[str] = (),
    alike: Alike | None = None,
) -> tuple[Elsewhere, ...]:
    """Originals of a conversation (by id) that have words of ``text`` and whose refs are not ``known``, and those whose
    vectors are most like it. Raises StoreError.

    Most clients send their whole history: then there are none of the first kind, and nothing is searched for.
    """
    text = text[-LONGEST_MESSAGE:]
    near = [each for each, score in await alike(text) if score >= LIKE] if alike is not None else []
    found = {each.ref: _of(each) for each in reversed(await _unsent(store, tenant, conversation, text, known))}
    return tuple((found | {each.ref: _of(each, alike=True) for each in near[:MOST_ALIKE]}).values())


async def _unsent(
    store: Store, tenant: str, conversation: str, text: str, known: Collection[str]
) -> Sequence[Original]:
    if (await store.held(tenant, conversation)).issubset(known):
        return ()
    hits = await store.search(tenant, text, limit=MOST_FOUND, conversation=conversation)
    return [each for each in hits if each.ref not in known and each.role != DEFINITION]


def _of(original: Original, *, alike: bool = False) -> Elsewhere:
    return Elsewhere(original.ref, original.role, original.text, alike)
