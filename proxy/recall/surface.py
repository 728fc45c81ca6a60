"""What the rounds have to know of an endpoint: how its answers call the tool, what goes back, what the client sees."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from policies import TokenCounter
from proxy.errors import ProxyError
from proxy.recall.tool import RecallTurn
from proxy.wire.codec import Codec


class RoundView(Protocol):
    """What the client sees of one round's stream. Feed it the stream; it gives the bytes for the client.

    ``recalling`` says that another round follows, ``visible`` that the client has got to see something, ``complete``
    that the bytes just given are those by which it knows the answer to be whole. ``shown`` is all that it has got.
    """

    recalling: bool
    visible: bool
    complete: bool

    @property
    def shown(self) -> Sequence[Mapping[str, Any]]:
        """The elements of the answer that the client has got in all rounds."""
        ...

    def feed(self, chunk: bytes) -> bytes:
        """The bytes for the client of what ``chunk`` completes."""
        ...

    def end(self) -> bytes:
        """The bytes for the client of what the stream ended with."""
        ...

    def turn(self) -> RecallTurn | None:
        """What this round calls; None where it calls nothing that can be answered."""
        ...

    def leaves(self) -> Any:
        """What the next round has to know."""
        ...


class RecallSurface(Protocol):
    """One endpoint, for the tool's rounds."""

    @property
    def codec(self) -> Codec:
        """The endpoint's."""
        ...

    @property
    def restores(self) -> bool:
        """Whether hidden rounds go up again later."""
        ...

    def answer(self, value: Any) -> dict[str, Any] | None:
        """A whole answer that may be continued; None for anything else."""
        ...

    def turn(self, answer: Mapping[str, Any], name: str) -> RecallTurn | None:
        """What an answer calls; None where it does not call the tool of this name."""
        ...

    def sent(self, turn: RecallTurn, told: Sequence[str]) -> list[Mapping[str, Any]]:
        """What goes up behind the request for a turn whose calls are answered so."""
        ...

    def outputs(self, turn: RecallTurn, told: Sequence[str]) -> list[Mapping[str, Any]]:
        """The answers to its calls alone."""
        ...

    def overhead(self, turn: RecallTurn, counter: TokenCounter, *, model: str) -> int:
        """Uncalibrated tokens of a turn without the answers to it."""
        ...

    def final(self, answers: Sequence[Mapping[str, Any]], turns: Sequence[RecallTurn], name: str) -> dict[str, Any]:
        """The last of the answers as the client sees it, with what is shown of the ``turns`` before it."""
        ...

    def elements(self, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What an answer consists of, as its client sends it back; nothing where that does not matter."""
        ...

    def segment(self, elements: Sequence[Mapping[str, Any]]) -> bytes:
        """These elements as the client sends them back."""
        ...

    def is_thought(self, element: Mapping[str, Any]) -> bool:
        """Whether an element is reasoning, which clients may leave out."""
        ...

    def view(self, name: str, earlier: Any, *, may_recall: bool) -> RoundView:
        """The filter of one round's stream; ``earlier`` is what the one before has left, None for the first."""
        ...

    def refused(self, said: Mapping[str, Any], earlier: Any) -> bytes:
        """The last event of a stream whose next round the upstream has refused."""
        ...

    def broken(self, error: ProxyError, earlier: Any) -> bytes:
        """The last event of a stream that broke off, or could not be gone on with."""
        ...


def decoded(data: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def added_up(
    usage: Mapping[str, Any], before: Sequence[Mapping[str, Any]], *, kind: str = "completion", asked: str = "prompt"
) -> dict[str, Any]:
    """The usage object of the last round with the answers of those ``before`` it: prompt of one, words of all."""
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
