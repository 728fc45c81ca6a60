"""The state of a task: the checkpoint that holds it, the notes that are taken, and how both are read from messages."""

from policies.memory.checkpoint import Checkpoint, InvalidCheckpoint
from policies.memory.notes import (
    CATEGORIES,
    IMPORTANCE,
    category_of,
    flaw,
    is_due,
    notes_in,
    read_notes,
    render_notes,
)
from policies.memory.state import (
    goal_of,
    known_until,
    merge_states,
    milestone,
    milestone_of,
    notes_of,
    previous_state,
    read_state,
    state_of,
    wants_notes,
    write_notes,
)

__all__ = [
    "CATEGORIES",
    "IMPORTANCE",
    "Checkpoint",
    "InvalidCheckpoint",
    "category_of",
    "flaw",
    "goal_of",
    "is_due",
    "known_until",
    "merge_states",
    "milestone",
    "milestone_of",
    "notes_in",
    "notes_of",
    "previous_state",
    "read_notes",
    "read_state",
    "render_notes",
    "state_of",
    "wants_notes",
    "write_notes",
]
