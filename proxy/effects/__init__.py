"""Doing what the pure half asks for: summaries, likeness, and whatever else goes on beside or after a request.

====================  ====================================================================================
:mod:`.perform`       running a flow, its questions answered one by one or side by side
:mod:`.summarizer`    asking a model for a summary: bounded, shared when identical, answered once and kept
:mod:`.allowance`     what summaries may take of a tenant's tokens and of a client's time, and what they took
:mod:`.cache`         what was answered, in memory and in the store
:mod:`.likeness`      how alike texts are
:mod:`.hooks`         an operator's plugins
:mod:`.background`    work that goes on after an answer
:mod:`.evictions`     how far a batch went and what it took out, for the audit
====================  ====================================================================================
"""
