"""A chat message as a frozen value, the array of them that a request carries, and the errors of what cannot be sent.

A :class:`Message` holds what planning needs on every request: who speaks, the canonical digest, the
tokens, which calls it makes or answers. What it says, a :class:`Body`, is read only when a layer acts,
because a request resends hundreds of messages that nobody has to look at.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """What a message says.

    ``text`` joins the text parts by newlines; ``reasoning`` is the thinking that some providers return;
    ``media`` counts parts that are not text (images, audio, files); ``name`` is the speaker's, where one is given.
    ``attached`` says of each image, audio, video or file in a few words what it is.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    media: int = 0
    name: str = ""
    attached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """The facts about one message that planning needs without reading it.

    Attributes:
        role: as the client wrote it; unknown roles are allowed.
        digest: canonical BLAKE2b digest, 16 bytes (role and content, without ids and markers).
        tokens: uncalibrated tokens, text and media and overhead together.
        call_ids: ids of the tool calls that an assistant message makes, in order.
        answers: the tool call id that a tool result answers, else None.
        keep: True for "never remove", False for "first to go", None for unmarked.
        media: number of parts that are not text.
        thought: the tokens among them of thinking that its provider signed or sealed, 0 for none.
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
        """The archive's key for this message's original: 12 hex digits of the digest."""
        return self.digest.hex()[:12]


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    name: str
    tokens: int
    description: str = ""

    @property
    def digest(self) -> bytes:
        """What an edit of the definition is found by: 16 bytes of the name, so that a new wording changes nothing."""
        return blake2b(b"tool:" + self.name.encode(errors="surrogatepass"), digest_size=HASH_SIZE).digest()


@dataclass(frozen=True, slots=True)
class Tools:
    definitions: tuple[ToolDefinition, ...] = ()
    chosen: frozenset[str] = frozenset()


def no_tools() -> Tools:
    return Tools()


@dataclass(frozen=True, slots=True)
class Transcript:
    """The messages of one request in order.

    ``read(i)`` gives the body of message ``i``; ``chain[j]`` is the rolling hash over the messages from
    ``head`` to ``head + j`` inclusive, so ``chain`` has ``len(messages) - head`` entries. ``tools`` is the
    tokens of tool definitions and response schema, ``priming`` the fixed overhead of a request. ``memory`` are the
    indices of messages that carry memory. ``read_tools()`` gives the definitions one by one.
    ``binds`` says that thinking is valid only behind what stood before it when it was thought.
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

    @property
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
    """The rolling hash after each message that follows the head, seeded with the tenant; 16 bytes each."""
    seed = blake2b(tenant.encode(), digest_size=HASH_SIZE).digest()
    return extend_chain((seed,), messages[head:])[1:]


def extend_chain(chain: tuple[bytes, ...], messages: Sequence[Message]) -> tuple[bytes, ...]:
    link = chain[-1]
    links: list[bytes] = []
    for message in messages:
        link = blake2b(link + message.digest, digest_size=HASH_SIZE).digest()
        links.append(link)
    return chain + tuple(links)
