"""What holds around a task: directory, branch, versions, services, files that were made, each with its message.

Only what a program reported or a call asked for counts; an answer's words about it do not.
"""

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from policies.extraction.conclusions import Conclusion
from policies.extraction.readings import Reading, Readings, Source

MOST_FACTS = 20
MOST_READ = 20_000
"""Characters at either end of a result that are read."""
LONGEST_VALUE = 160
SAID = "user"
_DIRECTORY = re.compile(
    r"(?:current directory|working directory|\bcwd|\bPWD)\b['\"]?(?: is)?\s{0,9}[:=]?\s{0,9}['\"]?"
    r"((?:/|~|[A-Z]:\\)[^\s'\"(),;]{1,200})",
    re.IGNORECASE,
)
_CHANGED = re.compile(r"(?:\A|[;&|\n]\s*|&& )cd ((?:/|~)[^\s;&|'\"]{1,160})")
_BRANCH = re.compile(
    r"^(?:On branch|Switched to (?:a new )?branch|##|Already on) ['\"]?([\w./-]{1,80}?)(?:['\"]|\.\.\.\S*|\s|$)"
    r"|\bgit (?:checkout|switch) (?:-[bcB] )?(?!-)([\w./-]{2,80})(?=\s*(?:$|[;&|\n]))",
    re.MULTILINE,
)
_VERSION = re.compile(
    r"\b(python|node(?:\.?js)?|npm|pnpm|yarn|pip|pytest|go|rustc|cargo|java|openjdk|gcc|clang|docker|postgres(?:ql)?|psql"
    r"|mysql|mariadb|sqlite|redis|nginx|ruby|php|perl|git|cmake|kubectl|terraform|django|flask|react|numpy|pandas|torch)"
    r"(?:[ /=@-]{1,2}| version:? |-server )(?:go)?v?(\d{1,4}\.\d{1,4}(?:\.\d{1,6})?)\b",
    re.IGNORECASE,
)
_SERVICE = re.compile(
    r"\b(?:listening|running|serving|server started|started server|available|ready|started)\b[^\n]{0,40}?"
    r"\b(?:on|at)\b:? (?:port )?((?:https?://)?(?:[\w.-]{1,60}:)?\d{2,5})\b",
    re.IGNORECASE,
)
_MADE = re.compile(
    r"\b(?:created|wrote|written to|saved (?:to|as)|generated)\b[^\n/~.\w]{0,4}"
    r"(?:(?:successfully )?(?:at|to|in|file):? )?"
    r"['\"`]?((?:[\w~.-]{0,60}/)[\w./@+-]{1,160}\.\w{1,8})",
    re.IGNORECASE,
)
_WRITES = re.compile(r"(?:write|create|save|new_file|touch|edit|patch)", re.IGNORECASE)
_PATHS = frozenset({"path", "file_path", "file path", "filename", "file", "target_file", "target file", "filepath"})
_POSITION = re.compile(r" \(message \d+\)\Z")


def environment(sources: Sequence[Source], readings: Readings, *, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Facts as ``name: value (message n)``, oldest first, the newest few; ``known`` are those of before."""
    board = {key_of(line): line for line in known}
    for source in sources:
        for name, value in _facts(source, readings):
            add(board, name, value, source.position)
    return tuple(board.values())[-MOST_FACTS:]


def add(board: dict[str, str], name: str, value: str, position: int) -> None:
    """Put a fact on the board in place of the one that had its name; what is said again keeps its place."""
    line = f"{name}: {value} (message {position})"
    key = key_of(line)
    old = board.pop(key, "")
    board[key] = old if old and bare(old) == bare(line) else line


def bare(line: str) -> str:
    """A fact without its position."""
    return _POSITION.sub("", line)


def key_of(line: str) -> str:
    """What two lines share of which the later replaces the earlier: the name; of files and the user's words all."""
    name, _, value = bare(line).partition(": ")
    return f"{name}: {value.lower()}" if name in {"file", SAID} else name


def _facts(source: Source, readings: Readings) -> list[tuple[str, str]]:
    """The names and values that one message gives, read once."""
    said = f"environment\0{source.role}\0{source.tool}\0{source.arguments}\0{source.text}"
    key = blake2b(said.encode(errors="replace"), digest_size=16).digest()
    found = readings.find(key)
    if not isinstance(found, Reading):
        made = tuple(Conclusion(n, v, 0.0, frozenset()) for n, v in _read(source, readings.of(source)))
        found = Reading(conclusions=made)
        readings.keep(key, found)
    return [(c.label, c.text) for c in found.conclusions]


def _read(source: Source, reading: Reading) -> Iterator[tuple[str, str]]:
    output = source.is_result or reading.showed_output or source.role == "user"
    if not output:
        return
    text = (
        source.text if len(source.text) <= 2 * MOST_READ else f"{source.text[:MOST_READ]}\n{source.text[-MOST_READ:]}"
    )
    failed = bool(reading.conclusions)
    if source.is_result:
        yield from _of_call(source, reading, failed=failed)
    for match in _DIRECTORY.finditer(text):
        yield "cwd", _clean(match.group(1))
    if source.is_result or reading.showed_output:
        yield from _of_output(text)


def _of_call(source: Source, reading: Reading, *, failed: bool) -> Iterator[tuple[str, str]]:
    """What the call itself changed, where its result shows no error."""
    if failed:
        return
    for ask in reading.asked:
        if ask.key.lower() in _PATHS and _WRITES.search(source.tool):
            yield "file", _clean(ask.value)
    if "cd " in source.arguments or "git " in source.arguments:
        arguments = source.arguments.replace("\\n", "\n").strip('{}" ')
        command = arguments.partition('": "')[2] or arguments.partition('":"')[2] or arguments
        for match in _CHANGED.finditer(command):
            yield "cwd", _clean(match.group(1))
        for match in _BRANCH.finditer(command):
            yield "git branch", match.group(1) or match.group(2)
    line = source.text.strip()
    if "pwd" in source.arguments and line.startswith("/") and "\n" not in line and " " not in line:
        yield "cwd", _clean(line)


def _of_output(text: str) -> Iterator[tuple[str, str]]:
    if "branch" in text or "## " in text:
        for match in _BRANCH.finditer(text):
            yield "git branch", match.group(1) or match.group(2)
    for match in _VERSION.finditer(text):
        yield f"{match.group(1).lower()} version", match.group(2)
    for match in _SERVICE.finditer(text):
        yield f"service on port {match.group(1).rpartition(':')[2]}", match.group(1)
    for match in _MADE.finditer(text):
        yield "file", _clean(match.group(1))


def _clean(value: str) -> str:
    return value.rstrip(".,;:)")[:LONGEST_VALUE]
