"""What is watched while requests go by.

====================  ====================================================================================
:mod:`.health`        how a conversation fares, what of it is news, and who is told
:mod:`.caching`       what providers' prompt caches gave, and what it cost and saved
:mod:`.evaluation`    how well compactions are kept, judged now and then
====================  ====================================================================================
"""
