"""From a request's raw messages to the planner's transcript, paying only for what was never seen before.

A slice of bytes leads, through a fast hash seeded per tenant, to the message's digest, tokens and marks. The
seed keeps one tenant from telling by timing what another has sent.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from policies import Body, Message, Transcript
from policies.messages import chain_of, count_occurrences, head_length
from proxy.counting import count_messages, count_tools
from proxy.tokenizer import TextCounter
from proxy.wire.chat import ChatRequest, body_of, message_of, read_message
from proxy.wire.raw import Raw

MOST_MESSAGES = 300_000
MOST_TOOL_SETS = 4_096


@dataclass(frozen=True, slots=True)
class Reading:
    """A transcript, and the indices of messages that carry Weir's own mark."""

    transcript: Transcript
    marked: frozenset[int]


class Transcripts:
    """Reads requests; what it has seen it keeps in memory, bounded, the oldest leaving first."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, str], tuple[Message, bool]] = OrderedDict()
        self._tools: OrderedDict[tuple[bytes, str], int] = OrderedDict()

    async def read(self, request: ChatRequest, *, tenant: str, model: str, counter: TextCounter) -> Reading:
        """The transcript of a request whose ``messages`` is an array of objects."""
        raws: Sequence[Raw] = request.messages or ()
        seed = xxhash.xxh3_64_intdigest(tenant.encode())
        kind = f"{counter.name}/{model}"
        keys = [(xxhash.xxh3_128_digest(raw, seed), kind) for raw in raws]
        seen = self._seen
        if not all(key in seen for key in keys):
            await self._learn(raws, keys, model=model, counter=counter)
        entries = [seen[key] for key in keys]
        if len(seen) > MOST_MESSAGES:
            for _ in range(len(seen) - MOST_MESSAGES):
                seen.popitem(last=False)
        messages = tuple(entry[0] for entry in entries)
        head = head_length(messages)
        return Reading(
            Transcript(
                messages=messages,
                read=_Bodies(raws).read,
                chain=chain_of(tenant, messages, head),
                head=head,
                tools=await self._count_tools(request, seed=seed, kind=kind, model=model, counter=counter),
                occurrences=count_occurrences(messages),
            ),
            frozenset(i for i, entry in enumerate(entries) if entry[1]),
        )

    async def _learn(
        self, raws: Sequence[Raw], keys: Sequence[tuple[bytes, str]], *, model: str, counter: TextCounter
    ) -> None:
        new = [(key, read_message(raw)) for key, raw in zip(keys, raws, strict=True) if key not in self._seen]
        counts = await count_messages([value for _, value in new], counter, model=model)
        for (key, value), tokens in zip(new, counts, strict=True):
            self._seen[key] = message_of(value, tokens) if value else (_unreadable(key[0], tokens), False)

    async def _count_tools(
        self, request: ChatRequest, *, seed: int, kind: str, model: str, counter: TextCounter
    ) -> int:
        parts = [request.fields[name] for name in ("tools", "functions", "response_format") if name in request.fields]
        if not parts:
            return 0
        key = (b"".join(xxhash.xxh3_128_digest(part, seed) for part in parts), kind)
        known = self._tools.get(key)
        if known is None:
            known = count_tools(
                request.value("tools"),
                request.value("functions"),
                request.value("response_format"),
                counter,
                model=model,
            )
            self._tools[key] = known
            if len(self._tools) > MOST_TOOL_SETS:
                self._tools.popitem(last=False)
        return known


def _unreadable(digest: bytes, tokens: int) -> Message:
    """A message that is no JSON object to us: the upstream judges it, nothing is done to it."""
    return Message(role="", digest=digest, tokens=tokens)


class _Bodies:
    """Bodies of raw messages, parsed when they are asked for and kept for the length of one request."""

    def __init__(self, raws: Sequence[Raw]) -> None:
        self._raws = raws
        self._read: dict[int, Body] = {}

    def read(self, index: int) -> Body:
        """What message ``index`` says."""
        body = self._read.get(index)
        if body is None:
            body = self._read[index] = body_of(read_message(self._raws[index]))
        return body
