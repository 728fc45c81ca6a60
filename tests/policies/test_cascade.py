"""Layers in order: each runs only while it is needed, and only what pays is kept."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import LayerReport
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
