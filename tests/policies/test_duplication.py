"""No text takes quadratic time to be compared or merged."""

import pytest

from policies.strategies.redundancy import (
    fields,
    merged_text,
)


@pytest.mark.parametrize(
    "text", [" " * 200_000, "a" + " " * 200_000, "a:" + " " * 200_000, "a " * 100_000, "[{" * 40_000]
)
def test_no_text_takes_quadratic_time(text: str) -> None:
    fields(text)
    merged_text([text, text + "x"])  # quadratic would take hours
