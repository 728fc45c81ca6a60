"""What holds around a task: directory, branch, files that were written, each with its message.

Only what a program reported or a call asked for counts; an answer's words about it do not.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from policies.state.issues import error_in
from policies.text.segments import Source, parse

MOST_FACTS = 20
MOST_READ = 4_000
"""Characters at the beginning of a result that are read."""
LONGEST_VALUE = 160
_DIRECTORY = re.compile(
    r"(?:current directory|working directory|\bcwd|\bPWD)\b['\"]?\s{0,9}[:=]\s{0,9}['\"]?"
    r"((?:/|~|[A-Z]:\\)[^\s'\"(),;]{1,200})",
    re.IGNORECASE,
)
_CHANGED = re.compile(r"(?:\A|[;&|\n]\s*|&& )cd ((?:/|~)[^\s;&|'\"]{1,160})")
_BRANCH = re.compile(
    r"^(?:On branch|Switched to (?:a new )?branch|##|Already on) ['\"]?([\w./-]{1,80}?)(?:['\"]|\.\.\.\S*|\s|$)",
    re.MULTILINE,
)
_WRITES = re.compile(r"(?:write|create|save|new_file|touch|edit|patch)", re.IGNORECASE)
_PATHS = frozenset({"path", "file_path", "filename", "file", "target_file", "filepath"})
_POSITION = re.compile(r" \(message \d+\)\Z")


def environment(sources: Sequence[Source], *, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Facts as ``name: value (message n)``, oldest first, the newest few; ``known`` are those of before."""
    board = {key_of(line): line for line in known}
    for source in sources:
        for name, value in _facts(source) if source.is_result else ():
            line = f"{name}: {value.rstrip('.,;:)')[:LONGEST_VALUE]} (message {source.position})"
            old = board.pop(key_of(line), "")
            board[key_of(line)] = old if bare(old) == bare(line) else line
    return tuple(board.values())[-MOST_FACTS:]


def bare(line: str) -> str:
    """A fact without its position."""
    return _POSITION.sub("", line)


def key_of(line: str) -> str:
    """What two lines share of which the later replaces the earlier: the name; of files all."""
    name, _, value = bare(line).partition(": ")
    return f"{name}: {value.lower()}" if name == "file" else name


def _facts(source: Source) -> Iterator[tuple[str, str]]:
    if not error_in(source.text):
        yield from _of_call(source)
    text = source.text[:MOST_READ]
    for match in _DIRECTORY.finditer(text):
        yield "cwd", match.group(1)
    for match in _BRANCH.finditer(text):
        yield "git branch", match.group(1)


def _of_call(source: Source) -> Iterator[tuple[str, str]]:
    """What a call that showed no error has changed."""
    asked = parse(source.arguments)
    if not isinstance(asked, Mapping):
        return
    for key, value in asked.items():
        if not isinstance(value, str):
            continue
        if str(key).lower() in _PATHS and _WRITES.search(source.tool):
            yield "file", value
        for match in _CHANGED.finditer(value[:MOST_READ]) if "cd " in value else ():
            yield "cwd", match.group(1)
        shown = source.text.strip()
        if value.strip() == "pwd" and shown.startswith("/") and len(shown.split()) == 1:
            yield "cwd", shown
