"""The rounds inside one stream: the client sees one answer that goes on.

Nothing is sent while all that an upstream has said is a call of the recall tool: until then its next
answer may still be an error with a status of its own. After ``PATIENCE`` seconds the stream is opened all the same,
and comments keep it alive.

What of one round's stream the client sees: everything but the recall tool's calls, and no end before the last round.

======================================  ==========================================================
event                                   what becomes of it
======================================  ==========================================================
first round, before any recall call     goes on byte for byte
a delta of a recall call                is withheld, and nothing else of its chunk
a call of the client's own tool         behind a recall call is withheld with it, to be asked for anew;
                                        before one it has gone on already: then the recall call is dropped
finish, usage and ``[DONE]``            withheld where another round follows
later rounds                            in the first round's name, without a second role, usage added up
======================================  ==========================================================
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import msgspec

from proxy.errors import ProxyError, UpstreamTimeout, UpstreamUnreachable
from proxy.recall.rounds import AskAgain, Ended, Rounds, added_up, next_answer
from proxy.recall.tool import RecallTurn, name_of, turn_of
from proxy.stream.relay import Headers, Send, StreamCut, UpstreamResponse, end_of, send_more, send_start
from proxy.tap import StreamTap, Tap
from proxy.upstream.client import StreamBroken
from proxy.wire.raw import DONE, EventFrame, Frames, write_value

PATIENCE = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
IDENTITY = ("id", "created", "model", "system_fingerprint")
TOOL_CALLS = b'"tool_calls"'
APART = "\n\n"
MAX_KEPT = 8 * 1024 * 1024  # bytes of a round that are kept for the message that goes back

T = TypeVar("T")


@dataclass(slots=True)
class CallNumbers:
    """Which call of a round a delta belongs to: by its index, else by its id, else the newest."""

    _ids: dict[str, int] = field(default_factory=dict)
    _newest: int = -1

    def of(self, call: Mapping[str, Any]) -> int:
        """The number of the call that this delta belongs to."""
        number, identity = call.get("index"), call.get("id")
        if not isinstance(number, int):
            known = self._ids.get(identity) if isinstance(identity, str) and identity else self._newest
            number = self._newest + 1 if known is None or known < 0 else known
        if isinstance(identity, str) and identity:
            self._ids[identity] = number
        self._newest = number
        return number


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the rounds before this one leave: their identity, whether they said something, and what they used."""

    identity: Mapping[str, Any]
    spoke: bool = False
    usages: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class Filter:
    """One round. Feed it the stream; it gives the bytes for the client.

    ``earlier`` is None in the first round. ``may_recall`` is False where a call is not answered any more, and
    has to vanish. ``recalling`` says that another round follows, ``visible`` that the client has got to see something.
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
        """The bytes for the client of what ``chunk`` completes."""
        return b"".join(map(self._pass, self._frames.feed(chunk)))

    def end(self) -> bytes:
        """The bytes for the client of what the stream ended with."""
        return self._pass(self._frames.rest())

    def turn(self) -> RecallTurn | None:
        """The assistant message of this round; None where it calls nothing that can be answered."""
        return turn_of(assembled(self._chunks()), self.name)

    def leaves(self) -> Earlier:
        """What the next round has to know."""
        chunks = self._chunks()
        first = self.earlier.identity if self.earlier is not None else _identity(chunks)
        before = self.earlier.usages if self.earlier is not None else ()
        said = assembled(chunks).get("content")
        spoke = (isinstance(said, str) and bool(said.strip())) or (self.earlier is not None and self.earlier.spoke)
        return Earlier(first, spoke, before if self.usage is None else (*before, self.usage))

    def _chunks(self) -> list[dict[str, Any]]:
        return [value for data in self._kept if (value := _decoded(data)) is not None]

    def _pass(self, frame: EventFrame) -> bytes:
        if not frame.events:
            return frame.raw
        for event in frame.events:
            if self._size < MAX_KEPT:
                self._kept.append(event.data)
                self._size += len(event.data)
        if self.earlier is None and not self._names and not any(TOOL_CALLS in e.data for e in frame.events):
            self.visible = self.visible or any(_says(e.data) for e in frame.events)
            return frame.raw
        return b"".join(self._changed(event.data, frame) for event in frame.events)

    def _changed(self, data: bytes, frame: EventFrame) -> bytes:
        """One event as the client sees it; empty for one that is withheld."""
        raw = frame.raw if len(frame.events) == 1 else _event(data)
        if data == DONE:
            return b"" if self.recalling else raw
        value = _decoded(data)
        if value is None or not isinstance(value.get("choices"), list):
            return raw
        shown = self._chunk(value)
        if shown is None:
            return b""
        self.visible = self.visible or any(_is_said(choice) for choice in shown["choices"])
        return raw if shown is value else _event(write_value(shown))

    def _chunk(self, value: dict[str, Any]) -> dict[str, Any] | None:
        """A chunk without what is not for the client, the same object if all of it is; None if nothing is left."""
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
        """One choice without what is not for the client, the same object if all of it is; None if nothing is left."""
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
        """A tool call's delta under the number that the client knows it by; None where the client is not to see it."""
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
        """A delta of a later round: no second role, and its first words apart from what was said before."""
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
    first = next((chunk for chunk in chunks if chunk.get("id") and chunk.get("choices")), chunks[0] if chunks else {})
    return {key: first[key] for key in IDENTITY if key in first}


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _decoded(data: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _says(data: bytes) -> bool:
    value = _decoded(data)
    if value is None:
        return False
    choices = value.get("choices")
    return bool(value.get("error")) or any(_is_said(c) for c in (choices if isinstance(choices, list) else ()))


def _is_said(choice: Any) -> bool:
    """Whether a choice has anything of an answer in it: words, a call, an end."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    said = isinstance(delta, dict) and any(v for k, v in delta.items() if k != "role")
    return said or choice.get("finish_reason") is not None


@dataclass(slots=True)
class Gate:
    """The client's side of the stream: what is written before it opens waits."""

    send: Send
    headers: Callable[[UpstreamResponse], Headers]
    received: UpstreamResponse
    tap: StreamTap = field(default_factory=StreamTap)
    is_open: bool = False
    _held: bytearray = field(default_factory=bytearray)

    async def write(self, data: bytes) -> None:
        """Send bytes, or keep them until the gate is opened."""
        if not data:
            return
        if self.is_open:
            self.tap.feed(data)
            await send_more(self.send, data)
        else:
            self._held += data

    async def open(self) -> None:
        """Begin the answer with the head of the upstream's newest one."""
        if not self.is_open:
            self.is_open = True
            answer = self.received.answer
            await send_start(self.send, status=answer.status, headers=self.headers(self.received))
            held, self._held = bytes(self._held), bytearray()
            await self.write(held)

    async def keep_alive(self) -> None:
        """Tell the client that its answer is still being made."""
        await self.open()
        await send_more(self.send, KEEP_ALIVE)

    async def close(self) -> None:
        """End the answer."""
        await self.open()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


async def patiently(work: Coroutine[Any, Any, T], waiting: Callable[[], Awaitable[None]], *, every: float) -> T:
    """What ``work`` comes to; ``waiting`` is called each time it has taken ``every`` seconds more."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            await asyncio.wait({task}, timeout=every)
            if task.done():
                return task.result()
            await waiting()
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


@dataclass(slots=True, kw_only=True)
class Relaying:
    """The relay of one streamed answer with its rounds.

    Attributes:
        headers: the client's response headers for an upstream's answer.
        explain: what a client is told whose stream broke off.
        ended: told what each round that is followed by another one has said of itself.
        patience: seconds before a client that waits is told so.
    """

    rounds: Rounds
    ask: AskAgain
    send: Send
    headers: Callable[[UpstreamResponse], Headers]
    explain: Callable[[Exception], ProxyError]
    ended: Ended
    patience: float = PATIENCE

    async def run(self, received: UpstreamResponse) -> Tap | UpstreamResponse:
        """What the client saw, or an answer that is to be relayed instead, nothing having been sent.

        Raises Cut if the stream broke off, ProxyError if the upstream could not be asked again and nothing was sent.
        """
        gate = Gate(self.send, self.headers, received)
        earlier: Earlier | None = None
        while True:
            view = Filter(self.rounds.offer.name, earlier, may_recall=self.rounds.may_go_on)
            seen = await self._round(gate, view, received)
            turn = view.turn() if view.recalling and seen.error is None else None
            if turn is None:
                break
            earlier = view.leaves()
            self.ended(received, seen)
            gate.received = received = await self._next(gate, next_answer(self.rounds, turn, self.ask))
            if received.chunks is None:
                if not gate.is_open:
                    return received
                received.answer.close()
                await self._fail(gate, _refusal(received))
        await gate.close()
        return gate.tap.seen

    async def _round(self, gate: Gate, view: Filter, received: UpstreamResponse) -> Tap:
        """Relay one round; what the upstream said of itself in it comes back."""
        tap = StreamTap()
        try:
            async with aclosing(_chunks(received)) as chunks:
                async for chunk in chunks:
                    if chunk is not None:
                        tap.feed(chunk)
                        await gate.write(view.feed(chunk))
                    if view.visible or (chunk is None and not view.recalling):
                        await gate.open()
            end_of(tap)
            await gate.write(view.end())
            if not view.recalling:
                await gate.open()
        except (StreamBroken, UpstreamTimeout) as error:
            if not gate.is_open:
                raise self.explain(error) from error
            await self._fail(gate, self.explain(error).event(), error)
        finally:
            received.answer.close()
        return tap.seen

    async def _next(self, gate: Gate, asking: Coroutine[Any, Any, UpstreamResponse]) -> UpstreamResponse:
        try:
            return await patiently(asking, gate.keep_alive, every=self.patience)
        except (ProxyError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the client has gone; else it was the question alone that was cancelled: the process ends
            told = self.explain(StreamBroken("cancelled")) if isinstance(error, asyncio.CancelledError) else error
            if gate.is_open:
                await self._fail(gate, told.event(), error)
            raise told from error

    async def _fail(self, gate: Gate, event: bytes, cause: BaseException | None = None) -> NoReturn:
        """End the client's stream with an error event, and without a proper end."""
        await gate.write(event)
        raise StreamCut("the answer broke off between two rounds") from cause


async def _chunks(received: UpstreamResponse) -> AsyncGenerator[bytes | None, None]:
    """The stream from its beginning; None where what was looked at before ends."""
    opening, chunks = received.opening, received.chunks
    assert chunks is not None  # noqa: S101 - the caller looked
    async with aclosing(chunks) as rest:
        for chunk in opening.held if opening is not None else ():
            yield chunk
        yield None
        if opening is not None and opening.pending is not None:
            with contextlib.suppress(StopAsyncIteration):
                yield await opening.pending
        async for chunk in rest:
            yield chunk


def _refusal(received: UpstreamResponse) -> bytes:
    """What the upstream said in place of the next round, as an event."""
    try:
        value = msgspec.json.decode(received.body or b"")
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and value.get("error"):
        return b"\n\ndata: " + write_value(value) + b"\n\n"
    return UpstreamUnreachable(f"The upstream answered {received.answer.status} inside this answer.").event()
