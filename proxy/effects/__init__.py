"""Doing what the pure half asks for: summaries, likeness, and whatever else goes on beside or after
a request.
"""
