"""What is installed is what the locks name, it needs no network, and the gates say so when they cannot judge."""

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.functional.bare_root import LOOPBACK_UP, can_unshare
from tests.functional.harness import ROOT

pytestmark = pytest.mark.slow

LOCKS = ("requirements.lock", "requirements-dev.lock")
ALLOWED_PTH = {
    r"__editable__\.weir_proxy-[\d.]+\.pth",  # this checkout
    r"a1_coverage\.pth",  # coverage, of the development lock only
    r"distutils-precedence\.pth",  # setuptools
    r"dependencies\.pth",  # tests that borrow another environment's packages
}
FLAGS = "--require-hashes --only-binary :all: --no-deps"
NO_WAY_OUT = (
    f"{LOOPBACK_UP}"
    "import os, sys\n"
    "try:\n    socket.create_connection(('192.0.2.1', 443), 3)\n"
    "except OSError:\n    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    "sys.exit('there is a way out')\n"
)


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / f"{name}.py", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.requirement("S.30")
@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_one_release_of_everything_by_its_hashes(lock: str) -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / lock).read_text().strip())
    for entry in entries:
        assert re.match(r"[\w.-]+(\[[\w,.-]+\])?==\S+ \\\n", entry), entry[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:80]
    assert len(entries) > 40


@pytest.mark.requirement("S.30")
def test_everything_that_installs_does_it_from_the_locks_alone() -> None:
    installs = [
        line
        for name in ("Makefile", "Dockerfile", ".ci/run")
        for line in (ROOT / name).read_text().splitlines()
        if "pip install" in line and not line.strip().startswith("#")
    ]
    assert len(installs) >= 4
    for line in installs:
        from_lock = FLAGS in line and re.search(r"-r \S+\.lock$", line)
        assert from_lock or re.search(r"--no-deps --no-build-isolation (-e )?\.( |$)", line), line
    assert "--exclude-newer" in (ROOT / "Makefile").read_text()


@pytest.mark.requirement("S.30")
def test_what_is_installed_agrees_and_nothing_else_runs_at_every_start() -> None:
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout

    for path in Path(sysconfig.get_path("purelib")).glob("*.pth"):
        assert any(re.fullmatch(allowed, path.name) for allowed in ALLOWED_PTH), path


@pytest.mark.requirement("S.30")
@pytest.mark.skipif(not can_unshare("-rn"), reason="this machine gives no network namespaces")
def test_weir_its_simulator_and_the_sdk_need_no_way_out(tmp_path: Path) -> None:
    played = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", NO_WAY_OUT, "-m", "proxy", "demo", "--steps", "26", "--json"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["with"]["batches"]


@pytest.mark.requirement("S.31")
@pytest.mark.parametrize(
    ("audit", "why"),
    [
        ("no-such-pip-audit", "there is no no-such-pip-audit"),
        ("""sh -c 'echo "ConnectionError: no route to host" >&2; exit 1'""", "no route to host"),
        ("""sh -c 'echo "{\\"dependencies\\": []}"'""", "h11==0.14.0 was not reported"),
        (
            """sh -c 'echo "{\\"dependencies\\": [{\\"name\\": \\"h11\\", \\"skip_reason\\": \\"not found\\"}]}"'""",
            "nothing is known of 1 packages",
        ),
    ],
    ids=["absent", "cut off", "blind", "skipping"],
)
def test_an_audit_that_cannot_find_a_known_hole_has_not_run(audit: str, why: str) -> None:
    done = tool("audit", "--pip-audit", audit, ROOT / "requirements.lock")

    assert done.returncode == 75
    assert done.stdout.startswith("audit: not run: ")
    assert why in done.stdout


@pytest.mark.requirement("S.32")
def test_what_a_lock_brings_in_that_runs_by_itself_is_told(tmp_path: Path) -> None:
    for name, files in {
        "old": {"lib/__init__.py": "", "lib-1.0.dist-info/entry_points.txt": "[console_scripts]\nlib = lib:main\n"},
        "new": {
            "lib/__init__.py": "",
            "lib/fast.cpython-311-x86_64-linux-gnu.so": "",
            "lib_init.pth": "import lib",
            "helper.py": "",
            "lib-1.1.dist-info/entry_points.txt": "[console_scripts]\nlib = lib:main\nlibd = lib:serve\n",
        },
    }.items():
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / "lib-1.0-py3-none-any.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)

    done = tool("contents", tmp_path / "old", tmp_path / "new")

    assert done.stdout.splitlines() == [
        "lib: .pth lib_init.pth",
        "lib: compiled lib/fast",
        "lib: entry point libd = lib:serve",
        "lib: module helper",
    ]
    same = tool("contents", *[sysconfig.get_path("purelib")] * 2)
    assert same.stdout == "nothing new runs by itself\n"
