"""How the window is divided, and whether a request fits.

::

    W  context window                I  the provider's input limit where it is separate
    R  output reserve                H  headroom, never planned to be used        M  estimator error
    hard_fits(used) = used * (1 + M) + R <= W   and   (no I, or used * (1 + M) <= I)
    fits(used)      = hard_fits(used)           and   used * (1 + M) + R + H <= W

``used`` is calibrated: the estimate times the ratio of reported to estimated tokens. Layers work in
uncalibrated tokens, because that is what a message's count is; :meth:`Budget.room_for` converts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policies.settings import ContextSettings, amount

SMALLEST_RESERVE = 1
BUCKETS = ("system", "tools", "memory", "summary", "history", "tool_outputs")
RESERVED = ("working", "headroom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The division of one request's window, in tokens; ``caps`` by bucket, only of those that have one.

    ``reported`` says that the ratio comes from usage that the upstream reported.
    """

    window: int
    reserve: int
    headroom: int
    max_input: int | None = None
    margin: float = 0.0
    ratio: float = 1.0
    caps: Mapping[str, int] = field(default_factory=dict)
    reported: bool = False

    @property
    def usable(self) -> int:
        """W - R - H, at least 1: also the ``limit`` that clients are told."""
        return max(1, self.window - self.reserve - self.headroom)

    def estimate(self, tokens: int) -> int:
        """Uncalibrated tokens as what the upstream would report."""
        return math.ceil(round(tokens * self.ratio, 6))

    def estimate_each(self, buckets: Mapping[str, int]) -> dict[str, int]:
        """Uncalibrated tokens by bucket as what the upstream would report; they sum to the estimate of the total."""
        result: dict[str, int] = {}
        before = 0
        for name, tokens in buckets.items():
            result[name] = self.estimate(before + tokens) - self.estimate(before)
            before += tokens
        return result

    def room_for(self, tokens: float) -> int:
        """The uncalibrated tokens that stay within ``tokens`` even if the estimate errs by the margin."""
        return max(0, math.floor(round(tokens / (self.ratio * (1 + self.margin)), 6)))

    @property
    def hard_limit(self) -> int:
        """The most uncalibrated tokens for which :meth:`hard_fits` holds."""
        limit = self.room_for(self.window - self.reserve)
        return limit if self.max_input is None else min(limit, self.room_for(self.max_input))

    @property
    def soft_limit(self) -> int:
        """The most uncalibrated tokens for which :meth:`fits` holds."""
        return min(self.hard_limit, self.room_for(self.window - self.reserve - self.headroom))

    def hard_fits(self, tokens: int) -> bool:
        """Whether uncalibrated ``tokens`` leave the output reserve free."""
        return tokens <= self.hard_limit

    def fits(self, tokens: int) -> bool:
        """Whether uncalibrated ``tokens`` leave reserve and headroom free."""
        return tokens <= self.soft_limit

    def history_budget(self, buckets: Mapping[str, int]) -> int:
        """What W - R - H leaves for history and tool outputs beside the other buckets, calibrated, at least 0."""
        others = sum(tokens for name, tokens in buckets.items() if name not in ("history", "tool_outputs"))
        return max(0, self.window - self.reserve - self.headroom - others)

    def base(self, settings: ContextSettings) -> int:
        """The denominator of pressure that the policy asks for, tokens."""
        if settings.base == "window":
            return self.window
        if settings.base == "max_input":
            return self.max_input or self.window
        return self.usable

    def narrowed(self, window: int) -> "Budget":
        """The same budget in a smaller window: reserve and headroom shrink in proportion."""
        share = window / self.window
        return replace(
            self,
            window=window,
            reserve=max(SMALLEST_RESERVE, min(self.reserve, math.floor(self.reserve * share))),
            headroom=math.floor(self.headroom * share),
            max_input=None if self.max_input is None else min(self.max_input, window),
            caps={name: math.floor(cap * share) for name, cap in self.caps.items()},
        )


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
) -> Budget:
    """The budget of one request.

    ``requested`` is the client's ``max_completion_tokens`` or ``max_tokens``; in mode ``request`` the reserve
    is that, bounded by the model's output limit and a quarter of the window, else the policy's reserve, never
    under ``min(reserve_floor, W / 4)``. ``margin`` overrides the policy's once the estimate is calibrated,
    ``reported`` says that ``ratio`` was learned.
    """
    scale = 1.0 if settings.designed_for is None else window / settings.designed_for
    own_reserve = scaled(settings.reserve, window, scale)
    quarter = max(1, window // 4)
    floor = min(settings.reserve_floor, quarter)
    stated = requested if requested is not None and requested > 0 else None
    if settings.reserve_mode == "fixed":
        reserve = max(floor, own_reserve, stated or 0)
    elif stated is not None:
        reserve = min(stated, quarter, max_output or stated)
    else:
        reserve = max(floor, own_reserve)
    return Budget(
        window=window,
        reserve=min(reserve, max(1, window - 1)),
        headroom=scaled(settings.headroom, window, scale),
        max_input=max_input if max_input is not None and max_input < window else None,
        margin=settings.margin if margin is None else margin,
        ratio=ratio,
        reported=reported,
        caps={
            name: scaled(bucket.cap, window, scale)
            for name, bucket in settings.buckets.items()
            if bucket.cap is not None and name not in RESERVED
        },
    )


def scaled(value: float, window: int, scale: float) -> int:
    """Tokens of an amount: a share of the window below 1, else tokens of the window that the policy was made for."""
    return amount(value, window) if value < 1 else math.floor(round(value * scale, 6))


def total(buckets: Mapping[str, int]) -> int:
    """Tokens of all buckets together."""
    return sum(buckets.values())
