"""What was changed in a conversation and what was decided on its request, the entries of its state,
how it has grown.

An :class:`Edit` is found by its message's own digest and occurrence, so it survives a client that
rewrites something else; a :class:`Cut` replaces an exact prefix of the chain. Both are replayed
identically on every later request: that keeps the sent prefix stable and the provider's cache warm.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

MAX_TOKENS = 1_000_000_000
"""Counts are clamped to 0 up to this: far above any window, and small enough for exact arithmetic.
"""
_VERSION = 1
_ENCODER = json.JSONEncoder(separators=(",", ":"))

Facts = Mapping[str, str | int | float | bool]
TokenSource = Literal["model_reported", "client_estimated"]
VelocityClass = Literal["low", "medium", "high"]

DROPPING = frozenset({"drop_oldest", "sliding_window", "custom"})
"""Origins of cuts that mark dropped messages rather than summarise them."""

WINDOWS = frozenset({"rollover", "resume"})
"""Origins of cuts that begin a new window: from this conversation's state, or from another one's.
"""


class EditKind(StrEnum):
    """Why a message's content was replaced, or a part of the request left out.

    ``reasoning`` leaves out only thinking, ``unbound_reasoning`` thinking whose signature covers
    preceding content that has changed. ``prune_tools`` is found by the digest of a tool's name.
    ``recall`` puts ``text`` before the message, ``pin`` keeps it.
    """

    INGEST_CAP = "ingest_cap"
    DEDUPE = "dedupe"
    EVICT = "evict"
    PRUNE = "prune"
    MERGE = "semantic_merge"
    TRUNCATE = "truncate"
    CLIP = "clip"
    MEDIA = "media"
    REASONING = "reasoning"
    UNBOUND = "unbound_reasoning"
    CUSTOM = "custom"
    PRUNE_TOOLS = "prune_tools"
    SUMMARY = "summarize_tool_result"
    PROGRESSIVE = "progressive"
    DELEGATE = "delegate"
    RECALL = "recall"
    PIN = "pin"


SHORTENED = frozenset({EditKind.INGEST_CAP, EditKind.TRUNCATE, EditKind.CLIP})

ADDING = frozenset({EditKind.RECALL, EditKind.PIN})


CONDENSED = frozenset({EditKind.SUMMARY, EditKind.PROGRESSIVE, EditKind.DELEGATE})
"""Edits that put a model's shorter wording, or a part of it, in place of what a message says."""


@dataclass(frozen=True, slots=True)
class Edit:
    """``text`` in place of a message's content; ``ref`` is the archive's key of the original.

    ``tokens`` are uncalibrated, of the message as replaced. Only where ``chain``, the hash at the
    message when the edit was made, still holds may it replay onto protected content: the same text
    may come back as the newest result. ``length`` is the number of messages after the head at that
    time: a shorter request, begun anew, was sent without it.
    """

    digest: bytes
    occurrence: int
    kind: EditKind
    text: str
    ref: str
    tokens: int
    chain: bytes = b""
    length: int = 0

    @property
    def key(self) -> tuple[bytes, int]:
        return (self.digest, self.occurrence)


@dataclass(frozen=True, slots=True)
class Cut:
    """The first ``covers`` messages of the history, of which ``prefix`` is the hash, replaced by
    one summary.

    ``before`` and ``after`` are places in the history of covered messages that stay verbatim around
    it. ``text`` may be empty for no message; ``tokens`` are its uncalibrated ones, ``version`` the
    checkpoint's, ``ref`` the archive's key of what was covered. ``narrative`` is a model's note on
    the first ``noted`` messages.
    """

    covers: int
    prefix: bytes
    text: str
    tokens: int
    version: int
    ref: str
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    origin: str = "extract"
    narrative: str = ""
    noted: int = 0
    length: int = 0

    def hidden(self, lasting: Sequence[int]) -> tuple[int, ...]:
        """The indices of what it covers and does not leave verbatim, of a history whose indices are
        ``lasting``.
        """
        stays = {*self.before, *self.after}
        return tuple(lasting[p] for p in range(self.covers) if p not in stays)

    @property
    def layer(self) -> str:
        return self.origin if self.origin in DROPPING | WINDOWS else "compact"


@dataclass(frozen=True, slots=True)
class Prepared:
    covers: int
    prefix: bytes
    text: str
    purpose: str = ""
    calls: int = 0


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """``index`` points at the client's message, None for a summary or (kind ``recall``) what was
    brought back.

    Without ``text`` the client's bytes stay.
    """

    index: int | None
    tokens: int
    text: str | None = None
    kind: EditKind | None = None

    @property
    def is_summary(self) -> bool:
        return self.index is None and self.kind is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensed:
    """What became of one message (or group) that was to be condensed.

    Tokens are uncalibrated; of a history that is summarised again the original is the summary
    before with the messages that are newly taken out. ``calls`` and ``purpose`` are 0 and
    ``extract`` where code wrote the text. ``key`` is the original's digest in hex, followed by the
    level where there are several. ``failure`` is the code of why there is no shorter text.
    """

    strategy: str
    original_tokens: int
    compressed_tokens: int
    calls: int = 0
    purpose: str = ""
    ref: str = ""
    key: str = ""
    failure: str = ""

    @property
    def ratio(self) -> float:
        return self.original_tokens / self.compressed_tokens if self.compressed_tokens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """What one layer did, in uncalibrated tokens.

    ``scope`` is the bucket that it was about; ``reason`` says why it did nothing, or less than its
    target, although it was due; a ``rung`` is what helped where the layers did not. ``condensed``
    has also what was not kept. ``scanned`` are the tokens of all tool results that it looked at,
    ``prunable`` those that it could take.
    """

    layer: str
    before: int
    after: int
    units: int
    kept: bool
    ref: str | None = None
    scope: str = "total"
    reason: str = ""
    rung: bool = False
    condensed: tuple[Condensed, ...] = ()
    scanned: int | None = None
    prunable: int | None = None


def needed_rung(trail: Sequence[LayerReport]) -> bool:
    """Whether the layers were not enough, which makes an emergency."""
    return any(report.rung and report.kept for report in trail)


class Status(StrEnum):
    """How far a subtask is; ``planned`` means that nothing of it has been done."""

    PLANNED = "planned"
    IN_PROGRESS = "in_progress"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Subtask:
    text: str
    status: Status = Status.PLANNED
    told: bool = False


@dataclass(frozen=True, slots=True)
class TaskDecision:
    text: str
    rationale: str = ""
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f" (because {self.rationale})" if self.rationale else ""
        against = f" [not: {'; '.join(self.alternatives)}]" if self.alternatives else ""
        return f"{self.text}{why}{against}"


@dataclass(frozen=True, slots=True)
class Identifier:
    """A literal of the removed span with what it names; ``shown`` is whether the extract carries
    it.
    """

    value: str
    label: str = ""
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Note:
    category: str
    importance: str
    text: str
    source: str = ""


class Ledger(NamedTuple):
    """What was decided for one believed window of a history: edits by key, cuts oldest first."""

    edits: Mapping[tuple[bytes, int], Edit] = {}
    cuts: tuple[Cut, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.edits and not self.cuts

    def with_batch(self, edits: Sequence[Edit], cut: Cut | None) -> "Ledger":
        """The same with what a batch decided."""
        return Ledger(
            dict(self.edits) | {e.key: e for e in edits},
            self.cuts if cut is None else (*self.cuts, cut),
        )


NOTHING = Ledger()
EVERY_WINDOW = 0
"""Used in place of a window for what holds in all of them, such as a pinned message."""


def begun(views: Mapping[int, Ledger], window: int) -> Ledger:
    """The initial state of a window without decisions: what was decided for the next larger one."""
    larger = [each for each in views if each > window]
    return views.get(min(larger, default=EVERY_WINDOW), NOTHING)


REWRITTEN = 4  # clients rewrite, drop or ask again for their last few messages


@dataclass(frozen=True)
class ConversationState:
    """What earlier requests of the conversation left: edits by key, cuts oldest first.

    ``length`` counts messages after the head that were sent already. ``prepared`` waits for the
    next batch, ``checkpoint`` is the newest state that was saved (at ``checkpoint_length``
    messages), ``resumed`` that of another conversation which this one goes on from; ``wanted`` is
    what an operator requested for the next request, ``version`` the branch's.
    """

    edits: Mapping[tuple[bytes, int], Edit] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()
    length: int = 0
    prepared: Prepared | None = None
    checkpoint: str | None = None
    checkpoint_length: int = 0
    resumed: str | None = None
    wanted: str | None = None
    version: int = 0
    notes: tuple[Note, ...] = ()

    def at(self, length: int) -> "ConversationState":
        """For a client that restarts from an early point: what was sent then, not what was removed
        later.
        """
        return self.before(length + REWRITTEN)

    def before(self, length: int) -> "ConversationState":
        """The same without what was decided on requests of more than so many messages."""
        too_new = self.checkpoint is not None and self.checkpoint_length > length
        if self.newest <= length and not too_new:
            return self
        return replace(
            self,
            edits={key: e for key, e in self.edits.items() if e.length <= length},
            cuts=tuple(cut for cut in self.cuts if cut.length <= length),
            checkpoint=None if too_new else self.checkpoint,
        )

    @cached_property
    def newest(self) -> int:
        """The largest number of messages of a request with any decision."""
        return max(
            (*(edit.length for edit in self.edits.values()), *(cut.length for cut in self.cuts)),
            default=0,
        )

    @cached_property
    def triggered(self) -> bool:
        return bool(self.edits or self.cuts)

    @property
    def has_removed(self) -> bool:
        return bool(self.cuts) or any(edit.kind not in ADDING for edit in self.edits.values())

    @property
    def pins(self) -> frozenset[bytes]:
        return frozenset(e.digest for e in self.edits.values() if e.kind is EditKind.PIN)

    @property
    def next_version(self) -> int:
        return max(self.version, self.cuts[-1].version if self.cuts else 0) + 1


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Burn:
    bucket: str
    tokens: int
    deltas: tuple[int, ...] = ()

    @property
    def rate(self) -> float | None:
        return _mean(self.deltas)


class Trend(NamedTuple):
    """One conversation after its last request; without arguments, one before its first.

    ``raw`` and ``length`` are tokens and messages as the client sent them, ``deltas`` the newest
    growths, oldest first, ``at`` seconds of the caller's clock, ``burn`` tokens and growths by
    bucket, ``end`` the hash in hex of all but its newest few messages, ``window`` the tokens that
    were believed to fit.
    """

    raw: int | None = None
    length: int = 0
    deltas: tuple[int, ...] = ()
    baseline: float | None = None
    zone: str = "green"
    at: float | None = None
    burn: tuple[Burn, ...] = ()
    spike: bool = False
    end: str = ""
    window: int = 0

    @property
    def velocity(self) -> float | None:
        return _mean(self.deltas)

    @property
    def is_of_another(self) -> bool:
        return self.raw is None and self.at is not None

    def to_json(self) -> str:
        burns = {burn.bucket: [burn.tokens, *burn.deltas] for burn in self.burn}
        said = {
            name: value
            for name, value in self._asdict().items()
            if value or name not in ("end", "window")
        }
        return _ENCODER.encode({"v": _VERSION, **said, "burn": burns})

    @classmethod
    def from_json(cls, text: str | None) -> "Trend":
        try:
            state = json.loads(text or "")
            if state["v"] != _VERSION:
                return cls()
            raw = state["raw"]
            length = state["length"]
            _counts((length,) if raw is None else (raw, length))
            burns = ((name, _counts(values)) for name, values in state["burn"].items())
            return cls(
                raw=raw,
                length=length,
                deltas=_counts(state["deltas"]),
                baseline=_finite(state["baseline"]),
                zone=_text(state["zone"]),
                at=_finite(state["at"]),
                burn=tuple(Burn(name, counts[0], counts[1:]) for name, counts in burns),
                spike=state["spike"] is True,
                end=bytes.fromhex(state.get("end", "")).hex(),
                window=_counts((state.get("window", 0),))[0],
            )
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            OverflowError,
            RecursionError,
        ):
            return cls()


UNKNOWN = Trend()


class WindowPressure(NamedTuple):
    level: float
    zone: str
    status: str

    def __str__(self) -> str:
        """The value of the header ``x-weir-pressure``: ``0.88;orange;active``."""
        return f"{self.level:.2f};{self.zone};{self.status}"


class TokenUsage(NamedTuple):
    """Calibrated tokens of one request: as it came, as it goes up, and W - R - H."""

    before: int
    after: int
    limit: int
    pressure: WindowPressure


class PressureReading(NamedTuple):
    """What one request's pressure says: tokens of the forwarded request over the policy's base.

    ``zone`` is lifted by the rot guard. ``velocity_tokens_per_turn`` is None on the first request,
    ``turns_until_red`` None where nothing grows; both have one decimal. ``source`` says whose count
    ``current_tokens`` is.
    """

    current_tokens: int
    max_tokens: int
    utilization_pct: float
    zone: str
    velocity_tokens_per_turn: float | None
    turns_until_red: float | None
    source: TokenSource
    last_delta: int | None
    velocity_class: VelocityClass | None
    spike: bool
    rot_guard: bool


class Action(StrEnum):
    PASS = "pass"  # noqa: S105 - a word, not a password
    REPLAY = "replay"
    EDIT = "edit"


class Decision(NamedTuple):
    """What the planner answered, and how it got there.

    Without ``pieces`` the client's bytes go up unchanged. ``before``, ``due``, ``after`` and
    ``limit`` are calibrated tokens: as it came, as it would go up had no layer done anything new,
    as it goes up, W - R - H. ``edits`` and ``cut`` are new and have to be stored before the request
    is forwarded; of ``removed`` the archive needs the originals. ``applied`` counts edits by kind,
    ``pruned`` names tools that are left out, ``window_id`` numbers a window that begins here.
    """

    action: Action
    pieces: tuple[PlannedMessage, ...] | None
    before: int
    due: int
    after: int
    limit: int
    raw_after: int
    pressure: WindowPressure
    buckets: dict[str, int]
    applied: dict[str, int]
    edits: tuple[Edit, ...] = ()
    cut: Cut | None = None
    removed: tuple[int, ...] = ()
    covered: tuple[int, ...] = ()
    checkpoint: str | None = None
    trail: tuple[LayerReport, ...] = ()
    pruned: tuple[str, ...] = ()
    window_id: int | None = None
    reading: PressureReading | None = None
    trend: Trend = UNKNOWN
    events: tuple[Event, ...] = ()

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(self.before, self.after, self.limit, self.pressure)

    @property
    def is_new(self) -> bool:
        return bool(self.edits) or self.cut is not None

    @property
    def strategy(self) -> str:
        """The layers whose work was kept."""
        return "+".join(dict.fromkeys(report.layer for report in self.trail if report.kept))

    @property
    def needed_rung(self) -> bool:
        """Whether it is an emergency."""
        return needed_rung(self.trail)

    @property
    def stage(self) -> str:
        """How far the management of a request had to go, as one word (requirement A0.148).

        ``none`` while there is room, ``evaluate`` from yellow on and at a spike,
        ``evict_and_compress`` for a new batch, ``emergency_compaction`` if that needed a rung,
        ``cross_window_save`` if the conversation went on in a new window.
        """
        if any(report.layer == "rollover" and report.kept for report in self.trail):
            return "cross_window_save"
        if self.is_new:
            return "emergency_compaction" if self.needed_rung else "evict_and_compress"
        spiked = self.reading is not None and self.reading.spike
        return "none" if self.pressure.zone == "green" and not spiked else "evaluate"


def _mean(deltas: Sequence[int]) -> float | None:
    return sum(deltas) / len(deltas) if deltas else None


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > MAX_TOKENS):
        raise ValueError("not counts of tokens")
    return tuple(values)


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
