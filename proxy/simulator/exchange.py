"""One request for an answer, from its bytes to the delivery: check, count, remember, answer, misbehave."""

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from hashlib import blake2b

from proxy.simulator.answers import asked_tokens, choose_answer, speak
from proxy.simulator.cache import PrefixCache
from proxy.simulator.delivery import Delivery, as_json, as_stream
from proxy.simulator.dialects import Problem, Rejected, overflow_error, problem_body, status_problem
from proxy.simulator.faults import Fault, Scene, apply_fault, named_fault, parse_fault
from proxy.simulator.settings import Dialect, Request, SimulatorSettings, SummaryMode
from proxy.simulator.summaries import refuse_summary, wants_summary
from proxy.simulator.surface import Outcome, Surface, compact
from proxy.simulator.window import Count, Overflow, Prompt, PromptCounter, find_overflow

NOT_JSON = (
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP library "
    "correctly. The OpenAI API expects a JSON payload, but what was sent was not valid JSON.)"
)
NO_FAULT = Fault("none")
BEFORE_THE_WINDOW = frozenset({"stall", "redirect", "html", "latency", "empty_200"})


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

    def exchange(self, surface: Surface, body: bytes, *, credential: str, header: str | None) -> tuple[Delivery, Noted]:
        """The delivery for one request body, and what was found out about it; ``header`` names a fault."""
        dialect = self.settings.dialect
        noted = Noted()
        try:
            request = self._parse(body, credential)
            fault = self._meet(named_fault(request, header, self.settings.fault))
            noted = Noted(model=str(request.get("model") or ""), fault=fault.name if fault is not NO_FAULT else "")
            surface.check(request, self.settings)
            refuse_summary(request, self.settings)
            return self._answer(surface, request, fault, noted, credential)
        except Rejected as rejected:
            problem = rejected.problem
            body = json.dumps(problem_body(problem, dialect)).encode()
            return as_json(body, status=problem.status, headers=self._headers()), noted

    def measure(self, surface: Surface, body: bytes) -> Prompt:
        """The counted pieces of a request, without judging it."""
        return self.counter.measure(surface.pieces(json.loads(body)))

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

    def _meet(self, spelling: str | None) -> Fault:
        if not spelling:
            return NO_FAULT
        try:
            fault = parse_fault(spelling)
        except ValueError as error:
            raise Rejected(Problem(message=str(error), param="model")) from None
        self._met[spelling] += 1
        return fault if fault.times is None or self._met[spelling] <= fault.times else NO_FAULT

    def _answer(
        self, surface: Surface, request: Request, fault: Fault, noted: Noted, credential: str
    ) -> tuple[Delivery, Noted]:
        model, asked = str(request["model"]), asked_tokens(request)
        prompt = self.counter.measure(surface.pieces(request))
        window = int(fault.number(0)) if fault.name == "window" else self.settings.window_of(model)
        noted = replace(noted, prompt_tokens=prompt.total)
        reserved = 1 if self.settings.dialect is Dialect.LLAMACPP else asked
        overflow = find_overflow(prompt, window=window, asked=reserved)
        status, error = self._error(fault, prompt, window, asked)
        scene = Scene(dialect=self.settings.dialect, model=model, overflow=error)
        if overflow is not None:
            refused = as_json(error, status=status, headers=self._headers())
            return _refuse(fault, refused, scene, streamed=bool(request.get("stream"))), noted
        outcome = self._outcome(request, prompt, window, credential)
        delivery = self._render(surface, outcome)
        delivery = apply_fault(fault, delivery, scene)
        if delivery.answers:
            self.cache.remember(prompt, credential=credential, model=model)
        return delivery, replace(noted, cached_tokens=outcome.cached, completion_tokens=outcome.spoken.tokens)

    def _error(self, fault: Fault, prompt: Prompt, window: int, asked: int | None) -> tuple[int, bytes]:
        stated = int(fault.number(window // 2)) if fault.name == "wrong_window" else window
        wording = fault.argument if fault.name == "wording" else self.settings.wording or str(self.settings.dialect)
        size = max(prompt.total, stated + 1) if fault.name.startswith("error_in_stream") else prompt.total
        return overflow_error(Overflow(stated, size, prompt.tools, asked), wording)

    def _outcome(self, request: Request, prompt: Prompt, window: int, credential: str) -> Outcome:
        settings, model = self.settings, str(request["model"])
        room = window - prompt.total
        limits = [size for size in (asked_tokens(request), settings.max_output) if size is not None]
        limit = None if _ignores_limit(request, settings) else min(room, *limits) if limits else room
        self._serial += 1
        mark = blake2b(f"{settings.seed}:{self._serial}".encode(), digest_size=12).hexdigest()
        prefix = "msg_" if settings.dialect is Dialect.ANTHROPIC else "chatcmpl-"
        return Outcome(
            id=prefix + mark,
            created=int(time.time()),
            model=model,
            dialect=settings.dialect,
            request=request,
            spoken=speak(choose_answer(request, settings, self.counter.count), limit=limit, count=self.counter.count),
            prompt=prompt.total,
            cached=self.cache.cached_tokens(prompt, credential=credential, model=model),
            written=sum(prompt.tokens[: prompt.breakpoint]),
            window=window,
        )

    def _render(self, surface: Surface, outcome: Outcome) -> Delivery:
        settings, request = self.settings, outcome.request
        headers = self._headers()
        if request.get("stream"):
            delivery = as_stream(surface.events(outcome), headers=headers)
        else:
            delivery = as_json(compact(surface.body(outcome)), headers=headers)
        mode = settings.summary_mode if wants_summary(request, settings) else SummaryMode.OK
        if mode is SummaryMode.NOT_UTF8:
            delivery = as_json(delivery.chunks[0].replace(b'"content":"', b'"content":"\xff\xfe'), headers=headers)
        return replace(
            delivery,
            before=settings.summary_seconds if mode is SummaryMode.SLOW else settings.latency,
            between=settings.chunk_delay,
            stall_at=-1 if mode is SummaryMode.TIMEOUT else None,
        )

    def _headers(self) -> dict[str, str]:
        mark = f"req_{blake2b(str(self._serial).encode(), digest_size=10).hexdigest()}"
        if self.settings.dialect is Dialect.ANTHROPIC:
            return {"request-id": mark}
        if self.settings.dialect is Dialect.OPENAI:
            limits = {"x-ratelimit-limit-requests": "10000", "x-ratelimit-remaining-requests": "9999"}
            return {"x-request-id": mark, "openai-processing-ms": "1", "openai-version": "2020-10-01", **limits}
        return {"x-request-id": mark} if self.settings.dialect is Dialect.VLLM else {"server": "llama.cpp"}


def _refuse(fault: Fault, refused: Delivery, scene: Scene, *, streamed: bool) -> Delivery:
    """The refusal of a request that is too long, or what a fault that comes before or around it makes of it."""
    if fault.name in {"overflow_in_stream", "error_in_stream"}:
        return apply_fault(Fault("error_in_stream"), as_stream((b"",)) if streamed else as_json(b""), scene)
    if fault.name.isdigit() or fault.name in BEFORE_THE_WINDOW:
        return apply_fault(fault, refused, scene)
    return refused


def _ignores_limit(request: Request, settings: SimulatorSettings) -> bool:
    runs_on = settings.summary_mode in {SummaryMode.TOO_LONG, SummaryMode.ECHO}
    return runs_on and wants_summary(request, settings)
