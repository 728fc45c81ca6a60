"""An operator's own code, and the process that a function runs in."""
