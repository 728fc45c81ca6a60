"""Asking again with what was recalled: as often as the policy allows, and never for more than the window holds.

::

    calls answered so far   a further call gets                     what the model may do next
    < rounds - 1            its answer                              call again
    rounds - 1              its answer, and that it was the last    answer; a call is refused
    rounds                  a refusal                               answer; a call is taken out of what it says

Where the upstream says that an answer is too long for its window, the same round is asked with half of it, then with
none. Where it refuses the round for another reason of its own, the client's own request goes up, as if there
were no such tool. What a client can mend by waiting (429, 5xx) it is told.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import msgspec

from policies import TokenCounter
from proxy.recall.answering import (
    LAST,
    REFUSED,
    UNKNOWN,
    Past,
    RecallAnswer,
    tell_found,
    tell_page,
    tell_problem,
)
from proxy.recall.archive import Archive, SearchResult
from proxy.recall.tool import Offer, RecallCall, RecallTurn, turn_of, with_more_messages, without_calls
from proxy.store.records import StoreError
from proxy.stream.relay import UpstreamResponse
from proxy.tap import Tap, read_completion
from proxy.upstream.overflow import Verdict
from proxy.wire.counting import count_message
from proxy.wire.raw import write_value

SHARES = (1.0, 0.5, 0.0)
NOT_OURS = frozenset({401, 402, 403, 408, 409, 425, 429})

AskAgain = Callable[[bytes], Awaitable[tuple[UpstreamResponse, Verdict]]]
Ended = Callable[[UpstreamResponse, Tap | None], None]
"""RecallAnswer of each answer that another round follows, with what the upstream said of itself in it."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """One call that was answered: in which round (from 1), the hash of what it asked, texts and tokens it brought."""

    round: int
    query: str
    hits: int
    tokens: int


@dataclass(slots=True, kw_only=True)
class Rounds:
    """The rounds of one request.

    Attributes:
        body: the forwarded request with the tool, ``plain`` the same without it.
        room: uncalibrated tokens that the window has left beside that request and its answer.
        most: rounds that are answered, ``max_tokens`` the most tokens of one answer.
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
    number: int = 0
    over: bool = False
    recalled: list[Recalled] = field(default_factory=list)
    _sent: list[bytes] = field(default_factory=list)
    _turn: RecallTurn | None = None
    _found: list[SearchResult | Past | None] = field(default_factory=list)
    _share: int = 0
    _told: list[RecallAnswer] = field(default_factory=list)

    @property
    def may_go_on(self) -> bool:
        """Whether a call that comes now is answered, or at least refused in words."""
        return not self.over and self.number <= self.most

    async def after(self, turn: RecallTurn) -> bytes:
        """The next request: the one before, the turn, and the answers to its calls."""
        self._keep()
        self.number += 1
        self._turn, self._share = turn, 0
        self._found = [await self._look(call) for call in turn.calls]
        return await self._ask()

    async def smaller(self) -> bytes | None:
        """The same request with half as much in the answers, then with none; None if there is nothing to cut."""
        if self._turn is None or self._share + 1 >= len(SHARES):
            return None
        self._share += 1
        return await self._ask()

    def finish(self) -> None:
        """Take note of the last round; the tool is offered no more."""
        self._keep()
        self.over = True

    async def _look(self, call: RecallCall) -> SearchResult | Past | None:
        if call.problem or self.number > self.most:
            return None
        try:
            return await self.archive.read(call.ref) if call.ref else await self.archive.find(call.query)
        except StoreError:
            return None

    async def _ask(self) -> bytes:
        assert self._turn is not None  # noqa: S101 - set by after()
        self._told = await asyncio.to_thread(self._tell, self._turn)
        return with_more_messages(self.body, [*self._sent, *self._messages()])

    def _tell(self, turn: RecallTurn) -> list[RecallAnswer]:
        overhead = count_message(turn.message, self.counter, model=self.model)
        room = int(min(self.room - overhead, self.max_tokens * len(turn.calls)) * SHARES[self._share])
        told: list[RecallAnswer] = []
        for number, (call, found) in enumerate(zip(turn.calls, self._found, strict=True)):
            share = min(self.max_tokens, room // (len(turn.calls) - number))
            told.append(self._tell_one(call, found, share))
            room -= told[-1].tokens
        return told

    def _tell_one(self, call: RecallCall, found: SearchResult | Past | None, room: int) -> RecallAnswer:
        """The answer to one call, in at most ``room`` tokens as far as it has text in it."""
        if self.number > self.most:
            return RecallAnswer(REFUSED, self.counter.count(REFUSED))
        last = f"\n{LAST}" if self.number == self.most else ""
        room -= self.counter.count(last) + 4 if last else 4
        if call.problem:
            told = tell_problem(call.problem, self.counter)
        elif isinstance(found, Past):
            told = tell_page(found, call.cursor, room=room, counter=self.counter)
        elif found is not None:
            told = tell_found(found.pasts, found.hits, found.terms, room=room, counter=self.counter)
        else:
            told = RecallAnswer(UNKNOWN, self.counter.count(UNKNOWN))
        text = told.text + last
        return RecallAnswer(text, self.counter.count(text), told.hits)

    def _messages(self) -> list[bytes]:
        assert self._turn is not None  # noqa: S101 - the caller has set it
        answers = (
            {"role": "tool", "tool_call_id": call.id, "content": told.text}
            for call, told in zip(self._turn.calls, self._told, strict=True)
        )
        return [write_value(dict(self._turn.message)), *(write_value(each) for each in answers)]

    def _keep(self) -> None:
        """What the last round sent is part of every further one."""
        if self._turn is None:
            return
        messages = self._messages()
        self._sent += messages
        overhead = count_message(self._turn.message, self.counter, model=self.model)
        self.room -= overhead + sum(told.tokens + 4 for told in self._told)
        self.recalled += (
            Recalled(self.number, _hash(call), told.hits, told.tokens)
            for call, told in zip(self._turn.calls, self._told, strict=True)
        )
        self._turn = None


def _hash(call: RecallCall) -> str:
    return blake2b((call.ref or call.query).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


async def next_answer(rounds: Rounds, turn: RecallTurn, ask: AskAgain) -> UpstreamResponse:
    """The answer to the next round. Raises ProxyError where the upstream cannot be asked."""
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


def added_up(usage: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The usage object of the last round with the completions of those ``before`` it: prompt of one, words of all."""
    result = dict(usage)
    result["completion_tokens"] = _sum("completion_tokens", (*before, usage))
    details = [d for each in (*before, usage) if isinstance(d := each.get("completion_tokens_details"), dict)]
    if details:
        names = dict.fromkeys(name for each in details for name in each)
        summed = {n: _sum(n, details) for n in names if any(isinstance(each.get(n), int) for each in details)}
        result["completion_tokens_details"] = {**details[-1], **summed}
    result["total_tokens"] = _sum("prompt_tokens", (usage,)) + result["completion_tokens"]
    return result


def _sum(name: str, values: Sequence[Mapping[str, Any]]) -> int:
    return sum(value for each in values if isinstance(value := each.get(name), int))


JOINED = ("content", "reasoning_content", "reasoning")


async def follow_whole(
    received: UpstreamResponse, rounds: Rounds, ask: AskAgain, ended: Ended, *, joins: bool = True
) -> UpstreamResponse:
    """The answer to relay once the model has what it recalled; the same one where it recalled nothing.

    ``joins`` puts what the model said before its calls in front of what it says in the end.
    """
    before: list[Mapping[str, Any]] = []
    turn = None
    while (value := _completion(received, rounds.offer.name)) is not None:
        message = value["choices"][0]["message"]
        turn = turn_of(message, rounds.offer.name)
        if turn is None or not rounds.may_go_on:
            break
        before.append(value)
        received.answer.close()
        ended(received, received.seen)
        received = await next_answer(rounds, turn, ask)
    rounds.finish()
    value = _completion(received, "")
    if value is None or not (before or turn):
        return received
    written = write_value(_final(value, before, rounds.offer.name, joins=joins))
    return replace(received, body=written, seen=read_completion(written), rewritten=True)


def _completion(received: UpstreamResponse, name: str) -> dict[str, Any] | None:
    """A completion that has ``name`` in it; None for anything else."""
    body = received.body
    if body is None or received.answer.status >= 400 or not received.answer.ended or name.encode() not in body:
        return None
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    choices = value.get("choices") if isinstance(value, dict) else None
    first = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return value if isinstance(first, dict) and isinstance(first.get("message"), dict) else None


def _final(value: dict[str, Any], before: list[Mapping[str, Any]], name: str, *, joins: bool) -> dict[str, Any]:
    """The last completion as the client sees it: without calls of the tool, with the words and tokens of all rounds."""
    choice = dict(value["choices"][0])
    said = dict(choice["message"])
    message = without_calls(said, name)
    if "tool_calls" in said and "tool_calls" not in message and choice.get("finish_reason") == "tool_calls":
        choice["finish_reason"] = "stop"
        message["content"] = message.get("content") or ""
    for key in JOINED if joins else ():
        earlier = [each["choices"][0]["message"].get(key) for each in before]
        texts = [text for text in (*earlier, message.get(key)) if isinstance(text, str) and text.strip()]
        if len(texts) > 1 or (texts and not message.get(key)):
            message[key] = "\n\n".join(texts)
    final = {**value, "choices": [{**choice, "message": message}]}
    usages = [each["usage"] for each in before if isinstance(each.get("usage"), dict)]
    if usages and isinstance(value.get("usage"), dict):
        final["usage"] = added_up(value["usage"], usages)
    return final
