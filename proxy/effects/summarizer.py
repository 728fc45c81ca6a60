"""Requesting notes from a model: bounded in time and in tokens, shared when identical, answered
once and kept.

A failure is a reply with a short code, never an exception: the ladder below it goes on without a
model. In the order in which they are looked at::

    kept answer     what this tenant received before, from memory or from the store; costs nothing
    shutting_down   the process ends
    no_schema       this model refused the schema within the last hour
    not_ready       the client's request waits no longer, by its policy
    backing_off     the last three calls or more failed, so it is left alone for a while
    the call        timeout, status_500, context_length_exceeded, loop_detected, not_an_answer …
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from cachetools import LRUCache, TLRUCache

from policies.effects import Failed, Summarize, Summary
from policies.summary.check import declines, without_reasoning
from proxy.errors import LoopDetected, ProxyError, ShuttingDown
from proxy.store import Store
from proxy.store.records import SummaryRow
from proxy.tap import ReportedUsage, usage_from
from proxy.upstream.overflow import classify, plausible_limit
from proxy.wire.codec import CHAT, Codec, LimitField
from proxy.wire.raw import write_value

log = logging.getLogger("weir.summaries")

MAX_KEPT = 512
MAX_CHARACTERS = 4_000_000
STOPPED = "stop"


def _size(answer: Summary) -> int:
    """The characters that a kept answer counts as: at least a share, which also bounds how many."""
    return max(len(answer.text), MAX_CHARACTERS // MAX_KEPT)


class SummaryCache:
    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._failing = False
        self._answers: LRUCache[tuple[str, bytes], Summary] = LRUCache(
            MAX_CHARACTERS, getsizeof=_size
        )
        self._writing: set[asyncio.Task[None]] = set()

    def remembered(self, tenant: str, address: bytes) -> Summary | None:
        return self._answers.get((tenant, address))

    async def find(self, tenant: str, address: bytes) -> Summary | None:
        if self._store is None:
            return None
        try:
            row = await self._store.summary(tenant, address)
        except Exception as error:  # noqa: BLE001 - a store that fails never costs a request
            self._say_failing(error)
            return None
        return None if row is None else self._remember(tenant, row)

    def keep(self, tenant: str, row: SummaryRow) -> None:
        self._remember(tenant, row)
        if self._store is not None:
            task = asyncio.create_task(
                self._write(self._store, tenant, row), name="weir-keep-summary"
            )
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def forget(self, tenant: str) -> None:
        for key in [key for key in self._answers if key[0] == tenant]:
            del self._answers[key]

    async def close(self) -> None:
        await asyncio.gather(*self._writing, return_exceptions=True)

    def _remember(self, tenant: str, row: SummaryRow) -> Summary:
        answer = Summary(text=row.text, finish_reason=STOPPED, model=row.model)
        if len(answer.text) <= MAX_CHARACTERS:
            self._answers[tenant, row.key] = answer
        return answer

    async def _write(self, store: Store, tenant: str, row: SummaryRow) -> None:
        try:
            await store.keep_summary(tenant, row)
        except Exception as error:  # noqa: BLE001 - a store that fails never costs a request
            self._say_failing(error)
        else:
            self._failing = False

    def _say_failing(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            log.warning(
                "summaries are kept in memory only, the store fails: %s", type(error).__name__
            )


AT_ONCE = 8
BACK_OFF_AFTER = 3
BACK_OFF_FIRST = 15.0
MAX_BACK_OFF = 600.0
MAX_DOUBLINGS = 10
MAX_KNOWN = 1_024
MAX_ANSWER = 4 * 1024 * 1024
LEARNED_FOR = 3_600.0
NO_SCHEMA = "no_schema"
FORM = "form"
LIMIT = "limit"
RESTS = "rests"
"""What is learned of a model: it takes no JSON by schema, it reasons, how many tokens it holds, how
often it failed.
"""

Send = Callable[[bytes], Awaitable[tuple[int, bytes]]]
Source = Literal["asked", "shared", "kept", "refused"]

NO_FAULT_OF_THE_MODEL = frozenset({"no_schema", "context_length_exceeded", ShuttingDown.code})
"""Failures of one question, or of this process: they are no reason to pause calls to the model.
"""


class SummarizerTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Which model is called, for whom, and for how long."""

    tenant: str
    upstream: str
    model: str
    seconds: float = 20.0
    codec: Codec = CHAT

    @property
    def scope(self) -> tuple[str, str, str]:
        """The key under which failures and refusals are remembered: one tenant's key cannot stop
        another tenant's calls.
        """
        return self.tenant, self.upstream, self.model

    @property
    def served(self) -> tuple[str, str]:
        """The key under which the forms that a model takes are remembered: they are the same for
        every caller.
        """
        return self.upstream, self.model


class SummaryResult(msgspec.Struct, frozen=True, kw_only=True):
    """A reply, and what it took.

    ``source`` says whether a call was made for it (``asked``), another request's call was waited
    for (``shared``), it was known already (``kept``) or nobody was asked (``refused``). ``usage``
    is what the upstream reported, None for anything but a call of its own; ``seconds`` is the time
    of the call, or of the wait.
    """

    reply: Summary | Failed
    source: Source
    usage: ReportedUsage | None = None
    seconds: float = 0.0

    @property
    def result(self) -> str:
        return self.reply.reason if isinstance(self.reply, Failed) else "ok"


def _refused(code: str) -> SummaryResult:
    return SummaryResult(reply=Failed(code), source="refused")


_NOT_READY = _refused("not_ready")


@dataclass(slots=True)
class _ModelQueue:
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    waiting: int = 0
    failures: int = 0
    rests: int = 0

    @property
    def is_failing(self) -> bool:
        return self.failures >= BACK_OFF_AFTER


class _Learned:
    """What was learned of models, each for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._known: TLRUCache[tuple[str, ...], tuple[str, float]] = TLRUCache(
            MAX_KNOWN, ttu=lambda _, known, now: now + known[1], timer=clock
        )

    def get(self, what: str, scope: Sequence[str]) -> str | None:
        value, _ = self._known.get((what, *scope), (None, 0.0))
        return value

    def put(
        self, what: str, scope: Sequence[str], value: str, *, seconds: float = LEARNED_FOR
    ) -> None:
        self._known[what, *scope] = (value, seconds)


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    effect: Summarize
    terms: SummarizerTerms
    limit: LimitField
    body: bytes
    address: bytes
    send: Send


class Summarizer:
    """One per process. What identical requests need at the same time is requested once, and kept
    where it has a key.

    ``clock`` is monotonic, ``now`` the time of day, both in seconds. ``patience`` is used instead
    of the seconds of every policy. Without a ``store`` answers are kept in memory only.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        patience: float | None = None,
        store: Store | None = None,
    ) -> None:
        self._clock = clock
        self._now = now
        self._patience = patience
        self._closed = False
        self._kept = SummaryCache(store)
        self._flying: dict[bytes, asyncio.Task[SummaryResult]] = {}
        self._lines: OrderedDict[tuple[str, str, str], _ModelQueue] = OrderedDict()
        self._learned = _Learned(clock)

    async def ask(
        self,
        effect: Summarize,
        *,
        terms: SummarizerTerms,
        send: Send,
        waits: float | None = None,
    ) -> SummaryResult:
        started = self._clock()
        if self._closed:
            return _refused(ShuttingDown.code)
        address = _address(effect, terms) if effect.key else b""
        kept = self._kept.remembered(terms.tenant, address) if address else None
        if kept is not None:
            return SummaryResult(reply=kept, source="kept")
        if waits is not None and waits <= 0:
            kept = await self._kept.find(terms.tenant, address) if address else None
            return _NOT_READY if kept is None else SummaryResult(reply=kept, source="kept")
        limit: LimitField = (
            "max_tokens"
            if self._learned.get(FORM, terms.scope) is None
            else "max_completion_tokens"
        )
        body = _body(effect, terms, limit)
        flight = _flight(terms, address or body)
        if (task := self._flying.get(flight)) is not None:
            return await self._share(task, started, waits)
        question = _Question(
            effect=effect, terms=terms, limit=limit, body=body, address=address, send=send
        )
        task = asyncio.create_task(self._answer(question), name="weir-summarise")
        self._flying[flight] = task
        task.add_done_callback(lambda _: self._flying.pop(flight, None))
        return await _outcome(task, waits)

    def input_limit(self, *, tenant: str, upstream: str, model: str) -> int | None:
        limit = self._learned.get(LIMIT, (tenant, upstream, model))
        return None if limit is None else int(limit)

    def forget(self, tenant: str) -> None:
        self._kept.forget(tenant)

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._flying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kept.close()

    async def _share(
        self, task: "asyncio.Task[SummaryResult]", started: float, waits: float | None
    ) -> SummaryResult:
        told = await _outcome(task, waits)
        source: Source = "shared" if told.source == "asked" else told.source
        return msgspec.structs.replace(
            told, source=source, usage=None, seconds=self._clock() - started
        )

    async def _answer(self, question: _Question) -> SummaryResult:
        tenant = question.terms.tenant
        scope = question.terms.scope
        kept = await self._kept.find(tenant, question.address) if question.address else None
        if kept is not None:
            return SummaryResult(reply=kept, source="kept")
        line = self._lines.setdefault(scope, _ModelQueue())
        self._lines.move_to_end(scope)
        line.waiting += 1
        try:
            async with line.turns:
                return await self._ask(question, line)
        finally:
            line.waiting -= 1
            self._tidy(scope, line)

    async def _ask(self, question: _Question, line: _ModelQueue) -> SummaryResult:
        terms = question.terms
        if refusal := self._refusal(question, line):
            return _refused(refusal)
        started = self._clock()
        rests = line.rests
        if line.is_failing:  # while it is tried nobody else calls it
            self._learned.put(RESTS, terms.scope, str(line.failures), seconds=terms.seconds)
        reply, usage = await self._call(question)
        self._note(line, terms.scope, reply, rests)
        if isinstance(reply, Summary) and question.effect.schema and _is_without_form(reply):
            self._learned.put(NO_SCHEMA, terms.served, "1")
        if isinstance(reply, Summary) and question.address:
            self._keep(question, reply, usage or ReportedUsage())
        return SummaryResult(
            reply=reply, source="asked", usage=usage, seconds=self._clock() - started
        )

    def _refusal(self, question: _Question, line: _ModelQueue) -> str:
        if question.effect.schema and self._learned.get(NO_SCHEMA, question.terms.served):
            return "no_schema"
        failures = int(self._learned.get(RESTS, question.terms.scope) or 0)
        line.failures = max(line.failures, failures)
        return "backing_off" if failures else ""

    async def _call(self, question: _Question) -> tuple[Summary | Failed, ReportedUsage | None]:
        """The reply of the model, and what it reported; requested once more where it takes its
        limits in another form.
        """
        terms = question.terms
        try:
            async with asyncio.timeout(self._patience or terms.seconds):
                status, content = await question.send(question.body)
                if wants_other_form(status, content) and question.limit == "max_tokens":
                    self._learned.put(FORM, terms.scope, "reasoning")
                    status, content = await question.send(
                        _body(question.effect, terms, "max_completion_tokens")
                    )
        except TimeoutError:
            return Failed("timeout"), None
        except ProxyError as error:
            return Failed(error.code), None
        except Exception as error:  # noqa: BLE001 - whatever a summariser does, the request goes on without it
            return Failed(f"error_{type(error).__name__}"), None
        if status == 200:
            return read_answer(content, terms.codec)
        return Failed(self._reason(question, status, content)), None

    def _reason(self, question: _Question, status: int, content: bytes) -> str:
        verdict = classify(status, content)
        if verdict.is_overflow:
            limit = plausible_limit(verdict)
            if limit is not None:
                self._learned.put(LIMIT, question.terms.scope, str(limit))
            return "context_length_exceeded"
        if _error(content).get("code") == LoopDetected.code:
            return LoopDetected.code
        if status in (400, 422) and question.effect.schema:
            self._learned.put(NO_SCHEMA, question.terms.served, "1")
            return "no_schema"
        return f"status_{status}"

    def _note(
        self, line: _ModelQueue, scope: Sequence[str], reply: Summary | Failed, rests: int
    ) -> None:
        if isinstance(reply, Summary) or reply.reason in NO_FAULT_OF_THE_MODEL:
            was_failing = line.is_failing
            line.failures = 0
            if was_failing:
                self._learned.put(RESTS, scope, "0")
        elif line.rests == rests:
            line.failures += 1
            if line.is_failing:
                line.rests += 1
                pause = BACK_OFF_FIRST * 2 ** min(line.failures - BACK_OFF_AFTER, MAX_DOUBLINGS)
                self._learned.put(
                    RESTS, scope, str(line.failures), seconds=min(pause, MAX_BACK_OFF)
                )

    def _tidy(self, scope: tuple[str, str, str], line: _ModelQueue) -> None:
        if not line.waiting and not line.failures:
            self._lines.pop(scope, None)
        if len(self._lines) > MAX_KNOWN:
            idle = next((known for known, other in self._lines.items() if not other.waiting), None)
            if idle is not None:
                del self._lines[idle]

    def _keep(self, question: _Question, answer: Summary, usage: ReportedUsage) -> None:
        if (
            answer.finish_reason != STOPPED
            or answer.tool_calls
            or not answer.text.strip()
            or declines(answer.text)
        ):
            return
        row = SummaryRow(
            key=question.address,
            at=self._now(),
            purpose=question.effect.purpose,
            model=answer.model or question.terms.model,
            tokens_in=usage.prompt or 0,
            tokens_out=usage.completion or 0,
            text=answer.text,
        )
        self._kept.keep(question.terms.tenant, row)


async def _outcome(task: "asyncio.Task[SummaryResult]", waits: float | None) -> SummaryResult:
    await asyncio.wait((task,), timeout=waits)
    if not task.done():
        return _NOT_READY
    return _refused(ShuttingDown.code) if task.cancelled() else task.result()


def _body(effect: Summarize, terms: SummarizerTerms, limit: LimitField) -> bytes:
    return write_value({"model": terms.model, **terms.codec.question(effect, limit)})


def _is_without_form(reply: Summary) -> bool:
    """Whether a model that was to answer by schema said something else, or nothing: it will do so
    every time.
    """
    if reply.tool_calls or declines(reply.text):
        return False
    said = without_reasoning(reply.text).removeprefix("```json").strip("` \n\t")
    return not said.startswith("{") or said.replace(" ", "") == "{}"


def _address(effect: Summarize, terms: SummarizerTerms) -> bytes:
    schema = "schema" if effect.schema else ""
    return _digest(
        terms.tenant, terms.model, effect.purpose, effect.key, schema, effect.system, effect.prompt
    )


def _flight(terms: SummarizerTerms, asked: bytes) -> bytes:
    return _digest(terms.tenant, terms.upstream, terms.model, asked)


def _digest(*parts: str | bytes) -> bytes:
    hashed = blake2b(digest_size=16, person=b"weir-summary")
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(8, "big"))
        hashed.update(data)
    return hashed.digest()


def read_answer(
    content: bytes, codec: Codec = CHAT
) -> tuple[Summary | Failed, ReportedUsage | None]:
    """The text of a completion and its usage; a text that is too long counts as none."""
    try:
        answer = codec.completion(msgspec.json.decode(content))
        choice = answer["choices"][0]
        message = choice["message"]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError):
        return Failed("not_an_answer"), None
    usage = usage_from(answer.get("usage"))
    if not isinstance(message, dict):
        return Failed("not_an_answer"), usage
    text = message.get("content")
    calls = message.get("tool_calls") or message.get("function_call")
    return Summary(
        text=text if isinstance(text, str) else "",
        finish_reason=str(choice.get("finish_reason") or ""),
        tool_calls=len(calls)
        if isinstance(calls, list)
        else int(calls is not None and bool(calls)),
        model=str(answer.get("model") or ""),
    ), usage


def wants_other_form(status: int, content: bytes) -> bool:
    error = _error(content) if status == 400 else {}
    is_unsupported = error.get("code") in ("unsupported_parameter", "unsupported_value")
    return is_unsupported and error.get("param") in ("max_tokens", "temperature")


def _error(content: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return {}
    error = value.get("error") if isinstance(value, dict) else None
    return error if isinstance(error, dict) else {}
