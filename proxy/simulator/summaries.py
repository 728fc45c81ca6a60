"""Plausible summaries, made of what is to be summarised, for whoever asks for one."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from proxy.simulator.delivery import SimulatedAnswer, Transmission, asked_tokens
from proxy.simulator.window import Count, Request

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
    if not _is_in_place(request):
        return "\n".join(text_of(message.get("content")) for message in said)
    return "\n".join(f"[{message.get('role')}] {text_of(message.get('content'))}" for message in said[:-1])


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
