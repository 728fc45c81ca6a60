"""What a text says: segments, their terms, and the extract that is chosen among them. No language
is built in.
"""
