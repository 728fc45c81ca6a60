"""An answer as it goes over the wire, decided before the first byte: what, how fast, and how it ends or misbehaves.

What is said is a script, or a short text that depends on the request and the seed alone; to whoever asks for a summary
a plausible one, made of what is to be summarised. A fault is written ``name``,
``name:argument`` or ``name:argument@times``; with ``@times`` only the first that many requests of that spelling meet
it. In a model it stands behind ``fault:``.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from tests.upstream.window import PER_CALL, Count, Dialect, Request, problem_body, status_problem

FAULT_HEADER = "x-sim-fault"
FAULT_PREFIX = "fault:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmission:
    """What is sent.

    Attributes:
        chunks: the body in the pieces in which it is sent; one for JSON, one an event for a stream.
        length: the Content-Length to state, None for a chunked body.
        before: seconds until the headers; ``between`` until each further chunk.
        stall_at: index of the chunk that is never sent, headers included at -1.
        cut_at: index of the chunk before which the connection is dropped without a proper end.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: tuple[bytes, ...] = ()
    length: int | None = None
    before: float = 0.0
    between: float = 0.0
    stall_at: int | None = None
    cut_at: int | None = None

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def completes(self) -> bool:
        return self.status == 200 and self.stall_at is None and self.cut_at is None


def as_json(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Transmission:
    named = {"content-type": "application/json", **(headers or {})}
    return Transmission(status=status, headers=named, chunks=(body,), length=len(body))


def as_stream(events: tuple[bytes, ...], *, headers: Mapping[str, str] | None = None) -> Transmission:
    named = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **(headers or {})}
    return Transmission(headers=named, chunks=events)


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One misbehaviour; ``times`` None stands for every request."""

    name: str = ""
    argument: str = ""
    times: int | None = None

    @property
    def is_status(self) -> bool:
        return self.name.isdigit() and len(self.name) == 3

    def number(self, default: float) -> float:
        try:
            return float(self.argument)
        except ValueError:
            return default


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a fault may look at: ``overflow`` is the error body of a request that is too long.

    ``event`` writes a body as an event of a stream behind that many others.
    """

    dialect: Dialect
    model: str
    overflow: bytes
    event: Callable[[bytes, int], bytes]

    def error_after(self, events: int) -> bytes:
        return self.event(self.overflow, events)


Change = Callable[[Transmission, InjectedFault, Scene], Transmission]


@dataclass(frozen=True, slots=True)
class FaultRule:
    change: Change = lambda delivery, _fault, _scene: delivery
    wins: bool = False


def parse_fault(text: str, known: Mapping[str, FaultRule]) -> InjectedFault:
    rest, _, times = text.removeprefix(FAULT_PREFIX).partition("@")
    name, _, argument = rest.partition(":")
    fault = InjectedFault(name, argument, int(times) if times.isdigit() else None)
    if name not in known and not fault.is_status:
        raise ValueError(f"unknown fault {name!r}; known are {', '.join(sorted({*known, '<status>'}))}")
    return fault


def _answer_with_status(_: Transmission, fault: InjectedFault, scene: Scene) -> Transmission:
    status, wait = int(fault.name), fault.argument or "1"
    if status in {204, 304}:
        return Transmission(status=status)
    problem = status_problem(status, model=scene.model, dialect=scene.dialect, retry_after=wait)
    headers = {"retry-after": wait} if status in {429, 503, 529} else {}
    return as_json(json.dumps(problem_body(problem, scene.dialect)).encode(), status=status, headers=headers)


def halved(delivery: Transmission) -> Transmission:
    if delivery.streamed or not delivery.chunks:
        return delivery
    body = delivery.chunks[0]
    return replace(delivery, chunks=(body[: len(body) // 2], body[len(body) // 2 :]))


def _error_in_stream(delivery: Transmission, fault: InjectedFault, scene: Scene) -> Transmission:
    if not delivery.streamed:
        return as_json(scene.overflow)
    said = delivery.chunks[: int(fault.number(0))]
    return replace(delivery, chunks=(*said, scene.error_after(len(said))))


STATUS = FaultRule(_answer_with_status, wins=True)
FAULTS: Mapping[str, FaultRule] = {
    "latency": FaultRule(lambda sent, fault, _: replace(sent, before=fault.number(1.0)), wins=True),
    "slow_chunks": FaultRule(lambda sent, fault, _: replace(sent, between=fault.number(0.2))),
    "stall": FaultRule(lambda sent, _fault, _scene: replace(sent, stall_at=-1), wins=True),
    "cut_stream": FaultRule(lambda sent, fault, _: replace(halved(sent), cut_at=int(fault.number(1)))),
    "error_in_stream": FaultRule(_error_in_stream),
    # about the window itself: another size, other numbers or words in the error, the error inside a 200
    **dict.fromkeys(("window", "wrong_window", "wording", "overflow_in_stream"), FaultRule()),
}


_PIECE = re.compile(r"\s*\S+\s*$|\s*\S+")
MAX_DEPTH = 6


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    name: str
    arguments: str = "{}"
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAnswer:
    """What the model says; ``finish`` overrides the finish reason in OpenAI's words, ``endless`` every limit."""

    text: str = ""
    calls: tuple[SimulatedCall, ...] = ()
    reasoning: str = ""
    finish: str | None = None
    endless: bool = False


Script = Callable[[Request], SimulatedAnswer | str]


@dataclass(frozen=True, slots=True)
class Spoken:
    pieces: tuple[str, ...]
    calls: tuple[SimulatedCall, ...]
    reasoning: str
    finish: str
    tokens: int
    thought: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def default_answer(request: Request, seed: int) -> SimulatedAnswer:
    forced = _forced_tool(request)
    if forced is not None:
        arguments = json.dumps(_sample(_schema_of(forced), seed=seed))
        return SimulatedAnswer(calls=(SimulatedCall(str(forced.get("name")), arguments),))
    return SimulatedAnswer(text=_default_text(request, seed))


def step_answer(request: Request) -> SimulatedAnswer | None:
    """The next step of a run by the tools of the request: reasoning, calls (two at first), every other time a word.

    The number of the step stands in the ids of its calls, so that a history may be cut. None without tools.
    """
    tools = [tool for tool in _tools_of(request) if tool.get("name") and _schema_of(tool)]
    if not tools:
        return None
    step = next_step(request)
    picked = [tools[(step + at) % len(tools)] for at in range(1 if step else 2)]
    calls = tuple(
        SimulatedCall(tool["name"], json.dumps(_sample(_schema_of(tool), seed=step)), id=f"step_{step}_{at}")
        for at, tool in enumerate(picked)
    )
    text = "" if step % 2 else f"Step {step + 1}: looking."
    return SimulatedAnswer(reasoning=f"I should take step {step + 1}.", text=text, calls=calls)


def next_step(request: Request) -> int:
    found = re.findall(r'"step_(\d+)_\d"', json.dumps(request["messages"]))
    return max(map(int, found)) + 1 if found else 0


def asked_tokens(request: Request) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = request.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def speak(answer: SimulatedAnswer, *, limit: int | None, count: Count) -> Spoken:
    limit = None if answer.endless else limit
    calls, finish = answer.calls, answer.finish
    spent = sum(count(call.name) + count(call.arguments) + PER_CALL for call in calls)
    thought = count(answer.reasoning) if answer.reasoning else 0
    spent += thought
    if limit is not None and spent > limit:
        calls, spent, finish = (), limit, finish or "length"
    pieces = tuple(match.group() for match in _PIECE.finditer(answer.text))
    room = None if limit is None else limit - spent
    kept = len(pieces)
    if room is not None and count(answer.text) > room:
        kept = bisect_right(range(1, len(pieces)), room, key=lambda most: count("".join(pieces[:most])))
    if kept < len(pieces):
        finish = finish or "length"
    text = "".join(pieces[:kept])
    spent += count(text) if text else 0
    return Spoken(pieces[:kept], calls, answer.reasoning, finish or ("tool_calls" if calls else "stop"), spent, thought)


def _tools_of(request: Request) -> list[Request]:
    return [tool.get("function") or tool.get("custom") or tool for tool in request.get("tools") or ()]


def _forced_tool(request: Request) -> Request | None:
    tools = _tools_of(request)
    choice = request.get("tool_choice")
    if not tools or choice in (None, "auto", "none"):
        return None
    wanted = None
    if isinstance(choice, dict):
        if choice.get("type") in {"auto", "none"}:
            return None
        wanted = choice.get("name") or (choice.get("function") or choice.get("custom") or {}).get("name")
    return next((tool for tool in tools if wanted in (None, tool.get("name"))), None)


def _schema_of(tool: Request) -> Any:
    return tool.get("parameters") or tool.get("input_schema") or {}


def _sample(schema: Any, *, seed: int = 0, depth: int = 0) -> Any:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return "value"
    if schema.get("enum"):
        return schema["enum"][seed % len(schema["enum"])]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    match kind:
        case "object" | None:
            properties = schema.get("properties") or {}
            names = schema.get("required") or list(properties)
            return {name: _sample(properties.get(name), seed=seed, depth=depth + 1) for name in names}
        case "array":
            return [_sample(schema.get("items"), seed=seed, depth=depth + 1)] if schema.get("minItems") else []
        case "integer" | "number":
            return schema.get("minimum", 1 + seed)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "value"


def _default_text(request: Request, seed: int) -> str:
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return json.dumps(_sample((form.get("json_schema") or {}).get("schema"), seed=seed))
    messages = request["messages"]
    said = json.dumps(messages[-1] if messages else None, sort_keys=True).encode()
    mark = blake2b(said, digest_size=4, key=str(seed).encode()).hexdigest()
    if isinstance(form, dict) and form.get("type") == "json_object":
        return json.dumps({"answer": mark, "messages": len(messages)})
    return f"Understood. This is answer {mark} to message {len(messages)} of our conversation; I go on from there."


_ASKS = re.compile(r"summar(?:y|i[sz])|compact(?:ion| the)|condense|working notes|take notes|checkpoint", re.IGNORECASE)
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
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return ""


def wants_summary(request: Request, summary_model: str | None) -> bool:
    """Whether this is a summariser's request: by its model, else by what it asks for.

    That is a short tool-less array whose system prompt asks for a summary.
    """
    if summary_model is not None and request.get("model") == summary_model:
        return True
    messages = request["messages"]
    if request.get("tools") or len(messages) > MAX_MESSAGES:
        return False
    heads = [text_of(message.get("content")) for message in messages if message.get("role") in {"system", "developer"}]
    heads.append(text_of(request.get("system")))
    return any(_ASKS.search(head) for head in heads)


class SummaryWriter:
    """A summariser that does its work; one that fails is made by overriding what it does."""

    def check(self, request: Request) -> None: ...

    def answer(self, request: Request, *, max_output: int | None, count: Count) -> SimulatedAnswer:
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
        return [line for raw in data.splitlines() if (line := _ORIGIN.sub("", _TAG.sub("", raw).strip(), count=1))]

    def deliver(self, delivery: Transmission) -> Transmission:
        return delivery


def summarize(material: str, *, limit: int, count: Count) -> str:
    data = _before_the_end(material) or material
    return _notes(SummaryWriter().lines(data), data, limit=limit, count=count)


def schema_of(request: Request) -> Mapping[str, Any] | None:
    form = request.get("response_format")
    described = form.get("json_schema") if isinstance(form, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    return schema if isinstance(schema, dict) else None


def read_material(request: Request) -> str:
    said = [message for message in request["messages"] if message.get("role") not in {"system", "developer"}]
    return "\n".join(text_of(message.get("content")) for message in said)


def instruction_of(request: Request) -> str:
    asked = text_of(request["messages"][-1].get("content")) if request["messages"] else ""
    return asked[len(_before_the_end(asked)) :]


def _before_the_end(material: str) -> str:
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
