"""Edits and cuts: what was changed in a conversation, and how it is applied again; and the entries of its state.

An :class:`Edit` changes one message and is found by that message's own digest and occurrence, so it
survives a client that rewrites something else. A :class:`Cut` replaces an exact prefix of the chain by a
summary and applies only where that prefix is there. Both are replayed identically on every later request:
that is what keeps the sent prefix stable and the provider's cache warm.
"""

from dataclasses import dataclass
from enum import StrEnum

DROPPING = frozenset({"drop_oldest", "sliding_window", "custom"})
"""Origins of cuts that stand for dropped messages rather than for their summary."""

WINDOWS = frozenset({"rollover", "resume"})
"""Origins of cuts that begin a new window: from this conversation's state, or from another one's."""


class EditKind(StrEnum):
    """Why a message's content was replaced, or a part of the request left out.

    ``reasoning`` keeps a message's content and leaves out its thinking; so does ``unbound_reasoning``, because the
    thinking is signed for what stood before it, and that was changed; ``prune_tools`` is about the definition of
    a tool, found by the digest of its name. ``recall`` keeps the message and puts ``text`` in front of it as a message
    of its own; ``pin`` changes nothing and has the message stay from now on. ``round`` puts back what the client has
    not seen of an answer: ``text`` is the JSON of its hidden calls and what they returned, ``tokens`` are theirs.
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
    ROUND = "round"


SHORTENED = frozenset({EditKind.INGEST_CAP, EditKind.TRUNCATE, EditKind.CLIP})
"""Edits that leave a part of what a message says, which may still go."""

ADDING = frozenset({EditKind.RECALL, EditKind.PIN, EditKind.ROUND})


def occurrence_of_round(occurrence: int) -> int:
    """The occurrence that the rounds of a message are kept under, so that it may have another edit beside them."""
    return -1 - occurrence


CONDENSED = frozenset({EditKind.SUMMARY, EditKind.PROGRESSIVE, EditKind.DELEGATE})
"""Edits that put a model's shorter wording, or a part of it, in place of what a message says."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One message's content replaced by ``text``; ``ref`` is the archive's key of the original.

    ``tokens`` are the uncalibrated tokens of the message as replaced. ``chain`` is the chain's hash at the
    message when the edit was made: only where it still holds may the edit replay onto protected content,
    because the same text may come back as the newest result. ``length`` is the number of messages after the head of
    the request that it was made for: a shorter one, begun anew from an earlier point, was sent without it.
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
    """The first ``covers`` messages after the head, replaced by one summary message.

    ``prefix`` is the chain's hash after those messages. ``before`` and ``after`` are positions (counted from
    the end of the head) of covered messages that stay verbatim in front of and behind the summary.
    ``text`` is the exact content of the summary message, empty for none, ``tokens`` its uncalibrated tokens,
    ``version`` the checkpoint's version, ``ref`` the archive's key of what was covered, ``origin`` how it was made.
    ``narrative`` is a model's note, on the first ``noted`` messages, which may be fewer; ``length`` is an edit's.
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

    @property
    def layer(self) -> str:
        """The layer that made it: ``compact``, or what dropped messages without a summary."""
        return self.origin if self.origin in DROPPING | WINDOWS else "compact"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model's summary that was written after an answer, for a batch to come.

    It covers the first ``covers`` messages after the head, of which ``prefix`` is the chain's hash. ``proposal`` is
    what the model said of the task's state, as JSON text. ``purpose`` names the prompt,
    ``calls`` are the questions that a model answered for it.
    """

    covers: int
    prefix: bytes
    text: str
    proposal: str = ""
    purpose: str = ""
    calls: int = 0


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One message of the planned array.

    ``index`` points at the client's message, None for what is Weir's own: a summary, or (of kind ``recall``) what was
    brought back. ``text`` replaces its content; None
    keeps the client's bytes. ``kind`` says which edit replaced it. ``rounds`` are the hidden ones of an answer, whose
    tokens are among its own.
    """

    index: int | None
    tokens: int
    text: str | None = None
    kind: EditKind | None = None
    rounds: Edit | None = None

    @property
    def own_tokens(self) -> int:
        return self.tokens - (0 if self.rounds is None else self.rounds.tokens)

    @property
    def is_summary(self) -> bool:
        return self.index is None and self.kind is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensed:
    """The figures of one message (or group) that was condensed, or that was to be.

    Attributes:
        strategy: the kind of the edit.
        original_tokens: uncalibrated tokens of the message as the client sent it; of a history that is summarised
            again, of the summary before and of the messages that are newly taken out.
        compressed_tokens: the same as it is sent now; the original's where nothing came of it.
        calls: questions that the summariser answered; 0 where code wrote the text.
        purpose: the prompt's name and version; ``extract`` where code wrote the text.
        ref: the archive's key of the original.
        key: address of what was asked: the original's digest in hex, with the level behind it where there are several.
        failure: code of why there is no shorter text; empty if there is one.
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


class Status(StrEnum):
    PLANNED = "planned"
    IN_PROGRESS = "in_progress"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Subtask:
    """One part of the task; ``told`` is whether only a model said so, which its next telling may change."""

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
    """A literal of the removed span with what it names; ``shown`` is whether the extract carries it."""

    value: str
    label: str = ""
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Note:
    """One note: its category, how much it matters, what it says, and where it was taken from.

    ``source`` is ``tool``, ``fence``, ``model`` or ``api``.
    """

    category: str
    importance: str
    text: str
    source: str = ""
