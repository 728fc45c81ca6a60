"""What a flow may ask of the shell, and what it is told.

A flow is a generator: it yields an effect and is sent the reply. Failure is a reply, not an exception, so
every ladder of fallbacks can be played in a test without a model.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Offload:
    """What follows is long: go on away from the event loop. The reply is :class:`Done`."""


@dataclass(frozen=True, slots=True)
class Summarize:
    """Ask the summariser for a text of at most ``max_tokens``.

    ``system`` and ``prompt`` are complete; ``purpose`` names the prompt and its version for the trace.
    """

    system: str
    prompt: str
    max_tokens: int
    purpose: str


@dataclass(frozen=True, slots=True)
class Compare:
    """Ask which of these texts are alike; the reply is :class:`Alike`.

    ``pairs`` are the positions worth comparing, the lower one first. ``model`` names embeddings; None compares by
    shingles.
    """

    texts: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Trim:
    """Ask an operator's own function for fewer messages; the reply is :class:`Trimmed`.

    ``path`` is ``module:function``, ``max_tokens`` what the messages (by index) should take together. In the order
    of ``indices``: ``texts`` is the content where that was replaced already (else None), ``tokens`` what each costs,
    ``protected`` whether it stays whatever comes back.
    """

    path: str
    indices: tuple[int, ...]
    max_tokens: int
    seconds: float
    texts: tuple[str | None, ...] = ()
    tokens: tuple[int, ...] = ()
    protected: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The shell did it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What the summariser answered; ``finish_reason`` and ``tool_calls`` tell a useless answer apart."""

    text: str
    finish_reason: str = "stop"
    tool_calls: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The shell could not; ``reason`` is a short code such as ``timeout`` or ``status_500``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Alike:
    """How alike the pairs that were asked about are: 0 to 1 each, in their order."""

    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """A message that an operator's function gave back: which one it was, and its content where that is another."""

    index: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What an operator's function gave back, in its order."""

    messages: tuple[Kept, ...]


Effect = Offload | Summarize | Compare | Trim
Reply = Done | Summary | Alike | Trimmed | Failed

T = TypeVar("T")
Flow = Generator[Effect, Reply, T]
