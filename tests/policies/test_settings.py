import dataclasses

import pytest

from policies.settings import Zones


@pytest.mark.requirement("A0.20")
def test_the_zones_start_where_the_catalogue_says() -> None:
    assert dataclasses.astuple(Zones()) == (0.50, 0.75, 0.90, 0.95)
