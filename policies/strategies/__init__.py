"""One file per strategy. A strategy takes a draft and the bounds of the request, and gives the next draft.

Strategies know nothing of one another; the cascade puts them in order.
"""
