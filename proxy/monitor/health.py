"""What each exchange says of its conversation's health, and what this process knows of that; bounded, in memory.

The state of a conversation is stored with its exchanges (:mod:`proxy.store.memory`) and taken over from there after a
restart, so that an alert that is open is not raised again.
"""

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from policies import ContextSettings, Decision, WindowPressure
from policies.ledger import EditKind
from policies.limits import Limits, raw_buckets
from policies.quality.health import Checkup, Health, Sample, Snapshot, check
from policies.settings import HealthRules
from policies.turns import Run
from proxy.conversation.thread import Thread
from proxy.planning.values import Recognized

MAX_CONVERSATIONS = 20_000
MAX_READ = 500
ROOMY = "green"

Key = tuple[str, str]


class _Entry(NamedTuple):
    health: Health
    snapshot: Snapshot
    run: Run


class HealthBook:
    """The health of the conversations that this process has served lately."""

    def __init__(self, *, most: int = MAX_CONVERSATIONS) -> None:
        self._most = most
        self._known: OrderedDict[Key, _Entry] = OrderedDict()

    def is_news(self, decision: Decision | None, recognized: Recognized) -> bool:
        """Whether a request says anything new of its conversation: one that only repeats the last one does not."""
        if recognized.match.length != len(recognized.transcript.chain) or (decision is not None and decision.is_new):
            return True
        branch = recognized.branch
        return recognized.thread.health is None and (branch.tenant, branch.conversation) not in self._known

    def run_of(self, thread: Thread) -> Run:
        """The newest calls of a conversation, as far as this process has seen them."""
        known = self._known.get((thread.branch.tenant, thread.branch.conversation))
        return Run() if known is None else known.run

    def see(self, thread: Thread, sample: Sample, rules: HealthRules, *, run: Run) -> Checkup:
        """What one more request makes of a conversation's health; ``run`` are its newest calls."""
        key = (thread.branch.tenant, thread.branch.conversation)
        checkup = check(self._health(key, thread), sample, rules)
        self._known[key] = _Entry(checkup.health, checkup.snapshot, run)
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return checkup

    def rate(self, tenant: str, conversation: str, fidelity: float) -> bool:
        """Have an evaluated fidelity (0 to 1) hold from the conversation's next request on; False if it is unknown."""
        known = self._known.get((tenant, conversation))
        if known is None:
            return False
        self._known[(tenant, conversation)] = known._replace(health=known.health._replace(fidelity=fidelity))
        return True

    def forget(self, tenant: str, conversation: str) -> None:
        """Know nothing of a conversation any more."""
        self._known.pop((tenant, conversation), None)

    def read(self) -> dict[tuple[str, ...], float]:
        """Each metric's mean over the 500 conversations that were served last; none that nobody has measured."""
        newest = [known.snapshot for known in islice(reversed(self._known.values()), MAX_READ)]
        found: dict[tuple[str, ...], float] = {}
        for name in METRICS:
            values = [value for each in newest if (value := getattr(each, name)) is not None]
            if values:
                found[(name,)] = sum(values) / len(values)
        return found

    def _health(self, key: Key, thread: Thread) -> Health | None:
        """What is known of a conversation: by this process, or by the store if that is newer."""
        known = self._known.get(key)
        own = None if known is None else known.health
        if thread.health is None:
            return own
        stored, thread.health = Health.from_json(thread.health), None
        return stored if own is None or (stored is not None and stored.at > own.at) else own


METRICS = tuple(name for name in Snapshot._fields if name not in {"at", "window_id"})


def sample_of(
    decision: Decision | None,
    recognized: Recognized,
    settings: ContextSettings,
    *,
    limits: Limits,
    used: int,
    pressure: WindowPressure,
    evicted: int,
    repeats: int,
    at: float,
) -> Sample:
    """What a request says of its conversation's health.

    ``used`` are the calibrated tokens of what went up and ``pressure`` is theirs; ``evicted`` messages were newly taken
    out, and its newest call was made ``repeats`` times in a row. What was only observed took nothing out.
    """
    acted = decision is not None and decision.is_new and not settings.observes
    bloat = 0.0 if decision is None else _bloat(decision, recognized, settings)
    read = None if decision is None else decision.reading
    return Sample(
        at=at,
        utilization=pressure.level,
        evicted=evicted if acted else 0,
        ratios=_ratios(decision) if acted and decision is not None else (),
        compacted=acted and decision is not None and decision.cut is not None,
        burn_rate=None if read is None else read.velocity_tokens_per_turn,
        spike=None if decision is None else _spike(decision, recognized, settings, limits),
        repeats=repeats,
        bloat=bloat,
        bloat_limit=None if pressure.zone == ROOMY else limits.bloat,
        requests_left=_requests_left(decision, settings, limits=limits, used=used),
        window_id=None if decision is None or settings.observes else decision.window_id,
    )


def _bloat(decision: Decision, recognized: Recognized, settings: ContextSettings) -> float:
    """Tool results' share of what went up: of the whole request where a plan was only observed."""
    if settings.observes and decision.pieces is not None:
        whole = recognized.transcript
        return raw_buckets(whole).get("tool_outputs", 0) / max(1, whole.tokens)
    return decision.buckets.get("tool_outputs", 0) / max(1, decision.after)


def _ratios(decision: Decision) -> tuple[float, ...]:
    """How many times shorter each message, or history, became that was condensed and is kept so."""
    return tuple(
        each.ratio
        for report in decision.trail
        if report.kept
        for each in report.condensed
        if each.original_tokens and each.compressed_tokens and not each.failure
    )


def _spike(decision: Decision, recognized: Recognized, settings: ContextSettings, limits: Limits) -> float | None:
    """How many times the baseline a growth is that is a spike and takes a share of the window worth speaking of."""
    reading, before = decision.reading, recognized.trend.baseline
    if reading is None or not reading.spike or not decision.trend.deltas:
        return None
    if (reading.last_delta or 0) < settings.health.spike_share * limits.base:
        return None
    return decision.trend.deltas[-1] / max(1.0, before or 0.0)


def _requests_left(decision: Decision | None, settings: ContextSettings, *, limits: Limits, used: int) -> float | None:
    """Requests until the window overflows at the conversation's velocity; 0 for one that does not fit.

    None where nothing grows, and where a layer acts before: below the trigger of a policy that manages, but for what
    was brought back.
    """
    budget = limits.budget
    room = budget.window - budget.reserve - used
    if budget.max_input is not None:
        room = min(room, budget.max_input - used)
    if room < 0:
        return 0.0
    manages = not settings.observes and settings.when_full == "manage"
    if decision is None:
        return None
    brought_back = sum(report.after - report.before for report in decision.trail if report.layer == EditKind.RECALL)
    if manages and decision.raw_after - brought_back <= limits.trigger:
        return None
    speed = None if decision.reading is None else decision.reading.velocity_tokens_per_turn
    return room / speed if speed is not None and speed > 0 else None
