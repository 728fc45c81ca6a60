"""One request for an answer, from its bytes to the delivery: check, count, remember, answer, misbehave.

:class:`SimulatorSettings` are all that a simulator does, and a :class:`Surface` is an endpoint of it.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from typing import Any

from tests.upstream.delivery import (
    FAULT_HEADER,
    FAULT_PREFIX,
    FAULTS,
    STATUS,
    FaultRule,
    InjectedFault,
    Scene,
    Script,
    SimulatedAnswer,
    Spoken,
    SummaryWriter,
    Transmission,
    as_json,
    as_stream,
    asked_tokens,
    compact,
    default_answer,
    next_step,
    parse_fault,
    speak,
    step_answer,
    summarize,
    text_of,
    wants_summary,
)
from tests.upstream.window import (
    Count,
    CountedPrompt,
    Dialect,
    OversizedPrompt,
    PrefixCache,
    Problem,
    PromptCounter,
    PromptPart,
    Request,
    overflow_problem,
    overflows,
    problem_body,
    status_problem,
)

Wording = tuple[int, Callable[[OversizedPrompt], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSettings:
    """A simulator in full.

    Attributes:
        window: tokens of prompt and answer together; ``windows`` has other sizes by model.
        tells_window: the list of models names each one's window, where the dialect's servers do.
        max_output: most tokens an answer may ask for, None for no cap but the window.
        models: ids that ``GET /v1/models`` lists; a request may name any model.
        strict: judge the message array as OpenAI does.
        latency: seconds before the first byte of a chat answer; ``chunk_delay`` between two events.
        answers: the answer for a request with n assistant messages is ``answers[n]``; past the end the default.
        answer: a function of the request that takes the place of ``answers``.
        steps: steps of reasoning and tool calls by the request's own tools before the default answer.
        summary_model: requests of this model are summary requests; so are all whose system prompt asks for a summary,
            and conversations whose last message does. ``summarizer`` answers them.
        summary_seconds: seconds before a summary, in the place of ``latency``.
        wording: whose words an overflow error has, of a dialect or of ``wordings`` (status and body); None for the
            dialect's own.
        fault: a fault for every chat request, as in the header ``x-sim-fault``; ``faults`` are all that there are.
        api_keys: accepted credentials; empty accepts any, and none.
        bound: reasoning is good only behind what it was made behind.
        foreign: take reasoning, references and chains that this server did not make as if it had made them.
        overflow_in_stream: tell a streamed request that it is too long inside a 200: ``error`` or ``failed``.
        stops_at_window: answer up to the window where prompt and ``max_tokens`` together are over it.
        ledger_bytes: bodies kept in the ledger, in bytes; the oldest entries go first.
    """

    window: int = 8192
    windows: Mapping[str, int] = field(default_factory=dict)
    tells_window: bool = True
    max_output: int | None = None
    dialect: Dialect = Dialect.OPENAI
    seed: int = 0
    models: tuple[str, ...] = ("sim",)
    strict: bool = True
    latency: float = 0.0
    chunk_delay: float = 0.0
    answers: tuple[SimulatedAnswer | str, ...] = ()
    answer: Script | None = None
    steps: int = 0
    summary_model: str | None = None
    summarizer: SummaryWriter = field(default_factory=SummaryWriter)
    summary_seconds: float | None = None
    wording: str | None = None
    wordings: Mapping[str, Wording] = field(default_factory=dict)
    fault: str | None = None
    faults: Mapping[str, FaultRule] = field(default_factory=lambda: FAULTS)
    api_keys: tuple[str, ...] = ()
    bound: bool = False
    foreign: bool = False
    overflow_in_stream: str | None = None
    stops_at_window: bool = False
    ledger_bytes: int = 256 * 1024 * 1024

    def window_of(self, model: str) -> int:
        return self.windows.get(model, self.window)

    @property
    def keeps(self) -> bool:
        """Whether answers, items and threads are kept for later requests, as the dialect's servers do."""
        return self.dialect in {Dialect.OPENAI, Dialect.ANTHROPIC}


NOT_JSON = (
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP library "
    "correctly. The OpenAI API expects a JSON payload, but what was sent was not valid JSON.)"
)
NO_FAULT = InjectedFault()


@dataclass(frozen=True, slots=True)
class Sender:
    credential: str = ""
    beta: str = ""


def sender_of(header: Callable[[str], str | None]) -> Sender:
    bearer = (header("authorization") or "").removeprefix("Bearer ")
    return Sender(bearer or header("x-api-key") or header("api-key") or "", header("anthropic-beta") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    request: Request
    sender: Sender = Sender()
    notes: Mapping[str, Any] = field(default_factory=dict)
    compacts: bool = False
    given: Sequence[Mapping[str, Any]] = ()
    history: tuple[Mapping[str, Any], ...] = ()
    place: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    id: str
    created: int
    model: str
    dialect: Dialect
    admitted: AdmittedRequest
    spoken: Spoken
    prompt: int
    cached: int
    written: int

    @property
    def request(self) -> Request:
        return self.admitted.request


class Surface:
    prefix = ""

    def __init__(self, settings: "SimulatorSettings", counter: PromptCounter) -> None:
        self.settings = settings
        self.counter = counter

    @property
    def shape(self) -> Dialect:
        return self.settings.dialect

    def admit(self, request: Request, sender: Sender) -> AdmittedRequest:
        raise NotImplementedError

    def counted(self, request: Request, sender: Sender) -> Mapping[str, Any]:
        return {"input_tokens": self.tokens(request)}

    def tokens(self, request: Request) -> int:
        return self.counter.measure(self.pieces(request)).total

    def view(self, request: Request) -> Request:
        return request

    def pieces(self, request: Request) -> list[PromptPart]:
        raise NotImplementedError

    def body(self, outcome: Completion) -> Mapping[str, Any]:
        raise NotImplementedError

    def events(self, outcome: Completion) -> tuple[bytes, ...]:
        raise NotImplementedError

    def remember(self, outcome: Completion) -> None: ...

    def too_long(self, overflow: OversizedPrompt, dialect: Dialect, *, numbers: bool) -> Problem:
        return overflow_problem(overflow, dialect)

    def error_event(self, error: bytes, sequence: int) -> bytes:
        return b"data: " + error + b"\n\n"

    def told(self, error: bytes, how: str) -> tuple[bytes, ...]:
        return (self.error_event(error, 0),)


@dataclass(slots=True, kw_only=True)
class RecordedRequest:
    """One request as it arrived, and what became of it so far.

    Attributes:
        headers: name and value in the order received, names in lower case.
        at: seconds from the start of the simulator; ``gone_at`` likewise, None while the client stayed.
        prompt_tokens: of the request, 0 where it was not counted; ``cached_tokens`` of them were in the cache.
        status: of the answer, 0 while there is none.
        client_gone: the client left before the answer was complete.
        sent: bytes of the answer's body that were handed to the server.
        finished: the answer was sent to its end.
    """

    model: str = ""
    fault: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    at: float
    status: int = 0
    client_gone: bool = False
    gone_at: float | None = None
    sent: int = 0
    finished: bool = False

    @property
    def sender(self) -> Sender:
        return sender_of(self.header)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name.lower()), None)

    def json(self) -> Any:
        return json.loads(self.body)

    def report(self) -> dict[str, Any]:
        try:
            body = self.json()
        except ValueError:
            body = self.body.decode("utf-8", "replace")
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "body"}
        return {**values, "body": body, "body_bytes": len(self.body), "sha256": sha256(self.body).hexdigest()}


class Model:
    def __init__(self, settings: SimulatorSettings, *, count: Count) -> None:
        self.settings = settings
        self.counter = PromptCounter(count)
        self.cache = PrefixCache()
        self._met: Counter[str] = Counter()
        self._serial = 0

    def exchange(self, surface: Surface, seen: RecordedRequest) -> Transmission:
        settings, sender = self.settings, seen.sender
        try:
            request = self._parse(seen.body, sender.credential)
            fault = self._meet(request, seen.header(FAULT_HEADER))
            seen.model, seen.fault = str(request.get("model") or ""), fault.name
            admitted = surface.admit(request, sender)
            if self._is_summary(surface.view(admitted.request)):
                settings.summarizer.check(surface.view(admitted.request))
            return self._answer(surface, admitted, fault, seen)
        except Problem as problem:
            return self.refusal(surface, problem)

    def refusal(self, surface: Surface, problem: Problem) -> Transmission:
        body = json.dumps(problem_body(problem, surface.shape)).encode()
        return as_json(body, status=problem.status, headers=self._headers())

    def measure(self, surface: Surface, seen: RecordedRequest) -> Transmission:
        sender = seen.sender
        try:
            return as_json(compact(surface.counted(self._parse(seen.body, sender.credential), sender)))
        except Problem as problem:
            return self.refusal(surface, problem)

    def _is_summary(self, request: Request) -> bool:
        return wants_summary(request, self.settings.summary_model)

    def _parse(self, body: bytes, credential: str) -> Request:
        settings = self.settings
        if settings.api_keys and credential not in settings.api_keys:
            raise status_problem(401, model="", dialect=settings.dialect, retry_after="")
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            status = 500 if settings.dialect is Dialect.LLAMACPP else 400
            raise Problem(status=status, message=NOT_JSON) from None
        if not isinstance(request, dict):
            raise Problem(message="Invalid type for request body: expected an object.")
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
            raise Problem(message=str(error), param="model") from None
        self._met[spelling] += 1
        return fault if fault.times is None or self._met[spelling] <= fault.times else NO_FAULT

    def _answer(
        self, surface: Surface, admitted: AdmittedRequest, fault: InjectedFault, seen: RecordedRequest
    ) -> Transmission:
        settings, request = self.settings, admitted.request
        model, asked, credential = str(request["model"]), asked_tokens(request), admitted.sender.credential
        prompt = self.counter.measure(surface.pieces(request))
        window = int(fault.number(0)) if fault.name == "window" else settings.window_of(model)
        seen.prompt_tokens = prompt.total
        status, error = self._error(surface, fault, prompt, window, asked)
        scene = Scene(dialect=surface.shape, model=model, overflow=error, event=surface.error_event)
        # llama.cpp reserves nothing for the answer, it stops where the window ends
        stops = settings.dialect is Dialect.LLAMACPP or settings.stops_at_window
        if overflows(prompt, window=window, asked=None if stops else asked):
            refused = as_json(error, status=status, headers=self._headers())
            return self._refuse(surface, fault, refused, scene, streamed=bool(request.get("stream")))
        outcome = self._outcome(surface, admitted, prompt, window)
        delivery = self._rule(fault).change(self._render(surface, outcome), fault, scene)
        if delivery.completes:
            self.cache.remember(prompt, credential=credential, model=model)
            surface.remember(outcome)
        seen.cached_tokens, seen.completion_tokens = outcome.cached, outcome.spoken.tokens
        return delivery

    def _rule(self, fault: InjectedFault) -> FaultRule:
        return STATUS if fault.is_status else self.settings.faults.get(fault.name, FaultRule())

    def _refuse(
        self, surface: Surface, fault: InjectedFault, refused: Transmission, scene: Scene, *, streamed: bool
    ) -> Transmission:
        is_inside = fault.name in {"overflow_in_stream", "error_in_stream"}
        if is_inside and not streamed:
            return as_json(scene.overflow)
        how = fault.argument if fault.name == "overflow_in_stream" else self.settings.overflow_in_stream
        if is_inside or (how and streamed):
            return as_stream(surface.told(scene.overflow, how or "error"), headers=self._headers())
        rule = self._rule(fault)
        return rule.change(refused, fault, scene) if rule.wins else refused

    def _error(
        self, surface: Surface, fault: InjectedFault, prompt: CountedPrompt, window: int, asked: int | None
    ) -> tuple[int, bytes]:
        stated = int(fault.number(window // 2)) if fault.name == "wrong_window" else window
        size = max(prompt.total, stated + 1) if fault.name.startswith("error_in_stream") else prompt.total
        overflow = OversizedPrompt(stated, size, prompt.tools, asked)
        asked_for = fault.argument if fault.name == "wording" else ""
        wording = asked_for or self.settings.wording or ""
        if wording in self.settings.wordings:
            status, body = self.settings.wordings[wording]
            return status, json.dumps(body(overflow)).encode()
        if wording and wording not in [*Dialect]:
            raise Problem(message=f"unknown wording {wording!r}; known are {', '.join(Dialect)}")
        dialect = Dialect(wording or self.settings.dialect)
        problem = surface.too_long(overflow, dialect, numbers=bool(wording))
        return 400, json.dumps(problem_body(problem, dialect if wording else surface.shape)).encode()

    def _outcome(self, surface: Surface, admitted: AdmittedRequest, prompt: CountedPrompt, window: int) -> Completion:
        settings, request, count = self.settings, admitted.request, self.counter.count
        model, room, asked = str(request["model"]), window - prompt.total, asked_tokens(request)
        limits = [size for size in (asked, settings.max_output) if size is not None]
        self._serial += 1
        mark = blake2b(f"{settings.seed}:{self._serial}".encode(), digest_size=12).hexdigest()
        spoken = speak(self._choose(surface, admitted), limit=min([room, *limits]), count=count)
        if spoken.finish == "length" and settings.stops_at_window and room < min([room + 1, *limits]):
            spoken = replace(spoken, finish="window")
        return Completion(
            id=surface.prefix + mark,
            created=int(time.time()),
            model=model,
            dialect=settings.dialect,
            admitted=admitted,
            spoken=spoken,
            prompt=prompt.total,
            cached=self.cache.cached_tokens(prompt, credential=admitted.sender.credential, model=model),
            written=sum(prompt.tokens[: prompt.breakpoint]),
        )

    def _choose(self, surface: Surface, admitted: AdmittedRequest) -> SimulatedAnswer:
        settings, request = self.settings, surface.view(admitted.request)
        if admitted.compacts:
            said = "\n".join(text_of(message.get("content")) for message in request["messages"])
            return SimulatedAnswer(text=summarize(said, limit=settings.max_output or 400, count=self.counter.count))
        if self._is_summary(request):
            return settings.summarizer.answer(request, max_output=settings.max_output, count=self.counter.count)
        turn = sum(1 for message in request["messages"] if message.get("role") == "assistant")
        if settings.answer is not None:
            answer = settings.answer(request)
        elif turn < len(settings.answers):
            answer = settings.answers[turn]
        else:
            step = step_answer(request) if next_step(request) < settings.steps else None
            return step or default_answer(request, settings.seed)
        return SimulatedAnswer(text=answer) if isinstance(answer, str) else answer

    def _render(self, surface: Surface, outcome: Completion) -> Transmission:
        settings, request = self.settings, outcome.request
        headers = self._headers()
        if request.get("stream"):
            delivery = as_stream(surface.events(outcome), headers=headers)
        else:
            delivery = as_json(compact(surface.body(outcome)), headers=headers)
        delivery = replace(delivery, before=settings.latency, between=settings.chunk_delay)
        if not self._is_summary(surface.view(request)):
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
