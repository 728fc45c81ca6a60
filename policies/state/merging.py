"""What a model says of the state of a task, added to what code read of it.

Code guards: goal and constraints are never taken from a model, a subtask that code knows keeps its status, an entry
with an identifier that the source does not hold is left out, and so is one that the user's words have replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from policies.checkpoint import Checkpoint, Decision, Status, Subtask
from policies.extraction.claims import stem
from policies.extraction.findings import shorten
from policies.extraction.identifiers import STRONG, Kind, Mention, scan
from policies.extraction.readings import normal
from policies.extraction.rules import STOP, WORD, read_sentence
from policies.extraction.supersession import superseded
from policies.state.environment import MOST_FACTS, SAID, bare, key_of
from policies.state.issues import MOST_ISSUES
from policies.todos import bounded

LONGEST = 240
MOST_TOLD = 12
"""Entries of one kind that a model may add at once."""
MOST_DECISIONS = 12
MOST_LEARNINGS = 10
ALIKE = 0.6
"""Share of their words from which two entries say the same."""
SHORTEST_PART = 12
_DIGITS = 3
"""A number of so many digits is an identifier."""


class Proposal(Protocol):
    """What a model proposes, one line an entry; a decision is text or has ``text``, ``rationale``, ``alternatives``."""

    @property
    def done(self) -> Sequence[str]:
        """Subtasks that are done."""

    @property
    def current(self) -> Sequence[str]:
        """The subtask in progress."""

    @property
    def remaining(self) -> Sequence[str]:
        """Subtasks that are left."""

    @property
    def decisions(self) -> Sequence[object]:
        """What was decided."""

    @property
    def open_issues(self) -> Sequence[str]:
        """What is still wrong."""

    @property
    def environment(self) -> Sequence[str]:
        """What holds around the task."""

    @property
    def learnings(self) -> Sequence[str]:
        """What was learned."""

    @property
    def next_step(self) -> Sequence[str]:
        """What comes next."""


def merge_states(
    code: Checkpoint,
    proposal: Proposal | None,
    *,
    material: Callable[[str], bool],
    retired: frozenset[str] = frozenset(),
) -> Checkpoint:
    """The state that code read with what a model proposed; ``code`` itself where nothing was proposed.

    ``material`` says whether an identifier occurs in the source; ``retired`` are literals, small, that only replaced
    statements hold.
    """
    if proposal is None:
        return code
    guard = _Guard(material, retired, _replaced(code, proposal))
    return replace(
        code,
        subtasks=_subtasks(code, proposal, guard),
        decisions=_decisions(code, proposal, guard),
        open_issues=_fill(code.open_issues, guard.pass_all(proposal.open_issues), most=MOST_ISSUES),
        environment=_environment(code, guard.pass_all(proposal.environment)),
        learnings=_fill(code.learnings, guard.pass_all(proposal.learnings), most=MOST_LEARNINGS),
    )


def unknown_identifiers(text: str, material: Callable[[str], bool]) -> tuple[str, ...]:
    """The identifiers of a text that do not occur in the source."""
    return tuple(m.value for m in scan(text) if _is_identifier(m) and not material(m.value))


def _is_identifier(mention: Mention) -> bool:
    value, kind = mention.value, mention.kind
    if kind is Kind.PATH:
        return not all(part.isalpha() and part.islower() for part in value.split("/")) or value.count("/") > 1
    if kind is Kind.SYMBOL and value.isalpha() and value[0].isupper():
        return value.endswith(("Error", "Exception"))
    if kind is Kind.QUOTE:
        return " " not in value and any(not c.isalpha() for c in value)
    if kind in {Kind.NUMBER, Kind.QUANTITY}:
        return sum(c.isdigit() for c in value) >= _DIGITS
    return kind in STRONG or kind is Kind.TIME


@dataclass(frozen=True, slots=True)
class _Guard:
    """What decides whether an entry is taken."""

    material: Callable[[str], bool]
    retired: frozenset[str]
    replaced: frozenset[str] = field(default_factory=frozenset)

    def lets(self, text: str) -> bool:
        """Whether an entry has words, no identifier that the source lacks, and nothing that was replaced."""
        if not any(c.isalnum() for c in text) or text in self.replaced or unknown_identifiers(text, self.material):
            return False
        return not any(m.value.lower() in self.retired for m in scan(text))

    def pass_all(self, texts: Sequence[str]) -> tuple[str, ...]:
        """The entries that are taken, each on one line and bounded in length and number."""
        lines = [" ".join(text.split()) for text in texts if isinstance(text, str)]
        return tuple(shorten(line, LONGEST) for line in lines if self.lets(line))[:MOST_TOLD]


def _entries(value: Sequence[str]) -> Sequence[str]:
    """A single text as one entry."""
    return (value,) if isinstance(value, str) else value


def _replaced(code: Checkpoint, proposal: Proposal) -> frozenset[str]:
    """The proposed entries whose value the user's own words, which are newer, surely replace."""
    told = [bare(e).removeprefix(f"{SAID}: ") for e in code.environment if e.startswith(f"{SAID}: ")]
    stated = [*code.constraints, *code.success_criteria, *told]
    proposed = [
        *proposal.done,
        *_entries(proposal.current),
        *proposal.remaining,
        *_entries(proposal.next_step),
        *(d.text for v in proposal.decisions if (d := decision_in(v)) is not None),
        *proposal.open_issues,
        *proposal.environment,
        *proposal.learnings,
    ]
    lines = [" ".join(p.split()) for p in proposed]
    sentences = [read_sentence(text, index=0) for text in (*lines, *stated)]
    stale = superseded(sentences)
    return frozenset(lines[i] for i, newer in stale.items() if i < len(lines) <= newer.index and newer.sure)


def _subtasks(code: Checkpoint, proposal: Proposal, guard: _Guard) -> tuple[Subtask, ...]:
    """Code's subtasks and those that a model names; an earlier telling of what is left gives way to this one."""
    told = bool(proposal.done or proposal.current or proposal.remaining or proposal.next_step)
    board = [s for s in code.subtasks if not (s.told and told and s.status is not Status.DONE)]
    left = (*_entries(proposal.next_step), *proposal.remaining)
    for status, texts in (
        (Status.DONE, proposal.done),
        (Status.IN_PROGRESS, _entries(proposal.current)),
        (Status.PLANNED, left),
    ):
        for text in guard.pass_all(texts):
            if any(alike(text, s.text) for s in board):
                continue
            busy = status is Status.IN_PROGRESS and any(s.status is status for s in board)
            board.append(Subtask(text, Status.PLANNED if busy else status, told=True))
    return bounded(board)


def _decisions(code: Checkpoint, proposal: Proposal, guard: _Guard) -> tuple[Decision, ...]:
    board = list(code.decisions)
    for value in proposal.decisions[:MOST_TOLD]:
        made = decision_in(value)
        if made is None or not guard.lets(" ".join((made.text, made.rationale, *made.alternatives))):
            continue
        if made.text not in guard.replaced and not any(alike(made.text, d.text) for d in board):
            board.append(made)
    return tuple(board[-MOST_DECISIONS:])


def decision_in(value: object) -> Decision | None:
    """A decision as a model gives it: text, an object or a mapping; None for anything else."""
    if isinstance(value, Decision):
        return value
    if isinstance(value, str):
        return Decision(shorten(" ".join(value.split()), LONGEST)) if value.strip() else None
    if isinstance(value, Mapping):
        fields = {str(name): entry for name, entry in value.items()}
    else:
        fields = {n: getattr(value, n, None) for n in ("text", "decision", "rationale", "alternatives")}
    text, why, against = (
        fields.get("text") or fields.get("decision"),
        fields.get("rationale"),
        fields.get("alternatives"),
    )
    if not isinstance(text, str) or not text.strip():
        return None
    options = tuple(a for a in against if isinstance(a, str)) if isinstance(against, list | tuple) else ()
    return Decision(
        shorten(" ".join(text.split()), LONGEST),
        shorten(" ".join(why.split()), LONGEST) if isinstance(why, str) else "",
        options[:4],
    )


def _fill(known: tuple[str, ...], proposed: Sequence[str], *, most: int) -> tuple[str, ...]:
    """What code knows, and of the proposed as much as there is room for and says something else."""
    board = list(known)
    for text in proposed:
        if len(board) < most and not any(alike(text, other) for other in board):
            board.append(text)
    return tuple(board)


def _environment(code: Checkpoint, proposed: Sequence[str]) -> tuple[str, ...]:
    """Code's facts, and proposed ones under names that code does not know."""
    board = list(code.environment)
    names = {key_of(line) for line in board}
    for line in proposed:
        named = ": " in line and key_of(line) in names
        if len(board) < MOST_FACTS and not named and not any(alike(line, bare(other)) for other in board):
            board.append(line)
    return tuple(board)


def alike(one: str, other: str) -> bool:
    """Whether two entries say the same: the same words, one within the other, or most words in common."""
    first, second = normal(one), normal(other)
    if first == second:
        return True
    if min(len(first), len(second)) >= SHORTEST_PART and (first in second or second in first):
        return True
    mine, yours = _words(one), _words(other)
    return bool(mine and yours) and len(mine & yours) >= ALIKE * len(mine | yours)


def _words(text: str) -> frozenset[str]:
    words = {stem(w) for w in WORD.findall(text) if w.lower() not in STOP}
    return frozenset(words | {m.value.lower() for m in scan(text) if m.kind in STRONG})
