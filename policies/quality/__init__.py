"""Advice on a policy, and two measures of what a compaction left: coverage, looked up by code, and
fidelity, judged by a model.
"""
