"""The structured state of a task: read from messages by code, merged with what a model adds, and its milestones."""

from policies.state.merging import merge_states
from policies.state.task import known_until, read_state

__all__ = ["known_until", "merge_states", "read_state"]
