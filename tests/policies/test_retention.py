import json
from pathlib import Path

import pytest

from benchmarks.retention import main

DATA = Path(__file__).parent / "data"


def test_facts_of_the_shipped_sessions_are_in_the_window_and_no_request_is_over_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--data", str(DATA), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert sorted(rows) == ["canary_sessions", "wording", "wording_unseen"]
    assert all(row["over"] == row["stale"] == 0 for row in rows.values())
    assert rows["canary_sessions"]["in_window"] == 1.0
    assert rows["wording"]["in_window"] >= 0.9
    assert rows["wording_unseen"]["in_window"] >= 0.9
    assert all(row["keep_last"] <= 0.5 for row in rows.values())
