"""What a summariser says of the task's state: read from JSON or from text under headings, whatever it gave.

Small models break JSON: a fence around it, comments, a comma too many, no end. As much as can be read is read.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from policies.ledger import TaskDecision

MAX_ITEMS = 60
MAX_ITEM_LEN = 1_200
MAX_READ_LEN = 400_000
MAX_PREAMBLE_LEN = 200
ATTEMPTS = 12
MAX_OF_TEXT = 0.6
HEADINGS: Mapping[str, str] = {
    "goal": "Goal",
    "done": "Done",
    "current": "In progress",
    "remaining": "Left to do",
    "decisions": "Decisions",
    "open_issues": "Open problems",
    "environment": "Environment",
    "learnings": "Learnings",
    "next_step": "Next step",
}
"""The heading of each field, in the order in which they are written."""
_ALSO = {
    "goal": "goals|task|objective|overall goal|main goal|purpose",
    "done": "done so far|completed|finished|progress|progress so far|completed work|completed steps",
    "current": "current|current work|current state|current step|doing|ongoing|work in progress",
    "remaining": "remaining|remaining work|todo|to do|to-do|todos|left|pending|open tasks|remaining tasks|next steps",
    "decisions": "decision|decisions and why|key decisions|decisions made",
    "open_issues": "open issues|open problem|open issue|errors|issues|problems|unresolved|unresolved issues|blockers"
    "|open errors|unresolved errors",
    "environment": "env|context|setup",
    "learnings": "learning|lessons|lessons learned|findings|insights|key findings|learned",
    "next_step": "next|immediate next step|next action",
}
_FIELD_OF = {
    name: field
    for field, said in _ALSO.items()
    for name in (*said.split("|"), field.replace("_", " "), HEADINGS[field].lower())
}
_HEADING = re.compile(
    r"[\s#>*_\d.)-]{0,12}([A-Za-z][A-Za-z -]{1,40}?)[\s*_]{0,6}(?:\([^()\n]{0,80}\))?[\s*_]{0,4}([:\uff1a]"
    r"|\Z)[\s*_]{0,6}"
)
_BULLET = re.compile(r"\s{0,40}(?:[-*\u2022\u2013+]|\d{1,3}[.)]|\[[ xX]\])\s{1,8}")
_NOTHING = re.compile(
    r"[\W_]*(?:none|nothing|n/?a|unknown|not (?:mentioned|stated|applicable|specified)|null)?[\W_]*\Z", re.IGNORECASE
)
_WHY = re.compile(r" \((?:because|why:|since) ([^\n]{1,900})\)\Z")
_NOT = re.compile(r" \[(?:not|rejected): ([^\]\n]{1,600})\]\Z")
_FENCE = re.compile(r"```[a-zA-Z0-9_-]{0,20}[ \t]{0,20}\n")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a model says of a task, one line each: a proposal, because code decides what of it is believed."""

    goal: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    current: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()
    decisions: tuple[TaskDecision, ...] = ()
    open_issues: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    learnings: tuple[str, ...] = ()
    next_step: tuple[str, ...] = ()

    def to_text(self) -> str:
        """The proposal under headings, one item a line; what is empty is left out."""
        parts: list[str] = []
        for field, heading in HEADINGS.items():
            items = getattr(self, field)
            if len(items) == 1:
                parts.append(f"{heading}: {items[0]}")
            elif items:
                parts.append("\n".join((f"{heading}:", *(f"- {item}" for item in items))))
        return "\n".join(parts)

    def to_json(self) -> str:
        """The proposal as one JSON object, keys in the order of the fields."""
        named = {field: list(getattr(self, field)) for field in HEADINGS}
        named["decisions"] = [
            {"decision": d.text, "why": d.rationale, "rejected": list(d.alternatives)} for d in self.decisions
        ]
        return json.dumps(named, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Proposal | None":
        """The proposal that ``text`` holds as JSON; None where it holds none."""
        raw = _parse(text)
        return None if raw is None else _from_object(raw)


def read_proposal(text: str) -> Proposal | None:
    """The proposal in a reply, JSON or headings; None where it has neither a known key nor a known heading."""
    text = text[:MAX_READ_LEN]
    return _from_json_in(text) or _from_headings(text)


def field_named(heading: str) -> str:
    """The field that a heading names, empty for an unknown one."""
    return _FIELD_OF.get(" ".join(heading.lower().split()), "")


def under_headings(text: str) -> str:
    """``text`` as the headings and items that it holds; as it is where they are less than most of it."""
    if (found := _from_json_in(text[:MAX_READ_LEN])) is not None:
        return found.to_text()
    found = _from_headings(text[:MAX_READ_LEN])
    shown = "" if found is None else found.to_text()
    return shown if found is not None and _weight(shown) >= _weight(text) * MAX_OF_TEXT else text


def _from_json_in(text: str) -> Proposal | None:
    """The proposal in the JSON of a reply, with no more than a preamble before its first brace."""
    start = text.find("{")
    if not 0 <= start <= MAX_PREAMBLE_LEN or _from_headings(text[:start]) is not None:
        return None
    return Proposal.from_json(text[start:])


def _weight(text: str) -> int:
    return sum(len(word) for word in set(text.split()))


def _parse(text: str) -> Mapping[str, object] | None:
    """The JSON object at the beginning of ``text``, mended and completed where it is broken."""
    text = _FENCE.sub("", text[:MAX_READ_LEN], count=1).strip()
    if not text.startswith("{"):
        return None
    for candidate in _mended(text):
        try:
            raw = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return raw if isinstance(raw, dict) else None
    return None


def _mended(text: str) -> Iterator[str]:
    """``text`` without comments and commas too many, closed where it ends early; then shorter, item by item."""
    out: list[str] = []
    stack: list[str] = []
    ends: list[tuple[int, str]] = []
    in_string, at = False, 0
    while at < len(text):
        c = text[at]
        if in_string:
            step = 2 if c == "\\" else 1
            out.append(text[at : at + step] if c != "\n" else "\\n")
            in_string = c != '"'
            at += step
            continue
        skipped = _comment_end(text, at) if c == "/" else at
        if skipped > at:
            at = skipped
            continue
        if c in "}]":
            _drop_comma(out)
            if stack:
                stack.pop()
        elif c == ",":
            ends.append((len(out), "".join(reversed(stack))))
        elif c in "{[":
            stack.append("}" if c == "{" else "]")
        in_string = c == '"'
        out.append(c)
        at += 1
        if c in "}]" and not stack:
            break
    whole = "".join(out)
    if in_string:
        whole = whole.removesuffix("\\") + '"'
    closing = "".join(reversed(stack))
    yield whole.rstrip(" \n\t,") + closing
    for length, closers in reversed(ends[-ATTEMPTS:]):
        yield "".join(out[:length]) + closers


def _comment_end(text: str, at: int) -> int:
    """Where a comment that begins here ends; ``at`` itself where none does."""
    if text.startswith("//", at):
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    if text.startswith("/*", at):
        end = text.find("*/", at + 2)
        return len(text) if end < 0 else end + 2
    return at


def _drop_comma(out: list[str]) -> None:
    """Take out a comma with nothing but space behind it."""
    last = len(out) - 1
    while last >= 0 and out[last].isspace():
        last -= 1
    if last >= 0 and out[last] == ",":
        del out[last]


def _from_object(raw: Mapping[str, object]) -> Proposal | None:
    found: dict[str, list[object]] = {}
    known = False
    for key, value in raw.items():
        if not (field := field_named(key[:60].replace("_", " "))):
            continue
        known = True
        found.setdefault(field, []).extend(value if isinstance(value, list) else [value])
    return _proposal({f: [_item(v, f) for v in values] for f, values in found.items()}) if known else None


def _item(value: object, field: str) -> str | TaskDecision:
    """One entry as text; an object as its values, or as a decision."""
    if isinstance(value, Mapping):
        if field == "decisions":
            return _decision(value)
        return ", ".join(f"{v}" for v in value.values() if isinstance(v, str | int | float) and str(v).strip())
    if isinstance(value, list):
        return ", ".join(str(v) for v in value if isinstance(v, str | int | float))
    return "" if value is None or isinstance(value, bool) else str(value)


def _decision(value: Mapping[str, object]) -> TaskDecision:
    def first(*names: str) -> str:
        return next((str(value[n]) for n in names if isinstance(value.get(n), str | int | float)), "")

    against = next((value[n] for n in ("rejected", "alternatives", "not") if value.get(n)), ())
    others = against if isinstance(against, list) else [against] if isinstance(against, str) else []
    return TaskDecision(
        first("decision", "text", "what", "choice"),
        first("why", "rationale", "reason"),
        tuple(v for v in map(str, others) if v.strip()),
    )


def _from_headings(text: str) -> Proposal | None:
    found: dict[str, list[str | TaskDecision]] = {}
    field, listed = "", True
    for line in text.splitlines():
        head = _HEADING.match(line[:200])
        named = field_named(head.group(1)) if head else ""
        is_title = head is not None and (head.group(2) or line.lstrip()[:1] in {"#", "*"})
        if head is not None and named and is_title and (listed or not _BULLET.match(line)):
            field, listed, line = named, listed and _BULLET.match(line) is not None, line[head.end() :]
            found.setdefault(field, [])
        if field and line.strip():
            found[field].append(line)
    return _proposal(found) if found else None


def _proposal(found: Mapping[str, Sequence[str | TaskDecision]]) -> Proposal:
    decisions = [_tidy_decision(v) for v in found.get("decisions", ())]
    plain = {f: _tidied(found.get(f, ())) for f in HEADINGS if f != "decisions"}
    unique = dict.fromkeys(d for d in decisions if not _NOTHING.match(d.text))
    return Proposal(decisions=tuple(unique)[:MAX_ITEMS], **plain)


def _tidied(items: Sequence[str | TaskDecision]) -> tuple[str, ...]:
    lines = (_tidy(v) for v in items if isinstance(v, str))
    return tuple(dict.fromkeys(v for v in lines if not _NOTHING.match(v)))[:MAX_ITEMS]


def _tidy(item: str) -> str:
    """One entry on one line, without its bullet."""
    line = " ".join(item[: MAX_ITEM_LEN * 2].split())
    for _ in range(4):
        bullet = _BULLET.match(line + " ")
        if bullet is None:
            break
        line = line[bullet.end() :].strip()
    return line[:MAX_ITEM_LEN].rstrip()


def _tidy_decision(value: str | TaskDecision) -> TaskDecision:
    """A decision from its words, ``text (because why) [not: other; another]``."""
    if isinstance(value, TaskDecision):
        others = (_tidy(v).replace("]", ")").replace(";", ",") for v in value.alternatives)
        return TaskDecision(_tidy(value.text), _tidy(value.rationale), tuple(v for v in others if v))
    text, against, why = _tidy(value), "", ""
    rejected = _NOT.search(text)
    if rejected:
        text, against = text[: rejected.start()], rejected.group(1)
    reason = _WHY.search(text)
    if reason:
        text, why = text[: reason.start()], reason.group(1)
    return TaskDecision(text, why, tuple(v.strip() for v in against.split(";") if v.strip()))
