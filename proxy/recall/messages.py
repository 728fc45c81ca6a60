"""The tool's calls in Anthropic's Messages: blocks ``tool_use``, answered in the user's turn that follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.recall.elements import Before, Element, ListRecall, ListView, named_event
from proxy.recall.tool import RecallTurn
from proxy.wire.anthropic import MESSAGES
from proxy.wire.chat import THINKING_TYPES
from proxy.wire.raw import read_value, write_value

GROWING = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "compaction_delta": "content",
}


class MessagesRecall(ListRecall):
    codec = MESSAGES
    array = "content"
    call = "tool_use"
    call_id = "id"
    own = frozenset({"tool_use"})
    thoughts = THINKING_TYPES

    def arguments(self, element: Element) -> str:
        return "{" if "input" not in element else write_value(element["input"]).decode("utf-8", "surrogatepass")

    def sendable(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        call = super().sendable(call, number)
        return call if isinstance(call.get("input"), dict) else {**call, "input": {}}

    def outputs(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]:
        return [
            {"type": "tool_result", "tool_use_id": call.id, "content": text}
            for call, text in zip(turn.calls, told, strict=True)
        ]

    def sent(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]:
        said = {"role": "assistant", "content": [*turn.shown, *turn.hidden]}
        return [said, {"role": "user", "content": self.outputs(turn, told)}]

    def segment(self, elements: Sequence[Element]) -> bytes:
        return write_value({"role": "assistant", "content": elements})

    def ended(self, last: dict[str, Any], first: Element, *, dropped: bool) -> dict[str, Any]:
        reason = {"stop_reason": "end_turn"} if dropped and last.get("stop_reason") == "tool_use" else {}
        return {**last, **{k: first[k] for k in ("id", "model") if k in first}, **reason}

    def view(self, name: str, earlier: Before | None, *, may_recall: bool) -> "MessagesView":
        return MessagesView(self, name, earlier, may_recall)

    def refused(self, said: Element, earlier: Before | None) -> bytes:
        del earlier
        return b"\n\n" + named_event({**said, "type": "error"})


@dataclass(slots=True)
class MessagesView(ListView):
    _inputs: dict[int, str] = field(default_factory=dict)

    def event(self, value: dict[str, Any]) -> Element | None:
        kind, number = value.get("type"), value.get("index")
        if kind == "message_start":
            return self._started(value)
        if kind == "message_delta":
            return self._ended(value)
        if kind == "message_stop":
            return None if self.recalling else value
        if kind == "content_block_start":
            self.begin(number, dict(block) if isinstance(block := value.get("content_block"), dict) else None)
        elif kind == "content_block_delta" and number in self.elements:
            self._grow(number, value.get("delta"))
        elif kind == "content_block_stop" and number in self._inputs:
            given = read_value(self._inputs.pop(number).encode("utf-8", "surrogatepass") or b"{}")
            self.elements[number].pop("input", None)
            if given is not None:
                self.elements[number]["input"] = given
        return self.placed(value, "index") if number in self.elements else value

    def _started(self, value: dict[str, Any]) -> Element | None:
        message = value.get("message")
        message = message if isinstance(message, dict) else {}
        self.usage = message.get("usage") if isinstance(message.get("usage"), dict) else None
        if self.earlier is not None:
            return None
        self.began = message
        return value

    def _ended(self, value: dict[str, Any]) -> Element | None:
        used, delta = value.get("usage"), value.get("delta")
        read = {k: v for k, v in (self.usage or {}).items() if "input" in k}
        usage = {**read, **{k: v for k, v in used.items() if v is not None}} if isinstance(used, dict) else None
        self.usage = usage or self.usage
        if self.recalling:
            return None
        self.complete = True
        if self.has_nothing_to_call and isinstance(delta, dict) and delta.get("stop_reason") == "tool_use":
            value = {**value, "delta": {**delta, "stop_reason": "end_turn"}}
        return {**value, "usage": self.summed(usage)} if self.earlier is not None and usage is not None else value

    def _grow(self, number: int, delta: object) -> None:
        if not isinstance(delta, dict):
            return
        block, kind = self.elements[number], delta.get("type")
        if kind == "input_json_delta":
            self._inputs[number] = self._inputs.get(number, "") + str(delta.get("partial_json") or "")
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]
        elif isinstance(kind, str) and kind in GROWING:
            name = GROWING[kind]
            block[name] = (block.get(name) or "") + str(delta.get(name) or "")
