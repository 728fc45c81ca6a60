"""The shapes of what the management API tells of conversations; the OpenAPI document is made of them."""

from typing import Annotated, Any, Generic, Literal, NotRequired, TypedDict, TypeVar

from msgspec import Meta

from policies.checkpoint import Checkpoint
from policies.pressure import BucketLine

Row = TypeVar("Row")

Tokens = Annotated[int, Meta(ge=0, description="tokens")]
Count = Annotated[int, Meta(ge=0)]
Moment = Annotated[float, Meta(ge=0, description="seconds since 1970, UTC")]
Share = Annotated[float, Meta(ge=0, description="a share; 1 is all of it")]
Dollars = Annotated[float, Meta(description="US dollars at list prices")]
Ref = Annotated[str, Meta(description="the key of an original in the archive", pattern=r"^[0-9a-f]+$")]
Digest = Annotated[str, Meta(description="hexadecimal", pattern=r"^[0-9a-f]*$")]
Zone = Literal["green", "yellow", "orange", "red", "critical"]
Did = Literal["none", "evaluate", "evict_and_compress", "emergency_compaction", "cross_window_save"]


class Page(TypedDict, Generic[Row]):
    """A page of a list; next is the cursor of the following one, null on the last."""

    data: list[Row]
    next: str | None


class Conversation(TypedDict):
    """A conversation and its last request."""

    id: str
    name: str
    tenant: Annotated[str, Meta(description="whose key it is of")]
    created: Moment
    updated: Moment
    model: str
    requests: Count
    branches: Count
    version: Annotated[int, Meta(ge=0, description="batches of edits")]
    tokens_before: Annotated[int, Meta(ge=0, description="tokens of the last request as the client sent it")]
    tokens_after: Annotated[int, Meta(ge=0, description="tokens of it as it was forwarded")]
    limit: Annotated[int, Meta(description="tokens that there is room for, W - R - H")]
    zone: Zone
    actions: str
    parent: str | None
    closed: Moment | None


class Pressure(TypedDict):
    """The reading of the last request."""

    current_tokens: Tokens
    max_tokens: Tokens | None
    utilization_pct: Annotated[float, Meta(ge=0)]
    zone: Zone
    velocity_tokens_per_turn: float | None
    turns_until_red: float | None
    source: Literal["model_reported", "client_estimated"] | None


class Budget(TypedDict):
    """Every bucket against its cap, and all of them against W - R - H."""

    buckets: list[BucketLine]
    total_used: Tokens
    total_utilization: Share
    burn_rate_tokens_per_turn: float | None
    turns_until_exhausted: float | None


class ConversationStatus(Conversation):
    """A conversation, the reading of its last request, and the status report."""

    pressure: Pressure | None
    buckets: dict[str, int]
    turns_until_red: float | None
    window_status: Literal["healthy", "preparing", "active", "emergency"]
    turn: Count
    windows_created: Annotated[int, Meta(ge=1)]
    utilization: Share
    budget_report: Budget | None
    audit_events: Annotated[int, Meta(ge=0, description="what was taken out of the window or shortened")]


class DecisionRecord(TypedDict):
    """The decision record of one request."""

    action: Did
    utilization_before: Share | None
    utilization_after: Share
    evicted_blocks: Count
    compression_strategy: Annotated[str | None, Meta(description="layers whose work was kept, joined by +")]
    recommendation: Literal["none", "watch", "prepare", "enforce", "enlarge"]
    new_window_id: int | None
    compaction_summary_tokens: Tokens | None


class LayerRun(TypedDict):
    """What one layer did to a request, in uncalibrated tokens."""

    layer: str
    scope: Annotated[str, Meta(description="the bucket that it was about, total for the whole request")]
    tokens_before: Tokens
    tokens_after: Tokens
    units: Count
    kept: Annotated[bool, Meta(description="whether its work is in the request")]
    rung: Annotated[bool, Meta(description="whether it is what helped after all layers had not")]
    reason: Annotated[str | None, Meta(description="why it did nothing, or less than asked")]
    ref: str | None


class Exchange(TypedDict):
    """One request: tokens, pressure, what was done and why."""

    id: str
    tenant: str
    conversation: str
    name: str
    branch: str
    parent: str | None
    at: Moment
    model: str
    policy: str
    chain_end: Digest
    length: Annotated[int, Meta(ge=0, description="messages behind the system prompt")]
    status: Annotated[int, Meta(ge=0, description="HTTP status of the answer, 0 for none")]
    outcome: str
    tokens_before: Tokens
    tokens_after: Tokens
    limit: int
    pressure: Share
    pressure_before: Share | None
    zone: Zone
    actions: str
    action: Did
    observed: bool
    evicted: Count
    strategy: str
    velocity: float | None
    turns_until_red: float | None
    usage_prompt: Tokens | None
    usage_completion: Tokens | None
    usage_cached: Tokens | None
    overhead_ms: Annotated[float, Meta(ge=0)]
    duration_ms: Annotated[float, Meta(ge=0)]
    attempts: Count
    parent_conversation: str | None
    hit_ratio: Share | None
    cold: bool
    prefix_changed: Literal["none", "client", "proxy"]
    cost: Dollars | None
    cost_saved: Dollars | None
    fidelity: dict[str, Any] | None
    decision: DecisionRecord
    layers: list[LayerRun]
    detail: Annotated[dict[str, Any], Meta(description="buckets, caps, events, tools and more; open to additions")]


class Version(TypedDict):
    """One version of the checkpoint in a list."""

    version: Count
    reason: str
    window_id: Annotated[int, Meta(ge=1)]
    at: Moment
    branch: str
    messages: Count
    size: Annotated[int, Meta(ge=0, description="bytes of the state")]
    covers: int | None


class Saved(TypedDict):
    """One version of the checkpoint; covers, ref and summary are null where it was only saved."""

    version: Count
    reason: str
    window_id: Annotated[int, Meta(ge=1)]
    at: Moment
    branch: str
    messages: Count
    covers: int | None
    ref: str | None
    summary: str | None
    coverage: Share | None
    state: Checkpoint


class SavedVersion(Saved):
    """A version of the checkpoint, and what it has that the one before it has not, or has no more."""

    changed: dict[str, Any]


class Removed(TypedDict):
    """One message that is out of the window; begins is not there for the operator."""

    ref: Ref
    how: str
    why: str
    since: Moment
    version: Count
    tool: str | None
    role: str | None
    tokens: Tokens
    kept: Tokens
    blob: Annotated[str, Meta(description="path of the original")]
    begins: NotRequired[str]
