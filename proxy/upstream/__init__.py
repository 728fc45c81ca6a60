"""Talking to upstreams: sending, and classifying their errors."""
