"""What programs print: which line reports an error. Programs speak English, whatever their users do."""

import re

MAX_QUOTED_LEN = 240
BEFORE = 60
MAX_LINE_LEN = 20_000
MAX_OUTPUT_LEN = 400_000
ERROR = re.compile(
    r"\b(?:\w{0,40}(?:Error|Exception)\b|error\b|failed\b|failure\b|fatal\b|denied\b|not found\b|invalid\b|traceback\b|"
    r"cannot\b|unable to\b|refused\b|timed? ?out\b|panic\b|exit (?:code|status) [1-9])",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"\b[A-Za-z]\w{0,40}(?:Error|Exception|Errno)\b|\b(?:error|fatal)(?:\[\w+\])?:|\bpanic:", re.IGNORECASE
)
_NONE = re.compile(r"\b(?:no|0|without)\s+(?:errors?|failures?|failed)\b|\b0 failed\b", re.IGNORECASE)
_CODE = re.compile(
    r"(?:\A(?![\s\W]*\").*[;{(\[]|\A[\s})\];,]+|=>.*)\s*\Z|\A\W*(?:try|else|finally|except|catch)\s*[:{(]"
    r"|\A\W*(?:return|throw|raise|catch|except|if|elif|while|switch|def|class|function|async|await|const|let|var"
    r"|export|public|private|static|func|fn|assert|yield)\b(?=[^:]*[({;=]|[^:]*:\s*\Z)"
    r"|\A\W*(?:throw|raise|return)\s+[\w.]+;?\s*\Z|\A\W*except\s[\w\s.]+:\s*\Z"
    r"|\A\W*(?:from\s+\S+\s+import\b|import\s.*(?:from\s|;\s*\Z|\sas\s))"
    r"|\A\s*[-+]?\s*(?:#|//|/\*|<!--|@@)|\A\s*[\w.]+(?:\[[^\]]*\])? [-+*/|&]?= .*[(;]"
)
_REPORTED = re.compile(
    r"\b\w{0,40}(?:Error|Exception|Errno)\b[^(]{0,20}: |\b(?:error|fatal)(?:\[\w+\]| \w{2,8})?: "
    r"|\b\d+ (?:failed|errors?)\b|^\s*(?:FAIL|FAILED|ERROR|E )\b"
)
_LINE_NUMBER = re.compile(r"^[ \t]{0,8}\d{1,6}(?:[:|]|\t|\u2192)[ \t]?", re.MULTILINE)


def is_code(line: str) -> bool:
    """Whether a line reads as source text rather than as what a program reports of itself."""
    return bool(_CODE.search(line)) and not _REPORTED.search(line)


def reports_error(line: str) -> bool:
    """Whether a line reports an error."""
    return bool(ERROR.search(line)) and not _NONE.search(line) and not is_code(line[:MAX_LINE_LEN])


def error_lines(text: str) -> tuple[str, ...]:
    """Every line that reports an error, once each; a line beyond 240 characters around its error."""
    if not ERROR.search(text):
        return ()
    return tuple(dict.fromkeys(_around(line) for line in text.splitlines() if reports_error(line)))


def open_error(text: str) -> str:
    """The line of an output that names its error best, the last of equals; empty where it shows none."""
    if len(text) > MAX_OUTPUT_LEN:
        return ""
    lines = [line for line in error_lines(text) if len(line) > len("error")]
    return next((line for line in reversed(lines) if _NAMED.search(line)), lines[-1] if lines else "")


def without_line_numbers(text: str) -> str:
    """A listing without the numbers of its lines, which hide that it is source; anything else as it is."""
    bare, count = _LINE_NUMBER.subn("", text)
    return bare if count * 2 > text.count("\n") + 1 else text


def _around(line: str) -> str:
    line = " ".join(line.split()) if len(line) <= MAX_QUOTED_LEN else line
    if len(line) <= MAX_QUOTED_LEN:
        return line
    match = ERROR.search(line)
    start = max(0, match.start() - BEFORE) if match else 0
    return " ".join(line[start : start + MAX_QUOTED_LEN].split())
