"""Structured state that survives the window: a checkpoint, its JSON and Markdown, and what makes one valid."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from policies.errors import PolicyError
from policies.tokens import TokenCounter

DONE_SHOWN = 10
REMAINING_SHOWN = 10
DECISIONS_SHOWN = 5
VERIFY = "Verify before relying on it: working directory, branch, files and services may have changed since."


class InvalidCheckpoint(PolicyError):
    """Text that is not a checkpoint, and why."""


class Status(StrEnum):
    """How far a subtask is; ``planned`` means that nothing of it has been done."""

    PLANNED = "planned"
    IN_PROGRESS = "in_progress"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Subtask:
    """One part of the task."""

    text: str
    status: Status = Status.PLANNED


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, why, and what was decided against."""

    text: str
    rationale: str = ""
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Identifier:
    """A literal of the removed span with what it names; ``shown`` is whether the extract carries it."""

    value: str
    label: str = ""
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What validation found; a checkpoint with errors is not injected."""

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """True without errors."""
        return not self.errors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of one task at one moment.

    Critical are ``goal``, ``success_criteria`` and ``constraints`` (the user's words, never reworded) and
    ``subtasks``; then ``decisions``, ``open_issues`` and ``environment``; then ``learnings`` and ``notes``.
    ``version`` grows by one with every save, ``window_id`` with every window; ``saved_at`` is UTC ISO 8601.
    """

    goal: str = ""
    success_criteria: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    subtasks: tuple[Subtask, ...] = ()
    decisions: tuple[Decision, ...] = ()
    open_issues: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    learnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    identifiers: tuple[Identifier, ...] = ()
    narrative: str = ""
    version: int = 1
    window_id: int = 1
    saved_at: str = ""

    def with_status(self, status: Status) -> tuple[Subtask, ...]:
        """The subtasks of one status, in order."""
        return tuple(s for s in self.subtasks if s.status is status)

    def advance(self, **changes: Any) -> "Checkpoint":
        """A copy with ``changes``; the version grows by one where this checkpoint had been saved."""
        return replace(self, version=self.version + 1 if self.saved_at else self.version, **changes)

    def saved(self, *, at: str) -> "Checkpoint":
        """The same state stamped with the moment ``at`` (UTC ISO 8601)."""
        return replace(self, saved_at=at)

    def validate(self) -> Verdict:
        """Errors (no goal, a version or window below 1) and warnings."""
        errors: list[str] = []
        if not self.goal.strip():
            errors.append("no goal")
        if self.window_id < 1:
            errors.append(f"window_id {self.window_id} is below 1")
        if self.version < 1:
            errors.append(f"version {self.version} is below 1")
        warnings: list[str] = []
        if self.with_status(Status.PLANNED) and not self.with_status(Status.IN_PROGRESS):
            warnings.append("subtasks remain but none is in progress")
        if len(self.with_status(Status.IN_PROGRESS)) > 1:
            warnings.append("more than one subtask is in progress")
        if len(set(self.constraints)) != len(self.constraints):
            warnings.append("a constraint stands twice")
        return Verdict(tuple(errors), tuple(warnings))

    def to_json(self) -> str:
        """This checkpoint as one JSON object, keys in the order of the fields."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Checkpoint":
        """The checkpoint that ``text`` holds; unknown keys are ignored, wrong types raise InvalidCheckpoint."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise InvalidCheckpoint(f"not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise InvalidCheckpoint("not a JSON object")
        try:
            known: dict[str, Any] = {f.name: _read(f.name, raw[f.name]) for f in fields(cls) if f.name in raw}
            return cls(**known)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidCheckpoint(f"a field has the wrong type: {error}") from error

    def sections(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Headed lines by priority, critical first; empty sections are left out."""
        done = self.with_status(Status.DONE)[-DONE_SHOWN:]
        planned = self.with_status(Status.PLANNED)[:REMAINING_SHOWN]
        stamp = f" (as of {self.saved_at})" if self.saved_at else ""
        every = (
            ("Goal", (self.goal,) if self.goal else ()),
            ("Constraints", self.constraints),
            ("Success criteria", self.success_criteria),
            ("In progress", tuple(s.text for s in self.with_status(Status.IN_PROGRESS))),
            ("Open issues", self.open_issues),
            ("TODO (not done)", tuple(f"TODO: {s.text}" for s in planned)),
            ("Done", tuple(s.text for s in done)),
            ("Decisions", tuple(_decided(d) for d in self.decisions[-DECISIONS_SHOWN:])),
            (f"Environment{stamp}", (*self.environment, VERIFY) if self.environment else ()),
            ("Learnings", self.learnings),
            ("Notes", self.notes),
            (
                "Identifiers",
                tuple(f"{i.value} ({i.label})" if i.label else i.value for i in self.identifiers if i.shown),
            ),
            ("Narrative", (self.narrative,) if self.narrative else ()),
        )
        return tuple((title, lines) for title, lines in every if lines)

    def to_markdown(self) -> str:
        """This checkpoint for people: a heading with window and version, then one section per field."""
        stamp = f", saved {self.saved_at}" if self.saved_at else ""
        parts = [f"# Checkpoint: window {self.window_id}, version {self.version}{stamp}"]
        for title, lines in self.sections():
            body = "\n".join(lines) if title in {"Goal", "Narrative"} else "\n".join(f"- {line}" for line in lines)
            parts.append(f"## {title}\n\n{body}")
        return "\n\n".join(parts) + "\n"

    def bootstrap(self, *, max_tokens: int, counter: TokenCounter) -> str:
        """What a new window starts from, at most ``max_tokens``: the sections by priority until one does not fit.

        A line that does not fit ends its section; lower sections are still tried. The line that asks to verify
        the environment always goes first after the header.
        """
        text = f"Resuming from checkpoint: window {self.window_id}, version {self.version}. {VERIFY}"
        if counter.count(text) > max_tokens:
            return ""
        for title, lines in self.sections():
            heading = f"\n{title}:"
            for line in lines:
                if line == VERIFY:
                    continue
                grown = f"{text}{heading}\n- {line}"
                if counter.count(grown) > max_tokens:
                    break
                text, heading = grown, ""
        return text


def _decided(decision: Decision) -> str:
    why = f" (because {decision.rationale})" if decision.rationale else ""
    against = f" [not: {'; '.join(decision.alternatives)}]" if decision.alternatives else ""
    return f"{decision.text}{why}{against}"


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
        return tuple(Subtask(_text(v["text"]), Status(_text(v["status"]))) for v in map(_object, value))
    if name == "decisions":
        return tuple(_decision(_object(v)) for v in value)
    if name == "identifiers":
        return tuple(
            Identifier(_text(v["value"]), _text(v.get("label", "")), bool(v.get("shown", True)))
            for v in map(_object, value)
        )
    return tuple(_text(v) for v in value)


def _decision(value: Mapping[str, object]) -> Decision:
    against = value.get("alternatives", ())
    if not isinstance(against, Sequence) or isinstance(against, str):
        raise TypeError("alternatives is not a list")
    return Decision(_text(value["text"]), _text(value.get("rationale", "")), tuple(_text(v) for v in against))


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError("an entry is not an object")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("an entry is not text")
    return value
