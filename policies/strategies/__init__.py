"""What layers do, by the verb: clear, drop, compact, rewrite; and the way back, recall.

A strategy takes a draft and the bounds of the request, and gives the next draft. A policy's layers
put them in order.
"""
