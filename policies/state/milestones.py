"""Moments worth saving the state of a task: a list has something newly done, a note decides something, a call fails."""

from collections.abc import Sequence

from policies.checkpoint import Checkpoint, Status
from policies.notes import notes_in
from policies.settings import NoteTaking
from policies.state.issues import open_issues
from policies.state.merging import alike
from policies.text.literals import normal
from policies.text.segments import Source
from policies.todos import subtasks_of

SUBTASK_DONE, DECISION, BLOCKER = "subtask_done", "decision", "blocker"


def milestone(sources_new: Sequence[Source], *, state: Checkpoint | None, tools: NoteTaking) -> str | None:
    """``subtask_done``, ``decision`` or ``blocker`` where these messages hold one that ``state`` does not."""
    known = state or Checkpoint()
    done = {normal(s.text) for s in known.with_status(Status.DONE)}
    listed = subtasks_of([s for s in sources_new if s.role != "user"], tools, known=known.subtasks)
    if any(s.status is Status.DONE and normal(s.text) not in done for s in listed):
        return SUBTASK_DONE
    decided = [n.text for n in notes_in(sources_new, tools) if n.category == "decisions"]
    if any(not any(alike(text, d.text) for d in known.decisions) for text in decided):
        return DECISION
    failed = open_issues(sources_new, known=known.open_issues)
    return BLOCKER if set(failed) - set(known.open_issues) else None
