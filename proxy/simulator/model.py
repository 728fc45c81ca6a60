"""One request for an answer, from its bytes to the delivery: check, count, remember, answer, misbehave."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from proxy.simulator.answers import SimulatedAnswer, Spoken, asked_tokens, default_answer, speak
from proxy.simulator.delivery import (
    FAULT_PREFIX,
    FaultRule,
    InjectedFault,
    Scene,
    Transmission,
    answer_with_status,
    as_json,
    as_stream,
    compact,
    parse_fault,
)
from proxy.simulator.errors import (
    Dialect,
    OversizedPrompt,
    Problem,
    Rejected,
    overflow_problem,
    problem_body,
    status_problem,
)
from proxy.simulator.settings import SimulatorSettings
from proxy.simulator.summaries import wants_summary
from proxy.simulator.window import Count, CountedPrompt, PrefixCache, PromptCounter, PromptPart, Request, overflows

NOT_JSON = (
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP library "
    "correctly. The OpenAI API expects a JSON payload, but what was sent was not valid JSON.)"
)
NO_FAULT = InjectedFault()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer with all that its rendering needs; ``created`` in seconds since 1970.

    ``cached`` of the ``prompt`` tokens were in the cache; ``written`` were put there by a cache marker.
    """

    id: str
    created: int
    model: str
    dialect: Dialect
    request: Request
    spoken: Spoken
    prompt: int
    cached: int
    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One endpoint: how it judges a request, counts it, and writes an answer."""

    check: Callable[[Request, SimulatorSettings], None]
    pieces: Callable[[Request], list[PromptPart]]
    body: Callable[[Completion], Mapping[str, Any]]
    events: Callable[[Completion], tuple[bytes, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What the ledger learns of a request while it is answered."""

    model: str = ""
    fault: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Model:
    """The simulated model behind every endpoint: its counter, its cache, and which faults were met how often."""

    def __init__(self, settings: SimulatorSettings, *, count: Count) -> None:
        self.settings = settings
        self.counter = PromptCounter(count)
        self.cache = PrefixCache(entries=settings.cache_entries, minimum=settings.cache_minimum)
        self._met: Counter[str] = Counter()
        self._serial = 0

    def exchange(
        self, surface: Surface, body: bytes, *, credential: str, header: str | None
    ) -> tuple[Transmission, Noted]:
        """The delivery for one request body, and what was found out about it; ``header`` names a fault."""
        settings, noted = self.settings, Noted()
        try:
            request = self._parse(body, credential)
            fault = self._meet(request, header)
            noted = Noted(model=str(request.get("model") or ""), fault=fault.name)
            surface.check(request, settings)
            if self._is_summary(request):
                settings.summarizer.check(request)
            return self._answer(surface, request, fault, noted, credential)
        except Rejected as rejected:
            problem = rejected.problem
            body = json.dumps(problem_body(problem, settings.dialect)).encode()
            return as_json(body, status=problem.status, headers=self._headers()), noted

    def measure(self, surface: Surface, body: bytes) -> CountedPrompt:
        """The counted pieces of a request, without judging it."""
        return self.counter.measure(surface.pieces(json.loads(body)))

    def _is_summary(self, request: Request) -> bool:
        return wants_summary(request, self.settings.summary_model)

    def _parse(self, body: bytes, credential: str) -> Request:
        settings = self.settings
        if settings.api_keys and credential not in settings.api_keys:
            raise Rejected(status_problem(401, model="", dialect=settings.dialect, retry_after=""))
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            status = 500 if settings.dialect is Dialect.LLAMACPP else 400
            raise Rejected(Problem(status=status, message=NOT_JSON)) from None
        if not isinstance(request, dict):
            raise Rejected(Problem(message="Invalid type for request body: expected an object."))
        return request

    def _meet(self, request: Request, header: str | None) -> InjectedFault:
        """The fault for this request: of the header, else of the model's name, else of the settings."""
        model = request.get("model")
        spelling = header or (model if isinstance(model, str) and model.startswith(FAULT_PREFIX) else None)
        spelling = spelling or self.settings.fault
        if not spelling:
            return NO_FAULT
        try:
            fault = parse_fault(spelling, self.settings.faults)
        except ValueError as error:
            raise Rejected(Problem(message=str(error), param="model")) from None
        self._met[spelling] += 1
        return fault if fault.times is None or self._met[spelling] <= fault.times else NO_FAULT

    def _answer(
        self, surface: Surface, request: Request, fault: InjectedFault, noted: Noted, credential: str
    ) -> tuple[Transmission, Noted]:
        model, asked = str(request["model"]), asked_tokens(request)
        prompt = self.counter.measure(surface.pieces(request))
        window = int(fault.number(0)) if fault.name == "window" else self.settings.window_of(model)
        noted = replace(noted, prompt_tokens=prompt.total)
        status, error = self._error(fault, prompt, window, asked)
        scene = Scene(dialect=self.settings.dialect, model=model, overflow=error)
        # llama.cpp reserves nothing for the answer, it stops where the window ends
        reserved = None if self.settings.dialect is Dialect.LLAMACPP else asked
        if overflows(prompt, window=window, asked=reserved):
            refused = as_json(error, status=status, headers=self._headers())
            return self._refuse(fault, refused, scene, streamed=bool(request.get("stream"))), noted
        outcome = self._outcome(request, prompt, window, credential)
        delivery = self._apply(fault, self._render(surface, outcome), scene)
        if delivery.completes:
            self.cache.remember(prompt, credential=credential, model=model)
        return delivery, replace(noted, cached_tokens=outcome.cached, completion_tokens=outcome.spoken.tokens)

    def _apply(self, fault: InjectedFault, delivery: Transmission, scene: Scene) -> Transmission:
        if fault.is_status:
            return answer_with_status(fault, scene)
        return self.settings.faults.get(fault.name, FaultRule()).change(delivery, fault, scene)

    def _refuse(self, fault: InjectedFault, refused: Transmission, scene: Scene, *, streamed: bool) -> Transmission:
        """The refusal of a request that is too long, or what a fault that comes before or around it makes of it."""
        if fault.name in {"overflow_in_stream", "error_in_stream"}:
            return as_stream((scene.error_event,)) if streamed else as_json(scene.overflow)
        wins = fault.is_status or self.settings.faults.get(fault.name, FaultRule()).wins
        return self._apply(fault, refused, scene) if wins else refused

    def _error(self, fault: InjectedFault, prompt: CountedPrompt, window: int, asked: int | None) -> tuple[int, bytes]:
        stated = int(fault.number(window // 2)) if fault.name == "wrong_window" else window
        size = max(prompt.total, stated + 1) if fault.name.startswith("error_in_stream") else prompt.total
        overflow = OversizedPrompt(stated, size, prompt.tools, asked)
        asked_for = fault.argument if fault.name == "wording" else ""
        wording = asked_for or self.settings.wording or self.settings.dialect
        if wording in self.settings.wordings:
            status, body = self.settings.wordings[wording]
            return status, json.dumps(body(overflow)).encode()
        if wording not in [*Dialect]:
            raise Rejected(Problem(message=f"unknown wording {wording!r}; known are {', '.join(Dialect)}"))
        dialect = Dialect(wording)
        return 400, json.dumps(problem_body(overflow_problem(overflow, dialect), dialect)).encode()

    def _outcome(self, request: Request, prompt: CountedPrompt, window: int, credential: str) -> Completion:
        settings, model, count = self.settings, str(request["model"]), self.counter.count
        limits = [size for size in (asked_tokens(request), settings.max_output) if size is not None]
        self._serial += 1
        mark = blake2b(f"{settings.seed}:{self._serial}".encode(), digest_size=12).hexdigest()
        prefix = "msg_" if settings.dialect is Dialect.ANTHROPIC else "chatcmpl-"
        return Completion(
            id=prefix + mark,
            created=int(time.time()),
            model=model,
            dialect=settings.dialect,
            request=request,
            spoken=speak(self._choose(request), limit=min([window - prompt.total, *limits]), count=count),
            prompt=prompt.total,
            cached=self.cache.cached_tokens(prompt, credential=credential, model=model),
            written=sum(prompt.tokens[: prompt.breakpoint]),
        )

    def _choose(self, request: Request) -> SimulatedAnswer:
        """The answer that the settings have for this request, before any limit on its length."""
        settings = self.settings
        if self._is_summary(request):
            return settings.summarizer.answer(request, max_output=settings.max_output, count=self.counter.count)
        turn = sum(1 for message in request["messages"] if message.get("role") == "assistant")
        if settings.answer is not None:
            answer = settings.answer(request)
        elif turn < len(settings.answers):
            answer = settings.answers[turn]
        else:
            return default_answer(request, settings.seed)
        return SimulatedAnswer(text=answer) if isinstance(answer, str) else answer

    def _render(self, surface: Surface, outcome: Completion) -> Transmission:
        settings, request = self.settings, outcome.request
        headers = self._headers()
        if request.get("stream"):
            delivery = as_stream(surface.events(outcome), headers=headers)
        else:
            delivery = as_json(compact(surface.body(outcome)), headers=headers)
        delivery = replace(delivery, before=settings.latency, between=settings.chunk_delay)
        if not self._is_summary(request):
            return delivery
        if settings.summary_seconds is not None:
            delivery = replace(delivery, before=settings.summary_seconds)
        return settings.summarizer.deliver(delivery)

    def _headers(self) -> dict[str, str]:
        mark = f"req_{blake2b(str(self._serial).encode(), digest_size=10).hexdigest()}"
        if self.settings.dialect is Dialect.ANTHROPIC:
            return {"request-id": mark}
        if self.settings.dialect is Dialect.OPENAI:
            limits = {"x-ratelimit-limit-requests": "10000", "x-ratelimit-remaining-requests": "9999"}
            return {"x-request-id": mark, "openai-processing-ms": "1", "openai-version": "2020-10-01", **limits}
        return {"x-request-id": mark} if self.settings.dialect is Dialect.VLLM else {"server": "llama.cpp"}
