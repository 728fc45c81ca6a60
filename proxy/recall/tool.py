"""The recall tool: its definition, when a request carries it, and the model's calls of it.

The definition is constant and stands behind the client's own tools, so that after the batch that brings it every
request of the conversation begins alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from policies.settings import ContextSettings
from policies.tokens import TEXT_OF, TokenCounter
from proxy.wire.codec import CHAT, ClientRequest, Codec, tool_definitions
from proxy.wire.counting import count_tools
from proxy.wire.raw import EventFrame, Frames, Raw, read_value, replace_fields, split_array, split_object, write_value

DESCRIPTION = (
    "Brings back what was removed from this conversation. query searches it; ref reads one text in full, "
    "cursor reads on."
)
MAX_TOOLS = 128  # what OpenAI takes


@dataclass(frozen=True, slots=True)
class Offer:
    """The tool as one request carries it; ``tokens`` (uncalibrated) are what its definition adds to that."""

    name: str
    definition: bytes
    tokens: int


def definition_of(name: str, codec: Codec = CHAT) -> dict[str, object]:
    arguments = {
        "query": {"type": "string", "description": "words or identifiers"},
        "ref": {"type": "string"},
        "cursor": {"type": "integer"},
    }
    return codec.function(name, DESCRIPTION, {"type": "object", "properties": arguments})


def definition_tokens(definition: Mapping[str, object], counter: TokenCounter, *, model: str, alone: bool) -> int:
    one = count_tools([definition], None, None, counter, model=model)
    return one if alone else count_tools([definition, definition], None, None, counter, model=model) - one


def offer_for(request: ClientRequest, settings: ContextSettings, counter: TokenCounter) -> Offer | None:
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
    if own is None or len(own) >= MAX_TOOLS or (several is not None and several != 1):
        return None
    if not own and (choice.get("type") if isinstance(choice, dict) else choice) not in (None, "auto"):
        return None
    if own and recall.name in tool_definitions(request):
        return None
    definition = definition_of(recall.name, request.codec)
    tokens = definition_tokens(definition, counter, model=request.model, alone=not own)
    return Offer(recall.name, write_value(definition), tokens)


def with_tool(body: bytes, definition: bytes) -> bytes:
    fields = split_object(body)
    raw = fields.get("tools")
    own = split_array(raw) if raw is not None else None
    return replace_fields(body, fields, {"tools": _appended(raw, own, (definition,))})


def with_more_messages(body: bytes, messages: Sequence[bytes], array: str = CHAT.array) -> bytes:
    fields = split_object(body)
    raw = fields[array]
    return replace_fields(body, fields, {array: _appended(raw, split_array(raw), messages)})


def _appended(raw: Raw | None, own: Sequence[Raw] | None, more: Sequence[bytes]) -> bytes:
    if raw is None or not own:
        return b"[" + b",".join(more) + b"]"
    return bytes(raw).rstrip().removesuffix(b"]") + b"," + b",".join(more) + b"]"


def _own_tools(request: ClientRequest) -> Sequence[Raw] | None:
    raw = request.fields.get("tools")
    if raw is None or read_value(raw) is None:
        return ()
    return split_array(raw)


MAX_QUERY_LEN = 2_000


@dataclass(frozen=True, slots=True)
class RecallCall:
    id: str
    query: str = ""
    ref: str = ""
    cursor: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RecallTurn:
    """An answer with calls of the recall tool, as far as it goes back upstream, and those calls.

    ``shown`` is what the client has got of it, ``hidden`` the rest with the calls in it; of a chat all is hidden, since
    nothing of it is put back later.
    """

    calls: tuple[RecallCall, ...]
    hidden: tuple[Mapping[str, Any], ...]
    shown: tuple[Mapping[str, Any], ...] = ()


E = TypeVar("E")


@dataclass(slots=True)
class RoundView(ABC, Generic[E]):
    """One round of a streamed answer. Feed it the stream; it gives the bytes for the client.

    ``earlier`` is what the rounds before it leave, None in the first one. ``may_recall`` is False where a call is not
    answered any more, and has to vanish. ``recalling`` says that another round follows, ``visible`` that the client has
    got to see something, ``dropped`` that a call of the recall tool was left out.
    """

    name: str
    earlier: E | None
    may_recall: bool
    recalling: bool = False
    visible: bool = False
    dropped: bool = False
    usage: Mapping[str, Any] | None = None
    _frames: Frames = field(default_factory=Frames)

    def feed(self, chunk: bytes) -> bytes:
        return b"".join(map(self._pass, self._frames.feed(chunk)))

    def end(self) -> bytes:
        return self._pass(self._frames.rest())

    @abstractmethod
    def turn(self) -> RecallTurn | None: ...

    @abstractmethod
    def leaves(self) -> E: ...

    @abstractmethod
    def _pass(self, frame: EventFrame) -> bytes: ...


def read_call(identity: str, arguments: str) -> RecallCall:
    """What one call asks for. Models send numbers as text, refs with ``.txt`` and nothing where they mean nothing."""
    try:
        given = msgspec.json.decode(arguments or "{}")
    except (ValueError, RecursionError):
        return RecallCall(identity, problem="The arguments are not JSON.")
    if not isinstance(given, dict):
        return RecallCall(identity, problem="The arguments are not an object.")
    query, ref = given.get("query"), given.get("ref")
    query = query.strip()[:MAX_QUERY_LEN] if isinstance(query, str) else ""
    ref = ref.strip().removesuffix(TEXT_OF)[:64] if isinstance(ref, str) else ""
    if not query and not ref:
        return RecallCall(identity, problem="Give query or ref.")
    return RecallCall(identity, query=query, ref=ref, cursor=_cursor(given.get("cursor")))


def _cursor(given: object) -> int:
    if isinstance(given, str) and given.strip().isascii() and given.strip().isdigit():
        given = int(given.strip()[:15])
    return given if isinstance(given, int) and 0 < given < 1 << 53 else 0


def decoded(data: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def added_up(
    usage: Mapping[str, Any], before: Sequence[Mapping[str, Any]], *, kind: str = "completion", asked: str = "prompt"
) -> dict[str, Any]:
    result, words, details_name = dict(usage), f"{kind}_tokens", f"{kind}_tokens_details"
    result[words] = _sum(words, (*before, usage))
    details = [d for each in (*before, usage) if isinstance(d := each.get(details_name), dict)]
    if details:
        names = dict.fromkeys(name for each in details for name in each)
        summed = {n: _sum(n, details) for n in names if any(isinstance(each.get(n), int) for each in details)}
        result[details_name] = {**details[-1], **summed}
    if kind == "completion" or "total_tokens" in usage:
        result["total_tokens"] = _sum(f"{asked}_tokens", (usage,)) + result[words]
    return result


def _sum(name: str, values: Sequence[Mapping[str, Any]]) -> int:
    return sum(value for each in values if isinstance(value := each.get(name), int))
