"""Structured state that survives the window: a checkpoint, its JSON and Markdown, and what makes
one valid.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from policies.ledger import Identifier, Status, Subtask, TaskDecision
from policies.lines import SAID, indented
from policies.messages import PolicyError
from policies.tokens import TokenCounter, clip_middle

MAX_SUBTASKS_SHOWN = 10
MAX_DECISIONS_SHOWN = 5
GOAL_SHARE = 0.5
"""What a goal may take of a new window's text where the rest of the state needs the other half."""
MIN_GOAL = 24
COUNTED = frozenset({"Open issues", SAID, "Success criteria"})
"""Sections for which a new window states how many lines it omits."""
URGENT = ("In progress", "Open issues", SAID, "Success criteria")
"""What a new window needs first after the goal; everything else follows in the order of the
sections.
"""
VERIFY = (
    "Verify before relying on it: working directory, branch, files and services may have changed"
    " since."
)


class InvalidCheckpoint(PolicyError): ...


@dataclass(frozen=True, slots=True)
class Validity:
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.errors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of one task at one moment; ``saved_at`` is UTC ISO 8601.

    ``constraints`` are the user's words, never reworded. ``version`` grows with every save,
    ``window_id`` with every window. ``marks`` are digests of some of the messages that were read.
    """

    goal: str = ""
    success_criteria: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    subtasks: tuple[Subtask, ...] = ()
    decisions: tuple[TaskDecision, ...] = ()
    open_issues: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    learnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    identifiers: tuple[Identifier, ...] = ()
    narrative: str = ""
    version: int = 1
    window_id: int = 1
    saved_at: str = ""
    marks: tuple[str, ...] = ()

    def with_status(self, status: Status) -> tuple[Subtask, ...]:
        return tuple(s for s in self.subtasks if s.status is status)

    def advance(self, **changes: Any) -> "Checkpoint":
        """A copy with ``changes``; the version grows by one where this checkpoint had been
        saved.
        """
        return replace(self, version=self.version + 1 if self.saved_at else self.version, **changes)

    def saved(self, *, at: str) -> "Checkpoint":
        return replace(self, saved_at=at)

    def beside_goal(self) -> "Checkpoint":
        """The same state for a reader that sees the goal anyway: without it, and without the
        constraints in it.
        """
        return replace(
            self, goal="", constraints=tuple(c for c in self.constraints if c not in self.goal)
        )

    def is_newer(self, other: "Checkpoint | None") -> bool:
        """Whether this state may replace ``other``: a higher version, and no earlier window."""
        return other is None or (self.version > other.version and self.window_id >= other.window_id)

    def validate(self, *, after: "Checkpoint | None" = None) -> Validity:
        """Errors (no goal, a version or window below 1, not newer than the state ``after``) and
        warnings.
        """
        running = self.with_status(Status.IN_PROGRESS)
        follows = "" if after is None else f"window {after.window_id}, version {after.version}"
        errors = {
            "no goal": not self.goal.strip(),
            f"window_id {self.window_id} is below 1": self.window_id < 1,
            f"version {self.version} is below 1": self.version < 1,
            f"stale: window {self.window_id}, version {self.version} does not follow {follows}": (
                not self.is_newer(after)
            ),
        }
        warnings = {
            "subtasks remain but none is in progress": (
                bool(self.with_status(Status.PLANNED)) and not running
            ),
            "more than one subtask is in progress": len(running) > 1,
            "a constraint stands twice": len(set(self.constraints)) != len(self.constraints),
        }
        return Validity(
            tuple(e for e, holds in errors.items() if holds),
            tuple(w for w, h in warnings.items() if h),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Checkpoint":
        """The checkpoint that ``text`` holds; unknown keys are ignored, wrong types raise
        InvalidCheckpoint.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise InvalidCheckpoint(f"not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise InvalidCheckpoint("not a JSON object")
        try:
            known: dict[str, Any] = {
                f.name: _read(f.name, raw[f.name]) for f in fields(cls) if f.name in raw
            }
            return cls(**known)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidCheckpoint(f"a field has the wrong type: {error}") from error

    def sections(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Headed lines by priority, critical first; empty sections are left out."""
        done = self.with_status(Status.DONE)[-MAX_SUBTASKS_SHOWN:]
        planned = self.with_status(Status.PLANNED)[:MAX_SUBTASKS_SHOWN]
        stamp = f" (as of {self.saved_at})" if self.saved_at else ""
        every = (
            ("Goal", (self.goal,) if self.goal else ()),
            (SAID, self.constraints),
            (
                "Success criteria",
                tuple(c for c in self.success_criteria if c not in self.constraints),
            ),
            ("In progress", tuple(s.text for s in self.with_status(Status.IN_PROGRESS))),
            ("Open issues", self.open_issues),
            ("TODO (not done)", tuple(f"TODO: {s.text}" for s in planned)),
            ("Done", tuple(f"{s.text} (not verified)" if s.told else s.text for s in done)),
            ("Decisions", tuple(map(str, self.decisions[-MAX_DECISIONS_SHOWN:]))),
            (f"Environment{stamp}", (*self.environment, VERIFY) if self.environment else ()),
            ("Learnings", self.learnings),
            ("Notes", self.notes),
            (
                "Identifiers",
                tuple(
                    f"{i.value} ({i.label})" if i.label else i.value
                    for i in self.identifiers
                    if i.shown
                ),
            ),
            ("Narrative", (self.narrative,) if self.narrative else ()),
        )
        return tuple((title, lines) for title, lines in every if lines)

    def to_markdown(self) -> str:
        stamp = f", saved {self.saved_at}" if self.saved_at else ""
        parts = [f"# Checkpoint: window {self.window_id}, version {self.version}{stamp}"]
        for title, lines in self.sections():
            body = (
                "\n".join(lines)
                if title in {"Goal", "Narrative"}
                else "\n".join(f"- {line}" for line in lines)
            )
            parts.append(f"## {title}\n\n{body}")
        return "\n\n".join(parts) + "\n"

    def bootstrap(self, *, max_tokens: int, counter: TokenCounter, ref: str = "") -> str:
        """What a new window starts from, at most ``max_tokens``; empty where not even its first
        line fits.

        Goal, current subtask, open issues, constraints and criteria come first, the rest as room
        allows. A goal that would take more than half is cut in the middle and names ``ref``.
        """
        stamp = f", saved {self.saved_at}" if self.saved_at else ""
        page = _BootstrapPage(counter, max_tokens)
        header = (
            f"Resuming from checkpoint: window {self.window_id}, version {self.version}{stamp}."
            f" {VERIFY}"
        )
        if not page.add(header):
            return ""
        sections = dict(self.sections())
        page.hold(SAID, len(self.constraints))
        rest = sum(
            page.cost(title, line)
            for title, lines in sections.items()
            if title != "Goal"
            for line in lines
        )
        where = ref or f"checkpoint {self.window_id}.{self.version}"
        goal = _fitted(
            self.goal, max(int(GOAL_SHARE * max_tokens), page.left - rest), page=page, ref=where
        )
        if page.write("Goal", (goal,) if goal else ()) and goal == self.goal:
            for title in (SAID, "Success criteria"):
                sections[title] = tuple(c for c in sections.get(title, ()) if c not in goal)
        sections.pop("Goal", None)
        for title in (*URGENT, *(t for t in sections if t not in URGENT)):
            if title == SAID:
                page.hold(title, 0)
            page.write(title, sections.get(title, ()))
        return page.text()

    def delta(self, previous: "Checkpoint | None") -> dict[str, object]:
        base = previous or Checkpoint(version=0, window_id=0)
        changes: dict[str, object] = {}
        for name in (f.name for f in fields(self) if f.name != "marks"):
            old = getattr(base, name)
            new = getattr(self, name)
            if old == new:
                continue
            if name == "subtasks":
                changes[name] = _subtask_changes(old, new)
            elif isinstance(new, tuple):
                before = [_line(v) for v in old]
                after = [_line(v) for v in new]
                changes[name] = {
                    "added": [v for v in after if v not in before],
                    "removed": [v for v in before if v not in after],
                }
            else:
                changes[name] = {"from": old, "to": new}
        return changes

    def coverage(self, literals: Iterable[str]) -> float:
        wanted = {v.lower() for v in literals if v}
        if not wanted:
            return 1.0
        page = self.to_markdown().lower()
        return sum(v in page for v in wanted) / len(wanted)


class _BootstrapPage:
    def __init__(self, counter: TokenCounter, max_tokens: int) -> None:
        self.counter = counter
        self._most = max_tokens
        self._used = 0
        self._held = 0
        self._pieces: list[str] = []

    @property
    def left(self) -> int:
        return self._most - self._used - self._held

    def hold(self, title: str, number: int) -> None:
        self._held = self.cost(title, _unseen(number, title)) if number else 0

    def cost(self, title: str, line: str) -> int:
        return self.counter.count(f"\n{title}:\n- {indented(line)}")

    def add(self, piece: str, *, reserve: int = 0) -> bool:
        tokens = self.counter.count(piece) + (1 if self._pieces else 0)
        if tokens + reserve > self.left:
            return False
        self._used += tokens
        self._pieces.append(piece)
        return True

    def write(self, title: str, lines: Sequence[str]) -> bool:
        told = title in COUNTED
        reserve = self.cost(title, _unseen(len(lines), title)) if told else 0
        heading = f"\n{title}:"
        missing = 0
        for number, line in enumerate(lines):
            if line == VERIFY:
                continue
            last = number + 1 == len(lines) and not missing
            if self.add(f"{heading}\n- {indented(line)}", reserve=0 if last else reserve):
                heading = ""
                continue
            missing += 1
            if not told:
                break
        if missing and told:
            self.add(f"{heading}\n- {_unseen(missing, title)}")
        return not missing

    def text(self) -> str:
        while self._pieces and self.counter.count("".join(self._pieces)) > self._most:
            self._pieces.pop()
        return "".join(self._pieces)


def _fitted(goal: str, most: int, *, page: _BootstrapPage, ref: str) -> str:
    room = min(most, page.left) - page.cost("Goal", "") - 1
    if page.counter.count(goal) <= room:
        return goal
    return clip_middle(goal, max(room, MIN_GOAL), counter=page.counter, ref=ref)


def _unseen(number: int, title: str) -> str:
    return f"… and {number} more in the checkpoint ({title.partition(' (')[0].lower()})"


def _subtask_changes(old: Sequence[Subtask], new: Sequence[Subtask]) -> dict[str, list[str]]:
    before = {s.text: s.status for s in old}
    after = {s.text: s.status for s in new}
    return {
        "added": [f"{status}: {text}" for text, status in after.items() if text not in before],
        "removed": [f"{status}: {text}" for text, status in before.items() if text not in after],
        "changed": [
            f"{status}: {text}"
            for text, status in after.items()
            if before.get(text, status) is not status
        ],
    }


def _line(value: object) -> str:
    return value.value if isinstance(value, Identifier) else str(value)


def _read(name: str, value: object) -> object:
    if name in {"goal", "narrative", "saved_at"}:
        return _text(value)
    if name in {"version", "window_id"}:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is not a number")
        return value
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} is not a list")
    if name == "subtasks":
        return tuple(
            Subtask(_text(v["text"]), Status(_text(v["status"])), bool(v.get("told", False)))
            for v in map(_object, value)
        )
    if name == "decisions":
        return tuple(_decision(_object(v)) for v in value)
    if name == "identifiers":
        return tuple(
            Identifier(_text(v["value"]), _text(v.get("label", "")), bool(v.get("shown", True)))
            for v in map(_object, value)
        )
    return tuple(_text(v) for v in value)


def _decision(value: Mapping[str, object]) -> TaskDecision:
    against = value.get("alternatives", ())
    if not isinstance(against, Sequence) or isinstance(against, str):
        raise TypeError("alternatives is not a list")
    return TaskDecision(
        _text(value["text"]), _text(value.get("rationale", "")), tuple(_text(v) for v in against)
    )


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError("an entry is not an object")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("an entry is not text")
    return value
