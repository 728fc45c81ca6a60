"""The model's calls of the recall tool, told apart from those of the client's own tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from policies.clipping import TEXT_OF
from proxy.wire.raw import write_value

LONGEST_QUERY = 2_000
ECHOED = ("id", "type", "function", "extra_content", "provider_specific_fields")
NOT_SENT_BACK = frozenset({"tool_calls", "function_call", "role", "content"})


@dataclass(frozen=True, slots=True)
class RecallCall:
    """One call: what to search for, or what to read from which byte on; ``problem`` says what is wrong with it."""

    id: str
    query: str = ""
    ref: str = ""
    cursor: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant message with calls of the recall tool: the message as it goes back upstream, and those calls.

    ``text`` is what it says to the client besides; ``own`` says whether it calls the client's tools too.
    """

    message: Mapping[str, Any]
    calls: tuple[RecallCall, ...]
    text: str = ""
    own: bool = False


def name_of(call: object) -> str:
    """The name of the function that a tool call is for; empty where it does not say."""
    inner = call.get("function") if isinstance(call, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else ""


def turn_of(message: Mapping[str, Any], name: str) -> Turn | None:
    """The turn that an assistant message makes; None if it does not call the tool of this name.

    Only the calls of that tool go back: the model asks for the client's tools anew once it has read the answer. What
    providers want back with a call (thinking, signatures) goes with it.
    """
    listed = message.get("tool_calls")
    calls: Sequence[object] = listed if isinstance(listed, list) else ()
    mine = [call for call in calls if isinstance(call, Mapping) and name_of(call) == name]
    if not mine:
        return None
    content = message.get("content")
    kept = {k: v for k, v in message.items() if k not in NOT_SENT_BACK and v not in (None, "", [], {})}
    echoed = [{k: call[k] for k in ECHOED if call.get(k) is not None} for call in mine]
    for number, call in enumerate(echoed):
        if not isinstance(call.get("id"), str) or not call["id"]:
            call["id"] = f"call_recall_{number}"
        call.setdefault("type", "function")
        call["function"] = dict(call["function"])
        if not isinstance(call["function"].get("arguments"), str):
            call["function"]["arguments"] = write_value(call["function"].get("arguments") or {}).decode()
    return Turn(
        message={"role": "assistant", "content": content, **kept, "tool_calls": echoed},
        calls=tuple(read_call(call) for call in echoed),
        text=content if isinstance(content, str) else "",
        own=len(mine) < len(calls),
    )


def read_call(call: Mapping[str, Any]) -> RecallCall:
    """What one call asks for. Models send numbers as text, refs with ``.txt`` and nothing where they mean nothing."""
    identity = str(call.get("id", ""))
    try:
        given = msgspec.json.decode(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        return RecallCall(identity, problem="The arguments are not JSON.")
    if not isinstance(given, dict):
        return RecallCall(identity, problem="The arguments are not an object.")
    query, ref = given.get("query"), given.get("ref")
    query = query.strip()[:LONGEST_QUERY] if isinstance(query, str) else ""
    ref = ref.strip().removesuffix(TEXT_OF)[:64] if isinstance(ref, str) else ""
    if not query and not ref:
        return RecallCall(identity, problem="Give query or ref.")
    return RecallCall(identity, query=query, ref=ref, cursor=_cursor(given.get("cursor")))


def _cursor(given: object) -> int:
    if isinstance(given, str) and given.strip().isascii() and given.strip().isdigit():
        given = int(given.strip()[:15])
    return given if isinstance(given, int) and 0 < given < 1 << 53 else 0


def without_calls(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An assistant message without its calls of the tool of this name."""
    calls = [call for call in message.get("tool_calls") or () if name_of(call) != name]
    kept = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**kept, "tool_calls": calls} if calls else kept
