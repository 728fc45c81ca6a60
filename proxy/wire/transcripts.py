"""From a request's raw messages to the planner's transcript, paying only for what was never seen
before.

Three caches, all in memory, bounded, and seeded per tenant so that nobody can learn by timing what
another has sent. Of a body that begins as an earlier one did only the rest is parsed, and an array
that begins with the bytes of an earlier one is that array and what follows it: one fast hash over
the shared bytes finds either. A single message that was seen before, at any position, is found by
the hash of its slice.
"""

import asyncio
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from policies.messages import (
    Body,
    Message,
    ToolDefinition,
    Tools,
    Transcript,
    chain_of,
    extend_chain,
    first_user,
    head_length,
    seed_of,
    tokens_by_role,
)
from policies.tokens import left_out
from proxy.errors import Busy, InvalidJSON, RequestTooLarge
from proxy.wire.chat import SEALED, body_of, message_of, named_files, read_messages
from proxy.wire.codec import (
    CHAT,
    Beginning,
    ClientRequest,
    Codec,
    Segments,
    chosen_tools,
    tool_definitions,
    tool_description,
)
from proxy.wire.counting import (
    INLINE_CHARS,
    Countable,
    TextCounter,
    count_all,
    count_tools,
    message_texts,
    sample_all,
    tool_texts,
)
from proxy.wire.raw import Raw, holds_beyond, nests_beyond, read_value

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

# in arrays, and by themselves
MAX_MESSAGES = 150_000
MAX_SEEN = 60_000
MAX_TOOL_SETS = 4_096
# sets of definitions with their descriptions, which only a request that prunes them reads
MAX_DEFINED = 128
MAX_ARRAYS = 8_192
# that share a prefix: many bodies of one key begin with the same tools
ARRAYS_ALIKE = 3
BODIES_ALIKE = 16
ALONE = 8  # messages: what arrays that are alike cost in addition to those of the first
ALIKE = 256  # bytes by which an array is found in its body
MAX_FILES = 4_096
# bytes of a message in which a file is named: one that holds a file's content is longer
MAX_NAMING_LEN = 64 * 1024
_MEDIA = attrgetter("media")
READ_AT_ONCE = 128 * 1024
SAMPLED_AT_ONCE = 1024 * 1024
SPLIT_AT_ONCE = 256 * 1024
OBJECTS_AT_ONCE = 1_000
"""Bytes of an array, and objects of messages, above which a thread takes them apart and reads them.
"""
COUNTED = 4 * 2**20
"""Characters never seen that are counted, of the first few messages and the newest: older ones are
guessed by these.
"""
COUNTED_FIRST = 8
PATIENCE = 3.0
MAX_KEPT_CHARS = 8_000_000
MIN_ARRAY = 12  # 4 KB: below it looking up single messages is cheaper
MIN_SAMPLED = 64 * 1024
SAMPLED = " ~"  # what the name of a count ends with that was made in part


class RequestTranscript(msgspec.Struct, frozen=True):
    """A transcript, the seed of its chain, the indices of messages that carry Weir's own mark, and
    whether there are images or the like.

    ``new`` are the raw messages after those whose array was seen before. ``sampled`` says that some
    were counted in part: the tokens are right within ``MAX_ERROR``.
    """

    transcript: Transcript
    seed: bytes
    marked: frozenset[int]
    has_media: bool
    new: Sequence[Raw]
    sampled: bool = False


class _Array(NamedTuple):
    """An array that was read before: ``size`` bytes without the closing bracket, and their hash.

    ``by_role`` are the tokens of its messages by their role.
    """

    size: int
    digest: bytes
    messages: tuple[Message, ...]
    chain: tuple[bytes, ...]
    head: int
    marked: frozenset[int]
    by_role: Mapping[str, int]
    has_media: bool


NO_ARRAY = _Array(0, b"", (), (), 0, frozenset(), {}, has_media=False)


class _Counting(msgspec.Struct, frozen=True):
    codec: Codec
    seed: int
    model: str
    counter: TextCounter
    image_tokens: int | None
    files: Mapping[str, int]
    sampled: bool = False


B = TypeVar("B", Beginning, _Array)


class _Kept(OrderedDict[K, V]):
    def __init__(self, most: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        super().__init__()
        self._most = most
        self._weigh = weigh
        self._held = 0

    def keep(self, key: K, value: V) -> None:
        self._held += self._weigh(value) - (self._weigh(self[key]) if key in self else 0)
        self[key] = value
        self.move_to_end(key)
        while self._held > self._most:
            self._held -= self._weigh(self.popitem(last=False)[1])


class Transcripts:
    def __init__(self, *, most: int = 20_000, depth: int = 128) -> None:
        self._most = most
        self._depth = depth
        self._seen: dict[bytes, Message] = {}
        self._bodies: _Kept[tuple[bytes, str], tuple[Beginning, ...]] = _Kept(MAX_ARRAYS)
        self._arrays = _Kept[tuple[bytes, str], tuple[_Array, ...]](
            MAX_MESSAGES, lambda a: ALONE + len(a[0].messages)
        )
        self._tools: _Kept[bytes, int] = _Kept(MAX_TOOL_SETS)
        self._defined: _Kept[bytes, tuple[ToolDefinition, ...]] = _Kept(MAX_DEFINED)
        self._files: _Kept[str, dict[str, int]] = _Kept(MAX_FILES)
        self._huge = asyncio.Lock()

    def parse(self, codec: Codec, body: bytes, *, tenant: str) -> ClientRequest:
        """The request in ``body``. Raises InvalidJSON or InvalidRequest."""
        if len(body) < 1 << MIN_ARRAY:
            return codec.parse(body)
        whole = memoryview(body)
        kind = codec.name
        places = _boundaries(whole, len(whole), xxhash.xxh3_64_intdigest(tenant.encode()))
        known, place = _begins_with(self._bodies, whole, places, kind)
        request = None if known is None else codec.parse_after(body, known)
        if request is None:
            request = codec.parse(body)
            known = None
            place = None
        array = request.messages
        if array is None or not isinstance(request.fields[codec.array], msgspec.Raw):
            return request
        start = body.find(array.raw[:ALIKE]) if known is None else known.start
        size = start + len(array.raw) - 1
        last = next((each for each in reversed(places) if each.end <= size), None)
        if last is not None and (known is not None or body.startswith(bytes(array.raw), start)):
            words = frozenset(word for word in codec.words if array.mentions(word))
            begun = Beginning(size, (place or last).extended(whole, size).digest, start, words)
            _remember(self._bodies, begun, (last.digest, kind), most=BODIES_ALIKE)
        return request

    def learn_files(self, request: ClientRequest, *, tenant: str, tokens: int) -> None:
        """Take what the upstream counted beyond the estimate as the size of the request's files
        that are only named.

        Files whose size is known already are part of the estimate; ``tokens`` are shared among the
        others.
        """
        files = self._files.get(tenant, {})
        self._files.keep(tenant, files)
        raws = (
            raw
            for raw in request.messages or ()
            if len(raw) <= MAX_NAMING_LEN and b"file" in bytes(raw)
        )
        unknown = {
            name for raw in raws for name in named_files(request.codec.view(raw))
        } - files.keys()
        if tokens > 0 and unknown and len(files) < MAX_FILES:
            files |= dict.fromkeys(unknown, tokens // len(unknown))

    async def read(
        self,
        request: ClientRequest,
        *,
        tenant: str,
        model: str,
        counter: TextCounter,
        owner: Sequence[str] = (),
        image_tokens: int | None = None,
        binds: bool = False,
        may_sample: bool = False,
    ) -> RequestTranscript:
        """The transcript of a request whose ``messages`` is an array. Raises RequestTooLarge for
        too many, InvalidJSON for one that is nested too deeply.

        ``owner`` is whose history it is, in addition to the tenant. ``image_tokens`` is what every
        image costs, None for the model's formula; ``binds`` whether the model signs what it thinks
        for what precedes it. Much text that was never seen is counted in part where that
        ``may_sample``.
        """
        codec = request.codec
        raws = request.messages or Segments(b"[]")
        self._judge_fields(request)
        tenant = tenant if codec is CHAT else f"{tenant}/{codec.name}"
        kind = (
            f"{counter.name}/{model}"
            if image_tokens is None
            else f"{counter.name}/{model}/{image_tokens}"
        )
        files = self._files.get(tenant, {})
        if files:
            # counts made before a file's size was known no longer hold
            kind = f"{kind} {len(files)}"
        seed = xxhash.xxh3_64_intdigest(f"{tenant} {kind}".encode())
        whole = raws.raw
        size = len(raws.raw) - 1
        whose = "\0".join((tenant, *owner))
        arrays = xxhash.xxh3_128_hexdigest(b"".join(raws.head)) if raws.head else ""
        mine = (
            xxhash.xxh3_64_intdigest(whose.encode(errors="surrogatepass"), seed) if owner else seed
        )
        places = (
            _boundaries(whole, size, mine) if size >= 1 << MIN_ARRAY and codec.goes_on(raws) else []
        )
        known, place = _begins_with(self._arrays, whole, places, arrays)
        sampled = may_sample and known is None and size > MIN_SAMPLED and counter.is_exact
        if sampled:
            arrays += SAMPLED
            known, place = _begins_with(self._arrays, whole, places, arrays)
        split = raws.all if known is None else partial(raws.after, known.size)
        known = known or NO_ARRAY
        new = await _apart(split, is_long=size - known.size > SPLIT_AT_ONCE)
        if len(new) + len(known.messages) > self._most:
            raise RequestTooLarge(f"More than {self._most} messages are not accepted here.")
        counting = _Counting(codec, seed, model, counter, image_tokens, files, sampled)
        messages = await self._messages(new, counting)
        marked = codec.own_marks(new)
        digest = b"" if place is None else place.extended(whole, size).digest
        array = _joined(known, messages, marked, size=size, digest=digest, owner=whose)
        if places and (not array.messages or codec.is_closed(array.messages[-1].role)):
            _remember(self._arrays, array, (places[-1].digest, arrays), most=ARRAYS_ALIKE)
        return RequestTranscript(
            Transcript(
                messages=array.messages,
                read=_Bodies(codec, raws, new, first=len(array.messages) - len(new)).read,
                chain=array.chain,
                head=array.head,
                tools=await self._count_tools(request, counting),
                read_tools=partial(self._read_tools, request, counting),
                by_role=array.by_role,
                binds=binds,
                size=size,
            ),
            seed_of(whose),
            array.marked,
            array.has_media,
            new,
            sampled,
        )

    async def _messages(self, raws: Sequence[Raw], counting: _Counting) -> tuple[Message, ...]:
        seen = self._seen
        keys = [xxhash.xxh3_128_digest(raw, counting.seed) for raw in raws]
        # what precedes a compaction is ignored, whatever it was before
        if counting.codec is not CHAT:
            keys = [key + type(raw).__name__.encode() for key, raw in zip(keys, raws, strict=True)]
        if counting.sampled:
            keys = [key if key in seen else key + SAMPLED.encode() for key in keys]
        known = [seen.get(key) for key in keys]
        unseen = [
            (key, raw)
            for key, raw, message in zip(keys, raws, known, strict=True)
            if message is None
        ]
        if sum(len(raw) for _, raw in unseen) <= COUNTED:
            read = await self._see(unseen, counting)
        else:
            async with self._turn():
                read = await self._see(
                    [*unseen[:COUNTED_FIRST], *unseen[: COUNTED_FIRST - 1 : -1]], counting
                )
        if len(seen) > MAX_SEEN:
            for key in [*islice(seen, len(seen) - MAX_SEEN + MAX_SEEN // 10)]:
                del seen[key]
        return tuple([message or read[key] for key, message in zip(keys, known, strict=True)])

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait to be the only request with so many messages. Raises Busy for one that would have to
        wait long.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                await self._huge.acquire()
        except TimeoutError:
            raise Busy.after(PATIENCE) from None
        try:
            yield
        finally:
            self._huge.release()

    async def _see(
        self, unseen: Sequence[tuple[bytes, Raw]], counting: _Counting
    ) -> Mapping[bytes, Message]:
        counter = counting.counter
        characters = 0
        tokens = 0
        read: dict[bytes, Message] = {}
        for part in _parts(unseen, SAMPLED_AT_ONCE if counting.sampled else READ_AT_ONCE):
            raws = [raw for _, raw in part]
            is_long = sum(bytes(raw).count(b"{") for raw in raws) > OBJECTS_AT_ONCE
            values, items = await _apart(partial(self._read_all, raws, counting), is_long=is_long)
            if characters:
                await asyncio.sleep(0)  # a counter that does not wait lets no other task run
            if characters > COUNTED:
                counter = counting.counter.guessing(characters, tokens)
            counts = await (sample_all if counting.sampled else count_all)(items, counter)
            if len(part) < len(unseen):
                characters += sum(len(text) for item in items for text in item.texts)
                tokens += sum(counts) - sum(item.fixed for item in items)
            keys = [key for key, _ in part]
            made = await _apart(
                partial(_messages_of, keys, values, counts, counting), is_long=is_long
            )
            read |= made
            self._seen |= made
        return read

    def _read_all(
        self, raws: Sequence[Raw], counting: _Counting
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Countable]]:
        codec = counting.codec
        values = read_messages(raws) if codec is CHAT else [codec.view(raw) for raw in raws]
        if any(type(value.get("role")) in (dict, list) for value in values):
            raise TypeError("the role of a message is no word")
        # most brackets are in texts
        deepest = self._depth - 2
        is_read = codec is CHAT and all(values)
        is_beyond = (
            holds_beyond(values, deepest)
            if is_read
            else any(nests_beyond(raw, deepest) for raw in raws)
        )
        self._judge_depth(codec.array, is_beyond=is_beyond)
        items = [
            message_texts(v, model=counting.model, image_tokens=counting.image_tokens)
            for v in values
        ]
        return values, items

    def _judge_fields(self, request: ClientRequest) -> None:
        codec = request.codec
        short = 2 * self._depth
        for name, part in request.fields.items():
            # the array and what is counted are judged once they are read
            if len(part) >= short and name != codec.array and name not in codec.counted:
                self._judge_depth(name, is_beyond=nests_beyond(part, self._depth - 1))

    def _judge_depth(self, field: str, *, is_beyond: bool) -> None:
        if is_beyond:
            raise InvalidJSON(
                f"The request is nested more than {self._depth} levels deep (limits.depth).",
                param=field,
            )

    def _read_tools(self, request: ClientRequest, counting: _Counting) -> Tools:
        parts = [
            request.fields[name] for name in request.codec.tool_fields if name in request.fields
        ]
        if not parts:
            return Tools()
        key = _key_of(parts, counting)
        defined = self._defined.get(key)
        if defined is None:
            defined = _define(request, model=counting.model, counter=counting.counter)
            self._defined.keep(key, defined)
        return Tools(defined, chosen_tools(request))

    async def _count_tools(self, request: ClientRequest, counting: _Counting) -> int:
        parts = {
            name: request.fields[name] for name in request.codec.counted if name in request.fields
        }
        if not parts:
            return 0
        key = _key_of(parts.values(), counting)
        known = self._tools.get(key)
        if known is None:
            count = partial(self._count_definitions, request, parts, counting)
            known = (
                await asyncio.to_thread(count)
                if sum(map(len, parts.values())) > INLINE_CHARS
                else count()
            )
            self._tools.keep(key, known)
        return known

    def _count_definitions(
        self, request: ClientRequest, parts: Mapping[str, Raw], counting: _Counting
    ) -> int:
        for name, part in parts.items():
            self._judge_depth(name, is_beyond=nests_beyond(part, self._depth - 1))
        tools = request.value("tools")
        functions = request.value("functions")
        schema = request.codec.schema_of(request)
        return count_tools(tools, functions, schema, counting.counter, model=counting.model)


async def _apart(work: Callable[[], T], *, is_long: bool) -> T:
    """What ``work`` returns, made in a thread where it takes so long that the event loop would be
    held by it.
    """
    return await asyncio.to_thread(work) if is_long else work()


def _messages_of(
    keys: Sequence[bytes],
    values: Sequence[Mapping[str, Any]],
    counts: Sequence[int],
    counting: _Counting,
) -> dict[bytes, Message]:
    files = counting.files
    is_chat = counting.codec is CHAT
    made: dict[bytes, Message] = {}
    for key, value, counted in zip(keys, values, counts, strict=True):
        counted += sum(files.get(name, 0) for name in named_files(value)) if files else 0
        counted += 0 if is_chat else value.get(SEALED, 0)
        made[key] = message_of(value, counted) if value else Message("", key[:16], counted)
    return made


def _parts(unseen: Sequence[tuple[K, Raw]], most: int) -> Iterator[list[tuple[K, Raw]]]:
    """Messages in parts of so many bytes: the event loop does something else in between."""
    part = list[tuple[K, Raw]]()
    size = 0
    for each in unseen:
        part.append(each)
        size += len(each[1])
        if size >= most:
            yield part
            part = []
            size = 0
    if part:
        yield part


def _key_of(parts: Iterable[Raw], counting: _Counting) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(part, counting.seed) for part in parts)


def _define(
    request: ClientRequest, *, model: str, counter: TextCounter
) -> tuple[ToolDefinition, ...]:
    alone = tool_texts([{}], None, None, model=model)  # a first definition's overhead
    found: list[ToolDefinition] = []
    for name, raws in tool_definitions(request).items():
        values = [read_value(raw) for raw in raws]
        all_of = tool_texts([{}, *values], None, None, model=model)
        tokens = (
            all_of.fixed - alone.fixed + sum(map(counter.count, all_of.texts[len(alone.texts) :]))
        )
        found.append(ToolDefinition(name, max(0, tokens), " ".join(map(tool_description, values))))
    return tuple(found)


class _Prefix(NamedTuple):
    end: int
    digest: bytes
    running: Any

    def extended(self, whole: memoryview, end: int) -> "_Prefix":
        running = self.running.copy()
        running.update(whole[self.end : end])
        return _Prefix(end, running.digest(), running)


def _boundaries(whole: memoryview, size: int, seed: int) -> list[_Prefix]:
    """The first 4 KB, 8 KB, 16 KB … of ``size`` bytes, hashed: two arrays that share one may share
    what follows.
    """
    places: list[_Prefix] = []
    prefix = _Prefix(0, b"", xxhash.xxh3_128(seed=seed))
    for power in range(MIN_ARRAY, size.bit_length()):
        prefix = prefix.extended(whole, 1 << power)
        places.append(prefix)
    return places


def _begins_with(
    kept: _Kept[tuple[bytes, str], tuple[B, ...]],
    whole: memoryview,
    places: Sequence[_Prefix],
    kind: str,
) -> tuple[B | None, _Prefix | None]:
    for place in reversed(places):
        for begun in kept.get((place.digest, kind), ()):
            if begun.size < len(whole) and whole[begun.size] in b",] \n\r\t":
                prefix = place.extended(whole, begun.size)
                if prefix.digest == begun.digest:
                    return begun, prefix
    return None, places[-1] if places else None


def _remember(
    kept: _Kept[tuple[bytes, str], tuple[B, ...]], begun: B, key: tuple[bytes, str], *, most: int
) -> None:
    others: list[B] = [
        b for b in kept.get(key, ()) if (b.size, b.digest) != (begun.size, begun.digest)
    ]
    others.insert(0, begun)
    kept.keep(key, tuple(others[:most]))


def _joined(
    known: _Array,
    new: tuple[Message, ...],
    marked: frozenset[int],
    *,
    size: int,
    digest: bytes,
    owner: str,
) -> _Array:
    messages = known.messages + new
    start = len(known.messages)
    if known.head == start:
        head = head_length(messages)
        chain = chain_of(owner, messages, head)
    else:
        head = known.head
        chain = extend_chain(known.chain, new)
    return _Array(
        size,
        digest,
        messages,
        chain,
        head,
        known.marked.union([start + i for i in marked]),
        tokens_by_role(new, known.by_role),
        known.has_media or any(map(_MEDIA, new)),
    )


class _Bodies:
    def __init__(
        self, codec: Codec, raws: Sequence[Raw], new: Sequence[Raw], *, first: int
    ) -> None:
        self._codec = codec
        self._raws = raws
        self._new = new
        self._first = first
        self._read: dict[int, Body] = {}
        self._held = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(_Bodies, first=sys.maxsize), (self._codec, self._raws, ())

    def read(self, index: int) -> Body:
        body = self._read.get(index)
        if body is None:
            if self._held > MAX_KEPT_CHARS:
                self._held = 0
                self._read.clear()
            raw = self._new[index - self._first] if index >= self._first else self._raws[index]
            body = self._read[index] = body_of(self._codec.view(raw))
            self._held += len(body.text)
        return body


MAX_READ = 500_000
"""Tokens of a history that are read to plan it."""
MIN_SKIMMED = 160
CHARS_OF_A_TOKEN = 4
PART_OF_ONE = 10  # of what is read: 25,000 tokens at the least, what a result is capped to


def skimmed(transcript: Transcript, *, window: int) -> Transcript:
    """A transcript of which no more is read than a plan may take: the head, the task, the newest
    messages are whole.

    What may be forwarded is among the newest: a window and half of it again. A result among them
    that is too long for that is read at both ends, as it may be forwarded.
    """
    if transcript.tokens <= max(MAX_READ, 2 * window):
        return transcript
    messages = transcript.messages
    room = max(MAX_READ // 2, window + window // 2)
    left = room
    task = first_user(transcript)
    ends = set[int]()
    whole = {*range(transcript.head), *range(0 if task is None else task + 1)}
    for index in range(len(messages) - 1, transcript.head - 1, -1):
        message = messages[index]
        if message.tokens <= left:
            whole.add(index)
            left -= message.tokens
        elif message.is_result and left > 0:
            ends.add(index)
            left -= min(message.tokens, room // PART_OF_ONE)
        elif message.tokens <= room:
            break
    users = frozenset(i for i, m in enumerate(messages) if m.role == "user" and i not in whole)
    most = max(MIN_SKIMMED, MAX_READ // 2 * CHARS_OF_A_TOKEN // max(1, len(users)))
    longest = {
        **dict.fromkeys(users, most),
        **dict.fromkeys(ends, room // PART_OF_ONE * CHARS_OF_A_TOKEN),
    }
    return replace(
        transcript, read=partial(_skim, transcript.read, messages, frozenset(whole), longest)
    )


def _skim(
    read: Callable[[int], Body],
    messages: Sequence[Message],
    whole: frozenset[int],
    longest: Mapping[int, int],
    index: int,
) -> Body:
    body = read(index)
    most = longest.get(index, 0)
    message = messages[index]
    if index in whole or (most and len(body.text) + len(body.data) <= most):
        return body
    if not most:
        return replace(body, text="", data="", reasoning="")
    between = (
        f"\n{left_out(message.tokens - most // CHARS_OF_A_TOKEN, message.ref)}\n"
        if message.is_result
        else "\n"
    )
    text, data = (
        each if len(each) <= most else f"{each[: most // 2]}{between}{each[-most // 2 :]}"
        for each in (body.text, body.data)
    )
    return replace(body, text=text, data=data)
