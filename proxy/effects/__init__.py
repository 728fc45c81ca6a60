"""Doing what the pure half asks for: summaries, likeness, and whatever else goes on beside or after a request.

====================  ====================================================================================
:mod:`.perform`       running a flow, its questions answered one by one or side by side; how alike texts are
:mod:`.summarizer`    asking a model for a summary: bounded, shared when identical, answered once and kept
:mod:`.allowance`     what summaries may take of a tenant's tokens and of a client's time, and what they took
:mod:`.evictions`     how far a batch went and what it took out, for the audit
====================  ====================================================================================
"""
