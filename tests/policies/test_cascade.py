"""Layers in order: each runs only while it is needed, and only what pays is kept."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import LayerReport
from policies.limits import shape_for
from policies.messages import Transcript
from policies.settings import BALANCED_SHAPES, ContextSettings, Layer
from policies.strategies.layers import PlanWork, run_layers, run_rungs
from policies.tokens import CHARS4
from tests.policies.play import assistant, play, step, talk, user, window, words

EVICTING = tuple(replace(shape, evict=1.0) for shape in BALANCED_SHAPES)
SMALL_TALK = [m for n in range(40) for m in (user(f"{words(60)} {n}"), assistant(f"{words(60)} so {n}"))]
LOGS = [step(f"{words(900)} {n}", arguments=f'{{"n": {n}}}') for n in range(9)]
READS = [step(f"{words(900)} {n}") for n in range(9)]


def bounds(transcript: Transcript, tokens: int = 8_000, *layers: Layer) -> Bounds:
    settings = replace(ContextSettings(), shapes=EVICTING, **({"layers": layers} if layers else {}))
    return bounds_for(transcript, settings=settings, budget=window(tokens), known=ConversationState(), counter=CHARS4)


def ran(transcript: Transcript, tokens: int = 8_000, *layers: Layer) -> tuple[Draft, tuple[LayerReport, ...]]:
    work = PlanWork(untouched(transcript))
    play(run_layers(work, bounds(transcript, tokens, *layers)))
    return work.draft, work.trail


def climbed(draft: Draft, limits: Bounds) -> tuple[Draft, tuple[LayerReport, ...]]:
    work = PlanWork(draft)
    play(run_rungs(work, limits))
    return work.draft, work.trail


def names(reports: tuple[LayerReport, ...]) -> list[tuple[str, bool]]:
    return [(r.layer, r.kept) for r in reports]


@pytest.mark.requirement("A0.76", "D7")
def test_where_one_layer_is_enough_the_later_ones_do_not_run() -> None:
    _, reports = ran(talk(user("task"), *READS))
    assert names(reports) == [("ingest_cap", False), ("dedupe", True)]
    _, reports = ran(talk(user("task"), *LOGS))
    assert names(reports) == [("ingest_cap", False), ("dedupe", False), ("evict", True)]


@pytest.mark.requirement("D7")
def test_in_a_small_window_old_results_become_part_of_the_summary_rather_than_placeholders() -> None:
    readings = [step(f"{words(300)} {n}", arguments=f'{{"n": {n}}}') for n in range(50)]
    transcript, kept = talk(user("task"), *readings), dict[int, list[tuple[str, bool]]]()
    for size in (4_000, 8_192, 12_288):
        own = ContextSettings()
        limits = replace(bounds(transcript, size), settings=own, shape=shape_for(own, size))
        work = PlanWork(untouched(transcript))
        play(run_layers(work, limits))
        kept[size] = names(work.trail)
    assert kept.pop(12_288)[-1] == ("evict", True)
    assert [each[-2:] for each in kept.values()] == [[("evict", False), ("compact", True)]] * 2


@pytest.mark.requirement("A0.76")
def test_a_layer_that_saves_too_little_is_undone_and_the_next_starts_from_before_it() -> None:
    transcript = talk(user("task"), *step(words(300)), *SMALL_TALK, assistant("fine"), user("now"))
    done, reports = ran(transcript, 5_000)
    assert names(reports)[-2:] == [("evict", False), ("compact", True)]
    assert reports[-1].before == transcript.tokens
    assert done.edits == {}
    assert done.applied == {"compact": 1}
    demanding = Layer(strategy="dedupe", min_savings=0.99)
    done, reports = ran(talk(user("task"), *READS), 8_000, demanding, Layer(strategy="evict"))
    assert names(reports) == [("dedupe", False), ("evict", True)]
    assert done.applied.keys() == {"evict"}


@pytest.mark.requirement("A0.76", "D25")
def test_eviction_is_the_batch_only_if_it_lands_below_the_middle_of_low_water_and_trigger() -> None:
    transcript = talk(user("task"), *LOGS[:3], *SMALL_TALK, *SMALL_TALK[:10], assistant("fine"), user("now"))
    limits = bounds(transcript)
    middle = (limits.low_water + limits.trigger) / 2
    _, reports = ran(transcript)
    evicted = next(r for r in reports if r.layer == "evict")
    assert evicted.prunable is not None
    assert evicted.prunable >= 800
    assert evicted.before - evicted.prunable > middle
    assert not evicted.kept
    assert (evicted.after, evicted.units) == (evicted.before, 0), "no placeholder was made in vain"
    assert reports[-1].layer == "compact"
    assert reports[-1].kept
    done, reports = ran(talk(user("task"), *LOGS, *SMALL_TALK[:70], assistant("fine"), user("now")))
    assert limits.low_water < done.tokens <= middle
    assert names(reports)[-1] == ("evict", True), "what has come below the middle is not summarised as well"


@pytest.mark.requirement("D25")
@pytest.mark.parametrize(("share", "kept"), [(0.20, True), (0.99, False)])
def test_min_savings_are_a_share_of_the_window(share: float, kept: bool) -> None:
    _, reports = ran(talk(user("task"), *LOGS), 8_000, Layer(strategy="evict", min_savings=share))
    assert names(reports) == [("evict", kept)]


def test_a_layer_that_saves_nothing_is_not_kept_even_where_nothing_has_to_be_saved() -> None:
    transcript = talk(user("task"), *step("small"), user(words(7_900)))
    _, reports = ran(transcript, 8_000, Layer(strategy="evict", must_reach=1.0), Layer(strategy="dedupe"))
    assert not any(r.kept for r in reports)


@pytest.mark.requirement("D21")
def test_a_layer_with_a_target_of_its_own_stops_there() -> None:
    transcript = talk(user("task"), *LOGS)
    lazy, eager = Layer(strategy="evict", stop_at=0.99), Layer(strategy="evict", stop_at=0.10)
    assert transcript.tokens > 8_000 * 0.99
    assert names(ran(transcript, 8_000, Layer(strategy="ingest_cap", stop_at=1.1), lazy)[1]) == [("evict", True)]
    assert names(ran(transcript, 8_000, eager, eager)[1])[0] == ("evict", True)


def test_what_is_marked_dispensable_goes_before_any_layer() -> None:
    junk = user(words(6_000), keep=False)
    transcript = talk(user("task"), junk, *LOGS[:3], assistant("so"), user("now"))
    done, reports = ran(transcript)
    assert names(reports) == [("evict", True)]
    assert [p.index for p in done.pieces if p.text is not None] == [1]


@pytest.mark.requirement("A0.76")
def test_reports_say_what_each_layer_did() -> None:
    done, reports = ran(talk(user("task"), *LOGS))
    report = reports[-1]
    assert (report.layer, report.before, report.after) == ("evict", reports[0].before, done.tokens)
    assert report.units == len(done.edits) > 1
    assert report.ref is None
    done, reports = ran(talk(*SMALL_TALK, user("now")), 5_000)
    assert done.cut is not None
    assert reports[-1].ref == done.cut.ref


@pytest.mark.requirement("A2.13", "A2.25", "D15")
def test_the_rungs_are_a_harder_summary_then_dropping_then_clipping() -> None:
    transcript = talk(*SMALL_TALK, user(words(1_000)))
    limits = replace(bounds(transcript), ceiling=1_300)
    done, reports = climbed(untouched(transcript), limits)
    assert reports[0].layer == "compact"
    assert done.tokens <= 1_300
    limits = replace(limits, ceiling=900)
    done, reports = climbed(untouched(transcript), limits)
    assert [r.layer for r in reports] == ["compact", "drop_oldest", "clip"]
    assert done.tokens <= 900
    assert [r.before for r in reports[1:]] == [min(r.before, r.after) for r in reports[:-1]]


def test_under_the_limit_no_rung_is_used() -> None:
    draft = untouched(talk(user("task")))
    assert climbed(draft, bounds(draft.transcript)) == (draft, ())
