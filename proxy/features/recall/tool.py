"""The recall tool of chat completions: its definition, when a request carries it, and the model's
calls of it.

Other endpoints have the MCP server (:mod:`proxy.features.mcp`).

The definition is constant and follows the client's own tools, so that after the batch that brings
it every request of the conversation begins alike.

What the client sees of one round's stream: everything but the recall tool's calls, and no end
before the last round.

======================================  ==========================================================
event                                   what becomes of it
======================================  ==========================================================
first round, before any recall call     goes on byte for byte
a delta of a recall call                is withheld, and nothing else of its chunk
a call of the client's own tool         after a recall call is withheld with it, to be requested anew;
                                        before one it has gone on already: then the recall call is dropped
finish, usage and ``[DONE]``            withheld where another round follows
later rounds                            in the first round's name, without a second role, usage added up
======================================  ==========================================================
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from policies.limits import RECALL_TOOL
from policies.settings import ContextSettings
from policies.tokens import TEXT_OF, TokenCounter
from proxy.wire.codec import ClientRequest, array_of, tool_definitions
from proxy.wire.counting import count_tools
from proxy.wire.raw import (
    DONE,
    EventFrame,
    Frames,
    Raw,
    read_value,
    replace_fields,
    split_array,
    split_object,
    unnamed_event,
    write_value,
)

DESCRIPTION = (
    "Brings back what was removed from this conversation. query searches it; ref reads one text in"
    " full, cursor reads on."
)
MAX_TOOLS = 128  # what OpenAI takes


class Offer(msgspec.Struct, frozen=True):
    """The tool as one request carries it; ``tokens`` (uncalibrated) are what its definition adds to
    that.
    """

    name: str
    definition: bytes
    tokens: int


def definition_of(name: str) -> dict[str, object]:
    arguments = {
        "query": {"type": "string", "description": "words or identifiers"},
        "ref": {"type": "string"},
        "cursor": {"type": "integer"},
    }
    function = {
        "name": name,
        "description": DESCRIPTION,
        "parameters": {"type": "object", "properties": arguments},
    }
    return {"type": "function", "function": function}


def definition_tokens(
    definition: Mapping[str, object], counter: TokenCounter, *, model: str, alone: bool
) -> int:
    one = count_tools([definition], None, None, counter, model=model)
    return (
        one
        if alone
        else count_tools([definition, definition], None, None, counter, model=model) - one
    )


def offer_for(
    request: ClientRequest, settings: ContextSettings, counter: TokenCounter
) -> Offer | None:
    """The tool for this request; None where the policy has none or the request leaves no place for
    it.

    There is none next to a client's tool of the same name, next to legacy ``functions``, for
    several answers at once, and where the client has no tools and rules out that one is called. A
    ``tool_choice`` that names another tool keeps the model from calling this one; its definition
    stays for the prefix.
    """
    if not settings.recall.tool or settings.observes or "functions" in request.fields:
        return None
    several = request.value("n")
    choice = request.value("tool_choice")
    own = _own_tools(request)
    if own is None or len(own) >= MAX_TOOLS or (several is not None and several != 1):
        return None
    if not own and (choice.get("type") if isinstance(choice, dict) else choice) not in (
        None,
        "auto",
    ):
        return None
    if own and RECALL_TOOL in tool_definitions(request):
        return None
    definition = definition_of(RECALL_TOOL)
    tokens = definition_tokens(definition, counter, model=request.model, alone=not own)
    return Offer(RECALL_TOOL, write_value(definition), tokens)


def with_more(body: bytes, array: str, more: Sequence[bytes]) -> bytes:
    """The body with more elements at the end of one of its arrays."""
    fields = split_object(body)
    raw = fields.get(array, b"null")
    new = array_of(more)
    if split_array(raw):
        new = bytes(raw).rstrip().removesuffix(b"]") + b"," + new[1:]
    return replace_fields(body, fields, {array: new})


def _own_tools(request: ClientRequest) -> Sequence[Raw] | None:
    raw = request.fields.get("tools")
    if raw is None or read_value(raw) is None:
        return ()
    return split_array(raw)


MAX_QUERY_LEN = 2_000


class RecallCall(msgspec.Struct, frozen=True):
    id: str
    query: str = ""
    ref: str = ""
    cursor: int = 0
    problem: str = ""


class RecallTurn(msgspec.Struct, frozen=True):
    """An answer with calls of the recall tool: those calls, and the message that goes back upstream
    with them.
    """

    calls: tuple[RecallCall, ...]
    message: Mapping[str, Any]

    def sent(self, results: Sequence[str]) -> list[Mapping[str, Any]]:
        """The messages that follow the client's: this one, and a result a call."""
        answers = zip(self.calls, results, strict=True)
        return [
            self.message,
            *({"role": "tool", "tool_call_id": call.id, "content": text} for call, text in answers),
        ]


def read_call(identity: str, arguments: str) -> RecallCall:
    """What one call requests. Models send numbers as text, refs with ``.txt`` and nothing where
    they mean nothing.
    """
    try:
        given = msgspec.json.decode(arguments or "{}")
    except (ValueError, RecursionError):
        return RecallCall(identity, problem="The arguments are not JSON.")
    if not isinstance(given, dict):
        return RecallCall(identity, problem="The arguments are not an object.")
    call = call_of(given, identity)
    return call if call.query or call.ref else RecallCall(identity, problem="Give query or ref.")


def call_of(given: Mapping[str, Any], identity: str = "") -> RecallCall:
    """The call that these arguments make, whatever else is in them."""
    query = given.get("query")
    ref = given.get("ref")
    query = query.strip()[:MAX_QUERY_LEN] if isinstance(query, str) else ""
    ref = ref.strip().removesuffix(TEXT_OF)[:64] if isinstance(ref, str) else ""
    return RecallCall(identity, query=query, ref=ref, cursor=_cursor(given.get("cursor")))


def _cursor(given: object) -> int:
    if isinstance(given, str) and given.strip().isascii() and given.strip().isdigit():
        given = int(given.strip()[:15])
    return given if type(given) is int and 0 < given < 1 << 53 else 0


def decoded(data: bytes) -> dict[str, Any] | None:
    value = read_value(data)
    return value if isinstance(value, dict) else None


def added_up(usage: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last round's usage with the tokens that all rounds generated."""
    words = "completion_tokens"
    details_name = "completion_tokens_details"
    result = dict(usage)
    result[words] = _sum(words, (*before, usage))
    details = [d for each in (*before, usage) if isinstance(d := each.get(details_name), dict)]
    if details:
        names = dict.fromkeys(name for each in details for name in each)
        summed = {
            n: _sum(n, details)
            for n in names
            if any(isinstance(each.get(n), int) for each in details)
        }
        result[details_name] = {**details[-1], **summed}
    result["total_tokens"] = _sum("prompt_tokens", (usage,)) + result[words]
    return result


def _sum(name: str, values: Sequence[Mapping[str, Any]]) -> int:
    return sum(value for each in values if isinstance(value := each.get(name), int))


IDENTITY = ("id", "created", "model", "system_fingerprint")
TOOL_CALLS = b'"tool_calls"'
APART = "\n\n"
MAX_KEPT = 8 * 1024 * 1024  # bytes of a round that are kept for the message that goes back
JOINED = ("content", "reasoning_content", "reasoning")
ECHOED = ("id", "type", "function", "extra_content", "provider_specific_fields")
NOT_SENT_BACK = frozenset({"tool_calls", "function_call", "role", "content"})


def name_of(call: object) -> str:
    inner = call.get("function") if isinstance(call, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else ""


def turn_of(message: Mapping[str, Any], name: str) -> RecallTurn | None:
    listed = message.get("tool_calls")
    calls: Sequence[object] = listed if isinstance(listed, list) else ()
    mine = [call for call in calls if isinstance(call, Mapping) and name_of(call) == name]
    if not mine:
        return None
    content = message.get("content")
    kept = {
        k: v for k, v in message.items() if k not in NOT_SENT_BACK and v not in (None, "", [], {})
    }
    echoed = [{k: call[k] for k in ECHOED if call.get(k) is not None} for call in mine]
    for number, call in enumerate(echoed):
        if not isinstance(call.get("id"), str) or not call["id"]:
            call["id"] = f"call_recall_{number}"
        call.setdefault("type", "function")
        call["function"] = dict(call["function"])
        if not isinstance(call["function"].get("arguments"), str):
            call["function"]["arguments"] = write_value(
                call["function"].get("arguments") or {}
            ).decode()
    message = {"role": "assistant", "content": content, **kept, "tool_calls": echoed}
    read = (read_call(call["id"], call["function"]["arguments"]) for call in echoed)
    return RecallTurn(tuple(read), message)


def without_calls(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    calls = [call for call in message.get("tool_calls") or () if name_of(call) != name]
    kept = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**kept, "tool_calls": calls} if calls else kept


def answer_in(body: bytes) -> dict[str, Any] | None:
    """A whole answer with one choice; None for anything else."""
    value = decoded(body)
    choices = value.get("choices") if value is not None else None
    first = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return value if isinstance(first, dict) and isinstance(first.get("message"), dict) else None


def joined(answers: Sequence[Mapping[str, Any]], name: str, *, with_text: bool) -> dict[str, Any]:
    """The last answer without calls of the tool, with what the ones before it said (``with_text``)
    and used.
    """
    *before, value = answers
    choice = dict(value["choices"][0])
    said = dict(choice["message"])
    message = without_calls(said, name)
    if (
        "tool_calls" in said
        and "tool_calls" not in message
        and choice.get("finish_reason") == "tool_calls"
    ):
        choice["finish_reason"] = "stop"
        message["content"] = message.get("content") or ""
    for key in JOINED if with_text else ():
        earlier = [each["choices"][0]["message"].get(key) for each in before]
        texts = [
            text for text in (*earlier, message.get(key)) if isinstance(text, str) and text.strip()
        ]
        if len(texts) > 1 or (texts and not message.get(key)):
            message[key] = APART.join(texts)
    final = {**value, "choices": [{**choice, "message": message}]}
    usages = [each["usage"] for each in before if isinstance(each.get("usage"), dict)]
    if usages and isinstance(value.get("usage"), dict):
        final["usage"] = added_up(value["usage"], usages)
    return final


@dataclass(slots=True)
class CallNumbers:
    _ids: dict[str, int] = field(default_factory=dict)
    _newest: int = -1

    def of(self, call: Mapping[str, Any]) -> int:
        number = call.get("index")
        identity = call.get("id")
        if not isinstance(number, int):
            known = (
                self._ids.get(identity) if isinstance(identity, str) and identity else self._newest
            )
            number = self._newest + 1 if known is None or known < 0 else known
        if isinstance(identity, str) and identity:
            self._ids[identity] = number
        self._newest = number
        return number


class Earlier(msgspec.Struct, frozen=True):
    """What earlier rounds pass on: their identity, whether they said something, and their usage."""

    identity: Mapping[str, Any]
    spoke: bool = False
    usages: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class RoundView:
    """One round of a streamed answer. Feed it the stream; it gives the bytes for the client.

    ``earlier`` is what the rounds before it leave, None in the first one. ``may_recall`` is False
    where a call is not answered any more, and has to vanish. ``recalling`` says that another round
    follows, ``visible`` that the client has got to see something, ``dropped`` that a call of the
    recall tool was left out.
    """

    name: str
    earlier: Earlier | None
    may_recall: bool
    recalling: bool = False
    visible: bool = False
    dropped: bool = False
    usage: Mapping[str, Any] | None = None
    _frames: Frames = field(default_factory=Frames)
    _kept: list[bytes] = field(default_factory=list)
    _size: int = 0
    _names: dict[int, str] = field(default_factory=dict)
    _numbers: CallNumbers = field(default_factory=CallNumbers)
    _own: list[int] = field(default_factory=list)
    _apart: bool = False

    def feed(self, chunk: bytes) -> bytes:
        return b"".join(map(self._pass, self._frames.feed(chunk)))

    def end(self) -> bytes:
        return self._pass(self._frames.rest())

    def turn(self) -> RecallTurn | None:
        return turn_of(assembled(self._chunks()), self.name)

    def leaves(self) -> Earlier:
        chunks = self._chunks()
        first = self.earlier.identity if self.earlier is not None else _identity(chunks)
        before = self.earlier.usages if self.earlier is not None else ()
        said = assembled(chunks).get("content")
        spoke = (isinstance(said, str) and bool(said.strip())) or (
            self.earlier is not None and self.earlier.spoke
        )
        return Earlier(first, spoke, before if self.usage is None else (*before, self.usage))

    def _chunks(self) -> list[dict[str, Any]]:
        return [value for data in self._kept if (value := decoded(data)) is not None]

    def _pass(self, frame: EventFrame) -> bytes:
        if not frame.events:
            return frame.raw
        for event in frame.events:
            if self._size < MAX_KEPT:
                self._kept.append(event.data)
                self._size += len(event.data)
        if (
            self.earlier is None
            and not self._names
            and not any(TOOL_CALLS in e.data for e in frame.events)
        ):
            self.visible = self.visible or any(_says(e.data) for e in frame.events)
            return frame.raw
        return b"".join(self._changed(event.data, frame) for event in frame.events)

    def _changed(self, data: bytes, frame: EventFrame) -> bytes:
        raw = frame.raw if len(frame.events) == 1 else unnamed_event(data)
        if data == DONE:
            return b"" if self.recalling else raw
        value = decoded(data)
        if value is None or not isinstance(value.get("choices"), list):
            return raw
        shown = self._chunk(value)
        if shown is None:
            return b""
        self.visible = self.visible or any(_is_said(choice) for choice in shown["choices"])
        return raw if shown is value else unnamed_event(write_value(shown))

    def _chunk(self, value: dict[str, Any]) -> dict[str, Any] | None:
        usage = value.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        choices = [self._choice(choice) for choice in value["choices"]]
        shown = value
        if any(new is not old for new, old in zip(choices, value["choices"], strict=True)):
            kept = [choice for choice in choices if choice is not None]
            if not kept and (self.recalling or not isinstance(usage, dict)):
                return None
            shown = {**value, "choices": kept}
        if isinstance(usage, dict):
            if self.recalling and not shown["choices"]:
                return None
            if self.recalling:
                shown = {k: v for k, v in shown.items() if k != "usage"}
            elif self.earlier is not None and self.earlier.usages:
                shown = {**shown, "usage": added_up(usage, self.earlier.usages)}
        if self.earlier is not None:
            named = {k: v for k, v in self.earlier.identity.items() if k in shown}
            shown = {**shown, **named}
        return shown

    def _choice(self, choice: Any) -> Any:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            return choice
        new = self._without_calls(delta)
        if self.earlier is not None:
            new = self._continued(new, self.earlier)
        finish = choice.get("finish_reason")
        if self.recalling:
            finish = None
        elif finish == "tool_calls" and self.dropped and not self._own:
            finish = "stop"
        if new is delta and finish == choice.get("finish_reason"):
            return choice
        if finish is None and not any(v not in (None, "", [], {}) for v in new.values()):
            return None
        return {**choice, "delta": new, "finish_reason": finish}

    def _without_calls(self, delta: dict[str, Any]) -> dict[str, Any]:
        listed = delta.get("tool_calls")
        if not isinstance(listed, list) or not listed:
            return delta
        shown = [self._call(call) for call in listed]
        if all(new is old for new, old in zip(shown, listed, strict=True)):
            return delta
        kept = [call for call in shown if call is not None]
        rest = {k: v for k, v in delta.items() if k != "tool_calls"}
        return {**rest, "tool_calls": kept} if kept else rest

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        number = self._numbers.of(call)
        name = self._names.get(number) or name_of(call)
        self._names[number] = name
        if name == self.name:
            self.dropped = True
            self.recalling = self.recalling or (self.may_recall and not self._own)
            return None
        if self.recalling:
            return None
        if number not in self._own:
            self._own.append(number)
        place = self._own.index(number)
        return call if place == call.get("index", place) else {**call, "index": place}

    def _continued(self, delta: dict[str, Any], earlier: Earlier) -> dict[str, Any]:
        new = {k: v for k, v in delta.items() if k != "role"} if "role" in delta else delta
        text = new.get("content")
        if isinstance(text, str) and text and not self._apart:
            self._apart = True
            if earlier.spoke:
                new = {**new, "content": APART + text.lstrip()}
        return new


def assembled(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The assistant message that the chunks of a stream make up."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    numbers = CallNumbers()
    for chunk in chunks:
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                continue
            for key, value in delta.items():
                if key == "tool_calls" and isinstance(value, list):
                    for call in value:
                        if isinstance(call, dict):
                            _merge(calls.setdefault(numbers.of(call), {}), call)
                elif key != "role":
                    _add(message, key, value)
    if calls:
        message["tool_calls"] = [calls[number] for number in sorted(calls)]
    return message


def _merge(into: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for key, value in delta.items():
        if key == "function" and isinstance(value, dict):
            inner = into.setdefault("function", {})
            inner["name"] = inner.get("name") or value.get("name") or ""
            if isinstance(value.get("arguments"), str):
                inner["arguments"] = inner.get("arguments", "") + value["arguments"]
        elif value not in (None, ""):
            into[key] = value


def _add(message: dict[str, Any], key: str, value: Any) -> None:
    old = message.get(key)
    if isinstance(value, str) and isinstance(old, str):
        message[key] = f"{old}{value}"
    elif isinstance(value, list) and isinstance(old, list):
        message[key] = [*old, *value]
    elif value is not None:
        message[key] = value


def _identity(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = next(
        (chunk for chunk in chunks if chunk.get("id") and chunk.get("choices")),
        chunks[0] if chunks else {},
    )
    return {key: first[key] for key in IDENTITY if key in first}


def _says(data: bytes) -> bool:
    value = decoded(data)
    if value is None:
        return False
    choices = value.get("choices")
    return bool(value.get("error")) or any(
        _is_said(c) for c in (choices if isinstance(choices, list) else ())
    )


def _is_said(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    said = isinstance(delta, dict) and any(v for k, v in delta.items() if k != "role")
    return said or choice.get("finish_reason") is not None
