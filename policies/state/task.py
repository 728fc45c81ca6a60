"""The structured state of a task, read from messages by code as a delta on the last one.

The user's statements stand word for word, a status comes from a list, an issue is the line that a tool printed, and
decisions and learnings are what a note says. Nothing of it is guessed from the words of a language.
"""

from collections.abc import Sequence
from hashlib import blake2b

from policies.checkpoint import Checkpoint, Decision
from policies.notes import Note, notes_in
from policies.settings import NoteTaking
from policies.state.environment import environment
from policies.state.issues import open_issues
from policies.state.merging import LONGEST, MOST_LEARNINGS, add_decisions
from policies.state.said import statements
from policies.text.gist import shorten
from policies.text.literals import normal
from policies.text.segments import Readings, Source
from policies.todos import subtasks_of

MOST_NOTES = 10
MARKS = 4


def read_state(
    sources: Sequence[Source],
    *,
    goal: str,
    previous: Checkpoint | None = None,
    tools: NoteTaking,
    readings: Readings | None = None,
) -> Checkpoint:
    """The state of a task after these messages; of messages that ``previous`` has read already nothing is read again.

    Identifiers are not read here: they are what an extract finds most telling.
    """
    base = previous or Checkpoint()
    until = known_until(sources, base.marks)
    new = [s for s in sources if s.position > until]
    task = base.goal or goal or next((s.text for s in sources if s.is_users), "")
    before = [] if base.goal or any(s.text == task for s in new) else [Source(-1, "user", task)]
    notes = notes_in(new, tools)
    decided = [Decision(shorten(n.text, LONGEST)) for n in notes if n.category == "decisions"]
    return base.advance(
        goal=task,
        constraints=statements([*before, *new], goal=task, known=base.constraints, readings=readings or Readings()),
        subtasks=subtasks_of(new, tools, known=base.subtasks),
        decisions=add_decisions(base.decisions, decided),
        open_issues=open_issues(new, known=base.open_issues),
        environment=environment(new, known=base.environment),
        learnings=_newest(base.learnings, [n.text for n in notes if n.category == "learnings"], most=MOST_LEARNINGS),
        notes=_newest(base.notes, [f"{n.category}: {n.text}" for n in notes if _is_other(n)], most=MOST_NOTES),
        marks=_marks(sources, base.marks, until=until),
    )


def _is_other(note: Note) -> bool:
    """Whether a note has no field of its own: lists of what is to do are the subtasks."""
    return note.category not in {"task_progress", "decisions", "learnings"}


def _newest(known: Sequence[str], texts: Sequence[str], *, most: int) -> tuple[str, ...]:
    board = {normal(text): text for text in known}
    for text in texts:
        board.setdefault(normal(text), shorten(text, LONGEST))
    return tuple(board.values())[-most:]


def known_until(sources: Sequence[Source], marks: Sequence[str]) -> int:
    """The highest position that a state with these marks has read; -1 where it read another history."""
    at = {s.position: s for s in sources}
    told = [(int(p), digest) for p, _, digest in (m.partition(":") for m in marks) if p.isdigit()]
    agree = [p for p, digest in told if p in at and _digest(at[p]) == digest]
    differ = [p for p, digest in told if p in at and _digest(at[p]) != digest]
    if not agree:
        return -1
    return max([p for p in agree if p < min(differ)], default=-1) if differ else max(p for p, _ in told)


def _digest(source: Source) -> str:
    said = f"{source.role}\0{source.tool}\0{source.text}"
    return blake2b(said.encode(errors="replace"), digest_size=4).hexdigest()


def _marks(sources: Sequence[Source], marks: Sequence[str], *, until: int) -> tuple[str, ...]:
    """A few of the messages that have been read by now: the first ones, some between, and the newest last."""
    if not sources or (until >= 0 and sources[-1].position <= until):
        return tuple(marks)
    step = max(1, len(sources) // MARKS)
    chosen = {*range(min(MARKS, len(sources))), *range(0, len(sources), step)}
    chosen |= set(range(max(0, len(sources) - MARKS), len(sources)))
    own = {sources[i].position: f"{sources[i].position}:{_digest(sources[i])}" for i in chosen}
    kept = {int(m.partition(":")[0]): m for m in marks if until >= 0 and m.partition(":")[0].isdigit()}
    both = {p: m for p, m in kept.items() if p <= until} | own
    order = sorted(both)
    few = order if len(order) <= 4 * MARKS else [*order[: 2 * MARKS], *order[-2 * MARKS :]]
    return tuple(both[p] for p in few)
