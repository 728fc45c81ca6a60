"""Known advisories against the locks, by pip-audit; says "not run" where it could not have found
any.

    python tools/audit.py [--pip-audit "pip-audit -s osv"] requirements.lock …

First a release with a well-known hole has to be reported. Exit codes: 0 nothing is known against
the locks, 1 something is, 75 not run: pip-audit is missing, reaches no advisories, or did not
report the hole.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

KNOWN_BAD = "h11==0.14.0"  # CVE-2025-43859
NOT_RUN = 75  # EX_TEMPFAIL
SECONDS = 600


class NotRun(Exception):
    """There was no audit, and why."""


def advisories(lock: Path, command: list[str], *options: str) -> list[str]:
    """What is known against the releases that a lock names, a line each."""
    asked = [
        *command,
        "--strict",
        "--progress-spinner",
        "off",
        "--format",
        "json",
        "--disable-pip",
        *options,
    ]
    try:
        done = subprocess.run(
            [*asked, "-r", str(lock)], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        told = json.loads(done.stdout)["dependencies"]
    except FileNotFoundError:
        raise NotRun(f"there is no {command[0]}: pip install pip-audit") from None
    except (ValueError, KeyError, TypeError):
        raise NotRun((done.stderr.strip().splitlines() or ["no answer"])[-1]) from None
    except subprocess.TimeoutExpired:
        raise NotRun(f"no answer in {SECONDS} s") from None
    if skipped := [each["name"] for each in told if "skip_reason" in each]:
        raise NotRun(f"nothing is known of {len(skipped)} packages: {skipped[0]} …")
    return [
        f"{each['name']} {each['version']}: {found['id']}"
        for each in told
        for found in each["vulns"]
    ]


def check_itself(command: list[str]) -> None:
    """NotRun unless the well-known hole is reported."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder, "known-bad.txt")
        scratch.write_text(f"{KNOWN_BAD}\n")
        if not advisories(scratch, command, "--no-deps"):
            raise NotRun(f"{KNOWN_BAD} was not reported")


def main() -> int:
    """Audit the locks; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pip-audit", default="pip-audit", help="the command, with options of its own"
    )
    parser.add_argument("locks", nargs="+", type=Path)
    given = parser.parse_args()
    command = shlex.split(given.pip_audit)
    try:
        check_itself(command)
        found = [
            line for lock in given.locks for line in advisories(lock, command, "--require-hashes")
        ]
    except NotRun as why:
        print(f"audit: not run: {why}")
        return NOT_RUN
    for line in sorted(set(found)):
        print(line)
    print(f"audit: {'failed' if found else 'passed'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
