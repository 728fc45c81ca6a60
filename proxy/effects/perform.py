"""Running a flow: what the pure half requests is done here, and the reply is sent back in.

How alike texts are is measured by the shingles they share, or by the vectors of a model that the
policy names. Shingles are the runs of 3, 5 or 8 characters of a text, the longer for the longer
text, because all long texts share most of their short runs. Alike is the share of common ones
(Jaccard). Of a text with very many the smallest hashes represent all of them (bottom-k sketch, A.
Broder 1997), which estimates the same share to within 0.01.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from threading import Lock
from typing import TypeVar

import msgspec
import xxhash

from policies.effects import (
    Alike,
    Answers,
    Compare,
    Done,
    Effect,
    Embed,
    Failed,
    Flow,
    Offload,
    Reply,
    Returned,
    Save,
    Summarize,
    Summary,
    Together,
    Trim,
    step,
)
from policies.text.segments import Readings, TextReading
from proxy.errors import ProxyError
from proxy.telemetry.trace import NULL_SPAN, Span

SKETCH = 4_096
MAX_LEN = 200_000  # characters; a longer text is like no other
# that are examined for one question, the newest texts first: a second of work
MAX_CHARS = 1_000_000
SIZES = ((400, 3), (4_000, 5))
MAX_SIZE = 8

PATIENCE = 20.0
MAX_EMBEDDED_LEN = 24_000  # characters: about the 8,191 tokens that models for embeddings read
BATCH = 64

Send = Callable[[bytes], Awaitable[tuple[int, bytes]]]
Vector = Sequence[float]


class _Embedding(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


def by_shingles(effect: Compare) -> Alike:
    """How alike each pair is, 0 to 1; takes up to a second, so it belongs on a worker thread."""
    texts = [" ".join(text.split()) for text in effect.texts]
    allowed = _within(texts)
    sketches: dict[tuple[int, int], frozenset[int]] = {}
    scores: list[float] = []
    for one, other in effect.pairs:
        if texts[one] == texts[other]:
            scores.append(1.0)
            continue
        if not (allowed[one] and allowed[other]):
            scores.append(0.0)
            continue
        longer = max(len(texts[one]), len(texts[other]))
        size = next((size for limit, size in SIZES if longer <= limit), MAX_SIZE)
        for place in (one, other):
            if (place, size) not in sketches:
                sketches[place, size] = _sketch(texts[place], size)
        scores.append(_shared(sketches[one, size], sketches[other, size]))
    return Alike(tuple(scores))


async def by_vectors(
    effect: Compare, *, model: str, send: Send, patience: float = PATIENCE
) -> Reply:
    """The cosine of the vectors of each pair, or Failed; ``send`` posts an embeddings request body.

    A text that no such model could read whole is like no other, and is not sent.
    """
    wanted = sorted(
        {i for pair in effect.pairs for i in pair if 0 < len(effect.texts[i]) <= MAX_EMBEDDED_LEN}
    )
    found = await embed(
        [effect.texts[i] for i in wanted], model=model, send=send, patience=patience
    )
    if isinstance(found, Failed):
        return found
    vectors = dict(zip(wanted, found, strict=True))
    return Alike(
        tuple(
            _cosine(vectors[a], vectors[b]) if a in vectors and b in vectors else 0.0
            for a, b in effect.pairs
        )
    )


async def embed(
    texts: Sequence[str], *, model: str, send: Send, patience: float = PATIENCE
) -> list[list[float]] | Failed:
    vectors: list[list[float]] = []
    try:
        async with asyncio.timeout(patience):
            for start in range(0, len(texts), BATCH):
                found = await _embed(texts[start : start + BATCH], model, send)
                if isinstance(found, Failed):
                    return found
                vectors += found
    except TimeoutError:
        return Failed("timeout")
    except ProxyError as error:
        return Failed(error.code)
    except Exception as error:  # noqa: BLE001 - whatever an upstream does, the request goes on without it
        return Failed(f"error_{type(error).__name__}")
    return vectors


async def _embed(texts: Sequence[str], model: str, send: Send) -> list[list[float]] | Failed:
    body = msgspec.json.encode({"model": model, "input": texts, "encoding_format": "float"})
    status, content = await send(body)
    if status != 200:
        return Failed(f"status_{status}")
    try:
        answer = msgspec.json.decode(content, type=_Embeddings)
    except (ValueError, RecursionError):
        return Failed("not_an_answer")
    rows = sorted(answer.data, key=lambda row: row.index)
    sizes = {len(row.embedding) for row in rows}
    if len(rows) != len(texts) or len(sizes) != 1 or 0 in sizes:
        return Failed("not_an_answer")
    return [row.embedding for row in rows]


def _within(texts: Sequence[str]) -> list[bool]:
    left = MAX_CHARS
    found = [False] * len(texts)
    for place in range(len(texts) - 1, -1, -1):
        size = len(texts[place])
        if 0 < size <= MAX_LEN and size <= left:
            found[place] = True
            left -= size
    return found


def _sketch(text: str, size: int) -> frozenset[int]:
    digest = xxhash.xxh3_64_intdigest
    data = text.encode("utf-32-le", "surrogatepass")
    shingles = {data[4 * i : 4 * (i + size)] for i in range(max(1, len(text) - size + 1))}
    if len(shingles) <= SKETCH:
        return frozenset(map(digest, shingles))
    return frozenset(nsmallest(SKETCH, set(map(digest, shingles))))


def _shared(one: frozenset[int], other: frozenset[int]) -> float:
    union = one | other
    common = one & other
    if len(union) <= SKETCH or max(len(one), len(other)) < SKETCH:
        return len(common) / len(union)
    smallest = nsmallest(SKETCH, union)
    return sum(1 for shingle in smallest if shingle in common) / len(smallest)


def _cosine(one: Vector, other: Vector) -> float:
    norm = math.sqrt(math.fsum(x * x for x in one) * math.fsum(y * y for y in other))
    if len(one) != len(other) or not math.isfinite(norm) or norm == 0:
        return 0.0
    return min(1.0, max(0.0, math.fsum(x * y for x, y in zip(one, other, strict=True)) / norm))


class SharedReadings(Readings):
    def __init__(self, *, most: int = 12_000) -> None:
        super().__init__(most=most)
        self._lock = Lock()

    def find(self, key: bytes) -> TextReading | None:
        with self._lock:
            return super().find(key)

    def keep(self, key: bytes, made: TextReading) -> None:
        with self._lock:
            super().keep(key, made)


T = TypeVar("T")
Ask = Callable[[Effect], Awaitable[Reply]]


def unpaid(ask: Ask) -> Ask:
    """The same without any model: a flow that only reports what would be done costs nothing and
    does not wait.
    """

    async def answer(effect: Effect) -> Reply:
        if isinstance(effect, Summarize | Together | Save):
            return Failed("observed")
        return await ask(replace(effect, model=None) if isinstance(effect, Compare) else effect)

    return answer


class EffectHandler(ABC):
    async def __call__(self, effect: Effect) -> Reply:
        if isinstance(effect, Summarize):
            return await self.summarize(effect)
        if isinstance(effect, Together):
            return Answers(tuple(await asyncio.gather(*map(self.summarize, effect.effects))))
        if isinstance(effect, Compare):
            return await self.compare(effect)
        if isinstance(effect, Embed):
            return await self.embed(effect)
        if isinstance(effect, Trim):
            return await self.trim(effect)
        return Done()

    @abstractmethod
    async def summarize(self, effect: Summarize) -> Summary | Failed: ...

    async def compare(self, effect: Compare) -> Reply:
        return await asyncio.to_thread(by_shingles, effect)

    async def embed(self, effect: Embed) -> Reply:  # noqa: ARG002 - for subclasses with an embedding model
        return Done()

    async def trim(self, effect: Trim) -> Reply:  # noqa: ARG002 - for subclasses with an operator's function
        return Failed("replay")


@dataclass(slots=True)
class Patience:
    """How long one client's request may wait for what models write, in all: from the first
    wait on.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _until: float | None = None

    def left(self) -> float:
        if self._until is None:
            self._until = self.clock() + self.seconds
        return max(0.0, self._until - self.clock())


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    calls: int = 0
    shared: int = 0
    kept: int = 0
    asked: int = 0
    answered: int = 0
    cached: int = 0
    seconds: float = 0.0
    dollars: float = 0.0

    @property
    def any(self) -> bool:
        return bool(self.calls or self.shared or self.kept)

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )


NOTHING_SPENT = Spent()


async def drive(flow: Flow[T], now: Effect | Returned[T], ask: Ask, span: Span = NULL_SPAN) -> T:
    """The result of a started flow, of which ``now`` is what its first step gave; ``span`` receives
    all waiting times.

    From the first :class:`Offload` on its steps run on a worker thread, so that the event loop
    never waits for a long history.
    """
    off_loop = False
    while not isinstance(now, Returned):
        if isinstance(now, Offload):
            off_loop = True
            now = await _on_thread(flow, Done(), span, between=True)
        elif off_loop:
            now = await _on_thread(flow, await ask(now), span, between=False)
        else:
            now = step(flow, await ask(now))
    return now.value


async def _on_thread(
    flow: Flow[T], reply: Reply, span: Span, *, between: bool
) -> Effect | Returned[T]:
    handed = span.now()

    def work() -> tuple[Effect | Returned[T], int]:
        span.since(handed, "wait", "thread")
        span.resume(between=between)
        return step(flow, reply), span.now()

    effect, ended = await asyncio.to_thread(work)
    span.since(ended, "wait", "loop")
    return effect
