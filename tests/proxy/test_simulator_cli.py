"""``weir simulate`` as a person starts it."""

import os
import re
import signal
import subprocess
import sys

import click
import httpx
from click.testing import CliRunner

from proxy.cli.simulate import simulate


def test_the_help_has_an_example_and_every_option():
    result = CliRunner().invoke(simulate, ["--help"])
    assert result.exit_code == 0
    assert "Example:\n    weir simulate" in result.output
    for option in ("--window", "--dialect", "--port", "--host", "--max-output", "--model", "--steps", "--bound"):
        assert option in result.output
    assert isinstance(simulate, click.Command)


def test_a_wrong_dialect_is_a_usage_error():
    assert CliRunner().invoke(simulate, ["--dialect", "klingon"]).exit_code == 2


def test_it_serves_the_window_it_was_told_prints_how_to_reach_it_and_stops_on_a_signal():
    program = "from proxy.cli.simulate import simulate; simulate()"
    command = [sys.executable, "-c", program, "--port", "0", "--window", "40", "--dialect", "vllm", "--model", "tiny"]
    command += [
        "--steps",
        "1",
        "--bound",
        "--foreign",
        "--stateless",
        "--overflow-in-stream",
        "failed",
        "--stop-at-window",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            first, curl = process.stdout.readline(), process.stdout.readline()
            base = re.match(r"http://127\.0\.0\.1:\d+/v1", first).group()
            assert "vllm, window 40 tokens" in first
            assert curl.startswith(f"curl {base}/chat/completions ")
            assert httpx.get(f"{base}/models", timeout=60).json()["data"][0]["max_model_len"] == 40
            body = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 60}]}
            refused = httpx.post(f"{base}/chat/completions", json=body, timeout=60)
            assert refused.status_code == 400
            assert "maximum context length is 40 tokens" in refused.json()["error"]["message"]
            told = httpx.post(f"{base}/responses", json={"model": "tiny", "input": "word " * 60, "stream": True})
            assert (told.status_code, told.text.count("event: response.failed")) == (200, 1)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        assert "Traceback" not in process.stderr.read()
