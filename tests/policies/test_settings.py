import dataclasses

import pytest

from policies.settings import BALANCED_LAYERS, BALANCED_SHAPES, ContextSettings, Layer, Mode, Zones

BALANCED = ContextSettings()


@pytest.mark.parametrize(
    ("window", "shape"),
    [(1, 0), (4_096, 0), (6_144, 0), (6_145, 1), (8_192, 1), (16_384, 1), (16_385, 2), (65_536, 2), (65_537, 3)],
)
def test_the_window_chooses_the_shape(window: int, shape: int) -> None:
    assert BALANCED.shape_for(window) is BALANCED_SHAPES[shape]


@pytest.mark.requirement("D21")
def test_balanced_has_the_numbers_that_were_simulated() -> None:
    rows = [(s.trigger, s.low_water, s.extract, s.tail) for s in BALANCED_SHAPES]
    assert rows == [
        (0.95, 0.75, 0.50, 0.25),
        (0.90, 0.45, 0.20, 0.25),
        (0.90, 0.35, 0.10, 0.25),
        (0.80, 0.30, 0.04, 0.26),
    ]
    assert [s.note for s in BALANCED_SHAPES] == [0.0, 0.04, 0.04, 0.04]
    assert (BALANCED.ingest.cap, BALANCED.ingest.share) == (25_000, 0.20)
    assert (BALANCED.headroom, BALANCED.margin, BALANCED.reserve_floor) == (0.05, 0.05, 4_000)
    assert (BALANCED.note_min, BALANCED.note_max) == (200, 2_000)


@pytest.mark.requirement("D7")
def test_layers_that_ask_no_model_run_before_the_one_that_may() -> None:
    assert [layer.strategy for layer in BALANCED_LAYERS] == ["ingest_cap", "dedupe", "evict", "compact"]


def test_no_model_is_asked_unless_one_is_named() -> None:
    assert BALANCED.summarizer is None
    assert BALANCED.mode is Mode.ENFORCE


@pytest.mark.requirement("A0.20")
def test_the_zones_start_where_the_catalogue_says() -> None:
    assert dataclasses.astuple(Zones()) == (0.50, 0.75, 0.90, 0.95)


def test_a_window_beyond_the_last_shape_takes_the_last() -> None:
    only = dataclasses.replace(BALANCED, shapes=BALANCED_SHAPES[:1])
    assert only.shape_for(1_000_000) is BALANCED_SHAPES[0]


@pytest.mark.parametrize("value", [BALANCED, BALANCED_SHAPES[0], Zones(), Layer(strategy="evict")])
def test_a_policy_cannot_be_changed_in_place(value: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 1)  # type: ignore[arg-type]
