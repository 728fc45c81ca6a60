"""The tool's calls in an answer that is a list: items of Responses, blocks of Messages.

Of each round's stream the client sees what it does of a chat's (:mod:`proxy.recall.tool`), under numbers that are dense
over all rounds; the end is the last round's, with the words and tokens of all. What stands before a call goes back
upstream with it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from policies.tokens import TokenCounter
from proxy.errors import ProxyError
from proxy.recall.tool import RecallTurn, RoundView, added_up, decoded, read_call
from proxy.wire.anthropic import MESSAGES, close, grow
from proxy.wire.chat import SEALED, THINKING_TYPES
from proxy.wire.codec import Codec
from proxy.wire.counting import count_message
from proxy.wire.raw import EventFrame, named_event, write_value
from proxy.wire.responses import CALLS, RESPONSES, THOUGHTS, failed

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
Element = Mapping[str, Any]


class ListRecall(ABC):
    """What both have in common.

    Attributes:
        codec: the endpoint's.
        array: the field of an answer that is the list.
        call: the type of a call of a function, ``call_id`` the field that has its id.
        result: the type of its result, the field in which that names the call, and the one for what it says.
        own: types of the calls that a client answers, ``thoughts`` those of reasoning.
    """

    codec: ClassVar[Codec]
    array: ClassVar[str]
    call: ClassVar[str]
    call_id: ClassVar[str]
    result: ClassVar[tuple[str, str, str]]
    own: ClassVar[frozenset[str]]
    thoughts: ClassVar[frozenset[str]]

    def __init__(self, *, joins: bool = True) -> None:
        """``joins`` shows of a whole answer what was said before a call, which the schema of an answer rules out."""
        self._joins = joins

    @abstractmethod
    def arguments(self, element: Element) -> str: ...

    @abstractmethod
    def segment(self, elements: Sequence[Element]) -> bytes: ...

    @abstractmethod
    def sent(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]: ...

    @abstractmethod
    def view(self, name: str, earlier: "Before | None", *, may_recall: bool) -> "ListView": ...

    @abstractmethod
    def refused(self, said: Element, earlier: "Before | None") -> bytes: ...

    def ended(self, last: dict[str, Any], first: Element, *, dropped: bool) -> dict[str, Any]:
        """The last round's answer with the end, and under the name, that the client is to see."""
        del first, dropped
        return last

    def outputs(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]:
        kind, named, said = self.result
        return [{"type": kind, named: call.id, said: text} for call, text in zip(turn.calls, told, strict=True)]

    def broken(self, error: ProxyError, earlier: "Before | None") -> bytes:
        del earlier
        return self.codec.error_event(error)

    def answer(self, value: Any) -> dict[str, Any] | None:
        return value if isinstance(value, dict) and isinstance(value.get(self.array), list) else None

    def elements(self, answer: Element) -> list[dict[str, Any]]:
        return [each for each in answer.get(self.array) or () if isinstance(each, dict)]

    def is_thought(self, element: Element) -> bool:
        return element.get("type") in self.thoughts

    def calls(self, element: Element, name: str) -> bool:
        return element.get("type") == self.call and element.get("name") == name and not element.get("namespace")

    def turn(self, answer: Element, name: str) -> RecallTurn | None:
        return self.turn_of(self.elements(answer), name, joins=self._joins)

    def turn_of(self, elements: Sequence[dict[str, Any]], name: str, *, joins: bool = True) -> RecallTurn | None:
        """The same of these elements: calls of the client's tools, and what stands behind the call, do not go back."""
        first = next((n for n, element in enumerate(elements) if self.calls(element, name)), None)
        if first is None:
            return None
        before = tuple(each for each in elements[:first] if each.get("type") not in self.own)
        given = [each for each in elements if self.calls(each, name)]
        calls = tuple(self.sendable(each, n) for n, each in enumerate(given))
        read = tuple(
            read_call(each[self.call_id], self.arguments(made)) for each, made in zip(calls, given, strict=True)
        )
        return RecallTurn(read, calls, before) if joins else RecallTurn(read, (*before, *calls))

    def sendable(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        identity = call.get(self.call_id)
        return call if isinstance(identity, str) and identity else {**call, self.call_id: f"call_recall_{number}"}

    def overhead(self, turn: RecallTurn, counter: TokenCounter, *, model: str) -> int:
        view = self.codec.view(self.segment((*turn.shown, *turn.hidden)))
        sealed = view.get(SEALED, 0)
        return count_message(view, counter, model=model) + (sealed if isinstance(sealed, int) else 0)

    def final(self, answers: Sequence[Element], turns: Sequence[RecallTurn], name: str) -> dict[str, Any]:
        *before, last = answers
        kept = [each for each in self.elements(last) if not self.calls(each, name)]
        dropped = len(kept) < len(self.elements(last)) and not any(each.get("type") in self.own for each in kept)
        shown = [*(element for turn in turns for element in turn.shown), *kept]
        final = self.ended({**last, self.array: shown}, answers[0], dropped=dropped)
        usages = [each["usage"] for each in before if isinstance(each.get("usage"), dict)]
        if isinstance(last.get("usage"), dict):
            final["usage"] = self.used(last["usage"], usages)
        return final

    @staticmethod
    def used(usage: Element, before: Sequence[Element]) -> dict[str, Any]:
        return added_up(usage, before, kind="output", asked="input") if before else dict(usage)


class Before(msgspec.Struct, frozen=True):
    """What the rounds before this one leave: how the answer began, what the client has of it, and what they used.

    ``sequence`` is the number of the next event, where events have one.
    """

    began: Element = msgspec.field(default_factory=dict)
    shown: tuple[Element, ...] = ()
    usages: tuple[Element, ...] = ()
    sequence: int | None = None


@dataclass(slots=True)
class ListView(RoundView[Before]):
    """One round of a streamed list.

    ``elements`` are this round's as they were made, by their numbers, ``places`` the numbers by which the client knows
    those that it has got.
    """

    surface: ListRecall = field(kw_only=True)
    complete: bool = False
    began: Element = field(default_factory=dict)
    elements: dict[int, dict[str, Any]] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    sequence: int | None = None
    _owns: bool = False

    def __post_init__(self) -> None:
        if self.earlier is not None:
            self.began, self.sequence = self.earlier.began, self.earlier.sequence

    @property
    def shown(self) -> tuple[Element, ...]:
        before = self.earlier.shown if self.earlier is not None else ()
        return (*before, *(self.elements[number] for number in sorted(self.places)))

    @property
    def has_nothing_to_call(self) -> bool:
        return self.dropped and not self._owns

    def turn(self) -> RecallTurn | None:
        return self.surface.turn_of([self.elements[number] for number in sorted(self.elements)], self.name)

    def leaves(self) -> Before:
        before = self.earlier.usages if self.earlier is not None else ()
        return Before(self.began, self.shown, before if self.usage is None else (*before, self.usage), self.sequence)

    @abstractmethod
    def event(self, value: dict[str, Any]) -> Element | None: ...

    def begin(self, number: object, element: object) -> None:
        if not isinstance(number, int) or not isinstance(element, dict):
            return
        self.elements[number] = element
        if self.surface.calls(element, self.name):
            self.dropped = True
            self.recalling = self.recalling or (self.may_recall and not self._owns)
        elif not self.recalling:
            self._owns = self._owns or element.get("type") in self.surface.own
            self.places[number] = len(self.shown)
            self.visible = True

    def placed(self, value: dict[str, Any], key: str) -> dict[str, Any] | None:
        place = self.places.get(value[key])
        return None if place is None else value if place == value[key] else {**value, key: place}

    def summed(self, usage: Element) -> dict[str, Any]:
        return self.surface.used(usage, self.earlier.usages if self.earlier is not None else ())

    def _pass(self, frame: EventFrame) -> bytes:
        values = [decoded(event.data) for event in frame.events]
        shown = [value if value is None else self.event(value) for value in values]
        if all(new is old for new, old in zip(shown, values, strict=True)):
            return frame.raw
        return b"".join(named_event(each) for each in shown if each is not None)


class MessagesRecall(ListRecall):
    codec = MESSAGES
    array = "content"
    call = "tool_use"
    call_id = "id"
    result = ("tool_result", "tool_use_id", "content")
    own = frozenset({"tool_use"})
    thoughts = THINKING_TYPES

    def arguments(self, element: Element) -> str:
        return "{" if "input" not in element else write_value(element["input"]).decode("utf-8", "surrogatepass")

    def sendable(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        call = super().sendable(call, number)
        return call if isinstance(call.get("input"), dict) else {**call, "input": {}}

    def sent(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]:
        said = {"role": "assistant", "content": [*turn.shown, *turn.hidden]}
        return [said, {"role": "user", "content": self.outputs(turn, told)}]

    def segment(self, elements: Sequence[Element]) -> bytes:
        return write_value({"role": "assistant", "content": elements})

    def ended(self, last: dict[str, Any], first: Element, *, dropped: bool) -> dict[str, Any]:
        reason = {"stop_reason": "end_turn"} if dropped and last.get("stop_reason") == "tool_use" else {}
        return {**last, **{k: first[k] for k in ("id", "model") if k in first}, **reason}

    def view(self, name: str, earlier: Before | None, *, may_recall: bool) -> "MessagesView":
        return MessagesView(name, earlier, may_recall, surface=self)

    def refused(self, said: Element, earlier: Before | None) -> bytes:
        del earlier
        return b"\n\n" + named_event({**said, "type": "error"})


class MessagesView(ListView):
    __slots__ = ()

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
        elif kind == "content_block_delta" and number in self.elements and isinstance(value.get("delta"), dict):
            grow(self.elements[number], value["delta"])
        elif kind == "content_block_stop" and number in self.elements:
            close(self.elements[number])
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


class ResponsesRecall(ListRecall):
    """The rounds of a response: items go back as they were given, reasoning and its ids with them.

    Where nothing is stored (``stateless``) reasoning without its encrypted content would not be found, and what was
    made with it not taken under its id ("Items are not persisted when `store` is set to false").
    """

    codec = RESPONSES
    array = "output"
    call = "function_call"
    call_id = "call_id"
    result = ("function_call_output", "call_id", "output")
    own = CALLS
    thoughts = THOUGHTS

    def __init__(self, *, joins: bool = True, stateless: bool = False) -> None:
        super().__init__(joins=joins)
        self.stateless = stateless

    def arguments(self, element: Element) -> str:
        given = element.get("arguments")
        return given if isinstance(given, str) else ""

    def sent(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]:
        items = (*turn.shown, *turn.hidden)
        if self.stateless and any(self.is_thought(item) and not item.get("encrypted_content") for item in items):
            items = tuple({k: v for k, v in i.items() if k != "id"} for i in items if not self.is_thought(i))
        return [*items, *self.outputs(turn, told)]

    def segment(self, elements: Sequence[Element]) -> bytes:
        return b",".join(map(write_value, elements))

    def view(self, name: str, earlier: Before | None, *, may_recall: bool) -> "ResponsesView":
        return ResponsesView(name, earlier, may_recall, surface=self)

    def refused(self, said: Element, earlier: Before | None) -> bytes:
        error = said.get("error")
        message = str(error.get("message") or "") if isinstance(error, dict) else str(error)
        return self._failed(message, earlier or Before())

    def broken(self, error: ProxyError, earlier: Before | None) -> bytes:
        return self._failed(f"Connection lost, premature close: {error.message}", earlier or Before())

    def _failed(self, message: str, left: Before) -> bytes:
        return failed(message, left.began, left.shown, left.sequence or 0)


@dataclass(slots=True)
class ResponsesView(ListView):
    def event(self, value: dict[str, Any]) -> Element | None:
        kind, response = value.get("type"), value.get("response")
        if isinstance(response, dict):
            if kind in ENDS:
                shown = self._ended(value, response)
            elif self.earlier is None:
                self.began, shown = response, value
            else:
                shown = None
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
        named = {name: self.began[name] for name in ("id", "created_at") if name in self.began}
        told = {**response, **named, "output": self.shown}
        return {**value, "response": told if usage is None else {**told, "usage": self.summed(usage)}}

    def _numbered(self, value: dict[str, Any]) -> dict[str, Any]:
        number = value.get("sequence_number")
        if not isinstance(number, int):
            return value
        place = number if self.sequence is None or (self.earlier is None and not self.dropped) else self.sequence
        self.sequence = place + 1
        return value if place == number else {**value, "sequence_number": place}
