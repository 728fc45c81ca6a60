"""The words by which an exchange is remembered."""

import pytest

from policies.ledger import Action, Cut, Decision, LayerReport, WindowPressure

BASE = 100_000


def decision(
    due: int, *layers: str, new: bool = False, cut: bool = False, zone: str = "green", before: int | None = None
) -> Decision:
    """A decision on a request that would have gone up with ``due`` tokens, in which these layers were kept."""
    reports = tuple(LayerReport(layer=n, before=due, after=1000, units=2, kept=True) for n in layers)
    summary = Cut(covers=2, prefix=b"p", text="s", tokens=4, version=1, ref="r")
    return Decision(
        action=Action.EDIT if new else Action.PASS,
        pieces=None,
        before=due if before is None else before,
        due=due,
        after=1000,
        limit=BASE,
        raw_after=1000,
        pressure=WindowPressure(level=0.01, zone=zone, status="active" if new else "healthy"),
        buckets={},
        applied={},
        cut=summary if cut or new else None,
        trail=reports,
    )


@pytest.mark.requirement("A0.148")
@pytest.mark.parametrize(
    ("decided", "expected"),
    [
        (decision(49_000), "none"),
        (decision(50_000, zone="yellow"), "evaluate"),
        (decision(89_999, "evict", "compact", new=True), "evict_and_compress"),
        (decision(99_000, "evict", "compact", new=True), "evict_and_compress"),
        (decision(89_999, "compact", new=True, before=400_000), "evict_and_compress"),
        (decision(97_000, "compact", "rollover", new=True), "cross_window_save"),
    ],
)
def test_each_stage_of_management_has_its_word(decided: Decision, expected: str) -> None:
    assert decided.stage == expected


@pytest.mark.requirement("A0.148")
def test_one_of_the_last_rungs_is_an_emergency_at_any_pressure() -> None:
    rung = LayerReport(layer="clip", before=9, after=5, units=1, kept=True, rung=True)
    decided = decision(60_000, "evict", new=True)._replace(trail=(rung,))
    assert decided.stage == "emergency_compaction"


def test_the_strategy_names_the_layers_whose_work_was_kept() -> None:
    dropped = LayerReport(layer="evict", before=9, after=8, units=1, kept=False)
    decided = decision(60_000, "dedupe", "compact", "compact", new=True)
    assert decided.strategy == "dedupe+compact"
    assert decided._replace(trail=(dropped,)).strategy == ""
