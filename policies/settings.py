"""A policy as frozen values: what to keep free, when to act, how far to shrink, in which order.

The defaults are the policy ``balanced``. Its numbers were chosen from simulated policies on recorded
conversations; shares are of *room*, which is the trigger less what can never be removed, because absolute
shares thrash in small windows.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendRules:
    """What a policy says about growth.

    Attributes:
        window: newest growths in the velocity's mean.
        spike_multiplier: a growth above so many times the baseline is a spike.
        ema_alpha: weight of the newest growth in the baseline.
        burn_window: newest growths by bucket in the mean of its burn rate.
        urgent_turns: requests left under a bucket's cap below which it is critical, and ``warning_turns`` below
            which it warns.
    """

    window: int = 5
    spike_multiplier: float = 3.0
    ema_alpha: float = 0.3
    burn_window: int = 20
    urgent_turns: float = 3.0
    warning_turns: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """What a policy takes for unhealthy.

    Attributes:
        enabled: whether it is watched at all.
        utilization: share of the base above which requests are too full, ``utilization_requests`` in a row.
        overflow_requests: requests left until the window overflows at which that is critical, where no layer is
            going to act before.
        eviction_rate: evictions a request, mean of the newest ``eviction_window``, above which the window is too small.
        compression_ratio: below it the newest ``compressions`` condensings were hardly worth it.
        fidelity: below it summaries lose too much.
        tool_bloat: share of tool results above which there are too many, 1.25 times their cap's share if that is more.
        compactions: so many within ``compaction_window`` requests are thrashing.
        loop: the same call so many times in a row is a loop.
        spike_share: share of the base below which a request's growth is no spike, whatever its multiple of the mean.
    """

    enabled: bool = True
    utilization: float = 0.90
    utilization_requests: int = 3
    overflow_requests: float = 2.0
    eviction_rate: float = 5.0
    eviction_window: int = 5
    compression_ratio: float = 2.0
    compressions: int = 3
    fidelity: float = 0.75
    tool_bloat: float = 0.30
    compactions: int = 3
    compaction_window: int = 20
    loop: int = 3
    spike_share: float = 0.05


DEFAULT_TREND = TrendRules()
DEFAULT_HEALTH = HealthRules()


class Mode(StrEnum):
    ENFORCE = "enforce"
    OBSERVE = "observe"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractShape:
    """Where a batch starts and where it ends in a window of ``window`` tokens (None: in any, or far above the others).

    ``trigger`` is a share of U = W - R - H. ``low_water``, ``extract``, ``tail`` and ``note`` are shares of
    room = trigger - fixed.
    ``extract_max`` caps it in tokens. A ``note`` of 0 asks no model. ``evict`` is what of its ``must_reach`` holds for
    a layer that clears old results before a summary is made; with 0 none is.
    """

    window: int | None
    trigger: float
    low_water: float
    extract: float
    tail: float
    note: float = 0.04
    extract_max: int = 64_000
    evict: float = 1.0

    def toward(self, other: "ExtractShape", share: float) -> "ExtractShape":
        mixed = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("trigger", "low_water", "extract", "tail", "note", "extract_max", "evict"):
            here, there = getattr(self, name), getattr(other, name)
            mixed[name] = type(here)(here + share * (there - here))
        return ExtractShape(**mixed)


FAR = 4

BALANCED_SHAPES: tuple[ExtractShape, ...] = (
    ExtractShape(window=2_048, trigger=1.0, low_water=1.0, extract=1.0, tail=0.06, note=0.0, evict=0.0),
    ExtractShape(window=4_096, trigger=0.97, low_water=0.77, extract=0.67, tail=0.18, note=0.0, evict=0.0),
    ExtractShape(window=8_192, trigger=0.97, low_water=0.49, extract=0.43, tail=0.12, evict=0.0),
    ExtractShape(window=12_288, trigger=0.955, low_water=0.47, extract=0.41, tail=0.126),
    ExtractShape(window=32_768, trigger=0.92, low_water=0.42, extract=0.36, tail=0.14),
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

    ``scope`` is ``total`` or the name of a bucket. ``at`` is a share of the policy's base, or of the bucket's cap;
    None is the trigger of the window's shape, 0 always. ``stop_at`` is where the layer's work ends, in the same
    measure; None is low water for a layer without ``at``, else 80 % of ``at``. ``min_savings`` (a share of W, or of
    the cap, or tokens from 1 on; None is 5 % for a layer with ``at`` while the request fits, else nothing) and
    ``must_reach`` (a share of the way from low water to the trigger) are what the layer has to achieve to be kept;
    otherwise its work is dropped and the next layer starts from where it started. ``params`` belong to the strategy.
    """

    strategy: str
    at: float | None = None
    stop_at: float | None = None
    scope: str = "total"
    min_savings: int | float | None = None
    must_reach: float | None = None
    params: Mapping[str, Param] = field(default_factory=dict)

    def whole(self, name: str, default: int) -> int:
        value = self.params.get(name, default)
        return int(value) if isinstance(value, int | float) else default


BALANCED_LAYERS: tuple[Layer, ...] = (
    Layer(strategy="ingest_cap"),
    Layer(strategy="dedupe"),
    Layer(strategy="evict", min_savings=0.10, must_reach=0.5),
    Layer(strategy="compact"),
)

OnOverflow = Literal["track", "warn", "reject", "summarize", "truncate", "prune-unused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What a policy says about one bucket.

    Attributes:
        cap: tokens from 1 on, a share of W below it; None tracks the bucket without a limit.
        soft: share of the cap from which on there is a warning.
        on_overflow: what to do above the cap, where buckets are enforced.
        charge_to: the bucket whose cap this one's tokens count against.
        watermark: share of the cap that ``truncate`` shrinks to.
    """

    cap: int | float | None = None
    soft: float = 0.80
    on_overflow: OnOverflow = "track"
    charge_to: str | None = None
    watermark: float = 0.80


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest:
    """The cap on a single tool result.

    Attributes:
        cap: largest result in tokens, and ``share`` the same as a share of U; the smaller one holds, and never
            more than the cap of the bucket ``tool_outputs``.
        method: what stays of a longer one: head and tail (``middle_out``), ``head`` or ``tail``.
        from_start: cap results from the first request on; else from the first trigger on.
        tools: cap in tokens by tool name.
        sub_agent_tools: names of tools that return a sub-agent's report, which is capped at ``sub_agent_cap``.
        drop_fields: by tool name (``*`` for any), keys that are left out of a result that is a JSON document.
        include: by tool name, keys that stay although ``drop_fields`` names them.
    """

    cap: int = 25_000
    share: float = 0.20
    method: Literal["middle_out", "head", "tail"] = "middle_out"
    from_start: bool = False
    tools: Mapping[str, int] = field(default_factory=dict)
    sub_agent_tools: tuple[str, ...] = ()
    sub_agent_cap: int = 2_000
    drop_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    include: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_particular(self) -> bool:
        return bool(self.tools or self.sub_agent_tools or self.drop_fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How a message that carries memory is recognised: by a tag that its text begins with, by its ``name``, or by a
    regular expression that matches where the text begins."""

    tags: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    @property
    def is_declared(self) -> bool:
        return bool(self.tags or self.names or self.patterns)


PROMPTS = ("structured", "handoff", "plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries:
    """How a model writes summaries, and what it may cost.

    Attributes:
        prompt: ``structured`` (headings, or JSON by schema), ``handoff`` or ``plain``; a layer's own stands above it.
        by_schema: ask for JSON by schema where the model takes it (``structured`` only).
        in_place: let the conversation's own model write behind its cached prefix where that is cheaper.
        role: where a summary stands: a ``user`` message of its own, at the end of the first system message
            (``system_append``), or a ``system`` message of its own.
        wait: longest that a request waits for what a model writes, whatever it asks; 0 for not at all: then it has
            what was prepared after earlier answers, and else what code makes of the history.
        seconds: longest wait for one answer, after the request's own.
        tokens_per_hour: most tokens, asked and answered, that one tenant's summaries take in an hour; 0 for none.
        prepare_at: share of the trigger from which on the next summary is prepared after an answer; None never.
        prepare_messages: messages outside the last summary from which on it is prepared too; None for no such rule.
        most_chunks: a history in more chunks than the summariser's input holds at once is read in so many.
    """

    prompt: Literal["structured", "handoff", "plain"] = "structured"
    by_schema: bool = True
    in_place: bool = True
    role: Literal["user", "system_append", "system"] = "user"
    wait: float = 0.0
    seconds: float = 20.0
    tokens_per_hour: int = 2_000_000
    prepare_at: float | None = 0.75
    prepare_messages: int | None = None
    most_chunks: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """When the structured state of a conversation is saved beside its summaries.

    Attributes:
        enabled: whether it is saved at all, a summary's own state included.
        save_at: save once when pressure rises over this share of the base; None never.
        milestones: save when a list has something newly done, a note decides something, or a call fails.
        keep: newest versions that are kept of one conversation.
        window_tokens: most tokens of what a new window starts from.
    """

    enabled: bool = True
    save_at: float | None = 0.85
    milestones: bool = True
    keep: int = 100
    window_tokens: int = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteTaking:
    """Notes that a conversation's own tools or the background take of it.

    Attributes:
        enabled: whether any are taken.
        tools: names of tools whose newest call holds the whole list of what is to do, or a note.
        fences: words after which a fenced block in an answer is a note.
        extract: have the summariser take notes in the background.
        min_turns: steps before which none are taken.
        max_tokens: most tokens of the notes in a summary or in a new window.
    """

    enabled: bool = True
    tools: tuple[str, ...] = (
        "TodoWrite",
        "todo_write",
        "todowrite",
        "write_todos",
        "update_plan",
        "update_todo_list",
        "manage_todo_list",
        "task_list",
        "save_note",
        "write_note",
        "add_note",
        "memory_write",
    )
    fences: tuple[str, ...] = ("note", "notes", "todo", "decision", "adr")
    extract: bool = False
    min_turns: int = 20
    max_tokens: int = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Ways back for what was removed, beside the management API.

    Attributes:
        tool: offer the model a tool of this ``name`` once something was removed; Weir answers its calls itself.
        rounds: most calls that Weir answers within one request.
        max_tokens: most tokens of one answer, and never more than the room that is left.
        auto: put what was removed and the newest user message asks for in front of it.
        auto_tokens: most tokens of that.
        embeddings: model whose vectors of removed texts are kept with them, so that they are found by what they are
            about, too; None for words alone.
    """

    tool: bool = False
    name: str = "recall"
    rounds: int = 3
    max_tokens: int = 4_000
    auto: bool = True
    auto_tokens: int = 500
    embeddings: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How often it is measured, after an answer, what a summary left of a conversation.

    Attributes:
        sample: share of the requests whose batch made a summary that are measured; 0 for none.
        questions: how many questions are asked, 4 to 20.
        model: who answers them; None for the summarizer.
        judge: who compares the answers; None for ``model``.
    """

    sample: float = 0.0
    questions: int = 8
    model: str | None = None
    judge: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """What is kept of a conversation's newest requests, so that both sides of them can be looked at.

    Attributes:
        requests: how many of them; 0 for none.
        content: keep what their messages say too, where the archive does not have it.
    """

    requests: int = 20
    content: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEdits:
    """What a client asks to have taken out of its own requests (Anthropic's ``context_management``); tokens.

    Attributes:
        results_at: size of a request above which its old tool results go, ``results_over`` the number of results; None
            for no such rule.
        keep: newest results that stay.
        at_least: results go only if so much goes with them.
        exclude: tools whose results stay.
        thinking: newest steps of earlier turns whose thinking stays; None for all.
        compact_at: size of a request above which its history is summarised; None never.
        pauses: whether the summary is then to be the whole answer.
        native: whether the upstream does it itself, so that Weir leaves to it what comes first there.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """One policy, complete.

    Attributes:
        name: what operators call it; the preset's name for a preset.
        window: context window that stands above every other source, tokens; ``window_per_output`` makes it that
            many times the output reserve where ``window`` is not given.
        designed_for: the window that amounts in tokens (caps, ``reserve``, ``headroom``) were chosen for; in
            another window they are scaled. None for amounts that hold in any.
        base: denominator of pressure: ``usable`` = W - R - H, ``window`` = W, ``max_input`` = I or W.
        reserve_mode: ``request`` takes the client's ``max_tokens``, ``fixed`` the policy's ``reserve``.
        reserve: output reserve where the client states none, tokens from 1 on, a share of W below;
            ``reserve_floor`` bounds it below (never above W / 4).
        headroom: what is never planned to be used, tokens from 1 on, a share of W below.
        margin: estimator error as a share, until the estimate is calibrated.
        auto_scale: other starts of the zones in small and in large windows.
        rot_soft_tokens: above so many tokens the zone is at least yellow; None for no such guard.
        preempt: run layers that need no model before their trigger when growth spiked and will soon be too much, or
            a bucket that is enforced is about to overflow.
        cold_at: share of the trigger from which on a batch runs early if the provider's cache is cold, which it is
            after ``cache_ttl`` seconds without a request; None never.
        enforce: ``global`` warns about buckets and acts on the whole, ``bucket`` acts on each, ``observe`` plans
            and forwards as it came.
        when_full: ``manage``, or ``reject`` with an error instead of removing anything.
        estimator: ``tokenizer``, ``chars4``, ``chars2.5`` or the name of an installed estimator.
        image_tokens: flat tokens of an image; None for the model's formula.
        placeholder: what stands where a result was: a ``finding``, the constant ``marker``, or nothing.
        summarizer: model that writes summaries, ``same`` for the request's own, None for no model.
        embeddings: model whose vectors tell what is alike; None for shingles.
        compaction: who compacts: ``proxy``, the ``provider`` by means of its own (the history then goes up as it came),
            or ``off``: only layers that neither summarise nor begin a new window.
        resume: how a new conversation goes on from a checkpoint: only where the header ``x-weir-resume`` names one
            (``header``), also where it has the name of one that was (``auto``), or never (``off``).
        server_state: what becomes of requests that go on from what their provider holds: ``follow`` them, and begin
            anew with the whole history where it grows too long; ``refuse`` them, so that clients send everything; or
            ``relay`` them without management.
        cache_breakpoint: have the provider keep tools and system prompt for so long, by a marker behind them, in
            requests whose client sets none (``off`` adds nothing).
    """

    name: str = "balanced"
    mode: Mode = Mode.ENFORCE
    window: int | None = None
    window_per_output: int | None = None
    designed_for: int | None = None
    base: Literal["usable", "window", "max_input"] = "usable"
    reserve_mode: Literal["request", "fixed"] = "request"
    reserve: int | float = 0
    reserve_floor: int = 4_000
    headroom: int | float = 0.05
    margin: float = 0.05
    zones: Zones = Zones()
    auto_scale: bool = False
    rot_soft_tokens: int | None = 64_000
    trend: TrendRules = DEFAULT_TREND
    preempt: bool = False
    cold_at: float | None = 0.80
    cache_ttl: float = 300.0
    enforce: Literal["global", "bucket", "observe"] = "global"
    when_full: Literal["manage", "reject"] = "manage"
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    shapes: tuple[ExtractShape, ...] = BALANCED_SHAPES
    layers: tuple[Layer, ...] = BALANCED_LAYERS
    ingest: Ingest = Ingest()
    memory: Memory = Memory()
    estimator: str = "tokenizer"
    image_tokens: int | None = None
    placeholder: Literal["finding", "marker", "none"] = "finding"
    placeholder_tokens: int = 50
    marker: str = "[Old tool result content cleared]"
    summarizer: str | None = None
    embeddings: str | None = None
    note_min: int = 200
    note_max: int = 2_000
    summaries: Summaries = Summaries()
    checkpoints: Checkpoints = Checkpoints()
    notes: NoteTaking = NoteTaking()
    recall: Recall = Recall()
    health: HealthRules = DEFAULT_HEALTH
    evaluate: Evaluation = Evaluation()
    inspect: Inspect = Inspect()
    compaction: Literal["proxy", "provider", "off"] = "proxy"
    resume: Literal["header", "auto", "off"] = "header"
    server_state: Literal["follow", "refuse", "relay"] = "follow"
    cache_breakpoint: Literal["off", "5m", "1h"] = "off"

    @property
    def observes(self) -> bool:
        return self.mode is Mode.OBSERVE or self.enforce == "observe" or self.compaction == "provider"

    def shape_for(self, window: int) -> ExtractShape:
        """The shape for a window of ``window`` tokens: between two shapes, in proportion to the window's logarithm.

        So a little more window never means another policy. Below the first shape and above the last these hold; one
        without a window stands at four times the one before.
        """
        placed = [shape.window or FAR * (self.shapes[n - 1].window or 1) for n, shape in enumerate(self.shapes)]
        at = bisect_left(placed, window)
        if at == 0 or at == len(placed) or placed[at] == window:
            return self.shapes[min(at, len(placed) - 1)]
        share = math.log(window / placed[at - 1]) / math.log(placed[at] / placed[at - 1])
        return self.shapes[at - 1].toward(self.shapes[at], share)


def amount(value: float, window: int) -> int:
    """Tokens of a setting that is tokens from 1 on and a share of ``window`` below."""
    return math.floor(round(value * window, 6)) if value < 1 else int(value)
