"""What the planner makes of whole conversations, pinned byte for byte."""
