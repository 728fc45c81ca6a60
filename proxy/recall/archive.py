"""What is out of the window of one conversation, by words, by likeness and by ref.

Most of it is in the request itself: clients send their whole history again. So that is looked through first, which
needs no store and finds nobody else's texts; the store has what the client no longer sends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from policies import Elsewhere
from policies.effects import Alike, Compare, Embed, Vectors
from policies.ledger import ADDING, Cut, Edit, PlannedMessage
from policies.messages import Body, Transcript
from proxy.effects.perform import Ask
from proxy.recall.answering import Hit, Past, Term, passages, rank, terms_of
from proxy.store import Store
from proxy.store.records import Original, StoreError
from proxy.wire.chat import body_of
from proxy.wire.codecs import view_of_stored

FindAlike = Callable[[str], Awaitable[Sequence[tuple[Original, float]]]]

log = logging.getLogger("weir.recall")

MAX_NEAR = 8
PATIENCE = 2.0
"""Seconds that a request waits for the vector of its question."""
LIKE = 0.45
"""Least cosine of a text that is meant although no words plainly say so."""


def by_likeness(store: Store, tenant: str, conversation: str, model: str | None, ask: Ask | None) -> FindAlike | None:
    if model is None or ask is None:
        return None

    async def alike(text: str) -> Sequence[tuple[Original, float]]:
        try:
            reply = await ask(Embed((text,), model, seconds=PATIENCE))
            if isinstance(reply, Vectors):
                return await store.nearest(tenant, conversation, model, reply.rows[0], limit=MAX_NEAR)
        except StoreError as error:
            log.warning("the archive cannot be searched by likeness: %s", error)
        return ()

    return alike


MAX_STORED = 50
MAX_COMPARED = 50
COMPARED_CHARS = 4  # for each token of a passage
COMPARED_TOKENS = 400
MAX_ARGUMENTS_LEN = 80


@dataclass(frozen=True, slots=True)
class SearchResult:
    pasts: tuple[Past, ...]
    hits: tuple[Hit, ...]
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The texts of one request's conversation that its model does not see, or not in full.

    ``pieces`` is the forwarded array, None where that is the client's; ``edits`` and ``cuts`` are the ledger's.
    ``unstored`` gives an original that still waits to be stored, by tenant and ref;
    ``ask`` compares texts by the embeddings ``model`` where the policy names one.
    """

    transcript: Transcript
    pieces: Sequence[PlannedMessage] | None
    edits: Sequence[Edit]
    cuts: Sequence[Cut]
    tenant: str
    conversation: str
    store: Store
    unstored: Callable[[str, str], bytes | None]
    ask: Ask | None = None
    model: str | None = None
    embeddings: str | None = None

    async def find(self, query: str) -> SearchResult:
        terms = terms_of(query)
        here = await asyncio.to_thread(lambda: [self._past(i) for i in self._gone()])
        elsewhere = await self._stored(query, terms, known={past.ref for past in here})
        pasts = (*elsewhere, *here)
        hits = await asyncio.to_thread(rank, terms, [past.text for past in pasts])
        pasts, hits = await self._and_alike(query, pasts, hits)
        if self.model is not None and self.ask is not None:
            hits = await self._compared(query, terms, pasts, hits)
        return SearchResult(pasts, tuple(hits), terms)

    async def read(self, ref: str) -> Past | None:
        """The text of this ref, or of all that a summary of this ref covers; None where this conversation has none."""
        for index, message in enumerate(self.transcript.messages):
            if message.ref == ref:
                return self._past(index)
        for cut in reversed(self.cuts):
            if cut.ref == ref:
                return await self._covered(cut)
        if any(edit.ref == ref for edit in self.edits) or await self._holds(ref):
            return await self._original(ref)
        return None

    def _gone(self) -> Iterator[int]:
        if self.pieces is None:
            return iter(())
        intact = {p.index for p in self.pieces if p.text is None or p.kind in ADDING}
        head = self.transcript.head
        return (i for i in range(head, len(self.transcript.messages)) if i not in intact)

    def _past(self, index: int) -> Past:
        message, body = self.transcript.messages[index], self.transcript.read(index)
        return Past(
            ref=message.ref,
            origin=self._origin(index, body),
            tokens=message.tokens,
            text=said(body),
            position=index + 1,
            of=len(self.transcript.messages),
        )

    def _origin(self, index: int, body: Body) -> str:
        message = self.transcript.messages[index]
        if not message.is_result:
            return f"what the {message.role} said"
        for earlier in range(index - 1, -1, -1):
            if message.answers in self.transcript.messages[earlier].call_ids:
                calls = self.transcript.read(earlier).calls
                call = next((c for c in calls if c.id == message.answers), None)
                return f"result of {call.name}({call.arguments[:MAX_ARGUMENTS_LEN]})" if call else "a tool's result"
        return f"result of {body.name}" if body.name else "a tool's result"

    async def _stored(self, query: str, terms: Sequence[Term], known: set[str]) -> list[Past]:
        known = known | {message.ref for message in self.transcript.messages}
        wanted = dict.fromkeys((query, " ".join(t.text for t in terms if t.weight > 1)))
        found: dict[str, Original] = {}
        try:
            for each in filter(None, wanted):
                hits = await self.store.search(self.tenant, each, limit=MAX_STORED, conversation=self.conversation)
                found |= {original.ref: original for original in hits if original.ref not in known}
        except StoreError as error:
            log.warning("the archive cannot be searched, only what the client sends is: %s", error)
        return [_past_of(original) for original in found.values()]

    async def _and_alike(
        self, query: str, pasts: tuple[Past, ...], hits: list[Hit]
    ) -> tuple[tuple[Past, ...], list[Hit]]:
        alike = by_likeness(self.store, self.tenant, self.conversation, self.embeddings, self.ask)
        near = await alike(query) if alike is not None else ()
        seen, places = {hit.index for hit in hits}, {past.ref: n for n, past in enumerate(pasts)}
        for original, score in near:
            if score < LIKE:
                break
            if original.ref not in places:
                places[original.ref] = len(pasts)
                pasts = (*pasts, _past_of(original))
            if (place := places[original.ref]) not in seen:
                hits = [*hits, Hit(place, frozenset(), 0.0)]
                seen.add(place)
        return pasts, hits

    async def _compared(self, query: str, terms: Sequence[Term], pasts: Sequence[Past], hits: list[Hit]) -> list[Hit]:
        assert self.ask is not None  # noqa: S101 - the caller looked
        seen = {hit.index for hit in hits}
        newest = (n for n in range(len(pasts) - 1, -1, -1) if n not in seen)
        filled = [*hits, *(Hit(n, frozenset(), 0.0) for n in newest)][:MAX_COMPARED]
        texts = (query, *(_excerpt(pasts[hit.index].text, terms) for hit in filled))
        pairs = tuple((0, n) for n in range(1, len(texts)))
        reply = await self.ask(Compare(texts, pairs, self.model))
        if not isinstance(reply, Alike) or not any(reply.scores):
            return hits
        order = sorted(range(len(filled)), key=lambda n: -reply.scores[n])
        return [filled[n] for n in order] + hits[MAX_COMPARED:]

    async def _covered(self, cut: Cut) -> Past | None:
        head, chain = self.transcript.head, self.transcript.chain
        if 0 < cut.covers <= len(chain) and chain[cut.covers - 1] == cut.prefix:
            stays = {*cut.before, *cut.after}
            places = [head + p for p in range(cut.covers) if p not in stays]
            lines = [(self.transcript.messages[i].role, said(self.transcript.read(i))) for i in places]
            tokens = sum(self.transcript.messages[i].tokens for i in places)
            return _joined(cut.ref, lines, tokens)
        originals = await self.store.covered(self.tenant, cut.ref)
        lines = [(o.role, _text_of(o.body)) for o in originals]
        return _joined(cut.ref, lines, sum(o.tokens for o in originals)) if originals else None

    async def _holds(self, ref: str) -> bool:
        if len(ref) != 12 or not ref.isalnum():
            return False
        for cut in self.cuts:
            if any(o.ref == ref for o in await self.store.covered(self.tenant, cut.ref)):
                return True
        original = await self.store.original(self.tenant, ref)
        if original is None:
            return False
        telling = " ".join(original.text.split()[:12])
        hits = await self.store.search(self.tenant, telling, limit=MAX_STORED, conversation=self.conversation)
        return any(o.ref == ref for o in hits)

    async def _original(self, ref: str) -> Past | None:
        waiting = self.unstored(self.tenant, ref)
        if waiting is not None:
            value = view_of_stored(waiting)
            return Past(ref, _role_in_words(str(value.get("role", ""))), 0, said(body_of(value)))
        original = await self.store.original(self.tenant, ref)
        return None if original is None else _past_of(original)


def said(body: Body) -> str:
    calls = (f"{call.name} {call.arguments}".strip() for call in body.calls)
    return "\n".join(part for part in (body.text, *calls) if part)


def _text_of(raw: bytes) -> str:
    return said(body_of(view_of_stored(raw)))


def _past_of(original: Original) -> Past:
    return Past(original.ref, _role_in_words(original.role), original.tokens, _text_of(original.body))


def _role_in_words(role: str) -> str:
    return "a tool's result" if role in ("tool", "function") else f"what the {role} said"


def _joined(ref: str, lines: Sequence[tuple[str, str]], tokens: int) -> Past:
    text = "\n".join(f"{role}: {text}" for role, text in lines)
    return Past(ref, f"{len(lines)} messages that were summarised", tokens, text)


def _excerpt(text: str, terms: Sequence[Term]) -> str:
    return passages(text, terms, most=COMPARED_TOKENS, count=lambda part: len(part) // COMPARED_CHARS + 1).text


MAX_MESSAGE_LEN = 8_000  # characters of the newest message that are read
MAX_FOUND = 40
MAX_ALIKE = 3
DEFINITION = "tool_definition"


async def elsewhere(
    store: Store,
    tenant: str,
    conversation: str,
    text: str,
    *,
    known: Collection[str] = (),
    alike: FindAlike | None = None,
) -> tuple[Elsewhere, ...]:
    """Originals of a conversation (by id) that have words of ``text`` and whose refs are not ``known``, and those whose
    vectors are most like it. Raises StoreError.

    Most clients send their whole history: then there are none of the first kind, and nothing is searched for.
    """
    text = text[-MAX_MESSAGE_LEN:]
    near = [each for each, score in await alike(text) if score >= LIKE] if alike is not None else []
    found = {each.ref: _of(each) for each in reversed(await _unsent(store, tenant, conversation, text, known))}
    return tuple((found | {each.ref: _of(each, alike=True) for each in near[:MAX_ALIKE]}).values())


async def _unsent(
    store: Store, tenant: str, conversation: str, text: str, known: Collection[str]
) -> Sequence[Original]:
    if (await store.held(tenant, conversation)).issubset(known):
        return ()
    hits = await store.search(tenant, text, limit=MAX_FOUND, conversation=conversation)
    return [each for each in hits if each.ref not in known and each.role != DEFINITION]


def _of(original: Original, *, alike: bool = False) -> Elsewhere:
    return Elsewhere(original.ref, original.role, original.text, alike)
