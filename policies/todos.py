"""Lists of what is to do, as tools and people write them, read as subtasks with a status.

Tools differ in their arguments: ``todos: [{content, status}]``, ``plan: [{step, status}]``, ``todoList: [{title,
status}]``, items with a flag ``done``, or one text of Markdown checkboxes. Some send only what changed (``merge``).
An unknown status is *planned*: what nobody said was done is not.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from policies.checkpoint import Status, Subtask
from policies.messages import ToolCall
from policies.settings import NoteTaking
from policies.text.gist import shorten
from policies.text.literals import normal
from policies.text.segments import Source, parse

DOING = "doing"
LONGEST = 200
"""Characters of one subtask."""
MOST_ITEMS = 100
MOST_DONE = 20
"""Subtasks that are done and kept, the newest."""
_LISTS = ("todos", "plan", "items", "tasks", "todoList", "todo_list", "steps", "subtasks", "checklist", "list")
_TEXTS = ("content", "step", "title", "text", "task", "description", "name", "subject", "item", "todo", "label")
_FLAGS = ("done", "completed", "complete", "checked", "finished")
_STATUS = {
    **dict.fromkeys(("completed", "complete", "done", "finished", "closed", "resolved", "x", "success"), Status.DONE),
    **dict.fromkeys(
        ("in_progress", "inprogress", "doing", "active", "current", "started", "running", "wip", "working"),
        Status.IN_PROGRESS,
    ),
}
_DROPPED = frozenset({"cancelled", "canceled", "deleted", "removed", "skipped", "abandoned", "obsolete"})
_BOX = re.compile(r"^[ \t]{0,12}((?:[-*+•]|\d{1,3}[.)])[ \t]+)?\[([ xX~>/-])\][ \t]+(\S.{0,400})$", re.MULTILINE)
_BULLET = re.compile(r"^[ \t]{0,12}(?:[-*+•]|\d{1,3}[.)])[ \t]+(\S.{0,400})$", re.MULTILINE)
_LAST_NAME = re.compile(r"(?:__|[./:])")


@dataclass(frozen=True, slots=True)
class Item:
    """One entry as a list gives it: its id, its words and status; either may be missing where only changes come."""

    key: str
    text: str
    status: Status | None
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class TodoList:
    """A list as one call gives it; ``merges`` is whether it only changes what stood before."""

    items: tuple[Item, ...]
    merges: bool = False

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """The entries that stand, as subtasks."""
        return tuple(Subtask(i.text, i.status or Status.PLANNED) for i in self.items if i.text and not i.dropped)


def takes_notes(name: str, tools: NoteTaking) -> bool:
    """Whether a tool is one of the policy's, by its name alone or behind a server's (``mcp__desk__save_note``)."""
    names = {n.lower() for n in tools.tools}
    return name.lower() in names or _LAST_NAME.split(name)[-1].lower() in names


def calls_in(sources: Sequence[Source], tools: NoteTaking) -> Iterator[tuple[int, ToolCall]]:
    """The calls of the policy's tools with their positions in order, each once, whether seen as call or as result."""
    told: set[tuple[str, str]] = set()
    for source in sources:
        for call in source.calls:
            if takes_notes(call.name, tools):
                told.add((call.name, call.arguments))
                yield source.position, call
        if source.tool and (source.tool, source.arguments) not in told and takes_notes(source.tool, tools):
            yield source.position, ToolCall("", source.tool, source.arguments)


def list_in_call(arguments: str) -> TodoList | None:
    """The list that a call's arguments hold; None where they hold none."""
    raw = parse(arguments)
    merges = isinstance(raw, Mapping) and (raw.get("merge") is True or raw.get("operation") in ("update", "merge"))
    for value in _candidates(raw):
        if isinstance(value, str):
            items = [Item("", s.text, s.status) for s in items_in_text(value, bare=True)]
        elif isinstance(value, Sequence):
            items = [item for entry in value[:MOST_ITEMS] if (item := _item(entry)) is not None]
        else:
            continue
        if items:
            return TodoList(tuple(items), merges)
    return None


def _candidates(raw: object) -> Iterator[object]:
    if isinstance(raw, Mapping):
        known = [raw[name] for name in _LISTS if name in raw]
        yield from known
        yield from (v for v in raw.values() if isinstance(v, list) and any(isinstance(e, Mapping) for e in v))
    elif isinstance(raw, list):
        yield raw


def _item(entry: object) -> Item | None:
    if isinstance(entry, str):
        boxed = items_in_text(entry, bare=True)
        text, status = (boxed[0].text, boxed[0].status) if boxed else (shorten(" ".join(entry.split()), LONGEST), None)
        return Item("", text, status) if text else None
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
    return Item(key, shorten(" ".join(text.split()), LONGEST), status, word in _DROPPED)


def items_in_text(text: str, *, bare: bool = False) -> tuple[Subtask, ...]:
    """The Markdown checkboxes of a text: ``[ ]`` planned, ``[x]`` done, ``[-]``, ``[~]`` and ``[>]`` in progress.

    Without ``bare`` only those behind a bullet: programs mark lines of their logs with boxes too.
    """
    if "[" not in text:
        return ()
    found = [(mark, words) for bullet, mark, words in _BOX.findall(text) if bullet or bare]
    return tuple(Subtask(shorten(" ".join(words.split()), LONGEST), _boxed(mark)) for mark, words in found[:MOST_ITEMS])


def _boxed(mark: str) -> Status:
    if mark in {"x", "X"}:
        return Status.DONE
    return Status.PLANNED if not mark.strip() else Status.IN_PROGRESS


def bullets_in(text: str) -> tuple[Subtask, ...]:
    """The bullets of a text, each as planned."""
    return tuple(Subtask(shorten(" ".join(w.split()), LONGEST)) for w in _BULLET.findall(text)[:MOST_ITEMS])


def subtasks_of(sources: Sequence[Source], tools: NoteTaking, *, known: Sequence[Subtask] = ()) -> tuple[Subtask, ...]:
    """The subtasks as the newest lists of these messages leave them, where ``known`` is how they stood before.

    A tool's list is the single truth: what it leaves out is gone, unless it is done. A list of checkboxes in a
    text only changes and adds.
    """
    board = {normal(s.text): s for s in known}
    names: dict[str, str] = {}
    called = [(position, list_in_call(call.arguments)) for position, call in calls_in(sources, tools)]
    lists = [(position, made) for position, made in called if made is not None]
    for source in sources:
        while lists and lists[0][0] == source.position:
            board = _posted(board, lists.pop(0)[1], names)
        if source.role in {"user", "assistant"} and not source.is_result:
            for subtask in items_in_text(source.text):
                board[normal(subtask.text)] = subtask
    return bounded(tuple(board.values()))


def _posted(board: dict[str, Subtask], given: TodoList, names: dict[str, str]) -> dict[str, Subtask]:
    """The board after a call; ``names`` are the words of entries by their ids."""
    for item in given.items:
        if item.key and item.text:
            names[item.key] = item.text
    new = dict(board) if given.merges else {k: s for k, s in board.items() if s.status is Status.DONE}
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


def bounded(subtasks: Sequence[Subtask]) -> tuple[Subtask, ...]:
    """The subtasks without the oldest that are done, where those are too many."""
    done = [s for s in subtasks if s.status is Status.DONE]
    old = {id(s) for s in done[:-MOST_DONE]}
    return tuple(s for s in subtasks if id(s) not in old)
