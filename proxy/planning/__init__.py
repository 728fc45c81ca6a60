"""What becomes of a request's messages: recognised, planned, and after the answer prepared for the
next batch.
"""
