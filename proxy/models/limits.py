"""The limits of a model on one upstream: what every source says of its window, and what was learned
from the upstream.

Limits are per scope: the upstream's origin, the model, and whose account it is, because the same
model name has another window on another account. Learned are limits of every kind that an upstream
refuses by (tokens, images, entries, bytes), whether it counts the answer into the window, whether
it binds thinking to what it was signed for, and the ratio of reported to estimated tokens.

An error that names the limit is believed; a window below what has passed lately only for the
request that it refused, until it is named again: one name may have several servers. An error
without a number is narrowed down between the most that passed and the least that was refused: after
one refusal the next request may come close to what failed, after a second it stays within what has
passed. When the time is up, or more has passed, the search begins anew.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from policies.limits import FLOOR_PARTS, RECALLED_PARTS, Calibration, TokenBudget, amount, divide
from policies.loads import KINDS, NO_LIMITS
from policies.settings import ContextSettings
from proxy.access.destination import Caller
from proxy.config.values import UpstreamSettings
from proxy.conversation.thread import Thread
from proxy.models.facts import ModelFacts, ModelRegistry, Probe, plain_name
from proxy.store.records import CalibrationRow, LimitRow, StoreError

TOKENS = "tokens"
COUNTED_IN = "completion"
"""The upstream counts the answer into the window, and refuses what could not be answered at full
length.
"""
BINDING = "binding"
"""The model signs what it thinks for what precedes it."""


class Write(Protocol):
    async def __call__(
        self, *, calibrations: Sequence[CalibrationRow], limits: Sequence[LimitRow]
    ) -> None: ...


class LearnedLimits:
    """Of each scope and kind the most that its upstream takes, until that expires.

    Kinds are those of refusals (``proxy.upstream.overflow``), and facts without a number, whose
    limit is 0. Times are seconds since the epoch.
    """

    MIN_LIMIT = 256  # tokens
    ONCE = 3600.0
    CONFIRMED = 24 * 3600.0
    DOUBTED = 600.0
    LASTING = 30 * 24 * 3600.0
    UNTRIED = 1 / 3  # of what failed twice, where nothing is known to have passed

    def __init__(self, rows: Iterable[LimitRow] = (), *, most: int = 10_000) -> None:
        self._most = most
        self._rows = {(row.scope, row.kind): row for row in rows}
        self._inferred: set[tuple[str, str]] = set()
        self._doubted: dict[tuple[str, str], tuple[int, float]] = {}
        self._passed: OrderedDict[tuple[str, str], int] = OrderedDict()

    def learn(self, scope: str, limit: int, *, now: float, kind: str = TOKENS) -> LimitRow | None:
        """The row that now holds: an hour after one error, a day once a second one agrees; None if
        implausible.

        While a smaller limit lasts, a larger one changes nothing. A window below what has passed is
        believed the second time that it is named, and for ten minutes: until then it is None.
        """
        key = scope, kind
        if isinstance(limit, bool) or limit < (self.MIN_LIMIT if kind == TOKENS else 0):
            return None
        if key in self._inferred:
            self._inferred.discard(key)
            self._rows.pop(key, None)
        held = self._live(key, now)
        if held is not None and held.limit < limit:
            return held
        if kind == TOKENS and limit < self._passed.get(key, 0):
            return self._doubt(key, limit, now)
        agreed = held is not None and held.limit == limit
        seen = held.seen + 1 if held is not None and agreed else 1
        lasts = self.CONFIRMED if agreed or kind != TOKENS else self.ONCE
        return self._put(
            LimitRow(scope=scope, kind=kind, limit=limit, seen=seen, expires=now + lasts), now
        )

    def know(self, scope: str, kind: str, *, now: float) -> LimitRow:
        """The row for a fact without a number."""
        return self._put(
            LimitRow(scope=scope, kind=kind, limit=0, seen=1, expires=now + self.LASTING), now
        )

    def _doubt(self, key: tuple[str, str], limit: int, now: float) -> LimitRow | None:
        named, at = self._doubted.pop(key, (0, 0.0))
        if named != limit or now - at > self.DOUBTED:
            if len(self._doubted) >= self._most:
                self._doubted.clear()
            self._doubted[key] = (limit, now)
            return None
        self._passed.pop(key)
        scope, kind = key
        return self._put(
            LimitRow(scope=scope, kind=kind, limit=limit, seen=2, expires=now + self.DOUBTED), now
        )

    def refused(
        self, scope: str, amount: int, *, now: float, kind: str = TOKENS
    ) -> LimitRow | None:
        """The row that holds after a refusal without a number of a request of such an ``amount``.

        None where nothing follows from it: as much has passed, or a smaller limit is known.
        """
        key = scope, kind
        least = self.MIN_LIMIT if kind == TOKENS else 0
        passed = self._passed.get(key, 0)
        guessed = key in self._inferred
        held = self._live(key, now)
        is_known = held is not None and held.limit < amount and not guessed
        if is_known or amount <= max(passed, least):
            return None
        refusals = held.seen + 1 if held is not None and guessed else 1
        limit = amount - 1 if refusals == 1 else passed or int(amount * self.UNTRIED)
        self._inferred.add(key)
        row = LimitRow(
            scope=scope, kind=kind, limit=max(limit, least), seen=refusals, expires=now + self.ONCE
        )
        return self._put(row, now)

    def largest(self, scope: str) -> int:
        return self._passed.get((scope, TOKENS), 0)

    def passed(self, scope: str, amount: int, *, kind: str = TOKENS) -> None:
        """This amount was answered: a smaller limit is no longer valid."""
        key = scope, kind
        if amount <= self._passed.get(key, 0):
            return
        self._passed[key] = amount
        self._passed.move_to_end(key)
        if len(self._passed) > self._most:
            self._passed.popitem(last=False)
        if key in self._rows and self._rows[key].limit < amount:
            self._inferred.discard(key)
            del self._rows[key]

    def follow(self, rows: Iterable[LimitRow]) -> bool:
        known = {(row.scope, row.kind): row for row in rows}
        news = {key: row for key, row in known.items() if row.limit >= self._passed.get(key, 0)}
        newer = {
            key: row
            for key, row in news.items()
            if (own := self._rows.get(key)) is None or own.expires < row.expires
        }
        self._rows |= newer
        return bool(newer)

    def get(self, scope: str, *, now: float, kind: str = TOKENS) -> int | None:
        row = self._live((scope, kind), now)
        return row.limit if row is not None else None

    def drop(self, scope: str) -> None:
        for each in (self._rows, self._passed, self._doubted):
            for key in [key for key in each if key[0] == scope]:
                del each[key]
        self._inferred = {key for key in self._inferred if key[0] != scope}

    def rows(self, *, now: float) -> tuple[LimitRow, ...]:
        return tuple(row for row in self._rows.values() if row.expires > now)

    def _put(self, row: LimitRow, now: float) -> LimitRow:
        key = row.scope, row.kind
        self._rows.pop(key, None)
        self._rows[key] = row
        if len(self._rows) > self._most:
            kept = self.rows(now=now)[-self._most :]
            self._rows = {(each.scope, each.kind): each for each in kept}
            self._inferred &= self._rows.keys()
        return row

    def _live(self, key: tuple[str, str], now: float) -> LimitRow | None:
        row = self._rows.get(key)
        return row if row is not None and row.expires > now else None


log = logging.getLogger("weir.windows")

MAX_SCOPES = 10_000
ACCOUNT_DIGITS = 16  # of a tenant's 32
MIN_SAMPLE = 400  # under it a template's fixed preamble outweighs the text
LAST_RESORT_FLOOR = 16_384
HELD_FOR = 2.0
# by which a ratio moves at least: half of the margin that is kept for such errors anyway
STEP = 0.01
SAVED_WITHIN = 0.25
TRUNCATED = 0.1
"""Share of an estimate that no answered prompt has reached, for the usage to be that of a truncated
one.
"""
GROWN = 0.1
BELOW_WINDOW = 1 / 8
TIMES_NEW = 3  # estimates are not calibrated here: the usage may have spoilt that
UNKNOWN_WINDOW = 128_000  # four times 32K, the usual output limit
KNOWN_HOSTS = (
    ".openai.com",
    ".azure.com",
    ".anthropic.com",
    ".googleapis.com",
    ".mistral.ai",
    ".x.ai",
)
UNSURE = frozenset({"last_resort", "unknown"})


class ModelLimits(msgspec.Struct, frozen=True):
    """``counted`` is the scope of the calibration: estimators that count differently are not
    calibrated together.

    ``believed`` are the tokens that the model takes at the most, whatever a policy makes of them
    for one request: what is decided for one such number holds for it alone. ``most`` has what the
    upstream takes other than tokens, by kind.
    """

    budget: TokenBudget
    facts: ModelFacts
    scope: str
    counted: str
    believed: int
    most: Mapping[str, int] = NO_LIMITS

    def may_fit(self, tokens: int) -> bool:
        """Whether this amount fits if the count is exact, or only the upstream knows."""
        budget = self.budget
        used = self.budget.estimate(tokens)
        room = min(budget.window - budget.reserve, budget.max_input or budget.window)
        return used <= room or self.facts.source in UNSURE

    def within(self, window: int) -> "ModelLimits":
        """The limits of one request that met a smaller window than is believed."""
        budget = self.budget
        if window >= budget.window:
            return self
        smaller = replace(
            budget,
            window=window,
            reserve=min(budget.reserve, max(1, window // 4)),
            floor=min(budget.floor, window // FLOOR_PARTS),
            headroom=min(budget.headroom, window // RECALLED_PARTS),
            max_input=budget.max_input
            if budget.max_input is not None and budget.max_input < window
            else None,
            caps={name: cap * window // budget.window for name, cap in budget.caps.items()},
        )
        return msgspec.structs.replace(self, budget=smaller, believed=min(self.believed, window))


class Drift(msgspec.Struct, frozen=True):
    predicted: int
    reported: int

    @property
    def ratio(self) -> float:
        return self.reported / max(1, self.predicted)


def account_of(upstream: UpstreamSettings, caller: Caller) -> str:
    """Whose account at an upstream: the caller's where its credential goes up, however often that
    is a new one.
    """
    is_own = upstream.passes_key and caller.credential
    return f"{upstream.origin} {caller.tenant[:ACCOUNT_DIGITS] if is_own else '-'}"


@dataclass(slots=True)
class ModelLimitsResolver:
    registry: ModelRegistry
    limits: LearnedLimits
    probe: Probe
    fetch: Callable[[UpstreamSettings, Caller, str, bytes | None], Awaitable[tuple[int, bytes]]]
    clock: Callable[[], float] = time.time
    write: Write | None = None
    _saving: asyncio.Task[None] | None = None
    _calibrations: OrderedDict[str, Calibration] = field(default_factory=OrderedDict)
    _observed: dict[str, Calibration] = field(default_factory=dict)
    _unsaved: set[str] = field(default_factory=set)
    _drifts: dict[str, Drift] = field(default_factory=dict)
    _learned: dict[tuple[str, str], LimitRow] = field(default_factory=dict)
    _held: dict[tuple[object, ...], tuple[float, ModelLimits, ContextSettings]] = field(
        default_factory=dict
    )

    def learned(self) -> tuple[LimitRow, ...]:
        return self.limits.rows(now=self.clock())

    def forget(self, scope: str) -> None:
        self.limits.drop(scope)
        self._learned = {key: row for key, row in self._learned.items() if row.scope != scope}
        self._held.clear()

    def follow(
        self, calibrations: Iterable[CalibrationRow], limits: Iterable[LimitRow] = ()
    ) -> None:
        """Take over what is stored, as far as other processes have seen more."""
        for row in calibrations:
            own = self._calibrations.get(row.scope)
            if own is not None and own.samples >= row.samples:
                continue
            self._held.clear()
            self._calibrations[row.scope] = Calibration.restore(
                ratio=row.ratio, samples=row.samples, recent=row.recent, drift=row.drift
            )
            self._observed.pop(row.scope, None)
        if self.limits.follow(limits):
            self._held.clear()

    def scope(self, model: str, *, upstream: UpstreamSettings, caller: Caller) -> str:
        return f"{account_of(upstream, caller)} {model}"

    async def resolve_limits(
        self,
        model: str,
        *,
        settings: ContextSettings,
        upstream: UpstreamSettings,
        caller: Caller,
        max_tokens: int | None,
        exact: bool = True,
    ) -> ModelLimits:
        """Queries the upstream for its window where no other source has it.

        The last result is reused for a moment, unless something was learned since.
        """
        key = (
            model,
            max_tokens,
            id(settings),
            upstream.name,
            caller.tenant,
            bool(caller.credential),
            exact,
        )
        held = self._held.get(key)
        now = self.clock()
        if held is not None and held[0] > now:
            return held[1]
        await self._saved()
        scope = self.scope(model, upstream=upstream, caller=caller)
        learned = self.limits.get(scope, now=now)
        facts = await self._facts(model, settings, upstream, caller, learned, max_tokens)
        counted = scope if settings.estimator == "tokenizer" else f"{scope} {settings.estimator}"
        calibration = self._calibrations.get(counted) or Calibration()
        budget = divide(
            settings,
            window=_window_for(settings, facts, max_tokens),
            max_input=facts.max_input,
            max_output=facts.max_output,
            requested=max_tokens,
            ratio=calibration.ratio,
            margin=calibration.margin(settings.margin, exact=exact),
            reported=calibration.samples > 0,
        )
        known = _known(settings, facts)
        believed = known if facts.max_input is None else min(known, facts.max_input)
        limits = ModelLimits(budget, facts, scope, counted, believed, self._most(scope, now))
        if len(self._held) >= MAX_SCOPES:
            self._held.clear()
        # these, so that their identity stays theirs
        self._held[key] = now + HELD_FOR, limits, settings
        return limits

    async def _facts(
        self,
        model: str,
        settings: ContextSettings,
        upstream: UpstreamSettings,
        caller: Caller,
        learned: int | None,
        max_tokens: int | None,
    ) -> ModelFacts:
        key = account_of(upstream, caller)

        def merged(limit: int | None) -> ModelFacts:
            stated = self.probe.known(key, plain_name(model))
            facts = self.registry.facts(
                model, settings=settings, upstream_facts=stated, max_tokens=limit
            )
            return limited(replace(facts, window=_window(facts)), learned)

        if settings.window is not None or learned is not None or not _worth_asking(upstream):
            return merged(max_tokens)
        is_due = self.probe.is_due(key)
        fetch = partial(self.fetch, upstream, caller)
        facts = merged(None if is_due else max_tokens)
        if is_due and (facts.source in UNSURE or not self.probe.has_answered(key)):
            await self.probe.ask(key, upstream.base_url or "", plain_name(model), fetch)
            return merged(max_tokens)
        if facts.source != "rule":
            self.probe.ask_later(key, upstream.base_url or "", plain_name(model), fetch)
        return facts

    def _most(self, scope: str, now: float) -> Mapping[str, int]:
        named = ((kind, self.limits.get(scope, now=now, kind=kind)) for kind in KINDS)
        return {kind: most for kind, most in named if most is not None} or NO_LIMITS

    def know(self, scope: str, kind: str) -> None:
        """Remember a fact without a number of a model on an upstream."""
        if not self.knows(scope, kind):
            self._keep(self.limits.know(scope, kind, now=self.clock()))

    def knows(self, scope: str, kind: str) -> bool:
        return self.limits.get(scope, now=self.clock(), kind=kind) is not None

    def binds(self, model: str, *, upstream: UpstreamSettings, caller: Caller) -> bool:
        """Whether the model was seen to sign what it thinks for what precedes it."""
        return self.knows(self.scope(model, upstream=upstream, caller=caller), BINDING)

    def learn(self, scope: str, limit: int, kind: str = TOKENS) -> bool:
        """Whether the limit holds from now on."""
        self._held.clear()
        row = self.limits.learn(scope, limit, now=self.clock(), kind=kind)
        self._keep(row)
        return row is not None

    def learn_cut(self, scope: str, window: int, *, counted: str) -> None:
        """A window in which the upstream cuts in silence, as two requests have shown; what it
        counted was not all.
        """
        for _ in range(2):
            self.learn(scope, window)
        self._calibrations.pop(counted, None)
        self._observed.pop(counted, None)
        self._save_soon(counted)

    def refused(self, scope: str, amount: int, kind: str = TOKENS) -> None:
        self._held.clear()
        self._keep(self.limits.refused(scope, amount, now=self.clock(), kind=kind))

    def is_too_little(self, known: ModelLimits, sent: int, prompt: int) -> bool:
        """Whether a request is longer than any that was answered, and its usage is not: a window
        ends there.
        """
        most = (1.0 - TRUNCATED) * known.budget.estimate(sent)
        return known.budget.reported and prompt <= self.limits.largest(known.scope) < most

    def _keep(self, row: LimitRow | None) -> None:
        if row is not None:
            self._learned[row.scope, row.kind] = row
            self._save_soon()

    def calibrate(self, scope: str, *, estimated: int, reported: int) -> Calibration:
        """Note a response. The ratio used for planning moves in steps, each stored before it is
        used: a request that is sent again after a crash is planned identically.
        """
        used = self._calibrations.get(scope) or Calibration()
        before = self._observed.get(scope, used)
        if estimated < MIN_SAMPLE:
            return used
        after = self._observed[scope] = before.observe(estimated, reported)
        if after.is_drifting and not before.is_drifting and len(self._drifts) < MAX_SCOPES:
            self._drifts[scope] = Drift(used.apply(estimated), reported)
        moved = abs(after.ratio / used.ratio - 1.0) > STEP
        if moved or after.is_calibrated != used.is_calibrated or after.samples == 1:
            self._calibrations[scope] = after
            self._calibrations.move_to_end(scope)
            self._held.clear()
            self._save_soon(scope)
        if len(self._calibrations) > MAX_SCOPES:
            forgotten, _ = self._calibrations.popitem(last=False)
            self._observed.pop(forgotten, None)
        return after

    def take_drift(self, scope: str) -> Drift | None:
        """Reported once: it begins with the first response that deviates and ends with the next one
        that does not.
        """
        return self._drifts.pop(scope, None) if self._drifts else None

    @property
    def has_learned(self) -> bool:
        return bool(self._learned or self._unsaved)

    def unsaved(self) -> tuple[list[CalibrationRow], list[LimitRow]]:
        known = ((scope, self._calibrations.get(scope) or Calibration()) for scope in self._unsaved)
        rows = [CalibrationRow(scope=scope, **asdict(calibration)) for scope, calibration in known]
        return rows, list(self._learned.values())

    async def save(self) -> bool:
        """False where it cannot be stored now, and waits for the next time."""
        if self.write is None or not self.has_learned:
            return True
        calibrations, limits = self.unsaved()
        scopes = self._unsaved
        self._unsaved = set()
        learned = self._learned
        self._learned = {}
        try:
            await self.write(calibrations=calibrations, limits=limits)
        except StoreError as error:
            log.warning("what upstreams taught could not be stored: %s", error)
            self._unsaved |= scopes
            self._learned = learned | self._learned
            return False
        return True

    def _save_soon(self, scope: str | None = None) -> None:
        if scope is not None:
            self._unsaved.add(scope)
        if self.write is not None and (self._saving is None or self._saving.done()):
            self._saving = asyncio.create_task(self._save_all(), name="weir-learned")

    async def _save_all(self) -> None:
        while self.has_learned and await self.save():
            pass

    async def _saved(self) -> None:
        if self._saving is not None and not self._saving.done():
            await asyncio.wait({self._saving}, timeout=SAVED_WITHIN)


def cut_at(prompt: int, *, new: int) -> int | None:
    """The window in which a server may have cut a prompt on its own (Ollama), None where it may
    not.

    One that cuts leaves out whole messages: what it has read ends just below its window, and is
    more than what is new.
    """
    window = 1 << max(0, prompt - 1).bit_length()
    return window if prompt >= (1.0 - BELOW_WINDOW) * window and prompt > TIMES_NEW * new else None


def stays_cut(thread: Thread, prompt: int, sent: int, window: int) -> bool:
    """Whether what a server reads of a conversation stays the same, just below one window, while
    that grows.
    """
    first, before = thread.still or (0, 1)
    growth = sent / before - 1.0 if window // 2 < first <= window else -1.0
    if growth < 0.0 or (growth >= GROWN and prompt > first * (1.0 + growth / 4)):
        thread.still = (prompt, sent)
        return False
    return growth >= GROWN


def _window_for(settings: ContextSettings, facts: ModelFacts, max_tokens: int | None) -> int:
    """A policy may make it a multiple of the output reserve, within what is known."""
    known = _known(settings, facts)
    factor = settings.window_per_output
    if factor is None or settings.window is not None:
        return known
    wanted = factor * (max_tokens or amount(settings.reserve, known) or known)
    return wanted if facts.source in UNSURE else min(wanted, known)


def _known(settings: ContextSettings, facts: ModelFacts) -> int:
    """Where no source has the window, it is the one that the policy was designed for."""
    is_unsure = facts.source in UNSURE
    return (
        settings.designed_for
        if is_unsure and settings.designed_for
        else facts.window or UNKNOWN_WINDOW
    )


def _window(facts: ModelFacts) -> int:
    if facts.window is None:
        return UNKNOWN_WINDOW
    if facts.source == "last_resort":
        return max(facts.window, LAST_RESORT_FLOOR)
    return facts.window


def limited(facts: ModelFacts, learned: int | None) -> ModelFacts:
    """A learned limit that only repeats the input limit adds nothing."""
    if learned is None or (facts.max_input is not None and facts.max_input == learned):
        return facts
    if facts.window is not None and facts.window <= learned:
        return facts
    max_input = (
        facts.max_input if facts.max_input is not None and facts.max_input < learned else None
    )
    return replace(facts, window=learned, max_input=max_input, source="learned")


def _worth_asking(upstream: UpstreamSettings) -> bool:
    host = urlsplit(upstream.base_url or "").hostname
    return upstream.kind == "openai" and host is not None and not f".{host}".endswith(KNOWN_HOSTS)
