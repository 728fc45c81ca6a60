import dataclasses
from itertools import pairwise
from unittest import mock

import pytest

from policies.limits import shape_for
from policies.settings import BALANCED_LAYERS, BALANCED_SHAPES, ContextSettings, Layer, Mode, Zones

BALANCED = ContextSettings()


@pytest.mark.parametrize(
    ("window", "shape"),
    [(1, 0), (2_048, 0), (4_096, 1), (8_192, 2), (12_288, 3), (32_768, 4), (120_000, 5), (2_000_000, 6)],
)
def test_a_shape_holds_in_its_own_window_the_first_below_it_and_the_last_above(window: int, shape: int) -> None:
    assert shape_for(BALANCED, window) == dataclasses.replace(BALANCED_SHAPES[shape], window=mock.ANY)


@pytest.mark.requirement("D21")
def test_more_window_never_ends_a_batch_lower_or_leaves_less_for_the_extract() -> None:
    def amounts(window: int) -> tuple[float, ...]:
        shape = shape_for(BALANCED, window)
        room = shape.trigger * 0.95 * window
        return room, shape.low_water * room, shape.extract * room, shape.tail * room

    windows = sorted({*range(2_048, 200_000, 97), *(each + n for each in (4_096, 8_192, 32_768) for n in (-1, 1))})
    for less, more in pairwise(windows):
        assert all(a <= b for a, b in zip(amounts(less), amounts(more), strict=True)), more


@pytest.mark.requirement("D21")
def test_balanced_has_the_numbers_that_were_simulated() -> None:
    rows = [(s.trigger, s.low_water, s.extract, s.tail) for s in BALANCED_SHAPES]
    assert rows == [
        (1.0, 1.0, 1.0, 0.06),
        (0.97, 0.77, 0.67, 0.18),
        (0.97, 0.49, 0.43, 0.12),
        (0.955, 0.47, 0.41, 0.126),
        (0.92, 0.42, 0.36, 0.14),
        (0.80, 0.30, 0.22, 0.16),
        (0.80, 0.30, 0.22, 0.16),
    ]
    assert [s.note for s in BALANCED_SHAPES] == [0.0, 0.0, *[0.04] * 5]
    assert [s.evict for s in BALANCED_SHAPES] == [0.0, 0.0, 0.0, *[1.0] * 4]
    assert (BALANCED.ingest.cap, BALANCED.ingest.share) == (25_000, 0.20)
    assert (BALANCED.headroom, BALANCED.margin, BALANCED.reserve_floor) == (0.05, 0.05, 4_000)


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
    assert shape_for(only, 1_000_000) is BALANCED_SHAPES[0]


@pytest.mark.parametrize("value", [BALANCED, BALANCED_SHAPES[0], Zones(), Layer(strategy="evict")])
def test_a_policy_cannot_be_changed_in_place(value: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 1)  # type: ignore[arg-type]
