"""The tool that a request carries once something was removed from its conversation, and the bytes that carry it.

The definition is constant and stands behind the client's own tools, so that after the batch that brings it every
request of the conversation begins alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from policies import ContextSettings, TokenCounter
from proxy.wire.chat import ChatRequest, count_tools, tool_definitions
from proxy.wire.raw import Raw, read_value, replace_fields, split_array, split_object, write_value

DESCRIPTION = (
    "Brings back what was removed from this conversation. query searches it; ref reads one text in full, "
    "cursor reads on."
)
MOST_TOOLS = 128  # what OpenAI takes


@dataclass(frozen=True, slots=True)
class Offer:
    """The tool as one request carries it; ``tokens`` (uncalibrated) are what its definition adds to that."""

    name: str
    definition: bytes
    tokens: int


def definition_of(name: str) -> dict[str, object]:
    """The tool's definition in OpenAI's form."""
    arguments = {
        "query": {"type": "string", "description": "words or identifiers"},
        "ref": {"type": "string"},
        "cursor": {"type": "integer"},
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": DESCRIPTION,
            "parameters": {"type": "object", "properties": arguments},
        },
    }


def definition_tokens(name: str, counter: TokenCounter, *, model: str, alone: bool) -> int:
    """Uncalibrated tokens that the definition adds to a request; ``alone`` where that has no other tool."""
    definition = definition_of(name)
    one = count_tools([definition], None, None, counter, model=model)
    return one if alone else count_tools([definition, definition], None, None, counter, model=model) - one


def offer_for(request: ChatRequest, settings: ContextSettings, counter: TokenCounter) -> Offer | None:
    """The tool for this request; None where the policy has none or the request leaves no place for it.

    There is none beside a tool of the client's that has its name, beside legacy ``functions``, for several answers
    at once, and where the client has no tools and rules out that one is called. A ``tool_choice`` that names another
    tool keeps the model from calling this one; its definition stays for the prefix.
    """
    recall = settings.recall
    if not recall.tool or settings.observes or "functions" in request.fields:
        return None
    several, choice = request.value("n"), request.value("tool_choice")
    own = _own_tools(request)
    if own is None or len(own) >= MOST_TOOLS or (several is not None and several != 1):
        return None
    if not own and choice not in (None, "auto"):
        return None
    if own and recall.name in tool_definitions(request):
        return None
    definition = definition_of(recall.name)
    tokens = definition_tokens(recall.name, counter, model=request.model, alone=not own)
    return Offer(recall.name, write_value(definition), tokens)


def with_tool(body: bytes, definition: bytes) -> bytes:
    """``body`` with one more definition behind its tools, everything else byte for byte."""
    fields = split_object(body)
    raw = fields.get("tools")
    own = split_array(raw) if raw is not None else None
    return replace_fields(body, fields, {"tools": _appended(raw, own, (definition,))})


def with_more_messages(body: bytes, messages: Sequence[bytes]) -> bytes:
    """``body`` with more messages behind its own, everything else byte for byte."""
    fields = split_object(body)
    raw = fields["messages"]
    return replace_fields(body, fields, {"messages": _appended(raw, split_array(raw), messages)})


def _appended(raw: Raw | None, own: Sequence[Raw] | None, more: Sequence[bytes]) -> bytes:
    if raw is None or not own:
        return b"[" + b",".join(more) + b"]"
    return bytes(raw).rstrip().removesuffix(b"]") + b"," + b",".join(more) + b"]"


def _own_tools(request: ChatRequest) -> Sequence[Raw] | None:
    """The client's definitions; empty for none, None for what is no array."""
    raw = request.fields.get("tools")
    if raw is None or read_value(raw) is None:
        return ()
    return split_array(raw)
