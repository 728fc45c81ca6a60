"""Which results are compared, which are merged, and what the merged one says."""

import pytest

from policies.strategies.redundancy import (
    fields,
    merged_text,
)

# -- what is compared ------------------------------------------------------------------------------------------------


# -- what is merged --------------------------------------------------------------------------------------------------


# -- what holds always -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [" " * 200_000, "a" + " " * 200_000, "a:" + " " * 200_000, "a " * 100_000, "[{" * 40_000]
)
def test_no_text_takes_quadratic_time(text: str) -> None:
    fields(text)
    merged_text([text, text + "x"])  # quadratic would take hours
