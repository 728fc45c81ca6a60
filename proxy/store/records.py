"""The rows as values: what the store takes and gives, and what can go wrong. Times: seconds since
the epoch, UTC.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import msgspec

from policies.health import Category, Checkup, Level
from policies.ledger import (
    EVERY_WINDOW,
    ConversationState,
    Cut,
    Edit,
    Event,
    Ledger,
    Note,
    PlannedMessage,
    Prepared,
    Trend,
)
from policies.messages import Message
from proxy.store.chain import AuditEvent

NOTE_SIZE = 16
DAY = 86_400.0


class StoreError(Exception):
    """Base of everything that the store raises on purpose.

    No message carries SQL, parameters or content. ``reason`` is a short code, fit for a metric's
    label.
    """

    def __init__(self, message: str, *, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


class StoreUnavailable(StoreError):
    """Locked, full, read-only, unreadable, gone: try again or go on without."""


class StaleVersion(StoreError):
    """The branch has moved on to version ``current`` since the plan was made; nothing was
    stored.
    """

    def __init__(self, current: int) -> None:
        super().__init__(f"the branch is at version {current}", reason="stale")
        self.current = current


class NoSuchVersion(StoreError):
    """A branch was never at that version, or was taken back from it."""


class NameTaken(StoreError): ...


class SchemaTooNew(StoreError): ...


class CorruptStore(StoreError): ...


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation's thread: what Weir knows about one line of history.

    ``conversation`` is the internal id, ``name`` the label people use (given by the client or
    generated). ``version`` is the head that a commit compares and sets. ``known`` is what holds in
    every window, its checkpoints as JSON text, ``views`` what was decided by window; ``floating``
    are digests of messages that its client moves from request to request; ``length`` is the number
    of chain messages that was matched when the branch was found. ``trend`` is how it has grown,
    None where nothing is known of that. ``health`` is the conversation's state of health as JSON.
    """

    tenant: str
    conversation: str
    name: str
    branch: str
    version: int
    known: ConversationState = msgspec.field(default_factory=ConversationState)
    views: Mapping[int, Ledger] = msgspec.field(default_factory=dict)
    floating: tuple[bytes, ...] = ()
    length: int = 0
    longest: int = 0
    trend: Trend | None = None
    health: str | None = None

    def change(self, at: float) -> "Change":
        """One that changes nothing yet."""
        return Change(
            tenant=self.tenant,
            conversation=self.conversation,
            name=self.name,
            branch=self.branch,
            expected=self.version,
            at=at,
        )


class EvictionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One message, tool definition or rest of a history that a batch took out of the window or made
    shorter.

    Attributes:
        digest: of the message; of the covered prefix for what a summary covers.
        kind: of the edit, ``layer`` what made it, ``scorer`` by what rule (empty for the layer's
            own).
        tool: whose result it was; empty for what answers no call.
        tokens_before: uncalibrated tokens of it before the batch, ``tokens_after`` of what is there
            now.
        tokens_remaining: uncalibrated tokens of the whole request once the batch was carried out.
        position: the place in its batch, from 0.
    """

    digest: bytes
    occurrence: int
    kind: str
    layer: str
    policy: str
    tokens_before: int
    tokens_after: int
    tokens_remaining: int
    scorer: str = ""
    tool: str = ""
    tenant: str = ""
    conversation: str = ""
    branch: str = ""
    version: int = 0
    position: int = 0
    at: float = 0.0

    @property
    def freed(self) -> int:
        return self.tokens_before - self.tokens_after


class Original(msgspec.Struct, frozen=True, kw_only=True):
    ref: str
    role: str
    tokens: int
    body: bytes
    text: str


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of edits for one ``window``: all of it is stored, or nothing.

    ``expected`` is the version that the plan was made on; ``covered`` are the refs that the new cut
    covers, in order; ``checkpoint`` is the structured state as JSON text, saved for a ``reason``
    (``compaction``, ``rollover``, ``batch``, ``resume``, ``safety``, ``critical``, ``milestone``,
    ``before_model``, ``rollback``, ``closed``) in the window ``window_id``; the newest ``keep``
    versions stay. ``resumed`` is the checkpoint of another conversation that the branch goes on
    from, stored with it. ``prepared`` is the summary that the plan knew of, and that waits no
    longer once there is a cut. ``chain_end`` is the hash after all ``length`` messages of the
    request, by which the next one will find what is stored here. ``request`` is the id of that
    request, ``figures`` what the audit is to say of the decision, ``condensed`` what of each text
    that was to become shorter, and ``audited`` what it is to say as well.
    """

    tenant: str
    conversation: str
    name: str
    branch: str
    expected: int
    at: float
    window: int = EVERY_WINDOW
    edits: tuple[Edit, ...] = ()
    cut: Cut | None = None
    originals: tuple[Original, ...] = ()
    covered: tuple[str, ...] = ()
    checkpoint: str | None = None
    reason: str = "compaction"
    window_id: int = 1
    resumed: str | None = None
    prepared: Prepared | None = None
    chain_end: bytes = b""
    length: int = 0
    evictions: tuple[EvictionRow, ...] = ()
    request: str = ""
    figures: Mapping[str, object] = msgspec.field(default_factory=dict)
    condensed: Sequence[Mapping[str, Any]] = ()
    audited: tuple[AuditEvent, ...] = ()


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    conversation: str
    name: str
    branch: str
    parent: str | None
    at: float
    model: str
    ends: tuple[tuple[bytes, int], ...]
    length: int
    trend: Trend | None
    floating: tuple[bytes, ...] = ()


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The two arrays of a request, as it went: what the client sent, and what the model saw.

    Attributes:
        keep: how many of the conversation's requests are kept.
        messages: the client's, ``pieces`` the forwarded array, None where it was the same.
        raws: JSON of the messages from ``first`` on, and of the system's: what nobody was given
            before.
        pruned: names of tools whose definitions were left out, ``tools`` the tokens of all
            definitions.
    """

    keep: int
    messages: Sequence[Message]
    pieces: Sequence[PlannedMessage] | None
    raws: Sequence[bytes]
    first: int
    pruned: tuple[str, ...] = ()
    tools: int = 0


NOT_READ_BACK = frozenset(
    {
        *("trend", "health", "events", "refusal", "floating", "inspection"),
        *("key", "team", "reserved"),
    }
)
"""Fields of an exchange that are no columns of it: they go to its branch, the audit, the usage
tables and others.
"""


class ExchangeRow(msgspec.Struct, kw_only=True):
    """One request through Weir, written after its answer.

    Attributes:
        tokens_after: of the forwarded request; where it was only ``observed``, of the one that
            would have been.
        pressure: forwarded tokens over the policy's base, ``pressure_before`` those of the client's
            array.
        action: the stage of management in a word: none, evaluate, evict_and_compress,
            emergency_compaction or cross_window_save.
        usage_estimated: the upstream reported no usage, and the tokens are Weir's own counts.
        actions: what was done by kind, as ``x-weir-actions`` says it.
        evicted: messages that this request's batch evicted or shortened, ``strategy`` what rewrote
            its history.
        velocity: tokens by which the conversation grows with each request, ``turns_until_red``
            requests until red.
        trend: the conversation's growth after this request; written to its branch, not read back
            with the row.
        parent_conversation: name of the conversation that this one is a part of, as the client says
            it.
        detail: buckets, events, tool results by tool.
        health: what it made of the conversation's health; written with it, not read back with the
            row.
        events: what the planner had to say of it, ``refusal`` the figures of why it was refused;
            both are for the audit and not read back with the row.
        floating: digests of the messages that its client moves; written to its branch.
        inspection: its two arrays, kept for who looks at it.
        key: whose budget it counts in (see ``key_days``), empty for none; ``team`` that key's.
        reserved: whether something of a budget is reserved for it.
    """

    id: str
    tenant: str
    conversation: str
    name: str
    branch: str
    parent: str | None
    at: float
    model: str
    policy: str
    chain_end: bytes
    length: int
    status: int
    outcome: str
    tokens_before: int
    tokens_after: int
    limit: int
    pressure: float
    zone: str
    actions: str
    usage_prompt: int | None = None
    usage_completion: int | None = None
    usage_cached: int | None = None
    usage_estimated: bool = False
    overhead_ms: float = 0.0
    duration_ms: float = 0.0
    attempts: int = 1
    action: str = "none"
    observed: bool = False
    evicted: int = 0
    strategy: str = ""
    pressure_before: float | None = None
    velocity: float | None = None
    turns_until_red: float | None = None
    trend: Trend | None = None
    parent_conversation: str | None = None
    detail: Mapping[str, object] = msgspec.field(default_factory=dict)
    health: Checkup | None = None
    events: tuple[Event, ...] = ()
    refusal: Mapping[str, object] = msgspec.field(default_factory=dict)
    floating: tuple[bytes, ...] = ()
    inspection: Inspection | None = None
    key: str = ""
    team: str = ""
    reserved: bool = False


class RelayedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was relayed and belongs to no conversation, with the tokens that its answer
    reports.

    ``policy`` is ``none`` on a route that is not managed; ``cost`` is in US dollars, None without a
    price.
    """

    id: str
    tenant: str
    at: float
    model: str
    policy: str
    status: int
    outcome: str
    usage_prompt: int | None = None
    usage_completion: int | None = None
    usage_cached: int | None = None
    cost: float | None = None
    key: str = ""
    team: str = ""
    reserved: bool = False


class AnswerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, and what came to the history since the one before.

    Attributes:
        id: the provider's; ``parent`` that of the answer that its request went on from, None where
            it had all.
        conversation: empty where the request was not recognised.
        tokens: of all up to the end of the answer, as the provider counts; ``reasoned`` those of
            its own reasoning.
        length: messages of the history up to its request's end.
        given: the elements that the request added, ``output`` those of the answer, with commas
            between.
        opening: the request's fields that hold for all that goes on from it, as an object.
        items: ids by which later requests may name elements of ``output``.
    """

    tenant: str
    id: str
    parent: str | None
    conversation: str
    at: float
    tokens: int = 0
    reasoned: int = 0
    length: int = 0
    given: bytes
    output: bytes
    opening: bytes = b"{}"
    items: tuple[str, ...] = ()


class ProviderIdsRow(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of a provider's that an answer gave to a tenant, each as its BLAKE2b digest of 16
    bytes.
    """

    tenant: str
    digests: tuple[bytes, ...]
    at: float


Row = ExchangeRow | RelayedRow | AnswerRow | ProviderIdsRow | Arrival
"""What is recorded after an answer."""


class UsageRow(msgspec.Struct, frozen=True):
    """What the requests of one key took, of one ``group`` (a model, policy, day or conversation),
    None for all.

    Attributes:
        requests: all of them, ``failed`` those that had no good answer.
        tokens_before: of the answered ones as they came, ``tokens_after`` as they were forwarded.
        prompt: tokens that upstreams reported, ``cached`` of them read from a cache, ``completion``
            those of answers; of ``estimated`` requests, whose answers report none, Weir's own
            counts.
        cost: US dollars at list prices of the ``priced`` requests, ``cost_saved`` what the clients'
            own arrays would have cost beyond that.
        summarizer_tokens: of summaries' prompts and answers, ``summarizer_cost`` their US dollars.
    """

    tenant: str
    group: str | None
    requests: int
    failed: int
    tokens_before: int
    tokens_after: int
    prompt: int
    cached: int
    completion: int
    priced: int
    estimated: int
    cost: float
    cost_saved: float
    summarizer_tokens: int
    summarizer_cost: float
    first: float
    last: float


class AlertRow(msgspec.Struct, frozen=True, kw_only=True):
    """One alert of a conversation: an episode that began ``at``, and has ended where ``closed``
    says when.

    ``conversation`` is the label people use, ``value`` what it began with, ``limit`` what that is
    beyond.
    """

    tenant: str
    conversation: str
    kind: str
    level: Level
    category: Category
    at: float
    value: float
    limit: float
    said: str
    closed: float | None = None


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    tenant: str
    created: float
    updated: float
    model: str
    requests: int
    branches: int
    version: int
    tokens_before: int
    tokens_after: int
    limit: int
    zone: str
    actions: str
    parent: str | None = None
    closed: float | None = None


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    branch: str
    version: int
    at: float
    body: str
    reason: str = "compaction"
    window_id: int = 1
    length: int = 0
    cut: Cut | None = None
    covered: tuple[str, ...] = ()


class NoteRow(msgspec.Struct, frozen=True, kw_only=True):
    """One note on a conversation; ``id`` is a digest of what it says, so that the same note is
    stored once.

    ``source`` is ``tool``, ``fence``, ``model`` or ``api``.
    """

    id: bytes
    at: float
    category: str
    importance: str
    source: str
    text: str

    @classmethod
    def of(cls, note: Note, *, at: float) -> "NoteRow":
        same = f"{note.category}\0{note.text}".encode("utf-8", "surrogatepass")
        return cls(
            id=blake2b(same, digest_size=NOTE_SIZE).digest(),
            at=at,
            category=note.category,
            importance=note.importance,
            source=note.source,
            text=note.text,
        )

    @property
    def note(self) -> Note:
        return Note(self.category, self.importance, self.text, self.source)


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    key: bytes
    at: float
    purpose: str
    model: str
    tokens_in: int
    tokens_out: int
    text: str


class RemovedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One message that is out of the window of a conversation, wholly or in part.

    ``how`` is the kind of edit, or the layer of the cut, that took it; ``tool`` whose result it
    was, empty for none. ``tokens`` are the original's, ``kept`` those of what is there now.
    ``text`` is how it begins, empty where the archive keeps digests only.
    """

    ref: str
    how: str
    version: int
    at: float
    tool: str = ""
    role: str = ""
    tokens: int = 0
    kept: int = 0
    text: str = ""


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """An API key without its secret: ``digest`` is the HMAC-SHA-256 of it, hex.

    From ``revoked`` or ``expires`` on it no longer holds. ``tenant`` is whose conversations it
    opens, None for those that its digest names: a key that took another's place has the
    other's. ``budgets`` are texts as :func:`proxy.config.budgets.budget_in` reads them.
    """

    name: str
    digest: str
    policy: str | None
    models: tuple[str, ...]
    allow: tuple[str, ...]
    created: float
    revoked: float | None = None
    tenant: str | None = None
    concurrency: int | None = None
    requests_per_minute: int | None = None
    expires: float | None = None
    tokens_per_minute: int | None = None
    team: str | None = None
    budgets: tuple[str, ...] | None = None


class Refusal(IntEnum):
    """What of a key's limits is reached."""

    NONE = 0
    RATE = 1
    CONCURRENCY = 2


class KeyUse(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of all processes together on one more request of a key; after ``seconds`` its
    rate has room again.
    """

    refused: Refusal
    seconds: int


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    document: str
    at: float


class LimitRow(msgspec.Struct, frozen=True, kw_only=True):
    """The most of a ``kind`` that an upstream takes of a model's requests, as learned from its
    refusals.

    The limit is in what the kind is about (tokens, images, bytes …), 0 for a fact without a number.
    """

    scope: str
    kind: str = "tokens"
    limit: int
    seen: int
    expires: float


class CalibrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Reported over estimated tokens, per origin, model and credential, with what the newest
    samples said.
    """

    scope: str
    ratio: float
    samples: int
    recent: tuple[float, ...] = ()
    drift: float = 0.0
