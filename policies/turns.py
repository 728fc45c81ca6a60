"""Turns, steps and units: where an array of messages may be cut.

A *turn* starts at a user message. A *step* is one assistant message with every tool result that answers
it. A *unit* is a step, or one message outside steps: the smallest thing that may be removed whole.
Tool calls are paired by position (the nearest assistant message before the result), because some servers
reuse ``call_0`` in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.messages import PIN_SIZE, Message, ToolCall, Transcript


@dataclass(frozen=True, slots=True)
class Unit:
    """Messages ``start`` (inclusive) to ``stop`` (exclusive) that stay or go together.

    ``open`` is True for a step with calls that no result answers yet.
    """

    start: int
    stop: int
    open: bool = False

    @property
    def indices(self) -> range:
        """The indices of its messages."""
        return range(self.start, self.stop)


def units(messages: Sequence[Message], start: int = 0) -> tuple[Unit, ...]:
    """The units of ``messages[start:]`` in order; together they cover every message exactly once."""
    found: list[Unit] = []
    index = start
    while index < len(messages):
        stop = index + 1
        message = messages[index]
        if message.call_ids:
            waiting = list(message.call_ids)
            while stop < len(messages) and messages[stop].is_result:
                answered = messages[stop].answers
                if answered in waiting:
                    waiting.remove(answered)
                elif answered is None and waiting:
                    waiting.pop(0)
                stop += 1
            found.append(Unit(index, stop, bool(waiting)))
        elif message.is_result:
            while stop < len(messages) and messages[stop].is_result:
                stop += 1
            found.append(Unit(index, stop))
        else:
            found.append(Unit(index, stop))
        index = stop
    return tuple(found)


def parse_turn_boundaries(messages: Sequence[Message]) -> tuple[int, ...]:
    """Indices of the user messages, each of which starts a turn."""
    return tuple(i for i, m in enumerate(messages) if m.role == "user")


def find_safe_boundary(messages: Sequence[Message], target: int) -> int:
    """The unit boundary nearest to index ``target``, the later one on a tie; 0 to ``len(messages)``."""
    boundaries = [0, *(u.stop for u in units(messages))]
    return min(boundaries, key=lambda b: (abs(b - target), -b))


def last_user(messages: Sequence[Message]) -> int | None:
    """Index of the newest user message."""
    return next((i for i in range(len(messages) - 1, -1, -1) if messages[i].role == "user"), None)


def first_user(messages: Sequence[Message]) -> int | None:
    """Index of the first user message: the original task."""
    return next((i for i, m in enumerate(messages) if m.role == "user"), None)


def answered_calls(transcript: Transcript, steps: Sequence[Unit]) -> dict[int, ToolCall]:
    """For each tool result that answers a call, that call, by the result's index."""
    found: dict[int, ToolCall] = {}
    messages = transcript.messages
    for step in steps:
        if not messages[step.start].call_ids:
            continue
        waiting = list(transcript.read(step.start).calls)
        for index in range(step.start + 1, step.stop):
            answers = messages[index].answers
            call = next((c for c in waiting if c.id == answers), waiting[0] if waiting else None)
            if call is not None:
                waiting.remove(call)
                found[index] = call
    return found


@dataclass(frozen=True, slots=True)
class Protection:
    """Indices of protected messages, by reason."""

    head: frozenset[int]
    task: int | None
    current: int | None
    active: frozenset[int]
    pinned: frozenset[int]

    @property
    def verbatim(self) -> frozenset[int]:
        """Everything that stays word for word in every request: all reasons but ``active``."""
        singles = {i for i in (self.task, self.current) if i is not None}
        return self.head | self.pinned | singles

    @property
    def all(self) -> frozenset[int]:
        """Every protected index."""
        return self.verbatim | self.active


def protect(messages: Sequence[Message], steps: Sequence[Unit], pins: frozenset[bytes] = frozenset()) -> Protection:
    """What is protected in ``messages``; ``steps`` are its units, ``pins`` the first bytes of the
    digests of messages that have to stay."""
    pinned: set[int] = set()
    for unit in steps:
        if any(messages[i].keep or (pins and messages[i].digest[:PIN_SIZE] in pins) for i in unit.indices):
            pinned.update(unit.indices)
    return Protection(
        head=frozenset(i for i, m in enumerate(messages) if m.is_head),
        task=first_user(messages),
        current=last_user(messages),
        active=_active(messages, steps),
        pinned=frozenset(pinned),
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
