"""``weir completion``: what a real shell completes with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.harness import ROOT

BASH = """
eval "$(weir completion bash)"
complete -p weir
COMP_WORDS=(weir keys rotate --gr) COMP_CWORD=3; _weir_completion weir; echo "${COMPREPLY[@]}"
"""


def run(*command: str, folder: Path) -> str:
    (folder / "weir").write_text(f'#!/bin/sh\nexec {sys.executable} -m proxy "$@"\n')
    (folder / "weir").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    said = run(bash, "-c", BASH, folder=tmp_path).splitlines()

    assert said == ["complete -o nosort -F _weir_completion weir", "--grace"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_others_are_given_a_script_that_they_can_read(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell]).stdout

    assert "_WEIR_COMPLETE" in script
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "--no-execute", "/dev/stdin"], input=script, text=True, check=True, timeout=60)
