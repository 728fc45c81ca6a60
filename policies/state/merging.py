"""What a model says of the state of a task, added to what code read of it.

Code guards: goal and constraints are never taken from a model, a subtask that code knows keeps its status, and an
entry with an identifier that the source does not hold is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from policies.checkpoint import Checkpoint, Decision, Status, Subtask
from policies.state.environment import MOST_FACTS, bare, key_of
from policies.state.issues import MOST_ISSUES
from policies.summary import Proposal
from policies.text.gist import shorten
from policies.text.literals import literals, normal
from policies.text.segments import terms_of
from policies.todos import bounded

LONGEST = 240
MOST_TOLD = 12
"""Entries of one kind that a model may add at once."""
MOST_DECISIONS = 12
MOST_LEARNINGS = 10
ALIKE = 0.6
"""Share of their terms from which two entries say the same."""
SHORTEST_PART = 12


def merge_states(code: Checkpoint, proposal: Proposal | None, *, material: Callable[[str], bool]) -> Checkpoint:
    """The state that code read with what a model proposed; ``code`` itself where nothing was proposed.

    ``material`` says whether an identifier occurs in the source.
    """
    if proposal is None:
        return code

    def taken(texts: Sequence[str]) -> tuple[str, ...]:
        """The entries that name nothing which the source lacks, each on one line, bounded in length and number."""
        lines = [" ".join(text.split()) for text in texts]
        return tuple(shorten(line, LONGEST) for line in lines if terms_of(line) and is_known(line))[:MOST_TOLD]

    def is_known(text: str) -> bool:
        return all(material(value) for value in literals(text))

    said = [d for d in proposal.decisions if is_known(" ".join((d.text, d.rationale, *d.alternatives)))][:MOST_TOLD]
    made = [replace(d, text=shorten(d.text, LONGEST), rationale=shorten(d.rationale, LONGEST)) for d in said]
    return replace(
        code,
        subtasks=_subtasks(code, proposal, taken),
        decisions=add_decisions(code.decisions, made),
        open_issues=_fill(code.open_issues, taken(proposal.open_issues), most=MOST_ISSUES),
        environment=_environment(code, taken(proposal.environment)),
        learnings=_fill(code.learnings, taken(proposal.learnings), most=MOST_LEARNINGS),
    )


def _subtasks(
    code: Checkpoint, proposal: Proposal, taken: Callable[[Sequence[str]], Sequence[str]]
) -> tuple[Subtask, ...]:
    """Code's subtasks and those that a model names; an earlier telling of what is left gives way to this one."""
    told = bool(proposal.done or proposal.current or proposal.remaining or proposal.next_step)
    board = [s for s in code.subtasks if not (s.told and told and s.status is not Status.DONE)]
    for status, texts in (
        (Status.DONE, proposal.done),
        (Status.IN_PROGRESS, proposal.current),
        (Status.PLANNED, proposal.next_step),
        (Status.PLANNED, proposal.remaining),
    ):
        for text in taken(texts):
            if any(alike(text, s.text) for s in board):
                continue
            busy = status is Status.IN_PROGRESS and any(s.status is status for s in board)
            board.append(Subtask(text, Status.PLANNED if busy else status, told=True))
    return bounded(board)


def add_decisions(known: Sequence[Decision], made: Sequence[Decision]) -> tuple[Decision, ...]:
    """The decisions with those that say something else, the newest few."""
    board = list(known)
    for decision in made:
        if not any(alike(decision.text, other.text) for other in board):
            board.append(decision)
    return tuple(board[-MOST_DECISIONS:])


def _fill(known: tuple[str, ...], proposed: Sequence[str], *, most: int) -> tuple[str, ...]:
    """What code knows, and of the proposed as much as there is room for and says something else."""
    board = list(known)
    for text in proposed:
        if len(board) < most and not any(alike(text, other) for other in board):
            board.append(text)
    return tuple(board)


def _environment(code: Checkpoint, proposed: Sequence[str]) -> tuple[str, ...]:
    """Code's facts, and proposed ones under names that code does not know."""
    names = {key_of(line) for line in code.environment}
    return _fill(
        code.environment,
        [line for line in proposed if not (": " in line and key_of(line) in names)],
        most=MOST_FACTS,
    )


def alike(one: str, other: str) -> bool:
    """Whether two entries say the same: the same words, one within the other, or most terms in common."""
    first, second = normal(bare(one)), normal(bare(other))
    if first == second or (min(len(first), len(second)) >= SHORTEST_PART and (first in second or second in first)):
        return True
    mine, yours = set(terms_of(first)), set(terms_of(second))
    return bool(mine and yours) and len(mine & yours) >= ALIKE * len(mine | yours)
