"""One message as eviction sees it, and what a scorer is.

A scorer answers one question about a block: how much is it worth keeping? 1 is keep, 0 is evict first. What
somebody else already decided stands above every formula: a block marked ``keep: true`` scores 1, a block
marked ``keep: false`` or superseded by a later result of the same call scores 0 (:func:`decided`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

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


class Scorer(Protocol):
    """How much a block is worth keeping. Implementations are frozen values and never raise."""

    @property
    def name(self) -> str:
        """What policies call it."""
        ...

    @property
    def band(self) -> float:
        """Scores that differ by no more than this say the same; for :func:`policies.scoring.selection.select`."""
        ...

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1: 1 keep, 0 evict first."""
        ...


BAND = 0.02
"""Default width within which scores count as equal (ours)."""


def decided(block: Block) -> float | None:
    """The score that marks and supersession fix, None where a formula has to say."""
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
