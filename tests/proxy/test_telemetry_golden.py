"""Names, labels, attributes and fields that leave Weir are a contract: nobody's dashboard breaks by an update."""

import pytest

from tests.golden import telemetry as golden


@pytest.mark.requirement("P15", "A0.139")
def test_the_page_of_metrics_and_what_is_pushed_are_as_they_were() -> None:
    assert golden.metrics_text() == golden.METRICS.read_text(encoding="utf-8")


@pytest.mark.requirement("P15", "A0.139", "A3.14")
async def test_spans_rows_log_lines_and_the_page_of_each_kind_of_request_are_as_they_were() -> None:
    assert await golden.exchanges() == golden.EXCHANGES.read_text(encoding="utf-8")
