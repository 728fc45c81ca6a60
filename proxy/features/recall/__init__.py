"""The way back for what was removed: a tool that Weir answers itself, and texts that it brings back
automatically.

Nothing here knows of the planner or of a route: the exchange passes in what is needed.
"""
