"""The extract as a compactor of the compaction conformance kit, a package that is no dependency of
this project.

    compaction-kit benchmark --spec benchmarks/conformance.py:Compactor --budgets 10%,20%,30%

The kit compacts a session five times over, each time from the last output. As in the product the
originals are kept, so a round that brings nothing new gives the same text again. Budgets are
characters, four to a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.summary.material import render_summary
from policies.text.extract import extract
from policies.text.segments import Source

CHARS_PER_TOKEN = 4
DEFAULT_CHARS = 4_000


class Turn(Protocol):
    """One message of the kit."""

    role: str
    text: str


class Chars4:
    """Tokens as a quarter of the characters, rounded up."""

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return -(-len(text) // CHARS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Compacted:
    """What the kit reads of one round."""

    text: str
    compactor_name: str
    round_num: int
    structured: None = None


class Compactor:
    """The bare extract."""

    name = "weir"
    fenced = False

    def __init__(self) -> None:
        self._kept: tuple[Turn, ...] = ()
        self._last: str | None = None

    def compact(
        self, turns: Sequence[Turn], round_num: int = 1, budget_chars: int | None = None
    ) -> Compacted:
        """The session within ``budget_chars``."""
        if len(turns) != 1 or turns[0].text != self._last:
            self._kept = tuple(turns)
        counter = Chars4()
        frame = counter.count(render_summary("", removed=999)) if self.fenced else 0
        sources = [Source(i, turn.role, turn.text) for i, turn in enumerate(self._kept)]
        room = (budget_chars or DEFAULT_CHARS) // CHARS_PER_TOKEN - frame
        text = extract(sources, max_tokens=room, counter=counter).text
        if self.fenced:
            text = render_summary(text, removed=len(sources))
        self._last = text
        return Compacted(text, self.name, round_num)


class Fenced(Compactor):
    """The extract with the fence and the label that it has in a request."""

    name = "weir-fenced"
    fenced = True
