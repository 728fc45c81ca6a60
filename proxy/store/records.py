"""The rows as values: what the store takes and gives. Times are seconds since the epoch (UTC)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.ledger import Cut, Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A conversation's thread: what Weir knows about one line of history.

    ``conversation`` is the internal id, ``name`` the label people use (given by the client or generated).
    ``version`` is the head that a commit compares and sets. ``cuts`` are oldest first; ``length`` is the
    number of chain messages that was matched when the branch was found.
    """

    tenant: str
    conversation: str
    name: str
    branch: str
    version: int
    edits: tuple[Edit, ...] = ()
    cuts: tuple[Cut, ...] = ()
    length: int = 0
    longest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """One message that was removed or shortened, as the client sent it (``body``: raw JSON bytes)."""

    ref: str
    role: str
    tokens: int
    body: bytes
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A batch of edits: all of it is stored, or nothing.

    ``expected`` is the version that the plan was made on; ``covered`` are the refs that the new cut covers,
    in order; ``checkpoint`` is the structured state as JSON text. ``chain_end`` is the hash after all ``length``
    messages of the request, by which the next one will find what is stored here.
    """

    tenant: str
    conversation: str
    name: str
    branch: str
    expected: int
    at: float
    edits: tuple[Edit, ...] = ()
    cut: Cut | None = None
    originals: tuple[Original, ...] = ()
    covered: tuple[str, ...] = ()
    checkpoint: str | None = None
    chain_end: bytes = b""
    length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRow:
    """One request through Weir, written after its answer."""

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
    overhead_ms: float = 0.0
    duration_ms: float = 0.0
    attempts: int = 1
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A conversation as people list it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One version of a conversation's checkpoint."""

    branch: str
    version: int
    at: float
    cut: Cut
    covered: tuple[str, ...]
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """An API key without its secret: ``digest`` is the HMAC-SHA-256 of it, hex."""

    name: str
    digest: str
    policy: str | None
    models: tuple[str, ...]
    allow: tuple[str, ...]
    created: float
    revoked: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRow:
    """A window learned from an upstream's own words, per origin, model and credential."""

    scope: str
    limit: int
    seen: int
    expires: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow:
    """Reported over estimated tokens, per origin, model and credential."""

    scope: str
    ratio: float
    samples: int
