"""Summaries in words: requesting them from a model, judging its replies, and attributing them to
speakers.
"""
