"""The shapes of what the management API tells of evictions, the audit, health and notes, and of what it does."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from policies.health import Category, HealthTrend, Level
from proxy.routes.shapes import Count, Digest, Moment, Ref, Share, Tokens

Status = Literal["ok", "critical", "warning", "info"]


class Eviction(TypedDict):
    """One thing that a batch took out or made shorter."""

    ref: Ref
    digest: Digest
    occurrence: Count
    kind: str
    layer: str
    policy: str
    scorer: str
    tool: str
    call_hash: Digest
    tokens_before: Tokens
    tokens_after: Tokens
    tokens_remaining: Tokens
    freed: int
    tenant: str
    conversation: str
    branch: str
    version: Count
    position: Count
    at: Moment
    asked_again_at: Moment | None
    asked_again_count: Count


class Audited(TypedDict):
    """One row of the audit with all that its hash covers."""

    tenant: str
    seq: Annotated[int, Meta(ge=1)]
    at: Moment
    type: str
    conversation: str
    branch: str
    request: str
    sealed: Count
    facts: Any
    prev: Digest
    hash: Digest


class ConversationAudit(TypedDict):
    """What batches took out of the window or made shorter, and the conversation's rows in the audit, newest first."""

    data: list[Eviction]
    events: list[Audited]
    next: str | None


Alert = TypedDict(
    "Alert",
    {
        "kind": str,
        "level": Level,
        "class": Category,
        "conversation": str,
        "at": Moment,
        "closed": Moment | None,
        "value": float,
        "threshold": float,
        "said": str,
    },
)


class Reading(TypedDict):
    """The six health metrics after one request; what was not measured is null."""

    at: Moment
    utilization: Share
    eviction_rate: Annotated[float, Meta(ge=0)]
    compression_ratio: float | None
    burn_rate: float | None
    fidelity_score: Share | None
    tool_result_bloat: Share
    window_id: Annotated[int, Meta(ge=1)]


class ConversationHealth(TypedDict):
    """How well one conversation is kept, and where that is heading."""

    conversation: str
    status: Status
    snapshot: Reading | None
    trend: HealthTrend
    alerts: list[Alert]
    history: list[Reading]


class Open(TypedDict):
    """How many alerts are open, by level."""

    critical: Count
    warning: Count
    info: Count


class OpenAlerts(TypedDict):
    """The open alerts, and the gravest level among them."""

    status: Status
    open: Open
    data: list[Alert]
    next: str | None


class KeptNote(TypedDict):
    """One note on a conversation."""

    id: Digest
    at: Moment
    category: str
    importance: Literal["critical", "high", "normal"]
    source: str
    text: str


class NewNote(TypedDict):
    """A note to take; another category is filed under misc."""

    text: Annotated[str, Meta(min_length=1, max_length=4_000)]
    category: NotRequired[str]
    importance: NotRequired[Literal["critical", "high", "normal"]]


class Found(TypedDict):
    """One original that a search found, the beginning of what it says."""

    ref: Ref
    role: str
    tokens: Tokens
    text: Annotated[str, Meta(max_length=2_000)]
    blob: str


class Pin(TypedDict):
    """Which removed message is to come back."""

    ref: Annotated[str, Meta(min_length=1, max_length=100)]


class Wanted(TypedDict):
    """What the next request was asked to do."""

    wanted: Literal["compact"]


class RolledBack(TypedDict):
    """The version that the conversation has now."""

    version: Count


class Pinned(TypedDict):
    """The message that comes back."""

    pinned: Ref


class Closed(TypedDict):
    """When the conversation was closed."""

    closed: Moment


class Deleted(TypedDict):
    """That it is gone."""

    deleted: Literal[True]
