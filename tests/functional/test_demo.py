"""``weir demo`` as a stranger runs it: a process of its own, no key, no network, no terminal."""

import json
import os
import pty
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


@pytest.mark.requirement("D25")
def test_most_of_what_weir_sends_is_in_the_upstreams_cache(report: dict[str, Any]) -> None:
    managed = report["with"]

    assert 1 <= len(managed["batches"]) <= 4
    assert all(batch["after"] < batch["before"] for batch in managed["batches"])
    assert managed["prefix_reuse"] >= 0.85
    assert managed["cached_tokens"] == pytest.approx(managed["prefix_reuse"] * managed["prompt_tokens"], rel=0.001)


def test_progress_goes_to_stderr_when_a_program_reads_stdout(played: subprocess.CompletedProcess[str]) -> None:
    assert "without Weir, refused: context_length_exceeded" in played.stderr
    assert f"request  {STEPS} of {STEPS}" in played.stderr
    assert "\x1b" not in played.stderr
    assert "\x1b" not in played.stdout


def test_what_was_removed_can_be_read_back_from_the_kept_database(folder: Path, report: dict[str, Any]) -> None:
    removed, name = report["with"]["removed"], report["with"]["conversation"]
    assert removed["messages"] > 0

    def conversations(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["conversations", "show", name, *arguments, "--store", report["store"]])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    rows = json.loads(conversations("--removed", "--json"))
    assert len(rows) == removed["messages"]
    said = {str(message.get("content") or "") for message in load_recording().values}
    user = next(row for row in rows if row["role"] == "user")
    assert conversations("--ref", user["ref"]).removesuffix("\n") in said
    assert (folder / "kept.db").is_file()


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


def test_it_exits_with_1_when_a_request_through_weir_is_not_answered(tmp_path: Path) -> None:
    done = here("--steps", "2", "--window", "2048", "--json", "--keep", str(tmp_path / "w.db"))

    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["with"]["answered"] == 0
    assert found["with"]["refused"] == {"context_length_exceeded": 2}


def test_an_unknown_policy_is_one_line_and_nothing_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = here("--policy", "balancd")

    assert done.exit_code == 1
    assert done.stderr.rstrip().splitlines()[-1] == (
        "weir: --policy: default_policy: no policy balancd; did you mean balanced?"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["mine.db", "no-folder/w.db"])
def test_a_database_that_cannot_be_kept_is_wrong_usage(file: str, tmp_path: Path) -> None:
    (tmp_path / "mine.db").write_text("precious")
    done = here("--keep", str(tmp_path / file))

    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "mine.db").read_text() == "precious"


def test_on_a_terminal_it_draws_two_bars(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "OPENAI_", "NO_COLOR"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy", "demo", "--steps", "6", "--window", "4096", "--fast"],
        cwd=ROOT,
        stdout=slave,
        stderr=slave,
        stdin=slave,
        env={**env, "TERM": "xterm-256color", "TMPDIR": str(tmp_path), "COLUMNS": "120"},
    )
    os.close(slave)
    seen = b""
    while chunk := read(master):
        seen += chunk
    os.close(master)

    assert process.wait(SECONDS) == 0
    drawn = seen.decode("utf-8", "replace")
    assert "\x1b[?25l" in drawn
    assert "without Weir  " in drawn
    assert "of 4,096 tokens" in drawn
    assert "━" in drawn


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


def test_no_line_of_the_log_interrupts_it_and_the_alerts_are_named(folder: Path) -> None:
    result = demo(folder, "--steps", "12", "--fast")

    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"^  \S*weir conversations show demo$", result.stdout, re.MULTILINE)
