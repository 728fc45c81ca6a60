"""How well a conversation is kept: six metrics folded over its requests, and the alerts that follow from them.

::

    utilization        forwarded tokens over the policy's base                      healthy under 60 %
    eviction_rate      messages evicted or shortened a request, mean of the newest 5       under 2
    compression_ratio  tokens before over tokens after, mean of the newest 3 condensings   3 to 15
    burn_rate          tokens that a request adds, as the trend's velocity has it          steady
    fidelity           share of questions that a summary still answers; None until asked   over .85
    tool_bloat         tool results' share of the forwarded tokens                         10 to 15 %

A request that only repeats the one before is no request here. An alert is one *episode*: it opens with the request at
which its rule begins to hold and closes with the first at which it does not. What has to be *sustained* holds for
several requests, so that neither a single one nor a single large batch raises it: a batch is how Weir works, not a sign
that the window is too small. ``critical`` is an overflow within a request or two, ``warning`` something that gets worse
(``degradation``) or is unusual (``anomaly``), ``info`` a metric outside its healthy range that is no problem yet.

The rules are the table :data:`RULES`; their thresholds are a policy's :class:`HealthRules`.
"""

from policies.health.alerts import (
    KINDS,
    RULES,
    Alert,
    Category,
    Level,
)
from policies.health.checkup import Checkup, check
from policies.health.metrics import KEPT, Episode, Health, HealthRules, Sample, Snapshot
from policies.health.trend import HealthTrend, trend_of

__all__ = [
    "KEPT",
    "KINDS",
    "RULES",
    "Alert",
    "Category",
    "Checkup",
    "Episode",
    "Health",
    "HealthRules",
    "HealthTrend",
    "Level",
    "Sample",
    "Snapshot",
    "check",
    "trend_of",
]
