"""What follows from a policy in a window: how it is divided, whose tokens are whose, and when a
layer is due.

::

    W  context window                I  the provider's input limit where it is separate
    R  output reserve                H  headroom, never planned to be used        M  estimator error
    F  floor of the reserve          the least that an answer needs: R shrinks to it before anything unread is cut
    soft_limit: used * (1 + M) + R + H <= W   and   (no I, or used * (1 + M) <= I)    what is old is evicted above it
    hard_limit: used + F <= W                 and   (no I, or used <= I)              the newest is cut above it
    send_limit: used < W                      and   (no I, or used <= I)              refused above it

The error counts against what is old and never against the newest: where an estimate may be too high
or too low, the request is sent, and the upstream decides.

``used`` is calibrated: the estimate times the ratio of reported to estimated tokens
(:class:`Calibration`). Layers work in uncalibrated tokens, as messages are counted;
:meth:`TokenBudget.room_for` converts.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from policies.ledger import TokenSource
from policies.messages import PolicyError, Transcript
from policies.settings import Bucket, ContextSettings, ExtractShape, Layer, Zones

FAR = 4
RECALL_TOOL = "recall"
RECALL_TOKENS = 4_000
"""The most of one answer of the recall tool."""
RECALLED_PARTS = 10
"""Divisor of a window: the part that is kept free for an answer of the recall tool, or less where
one answer takes less.
"""
FLOOR_TOKENS = 1_024
FLOOR_PARTS = 16
BUCKETS = ("system", "tools", "memory", "summary", "history", "tool_outputs")
RESERVED = ("working", "headroom")
MIN_CAP = 64
BLOAT_OVER_CAP = 1.25
"""How much more than the share of the window that the policy gives them tool results may take
without an alert.
"""
WATERMARK = 0.80
RATIO_MIN = 0.25
RATIO_MAX = 4.0
RECENT = 5
CONSISTENT = 3
AGREEMENT = 0.05
DRIFT = 0.15
CALIBRATED_MARGIN = 0.02
_PLAUSIBLE = 20
NEVER = -1
SMALL_WINDOW = 32_768
LARGE_WINDOW = 200_000
SMALL_ZONES = Zones(yellow_at=0.40, orange_at=0.65, red_at=0.85, critical_at=0.92)
LARGE_ZONES = Zones(yellow_at=0.60, orange_at=0.80, red_at=0.90, critical_at=0.95)
"""Ours: zones in windows up to the small one, and from the large one on."""

CLOSE = 0.75
"""The share of the trigger from which on a request is stored without waiting for its answer."""


class BudgetUnreachable(PolicyError):
    def __init__(
        self, *, window: int, reserve: int, buckets: Mapping[str, int], protected: int
    ) -> None:
        self.window = window
        self.reserve = reserve
        self.buckets = dict(buckets)
        self.protected = protected
        super().__init__(
            f"protected content of {protected} tokens does not fit a window of {window} with"
            f" {reserve} reserved"
        )


class BucketExceeded(BudgetUnreachable):
    def __init__(
        self,
        bucket: str,
        *,
        used: int,
        cap: int,
        window: int,
        reserve: int,
        buckets: Mapping[str, int],
        protected: int,
    ) -> None:
        super().__init__(window=window, reserve=reserve, buckets=buckets, protected=protected)
        self.bucket = bucket
        self.used = used
        self.cap = cap
        self.args = (
            f"bucket {bucket} holds {used} tokens, {used - cap} more than its cap of {cap}",
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """Reported over estimated tokens of one scope (upstream, model, credential).

    The ratio is the median of the newest :data:`RECENT` samples, each held within 0.25 to 4: one
    odd response does not move it, a lasting change has after three. ``drift`` is the newest
    response over its prediction, less one.
    """

    ratio: float = 1.0
    samples: int = 0
    recent: tuple[float, ...] = ()
    drift: float = 0.0

    @classmethod
    def restore(
        cls, *, ratio: float, samples: int, recent: Sequence[float] = (), drift: float = 0.0
    ) -> "Calibration":
        if samples <= 0 or not all(
            math.isfinite(number) and number > 0 for number in (ratio, *recent)
        ):
            return cls()
        ratio = _clamp(ratio)
        known = tuple(_clamp(sample) for sample in recent)[-RECENT:] or (ratio,) * min(
            samples, RECENT
        )
        return cls(
            ratio=ratio, samples=samples, recent=known, drift=drift if math.isfinite(drift) else 0.0
        )

    def observe(self, estimated: int, reported: int) -> "Calibration":
        """Counts that are not positive or differ more than twentyfold come from a server that does
        not count: ignored.
        """
        if (
            estimated <= 0
            or reported <= 0
            or reported > estimated * _PLAUSIBLE
            or estimated > reported * _PLAUSIBLE
        ):
            return self
        sample = reported / estimated
        recent = (*self.recent, _clamp(sample))[-RECENT:]
        return Calibration(
            ratio=median(recent),
            samples=self.samples + 1,
            recent=recent,
            drift=sample / self.ratio - 1.0,
        )

    def apply(self, tokens: int) -> int:
        return math.ceil(round(tokens * self.ratio, 6)) if tokens > 0 else 0

    @property
    def is_calibrated(self) -> bool:
        agreeing = sum(abs(sample / self.ratio - 1.0) <= AGREEMENT for sample in self.recent)
        return agreeing >= CONSISTENT and not self.is_drifting

    @property
    def is_drifting(self) -> bool:
        return abs(self.drift) > DRIFT

    def margin(self, default: float, *, exact: bool = True) -> float:
        """Estimator error M as a share: ``default`` until calibrated, then at most 0.02.

        0.02 is measured: one real vocabulary as the estimate of another is less than 2 % short in
        95 % of calibrated predictions. Characters (``exact`` False) are up to 14 % short when a
        tool result changes the kind of text.
        """
        return min(default, CALIBRATED_MARGIN) if exact and self.is_calibrated else default


def _clamp(ratio: float) -> float:
    return min(RATIO_MAX, max(RATIO_MIN, ratio))


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    window: int
    reserve: int
    headroom: int
    floor: int = 0
    max_input: int | None = None
    margin: float = 0.0
    ratio: float = 1.0
    caps: Mapping[str, int] = field(default_factory=dict)
    reported: bool = False

    @cached_property
    def usable(self) -> int:
        """W - R - H or the input limit, the smaller one, at least 1: also the ``limit`` that
        clients receive.
        """
        room = self.window - self.reserve - self.headroom
        return max(1, room if self.max_input is None else min(room, self.max_input))

    def estimate(self, tokens: int) -> int:
        return math.ceil(round(tokens * self.ratio, 6))

    def estimate_each(self, buckets: Mapping[str, int]) -> dict[str, int]:
        result = dict.fromkeys(buckets, 0)
        before = reported = 0
        for name, tokens in buckets.items():
            if tokens:
                before += tokens
                upto = self.estimate(before)
                result[name] = upto - reported
                reported = upto
        return result

    def room_for(self, tokens: float) -> int:
        """The uncalibrated tokens that stay within ``tokens`` even if the estimate errs by the
        margin.
        """
        return max(0, math.floor(round(tokens / (self.ratio * (1 + self.margin)), 6)))

    def _most(self, tokens: int) -> int:
        """The uncalibrated tokens that are within ``tokens`` and the input limit by the estimate as
        it is.
        """
        most = tokens if self.max_input is None else min(tokens, self.max_input)
        return max(0, math.floor(round(most / self.ratio, 6)))

    @cached_property
    def send_limit(self) -> int:
        return self._most(self.window - 1)

    @cached_property
    def hard_limit(self) -> int:
        return self._most(self.window - self.floor)

    @cached_property
    def safe_limit(self) -> int:
        """The hard limit, kept even if the estimate errs by the margin: what is cut is cut
        to it.
        """
        most = self.window - self.floor
        return self.room_for(most if self.max_input is None else min(most, self.max_input))

    @cached_property
    def reserved_limit(self) -> int:
        most = self.window - self.reserve
        return self.room_for(most if self.max_input is None else min(most, self.max_input))

    @cached_property
    def soft_limit(self) -> int:
        return min(self.safe_limit, self.room_for(self.window - self.reserve - self.headroom))

    def hard_fits(self, tokens: int) -> bool:
        return tokens <= self.hard_limit

    def fits(self, tokens: int) -> bool:
        return tokens <= self.soft_limit

    def base(self, settings: ContextSettings) -> int:
        if settings.base == "window":
            return self.window
        if settings.base == "max_input":
            return self.max_input or self.window
        return self.usable


def divide(
    settings: ContextSettings,
    *,
    window: int,
    max_input: int | None = None,
    max_output: int | None = None,
    requested: int | None = None,
    ratio: float = 1.0,
    margin: float | None = None,
    reported: bool = False,
) -> TokenBudget:
    """The budget of one request.

    The floor of the reserve is 1,024 tokens, a sixteenth of the window, or what the client requests
    where that is less. In mode ``request`` the reserve is the client's ``requested``, within the
    model's output limit and a quarter of the window, else the policy's, never under
    ``min(reserve_floor, W / 4)``. ``margin`` overrides the policy's once the estimate is
    calibrated. The headroom holds one answer of the recall tool.
    """
    scale = 1.0 if settings.designed_for is None else window / settings.designed_for
    own_reserve = amount(settings.reserve, window, scale)
    quarter = max(1, window // 4)
    floor = min(settings.reserve_floor, quarter)
    stated = requested if requested is not None and requested > 0 else None
    if settings.reserve_mode == "fixed":
        reserve = max(floor, own_reserve, stated or 0)
    elif stated is not None:
        reserve = min(stated, quarter, max_output or stated)
    else:
        reserve = max(floor, own_reserve)
    reserve = min(reserve, max(1, window - 1))
    recalled = amount(RECALL_TOKENS, window, scale) if settings.recall.tool else 0
    return TokenBudget(
        window=window,
        reserve=reserve,
        floor=min(reserve, FLOOR_TOKENS, window // FLOOR_PARTS),
        headroom=max(
            amount(settings.headroom, window, scale), min(recalled, window // RECALLED_PARTS)
        ),
        max_input=max_input if max_input is not None and max_input < window else None,
        margin=settings.margin if margin is None else margin,
        ratio=ratio,
        reported=reported,
        caps={
            name: amount(bucket.cap, window, scale)
            for name, bucket in settings.buckets.items()
            if bucket.cap is not None and name not in RESERVED
        },
    )


def amount(value: float, window: int, scale: float = 1.0) -> int:
    """Tokens of a setting that is tokens from 1 on, for a window of another size scaled, and a
    share of W below.
    """
    return math.floor(round(value * (window if value < 1 else scale), 6))


def find_memory(transcript: Transcript, memory: tuple[str, ...]) -> frozenset[int]:
    """Messages whose text begins with a word of ``memory``, or that have it as their name.

    What a tool returns is never memory, whatever it says.
    """
    found = set[int]()
    for index, message in enumerate(transcript.messages):
        if message.is_result:
            continue
        body = transcript.read(index)
        if body.text.lstrip().startswith(memory) or body.name in memory:
            found.add(index)
    return frozenset(found)


def charged(buckets: Mapping[str, int], rules: Mapping[str, Bucket]) -> Mapping[str, int]:
    if not rules:
        return buckets
    result = dict.fromkeys(buckets, 0)
    for name, tokens in buckets.items():
        rule = rules.get(name)
        target = rule.charge_to if rule is not None and rule.charge_to in result else name
        result[target or name] += tokens
    return result


def is_over(name: str, tokens: int, budget: TokenBudget) -> bool:
    cap = budget.caps.get(name)
    return cap is not None and tokens > cap


def is_soft(name: str, tokens: int, rules: Mapping[str, Bucket], budget: TokenBudget) -> bool:
    cap = budget.caps.get(name)
    return cap is not None and tokens >= math.ceil(round(rules[name].soft * cap, 6))


def refuses(settings: ContextSettings, name: str) -> bool:
    rule = settings.buckets.get(name)
    return rule is not None and rule.on_overflow == "reject" and settings.enforce == "bucket"


def acts_always(settings: ContextSettings) -> bool:
    """Whether a layer about the whole request examines every request; a cap on results and a
    prepared summary do not count.
    """
    return any(
        layer.at == 0
        and layer.scope == "total"
        and layer.strategy != "ingest_cap"
        and layer.params.get("prepared") is not True
        for layer in settings.layers
    )


def layers_of(settings: ContextSettings) -> tuple[Layer, ...]:
    if settings.enforce != "bucket":
        return settings.layers
    return (*settings.layers, *_bucket_layers(settings))


def _bucket_layers(settings: ContextSettings) -> Iterator[Layer]:
    for action, strategy in {
        "prune-unused": "prune_tools",
        "truncate": "evict",
        "summarize": "compact",
    }.items():
        for name, bucket in settings.buckets.items():
            if bucket.cap is None or bucket.on_overflow != action:
                continue
            # what was decided in words is never truncated
            if strategy == "evict" and name == "history":
                yield Layer(strategy="drop_oldest", scope=name, at=1.0, stop_at=WATERMARK)
            else:
                params = {"scorer": "fifo"} if strategy == "evict" else {}
                yield Layer(strategy=strategy, scope=name, at=1.0, stop_at=WATERMARK, params=params)


def first_trigger(settings: ContextSettings, budget: TokenBudget) -> int:
    shares = {
        layer.at: layer for layer in settings.layers if layer.scope == "total" and layer.at != 0
    }
    return min(
        [budget.soft_limit, *(limit_for(layer, settings, budget) for layer in shares.values())]
    )


def is_by_shape(settings: ContextSettings) -> bool:
    """Whether the window's shape decides when a batch is due, rather than a number in the policy."""
    return all(
        layer.at is None for layer in settings.layers if layer.scope == "total" and layer.at != 0
    )


def limit_for(layer: Layer, settings: ContextSettings, budget: TokenBudget) -> int:
    """The most tokens in the layer's scope at which it is not due; -1 for one that always is."""
    if layer.at == 0:
        return NEVER
    if layer.scope != "total":
        cap = budget.caps.get(layer.scope)
        return budget.room_for(budget.window) if cap is None else _below(layer.at, cap, budget)
    if layer.at is None:
        usable = budget.usable
        return min(
            budget.room_for(shape_for(settings, budget.window).trigger * usable), budget.soft_limit
        )
    return min(budget.soft_limit, _below(layer.at, budget.base(settings), budget))


def shape_for(settings: ContextSettings, window: int) -> ExtractShape:
    """Between two shapes in proportion to the window's logarithm: a slightly larger window never
    changes the policy abruptly.

    Below the first shape and above the last these hold; one without a window is placed at four
    times the one before.
    """
    placed = [
        shape.window or FAR * (settings.shapes[n - 1].window or 1)
        for n, shape in enumerate(settings.shapes)
    ]
    at = bisect_left(placed, window)
    if at == 0 or at == len(placed) or placed[at] == window:
        return settings.shapes[min(at, len(placed) - 1)]
    share = math.log(window / placed[at - 1]) / math.log(placed[at] / placed[at - 1])
    return settings.shapes[at - 1].toward(settings.shapes[at], share)


def target_for(
    layer: Layer, settings: ContextSettings, budget: TokenBudget, *, low_water: int
) -> int:
    if layer.scope == "total":
        if layer.stop_at is not None:
            return budget.room_for(layer.stop_at * budget.base(settings))
        if layer.at == 0:
            return 0
        if layer.at is None:
            return low_water
        return min(
            limit_for(layer, settings, budget),
            budget.room_for(WATERMARK * layer.at * budget.base(settings)),
        )
    cap = budget.caps.get(layer.scope)
    if cap is None:
        return budget.room_for(budget.window)
    share = layer.stop_at
    if share is None:
        share = WATERMARK * (1.0 if layer.at is None else layer.at)
    return budget.room_for(share * cap)


def _below(at: float | None, base: int, budget: TokenBudget) -> int:
    """The most uncalibrated tokens under the share ``at`` of ``base``; under or at it for 1 and for
    None.
    """
    if at is None or at >= 1:
        return budget.room_for(base)
    return budget.room_for(math.ceil(round(at * base, 6)) - 1)


def ingest_cap_for(
    settings: ContextSettings, budget: TokenBudget, *, whole: bool = False, own: int | None = None
) -> int:
    """The most tokens of one result; ``own`` is the cap of its tool.

    ``whole``: it may take all that the cap of its tool and the bucket of results leave it.
    """
    usable = budget.room_for(budget.usable)
    caps = [usable] if whole else [int(settings.ingest.share * usable), settings.ingest.cap]
    if own is not None:
        caps = [caps[0], own]
    bucket = budget.caps.get("tool_outputs")
    if bucket is not None:
        caps.append(budget.room_for(bucket))
    return max(MIN_CAP, min(caps))


def zones_for(settings: ContextSettings, window: int) -> Zones:
    if not settings.auto_scale or SMALL_WINDOW < window < LARGE_WINDOW:
        return settings.zones
    return SMALL_ZONES if window <= SMALL_WINDOW else LARGE_ZONES


def tokens_at(base: int, share: float) -> int:
    """Rounded down as if shares were exact decimals: 142,800 is .85 of 168,000."""
    return math.floor(round(base * share, 6))


def compaction_layer(settings: ContextSettings) -> Layer | None:
    return next((layer for layer in layers_of(settings) if layer.strategy == "compact"), None)


def asks_from(layer: Layer, settings: ContextSettings, budget: TokenBudget) -> int:
    return (
        limit_for(layer, settings, budget)
        if layer.at != 0
        else budget.room_for(budget.base(settings))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a policy gives in one budget, the same for every request: computed once, by
    :func:`limits_for`.

    ``base`` and ``red`` are calibrated tokens; uncalibrated are ``trigger`` (the most of a whole
    request at which no layer is due) and ``compacts`` (the first layer that summarises is not due;
    None without one). ``scoped`` has the trigger of each layer about one bucket, ``refused`` the
    caps above which a request is refused, ``bloat`` the share that tool results may take.
    ``always``: a layer looks at every request.
    """

    settings: ContextSettings
    budget: TokenBudget
    zones: Zones
    base: int
    red: int
    source: TokenSource
    trigger: int
    compacts: int | None
    scoped: tuple[tuple[str, int], ...]
    refused: tuple[tuple[str, int], ...]
    bloat: float
    always: bool


def limits_for(settings: ContextSettings, budget: TokenBudget) -> Limits:
    scoped = [layer for layer in layers_of(settings) if layer.scope != "total"]
    zones = zones_for(settings, budget.window)
    base = budget.base(settings)
    compacts = compaction_layer(settings)
    return Limits(
        settings=settings,
        budget=budget,
        zones=zones,
        base=base,
        red=tokens_at(base, zones.red_at),
        source="model_reported" if budget.reported else "client_estimated",
        trigger=first_trigger(settings, budget),
        compacts=None if compacts is None else asks_from(compacts, settings, budget),
        scoped=tuple((layer.scope, limit_for(layer, settings, budget)) for layer in scoped),
        refused=tuple((name, cap) for name, cap in budget.caps.items() if refuses(settings, name)),
        always=acts_always(settings),
        bloat=max(
            settings.health.tool_bloat,
            BLOAT_OVER_CAP * budget.caps.get("tool_outputs", 0) / budget.window,
        ),
    )
