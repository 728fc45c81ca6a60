"""Recorded conversations played through policies as a client would send them to a Weir, without a model.

Every request of a recording goes through one scenario per policy, one unmanaged and one with a sliding window. What
each forwards is compared with what it forwarded before, as a provider's prompt cache does, and priced.
"""

from proxy.replay.compactions import Compaction, Evaluated, archived_pair, compactions_of, judge_compaction
from proxy.replay.play import Refusals, Replayed, ScenarioResult, Step, Tally, replay
from proxy.replay.recordings import BadRecording, Fact, Place, Recording, read_recordings, recording_of
from proxy.replay.report import COLUMNS, ReplayReport, remarks, render_report, table_row
from proxy.replay.scenarios import (
    SLIDING,
    UNMANAGED,
    Conditions,
    Forwarded,
    Managed,
    Refusal,
    SlidingWindow,
    store_in_memory,
)
from proxy.replay.script import Retention, Script, judge
from proxy.replay.traffic import TrafficCount, advice_for, advised, pace_of

__all__ = [
    "COLUMNS",
    "SLIDING",
    "UNMANAGED",
    "BadRecording",
    "Compaction",
    "Conditions",
    "Evaluated",
    "Fact",
    "Forwarded",
    "Managed",
    "Place",
    "Recording",
    "Refusal",
    "Refusals",
    "ReplayReport",
    "Replayed",
    "Retention",
    "ScenarioResult",
    "Script",
    "SlidingWindow",
    "Step",
    "Tally",
    "TrafficCount",
    "advice_for",
    "advised",
    "archived_pair",
    "compactions_of",
    "judge",
    "judge_compaction",
    "pace_of",
    "read_recordings",
    "recording_of",
    "remarks",
    "render_report",
    "replay",
    "store_in_memory",
    "table_row",
]
