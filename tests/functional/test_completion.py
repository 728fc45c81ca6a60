"""What a real shell completes with the script that ``_WEIR_COMPLETE`` has printed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.functional.harness import ROOT

BASH = """
eval "$(_WEIR_COMPLETE=bash_source weir)"
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
