"""Every mark names a row, and the repository speaks of Weir alone."""

import re
import subprocess
from pathlib import Path

from tests.architecture.rows import ROOT, marks, rows


def test_every_requirement_mark_names_a_row_of_the_catalogue_and_none_is_a_soaks_alone() -> None:
    marked = marks()
    assert {mark: files for mark, files in marked.items() if mark not in rows()} == {}
    assert set(marked) - set(marks(ordinary=True)) == set()


def test_the_catalogue_has_no_row_twice() -> None:
    text = (ROOT / "docs" / "development" / "requirements.md").read_text(encoding="utf-8")
    ids = re.findall(r"^\| ((?:A[0-4]\.|R\.|S\.|D|P)\d+) \|", text, re.MULTILINE)
    assert len(ids) == len(set(ids)) > 300


def tracked() -> list[Path]:
    """The files of the repository as git knows them, or all but the environment where there is no git."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / name for name in listed.stdout.split()]


def test_locks_pin_by_hash_and_name_no_index() -> None:
    for name in ("requirements.lock", "requirements-dev.lock"):
        text = (ROOT / name).read_text(encoding="utf-8")
        pins = re.findall(r"^[a-z0-9_.-]+==\S+", text, re.MULTILINE | re.IGNORECASE)
        assert len(pins) > 40
        assert text.count("--hash=sha256:") >= len(pins)
        assert "http://" not in text
        assert "https://" not in text
        assert "--index" not in text


def test_litellm_is_pinned_exactly() -> None:
    assert "\nlitellm==1.106.2 " in (ROOT / "requirements.lock").read_text(encoding="utf-8")


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    hosts = ["".join(parts) for parts in (("py", "pi", r"\.org"), ("python", "hosted"), ("registry", r"\.npm", "js"))]
    words = re.compile("|".join(["/[w]ork/(?:main|shared)", *hosts]))
    found = []
    for path in tracked():
        if path.suffix in {".lock", ".jsonl", ".png"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.name != "test_rows.py" and words.search(text):
            found.append(path.name)
    assert not found
