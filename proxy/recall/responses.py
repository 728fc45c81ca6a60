"""The tool's calls in OpenAI's Responses: items ``function_call``, answered by a ``function_call_output``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import ProxyError
from proxy.recall.elements import Before, Element, ListRecall, ListView, named_event
from proxy.recall.tool import RecallTurn
from proxy.wire.raw import write_value
from proxy.wire.responses import CALLS, RESPONSES, THOUGHTS

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesRecall(ListRecall):
    """The rounds of a response: items go back as they were given, reasoning and its ids with them.

    Where nothing is stored (``stateless``) reasoning without its encrypted content would not be found, and what was
    made with it not taken under its id ("Items are not persisted when `store` is set to false").
    """

    codec = RESPONSES
    array = "output"
    call = "function_call"
    call_id = "call_id"
    own = CALLS
    thoughts = THOUGHTS

    def __init__(self, *, joins: bool = True, stateless: bool = False) -> None:
        super().__init__(joins=joins)
        self.stateless = stateless

    def arguments(self, element: Element) -> str:
        given = element.get("arguments")
        return given if isinstance(given, str) else ""

    def outputs(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]:
        return [
            {"type": "function_call_output", "call_id": call.id, "output": text}
            for call, text in zip(turn.calls, told, strict=True)
        ]

    def sent(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]:
        items = (*turn.shown, *turn.hidden)
        if self.stateless and any(self.is_thought(item) and not item.get("encrypted_content") for item in items):
            items = tuple({k: v for k, v in i.items() if k != "id"} for i in items if not self.is_thought(i))
        return [*items, *self.outputs(turn, told)]

    def segment(self, elements: Sequence[Element]) -> bytes:
        return b",".join(map(write_value, elements))

    def ended(self, last: dict[str, Any], first: Element, *, dropped: bool) -> dict[str, Any]:
        del first, dropped
        return last

    def view(self, name: str, earlier: Before | None, *, may_recall: bool) -> "ResponsesView":
        return ResponsesView(self, name, earlier, may_recall, stateless=self.stateless)

    def refused(self, said: Element, earlier: Before | None) -> bytes:
        error = said.get("error")
        message = str(error.get("message") or "") if isinstance(error, dict) else str(error)
        return b"\n\n" + named_event(failed(message, earlier))

    def broken(self, error: ProxyError, earlier: Before | None) -> bytes:
        return b"\n\n" + named_event(failed(f"Connection lost, premature close: {error.message}", earlier))


def failed(message: str, earlier: Before | None) -> Element:
    left = earlier or Before()
    response = {
        "id": "",
        "object": "response",
        **left.began,
        "status": "failed",
        "error": {"code": "server_error", "message": message},
        "output": left.shown,
    }
    return {"type": "response.failed", "sequence_number": left.sequence or 0, "response": response}


@dataclass(slots=True)
class ResponsesView(ListView):
    stateless: bool = False

    def event(self, value: dict[str, Any]) -> Element | None:
        kind, response = value.get("type"), value.get("response")
        if isinstance(response, dict):
            shown = self._ended(value, response) if kind in ENDS else self._going_on(value, response)
        elif isinstance(value.get("output_index"), int):
            self._note(value)
            shown = self.placed(value, "output_index")
        else:
            shown = value
        return None if shown is None else self._numbered(shown)

    def _note(self, value: dict[str, Any]) -> None:
        number, item = value["output_index"], value.get("item")
        if value.get("type") == "response.output_item.added":
            self.begin(number, item)
        elif value.get("type") == "response.output_item.done" and isinstance(item, dict):
            if number not in self.elements:
                self.begin(number, item)
            self.elements[number] = item

    def _going_on(self, value: dict[str, Any], response: dict[str, Any]) -> dict[str, Any] | None:
        if self.earlier is not None:
            return None
        self.began = response
        return value

    def _ended(self, value: dict[str, Any], response: dict[str, Any]) -> dict[str, Any] | None:
        self.usage = usage = response.get("usage") if isinstance(response.get("usage"), dict) else None
        for number, item in enumerate(response.get("output") or ()):
            if isinstance(item, dict) and number in self.elements:
                self.elements[number] = item
        is_failure = value["type"] == "response.failed"
        if self.recalling and not is_failure:
            return None
        self.complete = not is_failure
        if self.earlier is None and not self.dropped:
            return value
        kept = ("id", "created_at") if self.stateless else ("created_at",)
        named = {name: self.began[name] for name in kept if name in self.began}
        told = {**response, **named, "output": self.shown}
        return {**value, "response": told if usage is None else {**told, "usage": self.summed(usage)}}

    def _numbered(self, value: dict[str, Any]) -> dict[str, Any]:
        number = value.get("sequence_number")
        if not isinstance(number, int):
            return value
        place = number if self.sequence is None or (self.earlier is None and not self.dropped) else self.sequence
        self.sequence = place + 1
        return value if place == number else {**value, "sequence_number": place}
