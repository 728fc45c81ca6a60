"""Sending the request again with what was recalled: as often as the policy allows, and never for
more than the window holds.

::

    calls answered so far   a further call gets                     what the model may do next
    < rounds - 1            its answer                              call again
    rounds - 1              its answer, and that it was the last    answer; a call is refused
    rounds                  a refusal                               answer; a call is taken out of what it says

Where the upstream says that an answer is too long for its window, the same round is sent with half
of it, then with none. Where it refuses the round for another reason of its own, the client's own
request goes up, as if there were no such tool. What a client can mend by waiting (429, 5xx) is
passed on to it.

A client that streams sees one answer that goes on. Nothing is sent while all that an upstream has
said is a call of the recall tool: until then its next answer may still be an error with a status of
its own.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NoReturn

import msgspec

from policies.tokens import TokenCounter
from proxy.errors import ProxyError, UpstreamTimeout, UpstreamUnreachable
from proxy.features.recall.archive import (
    LAST,
    REFUSED,
    UNKNOWN,
    Archive,
    Past,
    RecallAnswer,
    SearchResult,
    format_found,
    format_page,
    format_problem,
)
from proxy.features.recall.tool import (
    Earlier,
    Offer,
    RecallCall,
    RecallTurn,
    RoundView,
    answer_in,
    decoded,
    joined,
    turn_of,
    with_more,
)
from proxy.store.records import StoreError
from proxy.stream import (
    Headers,
    Send,
    StreamCut,
    UpstreamResponse,
    send_more,
    send_start,
    to_its_end,
)
from proxy.tap import StreamTap, Tap, read_completion
from proxy.upstream.connection import StreamBroken
from proxy.upstream.overflow import Verdict
from proxy.wire.codec import CHAT
from proxy.wire.counting import count_message
from proxy.wire.raw import unnamed_event, write_value

MAX_ROUNDS = 3
"""Rounds of one request in which the tool is answered."""
SHARES = (1.0, 0.5, 0.0)
NOT_OURS = frozenset({401, 402, 403, 408, 409, 425, 429})

AskAgain = Callable[[bytes], Awaitable[tuple[UpstreamResponse, Verdict]]]
Ended = Callable[[UpstreamResponse, Tap | None], None]
"""Called with each answer that another round follows, and what the upstream reported in it."""


class Recalled(msgspec.Struct, frozen=True):
    round: int
    query: str
    hits: int
    tokens: int


@dataclass(slots=True, kw_only=True)
class Rounds:
    """The rounds of one request.

    Attributes:
        body: the forwarded request with the tool, ``plain`` the same without it.
        room: uncalibrated tokens that the window has left after that request and its answer.
        most: rounds that are answered, ``max_tokens`` the most tokens of one answer.
        joins: whether the client gets what the model said before a call; not where its answer has a
            schema.
        number: rounds so far; ``over`` once the tool is offered no more.
        recalled: what was answered.
    """

    offer: Offer
    archive: Archive
    counter: TokenCounter
    model: str
    body: bytes
    plain: bytes
    room: int
    most: int
    max_tokens: int
    joins: bool
    number: int = 0
    over: bool = False
    recalled: list[Recalled] = field(default_factory=list)
    _sent: list[bytes] = field(default_factory=list)
    _turn: RecallTurn | None = None
    _found: list[SearchResult | Past | None] = field(default_factory=list)
    _share: int = 0
    _answers: list[RecallAnswer] = field(default_factory=list)

    @property
    def may_go_on(self) -> bool:
        return not self.over and self.number <= self.most

    async def after(self, turn: RecallTurn) -> bytes:
        self._keep()
        self.number += 1
        self._turn = turn
        self._share = 0
        self._found = [await self._look(call) for call in turn.calls]
        return await self._ask(turn)

    async def smaller(self) -> bytes | None:
        if self._turn is None or self._share + 1 >= len(SHARES):
            return None
        self._share += 1
        return await self._ask(self._turn)

    def finish(self) -> None:
        self._keep()
        self.over = True

    async def _look(self, call: RecallCall) -> SearchResult | Past | None:
        if call.problem or self.number > self.most:
            return None
        try:
            return (
                await self.archive.read(call.ref)
                if call.ref
                else await self.archive.find(call.query)
            )
        except StoreError:
            return None

    async def _ask(self, turn: RecallTurn) -> bytes:
        self._answers = await asyncio.to_thread(self._format, turn)
        return with_more(self.body, CHAT.array, [*self._sent, *self._messages(turn)])

    def _format(self, turn: RecallTurn) -> list[RecallAnswer]:
        overhead = count_message(turn.message, self.counter, model=self.model)
        room = int(
            min(self.room - overhead, self.max_tokens * len(turn.calls)) * SHARES[self._share]
        )
        answers: list[RecallAnswer] = []
        for number, (call, found) in enumerate(zip(turn.calls, self._found, strict=True)):
            share = min(self.max_tokens, room // (len(turn.calls) - number))
            answers.append(self._format_one(call, found, share))
            room -= answers[-1].tokens
        return answers

    def _format_one(
        self, call: RecallCall, found: SearchResult | Past | None, room: int
    ) -> RecallAnswer:
        if self.number > self.most:
            return RecallAnswer(REFUSED, self.counter.count(REFUSED))
        last = f"\n{LAST}" if self.number == self.most else ""
        room -= self.counter.count(last) + 4 if last else 4
        if call.problem:
            answer = format_problem(call.problem, self.counter)
        elif isinstance(found, Past):
            answer = format_page(found, call.cursor, room=room, counter=self.counter)
        elif found is not None:
            answer = format_found(found, room=room, counter=self.counter)
        else:
            answer = RecallAnswer(UNKNOWN, self.counter.count(UNKNOWN))
        text = answer.text + last
        return RecallAnswer(text, self.counter.count(text), answer.hits)

    def _messages(self, turn: RecallTurn) -> list[bytes]:
        return [write_value(each) for each in turn.sent([answer.text for answer in self._answers])]

    def _keep(self) -> None:
        if self._turn is None:
            return
        self._sent += self._messages(self._turn)
        overhead = count_message(self._turn.message, self.counter, model=self.model)
        self.room -= overhead + sum(answer.tokens + 4 for answer in self._answers)
        self.recalled += (
            Recalled(self.number, _hash(call), answer.hits, answer.tokens)
            for call, answer in zip(self._turn.calls, self._answers, strict=True)
        )
        self._turn = None


def _hash(call: RecallCall) -> str:
    return blake2b(
        (call.ref or call.query).encode("utf-8", "surrogatepass"), digest_size=8
    ).hexdigest()


async def next_answer(rounds: Rounds, turn: RecallTurn, ask: AskAgain) -> UpstreamResponse:
    body: bytes | None = await rounds.after(turn)
    while body is not None:
        received, verdict = await ask(body)
        if not verdict.is_overflow:
            break
        body = await rounds.smaller()
        if body is not None:
            received.answer.close()
    if 400 <= received.answer.status < 500 and received.answer.status not in NOT_OURS:
        received.answer.close()
        rounds.finish()
        received, _ = await ask(rounds.plain)
    return received


async def follow_whole(
    received: UpstreamResponse, rounds: Rounds, ask: AskAgain, ended: Ended
) -> UpstreamResponse:
    """The answer to relay once the model has what it recalled; the same one where it recalled
    nothing.
    """
    name = rounds.offer.name
    before = list[Mapping[str, Any]]()
    turn = None
    while (value := _answer(received, name)) is not None:
        turn = turn_of(value["choices"][0]["message"], name)
        if turn is None or not rounds.may_go_on:
            break
        before.append(value)
        received.answer.close()
        ended(received, received.seen)
        received = await next_answer(rounds, turn, ask)
    rounds.finish()
    value = _answer(received, "")
    if value is None or not (before or turn):
        return received
    written = write_value(joined([*before, value], name, with_text=rounds.joins))
    seen = read_completion(written, CHAT)
    return msgspec.structs.replace(received, body=written, seen=seen, rewritten=True)


def _answer(received: UpstreamResponse, name: str) -> dict[str, Any] | None:
    body = received.body
    if (
        body is None
        or received.answer.status >= 400
        or not received.answer.ended
        or name.encode() not in body
    ):
        return None
    return answer_in(body)


@dataclass(slots=True)
class Gate:
    send: Send
    headers: Callable[[UpstreamResponse], Headers]
    received: UpstreamResponse
    tap: StreamTap
    is_open: bool = False
    _held: bytearray = field(default_factory=bytearray)

    async def write(self, data: bytes) -> None:
        if not data:
            return
        if self.is_open:
            self.tap.feed(data)
            await send_more(self.send, data)
        else:
            self._held += data

    async def open(self) -> None:
        if not self.is_open:
            self.is_open = True
            answer = self.received.answer
            await send_start(self.send, status=answer.status, headers=self.headers(self.received))
            held = bytes(self._held)
            self._held = bytearray()
            await self.write(held)

    async def close(self) -> None:
        await self.open()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(slots=True, kw_only=True)
class Relaying:
    """The relay of one streamed answer with its rounds.

    Attributes:
        headers: the client's response headers for an upstream's answer.
        explain: what a client receives whose stream broke off.
        ended: called with what each round that is followed by another has reported of itself.
        tap: reads what the client receives.
    """

    rounds: Rounds
    ask: AskAgain
    send: Send
    headers: Callable[[UpstreamResponse], Headers]
    explain: Callable[[Exception], ProxyError]
    ended: Ended
    tap: StreamTap = field(default_factory=lambda: StreamTap(codec=CHAT))

    async def run(self, received: UpstreamResponse) -> UpstreamResponse | None:
        """Nothing, or an answer that is to be relayed instead, nothing having been sent.

        Raises Cut if the stream broke off, ProxyError if the upstream could not be called again and
        nothing was sent.
        """
        gate = Gate(self.send, self.headers, received, self.tap)
        earlier: Earlier | None = None
        while True:
            view = RoundView(self.rounds.offer.name, earlier, may_recall=self.rounds.may_go_on)
            seen = await self._round(gate, view, received)
            turn = view.turn() if view.recalling and seen.error is None else None
            if turn is None:
                break
            earlier = view.leaves()
            self.ended(received, seen)
            gate.received = received = await self._next(gate, turn)
            if received.chunks is None:
                if not gate.is_open:
                    return received
                received.answer.close()
                await self._fail(gate, _refusal(received))
        await gate.close()
        return None

    async def _round(self, gate: Gate, view: RoundView, received: UpstreamResponse) -> Tap:
        tap = StreamTap(codec=CHAT)
        try:
            with to_its_end(tap):
                async with aclosing(_chunks(received)) as chunks:
                    async for chunk in chunks:
                        if chunk is not None:
                            tap.feed(chunk)
                            await gate.write(view.feed(chunk))
                        if view.visible or (chunk is None and not view.recalling):
                            await gate.open()
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

    async def _next(self, gate: Gate, turn: RecallTurn) -> UpstreamResponse:
        try:
            # a task of its own, so that a stopping process can cancel the model call and not the
            # request
            return await asyncio.ensure_future(next_answer(self.rounds, turn, self.ask))
        except (ProxyError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                # the client has gone; else it was the question alone that was cancelled: the
                # process ends
                raise
            reason = (
                self.explain(StreamBroken("cancelled"))
                if isinstance(error, asyncio.CancelledError)
                else error
            )
            if gate.is_open:
                await self._fail(gate, reason.event(), error)
            raise reason from error

    async def _fail(self, gate: Gate, event: bytes, cause: BaseException | None = None) -> NoReturn:
        await gate.write(event)
        raise StreamCut("the answer broke off between two rounds") from cause


def _refusal(received: UpstreamResponse) -> bytes:
    error = decoded(received.body or b"")
    if error is not None and error.get("error"):
        return b"\n\n" + unnamed_event(write_value(error))
    return UpstreamUnreachable(
        f"The upstream answered {received.answer.status} inside this answer."
    ).event()


async def _chunks(received: UpstreamResponse) -> AsyncGenerator[bytes | None, None]:
    opening = received.opening
    chunks = received.chunks
    assert chunks is not None  # noqa: S101 - the caller has checked
    async with aclosing(chunks) as rest:
        for chunk in opening.held if opening is not None else ():
            yield chunk
        yield None
        if opening is not None and opening.pending is not None:
            with contextlib.suppress(StopAsyncIteration):
                yield await opening.pending
        async for chunk in rest:
            yield chunk
