"""What a flow may request from the shell, and the replies: a flow yields an effect and is sent the
reply.

Failure is a reply, not an exception, so every ladder of fallbacks can be played in a test without a
model.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Offload:
    """What follows is long: continue on a worker thread. Replied to by :class:`Done`."""


@dataclass(frozen=True, slots=True)
class Summarize:
    """Request a text of at most ``max_tokens``; replied to by :class:`Summary`.

    ``schema`` is a JSON schema that the reply should follow where the model takes one. ``key`` is
    the content address of the request, so that the shell may answer from an earlier reply.
    """

    system: str
    prompt: str
    max_tokens: int
    purpose: str
    schema: Mapping[str, object] = field(default_factory=dict)
    key: str = ""


@dataclass(frozen=True, slots=True)
class Together:
    """Questions that do not wait for one another; replied to by :class:`Answers`."""

    effects: tuple[Summarize, ...]


BEFORE_MODEL = "before_model"


@dataclass(frozen=True, slots=True)
class Save:
    """Save a checkpoint (JSON) before a model is called; replied to by :class:`StateSaved`."""

    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class Compare:
    """Which ``pairs`` of texts (positions, the lower one first) are alike; replied to by
    :class:`Alike`.

    ``model`` names embeddings; None compares by shingles.
    """

    texts: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Embed:
    texts: tuple[str, ...]
    model: str
    seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Trim:
    """Ask the function at ``path`` (``module:function``) for fewer messages; replied to by
    :class:`Trimmed`.

    By position of ``indices``: ``texts`` where content was replaced already, ``tokens``, and
    ``protected``, what stays whatever the function returns.
    """

    path: str
    indices: tuple[int, ...]
    max_tokens: int
    seconds: float
    texts: tuple[str | None, ...] = ()
    tokens: tuple[int, ...] = ()
    protected: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Done: ...


@dataclass(frozen=True, slots=True)
class StateSaved:
    version: int


@dataclass(frozen=True, slots=True)
class Summary:
    text: str
    finish_reason: str = "stop"
    tool_calls: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Answers:
    replies: tuple["Summary | Failed", ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """``reason`` is a short code such as ``timeout`` or ``status_500``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Alike:
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Vectors:
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Kept:
    index: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Trimmed:
    messages: tuple[Kept, ...]


Effect = Offload | Save | Summarize | Together | Compare | Embed | Trim
Reply = Done | StateSaved | Summary | Answers | Alike | Vectors | Trimmed | Failed

Announce = Callable[[str], None]
"""Called with what a flow has just done (``layer`` for the next one of its reports), so that the
shell can time it.
"""


def unheard(_: str) -> None: ...


T = TypeVar("T")
Flow = Generator[Effect, Reply, T]


@dataclass(frozen=True, slots=True)
class Returned(Generic[T]):
    value: T


def step(flow: Flow[T], reply: Reply | None = None) -> Effect | Returned[T]:
    try:
        return next(flow) if reply is None else flow.send(reply)
    except StopIteration as end:  # must not leave a thread or a coroutine as it is
        return Returned(end.value)


def together(flows: Sequence[Flow[T]]) -> Flow[list[T]]:
    """What every flow returns, in order; their questions are sent together, round by round, all
    else in turn.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Effect] = {}
    for number, flow in enumerate(flows):
        _note(step(flow), number, waiting=waiting, results=results)
    while waiting:
        questions = {n: effect for n, effect in waiting.items() if isinstance(effect, Summarize)}
        replies: dict[int, Reply] = {}
        if len(questions) == 1:
            (number,) = questions
            replies[number] = yield questions[number]
        elif questions:
            told = yield Together(tuple(questions.values()))
            replies |= zip(questions, _answers(told, len(questions)), strict=True)
        for number, effect in [*waiting.items()]:
            if number not in questions:
                replies[number] = yield effect
        for number, reply in sorted(replies.items()):
            del waiting[number]
            _note(step(flows[number], reply), number, waiting=waiting, results=results)
    return [results[number] for number in range(len(flows))]


def _note(
    now: Effect | Returned[T], number: int, *, waiting: dict[int, Effect], results: dict[int, T]
) -> None:
    if isinstance(now, Returned):
        results[number] = now.value
    else:
        waiting[number] = now


def _answers(told: Reply, count: int) -> tuple[Summary | Failed, ...]:
    if isinstance(told, Answers) and len(told.replies) == count:
        return told.replies
    return (told if isinstance(told, Failed) else Failed("no_reply"),) * count
