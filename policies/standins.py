"""What stands where a message's content was, in the three ways that a policy may ask for.

========  ==================================================================================
finding   tool, what it was asked, what it found in a line, and where the full text is
marker    one constant text for every result
none      the shortest text that every upstream accepts
========  ==================================================================================

The message stays in any case, with its role and the id of the call that it answers.
"""

from collections.abc import Mapping

from policies.bounds import Bounds
from policies.messages import ToolCall
from policies.text.gist import placeholder

NOTHING = "-"


def standin(bounds: Bounds, index: int, calls: Mapping[int, ToolCall]) -> str:
    """The text for message ``index``; ``calls`` are the calls that results answer, by the result's index."""
    settings = bounds.settings
    if settings.placeholder == "marker":
        return settings.marker
    if settings.placeholder == "none":
        return NOTHING
    message = bounds.transcript.messages[index]
    if not message.is_result:
        return f"[weir: {message.role} message of {message.tokens} tokens removed; archived as {message.ref}]"
    call = calls.get(index)
    return placeholder(
        bounds.transcript.read(index).text,
        tool=call.name if call else "tool",
        arguments=call.arguments if call else "",
        ref=message.ref,
        max_tokens=settings.placeholder_tokens,
        counter=bounds.counter,
    )
