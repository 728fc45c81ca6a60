"""An operator's own function that decides which messages stay, and the process that it runs in."""
