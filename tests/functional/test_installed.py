"""The wheel in every kind of place that pip can put it: no checkout near, no network, nothing in the environment."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.functional.harness import ROOT
from tests.profile import soak

pytestmark = pytest.mark.slow

PIP = ["-m", "pip", "--disable-pip-version-check", "-q"]
INSTALL = ["install", "--no-deps", "--no-index", "--no-warn-script-location", "--ignore-installed", "--no-compile"]
DEPENDENCIES = sysconfig.get_path("purelib")
SECONDS = 60
SHOWN = """
import json, proxy
from proxy.config.presets import preset_policies
from proxy.wire.counting import Tokenizer
counters = map(Tokenizer().counter, ("gpt-4o", "gpt-4"))
counted = [[each.count("hello world"), each.reason] for each in counters]
print(json.dumps({"where": proxy.__file__, "counted": counted, "presets": sorted(preset_policies())}))
"""


def ran(*command: str | Path, folder: Path, env: Mapping[str, str] = {}) -> str:
    """What a command prints that runs in ``folder`` with nothing but ``env`` in its environment."""
    clean = {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), **env}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves what it built where it built it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("policies", "proxy", "config"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    ran(sys.executable, *PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", out, ".", folder=source)
    (made,) = out.iterdir()
    return made


def install(kind: str, wheel: Path, folder: Path) -> tuple[Path, Path, Mapping[str, str]]:
    """Puts the wheel there; the interpreter, the command ``weir`` and the environment that it needs."""
    if kind == "venv":
        ran(sys.executable, "-m", "venv", "--without-pip", folder / "env", folder=folder)
        python = folder / "env" / "bin" / "python"
        site = ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip()
        Path(site, "dependencies.pth").write_text(DEPENDENCIES)
        ran(python, *PIP, *INSTALL, wheel, folder=folder)
        return python, python.with_name("weir"), {}
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    env = {"PYTHONPATH": DEPENDENCIES, "PIP_BREAK_SYSTEM_PACKAGES": "1", "PYTHONUSERBASE": str(folder / "user")}
    if kind == "user":
        ran(python, *PIP, *INSTALL, "--user", wheel, folder=folder, env=env)
        return python, folder / "user" / "bin" / "weir", env
    ran(python, *PIP, *INSTALL, "--target", folder / "target", wheel, folder=folder, env=env)
    return python, folder / "target" / "bin" / "weir", {"PYTHONPATH": f"{folder / 'target'}:{DEPENDENCIES}"}


@pytest.mark.requirement("D10", "A1.6")
@pytest.mark.parametrize("kind", ["venv", *(pytest.param(each, marks=soak) for each in ("user", "target"))])
def test_the_wheel_has_all_that_it_needs_wherever_it_is_put(kind: str, wheel: Path, tmp_path: Path) -> None:
    python, weir, env = install(kind, wheel, tmp_path)

    shown = json.loads(ran(python, "-c", SHOWN, folder=tmp_path, env=env))
    assert Path(shown["where"]).is_relative_to(tmp_path)
    assert shown["counted"] == [[2, None], [2, None]]
    assert shown["presets"] == sorted(path.stem for path in (ROOT / "config" / "presets").iterdir())
    (tmp_path / "weir.yaml").write_text(ran(weir, "init", "--example", folder=tmp_path, env=env))
    assert yaml.safe_load((tmp_path / "weir.yaml").read_text())["listen"]["port"] == 8400
    assert "Wrote first.yaml" in ran(weir, "init", "--yes", "--out", "first.yaml", folder=tmp_path, env=env)
