"""The conversation of one request as frozen values: where it may be cut, what must stay, and which
calls come again.

A :class:`Message` holds what planning needs on every request; what it says, a :class:`Body`, is
read only when a layer acts, because a request resends hundreds of messages that need no
examination.

A *turn* starts at a user message. A *step* is one assistant message with every tool result that
answers it. A *unit* is a step, or one message outside steps: the smallest thing that may be removed
whole. Calls are paired by position (the nearest assistant message before the result), because some
servers reuse ``call_0`` in every step.
"""

import json
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import islice, pairwise
from typing import NamedTuple

from policies.lines import beside_data

HASH_SIZE = 16
PIN_SIZE = 6  # as much of a digest as a ref shows
HEAD_ROLES = frozenset({"system", "developer"})
RESULT_ROLES = frozenset({"tool", "function"})
BUCKET_OF_ROLE = {
    **dict.fromkeys(HEAD_ROLES, "system"),
    **dict.fromkeys(RESULT_ROLES, "tool_outputs"),
}
IN_TAGS = re.compile(r"\s*(?:# .*\n\s*)?<([\w-]+)>(?s:.*)</[\w-]+>\s*")


class PolicyError(Exception): ...


class InvalidConversation(PolicyError): ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


def same_call(call: ToolCall) -> tuple[str, str]:
    try:
        return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.name, call.arguments


@dataclass(frozen=True, slots=True)
class Body:
    """``text`` joins the speaker's own words by newlines, for a result all of its text; ``data`` is
    other content as text: documents, results of search, blocks that are not known. ``media`` counts
    parts that are not text, and ``attached`` says in a few words what each is; ``name`` is the
    speaker's.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    media: int = 0
    name: str = ""
    attached: tuple[str, ...] = ()
    data: str = ""

    @property
    def said(self) -> str:
        """Its text, and under it its calls."""
        return self._with_calls(self.text)

    @property
    def whole(self) -> str:
        """Its text, and under it the data that it hands over, as such."""
        return beside_data(self.text, self.data) if self.data else self.text

    @property
    def everything(self) -> str:
        """Its text, its data and its calls."""
        return self._with_calls(self.whole)

    def _with_calls(self, text: str) -> str:
        return "\n".join(
            part
            for part in (text, *(f"{c.name} {c.arguments}".strip() for c in self.calls))
            if part
        )


class Message(NamedTuple):
    """What planning needs of a message without reading it; a tuple, since requests have hundreds
    and workers get them.

    ``digest`` is 16 bytes of BLAKE2b over role and content, without ids and markers. ``tokens`` are
    uncalibrated, media and overhead included. ``answers`` is the id of the call that a tool result
    answers. ``keep`` is True for "never remove", False for "first to go". ``thought`` are the
    tokens of thinking that its provider signed or sealed.
    """

    role: str
    digest: bytes
    tokens: int
    call_ids: tuple[str, ...] = ()
    answers: str | None = None
    keep: bool | None = None
    media: int = 0
    thought: int = 0

    @property
    def is_head(self) -> bool:
        return self.role in HEAD_ROLES

    @property
    def is_result(self) -> bool:
        return self.role in RESULT_ROLES

    @property
    def bucket(self) -> str:
        """What its tokens count as where it carries no memory."""
        return BUCKET_OF_ROLE.get(self.role, "history")

    @property
    def ref(self) -> str:
        return self.digest.hex()[:12]


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    name: str
    tokens: int
    description: str = ""

    @property
    def digest(self) -> bytes:
        """A digest of the name alone, so that a new wording leaves the edits of a definition in
        place.
        """
        return blake2b(
            b"tool:" + self.name.encode(errors="surrogatepass"), digest_size=HASH_SIZE
        ).digest()


@dataclass(frozen=True, slots=True)
class Tools:
    definitions: tuple[ToolDefinition, ...] = ()
    chosen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Transcript:
    """``read(i)`` gives the body of message ``i``. ``chain[j]`` is the rolling hash over the
    messages from ``head`` to ``head + j`` inclusive, without those that are ``floating``: a message
    that its client keeps at a distance from the end is no part of the history, and no cut covers
    it. ``tools`` are the tokens of definitions and response schema, ``priming`` a request's fixed
    overhead, ``memory`` the indices of messages that carry memory. ``by_role`` are the tokens of
    the messages where somebody has added them up, so that a long transcript takes no longer.
    ``binds``: thinking is valid only after the content that preceded it originally. ``size`` is the
    messages' length in bytes as received.
    """

    messages: tuple[Message, ...]
    read: Callable[[int], Body]
    chain: tuple[bytes, ...] = ()
    head: int = 0
    tools: int = 0
    priming: int = 3
    memory: frozenset[int] = frozenset()
    read_tools: Callable[[], Tools] = Tools
    by_role: Mapping[str, int] = field(default_factory=dict)
    binds: bool = False
    size: int = 0
    floating: frozenset[int] = frozenset()

    @cached_property
    def tokens(self) -> int:
        told = self.by_role.values() if self.by_role else (m.tokens for m in self.messages)
        return sum(told) + self.tools + self.priming

    @cached_property
    def lasting(self) -> Sequence[int]:
        """The indices of the messages after the head that are the history: positions in it count
        these.
        """
        behind = range(self.head, len(self.messages))
        return behind if not self.floating else tuple(i for i in behind if i not in self.floating)

    def place(self, index: int) -> int:
        """How many messages of the history precede the message ``index``."""
        return index - self.head if not self.floating else bisect_left(self.lasting, index)

    def after(self, length: int) -> int:
        """The index after the first ``length`` messages of the history."""
        return self.head if length == 0 else self.lasting[length - 1] + 1

    def begins_with(self, length: int, end: bytes) -> bool:
        """Whether the hash over the first ``length`` messages of the history, of which there is
        one, is ``end``.
        """
        return (
            0 < length <= len(self.lasting)
            and self.chain[self.lasting[length - 1] - self.head] == end
        )

    @cached_property
    def occurrences(self) -> tuple[int, ...]:
        """For each message, how many with the same digest precede it."""
        seen: dict[bytes, int] = {}
        result: list[int] = []
        for message in self.messages:
            nth = seen.get(message.digest, 0)
            seen[message.digest] = nth + 1
            result.append(nth)
        return tuple(result)

    @cached_property
    def steps(self) -> "tuple[Unit, ...]":
        return units(self.messages, self.head)

    @cached_property
    def calls(self) -> dict[int, ToolCall]:
        """By the index of a result the call that it answers."""
        return answered_calls(self, self.steps)


def head_length(messages: Sequence[Message]) -> int:
    for index, message in enumerate(messages):
        if not message.is_head:
            return index
    return len(messages)


def tokens_by_role(
    messages: Iterable[Message], before: Mapping[str, int] | None = None
) -> dict[str, int]:
    result = dict(before or {})
    for message in messages:
        result[message.role] = result.get(message.role, 0) + message.tokens
    return result


def chain_of(owner: str, messages: Sequence[Message], head: int) -> tuple[bytes, ...]:
    """The rolling hashes of a history; ``owner`` says whose it is: histories of two owners have no
    hash in common.
    """
    return extend_chain((seed_of(owner),), messages[head:])[1:]


def seed_of(owner: str) -> bytes:
    return blake2b(owner.encode(errors="surrogatepass"), digest_size=HASH_SIZE).digest()


def extend_chain(chain: tuple[bytes, ...], messages: Sequence[Message]) -> tuple[bytes, ...]:
    link = chain[-1]
    links: list[bytes] = []
    for message in messages:
        link = blake2b(link + message.digest, digest_size=HASH_SIZE).digest()
        links.append(link)
    return chain + tuple(links)


MAX_KEPT_LEN = 512
MAX_READ = 64

Counted = tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Messages ``start`` to ``stop`` (exclusive) that stay or go together; ``open``: with calls
    that nothing answers yet.
    """

    start: int
    stop: int
    open: bool = False

    @property
    def indices(self) -> range:
        return range(self.start, self.stop)


def units(messages: Sequence[Message], start: int = 0) -> tuple[Unit, ...]:
    """The units of ``messages[start:]`` in order; together they cover every message exactly once.

    A result that comes after something else (Responses) holds everything between it and its call.
    """
    found: list[Unit] = []
    late: dict[str, int] = {}  # calls that nothing has answered yet, and where their step begins
    index = start
    while index < len(messages):
        stop = index + 1
        message = messages[index]
        waiting = Counter(message.call_ids) if message.call_ids else Counter[str]()
        begin = index
        if message.call_ids or message.is_result:
            while stop < len(messages) and messages[stop].is_result:
                stop += 1
            for result in messages[index + (not message.is_result) : stop]:
                if result.answers in waiting:
                    _take_one(waiting, result.answers or "")
                elif result.answers is None and waiting:
                    _take_one(waiting, next(iter(waiting)))
                elif late and result.answers in late:
                    begin = min(begin, late.pop(result.answers or ""))
        while found and found[-1].stop > begin:
            begin = min(begin, found.pop().start)
        is_open = bool(waiting) or (bool(late) and max(late.values()) >= begin)
        found.append(Unit(begin, stop, is_open))
        late |= dict.fromkeys(waiting, begin)
        index = stop
    return tuple(found)


def _take_one(waiting: Counter[str], call: str) -> None:
    waiting[call] -= 1
    if not waiting[call]:
        del waiting[call]


def parse_turn_boundaries(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(i for i, m in enumerate(messages) if m.role == "user")


def last_user(
    messages: Sequence[Message], *, without: AbstractSet[int] = frozenset()
) -> int | None:
    indices = range(len(messages) - 1, -1, -1)
    return next((i for i in indices if messages[i].role == "user" and i not in without), None)


def first_user(transcript: Transcript) -> int | None:
    """The task: a user's first message, after those that are tags alone, in which Codex states
    rules and directory.
    """
    users = pairwise((*parse_turn_boundaries(transcript.messages), -1))
    return next(
        (
            i
            for i, after in users
            if after != i + 1 or not IN_TAGS.fullmatch(transcript.read(i).text)
        ),
        None,
    )


def answered_calls(transcript: Transcript, steps: Sequence[Unit]) -> dict[int, ToolCall]:
    found: dict[int, ToolCall] = {}
    messages = transcript.messages
    for step in steps:
        waiting: dict[int, ToolCall] = {}
        by_id: dict[str | None, deque[int]] = {}
        made = 0
        for index in step.indices:
            if messages[index].call_ids:
                for call in transcript.read(index).calls:
                    waiting[made] = call
                    by_id.setdefault(call.id, deque()).append(made)
                    made += 1
                continue
            if not waiting:
                continue
            named = by_id.get(messages[index].answers, deque())
            while named and named[0] not in waiting:  # it was taken for the answer to another
                named.popleft()
            number = named.popleft() if named else next(iter(waiting))
            found[index] = waiting.pop(number)
    return found


@dataclass(frozen=True, slots=True)
class Protection:
    head: frozenset[int]
    task: int | None
    current: int | None
    active: frozenset[int]
    pinned: frozenset[int]
    standing: frozenset[int]

    @property
    def verbatim(self) -> frozenset[int]:
        return self.head | self.pinned | self.standing

    @property
    def all(self) -> frozenset[int]:
        return self.verbatim | self.active


def protect(transcript: Transcript, pins: frozenset[bytes] = frozenset()) -> Protection:
    messages = transcript.messages
    task = first_user(transcript)
    current = last_user(messages, without=transcript.floating)
    newest = {current}
    if current and messages[current - 1].is_result:
        # it steers a turn in progress, or is a client's note that moves with the next request
        newest.add(last_user(messages[:current], without=transcript.floating))
    kept = {i for i, m in enumerate(messages) if m.keep or (pins and m.digest[:PIN_SIZE] in pins)}
    return Protection(
        head=frozenset(i for i, m in enumerate(messages) if m.is_head),
        task=task,
        current=current,
        active=_active(messages, transcript.steps),
        pinned=transcript.floating.union(
            i
            for unit in transcript.steps
            if not kept.isdisjoint(unit.indices)
            for i in unit.indices
        ),
        standing=frozenset(
            i for i in parse_turn_boundaries(messages) if i <= (task or 0) or i in newest
        ),
    )


def _active(messages: Sequence[Message], steps: Sequence[Unit]) -> frozenset[int]:
    found = set(steps[-1].indices) if steps else set()
    for unit in reversed(steps):
        first = messages[unit.start]
        if first.call_ids or first.is_result:
            return frozenset(found.union(unit.indices))
        if first.role == "assistant":
            break
    return frozenset(found)


class Run(NamedTuple):
    """The calls of the newest step: tool, arguments (of long ones a hash), and how many times in a
    row.

    ``end`` is the chain's hash at the end of the array that it was read from, ``longest`` the most
    times.
    """

    end: bytes = b""
    calls: Counted = ()
    longest: int = 0


def follow_calls(transcript: Transcript, run: Run, *, length: int, most: int) -> Run:
    """The run after a request whose first ``length`` messages after the head are known.

    Where ``run`` is not of those, the newest ``most`` steps are read. A user message ends every
    run: somebody has seen its result.
    """
    chain = transcript.chain
    messages = transcript.messages
    if 0 < length <= len(chain) and chain[length - 1] == run.end:
        calls = run.calls
        start = transcript.head + length
    else:
        calls = ()
        start = min(islice(_steps(transcript), most), default=len(messages))
    for index in range(start, len(messages)):
        message = messages[index]
        if message.call_ids:
            calls = _next(calls, transcript.read(index).calls)
        elif message.role == "user":
            calls = ()
    return Run(chain[-1] if chain else b"", calls, max((count for _, _, count in calls), default=0))


def results_by_tool(transcript: Transcript, start: int) -> dict[str, tuple[int, int, int]]:
    """Number, uncalibrated tokens and largest of the results from ``start`` on; the newest 64
    messages are read.
    """
    messages = transcript.messages
    names = dict[str, str]()
    found = dict[str, tuple[int, int, int]]()
    for index in range(max(start, transcript.head, len(messages) - MAX_READ), len(messages)):
        message = messages[index]
        if message.call_ids:
            names |= {call.id: call.name for call in transcript.read(index).calls}
        elif (
            message.role in RESULT_ROLES and (name := names.get(message.answers or "")) is not None
        ):
            number, tokens, largest = found.get(name, (0, 0, 0))
            found[name] = (number + 1, tokens + message.tokens, max(largest, message.tokens))
    return found


def _steps(transcript: Transcript) -> Iterator[int]:
    messages = transcript.messages
    for index in range(len(messages) - 1, transcript.head - 1, -1):
        if messages[index].call_ids:
            yield index
        elif messages[index].role == "user":
            return


def _next(before: Counted, made: tuple[ToolCall, ...]) -> Counted:
    counts = {(name, arguments): count for name, arguments, count in before}
    found: dict[tuple[str, str], int] = {}
    for call in made:
        key = call.name, _kept(call)
        found[key] = 1 + (found[key] if key in found else counts.get(key, 0))
    return tuple([(name, arguments, count) for (name, arguments), count in found.items()])


def _kept(call: ToolCall) -> str:
    if len(call.arguments) > MAX_KEPT_LEN:
        return blake2b(
            call.arguments.encode("utf-8", "surrogatepass"), digest_size=HASH_SIZE
        ).hexdigest()
    return same_call(call)[1]


def step_numbers(messages: Sequence[Message]) -> tuple[int, ...]:
    """Steps begun up to each message, 0 before the first assistant message; age = last number - own
    number.
    """
    numbers: list[int] = []
    step = 0
    for message in messages:
        step += message.role == "assistant"
        numbers.append(step)
    return tuple(numbers)
