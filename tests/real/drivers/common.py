"""What the drivers share: the task, the tool's schema, and how they report."""

import json
import os
from typing import Any

SYSTEM = os.environ.get("SYSTEM") or "You are a careful agent. Use the tool for every step."
TASK = os.environ.get("TASK") or "Run all steps, one after the other. The code word is PLUM-77. [[run]]"
GREETING = "Say hello. [[say]]"
AGAIN = "And now say hello once more. [[say]]"
PARAMETERS: Any = {"type": "object", "properties": {"step": {"type": "string"}}, "required": ["step"]}
DESCRIPTION = "Run one step."


def report(**found: object) -> None:
    """The last line of what a driver prints."""
    print(json.dumps(found))
