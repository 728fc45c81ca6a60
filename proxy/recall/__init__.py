"""The way back for what was removed: a tool that Weir answers itself, and texts that it brings back unasked.

======================  ==================================================================================
:mod:`.tool`            the tool's definition, when a request carries it, and the model's calls of it; how an answer of
                        chat calls it, and what of each round's stream the client sees
:mod:`.archive`         what is out of the window of one conversation, by words, by likeness and by ref; which of it a
                        query is about, and what the model is told within the room that is left
:mod:`.elements`        the same where an answer is a list
:mod:`.rounds`          asking again with what was recalled, as often as the policy allows, also inside one stream
======================  ==================================================================================

Nothing here knows of the planner or of a route: the exchange hands in what is needed.
"""
