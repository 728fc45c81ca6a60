"""Doing what the pure half requests: summaries, likeness, and whatever else runs during or after a
request.
"""
