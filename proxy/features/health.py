"""The health of conversations, as far as this process knows it.

What is known is bounded and in memory. The state of a conversation is stored with its exchanges and
read from there after a restart, so that an alert that is open is not raised again.
"""

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from policies.health import LOOP, SPIKE_SHARE, Checkup, Health, Sample, Snapshot, check
from policies.ledger import Decision, WindowPressure
from policies.limits import TokenBudget
from policies.messages import Run, follow_calls
from policies.pressure import raw_buckets
from policies.settings import ContextSettings
from proxy.conversation.thread import Thread
from proxy.features.feature import Feature
from proxy.planning.values import Plan, Recognized
from proxy.store.records import ConversationRow

MAX_CONVERSATIONS = 20_000
MAX_READ = 500
Key = tuple[str, str]


class _Entry(NamedTuple):
    health: Health
    snapshot: Snapshot
    run: Run


class HealthBook(Feature):
    """The health of the conversations that were used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, _Entry] = OrderedDict()

    def check_up(
        self,
        plan: Plan,
        recognized: Recognized,
        settings: ContextSettings,
        *,
        used: int,
        evicted: int,
        at: float,
        pressure: WindowPressure,
    ) -> Checkup | None:
        """The conversation's health after a request; None for one that says nothing new.

        ``used`` are the calibrated tokens of what went up, ``pressure`` is theirs, ``evicted`` what
        a batch took out.
        """
        if not self._is_news(plan.decision, recognized):
            return None
        rules = settings.health
        thread = recognized.thread
        key = (thread.branch.tenant, thread.branch.conversation)
        known = self._known.get(key)
        before, own = (Run(), None) if known is None else (known.run, known.health)
        run = follow_calls(recognized.transcript, before, length=recognized.length, most=LOOP)
        limits = recognized.policy_limits
        decision = plan.decision
        observes = settings.observes
        reading = None if decision is None else decision.reading
        # or it took nothing out
        made = None if decision is None or observes or not decision.is_new else decision
        sample = Sample(
            at=at,
            utilization=pressure.level,
            evicted=0 if made is None else evicted,
            ratios=() if made is None else _ratios(made),
            compacted=made is not None and made.cut is not None,
            burn_rate=None if reading is None else reading.velocity_tokens_per_turn,
            spike=None if decision is None else _spike(decision, recognized),
            repeats=run.longest,
            bloat=0.0 if decision is None else _bloat(decision, recognized, settings),
            bloat_limit=(
                None if pressure.zone == "green" or _is_kept(decision, settings) else limits.bloat
            ),
            requests_left=_requests_left(decision, settings, budget=limits.budget, used=used),
            window_id=None if decision is None or observes else decision.window_id,
            due=0.0 if made is None else made.due / max(1, limits.base),
            rung=made is not None and made.needed_rung,
        )
        checkup = check(_health_of(thread, own), sample, rules)
        self._known[key] = _Entry(checkup.health, checkup.snapshot, run)
        self._known.move_to_end(key)
        if len(self._known) > MAX_CONVERSATIONS:
            self._known.popitem(last=False)
        return checkup

    def _is_news(self, decision: Decision | None, recognized: Recognized) -> bool:
        """A request that only repeats the last one is no new sample."""
        if recognized.length != len(recognized.transcript.chain) or (
            decision is not None and decision.is_new
        ):
            return True
        branch = recognized.thread.branch
        return (
            recognized.thread.health is None
            and (branch.tenant, branch.conversation) not in self._known
        )

    def forget(self, conversation: ConversationRow) -> None:
        self._known.pop((conversation.tenant, conversation.id), None)

    def read(self) -> dict[tuple[str, ...], float]:
        newest = [known.snapshot for known in islice(reversed(self._known.values()), MAX_READ)]
        found: dict[tuple[str, ...], float] = {}
        for name in METRICS:
            values = [value for each in newest if (value := getattr(each, name)) is not None]
            if values:
                found[(name,)] = sum(values) / len(values)
        return found


def _health_of(thread: Thread, own: Health | None) -> Health | None:
    """What is known of a conversation's health here, or what its store has if that is newer, which
    is taken over.
    """
    if thread.health is None:
        return own
    stored = Health.from_json(thread.health)
    thread.health = None
    return stored if own is None or (stored is not None and stored.at > own.at) else own


METRICS = tuple(name for name in Snapshot._fields if name not in {"at", "window_id"})


def _bloat(decision: Decision, recognized: Recognized, settings: ContextSettings) -> float:
    """Tool results' share of what went up: of the whole request where a plan was only observed."""
    if settings.observes and decision.pieces is not None:
        whole = recognized.transcript
        return raw_buckets(whole).get("tool_outputs", 0) / max(1, whole.tokens)
    return decision.buckets.get("tool_outputs", 0) / max(1, decision.after)


def _ratios(decision: Decision) -> tuple[float, ...]:
    return tuple(
        each.ratio
        for report in decision.trail
        if report.kept
        for each in report.condensed
        if each.original_tokens and each.compressed_tokens and not each.failure
    )


def _spike(decision: Decision, recognized: Recognized) -> float | None:
    reading = decision.reading
    before = recognized.trend.baseline
    if reading is None or not reading.spike or not decision.trend.deltas:
        return None
    if (reading.last_delta or 0) < SPIKE_SHARE * recognized.policy_limits.base:
        return None
    return decision.trend.deltas[-1] / max(1.0, before or 0.0)


def _is_kept(decision: Decision | None, settings: ContextSettings) -> bool:
    """Whether layers keep the conversation in its window: no rung was needed."""
    return _is_managed(settings) and decision is not None and not decision.needed_rung


def _is_managed(settings: ContextSettings) -> bool:
    return not settings.observes and settings.manages


def _requests_left(
    decision: Decision | None, settings: ContextSettings, *, budget: TokenBudget, used: int
) -> float | None:
    """Until the window overflows at the conversation's velocity; 0 for a request that does not fit,
    or needed a rung.

    None where nothing grows, and where layers keep the conversation in its window.
    """
    if _is_managed(settings) and decision is not None:
        return 0.0 if decision.needed_rung else None
    room = budget.window - budget.reserve - used
    if budget.max_input is not None:
        room = min(room, budget.max_input - used)
    if room < 0:
        return 0.0
    if decision is None:
        return None
    speed = None if decision.reading is None else decision.reading.velocity_tokens_per_turn
    return room / speed if speed is not None and speed > 0 else None
