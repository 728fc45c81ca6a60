"""A policy as frozen values: what to keep free, when to act, how far to shrink, in which order.

The defaults are the policy ``balanced``, chosen from simulated policies on recorded conversations;
shares are of *room* (the trigger less what can never be removed), because absolute shares thrash in
small windows. ``docs/policies.md`` says what each setting does; this module documents what that
page does not. A field's metadata says what a configuration may contain: ``ge``, ``gt``, ``le`` and
``lt`` are its bounds, ``alias`` is its key. ``name`` has no key: it is that of the whole.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Literal

from policies.health import AMOUNT, SHARE, HealthRules

PART: Mapping[str, float] = {"gt": 0, "le": 1}
POSITIVE: Mapping[str, float] = {"gt": 0}

CACHE_TTL = 300.0
"""Seconds after which a provider's cache has forgotten a conversation."""


class Mode(StrEnum):
    ENFORCE = "enforce"
    OBSERVE = "observe"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractShape:
    """Where a batch starts and ends in a window of ``window`` tokens (None: any, or far above the
    others).

    ``trigger`` is a share of U = W - R - H, the other shares are of room = trigger - fixed.
    ``evict`` scales ``must_reach`` of layers that clear results before a summary is
    made.
    """

    window: int | None
    trigger: float = field(metadata=SHARE)
    low_water: float = field(metadata=SHARE)
    extract: float = field(metadata=SHARE)
    tail: float = field(metadata=SHARE)
    evict: float = 1.0

    def toward(self, other: "ExtractShape", share: float) -> "ExtractShape":
        mixed = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("trigger", "low_water", "extract", "tail", "evict"):
            here = getattr(self, name)
            there = getattr(other, name)
            mixed[name] = type(here)(here + share * (there - here))
        return ExtractShape(**mixed)


BALANCED_SHAPES: tuple[ExtractShape, ...] = (
    ExtractShape(window=2_048, trigger=1.0, low_water=1.0, extract=1.0, tail=0.06, evict=0.0),
    ExtractShape(window=4_096, trigger=0.97, low_water=0.77, extract=0.67, tail=0.18, evict=0.0),
    ExtractShape(window=8_192, trigger=0.97, low_water=0.49, extract=0.43, tail=0.12, evict=0.0),
    ExtractShape(window=12_288, trigger=0.955, low_water=0.64, extract=0.25, tail=0.40, evict=0.0),
    ExtractShape(window=24_576, trigger=0.93, low_water=0.64, extract=0.22, tail=0.40, evict=0.0),
    ExtractShape(window=32_768, trigger=0.92, low_water=0.54, extract=0.20, tail=0.34, evict=0.0),
    ExtractShape(window=120_000, trigger=0.80, low_water=0.30, extract=0.22, tail=0.16),
    ExtractShape(window=None, trigger=0.80, low_water=0.30, extract=0.22, tail=0.16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zones:
    yellow_at: float = 0.50
    orange_at: float = 0.75
    red_at: float = 0.90
    critical_at: float = 0.95


Param = int | float | str | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One strategy with its trigger and target.

    ``scope`` is ``total`` or a bucket. ``at`` and ``stop_at`` are shares of the base, or of the
    bucket's cap: without ``at`` the window's shape decides, 0 is always; without ``stop_at`` work
    ends at low water, or at 80 % of ``at``. ``min_savings`` (tokens from 1 on, else a share of W or
    of the cap; None is 5 % for a layer with ``at`` while the request fits, else nothing) and
    ``must_reach`` (a share of the way from low water to the trigger) decide whether the layer's
    work is kept.
    """

    strategy: str = field(metadata={"alias": "layer"})
    at: float | None = field(default=None, metadata=SHARE)
    stop_at: float | None = field(default=None, metadata=SHARE)
    scope: str = "total"
    min_savings: int | float | None = field(default=None, metadata={"ge": 0})
    must_reach: float | None = field(default=None, metadata=SHARE)
    params: Mapping[str, Param] = field(default_factory=dict)


BALANCED_LAYERS: tuple[Layer, ...] = (
    Layer(strategy="ingest_cap"),
    Layer(strategy="dedupe"),
    Layer(strategy="evict", min_savings=0.10, must_reach=0.5),
    Layer(strategy="compact"),
)

OnOverflow = Literal["track", "warn", "reject", "summarize", "truncate", "prune-unused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """``cap`` is tokens from 1 on and a share of W below, None for no limit; the shares are of the
    cap.
    """

    cap: int | float | None = field(default=None, metadata={"gt": 0, "lt": math.inf})
    soft: float = field(default=0.80, metadata=PART)
    on_overflow: OnOverflow = "track"
    charge_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest:
    """The cap on a single tool result: the smallest of ``cap``, ``share`` of U, and the cap of
    ``tool_outputs``.

    ``from_start`` caps before the first trigger, too. ``drop_fields`` and ``include`` are keys of
    JSON by tool (``*``: any).
    """

    cap: int = field(default=25_000, metadata=POSITIVE)
    share: float = field(default=0.20, metadata=PART)
    method: Literal["middle_out", "head", "tail"] = "middle_out"
    from_start: bool = False
    tools: Mapping[str, int] = field(default_factory=dict)
    sub_agents: Mapping[str, int] = field(default_factory=dict)
    drop_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    include: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_particular(self) -> bool:
        return bool(self.tools or self.sub_agents or self.drop_fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries:
    """How a model writes summaries, and what it may cost.

    ``wait`` is the longest that a request waits for a model, 0 for never; ``seconds`` that for one
    answer after it. ``prepare_at`` is a share of the trigger.
    """

    role: Literal["user", "system_append", "system"] = "user"
    wait: float = 0.0
    seconds: float = 20.0
    prepare_at: float | None = 0.75
    prepare_messages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """When the state of a task is saved; with ``save_at`` None it never is."""

    save_at: float | None = field(default=0.85, metadata=SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteTaking:
    """``extract_from``: the steps of a conversation from which on the summarizer takes notes too;
    None for never.
    """

    extract_from: int | None = field(default=None, metadata=POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    tool: bool = False
    auto: bool = True
    auto_tokens: int = field(default=500, metadata={"ge": 0})

    @property
    def is_automatic(self) -> bool:
        """Whether what was removed is brought back automatically for a message that needs it."""
        return self.auto and self.auto_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    requests: int = field(default=20, metadata={"ge": 0, "le": 1_000})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEdits:
    """What a client wants removed from its own requests (Anthropic's ``context_management``);
    tokens.

    ``results_at`` is the size of a request and ``results_over`` the number of results above which
    old results go, at least ``at_least`` tokens of them. ``thinking`` counts the steps of earlier
    turns whose thinking stays, None for all. ``pauses``: the summary is the whole answer.
    ``native``: the upstream does it itself.
    """

    results_at: int | None = None
    results_over: int | None = None
    keep: int = 3
    at_least: int = 0
    exclude: frozenset[str] = frozenset()
    thinking: int | None = None
    compact_at: int | None = None
    pauses: bool = False
    native: bool = False


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """One policy, complete. Amounts are tokens from 1 on and a share of W below.

    ``base`` is the denominator of pressure: ``usable`` W - R - H, ``window`` W, ``max_input`` the
    input limit or W. ``designed_for`` is the window that amounts were chosen for; they are scaled
    to others. ``margin`` holds until the estimate is calibrated. ``cold_at`` (a share of the
    trigger) runs a batch early once the provider's cache is cold, ``CACHE_TTL`` seconds after the
    last request. ``summarizer`` may be ``same``; None asks no model. ``fallback`` is the model that
    answers what does not fit, None for a refusal.
    """

    name: str = field(default="balanced", metadata={"validation_alias": ""})
    mode: Mode = Mode.ENFORCE
    window: int | None = field(default=None, metadata=POSITIVE)
    window_per_output: int | None = field(default=None, metadata=POSITIVE)
    designed_for: int | None = field(default=None, metadata=POSITIVE)
    base: Literal["usable", "window", "max_input"] = "usable"
    reserve_mode: Literal["request", "fixed"] = "request"
    reserve: int | float = field(default=0, metadata=AMOUNT)
    reserve_floor: int = field(default=4_000, metadata={"ge": 0})
    headroom: int | float = field(default=0.05, metadata=AMOUNT)
    margin: float = field(default=0.05, metadata={"ge": 0, "lt": 1})
    zones: Zones = Zones()
    auto_scale: bool = False
    rot_soft_tokens: int | None = field(default=64_000, metadata=POSITIVE)
    preempt: bool = False
    cold_at: float | None = field(default=0.80, metadata=PART)
    enforce: Literal["global", "bucket", "reject"] = "global"
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    shapes: tuple[ExtractShape, ...] = BALANCED_SHAPES
    ingest: Ingest = Ingest()
    memory: tuple[str, ...] = ()
    estimator: str = "tokenizer"
    image_tokens: int | None = field(default=None, metadata=POSITIVE)
    placeholder: Literal["finding", "marker", "none"] = "finding"
    summarizer: str | None = None
    fallback: str | None = None
    embeddings: str | None = None
    summaries: Summaries = Summaries()
    checkpoints: Checkpoints = Checkpoints()
    notes: NoteTaking = NoteTaking()
    recall: Recall = Recall()
    health: HealthRules = field(default_factory=HealthRules)
    inspect: Inspect = Inspect()
    compaction: Literal["proxy", "provider", "off"] = "proxy"
    resume: Literal["header", "auto", "off"] = "header"
    server_state: Literal["follow", "refuse", "relay"] = "follow"
    cache_breakpoint: Literal["off", "5m", "1h"] = "off"
    layers: tuple[Layer, ...] = field(default=BALANCED_LAYERS, metadata={"alias": "cascade"})

    @cached_property
    def observes(self) -> bool:
        return self.mode is Mode.OBSERVE or self.compaction == "provider"

    @cached_property
    def manages(self) -> bool:
        """Whether what does not fit is made to fit, rather than refused."""
        return self.enforce != "reject"
