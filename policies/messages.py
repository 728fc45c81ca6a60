"""The conversation of one request as frozen values, and the errors of what cannot be sent.

A :class:`Message` holds what planning needs on every request; what it says, a :class:`Body`, is read only when a layer
acts, because a request resends hundreds of messages that nobody has to look at.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

HASH_SIZE = 16
PIN_SIZE = 6  # as much of a digest as a ref shows
HEAD_ROLES = frozenset({"system", "developer"})
RESULT_ROLES = frozenset({"tool", "function"})


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
    """``text`` joins the text parts by newlines; ``media`` counts parts that are not text, and ``attached`` says in a
    few words what each is; ``name`` is the speaker's.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    media: int = 0
    name: str = ""
    attached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """What planning needs of a message without reading it.

    ``digest`` is 16 bytes of BLAKE2b over role and content, without ids and markers. ``tokens`` are uncalibrated, media
    and overhead included. ``answers`` is the id of the call that a tool result answers. ``keep`` is True for "never
    remove", False for "first to go". ``thought`` are the tokens of thinking that its provider signed or sealed.
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
    def ref(self) -> str:
        return self.digest.hex()[:12]


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    name: str
    tokens: int
    description: str = ""

    @property
    def digest(self) -> bytes:
        """Of the name alone, so that a new wording leaves the edits of a definition in place."""
        return blake2b(b"tool:" + self.name.encode(errors="surrogatepass"), digest_size=HASH_SIZE).digest()


@dataclass(frozen=True, slots=True)
class Tools:
    definitions: tuple[ToolDefinition, ...] = ()
    chosen: frozenset[str] = frozenset()


def no_tools() -> Tools:
    return Tools()


@dataclass(frozen=True)
class Transcript:
    """``read(i)`` gives the body of message ``i``. ``chain[j]`` is the rolling hash over the messages from ``head`` to
    ``head + j`` inclusive. ``tools`` are the tokens of definitions and response schema, ``priming`` a request's fixed
    overhead, ``memory`` the indices of messages that carry memory. ``binds``: thinking is valid only behind what stood
    before it when it was thought.
    """

    messages: tuple[Message, ...]
    read: Callable[[int], Body]
    chain: tuple[bytes, ...] = ()
    head: int = 0
    tools: int = 0
    priming: int = 3
    occurrences: tuple[int, ...] = field(default=())
    memory: frozenset[int] = frozenset()
    read_tools: Callable[[], Tools] = no_tools
    binds: bool = False

    @cached_property
    def tokens(self) -> int:
        return sum(m.tokens for m in self.messages) + self.tools + self.priming


def head_length(messages: Sequence[Message]) -> int:
    for index, message in enumerate(messages):
        if not message.is_head:
            return index
    return len(messages)


def count_occurrences(messages: Sequence[Message]) -> tuple[int, ...]:
    seen: dict[bytes, int] = {}
    result: list[int] = []
    for message in messages:
        nth = seen.get(message.digest, 0)
        seen[message.digest] = nth + 1
        result.append(nth)
    return tuple(result)


def chain_of(tenant: str, messages: Sequence[Message], head: int) -> tuple[bytes, ...]:
    seed = blake2b(tenant.encode(), digest_size=HASH_SIZE).digest()
    return extend_chain((seed,), messages[head:])[1:]


def extend_chain(chain: tuple[bytes, ...], messages: Sequence[Message]) -> tuple[bytes, ...]:
    link = chain[-1]
    links: list[bytes] = []
    for message in messages:
        link = blake2b(link + message.digest, digest_size=HASH_SIZE).digest()
        links.append(link)
    return chain + tuple(links)
