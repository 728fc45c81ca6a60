"""Summaries that a simulated summariser gives: a plausible one made of the transcript, and all the useless ones."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from proxy.simulator.dialects import Problem, Rejected, status_problem
from proxy.simulator.settings import Answer, Call, Request, SimulatorSettings, SummaryMode
from proxy.simulator.window import Count

_ASKS = re.compile(r"summar(?:y|i[sz])|compact(?:ion| the)|condense|working notes|take notes|checkpoint", re.IGNORECASE)
_ASKS_IN_PLACE = re.compile(
    r"\s{0,9}(?:Now stop and take notes|Write (?:the working )?notes|Summari[sz]e the conversation above)\b"
)
_ASKS_FOR_LIST = re.compile(r"category \| importance", re.IGNORECASE)
_WORDS = re.compile(r"at most (\d{1,6}) words")
_AGAIN = re.compile(r"\b(?:earlier|previous|last) answer\b", re.IGNORECASE)
_END_OF_DATA = re.compile(r"^</[\w-]{2,40}>[ \t]*$", re.MULTILINE)
_TAG = re.compile(r"</?[a-z][\w-]{1,40}>(?: (?:transcript|notes so far|earlier notes))?")
_ORIGIN = re.compile(r"\A\[[a-z][^\]\n]{0,80}\]\s?")
_IDENTIFIER = re.compile(r"[\w./:@#-]{0,30}(?:\d|/|_)[\w./:@#-]{1,40}")
_PATH = re.compile(r"[\w.-]{0,60}/[\w./-]{1,120}")
_FROM_TOOL = re.compile(r"^\[(?:tool|result)\b[^\]]{0,80}\]\s?(.*)$", re.MULTILINE)
_ORDER = re.compile(
    r"[^.!?\n]{0,120}\b(?:remember|authori[sz]ed|always|never|must|ignore|approved|instructions?)\b[^.!?\n]{0,120}",
    re.IGNORECASE,
)
MOST_MESSAGES = 3
LINE = 90
SHORT = 64
WORDS_PER_TOKEN = 0.7
FILLED = 0.8
FEWEST = 48
NEXT = "next_step"
REFUSAL = "I'm sorry, but I can't help with summarizing this conversation."
GARBAGE = "\ufffd\u0000\ufffd}{][ \ufffd\ufffd <<<< 0x \ufffd ;;;; \ufffd\ufffd\ufffd }}}} \ufffd"
INVENTED = (
    "The fix went into src/invented/ghost_module_77.py, see ticket WEIR-998877",
    "The service listens on port 48213 and its id is 5550001234",
)
STATUSES: Mapping[SummaryMode, int] = {
    SummaryMode.STATUS_500: 500,
    SummaryMode.STATUS_401: 401,
    SummaryMode.STATUS_429: 429,
}


def text_of(content: Any) -> str:
    """The text of a content value, parts joined by newlines."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return ""


def wants_summary(request: Request, settings: SimulatorSettings) -> bool:
    """Whether this is a summariser's request: by its model, else by what it asks for.

    That is a short tool-less array whose system prompt asks for a summary, or a conversation of any kind that ends
    with the instruction to write notes on it.
    """
    if settings.summary_model is not None and request.get("model") == settings.summary_model:
        return True
    messages = request["messages"]
    if _is_in_place(request):
        return True
    if request.get("tools") or len(messages) > MOST_MESSAGES:
        return False
    heads = [text_of(message.get("content")) for message in messages if message.get("role") in {"system", "developer"}]
    heads.append(text_of(request.get("system")))
    return any(_ASKS.search(head) for head in heads)


def _is_in_place(request: Request) -> bool:
    last = request["messages"][-1] if request["messages"] else {}
    return last.get("role") == "user" and _ASKS_IN_PLACE.match(text_of(last.get("content"))) is not None


def refuse_summary(request: Request, settings: SimulatorSettings) -> None:
    """Nothing, or Rejected where the summariser refuses whatever it is asked, or the form in which it is asked."""
    mode = settings.summary_mode
    if mode is SummaryMode.OK or not wants_summary(request, settings):
        return
    if mode in STATUSES:
        model = str(request.get("model"))
        raise Rejected(status_problem(STATUSES[mode], model=model, dialect=settings.dialect, retry_after="1"))
    if mode is SummaryMode.NO_SCHEMA and _schema(request) is not None:
        said = "Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model."
        raise Rejected(Problem(message=said, param="response_format"))
    if mode is SummaryMode.REASONING_MODEL and "max_tokens" in request:
        said = (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
        raise Rejected(Problem(message=said, param="max_tokens", code="unsupported_parameter"))
    if mode is SummaryMode.REASONING_MODEL and request.get("temperature", 1) != 1:
        said = "Unsupported value: 'temperature' does not support 0 with this model."
        raise Rejected(Problem(message=said, param="temperature", code="unsupported_value"))


def answer_with_summary(request: Request, settings: SimulatorSettings, *, limit: int | None, count: Count) -> Answer:
    """What the summariser says, in words or by the schema that was asked for; ``limit`` are the tokens it may take."""
    mode, material = settings.summary_mode, read_material(request)
    useless = misbehave(mode, material=material, count=count)
    if useless is not None:
        return useless
    asked = text_of(request["messages"][-1].get("content"))
    instruction = asked[len(before_the_end(asked)) :]
    if mode is SummaryMode.FIRST_BAD_THEN_OK and not _AGAIN.search(instruction):
        return Answer(text="Noted.")
    room = min([limit or 400, *(int(int(words) / WORDS_PER_TOKEN) for words in _WORDS.findall(instruction))])
    schema = _schema(request)
    if schema is not None and mode is SummaryMode.EMPTY_FORM:
        return Answer(text="{}")
    if schema is not None:
        return Answer(text=by_schema(schema, material, mode=mode, limit=room, count=count))
    if _ASKS_FOR_LIST.search(instruction):
        return Answer(text=as_list(material, mode=mode, limit=room, count=count))
    return Answer(text=summarize(material, limit=room, count=count, mode=mode))


def _schema(request: Request) -> Mapping[str, Any] | None:
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


def before_the_end(material: str) -> str:
    """``material`` up to its last closing fence, so without the instruction behind it; all of it without a fence."""
    ends = [match.start() for match in _END_OF_DATA.finditer(material)]
    return material[: ends[-1]] if ends else ""


def misbehave(mode: SummaryMode, *, material: str, count: Count) -> Answer | None:
    """The useless answer of ``mode``, or None where the mode is not about what is said."""
    match mode:
        case SummaryMode.EMPTY:
            return Answer(text="")
        case SummaryMode.WHITESPACE:
            return Answer(text=" \n\t \n ")
        case SummaryMode.GARBAGE:
            return Answer(text=GARBAGE)
        case SummaryMode.ECHO:
            return Answer(text=material)
        case SummaryMode.REFUSAL:
            return Answer(text=REFUSAL)
        case SummaryMode.TOOL_CALL:
            return Answer(calls=(Call("read_file", '{"path": "notes.md"}'),))
        case SummaryMode.REASONING_ONLY:
            return Answer(text="<think>The user wants notes on the conversation. Let me think about it.</think>")
        case SummaryMode.TOO_LONG:
            sentences = (
                f"Item {number} of the conversation was discussed at length and is repeated here in full.\n"
                for number in range(1, max(60, count(material) // 8))
            )
            return Answer(text="".join(sentences))
        case _:
            return None


def summarize(material: str, *, limit: int, count: Count, mode: SummaryMode = SummaryMode.OK) -> str:
    """Notes under plain headings, under ``limit`` tokens and about a third of the material: first and last lines,
    evenly picked ones between, and the identifiers in order of appearance.
    """
    data = before_the_end(material) or material
    lines = _lines(data, mode)
    if not lines:
        return (
            "Goal: nothing was said in the part of the conversation that was given, so there is nothing to note here."
        )
    if limit < SHORT:
        return " ".join(_fit(lines[0].split(), limit, count))
    room = min(int(limit * FILLED), max(FEWEST, count(data) // 3))
    names = list(dict.fromkeys(_IDENTIFIER.findall("\n".join(lines))))
    between = lines[1:-1][:: max(1, len(lines) // 12)]
    sections = [f"Goal: {_cut(lines[0])}", f"Next step: go on from {_cut(lines[-1])}", "Done so far:"]
    sections += [f"- {_cut(line)}" for line in between]
    text = "\n".join(_fit(sections, room * 2 // 3, count))
    listed = _fit([f"{name}," for name in names], max(8, room - count(text) - 6), count)
    return f"{text}\nNames and numbers: {' '.join(listed)[:-1]}." if listed else text


def as_list(material: str, *, mode: SummaryMode, limit: int, count: Count) -> str:
    """Notes as ``category | importance | text``, one a line."""
    lines = _lines(before_the_end(material) or material, mode)
    picked = lines[:: max(1, len(lines) // 8)]
    return "\n".join(_fit([f"learnings | normal | {_cut(line)}" for line in picked], limit, count))


def by_schema(schema: Mapping[str, Any], material: str, *, mode: SummaryMode, limit: int, count: Count) -> str:
    """JSON that follows a plain schema and says what the material says, in as many items as ``limit`` tokens hold."""
    lines = _lines(before_the_end(material) or material, mode) or ["nothing was said"]
    for items in (3, 2, 1, 0):
        text = json.dumps(_fill(schema, _around(lines), items), ensure_ascii=False)
        if count(text) <= limit:
            break
    return text


def _cut(line: str) -> str:
    """The beginning of a line, to the end of a word."""
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


def _lines(data: str, mode: SummaryMode) -> list[str]:
    """The lines of the material, with what the mode adds to them or leaves out of them."""
    lines = [line for raw in data.splitlines() if (line := _ORIGIN.sub("", _TAG.sub("", raw).strip(), count=1))]
    if mode is SummaryMode.DROPS:
        return [line for raw in lines if (line := _PATH.sub("", raw).strip())]
    if mode is SummaryMode.INVENTED:
        return [*lines[:1], *INVENTED, *lines[1:]]
    if mode is SummaryMode.LAUNDERS:
        orders = [order.strip() for said in _FROM_TOOL.findall(data) for order in _ORDER.findall(said)]
        return [*(f"The user wants this: {order}" for order in dict.fromkeys(orders)), *lines]
    return lines


def _fit(items: list[str], room: int, count: Count) -> list[str]:
    kept: list[str] = []
    used = 0
    for item in items:
        used += count(item) + 1
        if used > room and kept:
            break
        kept.append(item)
    return kept
