"""A recorded conversation, request by request, each message read and counted once; and which facts survive in it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from policies import Body, Message, PlannedMessage, TokenCounter, Transcript
from policies.messages import chain_of, head_length
from proxy.replay.recordings import Fact, Recording
from proxy.wire.chat import body_of, count_message, count_tools, message_of, render
from proxy.wire.raw import Raw, write_value

PROBE: Mapping[str, object] = {"role": "user", "content": "Go on."}
BUCKETS = ("system", "tools", "summary", "history", "tool_outputs")


@dataclass(frozen=True, slots=True)
class Request:
    """One request: so many leading messages, and the facts it needs.

    ``counts`` is False for the question after the end, which is asked only for facts that are needed then.
    """

    length: int
    facts: tuple[Fact, ...] = ()
    counts: bool = True


class Script:
    """One recording, read."""

    def __init__(self, recording: Recording, *, counter: TokenCounter, model: str) -> None:
        self.recording = recording
        self._model = model
        late = tuple(fact for fact in recording.facts if not fact.needed_at)
        asks = bool(late) and bool(recording.values) and recording.values[-1]["role"] == "assistant"
        values = (*recording.values, PROBE) if asks else recording.values
        self.raws: tuple[Raw, ...] = (*recording.raws, write_value(PROBE)) if asks else recording.raws
        read = [message_of(v, count_message(v, counter, model=model)) for v in values]
        self.messages: tuple[Message, ...] = tuple(message for message, _ in read)
        self.marked = frozenset(i for i, (_, marked) in enumerate(read) if marked)
        self.tools = count_tools(recording.tools, None, None, counter, model=model)
        self.requests = _requests(recording, late, ends_with_a_question=asks)
        self._bodies = tuple(body_of(value) for value in values)
        self._texts: dict[int, str] = {}
        self._head = head_length(self.messages)
        self._chain = chain_of("replay", self.messages, self._head)

    def read(self, index: int) -> Body:
        """What message ``index`` says."""
        return self._bodies[index]

    def body(self, length: int) -> bytes:
        """The request of the first ``length`` messages as a client sends it."""
        tools = self.recording.tools
        defined = b"" if tools is None else b',"tools":' + write_value(tools)
        messages = b",".join(map(bytes, self.raws[:length]))
        return b'{"model":%b,"messages":[%b]%b}' % (write_value(self._model), messages, defined)

    def transcript(self, length: int) -> Transcript:
        """The request of the first ``length`` messages."""
        return Transcript(
            messages=self.messages[:length],
            read=self.read,
            chain=self._chain[: max(0, length - self._head)],
            head=min(self._head, length),
            tools=self.tools,
        )

    def raw_pieces(self, length: int) -> tuple[PlannedMessage, ...]:
        """The first ``length`` messages as they came."""
        return tuple(PlannedMessage(index, message.tokens) for index, message in enumerate(self.messages[:length]))

    def rendered(self, pieces: Sequence[PlannedMessage]) -> list[Raw]:
        """The messages of an array as they would be sent."""
        return render(pieces, self.raws, self.marked)

    def text(self, index: int) -> str:
        """Everything that message ``index`` says, its calls included, in lower case."""
        found = self._texts.get(index)
        if found is None:
            found = self._texts[index] = _said(self._bodies[index])
        return found

    def piece_text(self, piece: PlannedMessage) -> str:
        """Everything that a piece of a planned array says, in lower case."""
        if piece.text is None:
            return self.text(piece.index) if piece.index is not None else ""
        calls = self._bodies[piece.index].calls if piece.index is not None else ()
        return _said(Body(piece.text, calls))

    def buckets(self, pieces: Sequence[PlannedMessage], *, priming: int) -> dict[str, int]:
        """Uncalibrated tokens by bucket; every token of the request is in exactly one."""
        result = dict.fromkeys(BUCKETS, 0)
        result["tools"], result["history"] = self.tools, priming
        for piece in pieces:
            result[self._bucket(piece)] += piece.tokens
        return result

    def _bucket(self, piece: PlannedMessage) -> str:
        if piece.index is None:
            return "summary"
        message = self.messages[piece.index]
        if message.is_head:
            return "system"
        return "tool_outputs" if message.is_result else "history"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Facts that requests needed, and of these: in the window, recoverable (in it or in the archive), stale.

    Only facts that stood in the client's own array are counted. ``stale`` is a superseded value in the window
    without the one that replaced it. Presence is literal, in any case of letters.
    """

    needed: int = 0
    kept: int = 0
    recoverable: int = 0
    stale: int = 0

    def __add__(self, other: "Retention") -> "Retention":
        return Retention(
            needed=self.needed + other.needed,
            kept=self.kept + other.kept,
            recoverable=self.recoverable + other.recoverable,
            stale=self.stale + other.stale,
        )


def judge(
    script: Script, facts: Sequence[Fact], *, length: int, sent: Sequence[PlannedMessage], archived: Iterable[int]
) -> Retention:
    """What of ``facts`` is in the array ``sent`` for the first ``length`` messages; ``archived`` are originals kept."""
    if not facts:
        return Retention()
    window = "\n".join(script.piece_text(piece) for piece in sent)
    original = archive = None
    total = Retention()
    for fact in facts:
        if _stands(fact, window):
            total += Retention(needed=1, kept=1, recoverable=1)
            continue
        if original is None or archive is None:
            original = "\n".join(script.text(index) for index in range(length))
            archive = "\n".join((window, *(script.text(index) for index in sorted(archived))))
        if _stands(fact, original):
            stale = any(value.lower() in window for value in fact.superseded)
            total += Retention(needed=1, recoverable=int(_stands(fact, archive)), stale=int(stale))
    return total


def _stands(fact: Fact, text: str) -> bool:
    return all(needle.lower() in text for needle in fact.needles)


def _requests(recording: Recording, late: tuple[Fact, ...], *, ends_with_a_question: bool) -> tuple[Request, ...]:
    needed: dict[int, list[Fact]] = {}
    for fact in recording.facts:
        for at in fact.needed_at:
            needed.setdefault(at, []).append(fact)
    found = [Request(length, tuple(needed.get(length, ()))) for length in recording.requests]
    if ends_with_a_question:
        found.append(Request(len(recording.values) + 1, late, counts=False))
    elif late and found:
        found[-1] = Request(found[-1].length, (*found[-1].facts, *late))
    return tuple(found)


def _said(body: Body) -> str:
    said = [body.text, *(f"{call.name} {call.arguments}" for call in body.calls)]
    return "\n".join(part for part in said if part).lower()
