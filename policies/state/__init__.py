"""The structured state of a task: read from messages by code, merged with what a model adds, and its milestones."""

from policies.state.task import Proposal, known_until, merge_states, read_state

__all__ = ["Proposal", "known_until", "merge_states", "read_state"]
