import json
from pathlib import Path

import pytest

from benchmarks.retention import main

DATA = Path(__file__).parents[1] / "policies" / "data"


def test_facts_of_the_shipped_session_are_looked_up_in_what_went_up(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--data", str(DATA), "--set", "canary_sessions", "--way", "fresh", "--workers", "1", "--json"]
    assert main(asked) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"] == "canary_sessions"
