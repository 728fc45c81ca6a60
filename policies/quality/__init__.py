"""How well a conversation is kept: its health, what an operator is advised, and what a compaction left of it.

Two measures of what is left stand side by side. Coverage needs no model: which facts, identifiers and rules stand in
it, and which can be fetched back. Fidelity asks a model the same questions of both and has each pair of answers judged.
"""
