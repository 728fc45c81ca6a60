"""Summaries that a simulated summariser gives: a plausible one made of the transcript, and all the useless ones."""

import re
from typing import Any

from proxy.simulator.settings import Answer, Call, Request, SimulatorSettings, SummaryMode
from proxy.simulator.window import Count

_ASKS = re.compile(r"summar(?:y|i[sz])|compact(?:ion| the)|condense|working notes|take notes|checkpoint", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z_]{2,20}>")
_IDENTIFIER = re.compile(r"[\w./:@#-]{0,30}(?:\d|/|_)[\w./:@#-]{1,40}")
MOST_MESSAGES = 3
LINE = 90
REFUSAL = "I'm sorry, but I can't help with summarizing this conversation."


def text_of(content: Any) -> str:
    """The text of a content value, parts joined by newlines."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return ""


def wants_summary(request: Request, settings: SimulatorSettings) -> bool:
    """Whether this is a summariser's request: by its model, else by a short tool-less array that asks for one."""
    if settings.summary_model is not None and request.get("model") == settings.summary_model:
        return True
    messages = request["messages"]
    if request.get("tools") or len(messages) > MOST_MESSAGES:
        return False
    heads = [text_of(message.get("content")) for message in messages if message.get("role") in {"system", "developer"}]
    heads.append(text_of(request.get("system")))
    return any(_ASKS.search(head) for head in heads)


def read_material(request: Request) -> str:
    """What is to be summarised: the text of everything that is not a system message."""
    texts = [
        text_of(message.get("content"))
        for message in request["messages"]
        if message.get("role") not in {"system", "developer"}
    ]
    return "\n".join(texts)


def misbehave(mode: SummaryMode, *, material: str, count: Count) -> Answer | None:
    """The useless answer of ``mode``, or None where the mode is not about what is said."""
    match mode:
        case SummaryMode.EMPTY:
            return Answer(text="")
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


def summarize(material: str, *, limit: int, count: Count) -> str:
    """Notes under plain headings, at most ``limit`` tokens and a third of the material: first and last lines,
    evenly picked ones between, and the identifiers in order of appearance.
    """
    data = material.rpartition("</transcript>")[0] or material
    lines = [line for raw in data.splitlines() if (line := _TAG.sub("", raw).strip())]
    if not lines:
        return (
            "Goal: nothing was said in the part of the conversation that was given, so there is nothing to note here."
        )
    room = max(48, min(limit, count(data) // 3))
    names = list(dict.fromkeys(_IDENTIFIER.findall(data)))
    between = lines[1:-1][:: max(1, len(lines) // 12)]
    sections = [f"Goal: {lines[0][:LINE]}", f"Next step: go on from {lines[-1][:LINE]}", "Done so far:"]
    sections += [f"- {line[:LINE]}" for line in between]
    text = "\n".join(_fit(sections, room * 2 // 3, count))
    listed = _fit(names, max(8, room - count(text) - 6), count)
    return f"{text}\nNames and numbers: {', '.join(listed)}." if listed else text


def _fit(items: list[str], room: int, count: Count) -> list[str]:
    kept: list[str] = []
    used = 0
    for item in items:
        used += count(item) + 1
        if used > room and kept:
            break
        kept.append(item)
    return kept
