import json
from pathlib import Path

import pytest

from benchmarks.retention import main

DATA = Path(__file__).parent / "data"


def test_facts_of_the_shipped_sessions_are_in_the_window_and_no_request_is_over_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--data", str(DATA), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["canary_sessions"]
    assert rows[0]["over"] == 0
    assert rows[0]["stale"] == 0
    assert rows[0]["in_window"] == 1.0
    assert rows[0]["keep_last"] <= 0.5
