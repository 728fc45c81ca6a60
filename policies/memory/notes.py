"""Notes on a conversation, and its to-do lists: as tools and people write them, as a model takes
them.

A note has to be useful to a reader who has read nothing else: what, where, under which conditions,
which cause. Tools differ in how they give a list: ``todos: [{content, status}]``, ``plan: [{step,
status}]``, ``todoList: [{title, status}]``, items with a flag ``done``, or one text of Markdown
checkboxes; some send only what changed (``merge``). An unknown status is *planned*: only what is
reported as done is done.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from policies.ledger import Note, Status, Subtask
from policies.messages import ToolCall
from policies.text.segments import Source, names_something, normal, parse
from policies.tokens import TokenCounter, shorten

CATEGORIES = ("task_progress", "decisions", "bugs", "constraints", "learnings", "misc")
IMPORTANCE = ("critical", "high", "normal")
TOOLS = frozenset(
    {
        "todowrite",
        "todo_write",
        "write_todos",
        "update_plan",
        "update_todo_list",
        "manage_todo_list",
        "task_list",
        "save_note",
        "write_note",
        "add_note",
        "memory_write",
    }
)
"""Client tools whose newest call holds the to-do list, or a note; in lower case."""
MIN_REST = 50
FENCES = frozenset({"note", "notes", "todo", "decision", "adr"})
"""Words after three back quotes that begin a note in an answer."""
MAX_NOTE_LEN = 600
FROM_TOOL = "tool"
FROM_FENCE = "fence"
FROM_MODEL = "model"
_ALSO = {
    "task_progress": "progress task todo status",
    "decisions": "decision adr",
    "bugs": "bug issue issues error",
    "constraints": "constraint rule preference",
    "learnings": "learning lesson insight",
    "misc": "",
}
_CATEGORY_OF = {
    word: category for category, words in _ALSO.items() for word in (category, *words.split())
}
_FENCED = re.compile(
    r"^[ \t]{0,3}```[ \t]*([A-Za-z]{2,20})\b([^\n`]{0,120})\n([\s\S]{0,8000}?)^[ \t]{0,3}```",
    re.MULTILINE,
)
_BEFORE_NOTE = re.compile(r"\A\s*(?:[-*•+]|\d{1,3}[.)])\s+")
_SAYS = (
    "text",
    "note",
    "content",
    "body",
    "message",
    "value",
    "memory",
    "entry",
    "description",
    "fact",
)
_TITLED = ("title", "key", "name", "subject")
_FILED = ("category", "type", "kind", "tag", "section")
_RANKED = ("importance", "priority", "level", "severity")
_IN_WORDS = {Status.IN_PROGRESS: "doing", Status.PLANNED: "TODO", Status.DONE: "done"}
_LIST = re.compile(r"\A(?:TODO|doing|done): ")
_KEY = re.compile(r"\A([^:\n]{2,40}):\s")


def category_of(word: str) -> str:
    return _CATEGORY_OF.get(re.sub(r"[\s-]+", "_", word.strip().lower()), "misc")


def importance_of(word: str) -> str:
    word = word.strip().lower()
    return word if word in IMPORTANCE else "normal"


def notes_in(sources: Sequence[Source]) -> tuple[Note, ...]:
    found: list[Note] = []
    for _, call in _calls_in(sources):
        made = _list_in_call(call.arguments)
        found += (
            [_list_note(made.subtasks, FROM_TOOL)] if made is not None else _in_call(call.arguments)
        )
    for source in sources:
        if source.role == "assistant" and not source.is_result and "```" in source.text:
            found += _in_fences(source.text)
    return tuple(_current(found))


def _list_note(subtasks: Sequence[Subtask], source: str) -> Note:
    ranked = sorted(subtasks, key=lambda s: (s.status is Status.DONE, s.status is Status.PLANNED))
    text = "; ".join(f"{_IN_WORDS[s.status]}: {s.text}" for s in ranked)
    return Note("task_progress", "high", text, source)


def _in_call(arguments: str) -> list[Note]:
    raw = parse(arguments)
    if not isinstance(raw, Mapping):
        return []
    said = _first(raw, _SAYS)
    titled = _first(raw, _TITLED)
    text = f"{titled}: {said}" if titled and said and titled not in said else said or titled
    if not text:
        return []
    return [
        Note(
            category_of(_first(raw, _FILED)),
            importance_of(_first(raw, _RANKED)),
            _one_line(text),
            FROM_TOOL,
        )
    ]


def _first(raw: Mapping[str, object], names: Sequence[str]) -> str:
    return next((v.strip() for n in names if isinstance(v := raw.get(n), str) and v.strip()), "")


def _in_fences(text: str) -> Iterator[Note]:
    for match in _FENCED.finditer(text):
        word = match.group(1).lower()
        options = match.group(2)
        body = match.group(3).strip()
        if word not in FENCES or not body:
            continue
        listed = _BULLET.findall(body)[:MAX_ITEMS] if word.startswith("todo") else ()
        subtasks = _boxes_in(body, bare=True) or tuple(
            Subtask(_subtask_line(words)) for words in listed
        )
        lines = read_notes(body)
        if subtasks:
            yield _list_note(subtasks, FROM_FENCE)
        elif lines:
            yield from (replace(note, source=FROM_FENCE) for note in lines)
        else:
            words = re.findall(r"[A-Za-z_-]+", options)
            category = next(
                (c for w in words if (c := category_of(w)) != "misc"), category_of(word)
            )
            importance = next((w.lower() for w in words if w.lower() in IMPORTANCE), "normal")
            yield Note(category, importance, _one_line(body), FROM_FENCE)


def _one_line(text: str) -> str:
    return shorten(" ".join(text.split()), MAX_NOTE_LEN)


def read_notes(text: str) -> tuple[Note, ...]:
    found: list[Note] = []
    for line in text.splitlines():
        cells = [c.strip() for c in _BEFORE_NOTE.sub("", line).strip().strip("|").split("|", 2)]
        if len(cells) == 2 and category_of(cells[0]) != "misc":
            cells.insert(1, "normal")
        if len(cells) < 3 or not re.fullmatch(r"[A-Za-z][\w -]{0,30}", cells[0]):
            continue
        said = _one_line(cells[2])
        if (
            said.strip("-: .").lower() in {"", "none", "text", "n/a"}
            or cells[1].lower() == "importance"
        ):
            continue
        found.append(Note(category_of(cells[0]), importance_of(cells[1]), said, FROM_MODEL))
    return tuple(found)


def flaw(note: Note) -> str:
    """What makes a note useless by itself: ``empty`` or ``no identifier``; empty for a good one.

    A rule needs no identifier: it holds everywhere.
    """
    if not note.text.strip():
        return "empty"
    return "" if note.category == "constraints" or names_something(note.text) else "no identifier"


def _current(notes: Sequence[Note]) -> list[Note]:
    """The notes that still hold, in order: of those with the same key or the same words the newest,
    one list.
    """
    newest: dict[tuple[str, str], Note] = {}
    for note in notes:
        if not note.text.strip():
            continue
        key = (note.category, _key(note))
        newest.pop(key, None)
        newest[key] = note
    return list(newest.values())


def _key(note: Note) -> str:
    if (
        note.category == "task_progress"
        and note.source in {FROM_TOOL, FROM_FENCE}
        and _LIST.match(note.text)
    ):
        return "the list"
    keyed = _KEY.match(note.text)
    return normal(keyed.group(1) if keyed else note.text)


def render_notes(notes: Sequence[Note], *, max_tokens: int, counter: TokenCounter) -> str:
    """The notes that hold within ``max_tokens``, under a heading a category; empty where there are
    none or no room.

    Critical notes are placed before all others; within a category the more important come first,
    then the newer.
    """
    newest_first = _current(notes)[::-1]
    order = sorted(newest_first, key=lambda note: (_place(note), _rank(note)))
    chosen: list[Note] = []
    left = max_tokens
    headed: set[int] = set()
    for note in sorted(order, key=lambda note: _rank(note) > 0):
        if left < MIN_REST:
            break
        place = _place(note)
        cost = counter.count(f"{_shown(note)}\n") + 1
        cost += counter.count(f"{_heading(place)}\n") + 1 if place not in headed else 0
        if cost <= left:
            left -= cost
            chosen.append(note)
            headed.add(place)
    while (
        counter.count(text := _page([note for note in order if note in chosen])) > max_tokens
        and chosen
    ):
        chosen.pop()
    return text


def _page(notes: Sequence[Note]) -> str:
    parts = groupby(notes, key=_place)
    return "\n".join(
        line for place, held in parts for line in (_heading(place), *map(_shown, held))
    )


def _place(note: Note) -> int:
    return CATEGORIES.index(category_of(note.category))


def _rank(note: Note) -> int:
    return IMPORTANCE.index(importance_of(note.importance))


def _heading(place: int) -> str:
    return f"Notes on {CATEGORIES[place].replace('_', ' ')}:"


def _shown(note: Note) -> str:
    marked = f"({note.importance.lower()}) " if _rank(note) < len(IMPORTANCE) - 1 else ""
    return f"- {marked}{' '.join(note.text.split())}"


MAX_SUBTASK_LEN = 200
MAX_ITEMS = 100
MAX_DONE = 20
_LISTS = (
    "todos",
    "plan",
    "items",
    "tasks",
    "todoList",
    "todo_list",
    "steps",
    "subtasks",
    "checklist",
    "list",
)
_TEXTS = (
    "content",
    "step",
    "title",
    "text",
    "task",
    "description",
    "name",
    "subject",
    "item",
    "todo",
    "label",
)
_FLAGS = ("done", "completed", "complete", "checked", "finished")
_STATUS = {
    **dict.fromkeys(
        ("completed", "complete", "done", "finished", "closed", "resolved", "x", "success"),
        Status.DONE,
    ),
    **dict.fromkeys(
        (
            "in_progress",
            "inprogress",
            "doing",
            "active",
            "current",
            "started",
            "running",
            "wip",
            "working",
        ),
        Status.IN_PROGRESS,
    ),
}
_DROPPED = frozenset(
    {"cancelled", "canceled", "deleted", "removed", "skipped", "abandoned", "obsolete"}
)
_BOX = re.compile(
    r"^[ \t]{0,12}((?:[-*+•]|\d{1,3}[.)])[ \t]+)?\[([ xX~>/-])\][ \t]+(\S.{0,400})$", re.MULTILINE
)
_BULLET = re.compile(r"^[ \t]{0,12}(?:[-*+•]|\d{1,3}[.)])[ \t]+(\S.{0,400})$", re.MULTILINE)
_LAST_NAME = re.compile(r"(?:__|[./:])")


@dataclass(frozen=True, slots=True)
class _Item:
    key: str
    text: str
    status: Status | None
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class _TodoList:
    items: tuple[_Item, ...]
    merges: bool = False

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        return tuple(
            Subtask(i.text, i.status or Status.PLANNED)
            for i in self.items
            if i.text and not i.dropped
        )


def subtasks_of(sources: Sequence[Source], *, known: Sequence[Subtask] = ()) -> tuple[Subtask, ...]:
    """The subtasks as the newest lists leave them, from ``known`` on.

    What a tool's list leaves out is gone, unless it is done; checkboxes in a text only change and
    add.
    """
    board = {normal(s.text): s for s in known}
    names: dict[str, str] = {}
    called = [(position, _list_in_call(call.arguments)) for position, call in _calls_in(sources)]
    lists = [(position, made) for position, made in called if made is not None]
    for source in sources:
        while lists and lists[0][0] == source.position:
            board = _posted(board, lists.pop(0)[1], names)
        if source.role in {"user", "assistant"} and not source.is_result:
            for subtask in _boxes_in(source.text):
                board[normal(subtask.text)] = subtask
    return bounded(tuple(board.values()))


def bounded(subtasks: Sequence[Subtask]) -> tuple[Subtask, ...]:
    done = [s for s in subtasks if s.status is Status.DONE]
    old = {id(s) for s in done[:-MAX_DONE]}
    return tuple(s for s in subtasks if id(s) not in old)


def _posted(
    board: dict[str, Subtask], given: _TodoList, names: dict[str, str]
) -> dict[str, Subtask]:
    names |= {item.key: item.text for item in given.items if item.key and item.text}
    new = (
        dict(board) if given.merges else {k: s for k, s in board.items() if s.status is Status.DONE}
    )
    if not given.merges:
        for item in given.items:
            new.pop(normal(item.text), None)
    for item in given.items:
        text = item.text or names.get(item.key, "")
        key = normal(text)
        old = board.get(key)
        if item.dropped:
            new.pop(key, None)
        elif text:
            new[key] = Subtask(text, item.status or (old.status if old else Status.PLANNED))
    return new


def _takes_notes(name: str) -> bool:
    """Whether a tool is one of :data:`TOOLS`, alone or after a server's name
    (``mcp__desk__save_note``).
    """
    name = name.lower()
    return name in TOOLS or _LAST_NAME.split(name)[-1] in TOOLS


def _calls_in(sources: Sequence[Source]) -> Iterator[tuple[int, ToolCall]]:
    told: set[tuple[str, str]] = set()
    for source in sources:
        for call in source.calls:
            if _takes_notes(call.name):
                told.add((call.name, call.arguments))
                yield source.position, call
        if (
            source.tool
            and (source.tool, source.arguments) not in told
            and _takes_notes(source.tool)
        ):
            yield source.position, ToolCall("", source.tool, source.arguments)


def _list_in_call(arguments: str) -> _TodoList | None:
    raw = parse(arguments)
    merges = isinstance(raw, Mapping) and (
        raw.get("merge") is True or raw.get("operation") in ("update", "merge")
    )
    for value in _candidates(raw):
        if isinstance(value, str):
            items = [_Item("", s.text, s.status) for s in _boxes_in(value, bare=True)]
        elif isinstance(value, Sequence):
            items = [item for entry in value[:MAX_ITEMS] if (item := _item(entry)) is not None]
        else:
            continue
        if items:
            return _TodoList(tuple(items), merges)
    return None


def _candidates(raw: object) -> Iterator[object]:
    if isinstance(raw, Mapping):
        yield from [raw[name] for name in _LISTS if name in raw]
        yield from (
            v
            for v in raw.values()
            if isinstance(v, list) and any(isinstance(e, Mapping) for e in v)
        )
    elif isinstance(raw, list):
        yield raw


def _item(entry: object) -> _Item | None:
    if isinstance(entry, str):
        boxed = _boxes_in(entry, bare=True)
        text, status = (boxed[0].text, boxed[0].status) if boxed else (_subtask_line(entry), None)
        return _Item("", text, status) if text else None
    if not isinstance(entry, Mapping):
        return None
    text = next((v for n in _TEXTS if isinstance(v := entry.get(n), str) and v.strip()), "")
    key = entry.get("id", "")
    key = str(key) if isinstance(key, str | int) else ""
    word = next((v for n in ("status", "state") if isinstance(v := entry.get(n), str)), "")
    word = re.sub(r"[\s-]+", "_", word.strip().lower())
    flag = next((v for n in _FLAGS if isinstance(v := entry.get(n), bool)), None)
    status = _STATUS.get(word, Status.PLANNED) if word else None
    if not word and flag is not None:
        status = Status.DONE if flag else Status.PLANNED
    if not text and not (key and status):
        return None
    return _Item(key, _subtask_line(text), status, word in _DROPPED)


def _boxes_in(text: str, *, bare: bool = False) -> tuple[Subtask, ...]:
    if "[" not in text:
        return ()
    found = [(mark, words) for bullet, mark, words in _BOX.findall(text) if bullet or bare]
    marks = {"x": Status.DONE, "X": Status.DONE, " ": Status.PLANNED}
    return tuple(
        Subtask(_subtask_line(words), marks.get(mark, Status.IN_PROGRESS))
        for mark, words in found[:MAX_ITEMS]
    )


def _subtask_line(text: str) -> str:
    return shorten(" ".join(text.split()), MAX_SUBTASK_LEN)
