"""``weir demo`` as a stranger runs it: a process of its own, no key, no network, no terminal."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.cli.demo import load_recording
from tests.functional.harness import ROOT

pytestmark = pytest.mark.slow

STEPS = 36
SECONDS = 60


def demo(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "OPENAI_"))}
    return subprocess.run(
        [sys.executable, "-m", "proxy", "demo", *arguments],
        cwd=folder,
        env={**env, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def played(folder: Path) -> subprocess.CompletedProcess[str]:
    """One run for several tests, with an environment that must not matter."""
    noise = {"HTTP_PROXY": "http://127.0.0.1:9", "OPENAI_BASE_URL": "http://127.0.0.1:9", "WEIR_POLICY": "no-such"}
    return demo(folder, "--json", "--steps", str(STEPS), "--keep", "kept.db", **noise)


@pytest.fixture(scope="module")
def report(played: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert played.returncode == 0, played.stderr
    found: dict[str, Any] = json.loads(played.stdout)
    return found


@pytest.mark.requirement("A0.3", "A1.1")
def test_requests_that_fail_without_weir_are_all_answered_with_it(report: dict[str, Any]) -> None:
    direct, managed = report["without"], report["with"]

    assert 0 < direct["answered"] < STEPS
    assert direct["refused"] == {"context_length_exceeded": STEPS - direct["answered"]}
    assert managed["answered"] == STEPS
    assert managed["refused"] == {}
    assert managed["largest_prompt"] + report["max_tokens"] <= report["window"] == 8192
    assert managed["literals"]["seen"] > direct["literals"]["seen"]


def here(*arguments: str) -> Result:
    """The command in this process: it need not start again for what goes wrong at once."""
    return CliRunner().invoke(main, ["demo", *arguments])


def test_without_a_terminal_it_prints_plain_lines_a_table_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = here("--steps", "8", "--window", "4096")

    assert done.exit_code == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert re.search(r"with Weir, \d,\d{3} > \d,\d{3} tokens", done.stdout)
    assert "requests answered" in done.stdout
    assert "8 of 8" in done.stdout
    lines = done.stdout.rstrip().splitlines()
    assert [line.split("weir ")[1].split()[0] for line in lines[-3:]] == ["init", "serve", "run"]
    assert all(len(line) <= 80 for line in lines if "WEIR_STORE" not in line)
    assert next(tmp_path.iterdir()).name.startswith("weir-demo-")


def read(master: int) -> bytes:
    """What the terminal shows next; nothing once the program has ended (Linux says so with EIO)."""
    try:
        return os.read(master, 65536)
    except OSError:
        return b""


def test_the_recording_is_whole_and_carries_its_notice() -> None:
    recording = load_recording()
    called = [c["id"] for m in recording.values for c in m.get("tool_calls") or ()]
    answered = [m["tool_call_id"] for m in recording.values if m["role"] == "tool"]
    data = ROOT / "proxy" / "cli" / "data"

    assert recording.values[recording.requests[-1]] is recording.values[-1]
    assert set(answered) <= set(called)
    assert 60 <= len(recording.requests) <= 80
    assert (data / "recorded_run.jsonl").stat().st_size < 120_000
    notice = json.loads((data / "recorded_run.jsonl").read_text())["meta"]["notice"]
    assert "Copyright (c) 2024 Sierra" in notice
    assert "Permission is hereby granted" in notice
    assert "Copyright (c) 2024 Sierra" in (data / "NOTICE.md").read_text()
