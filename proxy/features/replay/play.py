"""A recorded conversation played in scenarios: what each forwards is compared with what it
forwarded before.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from policies.ledger import PlannedMessage
from policies.quality.prices import TokenPrices, request_cost
from policies.settings import ContextSettings, Mode
from proxy.features.replay.scenarios import Conditions, Managed, Scenario, SlidingWindow
from proxy.features.replay.script import Retention, Script, ScriptRequest, judge
from proxy.store import Store
from proxy.wire.raw import Raw

UNMANAGED = "unmanaged"
SLIDING = "sliding window"
LARGEST = frozenset({"largest", "peak", "early"})
"""Figures of a tally of which the largest counts; all others are sums."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over requests; tokens are uncalibrated, costs in the unit of the price list.

    ``fit`` counts requests that were forwarded and fit the window, ``batches`` those that did not
    begin with the one before. What was refused is in no sum of tokens or costs; ``before`` are the
    tokens unmanaged. ``peak`` is the largest ratio of ``cost`` to ``unmanaged``, cumulative within
    a conversation and not before its first batch, ``early`` the largest before it. ``asked`` counts
    calls to a model, ``refused_by`` refusals by bucket.
    """

    conversations: int = 0
    requests: int = 0
    fit: int = 0
    refused: int = 0
    failed: int = 0
    batches: int = 0
    before: int = 0
    tokens: int = 0
    reused: int = 0
    largest: int = 0
    asked: int = 0
    cost: float = 0.0
    unmanaged: float = 0.0
    sliding: float = 0.0
    peak: float = 0.0
    early: float = 0.0
    seconds: float = 0.0
    refused_by: Counter[str] = field(default_factory=Counter)
    retention: Retention = field(default_factory=Retention)

    def add(self, other: "Tally") -> None:
        for item in fields(self):
            mine = getattr(self, item.name)
            theirs = getattr(other, item.name)
            setattr(self, item.name, max(mine, theirs) if item.name in LARGEST else mine + theirs)

    @property
    def reuse(self) -> float:
        return self.reused / self.tokens if self.tokens else 0.0

    @property
    def saved(self) -> int:
        return self.before - self.tokens

    @property
    def unanswered(self) -> int:
        return self.requests - self.fit

    @property
    def ratio(self) -> float:
        """A comparison only where none is ``unanswered``."""
        return self.cost / self.unmanaged if self.unmanaged else 1.0

    @property
    def against_sliding(self) -> float:
        return self.cost / self.sliding if self.sliding else 1.0

    def values(self) -> dict[str, object]:
        """Every figure, and what follows from them: shares and savings; no comparison where a
        request did not fit.
        """
        is_compared = not self.unanswered
        figures = msgspec.to_builtins(self)
        del figures["seconds"]
        return {
            **figures,
            "saved": self.saved,
            "cost_saved": self.unmanaged - self.cost,
            "prefix_reuse": round(self.reuse, 4),
            "cost_against_unmanaged": round(self.ratio, 4) if is_compared else None,
            "cost_against_sliding_window": round(self.against_sliding, 4) if is_compared else None,
        }


async def replay(
    script: Script,
    policies: Sequence[ContextSettings],
    conditions: Conditions,
    prices: TokenPrices,
    store: Store,
) -> Mapping[str, Tally]:
    """The figures of one conversation unmanaged, in a sliding window, and under each policy, by
    name in this order.

    ``store`` is where policies keep the conversation meanwhile. The window of unmanaged requests
    and of the sliding window is the first policy's. Unmanaged requests cost what they would cost a
    model with a window that is large enough.
    """
    budget = conditions.budget(policies[0])
    named: dict[str, Scenario] = {UNMANAGED: Scenario(), SLIDING: SlidingWindow(budget)}
    for number, settings in enumerate(policies):
        is_off = settings.mode is Mode.OFF
        named[settings.name] = (
            Scenario() if is_off else Managed(settings, conditions, store, number=number)
        )
    room = budget.window - budget.reserve
    meters = {name: _Meter(script, scenario, prices, room=room) for name, scenario in named.items()}
    for request in script.requests:
        steps = {name: await meter.play(request) for name, meter in meters.items()}
        for name, step in steps.items():
            meters[name].count(
                step, request, unmanaged=steps[UNMANAGED].cost, sliding=steps[SLIDING].cost
            )
    for scenario in named.values():
        await scenario.close()
    return {name: meter.tally for name, meter in meters.items()}


class _Meter:
    def __init__(
        self, script: Script, scenario: Scenario, prices: TokenPrices, *, room: int
    ) -> None:
        self.tally = Tally(conversations=1)
        self._script = script
        self._scenario = scenario
        self._prices = prices
        self._room = room
        self._sent: list[Raw] = []
        self._archived: set[int] = set()

    async def play(self, request: ScriptRequest) -> Tally:
        script = self._script
        started = time.perf_counter()
        sent = await self._scenario.forward(script, request.length)
        self._archived.update(sent.removed)
        one = Tally(
            requests=1,
            asked=sent.asked,
            seconds=time.perf_counter() - started,
            retention=judge(
                script,
                request.facts,
                length=request.length,
                sent=sent.pieces or (),
                archived=self._archived,
            ),
        )
        if sent.pieces is None:
            one.refused = 1
            one.refused_by[sent.refused_by] += 1
            return one
        one.reused, one.batches = self._compare(sent.pieces)
        one.fit = int(sent.tokens <= self._room)
        one.failed = int(sent.failed)
        one.before = script.transcript(request.length).tokens
        one.tokens = one.largest = sent.tokens
        one.cost = request_cost(self._prices, tokens=sent.tokens, cached=one.reused)
        return one

    def _compare(self, pieces: Sequence[PlannedMessage]) -> tuple[int, int]:
        """Tokens of the longest common prefix with the request before, and 1 where that one is no
        prefix of this.
        """
        array = self._script.rendered(pieces)
        same = 0
        for old, new in zip(self._sent, array, strict=False):
            if old is not new and bytes(old) != bytes(new):
                break
            same += 1
        is_batch = same < len(self._sent)
        tools = self._script.tools if self._sent else 0
        self._sent = array
        return tools + sum(piece.tokens for piece in pieces[:same]), int(is_batch)

    def count(
        self, one: Tally, request: ScriptRequest, *, unmanaged: float, sliding: float
    ) -> None:
        tally = self.tally
        if not request.counts:
            tally.retention += one.retention
            return
        if not one.refused:
            one.unmanaged = unmanaged
            one.sliding = sliding
        tally.add(one)
        if tally.batches:
            tally.peak = max(tally.peak, tally.ratio)
        else:
            tally.early = max(tally.early, tally.ratio)
