"""Talking to upstreams: sending, and telling what their errors mean."""
