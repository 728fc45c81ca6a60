"""One request for an answer, from its bytes to the delivery: check, count, remember, answer, misbehave.

:class:`SimulatorSettings` are all that a simulator does. Summaries are plausible ones, made of the transcript.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from proxy.simulator.delivery import (
    FAULT_PREFIX,
    FAULTS,
    FaultRule,
    InjectedFault,
    Scene,
    Script,
    SimulatedAnswer,
    Spoken,
    Transmission,
    answer_with_status,
    as_json,
    as_stream,
    asked_tokens,
    compact,
    default_answer,
    parse_fault,
    speak,
)
from proxy.simulator.window import (
    Count,
    CountedPrompt,
    Dialect,
    OversizedPrompt,
    PrefixCache,
    Problem,
    PromptCounter,
    PromptPart,
    Rejected,
    Request,
    overflow_problem,
    overflows,
    problem_body,
    status_problem,
)

_ASKS = re.compile(r"summar(?:y|i[sz])|compact(?:ion| the)|condense|working notes|take notes|checkpoint", re.IGNORECASE)
_ASKS_IN_PLACE = re.compile(
    r"\s{0,9}(?:Now stop and take notes|Write (?:the working )?notes|Summari[sz]e the conversation above)\b"
)
_ASKS_FOR_LIST = re.compile(r"category \| importance", re.IGNORECASE)
_WORDS = re.compile(r"at most (\d{1,6}) words")
_END_OF_DATA = re.compile(r"^</[\w-]{2,40}>[ \t]*$", re.MULTILINE)
_TAG = re.compile(r"</?[a-z][\w-]{1,40}>(?: (?:transcript|notes so far|earlier notes))?")
_ORIGIN = re.compile(r"\A\[[a-z][^\]\n]{0,80}\]\s?")
_IDENTIFIER = re.compile(r"[\w./:@#-]{0,30}(?:\d|/|_)[\w./:@#-]{1,40}")
MAX_MESSAGES = 3  # of a request that is no conversation
LINE = 90
SHORT = 64
WORDS_PER_TOKEN = 0.7
FILLED = 0.8
MIN_TOKENS = 48
NEXT = "next_step"


def text_of(content: Any) -> str:
    """The text of a content value, parts joined by newlines."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return ""


def wants_summary(request: Request, summary_model: str | None) -> bool:
    """Whether this is a summariser's request: by its model, else by what it asks for.

    That is a short tool-less array whose system prompt asks for a summary, or a conversation of any kind that ends
    with the instruction to write notes on it.
    """
    if summary_model is not None and request.get("model") == summary_model:
        return True
    messages = request["messages"]
    if _is_in_place(request):
        return True
    if request.get("tools") or len(messages) > MAX_MESSAGES:
        return False
    heads = [text_of(message.get("content")) for message in messages if message.get("role") in {"system", "developer"}]
    heads.append(text_of(request.get("system")))
    return any(_ASKS.search(head) for head in heads)


def _is_in_place(request: Request) -> bool:
    last = request["messages"][-1] if request["messages"] else {}
    return last.get("role") == "user" and _ASKS_IN_PLACE.match(text_of(last.get("content"))) is not None


class SummaryWriter:
    """A summariser that does its work; one that fails is made by overriding what it does."""

    def check(self, request: Request) -> None:
        """Raise :class:`Rejected` where it refuses whatever it is asked, or the form in which it is asked."""

    def answer(self, request: Request, *, max_output: int | None, count: Count) -> SimulatedAnswer:
        """The summary, in words or by the schema that was asked for."""
        material, instruction = read_material(request), instruction_of(request)
        limit = asked_tokens(request) or max_output or 400
        room = min([limit, *(int(int(words) / WORDS_PER_TOKEN) for words in _WORDS.findall(instruction))])
        data = _before_the_end(material) or material
        lines, schema = self.lines(data), schema_of(request)
        if schema is not None:
            return SimulatedAnswer(text=_by_schema(schema, lines or ["nothing was said"], limit=room, count=count))
        if _ASKS_FOR_LIST.search(instruction):
            picked = lines[:: max(1, len(lines) // 8)]
            return SimulatedAnswer(
                text="\n".join(_fit([f"learnings | normal | {_cut(line)}" for line in picked], room, count))
            )
        return SimulatedAnswer(text=_notes(lines, data, limit=room, count=count))

    def lines(self, data: str) -> list[str]:
        """The lines of the material, which the summary is made of."""
        return [line for raw in data.splitlines() if (line := _ORIGIN.sub("", _TAG.sub("", raw).strip(), count=1))]

    def deliver(self, delivery: Transmission) -> Transmission:
        """The answer as it is sent."""
        return delivery


def summarize(material: str, *, limit: int, count: Count) -> str:
    """Notes on ``material`` in plain words."""
    data = _before_the_end(material) or material
    return _notes(SummaryWriter().lines(data), data, limit=limit, count=count)


def schema_of(request: Request) -> Mapping[str, Any] | None:
    """The JSON schema that the answer is to follow."""
    form = request.get("response_format")
    described = form.get("json_schema") if isinstance(form, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    return schema if isinstance(schema, dict) else None


def read_material(request: Request) -> str:
    """What is to be summarised: all that is not a system message; of a conversation each message under its role."""
    said = [message for message in request["messages"] if message.get("role") not in {"system", "developer"}]
    if not _is_in_place(request):
        return "\n".join(text_of(message.get("content")) for message in said)
    return "\n".join(f"[{message.get('role')}] {text_of(message.get('content'))}" for message in said[:-1])


def instruction_of(request: Request) -> str:
    """What the last message says behind the material."""
    asked = text_of(request["messages"][-1].get("content"))
    return asked[len(_before_the_end(asked)) :]


def _before_the_end(material: str) -> str:
    """``material`` up to its last closing fence, so without the instruction behind it; all of it without a fence."""
    ends = [match.start() for match in _END_OF_DATA.finditer(material)]
    return material[: ends[-1]] if ends else ""


def _notes(lines: list[str], data: str, *, limit: int, count: Count) -> str:
    """Notes under plain headings, under ``limit`` tokens and about a third of the material: first and last lines,
    evenly picked ones between, and the identifiers in order of appearance.
    """
    if not lines:
        return (
            "Goal: nothing was said in the part of the conversation that was given, so there is nothing to note here."
        )
    if limit < SHORT:
        return " ".join(_fit(lines[0].split(), limit, count))
    room = min(int(limit * FILLED), max(MIN_TOKENS, count(data) // 3))
    names = list(dict.fromkeys(_IDENTIFIER.findall("\n".join(lines))))
    between = lines[1:-1][:: max(1, len(lines) // 12)]
    sections = [f"Goal: {_cut(lines[0])}", f"Next step: go on from {_cut(lines[-1])}", "Done so far:"]
    sections += [f"- {_cut(line)}" for line in between]
    text = "\n".join(_fit(sections, room * 2 // 3, count))
    listed = _fit([f"{name}," for name in names], max(8, room - count(text) - 6), count)
    return f"{text}\nNames and numbers: {' '.join(listed)[:-1]}." if listed else text


def _by_schema(schema: Mapping[str, Any], lines: list[str], *, limit: int, count: Count) -> str:
    """JSON that follows a plain schema and says what the material says, in as many items as ``limit`` tokens hold."""
    for items in (3, 2, 1, 0):
        text = json.dumps(_fill(schema, _around(lines), items), ensure_ascii=False)
        if count(text) <= limit:
            break
    return text


def _cut(line: str) -> str:
    return line if len(line) <= LINE else line[:LINE].rpartition(" ")[0] or line[:LINE]


def _around(lines: list[str]) -> Iterator[str]:
    while True:
        for line in lines:
            yield _cut(line)


def _fill(schema: Any, lines: Iterator[str], items: int) -> Any:
    if not isinstance(schema, Mapping):
        return next(lines)
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            properties = schema.get("properties") or {}
            filled = {name: _fill(inner, lines, items) for name, inner in properties.items()}
            if isinstance(filled.get(NEXT), str):
                filled[NEXT] = f"go on from {filled[NEXT]}"
            return filled
        case "array":
            return [_fill(schema.get("items"), lines, items) for _ in range(items)]
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case "null":
            return None
        case _:
            return next(lines)


def _fit(items: list[str], room: int, count: Count) -> list[str]:
    kept: list[str] = []
    used = 0
    for item in items:
        used += count(item) + 1
        if used > room and kept:
            break
        kept.append(item)
    return kept


Wording = tuple[int, Callable[[OversizedPrompt], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSettings:
    """A simulator in full.

    Attributes:
        window: tokens of prompt and answer together; ``windows`` has other sizes by model.
        max_output: most tokens an answer may ask for, None for no cap but the window.
        models: ids that ``GET /v1/models`` lists; a request may name any model.
        strict: judge the message array as OpenAI does.
        allow_prefill: accept a plain assistant message at the end without a ``prefix`` mark.
        latency: seconds before the first byte of a chat answer; ``chunk_delay`` between two events.
        answers: the answer for a request with n assistant messages is ``answers[n]``; past the end the default.
        answer: a function of the request that takes the place of ``answers``.
        summary_model: requests of this model are summary requests; so are all whose system prompt asks for a summary,
            and conversations whose last message does. ``summarizer`` answers them.
        summary_seconds: seconds before a summary, in the place of ``latency``.
        wording: whose words an overflow error has, of a dialect or of ``wordings`` (status and body); None for the
            dialect's own.
        fault: a fault for every chat request, as in the header ``x-sim-fault``; ``faults`` are all that there are.
        api_keys: accepted credentials; empty accepts any, and none.
        cache_entries: prefixes that the cache remembers; ``cache_minimum`` the least tokens that count as a hit.
        ledger_bytes: bodies kept in the ledger, in bytes; the oldest entries go first.
    """

    window: int = 8192
    windows: Mapping[str, int] = field(default_factory=dict)
    max_output: int | None = None
    dialect: Dialect = Dialect.OPENAI
    seed: int = 0
    models: tuple[str, ...] = ("sim",)
    strict: bool = True
    allow_prefill: bool = False
    latency: float = 0.0
    chunk_delay: float = 0.0
    answers: tuple[SimulatedAnswer | str, ...] = ()
    answer: Script | None = None
    summary_model: str | None = None
    summarizer: SummaryWriter = field(default_factory=SummaryWriter)
    summary_seconds: float | None = None
    wording: str | None = None
    wordings: Mapping[str, Wording] = field(default_factory=dict)
    fault: str | None = None
    faults: Mapping[str, FaultRule] = field(default_factory=lambda: FAULTS)
    api_keys: tuple[str, ...] = ()
    cache_entries: int = 100_000
    cache_minimum: int = 0
    ledger_bytes: int = 256 * 1024 * 1024

    def window_of(self, model: str) -> int:
        """Tokens that ``model`` holds."""
        return self.windows.get(model, self.window)


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
