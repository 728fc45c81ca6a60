"""Summaries in words: asking a model for them, judging what it says, and binding it to who said
what.
"""
