"""Notes on a conversation: what its own tools and fenced blocks say, what a model says of it, and how they are shown.

A note has to be of use to somebody who has read nothing else: what, where, under which conditions, which cause.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from policies.checkpoint import Status, Subtask
from policies.settings import NoteTaking
from policies.text.gist import shorten
from policies.text.literals import names_something, normal
from policies.text.segments import Source, parse
from policies.todos import DOING, bullets_in, calls_in, items_in_text, list_in_call
from policies.tokens import TokenCounter

CATEGORIES = ("task_progress", "decisions", "bugs", "constraints", "learnings", "misc")
IMPORTANCE = ("critical", "high", "normal")
SMALLEST_REST = 50
"""With fewer tokens left no further note is tried."""
LONGEST = 600
FROM_TOOL, FROM_FENCE, FROM_MODEL = "tool", "fence", "model"
_CATEGORY_OF: Mapping[str, str] = {
    **{c: c for c in CATEGORIES},
    "progress": "task_progress",
    "task": "task_progress",
    "todo": "task_progress",
    "status": "task_progress",
    "decision": "decisions",
    "adr": "decisions",
    "bug": "bugs",
    "issue": "bugs",
    "issues": "bugs",
    "error": "bugs",
    "constraint": "constraints",
    "rule": "constraints",
    "preference": "constraints",
    "learning": "learnings",
    "lesson": "learnings",
    "insight": "learnings",
}
_FENCED = re.compile(
    r"^[ \t]{0,3}```[ \t]*([A-Za-z]{2,20})\b([^\n`]{0,120})\n([\s\S]{0,8000}?)^[ \t]{0,3}```", re.MULTILINE
)
_BULLET = re.compile(r"\A\s*(?:[-*•+]|\d{1,3}[.)])\s+")
_SAYS = ("text", "note", "content", "body", "message", "value", "memory", "entry", "description", "fact")
_TITLED = ("title", "key", "name", "subject")
_FILED = ("category", "type", "kind", "tag", "section")
_RANKED = ("importance", "priority", "level", "severity")
_LIST = re.compile(r"\A(?:TODO|doing|done): ")
_KEY = re.compile(r"\A([^:\n]{2,40}):\s")


@dataclass(frozen=True, slots=True)
class Note:
    """One note: its category, how much it matters, what it says, and where it was taken from.

    ``source`` is ``tool``, ``fence``, ``model`` or ``api``.
    """

    category: str
    importance: str
    text: str
    source: str = ""


def category_of(word: str) -> str:
    """The category that a word names; ``misc`` for an unknown one."""
    return _CATEGORY_OF.get(re.sub(r"[\s-]+", "_", word.strip().lower()), "misc")


def importance_of(word: str) -> str:
    """The importance that a word names; ``normal`` for an unknown one."""
    word = word.strip().lower()
    return word if word in IMPORTANCE else "normal"


def is_due(tools: NoteTaking, *, turns: int) -> bool:
    """Whether the background takes notes of a conversation of so many turns: below ``min_turns`` they cost more."""
    return tools.extract and turns >= tools.min_turns


def notes_in(sources: Sequence[Source], tools: NoteTaking) -> tuple[Note, ...]:
    """The notes of these messages in order: note tools, the newest list of what is to do, fenced blocks."""
    found: list[Note] = []
    for _, call in calls_in(sources, tools):
        made = list_in_call(call.arguments)
        found += [_list_note(made.subtasks, FROM_TOOL)] if made is not None else _in_call(call.arguments)
    for source in sources:
        if source.role == "assistant" and not source.is_result and "```" in source.text:
            found += _in_fences(source.text, tools)
    return tuple(current(found))


def _list_note(subtasks: Sequence[Subtask], source: str) -> Note:
    """A list of subtasks as one note: what is in progress first, what is done last."""
    ranked = sorted(subtasks, key=lambda s: (s.status is Status.DONE, s.status is Status.PLANNED))
    words = {Status.IN_PROGRESS: DOING, Status.PLANNED: "TODO", Status.DONE: "done"}
    text = "; ".join(f"{words[s.status]}: {s.text}" for s in ranked)
    return Note("task_progress", "high", text, source)


def _in_call(arguments: str) -> list[Note]:
    """The note that one call writes, none where its arguments say nothing."""
    raw = parse(arguments)
    if not isinstance(raw, Mapping):
        return []
    said = _first(raw, _SAYS)
    titled = _first(raw, _TITLED)
    text = f"{titled}: {said}" if titled and said and titled not in said else said or titled
    if not text:
        return []
    return [Note(category_of(_first(raw, _FILED)), importance_of(_first(raw, _RANKED)), _one_line(text), FROM_TOOL)]


def _first(raw: Mapping[str, object], names: Sequence[str]) -> str:
    for name in names:
        value = raw.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return ""


def _in_fences(text: str, tools: NoteTaking) -> Iterator[Note]:
    """The notes of an answer's fenced blocks whose first word is one of the policy's."""
    wanted = {word.lower() for word in tools.fences}
    for match in _FENCED.finditer(text):
        word, options, body = match.group(1).lower(), match.group(2), match.group(3).strip()
        if word not in wanted or not body:
            continue
        subtasks = items_in_text(body, bare=True) or (bullets_in(body) if word.startswith("todo") else ())
        lines = read_notes(body)
        if subtasks:
            yield _list_note(subtasks, FROM_FENCE)
        elif lines:
            yield from (Note(n.category, n.importance, n.text, FROM_FENCE) for n in lines)
        else:
            words = re.findall(r"[A-Za-z_-]+", options)
            category = next((c for w in words if (c := category_of(w)) != "misc"), category_of(word))
            importance = next((w.lower() for w in words if w.lower() in IMPORTANCE), "normal")
            yield Note(category, importance, _one_line(body), FROM_FENCE)


def _one_line(text: str) -> str:
    return shorten(" ".join(text.split()), LONGEST)


def read_notes(text: str) -> tuple[Note, ...]:
    """The notes in a model's lines ``category | importance | text``; other lines are left out."""
    found: list[Note] = []
    for line in text.splitlines():
        cells = [c.strip() for c in _BULLET.sub("", line).strip().strip("|").split("|", 2)]
        if len(cells) == 2 and category_of(cells[0]) != "misc":
            cells.insert(1, "normal")
        if len(cells) < 3 or not re.fullmatch(r"[A-Za-z][\w -]{0,30}", cells[0]):
            continue
        said = _one_line(cells[2])
        if said.strip("-: .").lower() in {"", "none", "text", "n/a"} or cells[1].lower() == "importance":
            continue
        found.append(Note(category_of(cells[0]), importance_of(cells[1]), said, FROM_MODEL))
    return tuple(found)


def flaw(note: Note) -> str:
    """What makes a note useless by itself: ``empty`` or ``no identifier``; empty for a good one.

    A rule needs no identifier: it holds everywhere.
    """
    if not note.text.strip():
        return "empty"
    if note.category == "constraints":
        return ""
    return "" if names_something(note.text) else "no identifier"


def current(notes: Sequence[Note]) -> list[Note]:
    """The notes that still hold, in order: of those with the same key or the same words the newest, one list."""
    newest: dict[tuple[str, str], Note] = {}
    for note in notes:
        if not note.text.strip():
            continue
        key = (note.category, _key(note))
        newest.pop(key, None)
        newest[key] = note
    return list(newest.values())


def _key(note: Note) -> str:
    if note.category == "task_progress" and note.source in {FROM_TOOL, FROM_FENCE} and _LIST.match(note.text):
        return "the list"
    keyed = _KEY.match(note.text)
    return normal(keyed.group(1) if keyed else note.text)


def render_notes(notes: Sequence[Note], *, max_tokens: int, counter: TokenCounter) -> str:
    """The notes that hold within ``max_tokens``, under a heading a category; empty where there are none or no room.

    Critical notes have room before all others; within a category the more important come first, then the newer.
    """
    held = current(notes)
    order = sorted(range(len(held)), key=lambda i: (_place(held[i]), _rank(held[i]), -i))
    chosen: list[int] = []
    left = max_tokens
    headed: set[int] = set()
    for i in sorted(order, key=lambda i: _rank(held[i]) > 0):
        if left < SMALLEST_REST:
            break
        place = _place(held[i])
        cost = counter.count(f"{_shown(held[i])}\n") + 1
        cost += counter.count(f"{_heading(place)}\n") + 1 if place not in headed else 0
        if cost <= left:
            left -= cost
            chosen.append(i)
            headed.add(place)
    text = _page([held[i] for i in order if i in chosen])
    while chosen and counter.count(text) > max_tokens:
        chosen.pop()
        text = _page([held[i] for i in order if i in chosen])
    return text


def _page(notes: Sequence[Note]) -> str:
    lines: list[str] = []
    for note in notes:
        heading = _heading(_place(note))
        if heading not in lines:
            lines.append(heading)
        lines.append(_shown(note))
    return "\n".join(lines)


def _place(note: Note) -> int:
    return CATEGORIES.index(note.category if note.category in CATEGORIES else category_of(note.category))


def _rank(note: Note) -> int:
    return IMPORTANCE.index(importance_of(note.importance))


def _heading(place: int) -> str:
    return f"Notes on {CATEGORIES[place].replace('_', ' ')}:"


def _shown(note: Note) -> str:
    marked = f"({note.importance.lower()}) " if _rank(note) < len(IMPORTANCE) - 1 else ""
    return f"- {marked}{' '.join(note.text.split())}"
