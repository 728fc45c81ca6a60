"""The tool's calls in an answer that is a list: items of Responses, blocks of Messages.

======================================  ==========================================================
of one round                            what becomes of it
======================================  ==========================================================
what stands before the recall call      goes on, under numbers that are dense over all rounds
the recall call                         is withheld, and goes back upstream with what came before it
what stands behind it                   is withheld: calls of the client's tools are asked for anew
a recall call behind the client's own   is dropped, where that one has gone on already
the end                                 is the last round's, with the words and tokens of all
======================================  ==========================================================
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from policies import TokenCounter
from proxy.errors import ProxyError
from proxy.recall.tool import RecallTurn, added_up, decoded, read_call
from proxy.wire.chat import SEALED
from proxy.wire.codec import Codec
from proxy.wire.counting import count_message
from proxy.wire.raw import EventFrame, Frames, write_value

Element = Mapping[str, Any]


class ListRecall(ABC):
    """What both have in common.

    Attributes:
        codec: the endpoint's.
        array: the field of an answer that is the list.
        call: the type of a call of a function, ``call_id`` the field that its result names it by.
        own: types of the calls that a client answers, ``thoughts`` those of reasoning.
    """

    codec: ClassVar[Codec]
    array: ClassVar[str]
    call: ClassVar[str]
    call_id: ClassVar[str]
    own: ClassVar[frozenset[str]]
    thoughts: ClassVar[frozenset[str]]

    def __init__(self, *, joins: bool = True) -> None:
        """``joins`` shows of a whole answer what was said before a call, which the schema of an answer rules out."""
        self._joins = joins

    @abstractmethod
    def arguments(self, element: Element) -> str: ...

    @abstractmethod
    def outputs(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]: ...

    @abstractmethod
    def ended(self, last: dict[str, Any], first: Element, *, dropped: bool) -> dict[str, Any]: ...

    @abstractmethod
    def segment(self, elements: Sequence[Element]) -> bytes: ...

    @abstractmethod
    def sent(self, turn: RecallTurn, told: Sequence[str]) -> list[Element]: ...

    @abstractmethod
    def view(self, name: str, earlier: "Before | None", *, may_recall: bool) -> "ListView": ...

    @abstractmethod
    def refused(self, said: Element, earlier: "Before | None") -> bytes: ...

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


@dataclass(frozen=True, slots=True)
class Before:
    """What the rounds before this one leave: how the answer began, what the client has of it, and what they used.

    ``sequence`` is the number of the next event, where events have one.
    """

    began: Element = field(default_factory=dict)
    shown: tuple[Element, ...] = ()
    usages: tuple[Element, ...] = ()
    sequence: int | None = None


@dataclass(slots=True)
class ListView(ABC):
    """One round of a streamed list; ``may_recall`` is False where a call is not answered any more, and has to vanish.

    ``elements`` are this round's as they were made, by their numbers, ``places`` the numbers by which the client knows
    those that it has got.
    """

    surface: ListRecall
    name: str
    earlier: Before | None
    may_recall: bool
    recalling: bool = False
    visible: bool = False
    complete: bool = False
    dropped: bool = False
    began: Element = field(default_factory=dict)
    usage: Element | None = None
    elements: dict[int, dict[str, Any]] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    sequence: int | None = None
    _owns: bool = False
    _frames: Frames = field(default_factory=Frames)

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

    def feed(self, chunk: bytes) -> bytes:
        return b"".join(map(self._pass, self._frames.feed(chunk)))

    def end(self) -> bytes:
        return self._pass(self._frames.rest())

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


def named_event(value: Element) -> bytes:
    return b"event: " + str(value.get("type", "")).encode() + b"\ndata: " + write_value(value) + b"\n\n"
