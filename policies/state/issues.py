"""What is still wrong: errors that tools showed and nobody mended, and what the assistant says blocks it.

An issue carries the exact text of its error behind the call that showed it, ``run_tests(tests/a.py): KeyError: 'x'``.
It is closed by a later result of the same call without an error, or by an answer that says that it is mended.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.extraction.conclusions import Conclusion
from policies.extraction.findings import key_argument
from policies.extraction.identifiers import STRONG, scan
from policies.extraction.readings import Reading, Readings, Source
from policies.extraction.rules import STOP, WORD
from policies.messages import ToolCall, same_call

MOST_ISSUES = 8
SURE_ERROR = 1.0
"""A line that names its error weighs more; one that only has a word for failure in it counts in a short result."""
SHORT_RESULT = 400
SAME_WORDS = 2
LONGEST_COMMAND = 60
_MENDED = re.compile(
    r"\b(?:fixed|resolved|solved|mended|works? now|passes|pass now|succeeds? now|no longer fails?)\b", re.IGNORECASE
)
_ALL_PASS = re.compile(
    r"\ball (?:of )?(?:the |\d+ )?(?:tests|checks|specs)\b[^.]{0,30}\b(?:pass|green|succeed)", re.IGNORECASE
)
_NOT_YET = re.compile(
    r"\b(?:not|n['\u2019]t|never|still|if|once|should|would|until|need(?:s)? to|to be)\b", re.IGNORECASE
)
_TEST = re.compile(r"\b\w*(?:test|spec|check|assert)\w*", re.IGNORECASE)
_BLOCKED = re.compile(
    r"\b(?:(?:i am|we are|is|are|i['\u2019]m|we['\u2019]re) (?:now |currently |still )?(?:blocked|stuck)\b"
    r"|blocked (?:by|on)\b|blocker\b"
    r"|cannot (?:proceed|continue|go on)\b|can['\u2019]t (?:proceed|continue|go on)\b|waiting (?:for|on)\b"
    r"|unable to (?:proceed|continue|reproduce|connect|access)\b)",
    re.IGNORECASE,
)
_LABELLED = re.compile(r"\A(?:open (?:issue|question|problem)|blocker|issue|bug)s?\s*:\s*\S[^\n]{8}", re.IGNORECASE)
_NUMBERED = re.compile(r"\s*\d{1,6}[:|]\s")
"""A line of a listing: what a file says, not what went wrong."""
_COMMAND = re.compile(r"```[^\n`]{0,40}\n\s{0,40}([^\n`]{1,200})[^`]{0,4000}```\s{0,20}\Z")


@dataclass(frozen=True, slots=True)
class _Issue:
    text: str
    call: tuple[str, str] = ("", "")
    keys: frozenset[str] = frozenset()


def blocks(text: str) -> bool:
    """Whether a sentence says that something is in the way."""
    return bool(_BLOCKED.search(text))


def open_issues(sources: Sequence[Source], readings: Readings, *, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The issues that these messages leave open, oldest first, where ``known`` were open before; the newest few."""
    board = {text: _Issue(text, keys=_keys(text)) for text in known}
    command = ""
    for source in sources:
        reading = readings.of(source)
        if source.is_result or reading.showed_output:
            _after_result(board, source, reading, command=command)
        elif source.role == "assistant":
            said = readings.conclusions(source)
            for conclusion in said:
                _after_conclusion(board, conclusion)
            command = _command(source)
        elif source.role == "user":
            for sentence in reading.sentences:
                if _LABELLED.match(sentence.text):
                    board[sentence.text] = _Issue(sentence.text, keys=_keys(sentence.text))
    return tuple(board)[-MOST_ISSUES:]


def _command(source: Source) -> str:
    """The command in a code block at the end of an answer, for agents whose tools are the chat itself."""
    if source.calls or "```" not in source.text:
        return ""
    match = _COMMAND.search(source.text[-4_000:])
    return match.group(1).strip() if match else ""


def _after_result(board: dict[str, _Issue], source: Source, reading: Reading, *, command: str) -> None:
    call = same_call(ToolCall("", source.tool, source.arguments)) if source.tool else ("", command)
    error = next(iter(reading.conclusions), None)
    if error is not None and (_is_passing(error, source) or _NUMBERED.match(error.text)):
        error = None
    begins = source.tool or command[:LONGEST_COMMAND]
    near = [t for t, issue in board.items() if begins and (issue.call == call or t.startswith(begins))]
    if error is None and not near:
        return
    named = f"{_named(source, command)}: " if begins else ""
    for text in near:
        if board[text].call == call or text.startswith(named):
            del board[text]
    if error is not None:
        text = f"{named}{error.text}"
        board.pop(text, None)
        board[text] = _Issue(text, call, error.keys | _keys(named))


def _is_passing(error: Conclusion, source: Source) -> bool:
    """Whether a long result has no more than a word for failure in it."""
    return error.weight < SURE_ERROR and len(source.text) > SHORT_RESULT


def _named(source: Source, command: str) -> str:
    if not source.tool:
        return command[:LONGEST_COMMAND]
    argument = key_argument(source.arguments) if source.arguments else ""
    return f"{source.tool}({argument})" if argument else source.tool


def _after_conclusion(board: dict[str, _Issue], said: Conclusion) -> None:
    text = said.text
    if _ALL_PASS.search(text) and not _NOT_YET.search(text):
        for issue in [t for t in board if _TEST.search(t)]:
            del board[issue]
    elif _MENDED.search(text) and not _NOT_YET.search(text):
        for issue in _mended(board, said):
            del board[issue]
    elif _BLOCKED.search(text) and said.label in {"failed", "next", "found"}:
        board.pop(text, None)
        board[text] = _Issue(text, keys=said.keys | _keys(text))


def _mended(board: dict[str, _Issue], said: Conclusion) -> list[str]:
    """The issues that a sentence says are mended: those that share an identifier or words with it, else the newest."""
    if not board:
        return []
    keys, words = said.keys | _keys(said.text), _words(said.text)
    near = [t for t, issue in board.items() if keys & issue.keys or len(words & _words(t)) >= SAME_WORDS]
    if near or keys:
        return near
    return [next(reversed(board))]


def _keys(text: str) -> frozenset[str]:
    return frozenset(m.value.lower() for m in scan(text[:600]) if m.kind in STRONG)


def _words(text: str) -> frozenset[str]:
    return frozenset(w for m in WORD.findall(text) if (w := m.lower()) not in STOP and len(w) > 3) - _COMMON


_COMMON = frozenset({"error", "errors", "fixed", "resolved", "solved", "issue", "problem", "works", "passes", "failed"})
