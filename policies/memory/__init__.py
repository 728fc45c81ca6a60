"""The state of a task: the checkpoint that holds it, the notes that are taken, and how both are
read from messages.
"""
