"""What of a conversation is worth least: blocks, scorers, and the choice of what goes; who used a result."""
