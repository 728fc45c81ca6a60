"""What is still wrong: the last error of each call that has not succeeded since, by what programs print.

An issue carries the line that names the error behind the call that showed it: ``run_tests(tests/a.py): KeyError: 'x'``.
"""

import re
from collections.abc import Mapping, Sequence

from policies.messages import ToolCall, same_call
from policies.text.gist import key_argument, shorten
from policies.text.segments import Source, clipped, parse

MOST_ISSUES = 8
LONGEST = 240
ALL_READ = 4_000
"""Characters of an output that is read whole; of a longer one its last lines, where programs say what went wrong."""
LAST_LINES = 30
LEAST_STATUS = 400
_ERRORS = ("error", "errors", "exception", "error_message", "errormessage")
_FLAGS = ("is_error", "iserror", "failed")
_SUCCESSES = ("success", "ok")
_CODES = ("exit_code", "exitcode", "exit_status", "returncode", "return_code")
_STATUSES = ("status", "status_code", "statuscode", "http_status")
_MESSAGES = ("message", "detail", "stderr", "content", "text", "reason", "output", "code", "type")
_FAILED = frozenset({"error", "failed", "failure"})
_RAISED = re.compile(r"(?:E\s+)?(?:[\w.]*(?:Error|Exception)|panic|fatal)\b(?:\[\w+\])?(?::\s|\s*\Z)", re.IGNORECASE)
_REPORTED = re.compile(
    r"\A(?:[^\s:]+:(?:\d+:)*\s+)?(?:fatal |compile |syntax )?error\b\s*(?:\[\w+\])?:"
    r"|\A(?:FAILED|FAIL|ERROR|ERR!|npm ERR!|Traceback \()(?=\W|\Z)"
    r"|: (?:No such file or directory|(?:command )?not found|Permission denied|Is a directory)\Z"
    r"|\bexit(?:ed)?(?: with)?(?: code| status)?[:=]? ?-?[1-9]\d{0,2}\b|\b[1-9]\d* (?:failed|errors?)\b"
    r"|\AHTTP/[\d.]+ [45]\d\d\b|\b(?:HTTP|status(?: code)?)[ :=]{1,2}[45]\d\d\b|\A[45]\d\d (?:[A-Z][a-z]+ ?){1,4}\Z"
)


def open_issues(sources: Sequence[Source], *, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The issues that these messages leave open, oldest first, where ``known`` were open before; the newest few."""
    board: dict[str, tuple[str, str] | None] = dict.fromkeys(known)
    for source in sources:
        if not source.tool:
            continue
        call = same_call(ToolCall("", source.tool, source.arguments))
        named = f"{_named(source)}: "
        for text in [t for t, made in board.items() if made == call or (made is None and t.startswith(named))]:
            del board[text]
        if error := error_in(source.text):
            board[f"{named}{error}"] = call
    return tuple(board)[-MOST_ISSUES:]


def _named(source: Source) -> str:
    argument = key_argument(source.arguments) if source.arguments else ""
    return f"{source.tool}({argument})" if argument else source.tool


def error_in(text: str) -> str:
    """The line of a result that names its error, by what programs print; empty where it shows none."""
    document = parse(clipped(text))
    if document is not None:
        return _in_document(document)
    lines = [" ".join(line.split()) for line in text[-10 * ALL_READ :].splitlines()]
    if len(text) > ALL_READ:
        lines = lines[-LAST_LINES:]
    for shape in (_RAISED.match, _REPORTED.search):
        found = next((line for line in reversed(lines) if line and shape(line[: 2 * LONGEST])), "")
        if found:
            return shorten(found, LONGEST)
    return ""


def _in_document(document: object) -> str:
    """The message of a JSON result that says of itself that it failed."""
    if not isinstance(document, Mapping):
        return ""
    values = {str(key).lower().replace("-", "_"): value for key, value in document.items()}
    named = next((v for key in _ERRORS if (v := values.get(key))), None)
    if named is None and not _has_failed(values):
        return ""
    return shorten(" ".join(_message(named, values).split()), LONGEST)


def _has_failed(values: Mapping[str, object]) -> bool:
    codes = [values.get(key) for key in _CODES]
    statuses = [values.get(key) for key in _STATUSES]
    return (
        any(values.get(key) is True for key in _FLAGS)
        or any(values.get(key) is False for key in _SUCCESSES)
        or any(isinstance(code, int) and code != 0 for code in codes)
        or any(isinstance(status, int) and status >= LEAST_STATUS for status in statuses)
        or any(isinstance(status, str) and status.lower() in _FAILED for status in statuses)
    )


def _message(named: object, values: Mapping[str, object]) -> str:
    """What an error says: itself, or a text within it or beside it."""
    if isinstance(named, list) and named:
        named = named[0]
    if isinstance(named, str):
        return named
    within = named if isinstance(named, Mapping) else {}
    texts = (v for place in (within, values) for key in _MESSAGES if isinstance(v := place.get(key), str) and v.strip())
    said = next(texts, "")
    return said.strip().splitlines()[-1] if said else next((f"{k} {v}" for k, v in values.items()), "failed")
