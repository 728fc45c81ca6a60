"""What is watched while requests go by.

====================  ====================================================================================
:mod:`.alerts`        who is told when something is wrong, and how often
:mod:`.health`        how a conversation fares: its samples, and what is news
:mod:`.caching`       what providers' prompt caches gave, and what it cost and saved
:mod:`.evaluation`    how well compactions are kept, judged now and then
====================  ====================================================================================
"""
