"""The ledger: what each call did, in one line with the tool's name, what it worked on, and its
outcome.

    call 31: apply_patch src/oven.py → M src/oven.py
    call 40: shell python -m pytest -q (3 times) → 54 passed in 4.18s

The outcome of a call is the last line of its result that reports one or, for a short result, its
last line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from policies.text.segments import Source, parse
from policies.tokens import shorten

MAX_TARGET_LEN = 90
MAX_VALUE_LEN = 48
MAX_OUTCOME_LEN = 70
FEW_LINES = 3
"""Lines of a result that is short: its last one is the outcome of the call, whatever it says."""
LOOKED_AT = 12
"""Lines at the end of a result that are searched for one that reports an outcome."""
MAX_READ = 4_000
"""Characters at the end of a result that are read for it."""
MAX_PATHS = 3
MAX_KEPT = 400
"""Characters of arguments that are remembered with what they name."""
_CHANGES = re.compile(
    r"write|create|save|new_file|touch|edit|patch|replace|insert|delete|remove|rename|move_",
    re.IGNORECASE,
)
"""Names of tools that change something."""
_PATH = re.compile(r"[\w.@~/\\-]*[\w/\\]\.[A-Za-z]\w{0,9}|(?:~|\.{0,2})/[\w.@/-]+")
_HEADER = re.compile(
    r"^(?:\+\+\+ (?:b/)?|\*\*\* (?:Update|Add|Delete) File: |diff --git a/)([\w.@~/-]{1,160})",
    re.MULTILINE,
)
"""How a patch names the file that it changes."""
_END = re.compile(
    r"\b\d{1,9} (?:passed|failed|errors?|tests?|failures?|examples?|specs?|warnings?|problems?)\b"
    r"|\bexit(?:ed)?(?: with)?(?: code| status)?:? ?\d"
    r"|^(?:OK|FAILED|FAIL|PASS|PASSED|ok|Success|SUCCESS|Finished|BUILD)\b"
    r"|^\w{0,40}(?:Error|Exception)\b|\b(?:error|fatal)(?:\[\w{1,20}\])?: |\bcommand not found\b|\bNo such file\b"
)
"""How tests, builds and shells report the end of a run."""
_VALUE = re.compile(r"[\W\d]*\w{0,3}\Z")
"""A number alone does not say how a call ended."""
_RULES = "=~* "
"""What programs draw around a line."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call: the ``source`` that is its result, its line and its outcome, the ``files`` that it
    changed.

    ``ended``: an outcome is reported.
    """

    source: int
    text: str
    outcome: str = ""
    files: tuple[str, ...] = ()
    ended: bool = False


def steps_of(sources: Sequence[Source]) -> list[Step]:
    """The steps in order; of those that are equal the newest, with their number."""
    last: dict[tuple[str, str], tuple[int, int, tuple[str, ...]]] = {}
    for i, source in enumerate(sources):
        if not source.tool or not source.is_result:
            continue
        target, files = _target(source.tool, source.arguments)
        _, times, _ = last.get((source.tool, target), (0, 0, ()))
        last[source.tool, target] = i, times + 1, files
    steps = list[Step]()
    for (tool, target), (i, times, files) in sorted(last.items(), key=lambda each: each[1][0]):
        ended, said = outcome(sources[i].text)
        text = " ".join(f"{tool} {target}".split())
        if not target and not said:
            continue  # it would say no more than the tool's name
        again = f" ({times} times)" if times > 1 else ""
        steps.append(Step(i, f"{text}{again}{f' → {said}' if said else ''}", said, files, ended))
    return steps


def _target(tool: str, arguments: str) -> tuple[str, tuple[str, ...]]:
    """What a call works on, and the files that it changes."""
    return (
        _short_target(tool, arguments)
        if len(arguments) <= MAX_KEPT
        else _target_of(tool, arguments)
    )


@lru_cache(4_096)
def _short_target(tool: str, arguments: str) -> tuple[str, tuple[str, ...]]:
    return _target_of(tool, arguments)


def _target_of(tool: str, arguments: str) -> tuple[str, tuple[str, ...]]:
    document = parse(arguments)
    values = [*_values(document)] if document is not None else [arguments]
    patched = dict.fromkeys(
        name for value in values if "\n" in value for name in _HEADER.findall(value)
    )
    lines = [value.strip().splitlines()[:2] for value in values if value.strip()]
    shown = [
        shorten(" ".join(each[0][:MAX_KEPT].split()), MAX_VALUE_LEN) + "…" * (len(each) > 1)
        for each in lines
    ]
    named = [line for line, each in zip(shown, lines, strict=True) if len(each) == 1]
    paths = [path for line in named for path in _PATH.findall(line)] if not patched else []
    changes = bool(patched) or (
        bool(paths) and (_CHANGES.search(tool) is not None or any("\n" in v for v in values))
    )
    if changes:
        names = (*patched, *paths)[:MAX_PATHS]
        return shorten(" ".join(names), MAX_TARGET_LEN), names
    text = " ".join(shown) or " ".join(arguments[:MAX_TARGET_LEN].split())
    return shorten(text, MAX_TARGET_LEN), ()


def _values(document: object) -> Iterator[str]:
    """The strings and numbers of a document in its order; the words of a command as one."""
    stack = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            stack.extend(reversed([*value.values()]))
        elif isinstance(value, list) and all(isinstance(each, str) for each in value):
            yield ("\n" if any("\n" in each for each in value) else " ").join(value)
        elif isinstance(value, list):
            stack.extend(reversed(value))
        elif isinstance(value, str):
            yield value
        elif value is not None and not isinstance(value, bool):
            yield str(value)


def outcome(text: str) -> tuple[bool, str]:
    """Whether a result reports an outcome, and the outcome; empty where no line says it."""
    if text[:1] in "{[" and (document := parse(text)) is not None:
        if not isinstance(document, Mapping) or not isinstance(said := document.get("output"), str):
            return False, ""
        text = said
    lines = [line for each in text[-MAX_READ:].splitlines() if (line := each.strip().strip(_RULES))]
    for line in reversed(lines[-LOOKED_AT:]):
        if _END.search(line[:400]) and not line.endswith(":"):
            return True, shorten(" ".join(line.split()), MAX_OUTCOME_LEN)
    if not lines or len(text) > MAX_READ or len(lines) > FEW_LINES or _VALUE.match(lines[-1]):
        return False, ""
    return False, shorten(" ".join(lines[-1].split()), MAX_OUTCOME_LEN)
