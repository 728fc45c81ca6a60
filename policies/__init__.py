"""The pure half of Weir: deciding what a request may carry. Standard library only; no
clock, no IO.
"""
