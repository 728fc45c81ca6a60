"""The way back for what was removed: a tool that Weir answers itself, and texts that it brings back unasked.

======================  ==================================================================================
:mod:`.offer`           the tool's definition, and when a request carries it
:mod:`.calls`           the model's calls of it, told apart from the client's own
:mod:`.archive`         what is out of the window of one conversation, by words and by ref
:mod:`.ranking`         which of it a query is about, and the passages that say so
:mod:`.answering`       what the model is told, within the room that is left
:mod:`.rounds`          asking again with what was recalled, as often as the policy allows
:mod:`.whole`           the same for an answer that comes as a whole
:mod:`.filtering`       what of each round's stream the client sees
:mod:`.streaming`       the rounds inside one stream
:mod:`.automatic`       what the newest user message asks for, found without being asked
======================  ==================================================================================

Nothing here knows of the planner or of a route: the exchange hands in what is needed.
"""
