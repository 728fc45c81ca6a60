"""What may never be removed.

==========================  ==========================================================
head                        system and developer messages, wherever they stand
task                        the first user message: the original goal
pinned                      marked ``keep: true`` or, in user and assistant text, by word; pinned by an operator
current                     the newest user message
active                      the newest unit, and the newest step where the model has said nothing since:
                            open tool calls and results nobody has read
==========================  ==========================================================

A step with a pinned message stays whole, so that calls keep their results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.messages import PIN_SIZE, Message
from policies.turns import Unit, first_user, last_user


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
