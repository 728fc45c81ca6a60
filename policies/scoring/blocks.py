"""One message as eviction sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from policies.messages import Message


class ContentType(StrEnum):
    """What a block is; how long it lives and how much its source weighs depend on it."""

    SYSTEM = "system"
    TOOLS = "tools"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL_RESULT = "tool_result"
    MEMORY = "memory"
    THINKING = "thinking"


EVICTABLE = frozenset({ContentType.USER, ContentType.TOOL_RESULT, ContentType.MEMORY})
"""Content that may be evicted by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The facts that scorers weigh about one message.

    Attributes:
        index: index of the message in the array.
        id: the message's digest in hex, the same on every request.
        kind: what it is.
        tokens: what it costs now.
        age: steps since it was created; 0 in the newest step.
        idle: steps since something last referred to it; ``age`` if nothing ever did.
        references: how many later assistant messages used what it says.
        superseded: whether a later result of the same call replaced it.
        duplicate: similarity to the most similar later block, 0 to 1.
        important: whether its own text or the client says that it is important.
        keep: True for "never remove", False for "first to go", None for unmarked.
        semantic: relevance to the newest user message, 0 to 1; None without embeddings.
        behind: messages from this one to the end of the array, itself included; None where only steps are known.
    """

    index: int
    id: str
    kind: ContentType
    tokens: int
    age: int
    idle: int
    references: int
    superseded: bool = False
    duplicate: float = 0.0
    important: bool = False
    keep: bool | None = None
    semantic: float | None = None
    behind: int | None = None


def decided(block: Block) -> float | None:
    """The score that marks (1 keep, 0 evict first) and supersession (0) fix, None where a formula has to say."""
    if block.keep is not None:
        return 1.0 if block.keep else 0.0
    return 0.0 if block.superseded else None


def unit(value: float) -> float:
    """``value`` within 0 to 1."""
    return min(1.0, max(0.0, value))


def step_numbers(messages: Sequence[Message]) -> tuple[int, ...]:
    """For each message the number of steps begun up to it, 1 for the first; age = last number - own number.

    Every assistant message begins a step; messages before the first one have number 0.
    """
    numbers: list[int] = []
    step = 0
    for message in messages:
        step += message.role == "assistant"
        numbers.append(step)
    return tuple(numbers)
