"""What one more request makes of a conversation's health: the metrics after it, the alerts that open and close."""

from typing import NamedTuple

from policies.health.alerts import RULES, Alert
from policies.health.metrics import Episode, Health, HealthRules, Sample, Snapshot


class Checkup(NamedTuple):
    """What one request made of a conversation's health.

    ``opened`` are the alerts that begin with it, ``closed`` the episodes that end with it. ``is_first`` says that
    nothing was known of the conversation before. ``sample`` and ``rules`` are what it was made from, so that it can be
    made again from what others know of the conversation.
    """

    health: Health
    snapshot: Snapshot
    opened: tuple[Alert, ...] = ()
    closed: tuple[Episode, ...] = ()
    is_first: bool = False
    sample: Sample | None = None
    rules: HealthRules | None = None

    @property
    def is_critical(self) -> bool:
        """Whether an alert of the highest level begins here."""
        return any(alert.level == "critical" for alert in self.opened)


def check(health: Health | None, sample: Sample, rules: HealthRules) -> Checkup:
    """The conversation after one more request; None is one of which nothing is known."""
    known = health if health is not None else Health()
    number = known.requests + 1
    compactions = (*known.compactions, number) if sample.compacted else known.compactions
    if compactions and compactions[0] <= number - rules.compaction_window:
        compactions = tuple(each for each in compactions if each > number - rules.compaction_window)
    ratios = (*known.ratios, *sample.ratios)[-rules.compressions :] if sample.ratios else known.ratios
    after = Health(
        number,
        sample.at,
        known.above + 1 if sample.utilization > rules.utilization else 0,
        (*known.evicted, sample.evicted)[-rules.eviction_window :],
        ratios,
        compactions,
        known.fidelity,
        known.window_id if sample.window_id is None else sample.window_id,
        known.episodes,
    )
    opened, episodes = _judge(after, sample, rules)
    if episodes != known.episodes:
        after = after._replace(episodes=episodes)
    closed = tuple(each for each in known.episodes if each not in episodes) if known.episodes else ()
    return Checkup(after, _snapshot(after, sample), opened, closed, health is None, sample, rules)


def _judge(health: Health, sample: Sample, rules: HealthRules) -> tuple[tuple[Alert, ...], tuple[Episode, ...]]:
    """The alerts that begin, and the episodes that are open after the request."""
    if not health.episodes and _is_quiet(health, sample, rules):
        return (), ()
    before, opened, episodes = dict(health.episodes), list[Alert](), list[Episode]()
    for rule in RULES:
        finding = rule.holds(health, sample, rules)
        if finding is None:
            continue
        since = before.get(rule.kind)
        if since is None:
            since = sample.at
            said = rule.said.format(value=finding.value, limit=finding.limit)
            opened.append(Alert(rule.kind, rule.level, rule.category, since, finding.value, finding.limit, said))
        episodes.append(Episode(rule.kind, since))
    return tuple(opened), tuple(episodes)


def _is_quiet(health: Health, sample: Sample, rules: HealthRules) -> bool:
    """Whether no rule can hold, seen at a glance: most requests are of this kind."""
    if health.above or health.ratios or health.compactions or health.fidelity is not None or any(health.evicted):
        return False
    if sample.spike is not None or sample.requests_left is not None or sample.repeats >= rules.loop:
        return False
    return sample.bloat_limit is None or sample.bloat <= sample.bloat_limit


def _snapshot(health: Health, sample: Sample) -> Snapshot:
    return Snapshot(
        sample.at,
        sample.utilization,
        health.eviction_rate,
        health.compression_ratio,
        sample.burn_rate,
        health.fidelity,
        sample.bloat,
        health.window_id,
    )
